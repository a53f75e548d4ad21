"""Makes the small models that the engine's tests run, and opens them.

The tiny model is a random llama that transformers wrote. The rigged model is a GPT-2 whose
attention and MLP add nothing and whose positions choose the next token: it says its script.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.numpy import save_file
from tokenizers import decoders, pre_tokenizers, processors

from seethrough import LLM

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONTEXT = 64  # of the rigged model
SPECIALS = ("<s>", "<|end|>", "<|eot|>", "<|start|>")
WORDS = ("Ġhello", "Ġworld", "gam", "ma!", "ï¿½", "ĊĊ")  # byte-level: ' hello', U+FFFD, newlines


class Models:
    """Opens models, each folder with each choice of settings once; checks them after a test."""

    def __init__(self) -> None:
        self._open: dict[tuple[Any, ...], LLM] = {}

    def __call__(self, folder: Path | str, **settings: Any) -> LLM:
        if settings.get("block_size", 16) % 16:  # `cpu` reads sixteen positions at once
            settings.setdefault("backend", "reference")
        key = (folder, *sorted(settings.items()))
        if key not in self._open:
            self._open[key] = LLM(folder, threads=1, **settings)
        return self._open[key]

    def check(self) -> None:
        """Nothing runs, and every block is free, once."""
        for llm in self._open.values():
            engine = llm._engine
            llm.jobs.end_abandoned()
            engine.check()
            assert not engine.busy, "a request was left running"
            assert engine.pool.free_blocks == engine.pool.num_blocks
            assert not llm.jobs, "a job was left behind"


# ---------------------------------------------------------------------------------- tokenizers


def byte_tokenizer(
    words: Sequence[str] = (), specials: Sequence[str] = SPECIALS, bos: str | None = None
) -> tokenizers.Tokenizer:
    """Ids 0 to 255 are the bytes; then whole words, which text never becomes; then specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    vocab = {piece: i for i, piece in enumerate([*alphabet, *words])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    return dressed(backend, specials, bos)


def trained_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE of 300 entries."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=296,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text = "the quick brown fox jumps over the lazy dog and the other dog sleeps on the floor "
    backend.train_from_iterator([text] * 4, trainer)
    return dressed(backend, SPECIALS, None)


def dressed(
    backend: tokenizers.Tokenizer, specials: Sequence[str], bos: str | None
) -> tokenizers.Tokenizer:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(specials))
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return backend


@functools.cache
def alphabet_bytes() -> dict[str, int]:
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def _byte_of(piece: str) -> int:
    return alphabet_bytes()[piece]


def write_tokenizer(
    folder: Path,
    backend: tokenizers.Tokenizer,
    *,
    eos: str | None = "<|end|>",
    bos: str | None = None,
    template: str | None = CHAT_TEMPLATE,
) -> None:
    """tokenizer.json and tokenizer_config.json."""
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": eos, "bos_token": bos, "chat_template": template}
    _write(folder / "tokenizer_config.json", {k: v for k, v in config.items() if v is not None})


# ---------------------------------------------------------------------------------- the tiny llama


def tiny_llama(folder: Path, *, vocab_size: int | None = None, seed: int = 0) -> Path:
    """A random llama: 2 layers, 4 heads, 2 key/value heads, context 128; see `tiny_model`."""
    return tiny_model(folder, "llama", vocab_size=vocab_size, seed=seed)


def tiny_model(
    folder: Path, kind: str, *, vocab_size: int | None = None, seed: int = 0, **more: Any
) -> Path:
    """A random model of a family, as transformers saves it, with a trained tokenizer."""
    backend = trained_tokenizer()
    sizes = {
        "vocab_size": vocab_size or backend.get_vocab_size(),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,  # wide, so that different prompts get different answers
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": backend.token_to_id("<|end|>"),
        "pad_token_id": None,
    }
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(kind, **(sizes | more))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write_tokenizer(folder, backend)
    return folder


@functools.cache
def _oracle(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def oracle_logits(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """transformers' logits for every position. [n] -> [n, V]"""
    with torch.no_grad():
        logits = _oracle(folder)(torch.tensor([list(ids)])).logits[0]
    return logits.numpy()


def oracle_logprobs(folder: Path, ids: Sequence[int]) -> np.ndarray:
    """transformers' log-softmax for every position, in float64. [n] -> [n, V]"""
    logits = oracle_logits(folder, ids).astype(np.float64)
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


# ---------------------------------------------------------------------------------- the rigged one


class Rig:
    """A vocabulary of bytes, words and specials, and models that say what they are told."""

    def __init__(self, bos: str | None = None) -> None:
        self.bos = bos
        self.backend = byte_tokenizer(WORDS, bos=bos)
        self.size = self.backend.get_vocab_size()

    def id(self, piece: str) -> int:
        """The id of a word or special."""
        return int(self.backend.token_to_id(piece))

    def ids(self, *parts: str | bytes | int) -> list[int]:
        """Text and bytes as byte tokens; a special or word as its own token; ids as they are."""
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif part in WORDS or part in SPECIALS:
                assert isinstance(part, str)
                ids.append(self.id(part))
            else:
                ids += part.encode() if isinstance(part, str) else part
        return ids

    def write(
        self,
        folder: Path,
        *parts: str | bytes | int,
        config: Mapping[str, Any] | None = None,
        generation: Mapping[str, Any] | None = None,
        eos: str | None = "<|end|>",
        extra_rows: int = 0,
        sharpness: float = 8.0,
        nan_at: int | None = None,
        nan_after: int | None = None,
    ) -> Path:
        """A model that, after a prompt of one token, says `parts`, and then "~" to the end.

        The scripted token's logit is `sharpness`, all others are 0. `nan_at` spoils a position,
        `nan_after` whatever follows that token.
        """
        folder.mkdir(parents=True, exist_ok=True)
        script = self.ids(*parts)
        script += [ord("~")] * (CONTEXT - len(script))
        d, vocab = CONTEXT, self.size + extra_rows
        embed = np.zeros((vocab, d), dtype=np.float32)
        positions = np.eye(CONTEXT, d, dtype=np.float32) * 10
        head = np.zeros((vocab, d), dtype=np.float32)
        # LayerNorm turns the one-hot row p into `lead` at p and, with the bias, 0 elsewhere.
        lead = 1 / np.sqrt(1 / d - 1 / d**2)
        head[script[:CONTEXT], np.arange(CONTEXT)] = sharpness / lead
        if nan_at is not None:
            positions[nan_at] = np.nan
        if nan_after is not None:
            embed[nan_after] = np.nan
        weights = {
            "transformer.wte.weight": embed,
            "transformer.wpe.weight": positions,
            "lm_head.weight": head,
            **_silent_layer(d),
            "transformer.ln_f.weight": np.ones(d, dtype=np.float32),
            "transformer.ln_f.bias": np.full(d, lead / d, dtype=np.float32),
        }
        save_file(weights, folder / "model.safetensors")
        sizes = {"n_embd": d, "n_head": 4, "n_layer": 1, "n_positions": CONTEXT, "n_inner": 8}
        base = {"model_type": "gpt2", "vocab_size": vocab, "tie_word_embeddings": False}
        _write(folder / "config.json", {**base, **sizes, **(config or {})})
        if generation is not None:
            _write(folder / "generation_config.json", generation)
        write_tokenizer(folder, self.backend, eos=eos, bos=self.bos)
        return folder


def _silent_layer(d: int) -> dict[str, np.ndarray]:
    shapes = {
        "ln_1.weight": (d,),
        "ln_1.bias": (d,),
        "attn.c_attn.weight": (d, 3 * d),
        "attn.c_attn.bias": (3 * d,),
        "attn.c_proj.weight": (d, d),
        "attn.c_proj.bias": (d,),
        "ln_2.weight": (d,),
        "ln_2.bias": (d,),
        "mlp.c_fc.weight": (d, 8),
        "mlp.c_fc.bias": (8,),
        "mlp.c_proj.weight": (8, d),
        "mlp.c_proj.bias": (d,),
    }
    return {f"transformer.h.0.{k}": np.zeros(s, dtype=np.float32) for k, s in shapes.items()}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def prompt(*ids: int) -> dict[str, list[int]]:
    """A prompt of ids."""
    return {"prompt_token_ids": list(ids)}


def streamed(llm: LLM, text: str | dict[str, Any], **sampling: Any) -> tuple[str, list[int], Any]:
    """Text and ids joined from the pieces of a stream, and its output."""
    stream = llm.stream(text, **sampling)
    pieces = list(stream)
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    joined = "".join(p.text for p in pieces)
    return joined, [i for p in pieces for i in p.token_ids], stream.output().outputs[0]
