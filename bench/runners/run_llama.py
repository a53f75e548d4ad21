"""llama.cpp's side: its C functions through llama-cpp-python's low-level bindings.

The high-level class is not used: it copies logits, keeps candidates in Python and looks for common
prefixes. Here a token costs one `llama_decode`, one argmax in NumPy over the logits where they lie,
and a few writes into a batch that is allocated once; llama.cpp's own sampler chain is not run.

The cache is emptied before every run. Context settings are llama.cpp's defaults (KV in f16, flash
attention "auto", 512 tokens a micro-batch) but for the number of threads and the sizes. Batches run
in a second context over the same weights, whose sequences have each their own part of the cache, as
llama.cpp's own batched benchmark has it.

Requests that join while others run are put together as llama-server does it (`pre_decode` in
tools/server/server-context.cpp), with its default n_batch of 2,048 in micro-batches of 512: first
the newest token of every request that generates, then prompts, in the order of the slots, until
n_batch tokens are in the batch; one llama_decode; the next token of every request whose logits
came. Every slot has its own part of the cache, as the server has it where the number of slots is
given.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp as package
import numpy as np
from llama_cpp import llama_cpp as c
from serve import Setup, Step, main

_N_BATCH = 512
_SERVER_N_BATCH = 2048


@dataclass(slots=True)
class Slot:
    """A request of the server: as much of its prompt as is computed, then its newest token."""

    prompt: list[int]
    n: int
    position: int = 0
    generated: int = 0
    token: int | None = None


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
        self.sequences, self.n_batch = sequences, n_batch

    def close(self) -> None:
        """Give back its memory."""
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
            if rows == self.n_batch:
                first += self._flush(rows, ends)
                rows, ends = 0, []
        return first + (self._flush(rows, ends) if rows else [])

    def _flush(self, rows: int, ends: list[int]) -> list[int]:
        self.decode(rows)
        if not ends:
            c.llama_synchronize(self._context)
        return [self.greedy(row) for row in ends]


class LlamaCpp:
    """One model with two contexts: one for single requests, one (made when needed) for many."""

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
        self._slots: dict[int, Slot] = {}
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
        context = self._context_for(len(prompts), self._setup.request_tokens)
        context.clear()
        started = perf_counter()
        tokens = context.prefill(prompts)
        for step in range(n - 1):
            for row, token in enumerate(tokens):
                context.put(row, token, len(prompts[row]) + step, row, True)
            context.decode(len(tokens))
            tokens = [context.greedy(row) for row in range(len(tokens))]
        return perf_counter() - started

    def add(self, name: int, prompt: list[int], n: int) -> None:
        """Give a request its slot."""
        self._slots[name] = Slot(prompt, n)

    def step(self) -> Step:
        """One round of the server's loop."""
        context = self._server()
        rows, wanted = 0, []
        for name, slot in self._slots.items():
            if slot.token is not None:
                context.put(rows, slot.token, slot.position, name, True)
                wanted.append((rows, name))
                slot.position += 1
                rows += 1
        for name, slot in self._slots.items():
            if slot.token is not None:
                continue
            for token in slot.prompt[slot.position : slot.position + context.n_batch - rows]:
                slot.position += 1
                last = slot.position == len(slot.prompt)
                context.put(rows, token, slot.position - 1, name, last)
                if last:
                    wanted.append((rows, name))
                rows += 1
        context.decode(rows)
        for row, name in wanted:
            slot = self._slots[name]
            slot.token = context.greedy(row)
            slot.generated += 1
            if slot.generated == slot.n:
                del self._slots[name]
        return Step([name for _, name in wanted], rows)

    def drop(self) -> None:
        """Empty the slots."""
        self._slots.clear()
        self._server().clear()

    def _server(self) -> Context:
        setup = self._setup
        return self._context_for(setup.beside + 1, setup.context, _SERVER_N_BATCH)

    def _context_for(self, sequences: int, tokens: int, n_batch: int = _N_BATCH) -> Context:
        """The context for many, made anew where it was made for another number of them."""
        wanted = (sequences, max(n_batch, sequences))
        if self._many is not None and (self._many.sequences, self._many.n_batch) != wanted:
            self._many.close()
            self._many = None
        if self._many is None:
            self._many = Context(self._model, self._setup.threads, sequences, tokens, wanted[1])
        return self._many

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
