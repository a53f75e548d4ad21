"""A trace keeps what it was asked for, says what it left out, and names what it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from seethrough import LLM
from seethrough.errors import TraceError
from seethrough.stages import STAGE
from seethrough.trace.trace import Trace
from seethrough.trace.values import HEAD_AXIS, KV_VALUES, row_axis

Opened = Callable[..., LLM]
TEXT = "the quick brown fox jumps over the lazy dog"
SAMPLING = {"temperature": 1, "seed": 2, "max_tokens": 3}


@pytest.fixture(scope="module")
def whole(llm: LLM) -> Trace:
    return llm.trace(TEXT, **SAMPLING)


def stages_of(trace: Trace) -> set[str]:
    return {stage for stage, _, _ in trace.keys()}  # noqa: SIM118


def same(trace: Trace, whole: Trace) -> None:
    """Whatever it holds equals the whole trace's, and the request ran alike."""
    assert trace.output.outputs == whole.output.outputs
    for stage, name, layer in trace.keys():  # noqa: SIM118
        value = trace.array(stage, name, layer=layer)
        assert np.array_equal(value, whole.array(stage, name, layer=layer)), (stage, name, layer)


ARRAY_STAGES = [s for s in STAGE if s not in ("S0", "S1", "S2", "S13")]


@pytest.mark.parametrize("stage", ARRAY_STAGES)
def test_each_stage_alone(llm: LLM, whole: Trace, stage: str) -> None:
    trace = llm.trace(TEXT, stages=[stage], **SAMPLING)
    wanted = {s for s in stages_of(whole) if s == stage or s.startswith(f"{stage}.")}
    assert stages_of(trace) == wanted
    assert {k for k in whole.keys() if k[0] in wanted} == set(trace.keys())  # noqa: SIM118
    same(trace, whole)
    assert trace.to_dict()["arrays"]


def test_stages_without_arrays_are_allowed_and_hold_none(llm: LLM) -> None:
    trace = llm.trace(TEXT, stages=["S0", "S1", "S2", "S13"], **SAMPLING)
    assert trace.keys() == []
    with pytest.raises(TraceError, match="It holds: nothing"):
        trace.array("S9")


def test_stages_layers_heads_and_tokens_together(llm: LLM, whole: Trace) -> None:
    trace = llm.trace(
        TEXT, stages=["S6.4", "S6.5"], layers=[1], heads=[2], tokens=[3, 5], **SAMPLING
    )
    assert {(s, layer) for s, _, layer in trace.keys()} == {("S6.4", 1), ("S6.5", 1)}  # noqa: SIM118
    scores = trace.array("S6.4")
    wanted = whole.array("S6.4", layer=1)[2:3][:, [3, 5]][:, :, : scores.shape[2]]
    assert np.array_equal(scores, wanted)
    assert trace.positions("S6.4", "S_masked", 1) == [3, 5]
    assert trace.array("S6.5", "A", head=2).shape == (2, scores.shape[2])


def test_layers(llm: LLM, whole: Trace) -> None:
    trace = llm.trace(TEXT, layers=[0], **SAMPLING)
    assert {layer for _, _, layer in trace.keys()} == {None, 0}  # noqa: SIM118
    same(trace, whole)
    none = llm.trace(TEXT, layers=[], **SAMPLING)
    assert not any(stage.startswith("S6.") for stage in stages_of(none))
    with pytest.raises(TraceError, match="layer 1"):
        trace.array("S6.7", layer=1)


@pytest.mark.parametrize("heads", [[0], [3], [1, 2], [3, 0], [0, 1, 2, 3]])
def test_heads_and_the_key_heads_that_they_share(llm: LLM, whole: Trace, heads: list[int]) -> None:
    trace = llm.trace(TEXT, heads=heads, **SAMPLING)
    group = llm.spec.n_heads // llm.spec.n_kv_heads
    assert group == 2
    for stage, name, layer in trace.keys():  # noqa: SIM118
        full = whole.array(stage, name, layer=layer)
        value = trace.array(stage, name, layer=layer)
        if name not in HEAD_AXIS:
            assert np.array_equal(value, full)
            continue
        kept = sorted({h // group for h in heads}) if name in KV_VALUES else sorted(heads)
        assert np.array_equal(value, np.take(full, kept, axis=HEAD_AXIS[name])), name
        for head in heads:
            own = head // group if name in KV_VALUES else head
            one = trace.array(stage, name, layer=layer, head=head)
            assert np.array_equal(one, np.take(full, own, axis=HEAD_AXIS[name])), name
            assert np.array_equal(one, whole.array(stage, name, layer=layer, head=head))
    for missing in {0, 1, 2, 3, 4, -1} - set(heads):
        with pytest.raises(TraceError, match=f"no head {missing}"):
            trace.array("S6.4", layer=0, head=missing)


@pytest.mark.parametrize("tokens", [[0], [2, 7], [0, 1, 2], [9]])
@pytest.mark.parametrize("budget", [512, 3])
def test_tokens(open_kind: Opened, whole: Trace, tokens: list[int], budget: int) -> None:
    llm = open_kind("llama", max_num_batched_tokens=budget)
    trace = llm.trace(TEXT, tokens=tokens, **SAMPLING)
    for stage, name, layer in trace.keys():  # noqa: SIM118
        rows = whole.positions(stage, name, layer)
        places = [rows.index(t) for t in tokens if t in rows]
        value = trace.array(stage, name, layer=layer)
        full = np.take(whole.array(stage, name, layer=layer), places, axis=row_axis(name))
        full = full[..., : value.shape[-1]]
        np.testing.assert_allclose(value, full, atol=1e-4)
        assert trace.positions(stage, name, layer) == [rows[place] for place in places]


def test_the_last_prompt_token_has_the_first_choice(llm: LLM, whole: Trace) -> None:
    last = len(whole.prompt_token_ids) - 1
    trace = llm.trace(TEXT, tokens=[last], **SAMPLING)
    assert np.array_equal(trace.array("S9"), whole.array("S9", step=0))
    assert np.array_equal(trace.array("S10"), whole.array("S10", step=0))
    before = llm.trace(TEXT, tokens=[0], **SAMPLING)
    assert not {"S7", "S8", "S9", "S10", "S11", "S12"} & stages_of(before)


# ------------------------------------------------------------------------------------ the budget


def nbytes(trace: Trace) -> int:
    pieces = [p for step in trace.steps for held in step.pieces.values() for p in held]
    return sum(piece.value.nbytes for piece in pieces)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_what_does_not_fit_is_named_and_the_request_goes_on(
    open_kind: Opened, kind: str, share: float
) -> None:
    llm = open_kind(kind)
    whole = llm.trace(TEXT, **SAMPLING)
    assert whole.omitted == []
    budget = int(nbytes(whole) * share)
    trace = llm.trace(TEXT, byte_budget=budget, **SAMPLING)
    assert trace.output.outputs == whole.output.outputs
    assert nbytes(trace) <= budget
    assert trace.omitted
    assert len(set(trace.omitted)) == len(trace.omitted)
    lost = {(o.step, o.stage, o.name, o.layer) for o in trace.omitted}
    for step, (full, cut) in enumerate(zip(whole.steps, trace.steps, strict=True)):
        held = {key for key, pieces in cut.pieces.items() if pieces}
        missing = set(full.pieces) - held
        assert {(step, *key) for key in missing} == {item for item in lost if item[0] == step}
        for key in held:
            for a, b in zip(full.pieces[key], cut.pieces[key], strict=True):
                assert np.array_equal(a.value, b.value), key
    for omitted in trace.omitted[:3]:
        with pytest.raises(TraceError, match=f"did not fit.*{budget} bytes"):
            trace.array(omitted.stage, omitted.name, layer=omitted.layer, step=omitted.step)


def test_exactly_enough_is_enough(open_kind: Opened) -> None:
    for kind in ("llama", "gemma3"):  # gemma renews values inside a stage: counted once
        llm = open_kind(kind)
        whole = llm.trace(TEXT, **SAMPLING)
        exact = llm.trace(TEXT, byte_budget=nbytes(whole), **SAMPLING)
        assert exact.omitted == []
        assert exact.keys() == whole.keys()


def test_a_derived_value_whose_source_did_not_fit(llm: LLM) -> None:
    trace = llm.trace(TEXT, stages=["S6.5", "S12"], byte_budget=0, **SAMPLING)
    for stage, name, layer in (("S6.5", "A", 0), ("S12", "probs", None)):
        with pytest.raises(TraceError, match="did not fit"):
            trace.array(stage, name, layer=layer)


# ------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"stages": ["S99"]}, r"no stage 'S99'; known: S0, S1, .*S13"),
        ({"stages": ["s4"]}, "no stage 's4'"),
        ({"layers": [2]}, "no layer 2; known: 0 to 1"),
        ({"layers": [-1]}, "no layer -1"),
        ({"heads": [4]}, "no head 4; known: 0 to 3"),
        ({"tokens": [-1]}, "no token position -1; 0 or more"),
        ({"byte_budget": -1}, "byte_budget=-1"),
    ],
)
def test_wishes_that_the_model_cannot_fulfil(llm: LLM, wish: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        llm.trace(TEXT, **wish, **SAMPLING)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"stage": "S99"}, "no stage 'S99'"),
        ({"stage": "S4", "name": "nope"}, r"does not hold S4 nope. It holds: S3 padded_token_ids"),
        ({"stage": "S13"}, "does not hold S13"),
        ({"stage": "S6.7"}, "exists in 2 layers: say which"),
        ({"stage": "S6.7", "layer": 7}, "does not hold S6.7 X_updated layer 7"),
        ({"stage": "S9", "layer": 0}, "does not hold S9 logits layer 0"),
        ({"stage": "S9", "step": 3}, "no step 3; the trace has 3"),
        ({"stage": "S9", "step": -1}, "no step -1"),
        ({"stage": "S9", "head": 0}, "logits has no heads"),
        # A derived value belongs to its own stage only.
        ({"stage": "S6.4", "name": "A", "layer": 0}, r"does not hold S6.4 A"),
        ({"stage": "S9", "name": "probs"}, "does not hold S9 probs"),
    ],
)
def test_questions_that_the_trace_cannot_answer(
    whole: Trace, ask: dict[str, Any], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        whole.array(**ask)


def test_the_main_value_and_the_only_layer_are_found(llm: LLM, whole: Trace) -> None:
    assert np.array_equal(whole.array("S9"), whole.array("S9", "logits"))
    assert np.array_equal(
        whole.array("S6.5", layer=0, step=0), whole.array("S6.5", "A", layer=0, step=0)
    )
    one = llm.trace(TEXT, layers=[1], **SAMPLING)
    assert np.array_equal(one.array("S6.7"), whole.array("S6.7", layer=1))
