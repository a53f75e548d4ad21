"""Every sampling parameter does something, and where each value came from is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_forge import Models, Rig, prompt

from seethrough import LLM, SamplingParams
from seethrough.engine.outputs import RequestOutput
from seethrough.errors import ParameterError
from seethrough.sampling.params import EffectiveParams

TEXT = "the quick brown fox jumps over the lazy dog"
DRAWN = {"temperature": 1.5, "seed": 5, "max_tokens": 12}
GREEDY = {"temperature": 0, "max_tokens": 12}
Look = Callable[[RequestOutput], Any]


def ids(output: RequestOutput) -> Any:
    return [sample.token_ids for sample in output.outputs]


def texts(output: RequestOutput) -> Any:
    return [sample.text for sample in output.outputs]


def views(output: RequestOutput) -> Any:
    return output.outputs[0].logprobs


# Field: (parameters, the same with the field changed, what differs).
EFFECTS: dict[str, tuple[dict[str, Any], dict[str, Any], Look]] = {
    "temperature": (DRAWN, {"temperature": 0.2}, ids),
    "top_k": (DRAWN, {"top_k": 2}, ids),
    "top_p": (DRAWN, {"top_p": 0.1}, ids),
    "min_p": (DRAWN, {"min_p": 0.6}, ids),
    "typical_p": (DRAWN, {"typical_p": 0.1}, ids),
    "repetition_penalty": (GREEDY | {"logit_bias": {5: 100}}, {"repetition_penalty": 1e6}, ids),
    "presence_penalty": (GREEDY | {"logit_bias": {5: 8}}, {"presence_penalty": 2}, ids),
    "frequency_penalty": (GREEDY | {"logit_bias": {5: 8}}, {"frequency_penalty": 2}, ids),
    "logit_bias": (GREEDY, {"logit_bias": {5: 100}}, ids),
    "seed": (DRAWN, {"seed": 6}, ids),
    "n": (DRAWN, {"n": 2}, ids),
    "max_tokens": (GREEDY, {"max_tokens": 3}, ids),
    "min_tokens": (GREEDY | {"stop_token_ids": list(range(250))}, {"min_tokens": 4}, ids),
    "stop": (GREEDY | {"logit_bias": {65: 100}}, {"stop": ["bb"]}, texts),
    "stop_token_ids": (GREEDY, {"stop_token_ids": list(range(250))}, ids),
    "include_stop_str_in_output": (
        GREEDY | {"logit_bias": {65: 100}, "stop": ["bb"]},
        {"include_stop_str_in_output": True},
        texts,
    ),
    "ignore_eos": (GREEDY, {"ignore_eos": True}, ids),
    "skip_special_tokens": (GREEDY, {"skip_special_tokens": False}, texts),
    "logprobs": (GREEDY, {"logprobs": 2}, views),
    "prompt_logprobs": (GREEDY, {"prompt_logprobs": 2}, lambda output: output.prompt_logprobs),
    "logprobs_mode": (DRAWN | {"logprobs": 2}, {"logprobs_mode": "processed_logprobs"}, views),
    "bad_words": (GREEDY | {"logit_bias": {65: 100}}, {"bad_words": ["b"]}, ids),
    "bad_words_ids": (GREEDY | {"logit_bias": {65: 100}}, {"bad_words_ids": [[65]]}, ids),
    "allowed_token_ids": (GREEDY, {"allowed_token_ids": [3, 4]}, ids),
}


def test_the_table_is_whole() -> None:
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert set(EFFECTS) == fields
    assert fields | {"origin"} == {field.name for field in dataclasses.fields(EffectiveParams)}


@pytest.mark.parametrize("field", EFFECTS)
def test_every_parameter_does_something(llm: LLM, field: str) -> None:
    """sgl-project/sglang#28179: accepted and ignored is worse than refused."""
    common, change, look = EFFECTS[field]
    if field in ("ignore_eos", "skip_special_tokens"):
        end = llm.tokenizer.eos_token_id
        common = common | {"logit_bias": {end: 100}}
        if field == "skip_special_tokens":
            common = common | {"ignore_eos": True}
    assert llm.tokenizer.token_bytes(65) == b"b", "the table's id 65 is meant to be this letter"
    before, after, again = (llm.generate(TEXT, **(common | more))[0] for more in ({}, change, {}))
    assert look(before) == look(again)
    assert look(before) != look(after)
    assert getattr(after.params, field) != getattr(before.params, field)
    assert after.params.origin[field] == "request"


def test_bad_words_are_not_said_in_any_spelling(llm: LLM) -> None:
    said = llm.generate(TEXT, **GREEDY)[0].outputs[0].token_ids
    banned = llm.generate(TEXT, bad_words_ids=[said[:2]], **GREEDY)[0].outputs[0].token_ids
    assert banned[0] == said[0]
    assert banned[1] != said[1]


# ------------------------------------------------------------------------------------ origins

SHIPPED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}


@pytest.fixture
def folder(rig: Rig, tmp_path: Path) -> Path:
    return rig.write(tmp_path / "shipped", "abc", generation={**SHIPPED, "max_length": 20})


def test_request_over_command_line_over_model_over_engine(models: Models, folder: Path) -> None:
    """EleutherAI/lm-evaluation-harness#3154: field by field, and told."""
    llm = LLM(folder, defaults=SamplingParams(top_k=5, top_p=0.8, stop=["zz"]), threads=1)
    params = llm.generate(prompt(1), top_p=0.5, seed=4, max_tokens=1)[0].params
    values = {
        "temperature": (0.7, "model"),
        "repetition_penalty": (1.1, "model"),
        "top_k": (5, "command line"),
        "stop": (("zz",), "command line"),
        "top_p": (0.5, "request"),
        "seed": (4, "request"),
        "min_p": (0.0, "engine"),
        "n": (1, "engine"),
    }
    for field, (value, origin) in values.items():
        assert (getattr(params, field), params.origin[field]) == (value, origin), field
    plain = models(folder).generate(prompt(1))[0].params
    assert (plain.top_k, plain.top_p, plain.origin["top_k"]) == (20, 0.9, "model")
    assert plain.origin["seed"] == "engine"
    assert plain.max_tokens is None


def test_what_the_model_ships_is_used(models: Models, rig: Rig, tmp_path: Path) -> None:
    only_best = rig.write(tmp_path / "k", "abcdef", generation={"top_k": 1}, sharpness=1)
    assert models(only_best).generate(prompt(1), max_tokens=6)[0].outputs[0].text == "abcdef"
    drawn = models(only_best).generate(prompt(1), max_tokens=6, top_k=0, seed=1)[0].outputs[0].text
    assert drawn != "abcdef"
    greedy = rig.write(
        tmp_path / "g",
        "abcdef",
        generation={"do_sample": False, "temperature": 0.9},
        sharpness=1,
    )
    output = models(greedy).generate(prompt(1), max_tokens=6)[0]
    assert (output.outputs[0].text, output.params.temperature) == ("abcdef", 0)


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", "hot"), ("top_k", 1.5), ("top_p", 7), ("min_p", True)]
)
def test_a_broken_value_in_the_models_file_is_named(
    models: Models, rig: Rig, tmp_path: Path, name: str, value: Any
) -> None:
    llm = models(rig.write(tmp_path / "broken", "abc", generation={name: value}))
    with pytest.raises(ParameterError, match=f"generation_config.{name}"):
        llm.generate(prompt(1))


def test_the_reported_seed_gives_the_same_answer_again(llm: LLM) -> None:
    first = llm.generate(TEXT, temperature=1.5, max_tokens=10)[0]
    assert first.params.origin["seed"] == "engine"
    again = llm.generate(TEXT, temperature=1.5, max_tokens=10, seed=first.params.seed)[0]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert llm.generate(TEXT, max_tokens=1)[0].params.seed != first.params.seed


def test_contradictions_between_sources_are_refused(folder: Path) -> None:
    llm = LLM(folder, defaults=SamplingParams(max_tokens=3), threads=1)
    with pytest.raises(ParameterError, match=r"min_tokens=4.*max_tokens=3"):
        llm.generate(prompt(1), min_tokens=4)


def test_parameters_as_an_object_a_list_or_keywords(llm: LLM) -> None:
    wanted = llm.generate("dog", **GREEDY)[0].outputs[0].token_ids
    params = SamplingParams(**GREEDY)
    assert llm.generate("dog", params)[0].outputs[0].token_ids == wanted
    assert llm.generate(["dog"], [params])[0].outputs[0].token_ids == wanted
    short = dataclasses.replace(params, max_tokens=2)
    both = llm.generate(["dog", "dog"], (params, short))
    assert [output.outputs[0].token_ids for output in both] == [wanted, wanted[:2]]
