"""A head that is tied, stored, both or neither: right logits, or an error that names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from forged import Json, opened, refused, rewritten, zeros
from paged import prefill
from tiny_models import CASES, CONTEXT, FAMILIES, TinyModels, prompt

from seethrough.model.load import understand


def test_tied_and_head_absent(tiny: TinyModels) -> None:
    weights = tiny["qwen2"].weights
    assert weights.spec.tied_head
    assert "head.weight" not in weights.tensors


def test_tied_and_equal_head_stored(tiny: TinyModels, tmp_path: Path) -> None:
    """One of the two is used, without a word (vllm-project/vllm PR#6758)."""

    def change(tensors: Json) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    model, ids = rewritten(tiny["qwen2"], tmp_path / "m", change), prompt(20)
    assert model.weights.spec.tied_head
    assert model.weights.notes == ()
    assert "head.weight" not in model.weights.tensors
    np.testing.assert_array_equal(prefill(model.program, ids), prefill(tiny["qwen2"].program, ids))


def test_tied_and_another_head_stored(tiny: TinyModels, tmp_path: Path) -> None:
    """The config contradicts the file: the stored head is used, as transformers does, and said."""

    def change(tensors: Json) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].flip(0).clone()

    model, ids = rewritten(tiny["qwen2"], tmp_path / "m", change), prompt(20)
    assert len(model.weights.notes) == 1
    assert "LM head" in model.weights.notes[0]
    logits = prefill(model.program, ids)
    np.testing.assert_allclose(logits, model.oracle_logits(ids), rtol=0, atol=1e-4)
    assert np.abs(logits - tiny["qwen2"].oracle_logits(ids)).max() > 1


def test_untied_and_head_absent(tiny: TinyModels, tmp_path: Path) -> None:
    """Never a random head (vllm-project/vllm#53019)."""
    model = rewritten(tiny["llama"], tmp_path / "m", lambda t: t.pop("lm_head.weight"))
    refused(opened(model), "missing", "head.weight")


def test_untied_and_equal_head_stored(tiny: TinyModels, tmp_path: Path) -> None:
    def change(tensors: Json) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    model, ids = rewritten(tiny["llama"], tmp_path / "m", change), prompt(20)
    assert not model.weights.spec.tied_head
    expected = model.oracle_logits(ids)
    np.testing.assert_allclose(prefill(model.program, ids), expected, rtol=0, atol=1e-4)


def test_only_the_head_stored(tiny: TinyModels, tmp_path: Path) -> None:
    def change(tensors: Json) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    refused(opened(rewritten(tiny["qwen2"], tmp_path / "m", change)), "missing", "embed.weight")


@pytest.mark.parametrize("name", FAMILIES)
def test_tied_by_default_as_in_transformers(name: str, tiny: TinyModels) -> None:
    """Without the flag, each family has its own default."""
    checkpoint = opened(tiny[name])
    config = {k: v for k, v in checkpoint.config.items() if k != "tie_word_embeddings"}
    tied = type(CASES[name].config())().tie_word_embeddings
    head = zeros("lm_head.weight", (CONTEXT, tiny[name].weights.spec.d_model))
    tensors = {k: v for k, v in checkpoint.tensors.items() if k != "lm_head.weight"}
    for have in ({}, {"lm_head.weight": head}):
        unflagged = replace(checkpoint, config=config, tensors=tensors | have)
        if not have and not tied:
            refused(unflagged, "head.weight")
        else:
            assert understand(unflagged).spec.tied_head == (tied and not have)
