"""Opens a tiny random model of every family, some also quantized, with a tokenizer of its size."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import tokenizers
from engine_forge import SPECIALS, alphabet_bytes, dressed, write_tokenizer
from proof import House
from test_gguf_families import Q4_0, Q8_0, stored, write
from tiny_models import FAMILIES, VOCAB, TinyModels

QUANTIZED = {"llama q8_0": Q8_0, "qwen3 q4_0": Q4_0, "gemma3 q8_0": Q8_0}
HOUSES = (*FAMILIES, *QUANTIZED)


def little_tokenizer() -> tokenizers.Tokenizer:
    """As many ids as the tiny models have: printable ASCII, parts of characters, specials."""
    known = [*range(0x20, 0x7F), 0xC3, 0xE2, *range(0x80, 0x80 + VOCAB - 95 - 2 - len(SPECIALS))]
    spelling = {byte: char for char, byte in alphabet_bytes().items()}
    vocab = {spelling[byte]: i for i, byte in enumerate(known)}
    return dressed(tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [])), SPECIALS, None)


def little_metadata(backend: tokenizers.Tokenizer) -> Callable[[gguf.GGUFWriter], None]:
    def add(writer: gguf.GGUFWriter) -> None:
        vocab = backend.get_vocab(with_added_tokens=True)
        pieces = sorted(vocab, key=vocab.__getitem__)
        pieces[VOCAB - len(SPECIALS) - 1] = "ab"  # such a file has one merge at least
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list(pieces)
        writer.add_token_types([3 if piece in SPECIALS else 1 for piece in pieces])
        writer.add_token_merges(["a b"])
        writer.add_eos_token_id(vocab["<|end|>"])

    return add


class Houses:
    """Each model once, for all tests."""

    def __init__(self, tiny: TinyModels, root: Path) -> None:
        self._tiny = tiny
        self._root = root
        self._paths: dict[str, Path] = {}
        self._open: dict[tuple[str, int], House] = {}

    def __call__(self, name: str, threads: int = 1) -> House:
        if (name, threads) not in self._open:
            self._open[name, threads] = House(self.path(name), threads)
        return self._open[name, threads]

    def path(self, name: str) -> Path | str:
        """Where a model lies; a name that is not one of ours is a model that was pulled."""
        if name not in HOUSES:
            return name
        if name not in self._paths:
            self._paths[name] = self._write(name)
        return self._paths[name]

    def _write(self, name: str) -> Path:
        model = self._tiny[name.split()[0]]
        if name in QUANTIZED:
            path = self._root / f"{name.replace(' ', '-')}.gguf"
            metadata = little_metadata(little_tokenizer())
            write(path, model, stored(model), QUANTIZED[name], metadata)
            return path
        folder = self._root / name
        shutil.copytree(model.folder, folder)
        write_tokenizer(folder, little_tokenizer())
        return folder
