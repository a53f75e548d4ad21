"""Tensors that are missing, misshapen, extra or twice there are named; harmless ones left aside."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from forged import Json, opened, refused, rewritten, with_tensors, zeros
from paged import prefill
from tiny_models import FAMILIES, TinyModels, prompt

from seethrough.model.load import build_program, understand
from seethrough.weights.checkpoint import Checkpoint
from seethrough.weights.tensor import Tensor


def first_of_each_kind(checkpoint: Checkpoint) -> list[Tensor]:
    """The tensors outside the layers and those of layer 0; the other layers are spelled alike."""
    return [t for t in checkpoint.tensors.values() if not re.search(r"\.[1-9]\.", t.name)]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_missing_tensor_is_named(name: str, tiny: TinyModels) -> None:
    checkpoint = opened(tiny[name])
    for lost in (tensor.name for tensor in first_of_each_kind(checkpoint)):
        tensors = {k: v for k, v in checkpoint.tensors.items() if k != lost}
        refused(replace(checkpoint, tensors=tensors), "missing", lost.split(".")[-1])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_misshapen_tensor_is_named(name: str, tiny: TinyModels) -> None:
    """One row more, one column more, one axis more, no row; also where one becomes three."""
    checkpoint = opened(tiny[name])
    for tensor in first_of_each_kind(checkpoint):
        first, *rest = tensor.shape
        shapes = {(first + 1, *rest), (first, *(n + 3 for n in rest)), (*tensor.shape, 1), (0,)}
        for shape in shapes - {tensor.shape}:
            refused(with_tensors(checkpoint, zeros(tensor.name, shape)), "shape")


def test_transposed_matrix_is_named(tiny: TinyModels) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    found = with_tensors(opened(tiny["llama"]), zeros(name, (64, 96)))
    refused(found, "layers.1.up.weight", "[64, 96]", "[96, 64]")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "extra",
    [
        "model.layers.9.self_attn.q_proj.weight",
        "transformer.h.9.ln_1.weight",
        "model.layers.-1.mlp.up_proj.weight",
        "model.layers.01.mlp.up_proj.weight",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.vision_tower.weight",
        "layers.0.q.weight",
        "x",
    ],
)
def test_every_extra_tensor_is_named(name: str, extra: str, tiny: TinyModels) -> None:
    refused(with_tensors(opened(tiny[name]), zeros(extra, (2,))), "unexpected", extra)


def test_unexpected_tensors_of_unread_types_are_named(tiny: TinyModels) -> None:
    checkpoint = replace(opened(tiny["llama"]), unsupported={"model.norm.zero_point": "I8"})
    refused(checkpoint, "unexpected", "model.norm.zero_point")


def test_long_lists_are_cut(tiny: TinyModels) -> None:
    extras = [zeros(f"extra.{i}", (1,)) for i in range(1000)]
    refused(with_tensors(opened(tiny["llama"]), *extras), "1000 unexpected", "and 992 more")


@pytest.mark.parametrize(
    ("name", "config", "tensor"),
    [
        ("llama", {}, "model.layers.0.self_attn.q_proj.bias"),
        ("llama", {}, "model.layers.0.mlp.up_proj.bias"),
        ("llama", {}, "model.layers.2.self_attn.q_norm.weight"),
        ("qwen3", {}, "model.layers.0.self_attn.o_proj.bias"),
    ],
)
def test_tensor_that_the_config_denies(
    name: str, config: Json, tensor: str, tiny: TinyModels
) -> None:
    """A bias or norm that would be passed over in silence changes the model."""
    refused(with_tensors(opened(tiny[name]), zeros(tensor, (64,))), "no use for")


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("llama", {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (8,) for i in range(3)}),
        ("mistral", {"model.rotary_emb.inv_freq": (12,)}),
        ("qwen2", {"model.layers.0.self_attn.rotary_emb.inv_freq": (8,)}),
        ("gemma3", {"model.layers.6.self_attn.rotary_emb.inv_freq": (8,)}),
        ("gpt2", {f"transformer.h.{i}.attn.bias": (1, 1, 128, 128) for i in range(3)}),
        ("gpt2", {"transformer.h.0.attn.masked_bias": (1,)}),
        ("gpt2", {"h.1.attn.bias": (1, 1, 128, 128)}),
        ("xglm", {"model.embed_positions.weights": (130, 64)}),
    ],
)
def test_harmless_extras_are_left_aside_by_name(
    name: str, tensors: dict[str, tuple[int, ...]], tiny: TinyModels
) -> None:
    extras = [zeros(key, shape) for key, shape in tensors.items()]
    weights = understand(with_tensors(opened(tiny[name]), *extras))
    assert weights.left_aside == tuple(sorted(tensors))
    assert weights.tensors.keys() == tiny[name].weights.tensors.keys()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32])
@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_stored_masks_of_gpt2(
    dtype: torch.dtype, prefix: str, tiny: TinyModels, tmp_path: Path
) -> None:
    """Older exports stored the causal mask, in three types, some without the first name."""

    def change(tensors: Json) -> None:
        mask = torch.ones(1, 1, 128, 128).tril().to(dtype)
        for name in list(tensors):
            tensors[prefix + name.removeprefix("transformer.")] = tensors.pop(name)
        for i in range(3):
            tensors[f"{prefix}h.{i}.attn.bias"] = mask.clone()

    model, ids = rewritten(tiny["gpt2"], tmp_path / "m", change), prompt(20)
    assert model.weights.left_aside == tuple(f"{prefix}h.{i}.attn.bias" for i in range(3))
    np.testing.assert_array_equal(prefill(model.program, ids), prefill(tiny["gpt2"].program, ids))


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_without_the_outer_name(name: str, tiny: TinyModels) -> None:
    """The base model's own file: the same tensors without `model.` or `transformer.`."""
    checkpoint = opened(tiny[name])
    bare = {
        (short := key.removeprefix("model.").removeprefix("transformer.")): t.renamed(short)
        for key, t in checkpoint.tensors.items()
    }
    assert bare.keys() != checkpoint.tensors.keys()
    weights = understand(replace(checkpoint, tensors=bare))
    for key, tensor in tiny[name].weights.tensors.items():
        np.testing.assert_array_equal(weights.tensors[key].data, tensor.data)


@pytest.mark.parametrize(
    ("name", "short", "long"),
    [
        ("llama", "norm.weight", "model.norm.weight"),
        ("gpt2", "h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
        ("bloom", "ln_f.bias", "transformer.ln_f.bias"),
    ],
)
def test_one_tensor_under_two_names(name: str, short: str, long: str, tiny: TinyModels) -> None:
    checkpoint = opened(tiny[name])
    twin = checkpoint.tensors[long].renamed(short)
    refused(with_tensors(checkpoint, twin), "two tensors", short)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_half_precision_files_are_widened(
    name: str, dtype: torch.dtype, tiny: TinyModels, tmp_path: Path
) -> None:
    """Arithmetic is float32 on the stored values, also where rows are cut, picked or turned."""

    def change(tensors: Json) -> None:
        tensors.update({k: v.to(dtype) for k, v in tensors.items()})

    model, ids = rewritten(tiny[name], tmp_path / "m", change), prompt(30)
    assert not model.weights.is_f32
    assert tiny[name].weights.is_f32
    assert model.weights.nbytes * 2 == tiny[name].weights.nbytes
    assert all(w.dtype == np.float32 for w in model.program.weights.values())
    np.testing.assert_allclose(
        prefill(model.program, ids), model.oracle_logits(ids), rtol=0, atol=1e-4
    )


def test_progress_counts_tensors(tiny: TinyModels) -> None:
    seen: list[tuple[int, int]] = []
    build_program(tiny["llama"].weights, 8, lambda done, of: seen.append((done, of)))
    total = len(tiny["llama"].weights.tensors)
    assert seen == [(i + 1, total) for i in range(total)]
