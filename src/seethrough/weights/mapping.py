"""Mapping a weight file into memory, read-only. Knows regular files, not what is in them."""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from seethrough.errors import ModelNotFoundError, WeightFormatError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def map_file(path: Path) -> NDArray[np.uint8]:
    """The file's bytes [size] as a read-only view; pages are read when touched.

    Raises `ModelNotFoundError` if there is no such file, `WeightFormatError` for anything that is
    no regular file, is empty, or is the Git LFS pointer that a clone without LFS leaves behind.
    """
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise WeightFormatError(path, f"cannot be opened: {_reason(error)}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise WeightFormatError(path, "is not a regular file")
        if status.st_size == 0:
            raise WeightFormatError(path, "is empty (0 bytes). Fetch it again.")
        try:
            mapped = mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise WeightFormatError(path, f"cannot be mapped: {_reason(error)}") from None
    finally:
        os.close(descriptor)
    data = np.frombuffer(mapped, dtype=np.uint8)
    if data[: len(_LFS_POINTER)].tobytes() == _LFS_POINTER:
        raise WeightFormatError(
            path,
            "is a Git LFS pointer, not the weights. Run `git lfs pull` or fetch the file itself.",
        )
    return data


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
