"""What a trace shows is what happened: the untraced run's ids, and `pipeline.py`'s numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_forge import prompt
from pipeline_values import pipeline_values
from traced_kinds import KINDS

from seethrough import LLM, pipeline
from seethrough.config import BACKENDS
from seethrough.engine import engine as engine_module
from seethrough.errors import NonFiniteLogitsError, ParameterError, TraceError
from seethrough.model import run as run_module
from seethrough.sampling.philox import uniform
from seethrough.stages import STAGE
from seethrough.trace.trace import Trace
from seethrough.trace.values import row_axis

Opened = Callable[..., LLM]
TEXT = "the quick brown fox jumps over the lazy dog"
DRAWN = {"temperature": 1.2, "top_k": 30, "top_p": 0.95, "seed": 11, "max_tokens": 4}
# Values inside an operation's stage that the stage table does not name.
INNER = {"x_norm", "o", "attn_out", "gate", "up", "act", "mlp_out"}
HEAD_STAGES = ("S7", "S8", "S9")


def traced(llm: LLM, **more: Any) -> Trace:
    return llm.trace(TEXT, **(DRAWN | more))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampling", [DRAWN, {"temperature": 0, "max_tokens": 4}])
def test_a_traced_run_is_the_run(open_kind: Opened, kind: str, sampling: dict[str, Any]) -> None:
    llm = open_kind(kind)
    plain = llm.generate(TEXT, logprobs=2, **sampling)[0]
    trace = llm.trace(TEXT, logprobs=2, **sampling)
    assert trace.output.outputs == plain.outputs
    assert trace.output.prompt_token_ids == plain.prompt_token_ids
    assert [step.token_id for step in trace.steps] == plain.outputs[0].token_ids
    assert "".join(step.text for step in trace.steps) == plain.outputs[0].text
    assert (trace.prompt, trace.prompt_token_ids) == (TEXT, plain.prompt_token_ids)
    assert trace.tokens == llm.tokenizer.pieces(plain.prompt_token_ids + plain.outputs[0].token_ids)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("budget", [512, 16, 3, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_every_array_is_the_pipelines(
    open_kind: Opened, kind: str, budget: int, backend: str
) -> None:
    """All values of all stages, layers, heads and tokens, in one prefill or in chunks."""
    llm = open_kind(kind, max_num_batched_tokens=budget, backend=backend)
    trace = traced(llm)
    n = len(trace.prompt_token_ids)
    ids = trace.prompt_token_ids + trace.output.outputs[0].token_ids[:-1]
    wanted = pipeline_values(llm, ids)
    held = {key for key in trace.keys() if key[1] not in INNER}  # noqa: SIM118
    sampled = {("S10", "adjusted_logits", None), ("S11", "candidate_logits", None)}
    assert held == set(wanted) | sampled | {("S12", "probs", None)}
    for (stage, name, layer), full in wanted.items():
        value = trace.array(stage, name, layer=layer)
        rows = full[n - 1 :] if stage in HEAD_STAGES else full
        assert value.shape == rows.shape, (stage, name, layer)
        assert np.array_equal(np.isneginf(value), np.isneginf(rows)), (stage, name, layer)
        seen = np.isfinite(rows)
        np.testing.assert_allclose(value[seen], rows[seen], atol=1e-4, rtol=1e-4, err_msg=name)
        axis_rows = list(range(n - 1, len(ids))) if stage in HEAD_STAGES else list(range(len(ids)))
        assert trace.positions(stage, name, layer) == axis_rows


@pytest.mark.parametrize("kind", KINDS)
def test_attention_weights_are_weights(open_kind: Opened, kind: str) -> None:
    llm = open_kind(kind)
    trace = traced(llm)
    for layer, spec in enumerate(llm.spec.layers):
        a = trace.array("S6.5", "A", layer=layer)  # [H, n, t]
        scores = trace.array("S6.4", layer=layer)
        np.testing.assert_allclose(a.sum(axis=-1), 1, atol=1e-6)
        distance = np.subtract.outer(np.arange(a.shape[1]), np.arange(a.shape[2]))
        hidden = (distance < 0) | (distance >= (spec.window or 10**9))
        assert np.array_equal(np.isneginf(scores), np.broadcast_to(hidden, scores.shape))
        assert np.all(a[:, hidden] == 0)
        # The weighted sum of the cached values is what attention gave.
        values = trace.array("S6.8", layer=layer)[1]  # [t, Hkv, dh]
        values = np.repeat(values, a.shape[0] // values.shape[1], axis=1)
        mixed = np.einsum("hnt,thd->nhd", a, values.astype(np.float32))
        np.testing.assert_allclose(mixed, trace.array("S6.5", "O_heads", layer=layer), atol=1e-5)


def test_only_rope_models_have_a_rotation(open_kind: Opened) -> None:
    for kind in ("gpt2", "bloom"):
        trace = traced(open_kind(kind))
        with pytest.raises(TraceError, match=r"does not hold S6\.3"):
            trace.array("S6.3")
        assert trace.array("S6.4", layer=0).shape[0] == 4


def test_a_half_cache_is_shown_rounded(open_kind: Opened) -> None:
    trace = traced(open_kind("llama", kv_cache_dtype="f16"))
    cached = trace.array("S6.8", layer=1)
    assert cached.dtype == np.float16
    keys, values = trace.array("S6.3", "K_pos", layer=1), trace.array("S6.2", "V_heads", layer=1)
    assert np.array_equal(cached, np.stack([keys, values]).astype(np.float16))


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_shapes_are_the_stage_tables(open_kind: Opened, kind: str) -> None:
    llm = open_kind(kind)
    trace, spec = traced(llm), llm.spec
    n = len(trace.prompt_token_ids)
    t = n + len(trace.steps) - 1
    sizes = {
        "d": spec.d_model,
        "H": spec.n_heads,
        "Hkv": spec.n_kv_heads,
        "dh": spec.head_dim,
        "V": spec.vocab_size,
        "n": t,
        "t": t,
    }
    for stage, name, layer in trace.keys():  # noqa: SIM118
        if name in INNER:
            continue
        (shape,) = [value.shape for value in STAGE[stage].outputs if value.name == name]
        value = trace.array(stage, name, layer=layer)
        assert (layer is not None) == stage.startswith("S6.")
        if stage == "S3":  # one request, and nothing is padded
            assert shape == "[B, n_max]"
            assert value.shape == (1, t)
            continue
        wanted = [
            int(np.prod([_size(s, sizes) for s in part.split("·")])) for part in _parts(shape)
        ]
        if wanted[0] in (spec.d_model, spec.vocab_size) and len(wanted) == 1:
            wanted = [len(trace.steps), *wanted]  # one row per output token
        assert list(value.shape) == wanted, (stage, name)
        one = trace.array(stage, name, layer=layer, step=1)
        assert one.shape[row_axis(name)] == 1


def _parts(shape: str) -> list[str]:
    return re.sub(r"[\[\] ]", "", shape).split(",")


def _size(symbol: str, sizes: dict[str, int]) -> int:
    return int(symbol) if symbol.isdigit() else sizes[symbol]


def test_scores_of_a_step_are_as_wide_as_its_context(llm: LLM) -> None:
    trace = traced(llm)
    n = len(trace.prompt_token_ids)
    for step in range(4):
        rows = n if step == 0 else 1
        assert trace.array("S6.4", layer=0, step=step).shape == (4, rows, n + step)
        assert trace.array("S6.5", "A", layer=0, step=step).shape == (4, rows, n + step)
        assert trace.array("S9", step=step).shape == (1, llm.spec.vocab_size)
        assert trace.steps[step].positions == (list(range(n)) if step == 0 else [n + step - 1])


# ------------------------------------------------------------------------------------ the choice

CHOICES: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.4, "logit_bias": {5: 3.0}},
    {"temperature": 1},
    DRAWN,
    {"temperature": 0.7, "min_p": 0.05, "typical_p": 0.9, "seed": 3},
    {"temperature": 1, "presence_penalty": 1, "frequency_penalty": 0.5, "seed": 4},
    {"temperature": 1, "allowed_token_ids": [3, 5, 8], "seed": 5},
    {"temperature": 2, "bad_words_ids": [[3], [5, 8]], "min_tokens": 3, "seed": 6},
]


@pytest.mark.parametrize("sampling", CHOICES)
def test_the_choice_can_be_replayed_by_hand(llm: LLM, sampling: dict[str, Any]) -> None:
    trace = llm.trace(TEXT, **({"max_tokens": 5} | sampling))
    output = trace.output
    state = pipeline.Running(output.prompt_token_ids, output.params, [], llm._loaded.end_ids)
    for i, step in enumerate(trace.steps):
        logits, adjusted, candidates, probs = (
            trace.array(stage, name, step=i)[0]
            for stage, name in (
                ("S9", "logits"),
                ("S10", "adjusted_logits"),
                ("S11", "candidate_logits"),
                ("S12", "probs"),
            )
        )
        same = {"atol": 1e-5, "rtol": 1e-5}
        np.testing.assert_allclose(adjusted, pipeline.adjust(logits, state), **same)
        np.testing.assert_allclose(candidates, pipeline.truncate(adjusted, output.params), **same)
        np.testing.assert_allclose(probs, pipeline.softmax(candidates), **same)
        assert probs.sum() == pytest.approx(1, abs=1e-5)
        record = step.record
        assert record is not None
        assert record.token_id == step.token_id == output.outputs[0].token_ids[i]
        if sampling["temperature"] == 0:
            assert record.u is None
            assert step.token_id == int(candidates.argmax())
        else:
            assert record.u == uniform(output.params.seed, i, 0)
            weights = pipeline.softmax(candidates.astype(np.float64))
            mass = np.cumsum(weights)
            assert step.token_id == int(np.argmax(mass > record.u * mass[-1]))
            assert record.prob == pytest.approx(weights[step.token_id])
        assert record.candidates[0].token_id == int(candidates.argmax())
        state.output_ids.append(step.token_id)


def test_steps_that_did_nothing_are_not_recorded(llm: LLM) -> None:
    plain = llm.trace(TEXT, temperature=1, max_tokens=1)
    assert plain.steps[0].record.steps == []
    assert np.array_equal(plain.array("S10"), plain.array("S9"))
    full = traced(llm)
    assert [s.name for s in full.steps[0].record.steps] == ["temperature", "top_k", "top_p"]
    assert full.steps[0].record.steps[1].survivors == 30


# ------------------------------------------------------------------------------------ odd runs


def test_a_trace_of_a_prompt_alone(llm: LLM) -> None:
    trace = llm.trace(TEXT, max_tokens=0, prompt_logprobs=0)
    n = len(trace.prompt_token_ids)
    assert len(trace.steps) == 1
    assert trace.steps[0].token_id is None
    assert trace.array("S9").shape == (n, llm.spec.vocab_size)
    wanted = pipeline_values(llm, trace.prompt_token_ids)
    np.testing.assert_allclose(trace.array("S9"), wanted["S9", "logits", None], atol=1e-4)
    assert trace.positions("S9", "logits") == list(range(n))
    with pytest.raises(TraceError, match="S12"):
        trace.array("S12")


def test_a_prompt_of_ids_and_one_token(llm: LLM) -> None:
    trace = llm.trace(prompt(5), temperature=0, max_tokens=1)
    assert (trace.prompt, trace.prompt_token_ids) == (None, [5])
    assert trace.array("S6.4", layer=0).shape == (4, 1, 1)


def test_a_trace_of_a_request_that_ends_early(llm: LLM) -> None:
    trace = llm.trace(TEXT, logit_bias={llm.tokenizer.eos_token_id: 100}, temperature=0)
    assert trace.output.outputs[0].finish_reason == "stop"
    assert len(trace.steps) == 1
    assert trace.steps[0].text == ""


def test_broken_numbers_can_be_looked_at(
    open_kind: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_kind("llama", backend="reference")
    weights = llm._engine.model.program.weights
    broken = weights["final_norm.weight"].copy()
    broken[3] = np.nan
    monkeypatch.setitem(weights, "final_norm.weight", broken)
    trace = traced(llm)
    assert isinstance(trace.output.outputs[0].error, NonFiniteLogitsError)
    assert np.isnan(trace.array("S9")).all()
    assert np.isnan(trace.array("S8")).sum() == 1
    assert np.isfinite(trace.array("S7")).all()


def test_a_trace_follows_one_sample_and_runs_alone(llm: LLM) -> None:
    with pytest.raises(ParameterError, match="n=2"):
        llm.trace(TEXT, n=2)
    with llm.stream(TEXT, max_tokens=3) as stream:
        next(stream)
        with pytest.raises(TraceError, match="stream"):
            llm.trace(TEXT, max_tokens=1)
    assert llm.trace(TEXT, max_tokens=1).output.finished


def test_every_stage_that_ran_has_its_time(llm: LLM) -> None:
    trace = traced(llm)
    first = trace.steps[0]
    for stage in ("S1", "S4", "S6.1", "S6.5", "S6.7", "S7", "S8", "S9", "S10", "S11", "S12"):
        assert 0 <= first.stage_seconds(stage) < 60, stage
    assert first.stage_seconds("S5") is None  # RoPE: nothing is added there
    assert trace.steps[1].stage_seconds("S1") is None


# ------------------------------------------------------------------------------------ off


def test_without_a_tracer_nothing_of_tracing_is_touched(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = llm.generate(TEXT, **DRAWN)[0].outputs
    records: list[object] = []
    original = engine_module.sample

    def watched(*args: Any, **kwargs: Any) -> Any:
        records.append(kwargs["record"])
        return original(*args, **kwargs)

    forbidden = lambda *_, **__: pytest.fail("tracing was touched")  # noqa: E731
    monkeypatch.setattr(engine_module, "sample", watched)
    monkeypatch.setattr(run_module, "_traced", forbidden)
    monkeypatch.setattr(run_module, "perf_counter", forbidden)
    for name in ("begin_step", "op_done", "new_record", "token_done", "wants_scores"):
        monkeypatch.setattr(f"seethrough.trace.tracer.Tracer.{name}", forbidden)
    assert llm.generate(TEXT, **DRAWN)[0].outputs == wanted
    assert "".join(piece.text for piece in llm.stream(TEXT, **DRAWN)) == wanted[0].text
    assert records == [None] * 8


# ------------------------------------------------------------------------------ forced tokens


@pytest.mark.parametrize("sampling", [DRAWN, {"temperature": 0, "max_tokens": 4}])
def test_a_forced_token_is_taken_and_the_run_goes_on_from_it(
    llm: LLM, sampling: dict[str, Any]
) -> None:
    """What follows is what the model says after the prompt with that token in it."""
    greedy = {"temperature": 0, "max_tokens": 4}
    plain = llm.trace(TEXT, logprobs=2, **sampling)
    taken = plain.output.outputs[0].token_ids
    other = next(i for i in range(5, 99) if i not in taken)
    trace = llm.trace(TEXT, logprobs=2, forced={1: other}, **sampling)
    ids = trace.output.outputs[0].token_ids
    assert ids[:2] == [taken[0], other]
    assert trace.steps[1].record is not None
    assert trace.steps[1].record.token_id == other
    assert trace.output.outputs[0].logprobs is not None
    assert other in trace.output.outputs[0].logprobs[1]
    forced_greedy = llm.trace(TEXT, forced={1: other}, **greedy).output.outputs[0].token_ids
    prefix = [*plain.prompt_token_ids, *forced_greedy[:2]]
    follow = llm.generate(prompt(*prefix), temperature=0, max_tokens=2)[0].outputs[0].token_ids
    assert forced_greedy[2:] == follow


def test_forcing_what_would_be_chosen_changes_nothing(llm: LLM) -> None:
    plain = traced(llm, logprobs=3).output.outputs[0]
    all_of_it = dict(enumerate(plain.token_ids))
    assert traced(llm, logprobs=3, forced=all_of_it).output.outputs == [plain]


def test_a_forced_token_may_be_a_banned_one_and_may_end_the_text(llm: LLM) -> None:
    banned = traced(llm, allowed_token_ids=[5], forced={0: 7}).output.outputs[0]
    assert banned.token_ids == [7, 5, 5, 5]
    end = llm.tokenizer.eos_token_id
    ended = traced(llm, forced={1: end}).output.outputs[0]
    assert (len(ended.token_ids), ended.finish_reason) == (2, "stop")


@pytest.mark.parametrize("forced", [{-1: 5}, {0: -1}, {0: 10**6}, {10**6: 5}])
def test_what_cannot_be_forced_is_refused(llm: LLM, forced: dict[int, int]) -> None:
    with pytest.raises(ParameterError, match="forced"):
        traced(llm, forced=forced)
