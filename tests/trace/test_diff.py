"""Two runs side by side: equal where they are equal, parting where one was changed by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_forge import oracle_logprobs, prompt, tiny_llama, tiny_model
from safetensors.numpy import load_file, save_file
from traced_kinds import KINDS

from seethrough import LLM
from seethrough.errors import DiffError
from seethrough.trace.diff import Diff, ValueDiff, diff
from seethrough.trace.trace import Trace

Opened = Callable[..., LLM]
TEXT = "the quick brown fox jumps over the lazy dog"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
ALL = {"prompt_logprobs": 0}  # every position has logits


def both(a: LLM, b: LLM, **more: Any) -> tuple[Trace, Trace, Diff]:
    first = a.trace(TEXT, **(GREEDY | ALL | more))
    second = b.follow(first)
    return first, second, diff(first, second)


def changed_copy(folder: Path, to: Path, name: str, add: float = 0.01) -> Path:
    """The model with one entry of one tensor changed."""
    shutil.copytree(folder, to)
    weights = load_file(to / "model.safetensors")
    weights[name] = weights[name].copy()
    weights[name].flat[5] += add
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LLM:
    return LLM(folder, threads=1, max_model_len=128)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_itself(open_kind: Opened, kind: str) -> None:
    llm = open_kind(kind)
    first, second, found = both(llm, llm)
    assert found.identical
    assert found.parting() is None
    assert found.parting(0.0) is None
    assert second.output.outputs[0].token_ids == first.output.outputs[0].token_ids
    assert len(found.values) == len(first.keys())
    assert len(found.positions) == len(first.tokens) - 1
    for position in found.positions:
        assert position.kl == 0
        assert position.rank[0] == position.rank[1]
        assert position.best[0] == position.best[1]


@pytest.mark.parametrize("kind", KINDS)
def test_reference_parts_from_cpu_but_little(open_kind: Opened, kind: str) -> None:
    _, _, found = both(open_kind(kind, backend="reference"), open_kind(kind))
    assert not found.unlike
    assert found.parting(1e-3) is None
    assert max(position.kl for position in found.positions) < 1e-6


@pytest.mark.parametrize(
    ("tensor", "stage", "value", "layer"),
    [
        ("model.embed_tokens.weight", "S4", "X", None),
        ("model.layers.0.input_layernorm.weight", "S6.1", "x_norm", 0),
        ("model.layers.0.self_attn.k_proj.weight", "S6.1", "K", 0),
        ("model.layers.1.self_attn.v_proj.weight", "S6.1", "V", 1),
        ("model.layers.1.self_attn.o_proj.weight", "S6.6", "attn_out", 1),
        ("model.layers.1.mlp.up_proj.weight", "S6.7", "up", 1),
        ("model.layers.1.mlp.down_proj.weight", "S6.7", "mlp_out", 1),
        ("model.norm.weight", "S8", "h", None),
        ("lm_head.weight", "S9", "logits", None),
    ],
)
def test_they_part_exactly_where_one_was_changed(
    folder: Path, model: LLM, tmp_path: Path, tensor: str, stage: str, value: str, layer: int | None
) -> None:
    place = tmp_path / "changed"
    shutil.copytree(folder, place)
    weights = load_file(place / "model.safetensors")
    weights[tensor] = weights[tensor] * np.float32(1.5)
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    other = LLM(place, threads=1, max_model_len=128)
    first = model.trace(TEXT, **(GREEDY | ALL))
    found = diff(first, other.follow(first))
    parting = found.parting()
    assert parting is not None
    assert (parting.stage, parting.name, parting.layer) == (stage, value, layer)
    before = found.values[: found.values.index(parting)]
    assert all((v.relative, v.largest, v.differing) == (0, 0, 0) for v in before)
    assert not found.identical


def test_a_single_entry_is_enough(folder: Path, model: LLM, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate_proj.weight"
    other = LLM(changed_copy(folder, tmp_path / "changed", name), threads=1, max_model_len=128)
    _, _, found = both(model, other)
    parting = found.parting()
    assert parting is not None
    assert (parting.stage, parting.name, parting.layer) == ("S6.7", "gate", 1)
    # Row 0 of the matrix: one feature of every position.
    positions = len(found.positions)
    assert parting.differing == positions
    assert found.parting(10.0) is None


def test_errors_are_what_they_are_called(model: LLM) -> None:
    """By hand: a value's relative error, greatest difference and count."""
    first = model.trace(TEXT, **GREEDY)
    second = model.trace(TEXT, **GREEDY)
    (piece,) = second.steps[0].pieces["S4", "X", None]
    rng = np.random.default_rng(0)
    noise = np.where(rng.random(piece.value.shape) < 0.3, 0.01, 0).astype(np.float32)
    second.steps[0].pieces["S4", "X", None] = [piece._replace(value=piece.value + noise)]
    x, y = (trace.array("S4").astype(np.float64) for trace in (first, second))
    found = next(v for v in diff(first, second).values if (v.stage, v.name) == ("S4", "X"))
    assert found.relative == pytest.approx(np.sqrt(((x - y) ** 2).sum()) / np.sqrt((x**2).sum()))
    assert found.largest == np.abs(x - y).max()
    assert found.differing == (x != y).sum()
    assert found.size == x.size


def test_predictions_are_compared_as_on_paper(folder: Path, model: LLM, tmp_path: Path) -> None:
    """KL, probabilities and ranks from transformers' logits of both models."""
    other_folder = tiny_llama(tmp_path / "other", seed=3)
    other = LLM(other_folder, threads=1, max_model_len=128)
    first, _, found = both(model, other)
    ids = first.prompt_token_ids + first.output.outputs[0].token_ids
    assert [p.position for p in found.positions] == list(range(len(ids) - 1))
    ours, theirs = (oracle_logprobs(place, ids) for place in (folder, other_folder))
    for p in found.positions:
        a, b = ours[p.position], theirs[p.position]
        assert p.next_id == ids[p.position + 1]
        assert p.kl == pytest.approx(float((np.exp(a) * (a - b)).sum()), rel=1e-3)
        assert p.prob == pytest.approx((math.exp(a[p.next_id]), math.exp(b[p.next_id])), rel=1e-3)
        assert p.rank == tuple(int((row > row[p.next_id]).sum()) + 1 for row in (a, b))
        assert p.best == (int(a.argmax()), int(b.argmax()))
        index = p.position + 1 - len(first.prompt_token_ids)
        assert p.output_index == (index if index >= 0 else None)
    greedy = [p for p in found.positions if p.output_index is not None]
    assert all(p.rank[0] == 1 for p in greedy)
    assert any(p.best[1] != p.next_id for p in greedy)  # B was led along, whatever it would say


def test_other_sampling_parts_at_s10_only(model: LLM) -> None:
    first = model.trace(TEXT, **(ALL | {"temperature": 0.8, "seed": 4, "max_tokens": 3}))
    second = model.follow(first, temperature=0.4, top_k=5)
    found = diff(first, second)
    parting = found.parting()
    assert parting is not None
    assert parting.stage == "S10"
    assert all(v.differing == 0 for v in found.values[: found.values.index(parting)])
    assert {v.stage for v in found.values if v.differing} == {"S10", "S11", "S12"}
    for p in found.positions:
        assert p.kl == 0
        if p.output_index is None:
            assert p.kl_candidates is None
        else:  # top_k leaves out what A keeps
            assert p.kl_candidates == math.inf
    assert not second.output.outputs[0].error
    body = json.dumps(found.to_dict(0.01), allow_nan=False)
    assert json.loads(body)["positions"][-1]["kl_candidates"] is None


def test_candidates_that_both_keep_have_a_finite_divergence(model: LLM) -> None:
    first = model.trace(TEXT, **(ALL | {"temperature": 1, "seed": 4, "max_tokens": 2}))
    found = diff(first, model.follow(first, temperature=2))
    last = found.positions[-1]
    raw = first.array("S9", step=1)[-1].astype(np.float64)

    def log_softmax(x: np.ndarray) -> np.ndarray:
        return x - np.logaddexp.reduce(x)

    p, q = log_softmax(raw), log_softmax(raw / 2)
    assert last.kl_candidates == pytest.approx(float((np.exp(p) * (p - q)).sum()), rel=1e-4)


def test_models_of_other_shapes_compare_what_both_have(tmp_path: Path, model: LLM) -> None:
    deep = LLM(tiny_model(tmp_path / "deep", "llama", num_hidden_layers=3), threads=1)
    first, _, found = both(model, deep)
    assert any("layer 2: only in B" in name for name in found.unlike)
    wide = LLM(tiny_model(tmp_path / "wide", "llama", intermediate_size=64), threads=1)
    found = diff(first, wide.follow(first))
    assert any("gate of layer 0: [" in name and "in B" in name for name in found.unlike)
    assert {v.name for v in found.values} >= {"X", "Q", "logits"}
    assert not found.identical


def test_padding_of_the_vocabulary_is_no_difference(tmp_path: Path, model: LLM) -> None:
    padded = tmp_path / "padded"
    shutil.copytree(_folder_of(model), padded)
    weights = load_file(padded / "model.safetensors")
    config = json.loads((padded / "config.json").read_text())
    config["vocab_size"] += 20
    (padded / "config.json").write_text(json.dumps(config))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = np.full((20, weights[name].shape[1]), 3, dtype=np.float32)
        weights[name] = np.concatenate([weights[name], more])
    save_file(weights, padded / "model.safetensors", metadata={"format": "pt"})
    _, _, found = both(model, LLM(padded, threads=1, max_model_len=128))
    assert all(p.kl == 0 for p in found.positions)
    assert any(name.startswith("S9 logits: [") for name in found.unlike)


def _folder_of(llm: LLM) -> Path:
    return Path(llm.recorder.provenance.origin.path)


def test_ids_that_mean_other_tokens(model: LLM, tmp_path: Path) -> None:
    first = model.trace(TEXT, **(GREEDY | ALL))
    other = tmp_path / "other"
    shutil.copytree(_folder_of(model), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = (next(k for k, v in vocab.items() if v == first.prompt_token_ids[0]), "!")
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(DiffError, match=f"the id {first.prompt_token_ids[0]} is"):
        LLM(other, threads=1, max_model_len=128).follow(first)


def test_ids_that_the_other_does_not_have(model: LLM, tmp_path: Path) -> None:
    large = LLM(tiny_llama(tmp_path / "large", vocab_size=330), threads=1, max_model_len=128)
    first = large.trace(prompt(5, 6), **(GREEDY | ALL), forced={1: 325})
    with pytest.raises(DiffError, match="325"):
        model.follow(first)


def test_a_text_that_ends_earlier_in_the_other(model: LLM, tmp_path: Path) -> None:
    """The other's own end token comes in the middle of what it shall follow."""
    asked = {"temperature": 0, "max_tokens": 4, **ALL}
    first = model.trace(TEXT, **asked)
    other = tmp_path / "other"
    shutil.copytree(_folder_of(model), other)
    config = json.loads((other / "config.json").read_text())
    config["eos_token_id"] = first.output.outputs[0].token_ids[1]
    (other / "config.json").write_text(json.dumps(config))
    ends = LLM(other, threads=1, max_model_len=128)
    with pytest.raises(DiffError, match="ends its text at output token 1"):
        ends.follow(first)
    forever = model.trace(TEXT, ignore_eos=True, **asked)
    assert diff(forever, ends.follow(forever)).identical


def test_traces_of_other_ids(model: LLM) -> None:
    with pytest.raises(DiffError, match="other ids"):
        diff(model.trace("dog", **GREEDY), model.trace("fox", **GREEDY))


@pytest.mark.parametrize(
    "asked",
    [
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"max_tokens": 20, "ignore_eos": False, "stop": ["e"]},
        {"max_tokens": 4, "min_tokens": 4, "ignore_eos": False},
    ],
)
def test_requests_that_end_early(model: LLM, asked: dict[str, Any]) -> None:
    first = model.trace(prompt(5), **(GREEDY | ALL | asked))
    second = model.follow(first)
    assert second.output.outputs[0].token_ids == first.output.outputs[0].token_ids
    found = diff(first, second)
    assert found.identical
    assert len(found.positions) == len(first.output.outputs[0].token_ids)


def test_hidden_scores_count_as_equal_and_lost_ones_do_not(model: LLM) -> None:
    first = model.trace(TEXT, **GREEDY)
    second = model.trace(TEXT, **GREEDY)
    scores = next(v for v in diff(first, second).values if v.name == "S_masked")
    assert (scores.differing, scores.relative) == (0, 0)
    (piece,) = second.steps[0].pieces["S6.4", "S_masked", 0]
    value = piece.value.copy()
    value[0, 3, 1] = -np.inf
    second.steps[0].pieces["S6.4", "S_masked", 0] = [piece._replace(value=value)]
    lost = next(v for v in diff(first, second).values if v.name == "S_masked" and v.layer == 0)
    assert (lost.differing, lost.relative) == (1, 0)
    assert diff(first, second).parting() is not None


def test_nothing_against_something_is_infinitely_far() -> None:
    value = ValueDiff("S4", "X", None, math.inf, 1.0, 1, 1)
    body = Diff([value], [], []).to_dict(0.1)
    assert body["parting_above_tolerance"]["relative"] is None
    json.dumps(body, allow_nan=False)
