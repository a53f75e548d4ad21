"""GGUF metadata that is missing, of the wrong type, or asks for what is not here: named by key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seethrough.errors import CheckpointError, SeethroughError, UnsupportedModelError
from seethrough.model.load import understand
from seethrough.weights.checkpoint import Checkpoint
from seethrough.weights.tensor import F32, Q8_0, Tensor

D, HEADS, KV, HEAD_DIM, FF, VOCAB, LAYERS = 64, 4, 2, 16, 96, 32, 2
REQUIRED = {
    "context_length": 128,
    "embedding_length": D,
    "block_count": LAYERS,
    "feed_forward_length": FF,
    "attention.head_count": HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
EXTRA: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3": {"attention.sliding_window": 8},
}
ARCHITECTURES = tuple(EXTRA)


def zeros(name: str, *shape: int) -> Tensor:
    return Tensor(name, F32, shape, np.zeros(F32.nbytes(shape), dtype=np.uint8))


def tensors_of(architecture: str) -> list[Tensor]:
    made = [zeros("token_embd.weight", VOCAB, D), zeros("output_norm.weight", D)]
    for i in range(LAYERS):
        at = f"blk.{i}."
        made += [
            zeros(f"{at}attn_norm.weight", D),
            zeros(f"{at}attn_q.weight", HEADS * HEAD_DIM, D),
            zeros(f"{at}attn_k.weight", KV * HEAD_DIM, D),
            zeros(f"{at}attn_v.weight", KV * HEAD_DIM, D),
            zeros(f"{at}attn_output.weight", D, HEADS * HEAD_DIM),
            zeros(f"{at}ffn_norm.weight", D),
            zeros(f"{at}ffn_gate.weight", FF, D),
            zeros(f"{at}ffn_up.weight", FF, D),
            zeros(f"{at}ffn_down.weight", D, FF),
        ]
        if architecture == "qwen2":
            made += [
                zeros(f"{at}attn_{x}.bias", n * HEAD_DIM) for x, n in (("q", 4), ("k", 2), ("v", 2))
            ]
        if architecture in ("qwen3", "gemma3"):
            made += [zeros(f"{at}attn_{x}_norm.weight", HEAD_DIM) for x in "qk"]
        if architecture == "gemma3":
            made += [zeros(f"{at}post_{x}_norm.weight", D) for x in ("attention", "ffw")]
    return made


def checkpoint(architecture: str = "llama", **changed: Any) -> Checkpoint:
    """A sound file; `changed` sets keys (`__` for a dot), None takes one out."""
    keys = REQUIRED | {"attention.head_count_kv": KV} | EXTRA[architecture]
    metadata = {f"{architecture}.{key}": value for key, value in keys.items()}
    metadata["general.architecture"] = architecture
    for key, value in changed.items():
        metadata[f"{architecture}.{key.replace('__', '.')}"] = value
    return Checkpoint(
        format="gguf",
        name="m.gguf",
        root=Path(),
        config={},
        generation_config={},
        metadata={k: v for k, v in metadata.items() if v is not None},
        tensors={t.name: t for t in tensors_of(architecture)},
        unsupported={},
    )


def refused(found: Checkpoint, *words: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError)) as caught:
        understand(found)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert len(message) < 1000


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sound_file_is_understood(architecture: str) -> None:
    weights = understand(checkpoint(architecture))
    spec = weights.spec
    assert weights.family == architecture
    assert (spec.n_layers, spec.n_heads, spec.n_kv_heads, spec.head_dim) == (2, 4, 2, 16)
    assert (spec.d_model, spec.d_ff, spec.vocab_size, spec.max_positions) == (64, 96, 32, 128)
    assert spec.tied_head


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(architecture: str, key: str) -> None:
    refused(checkpoint(architecture, **{key: None}), f"{architecture}.{key}", "missing")


def test_missing_window_of_gemma() -> None:
    found = checkpoint("gemma3", attention__sliding_window=None)
    refused(found, "gemma3.attention.sliding_window", "missing")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("key", ["block_count", "attention.head_count", "attention.head_count_kv",
                                 "embedding_length", "feed_forward_length", "context_length",
                                 "attention.key_length"])  # fmt: skip
@pytest.mark.parametrize(
    "value", [0, -1, "2", "", [2, 2], [], 2.0, True, 10**9 + 10**9 * 2**20, 2**63], ids=repr
)
def test_wrong_typed_size_is_named(architecture: str, key: str, value: Any) -> None:
    """Among them block_count 0 or a string, and head counts per layer (golang/vulndb#3689)."""
    refused(checkpoint(architecture, **{key: value}), f"{architecture}.{key}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", "1e-5"),
        ("attention.layer_norm_rms_epsilon", 0.0),
        ("attention.layer_norm_rms_epsilon", float("nan")),
        ("rope.freq_base", "10000"),
        ("rope.freq_base", -1.0),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.type", 1),
        ("rope.scaling.type", ["linear"]),
        ("rope.dimension_count", 8),
        ("attention.value_length", 8),
        ("attention.sliding_window", "8"),
        ("attention.sliding_window", -8),
        ("expert_count", 8),
        ("rope.scale_linear", 4.0),
    ],
)
def test_malformed_or_unsupported_value_is_named(key: str, value: Any) -> None:
    refused(checkpoint("llama", **{key: value}), f"llama.{key}")


@pytest.mark.parametrize(
    "value", [0, -6, "6", 6.5, True, [True], [True, False, True], [1, 0], ["a", "b"], []], ids=repr
)
def test_malformed_pattern_is_named(value: Any) -> None:
    key = "attention.sliding_window_pattern"
    refused(checkpoint("gemma3", **{key: value}), f"gemma3.{key}")


def test_pattern_says_which_layers_are_local() -> None:
    def windows(value: Any) -> list[int | None]:
        found = checkpoint("gemma3", attention__sliding_window_pattern=value)
        return [layer.window for layer in understand(found).spec.layers]

    assert windows(None) == [8, 8]
    assert windows(2) == [8, None]
    assert windows(1) == [None, None]
    assert windows([False, True]) == [None, 8]


@pytest.mark.parametrize("name", [None, "", "gpt2", "mamba", "LLAMA", "x" * 10**6, 7, ["llama"]])
def test_unknown_architecture_is_named(name: Any) -> None:
    found = checkpoint()
    metadata = found.metadata | {"general.architecture": name}
    refused(replace(found, metadata=metadata), "general.architecture", "llama, qwen2, qwen3")


def test_no_metadata_and_no_tensors() -> None:
    refused(replace(checkpoint(), metadata={}), "general.architecture")
    refused(replace(checkpoint(), tensors={}), "token_embd.weight", "missing")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_missing_tensor_is_refused(architecture: str) -> None:
    found = checkpoint(architecture)
    for name in found.tensors:
        rest = {k: v for k, v in found.tensors.items() if k != name}
        refused(replace(found, tensors=rest), "missing")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_misshapen_tensor_is_refused(architecture: str) -> None:
    found = checkpoint(architecture)
    for name, tensor in found.tensors.items():
        first, *rest = tensor.shape
        for shape in ((first + 16, *rest), (*tensor.shape, 1)):
            if name == "token_embd.weight" and len(shape) == 2:
                continue  # the table's rows are the vocabulary
            refused(replace(found, tensors=found.tensors | {name: zeros(name, *shape)}))


@pytest.mark.parametrize(
    "name",
    ["blk.2.attn_q.weight", "blk.0.ffn_gate_inp.weight", "blk.0.ffn_gate_exps.weight",
     "token_types.weight", "blk.0.attn_qkv.weight", "output.bias", "output.scale", "z"],
)  # fmt: skip
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_extra_tensor_is_named(architecture: str, name: str) -> None:
    found = checkpoint(architecture)
    tensors = found.tensors | {name: zeros(name, 4)}
    refused(replace(found, tensors=tensors), "unexpected", name)


@pytest.mark.parametrize(
    ("architecture", "name", "size"),
    [("qwen3", "blk.0.attn_q.bias", 64), ("qwen2", "blk.1.attn_q_norm.weight", 16),
     ("llama", "blk.1.attn_q.bias", 64), ("gemma3", "blk.0.attn_q.bias", 64)],
)  # fmt: skip
def test_known_tensor_without_a_place_is_named(architecture: str, name: str, size: int) -> None:
    """A bias in one layer of two, a norm that the architecture does not have."""
    found = checkpoint(architecture)
    tensors = found.tensors | {name: zeros(name, size)}
    refused(replace(found, tensors=tensors), "no use for")


@pytest.mark.parametrize("shape", [(4,), (16,), (8, 1), (1,)])
@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.rope_freqs.weight"])
def test_rope_freqs_of_the_wrong_shape(name: str, shape: tuple[int, ...]) -> None:
    found = checkpoint()
    tensors = found.tensors | {name: zeros(name, *shape)}
    refused(replace(found, tensors=tensors), name, str(list(shape)), "[8]")


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_rope_freqs_that_cannot_divide(bad: float) -> None:
    """A zero would make an infinite speed and every logit NaN."""
    factors = np.ones(8, dtype=np.float32)
    factors[3] = bad
    tensor = Tensor("rope_freqs.weight", F32, (8,), factors.view(np.uint8))
    found = checkpoint()
    refused(replace(found, tensors=found.tensors | {tensor.name: tensor}), "rope_freqs.weight")


def test_rope_freqs_beside_another_scaling() -> None:
    """Which of the two is meant, or both, no file says."""
    found = checkpoint(rope__scaling__type="linear", rope__scaling__factor=2.0)
    ones = Tensor("rope_freqs.weight", F32, (8,), np.ones(8, np.float32).view(np.uint8))
    found = replace(found, tensors=found.tensors | {ones.name: ones})
    refused(found, "llama.rope.scaling.type", "linear")


def test_quantized_norm_or_table_is_read_as_any_other() -> None:
    """Types are per tensor; the file's own idea of its type is not asked."""
    found = checkpoint()
    data = np.zeros(Q8_0.nbytes((VOCAB, D)), dtype=np.uint8)
    table = Tensor("token_embd.weight", Q8_0, (VOCAB, D), data)
    weights = understand(replace(found, tensors=found.tensors | {table.name: table}))
    assert weights.tensors["embed.weight"].dtype is Q8_0
    assert not weights.is_f32


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=200, deadline=None)
@given(architecture=st.sampled_from(ARCHITECTURES), data=st.data())
def test_any_metadata_gives_a_model_or_a_typed_error(
    architecture: str, data: st.DataObject
) -> None:
    keys = [*REQUIRED, "attention.key_length", "rope.scaling.type", "rope.scaling.factor",
            "rope.freq_base", "attention.sliding_window", "attention.sliding_window_pattern",
            "final_logit_softcapping", "rope.freq_base_swa"]  # fmt: skip
    change = data.draw(st.dictionaries(st.sampled_from(keys), VALUES, min_size=1, max_size=3))
    found: object = None
    try:
        found = understand(checkpoint(architecture, **change)).spec.n_layers
    except SeethroughError as error:
        found = str(error)
    assert found == LAYERS or (isinstance(found, str) and 0 < len(found) < 1000)
