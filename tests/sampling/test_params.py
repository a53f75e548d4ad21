"""SamplingParams, resolve and check_vocab: types, ranges, sources, JSON."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seethrough.errors import ParameterError
from seethrough.sampling.params import (
    LOGPROBS_MODES,
    MAX_LOGPROBS,
    MODEL_FIELDS,
    EffectiveParams,
    SamplingParams,
    check_vocab,
    resolve,
)

NUMBERS = {  # field: (lowest, highest, lowest is allowed)
    "temperature": (0, 1e6, True),
    "top_p": (0, 1, True),
    "min_p": (0, 1, True),
    "typical_p": (0, 1, False),
    "repetition_penalty": (0, 1e6, False),
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
}
INTEGERS = {
    "top_k": (-1, 2**31 - 1),
    "seed": (0, 2**64 - 1),
    "n": (1, 128),
    "max_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
BOOLEANS = ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens")
LISTS = ("stop", "stop_token_ids", "bad_words", "bad_words_ids", "allowed_token_ids")
ALL = {field.name for field in dataclasses.fields(SamplingParams)}


def seven() -> int:
    return 7


def effective(**given: object) -> EffectiveParams:
    return resolve(SamplingParams(**given), None, {}, seven)


def test_the_tables_of_this_test_cover_every_field() -> None:
    covered = {*NUMBERS, *INTEGERS, *BOOLEANS, *LISTS, "logit_bias", "logprobs_mode"}
    assert covered == ALL


def test_every_field_starts_unset() -> None:
    assert all(getattr(SamplingParams(), name) is None for name in ALL)
    assert SamplingParams().to_dict() == {}


@pytest.mark.parametrize("name", NUMBERS)
def test_number_range(name: str) -> None:
    low, high, low_allowed = NUMBERS[name]
    for value in (high, low + (high - low) / 4, np.float32(high), np.float64(high)):
        held = getattr(SamplingParams(**{name: value}), name)
        assert held == value
        assert type(held) is float
    outside = [high + 0.001, low - 0.001, math.nan, math.inf, -math.inf, np.float32("nan")]
    outside += [10**400, -(10**400)]
    if low_allowed:
        assert getattr(SamplingParams(**{name: low}), name) == low
        assert getattr(SamplingParams(**{name: np.int64(low)}), name) == low
    else:
        outside.append(low)
    for bad in outside:
        with pytest.raises(ParameterError) as caught:
            SamplingParams(**{name: bad})
        assert caught.value.name == name
        assert f"{high:g}" in caught.value.why


@pytest.mark.parametrize("name", INTEGERS)
def test_integer_range(name: str) -> None:
    low, high = INTEGERS[name]
    for value in (low, high):
        assert getattr(SamplingParams(**{name: value}), name) == value
    held = getattr(SamplingParams(**{name: np.int32(max(low, 1))}), name)
    assert type(held) is int
    for bad in (low - 1, high + 1, 10**30, -(10**30), 1.0, 2.5, np.float32(1)):
        with pytest.raises(ParameterError) as caught:
            SamplingParams(**{name: bad})
        assert caught.value.name == name


@pytest.mark.parametrize("name", [*NUMBERS, *INTEGERS])
@pytest.mark.parametrize(
    "bad", [True, False, np.True_, "1", b"1", [1], {}, (1,), object(), np.array([1]), 1j]
)
def test_wrong_types_for_numbers(name: str, bad: object) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: bad})
    assert caught.value.name == name


@pytest.mark.parametrize("name", BOOLEANS)
def test_booleans_are_only_booleans(name: str) -> None:
    for value in (True, False, np.True_):
        assert getattr(SamplingParams(**{name: value}), name) is bool(value)
    for bad in (0, 1, "true", "", [], 1.0):
        with pytest.raises(ParameterError, match=name):
            SamplingParams(**{name: bad})


def test_logprobs_mode() -> None:
    for mode in LOGPROBS_MODES:
        assert SamplingParams(logprobs_mode=mode).logprobs_mode == mode
    for bad in ("raw", "", 1, ["raw_logits"], None.__class__):
        with pytest.raises(ParameterError, match="processed_logprobs"):
            SamplingParams(logprobs_mode=bad)


def test_stop_forms() -> None:
    assert SamplingParams(stop="a") == SamplingParams(stop=["a"]) == SamplingParams(stop=("a",))
    assert SamplingParams(stop=[]).stop == ()
    assert len(SamplingParams(stop=[str(i) for i in range(16)]).stop) == 16


@pytest.mark.parametrize(
    "bad",
    [
        "",
        [""],
        ["", "x"],
        ["x", ""],
        [1],
        [None],
        5,
        {"a": 1},
        b"x",
        ["x"] * 17,
        "\ud83d",
        ["\ud83d"],
    ],
)
def test_stop_refused(bad: object) -> None:
    # sgl-project/sglang PR#38712: an empty stop string ends every answer at once.
    with pytest.raises(ParameterError) as caught:
        SamplingParams(stop=bad)
    assert caught.value.name == "stop"
    str(caught.value).encode("utf-8")


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_id_lists(name: str) -> None:
    assert getattr(SamplingParams(**{name: [3, 1, 3]}), name) == (3, 1)
    assert getattr(SamplingParams(**{name: np.array([3, 1])}), name) == (3, 1)
    for bad in ([-1], [True], [1.0], ["1"], [None], [2**40], 5, "12", {1: 2}):
        with pytest.raises(ParameterError) as caught:
            SamplingParams(**{name: bad})
        assert caught.value.name == name


def test_an_empty_allow_list_could_generate_nothing() -> None:
    with pytest.raises(ParameterError, match="allowed_token_ids"):
        SamplingParams(allowed_token_ids=[])


def test_bad_words_forms() -> None:
    assert SamplingParams(bad_words=["a"]).bad_words == ("a",)
    assert SamplingParams(bad_words_ids=[[1, 2], [3]]).bad_words_ids == ((1, 2), (3,))
    # A bare string is refused: it would be read letter by letter.
    for bad in ("word", [""], [1], ["\udc00"], ["x"] * 1025):
        with pytest.raises(ParameterError, match="bad_words"):
            SamplingParams(bad_words=bad)
    for bad in ([1], [[]], [[-1]], "12", [["1"]], [[1] * 257], [[True]], [[1]] * 1025):
        with pytest.raises(ParameterError, match="bad_words_ids"):
            SamplingParams(bad_words_ids=bad)


def test_logit_bias_keys_as_json_gives_them() -> None:
    assert SamplingParams(logit_bias={"5": 1, 6: -100}).logit_bias == {5: 1.0, 6: -100.0}
    assert SamplingParams(logit_bias={np.int64(5): np.float32(2)}).logit_bias == {5: 2.0}


@pytest.mark.parametrize(
    "bad",
    [
        {"abc": 1},
        {"-1": 1},
        {-1: 1},
        {"5": None},
        {"5": "1"},
        {"5": 100.5},
        {"5": -101},
        {"5": math.nan},
        {"5": True},
        {"1.0": 1},
        {1.0: 1},
        {True: 1},
        {"": 1},
        {" 5": 1},
        {"٥": 1},
        {"9" * 5000: 1},
        {"5": 1, 5: 2},
        {"05": 1, "5": 2},
        [[5, 1]],
        "5",
        7,
    ],
)
def test_logit_bias_refused(bad: object) -> None:
    # vllm-project/vllm PR#16529, InternLM/lmdeploy#2370: never a crash, always the key.
    with pytest.raises(ParameterError) as caught:
        SamplingParams(logit_bias=bad)
    assert caught.value.name.startswith("logit_bias")


def test_min_tokens_above_max_tokens() -> None:
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    with pytest.raises(ParameterError, match="min_tokens"):
        SamplingParams(min_tokens=4, max_tokens=3)
    # Also when the two come from different places.
    with pytest.raises(ParameterError, match="min_tokens"):
        resolve(SamplingParams(max_tokens=3), SamplingParams(min_tokens=4), {}, seven)


def test_max_tokens_zero_scores_the_prompt() -> None:
    # vllm-project/vllm#6521
    assert SamplingParams(max_tokens=0).max_tokens == 0
    assert effective(max_tokens=0).max_tokens == 0


def test_logprobs_have_a_cap() -> None:
    # sgl-project/sglang PR#40099; -1 ("all") would let one request ask for the whole vocabulary.
    for name in ("logprobs", "prompt_logprobs"):
        for bad in (MAX_LOGPROBS + 1, 10**6, -1):
            with pytest.raises(ParameterError, match=name):
                SamplingParams(**{name: bad})


def test_params_keep_no_hold_on_the_callers_lists() -> None:
    ids, bias = [1, 2], {1: 1.0}
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias)
    ids.append(3)
    bias[9] = 9.0
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {1: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


def test_from_dict() -> None:
    assert SamplingParams.from_dict({"top_k": None, "seed": 3}) == SamplingParams(seed=3)
    for name in ("topk", "top_K", "repeat_penalty", "", "__class__"):
        with pytest.raises(ParameterError) as caught:
            SamplingParams.from_dict({name: 1})
        assert caught.value.name == name
    with pytest.raises(ParameterError, match=r"did you mean top_k\?"):
        SamplingParams.from_dict({"topk": 1})
    with pytest.raises(ParameterError, match="unset_thing"):
        SamplingParams.from_dict({"unset_thing": None})
    for bad in ([], "x", None, 3):
        with pytest.raises(ParameterError):
            SamplingParams.from_dict(bad)
    with pytest.raises(ParameterError):
        SamplingParams.from_dict({1: 1})


FULL = {
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.1,
    "typical_p": 0.9,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"3": 1.5},
    "seed": 2**64 - 1,
    "n": 2,
    "max_tokens": 5,
    "min_tokens": 1,
    "stop": ["x"],
    "stop_token_ids": [1],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "logprobs": 3,
    "prompt_logprobs": 0,
    "logprobs_mode": "raw_logits",
    "bad_words": ["w"],
    "bad_words_ids": [[1, 2]],
    "allowed_token_ids": [1, 2],
}


def test_to_dict_and_back() -> None:
    assert FULL.keys() == ALL
    params = SamplingParams.from_dict(FULL)
    assert params.to_dict() == FULL
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
    assert pickle.loads(pickle.dumps(params)) == params


def test_effective_to_dict_is_strict_json_and_names_every_origin() -> None:
    params = resolve(SamplingParams.from_dict(FULL), None, {}, seven)
    shown = json.loads(json.dumps(params.to_dict(), allow_nan=False))
    assert {k: v for k, v in shown.items() if k != "origin"} == FULL
    assert shown["origin"] == dict.fromkeys(ALL, "request")
    assert pickle.loads(pickle.dumps(params)) == params
    defaults = effective()
    assert set(defaults.origin) == ALL
    assert set(defaults.origin.values()) == {"engine"}
    json.dumps(defaults.to_dict(), allow_nan=False)


def test_engine_defaults() -> None:
    shown = effective().to_dict()
    del shown["origin"]
    assert shown == {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "typical_p": 1.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logit_bias": {},
        "seed": 7,
        "n": 1,
        "max_tokens": None,
        "min_tokens": 0,
        "stop": [],
        "stop_token_ids": [],
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "logprobs": None,
        "prompt_logprobs": None,
        "logprobs_mode": "raw_logprobs",
        "bad_words": [],
        "bad_words_ids": [],
        "allowed_token_ids": None,
    }


@pytest.mark.parametrize("name", MODEL_FIELDS)
@pytest.mark.parametrize("setters", range(8))
def test_precedence_field_by_field(name: str, setters: int) -> None:
    # EleutherAI/lm-evaluation-harness#3154: applied to one field, never to its neighbours.
    values = {"request": 1, "command line": 0.5, "model": 0.25}
    if name == "top_k":
        values = {"request": 30, "command line": 20, "model": 10}
    given = {who: v for bit, (who, v) in enumerate(values.items()) if setters >> bit & 1}

    def source(who: str) -> dict[str, float]:
        return {name: given[who]} if who in given else {}

    params = resolve(
        SamplingParams(**source("request")),
        SamplingParams(**source("command line")),
        source("model"),
        seven,
    )
    winner = next((who for who in values if who in given), "engine")
    expected = given[winner] if winner != "engine" else getattr(effective(), name)
    assert getattr(params, name) == expected
    assert params.origin[name] == winner
    assert all(who == "engine" for field, who in params.origin.items() if field != name)


@pytest.mark.parametrize("name", sorted(ALL))
def test_the_command_line_can_set_every_field_and_the_request_wins(name: str) -> None:
    from_line = resolve(SamplingParams(), SamplingParams.from_dict({name: FULL[name]}), {}, seven)
    assert from_line.to_dict()[name] == FULL[name]
    assert from_line.origin[name] == "command line"


def test_falsy_values_are_set_values() -> None:
    line = SamplingParams(stop=["x"], temperature=1, top_k=5, ignore_eos=True, logit_bias={1: 1})
    request = SamplingParams(stop=[], temperature=0, top_k=0, ignore_eos=False, logit_bias={})
    params = resolve(request, line, {"top_k": 9}, seven)
    assert (params.stop, params.temperature, params.top_k) == ((), 0, 0)
    assert params.ignore_eos is False
    assert params.logit_bias == {}
    assert params.greedy


def test_generation_config_takes_only_sampling_fields() -> None:
    config = {
        "eos_token_id": [1, 2],
        "max_new_tokens": 3,
        "max_length": 20,
        "seed": 5,
        "stop": "x",
        "temperature": 0.7,
        "top_p": None,
        "transformers_version": "5",
    }
    params = resolve(SamplingParams(), None, config, seven)
    changed = {name for name, who in params.origin.items() if who == "model"}
    assert changed == {"temperature"}


def test_do_sample() -> None:
    config = {"do_sample": False, "temperature": 0.7, "top_k": 20}
    params = resolve(SamplingParams(), None, config, seven)
    assert params.greedy
    assert params.origin["temperature"] == "model"
    assert params.top_k == 20
    for do_sample in ({}, {"do_sample": None}, {"do_sample": True}):
        assert (
            resolve(SamplingParams(), None, {"temperature": 0.7, **do_sample}, seven).temperature
            == 0.7
        )
    assert resolve(SamplingParams(temperature=0.3), None, config, seven).temperature == 0.3
    with pytest.raises(ParameterError, match=r"generation_config\.do_sample"):
        resolve(SamplingParams(), None, {"do_sample": "no"}, seven)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("temperature", -1), ("top_k", 2.5), ("top_p", 2), ("min_p", "x"), ("repetition_penalty", 0)],
)
def test_generation_config_is_checked_and_named(name: str, bad: object) -> None:
    with pytest.raises(ParameterError) as caught:
        resolve(SamplingParams(), None, {name: bad}, seven)
    assert caught.value.name == f"generation_config.{name}"


def test_seed_source_is_asked_once_and_only_if_needed() -> None:
    asked = []

    def source() -> int:
        asked.append(1)
        return 2**64 - 5

    params = resolve(SamplingParams(), None, {}, source)
    assert (params.seed, params.origin["seed"], len(asked)) == (2**64 - 5, "engine", 1)
    params = resolve(SamplingParams(seed=0), None, {}, source)
    assert (params.seed, params.origin["seed"], len(asked)) == (0, "request", 1)
    with pytest.raises(ParameterError, match="seed"):
        resolve(SamplingParams(), None, {}, lambda: 2**64)


@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": {10: 1}},
        {"logit_bias": {"191222": -100}},
        {"allowed_token_ids": [1, 10]},
        {"stop_token_ids": [10**9], "min_tokens": 1},
        {"bad_words_ids": [[1], [2, 10, 3]]},
    ],
)
def test_check_vocab(given: dict[str, object]) -> None:
    # gonka-ai/gonka PR#1170, vllm-project/vllm PR#16529: at the door, by name, with the id.
    for params in (SamplingParams(**given), effective(**given)):
        with pytest.raises(ParameterError) as caught:
            check_vocab(params, 10)
        assert caught.value.name in given
        assert caught.value.value >= 10
    check_vocab(SamplingParams(**given), 10**9 + 1)


def test_check_vocab_accepts_the_last_id() -> None:
    check_vocab(SamplingParams(logit_bias={9: 1}, allowed_token_ids=[9], stop_token_ids=[9]), 10)
    check_vocab(SamplingParams(), 1)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(deadline=None, max_examples=400)
@given(st.dictionaries(st.sampled_from(sorted(ALL)), JSON, max_size=3))
def test_any_json_is_accepted_whole_or_refused_by_name(given: dict[str, object]) -> None:
    try:
        params = SamplingParams.from_dict(given)
    except ParameterError as error:
        named = error.name.split("[")[0]
    else:
        named = None
    if named is not None:
        assert named in given
        return
    again = json.loads(json.dumps(params.to_dict(), allow_nan=False))
    assert SamplingParams.from_dict(again) == params
    assert resolve(params, None, {}, seven).to_dict().items() >= params.to_dict().items()
