"""Tiny random models of every family, made and saved by transformers, the oracle.

A case is a transformers config, and how its config.json may be spelled otherwise. The oracle loads
the folder as it was written, so that both sides read the same spelling.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from numpy.typing import NDArray

from seethrough.model.compiled import CompiledProgram
from seethrough.model.load import (
    ModelWeights,
    Placement,
    build_model,
    build_program,
    understand,
)
from seethrough.model.program import Program
from seethrough.weights.catalog import default_cache_dir
from seethrough.weights.checkpoint import open_checkpoint
from seethrough.weights.files import resolve_model

Array = NDArray[Any]
Json = dict[str, Any]

VOCAB, CONTEXT = 128, 128
_SIZES: Json = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
_LLAMA3: Json = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def old_rope(theta: float, scaling: Json | None) -> Callable[[Json], Json]:
    """The spelling before `rope_parameters`."""

    def spell(config: Json) -> Json:
        del config["rope_parameters"]
        return config | {"rope_theta": theta, "rope_scaling": scaling}

    return spell


def with_nulls(*names: str) -> Callable[[Json], Json]:
    return lambda config: config | dict.fromkeys(names)


def without(*names: str) -> Callable[[Json], Json]:
    return lambda config: {k: v for k, v in config.items() if k not in names}


def old_gemma(config: Json) -> Json:
    """As the first Gemma 3 checkpoints spell it; the scaling means the global layers."""
    config = without("rope_parameters", "layer_types", "_sliding_window_pattern")(config)
    return config | {
        "rope_theta": 50_000.0,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "sliding_window_pattern": 3,
    }


@dataclass(frozen=True)
class Case:
    """What to build, and how to spell its config.json."""

    config: Callable[[], Any]
    spell: Callable[[Json], Json] = lambda config: config


CASES: dict[str, Case] = {
    "llama": Case(lambda: hf.LlamaConfig(**_SIZES)),
    "llama-mha-tied-llama3": Case(
        lambda: hf.LlamaConfig(
            **_SIZES | {"num_key_value_heads": 4},
            rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **_LLAMA3},
            tie_word_embeddings=True,
        )
    ),
    "llama-mqa-old-linear-biases": Case(
        lambda: hf.LlamaConfig(
            **_SIZES | {"num_key_value_heads": 1},
            attention_bias=True,
            mlp_bias=True,
            rms_norm_eps=1e-2,
        ),
        old_rope(300.0, {"type": "linear", "factor": 4}),
    ),
    "llama-old-llama3": Case(
        lambda: hf.LlamaConfig(**_SIZES), old_rope(2_000.0, {"rope_type": "llama3", **_LLAMA3})
    ),
    "llama-new-linear-relu": Case(
        lambda: hf.LlamaConfig(
            **_SIZES,
            hidden_act="relu",
            rope_parameters={"rope_type": "linear", "rope_theta": 1e3, "factor": 2.5},
        )
    ),
    "llama-60-heads-of-16": Case(
        lambda: hf.LlamaConfig(**_SIZES | {"hidden_size": 60}, head_dim=16)
    ),
    "llama-nulls": Case(
        lambda: hf.LlamaConfig(**_SIZES | {"num_key_value_heads": 4}),
        lambda config: with_nulls("num_key_value_heads", "head_dim", "sliding_window")(
            old_rope(10_000.0, None)(config)
        ),
    ),
    "mistral": Case(lambda: hf.MistralConfig(**_SIZES, sliding_window=8, head_dim=24)),
    "mistral-full-gelu": Case(
        lambda: hf.MistralConfig(
            **_SIZES, sliding_window=None, hidden_act="gelu", tie_word_embeddings=True
        )
    ),
    "qwen2": Case(lambda: hf.Qwen2Config(**_SIZES, tie_word_embeddings=True)),
    "qwen2-max-window-layers": Case(
        lambda: hf.Qwen2Config(
            **_SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=2
        ),
        without("layer_types"),
    ),
    "qwen3": Case(lambda: hf.Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=True)),
    "qwen3-layer-types-biases": Case(
        lambda: hf.Qwen3Config(
            **_SIZES,
            head_dim=16,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    ),
    "gemma3": Case(
        lambda: hf.Gemma3TextConfig(
            **_SIZES | {"num_hidden_layers": 7},
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=16,
            final_logit_softcapping=12.0,
        )
    ),
    "gemma3-old-spelling": Case(
        lambda: hf.Gemma3TextConfig(
            **_SIZES,
            head_dim=24,
            sliding_window=6,
            query_pre_attn_scalar=24,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        old_gemma,
    ),
    "gemma3-query-scalar-biases": Case(
        lambda: hf.Gemma3TextConfig(
            **_SIZES,
            head_dim=16,
            sliding_window=9,
            query_pre_attn_scalar=20,
            attention_bias=True,
            hidden_activation="silu",
            tie_word_embeddings=False,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        )
    ),
    "gpt2": Case(
        lambda: hf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=3,
            n_head=4,
            n_positions=CONTEXT,
            scale_attn_by_inverse_layer_idx=True,
        )
    ),
    "gpt2-unscaled-relu-untied": Case(
        lambda: hf.GPT2Config(
            vocab_size=VOCAB,
            n_embd=60,
            n_layer=2,
            n_head=5,
            n_inner=80,
            n_positions=CONTEXT,
            scale_attn_weights=False,
            activation_function="relu",
            tie_word_embeddings=False,
        )
    ),
    "bloom": Case(lambda: hf.BloomConfig(vocab_size=VOCAB, hidden_size=72, n_layer=3, n_head=6)),
    "bloom-8-heads": Case(
        lambda: hf.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=8)
    ),
    "xglm": Case(
        lambda: hf.XGLMConfig(
            vocab_size=VOCAB,
            d_model=64,
            ffn_dim=96,
            num_layers=3,
            attention_heads=4,
            max_position_embeddings=CONTEXT,
        )
    ),
    # An odd width leaves a zero column; pad id 5 makes the vector of position 3 zero.
    "xglm-odd": Case(
        lambda: hf.XGLMConfig(
            vocab_size=VOCAB,
            d_model=63,
            ffn_dim=80,
            num_layers=2,
            attention_heads=3,
            max_position_embeddings=CONTEXT,
            scale_embedding=False,
            activation_function="relu",
            pad_token_id=5,
        )
    ),
}
# One case of each family, for properties that are the same in all variants.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2", "bloom", "xglm")


@dataclass
class TinyModel:
    """A folder that transformers wrote; what we read from it; and the oracle's view of it."""

    folder: Path
    _compiled: dict[tuple[str, int], CompiledProgram] = field(default_factory=dict)

    @cached_property
    def weights(self) -> ModelWeights:
        return understand(open_checkpoint(resolve_model(str(self.folder))))

    @cached_property
    def program(self) -> Program:
        return build_program(self.weights, CONTEXT)

    def compiled(self, dtype: str = "f4", threads: int = 2) -> CompiledProgram:
        """On the `cpu` backend, with a cache of this type."""
        if (dtype, threads) not in self._compiled:
            placement = Placement(
                backend="cpu",
                threads=threads,
                max_model_len=CONTEXT,
                max_rows=CONTEXT,
                kv_bytes=np.dtype(dtype).itemsize,
                kernel_dir=default_cache_dir().parent / "kernels",
            )
            model = build_model(self.weights, placement)
            assert isinstance(model, CompiledProgram)
            self._compiled[dtype, threads] = model
        return self._compiled[dtype, threads]

    @cached_property
    def oracle(self) -> Any:
        loaded = hf.AutoModelForCausalLM.from_pretrained(
            self.folder, attn_implementation="eager", dtype=torch.float32
        )
        return loaded.eval()

    def oracle_logits(self, ids: Array) -> Array:
        """Logits of every position, [n, V]."""
        with torch.no_grad():
            logits: Array = self.oracle(torch.as_tensor(ids)[None]).logits[0].numpy()
        return logits


class TinyModels:
    """Builds each case once, when it is first asked for."""

    def __init__(self, root: Path) -> None:
        torch.set_num_threads(1)
        hf.logging.set_verbosity_error()
        hf.logging.disable_progress_bar()
        self.root = root
        self._models: dict[str, TinyModel] = {}

    def __getitem__(self, name: str) -> TinyModel:
        if name not in self._models:
            folder = self.root / name
            save(CASES[name], folder)
            self._models[name] = TinyModel(folder)
        return self._models[name]


def save(case: Case, folder: Path) -> None:
    """Random weights with a fixed seed, norms away from 1 and biases away from 0."""
    model = randomized(hf.AutoModelForCausalLM.from_config(case.config()))
    model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(case.spell(json.loads(path.read_text()))))


def randomized(model: Any) -> Any:
    """Sizes that make every part count: attention far from even, logits up to 5 to 15."""
    generator = torch.Generator().manual_seed(7)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    tables.add(id(model.lm_head.weight))
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.data += 0.2 * noise
        else:
            parameter.data = (0.2 if id(parameter) in tables else 0.12) * noise
    model.tie_weights()
    return model


def prompt(n: int, seed: int = 0) -> Array:
    """Random ids, [n]."""
    return np.random.default_rng(seed).integers(0, VOCAB, n)
