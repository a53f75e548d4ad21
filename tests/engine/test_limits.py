"""Limits: the context, empty prompts, max_tokens, the KV pool, memory, and engine settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_forge import CONTEXT, Models, Rig, prompt, streamed

from seethrough import LLM
from seethrough.config import EngineConfig
from seethrough.engine import load as loading
from seethrough.errors import (
    CapacityError,
    CheckpointError,
    ContextLengthError,
    InsufficientMemoryError,
    ModelNotFoundError,
    ParameterError,
)

Says = Callable[..., LLM]


@pytest.fixture
def short(models: Models, llama_dir: Path) -> LLM:
    return models(llama_dir, max_model_len=64)


@pytest.mark.parametrize("most", [None, 1, 2, 3, 100])
@pytest.mark.parametrize("length", [62, 63, 64, 65, 66])
def test_prompt_and_answer_against_the_context(short: LLM, length: int, most: int | None) -> None:
    """vllm-project/vllm#33418, #1087: true numbers, at once, streamed or not; nothing is cut."""
    ids = prompt(*range(length))
    room = 64 - length
    sampling = {"max_tokens": most, "temperature": 0, "ignore_eos": True}
    if (most or 1) <= room:
        output = short.generate(ids, **sampling)[0]
        assert output.prompt_token_ids == list(range(length))
        assert len(output.outputs[0].token_ids) == (most or room)
        assert output.outputs[0].finish_reason == "length"
        assert len(streamed(short, ids, **sampling)[1]) == (most or room)
        return
    wanted = most or 1
    for ask in (short.generate, short.stream):
        with pytest.raises(ContextLengthError) as caught:
            ask(ids, **sampling)
        error = caught.value
        assert (error.prompt_tokens, error.max_tokens, error.max_model_len) == (length, wanted, 64)
        for number in (length, wanted, length + wanted, 64):
            assert str(number) in str(error)
    assert not short._engine.busy


def test_a_long_text_is_refused_not_cut(short: LLM) -> None:
    """ollama/ollama#4967: the front of a prompt never disappears in silence."""
    with pytest.raises(ContextLengthError):
        short.generate("the secret word is fox. " + "dog " * 128, max_tokens=4)


def test_without_max_tokens_the_rest_of_the_context_is_filled(short: LLM) -> None:
    """ggml-org/llama.cpp#13359: the end of the context is an end like any other."""
    outputs = short.generate(
        [prompt(*range(n)) for n in (1, 30, 63)], ignore_eos=True, temperature=0
    )
    for output, length in zip(outputs, (1, 30, 63), strict=True):
        assert len(output.outputs[0].token_ids) == 64 - length
        assert output.outputs[0].finish_reason == "length"


def test_several_fill_the_context_over_a_pool_that_holds_one(
    short: LLM, models: Models, llama_dir: Path
) -> None:
    """ggml-org/llama.cpp#13359: each gives way and comes back, and each ends at the same place."""
    tight = models(llama_dir, max_model_len=64, num_kv_blocks=4)
    asked, way = [prompt(*range(n)) for n in (1, 16, 30, 63)], {"ignore_eos": True, "seed": 3}
    outputs = tight.generate(asked, **way)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for output, ids in zip(outputs, asked, strict=True):
        assert output.outputs == short.generate(ids, **way)[0].outputs
        assert output.metrics.completion_tokens == 64 - len(ids["prompt_token_ids"])
        assert output.outputs[0].finish_reason == "length"


def test_a_full_context_reaches_the_models_own_end(says: Says) -> None:
    llm = says("x" * CONTEXT)
    output = llm.generate(prompt(1), temperature=0)[0].outputs[0]
    assert (output.text, output.finish_reason) == ("x" * (CONTEXT - 1), "length")
    full = llm.generate(prompt(*range(CONTEXT)), max_tokens=0, prompt_logprobs=0)[0]
    assert len(full.prompt_logprobs or []) == CONTEXT


# ------------------------------------------------------------------------------------ empty prompts


def test_an_empty_prompt_starts_from_bos_where_there_is_one(models: Models, tmp_path: Path) -> None:
    """vllm-project/vllm#7283."""
    rig = Rig(bos="<s>")
    llm = models(rig.write(tmp_path, "from nothing"))
    for empty in ("", {"prompt": ""}, {}, {"prompt": None}):
        output = llm.generate(empty, temperature=0, max_tokens=12)[0]
        assert output.prompt_token_ids == [rig.id("<s>")]
        assert output.outputs[0].text == "from nothing"
    with pytest.raises(ParameterError, match="prompt_token_ids"):
        llm.generate({"prompt_token_ids": []})


def test_an_empty_prompt_without_bos_is_refused(llm: LLM) -> None:
    for empty in ("", {"prompt": ""}, {"prompt_token_ids": []}, [""], ["fine", ""]):
        with pytest.raises(ParameterError, match="prompt"):
            llm.generate(empty, max_tokens=2)
        if not isinstance(empty, list):
            with pytest.raises(ParameterError, match="prompt"):
                llm.stream(empty, max_tokens=2)
    assert llm.generate("dog", max_tokens=2)[0].finished


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []


# ------------------------------------------------------------------------------------ max_tokens


def test_max_tokens_zero_scores_the_prompt_only(llm: LLM) -> None:
    """vllm-project/vllm#6521."""
    for sampling in ({}, {"prompt_logprobs": 1}, {"n": 2}, {"logprobs": 1}):
        output = llm.generate("the dog", max_tokens=0, **sampling)[0]
        for sample in output.outputs:
            assert (sample.text, sample.token_ids, sample.finish_reason) == ("", [], "length")
        assert (output.prompt_logprobs is not None) == ("prompt_logprobs" in sampling)
        assert output.metrics.completion_tokens == 0
    pieces = list(llm.stream("the dog", max_tokens=0))
    assert [(p.text, p.token_ids, p.finish_reason) for p in pieces] == [("", [], "length")]


@pytest.mark.parametrize("most", [-1, 2**63, 10**400, 1.5, "4", True, float("nan")])
def test_impossible_max_tokens_are_refused(llm: LLM, most: object) -> None:
    for ask in (llm.generate, llm.stream):
        with pytest.raises(ParameterError, match="max_tokens"):
            ask("dog", max_tokens=most)


def test_a_huge_max_tokens_names_the_context(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="2147483647"):
        llm.generate("dog", max_tokens=2**31 - 1)


# ------------------------------------------------------------------------------------ pool, memory


def test_a_request_that_can_never_fit_is_refused_at_the_door(
    models: Models, llama_dir: Path
) -> None:
    small = models(llama_dir, max_model_len=64, block_size=4, num_kv_blocks=3)
    with pytest.raises(CapacityError) as caught:
        small.generate([prompt(5), prompt(*range(10))], max_tokens=4)
    error = caught.value
    assert (error.needed, error.total, error.block_size) == (4, 3, 4)
    for number in ("4 KV cache blocks", "3 in all"):
        assert number in str(error)
    # Exactly full is fine: the last token is never computed.
    for length, most in ((12, 1), (10, 3), (1, 12), (12, 0)):
        output = small.generate(prompt(*range(length)), max_tokens=most, ignore_eos=True)[0]
        assert len(output.outputs[0].token_ids) == most
    with pytest.raises(CapacityError):
        small.generate(prompt(*range(12)), max_tokens=2)
    with pytest.raises(CapacityError):
        small.stream(prompt(1), max_tokens=13)
    assert small.generate(prompt(*range(5)), max_tokens=4, n=5)[0].finished


def test_a_pool_smaller_than_the_models_context_shortens_the_context(
    models: Models, llama_dir: Path
) -> None:
    llm = models(llama_dir, block_size=4, num_kv_blocks=5)
    assert (llm.max_model_len, llm.report.model_max_len) == (20, 128)
    with pytest.raises(ContextLengthError, match="holds 20"):
        llm.generate(prompt(*range(18)), max_tokens=3)


def test_too_little_memory_is_said_before_loading(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda: 5_000_000)
    assert LLM(llama_dir, max_model_len=64).report.available == 5_000_000
    with pytest.raises(InsufficientMemoryError, match=r"KV pool 81 MB, but 5 MB are free"):
        LLM(llama_dir, num_kv_blocks=20_000)
    monkeypatch.setattr(loading, "available_memory", lambda: 100_000)
    monkeypatch.setattr(loading, "build_model", lambda *_: pytest.fail("weights were expanded"))
    with pytest.raises(InsufficientMemoryError, match="0 MB are free"):
        LLM(llama_dir)


def test_the_pool_takes_at_most_a_quarter_of_what_is_free(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 400_000
    monkeypatch.setattr(loading, "available_memory", lambda: free)
    report = LLM(llama_dir).report
    assert 0 < report.kv_bytes <= (free - report.expanded) / 4
    monkeypatch.undo()
    assert LLM(llama_dir).report.num_kv_blocks == 8 * 128 // 16


def test_a_context_beyond_the_model_is_refused(llama_dir: Path) -> None:
    with pytest.raises(CheckpointError, match=r"max_model_len=129.*128"):
        LLM(llama_dir, max_model_len=129)
    assert LLM(llama_dir, max_model_len=128).max_model_len == 128


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="nothing-here"):
        LLM(tmp_path / "nothing-here")


# ------------------------------------------------------------------------------------ settings

INTEGERS = (
    "threads",
    "max_model_len",
    "block_size",
    "num_kv_blocks",
    "max_num_batched_tokens",
    "max_num_seqs",
)


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [0, -1, 1.0, "8", True, 10**12])
def test_bad_engine_settings_are_named(llama_dir: Path, name: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=name):
        LLM(llama_dir, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "known"),
    [
        ("kv_cache_dtype", "f8", "auto, f32, f16"),
        ("kv_cache_dtype", None, "auto"),
        ("backend", "cuda", "reference"),
        ("max_len", 64, "max_model_len"),
        ("temperature", 0, "threads"),
    ],
)
def test_unknown_settings_are_named_with_what_is_known(
    llama_dir: Path, name: str, value: Any, known: str
) -> None:
    with pytest.raises(ParameterError, match=f"{name}.*{known}"):
        LLM(llama_dir, **{name: value})


def test_none_is_allowed_only_where_it_means_something() -> None:
    EngineConfig(threads=None, max_model_len=None, num_kv_blocks=None)
    for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
        with pytest.raises(ParameterError, match=name):
            EngineConfig(**{name: None})


def test_every_engine_setting_reaches_the_engine(models: Models, llama_dir: Path) -> None:
    settings = {
        "max_model_len": 48,
        "kv_cache_dtype": "f16",
        "backend": "reference",
        "cpu_path": None,
        "block_size": 8,
        "num_kv_blocks": 9,
        "max_num_batched_tokens": 5,
        "max_num_seqs": 2,
        "long_prefill_token_threshold": 3,
        "enable_prefix_caching": False,
    }
    assert {*settings, "threads"} == set(EngineConfig.__dataclass_fields__)
    llm = models(llama_dir, **settings)
    report, engine = llm.report, llm._engine
    assert (report.threads, report.backend, report.kv_dtype) == (1, "reference", "f16")
    assert (llm.max_model_len, report.block_size, report.num_kv_blocks) == (48, 8, 9)
    assert report.kv_bytes == engine.pool.k.nbytes + engine.pool.v.nbytes
    sizes: list[tuple[int, int]] = []
    build = _watch_batches(llm, sizes)
    try:
        llm.generate([prompt(*range(9))] * 4, max_tokens=3)
    finally:
        build()
    assert max(rows for rows, _ in sizes) == 5
    assert max(requests for _, requests in sizes) == 2
    assert engine.metrics.cached_tokens == 0
    assert len(engine.pool.prefix) == 0


def _watch_batches(llm: LLM, sizes: list[tuple[int, int]]) -> Callable[[], None]:
    from seethrough.engine import engine as module

    original = module.build_batch

    def watched(scheduled: Any) -> Any:
        batch = original(scheduled)
        sizes.append((len(batch.token_ids), batch.n_requests))
        return batch

    module.build_batch = watched

    def undo() -> None:
        module.build_batch = original

    return undo


def test_progress_is_reported_while_loading(llama_dir: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    llm = LLM(llama_dir, progress=lambda *args: seen.append(args))
    done = [d for _, d, _ in seen]
    assert done == list(range(1, seen[-1][2] + 1))
    assert llm.report.load_ms == pytest.approx(sum(llm.report.phases.values()))


def test_a_kernel_cache_that_cannot_be_written_is_a_note(
    llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only home or a full disk: every start compiles, and everything works."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("seethrough.engine.load.kernel_dir", lambda: tmp_path / "file" / "kernels")
    llm = LLM(llama_dir, threads=1, max_model_len=32)
    assert llm.report.compiled_kernels > 0
    assert any(str(tmp_path) in note for note in llm.report.notes)
    assert llm.generate("dog", max_tokens=2)[0].finished
