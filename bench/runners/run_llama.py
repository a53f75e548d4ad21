"""llama.cpp's side: its C functions through llama-cpp-python's low-level bindings.

The high-level class is not used: it copies logits, keeps candidates in Python and looks for common
prefixes. Here a token costs one `llama_decode`, one argmax in NumPy over the logits where they lie,
and a few writes into a batch that is allocated once; llama.cpp's own sampler chain is not run.

The cache is emptied before every run. Context settings are llama.cpp's defaults (KV in f16, flash
attention "auto", 512 tokens a micro-batch) but for the number of threads and the sizes. Batches run
in a second context over the same weights, whose sequences have each their own part of the cache, as
llama.cpp's own batched benchmark has it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp as package
import numpy as np
from llama_cpp import llama_cpp as c
from serve import Setup, main

_N_BATCH = 512
_SERVER_BATCH = 2048  # llama-server's own, in micro-batches of 512
_FIRST = 4  # tokens of those that decode before the long prompt comes


class Context:
    """A llama.cpp context with one batch that is used for every call."""

    def __init__(
        self, model: Any, threads: int, sequences: int, tokens: int, n_batch: int = _N_BATCH
    ) -> None:
        params = c.llama_context_default_params()
        # A multiple of 256 is what llama.cpp rounds a sequence's share up to.
        params.n_ctx = -(-tokens // 256) * 256 * sequences
        params.n_batch, params.n_ubatch = n_batch, _N_BATCH
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = threads
        self.flash_attn, self.type_k = params.flash_attn_type, params.type_k
        self._context = c.llama_init_from_model(model, params)
        if not self._context:
            raise RuntimeError("llama_init_from_model failed")
        self._vocab = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
        self._memory = c.llama_get_memory(self._context)
        self._batch = c.llama_batch_init(n_batch, 0, 1)

    def close(self) -> None:
        """Free the cache and the batch."""
        c.llama_batch_free(self._batch)
        c.llama_free(self._context)

    def clear(self) -> None:
        """Forget every sequence: nothing of a run helps the next."""
        c.llama_memory_clear(self._memory, True)

    def put(self, row: int, token: int, position: int, sequence: int, wanted: bool) -> None:
        """Write one token into the batch."""
        batch = self._batch
        batch.token[row] = token
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence
        batch.logits[row] = wanted

    def decode(self, rows: int) -> None:
        """Run the first rows of the batch."""
        self._batch.n_tokens = rows
        code = c.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def greedy(self, row: int) -> int:
        """The best token of a row whose logits were wanted; waits for the result."""
        return int(self.logits(row).argmax())

    def logits(self, row: int) -> np.ndarray:
        """The logits of a row that were wanted, where they lie until the next decode."""
        logits = c.llama_get_logits_ith(self._context, row)
        address = ctypes.addressof(logits.contents)
        return np.frombuffer((ctypes.c_float * self._vocab).from_address(address), np.float32)

    def prefill(self, prompts: list[list[int]]) -> list[int]:
        """Compute the prompts, one after the other, in full batches; the first token of each."""
        first: list[int] = []
        rows, ends = 0, []
        for sequence, position, token, last in _each_token(prompts):
            self.put(rows, token, position, sequence, last)
            if last:
                ends.append(rows)
            rows += 1
            if rows == _N_BATCH:
                first += self._flush(rows, ends)
                rows, ends = 0, []
        return first + (self._flush(rows, ends) if rows else [])

    def _flush(self, rows: int, ends: list[int]) -> list[int]:
        self.decode(rows)
        if not ends:
            c.llama_synchronize(self._context)
        return [self.greedy(row) for row in ends]


class LlamaCpp:
    """One model with two contexts: one for single requests, one (made when needed) for batches."""

    def __init__(self, setup: Setup) -> None:
        self._quiet = c.llama_log_callback(lambda level, text, data: None)
        c.llama_log_set(self._quiet, ctypes.c_void_p(0))
        c.llama_backend_init()
        self._setup = setup
        self._model = c.llama_model_load_from_file(
            setup.model.encode(), c.llama_model_default_params()
        )
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {setup.model}")
        self._single = Context(self._model, setup.threads, 1, setup.context)
        self._many: Context | None = None
        self.about = {
            "version": f"llama-cpp-python {package.__version__}, {_ggml()}",
            "build": " ".join(c.llama_print_system_info().decode().split())
            + f" n_batch {_N_BATCH}, type_k {self._single.type_k} (1 is f16),"
            + f" flash_attn {self._single.flash_attn} (-1 is auto)",
        }

    def tg(self, prompt: list[int], n: int) -> float:
        """Seconds of n decode steps after the prompt's own token."""
        context = self._single
        context.clear()
        (token,) = context.prefill([prompt])
        started = perf_counter()
        for position in range(len(prompt), len(prompt) + n):
            context.put(0, token, position, 0, True)
            context.decode(1)
            token = context.greedy(0)
        return perf_counter() - started

    def pp(self, prompt: list[int]) -> float:
        """Seconds from the prompt to its first token."""
        self._single.clear()
        started = perf_counter()
        self._single.prefill([prompt])
        return perf_counter() - started

    def batch(self, prompts: list[list[int]], n: int) -> float:
        """Seconds for all prompts and n output tokens of each."""
        if self._many is None:
            setup = self._setup
            self._many = Context(self._model, setup.threads, setup.requests, setup.request_tokens)
        context = self._many
        context.clear()
        started = perf_counter()
        tokens = context.prefill(prompts)
        for step in range(n - 1):
            for row, token in enumerate(tokens):
                context.put(row, token, len(prompts[row]) + step, row, True)
            context.decode(len(tokens))
            tokens = [context.greedy(row) for row in range(len(tokens))]
        return perf_counter() - started

    def beside(self, prompts: list[list[int]], prompt: list[int]) -> tuple[float, list[float]]:
        """As llama-server fills a batch: a token of every request that generates, then as much of
        the prompt as fits.
        """
        setup, long = self._setup, len(prompts)
        context = Context(self._model, setup.threads, long + 1, len(prompt) + 512, _SERVER_BATCH)
        try:
            tokens = context.prefill(prompts)
            positions = [len(ids) for ids in prompts]
            for _ in range(_FIRST):
                self._decode_all(context, tokens, positions)
                context.decode(long)
                tokens = [context.greedy(row) for row in range(long)]
            times, done = [perf_counter()], 0
            while done < len(prompt):
                self._decode_all(context, tokens, positions)
                part = prompt[done : done + _SERVER_BATCH - long]
                for row, token in enumerate(part, start=long):
                    position = done + row - long
                    context.put(row, token, position, long, position == len(prompt) - 1)
                done += len(part)
                context.decode(long + len(part))
                tokens = [context.greedy(row) for row in range(long)]
                times.append(perf_counter())
            gaps = [b - a for a, b in pairwise(times) for _ in prompts]
            return times[-1] - times[0], gaps
        finally:
            context.close()

    def _decode_all(self, context: Context, tokens: list[int], positions: list[int]) -> None:
        """The first rows of a batch: the newest token of every sequence that generates."""
        for row, token in enumerate(tokens):
            context.put(row, token, positions[row], row, True)
            positions[row] += 1

    def logits(self, prompt: list[int], path: str) -> float:
        """Every position's logits into a file."""
        context = self._single
        context.clear()
        started, rows = perf_counter(), []
        for first in range(0, len(prompt), _N_BATCH):
            part = prompt[first : first + _N_BATCH]
            for row, token in enumerate(part):
                context.put(row, token, first + row, 0, True)
            context.decode(len(part))
            rows += [context.logits(row).copy() for row in range(len(part))]
        np.save(path, np.stack(rows))
        return perf_counter() - started


def _each_token(prompts: list[list[int]]) -> Iterator[tuple[int, int, int, bool]]:
    """(sequence, position, token, whether it is the prompt's last) of each token."""
    for sequence, prompt in enumerate(prompts):
        for position, token in enumerate(prompt):
            yield sequence, position, token, position == len(prompt) - 1


def _ggml() -> str:
    (library,) = (Path(package.__file__).parent / "lib").glob("libggml-base.so")
    ggml = ctypes.CDLL(str(library))
    ggml.ggml_version.restype = ggml.ggml_commit.restype = ctypes.c_char_p
    return f"ggml {ggml.ggml_version().decode()} commit {ggml.ggml_commit().decode()}"


if __name__ == "__main__":
    main(LlamaCpp)
