"""GGUF files, written with the gguf package from the same weights, equal transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from paged import greedy, prefill
from tiny_models import CONTEXT, TinyModel, TinyModels, prompt

from seethrough import pipeline
from seethrough.errors import CheckpointError, UnsupportedModelError
from seethrough.model.load import ModelWeights, build_program, understand
from seethrough.weights.checkpoint import open_checkpoint
from seethrough.weights.files import resolve_model

Array = np.ndarray[Any, Any]
ARCH = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
F32, Q8_0, Q4_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "Q8_0", "Q4_0"))


def permuted(rows: Array, n_heads: int) -> Array:
    """Rotary halves to neighbouring pairs, head by head: how `llama` files store Q and K."""
    halves = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def stored(model: TinyModel) -> dict[str, Array]:
    """GGUF name -> array as llama.cpp's converter stores it."""
    config = model.oracle.config
    names = gguf.get_tensor_name_map(ARCH[config.model_type], config.num_hidden_layers)
    out: dict[str, Array] = {}
    for name, parameter in model.oracle.named_parameters():
        array = parameter.detach().numpy()
        if config.model_type in ("llama", "mistral"):
            if ".q_proj." in name:
                array = permuted(array, config.num_attention_heads)
            if ".k_proj." in name:
                array = permuted(array, config.num_key_value_heads)
        if config.model_type == "gemma3_text" and name.endswith("norm.weight"):
            array = array + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        out[target] = array
    return out


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    """The metadata that llama.cpp's converter writes."""
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    head_dim = getattr(config, "head_dim", None) or 0
    if head_dim:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "gemma3_text") and window:
        writer.add_sliding_window(window)
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    cap = getattr(config, "final_logit_softcapping", None)
    if cap:
        writer.add_final_logit_softcapping(cap)


def write(
    path: Path,
    model: TinyModel,
    tensors: dict[str, Array],
    quantized: gguf.GGMLQuantizationType = F32,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> ModelWeights:
    config = model.oracle.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCH[config.model_type]])
    describe(writer, config)
    more(writer)
    for name, array in tensors.items():
        if array.ndim == 2 and quantized != F32:
            writer.add_tensor(name, quantize(array, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return understand(open_checkpoint(resolve_model(str(path))))


def assert_equal_to_oracle(weights: ModelWeights, model: TinyModel) -> None:
    program = build_program(weights, CONTEXT)
    for n in (1, 7, 60):
        ids = prompt(n)
        expected = model.oracle_logits(ids)
        x = pipeline.forward(weights.spec, program.weights, *pipeline.pad_and_mask([ids]))
        naive = pipeline.head(weights.spec, program.weights, x)[0]
        np.testing.assert_allclose(prefill(program, ids), expected, rtol=0, atol=1e-4)
        np.testing.assert_allclose(naive, expected, rtol=0, atol=1e-4)
    ids = prompt(7, seed=1).tolist()
    wanted = list(ids)
    for _ in range(20):
        wanted.append(int(model.oracle_logits(np.array(wanted))[-1].argmax()))
    assert greedy(program, ids, 20) == wanted[7:]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama-mqa-old-linear-biases",
        "llama-60-heads-of-16",
        "mistral",
        "qwen2",
        "qwen3",
        "gemma3",
    ],
)
def test_float32_file_equals_transformers(name: str, tiny: TinyModels, tmp_path: Path) -> None:
    model = tiny[name]
    weights = write(tmp_path / "m.gguf", model, stored(model))
    assert weights.left_aside == ()
    assert_equal_to_oracle(weights, model)


@pytest.mark.parametrize("name", ["gemma3", "gemma3-old-spelling"])
@pytest.mark.parametrize("form", ["number", "list"])
def test_gemma_pattern_and_local_base(
    name: str, form: str, tiny: TinyModels, tmp_path: Path
) -> None:
    """Which layers are local: every n-th is not, or a list; the local rope has its own base."""
    model = tiny[name]
    config = model.oracle.config
    local = [kind == "sliding_attention" for kind in config.layer_types]

    def more(writer: gguf.GGUFWriter) -> None:
        period = local.index(False) + 1
        writer.add_sliding_window_pattern(local if form == "list" else period)
        writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])

    weights = write(tmp_path / "m.gguf", model, stored(model), more=more)
    assert_equal_to_oracle(weights, model)


def test_head_stored_beside_a_tied_table(tiny: TinyModels, tmp_path: Path) -> None:
    """`output.weight` present means untied; absent means tied. Equal contents, equal logits."""
    model = tiny["qwen2"]
    tensors = stored(model)
    assert "output.weight" not in tensors
    twice = write(
        tmp_path / "m.gguf", model, tensors | {"output.weight": tensors["token_embd.weight"]}
    )
    assert not twice.spec.tied_head
    assert_equal_to_oracle(twice, model)


@pytest.mark.parametrize("layer", ["", "blk.0."])
def test_rope_freqs_equal_llama3_scaling(layer: str, tiny: TinyModels, tmp_path: Path) -> None:
    """A file stores a finished scaling as divisors (vllm-project/vllm#7268)."""
    model = tiny["llama-mha-tied-llama3"]
    theta, head_dim = 5e5, 16
    plain = 1 / theta ** (np.arange(0, head_dim, 2) / head_dim)
    factors = plain / model.oracle.model.rotary_emb.inv_freq.numpy()
    assert factors.min() < 1.001 < 7.9 < factors.max()
    tensors = stored(model) | {f"{layer}rope_freqs.weight": factors.astype(np.float32)}
    weights = write(tmp_path / "m.gguf", model, tensors)
    assert weights.left_aside == (f"{layer}rope_freqs.weight",)
    assert_equal_to_oracle(weights, model)


def test_rope_freqs_of_the_wrong_length(tiny: TinyModels, tmp_path: Path) -> None:
    model = tiny["llama-mha-tied-llama3"]
    tensors = stored(model) | {"rope_freqs.weight": np.ones(16, np.float32)}
    with pytest.raises(
        CheckpointError, match=r"rope_freqs\.weight has shape \[16\], expected \[8\]"
    ):
        write(tmp_path / "m.gguf", model, tensors)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [Q8_0, Q4_0])
def test_quantized_rows_are_put_back_in_order(
    name: str, kind: gguf.GGMLQuantizationType, tiny: TinyModels, tmp_path: Path
) -> None:
    """Logits equal transformers on the dequantized weights, with permuted Q and K rows as well."""
    model = tiny[name]
    weights = write(tmp_path / "m.gguf", model, stored(model), kind)
    assert not weights.is_f32
    dequantized = TinyModel(model.folder)
    with torch.no_grad():
        for parameter in dequantized.oracle.parameters():
            if parameter.dim() == 2:  # a row is quantized alone, so the order of rows is free
                blocks = quantize(parameter.numpy(), kind)
                parameter.copy_(torch.from_numpy(dequantize(blocks, kind)))
    assert_equal_to_oracle(weights, dequantized)


def test_unpermuted_rows_would_show(tiny: TinyModels, tmp_path: Path) -> None:
    """The comparison sees Q and K rows that a file left in the original order."""
    model = tiny["llama"]
    tensors = stored(model)
    q = model.oracle.model.layers[1].self_attn.q_proj.weight.detach().numpy()
    assert not np.array_equal(tensors["blk.1.attn_q.weight"], q)
    tensors["blk.1.attn_q.weight"] = q
    program = build_program(write(tmp_path / "m.gguf", model, tensors), CONTEXT)
    ids = prompt(60)
    assert np.abs(prefill(program, ids) - model.oracle_logits(ids)).max() > 0.01


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), UnsupportedModelError,
         ["llama.rope.scaling.type", "yarn"]),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), UnsupportedModelError,
         ["llama.rope.scaling.type", "longrope"]),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), CheckpointError,
         ["llama.rope.scaling.factor", "missing"]),
        (lambda w: w.add_expert_count(8), UnsupportedModelError, ["llama.expert_count", "8"]),
        (lambda w: w.add_rope_dimension_count(8), UnsupportedModelError,
         ["llama.rope.dimension_count", "8", "16"]),
        (lambda w: w.add_value_length(32), UnsupportedModelError,
         ["llama.attention.value_length", "32"]),
    ],
)  # fmt: skip
def test_what_a_file_asks_for_and_is_not_here(
    change: Any, error: type[Exception], words: list[str], tiny: TinyModels, tmp_path: Path
) -> None:
    with pytest.raises(error) as caught:
        write(tmp_path / "m.gguf", tiny["llama"], stored(tiny["llama"]), more=change)
    assert all(word in str(caught.value) for word in words), str(caught.value)
