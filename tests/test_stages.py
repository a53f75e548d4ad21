"""The stage table against a second copy of its rows written by hand, and against itself."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from seethrough import stages, stages_doc
from seethrough.stages import (
    ACTORS,
    EFFECTS,
    ENDS,
    NOTES,
    PHASES,
    REQUEST,
    ROLES,
    STAGE,
    STAGES,
    SYMBOLS,
    USER,
    WORDS,
    Language,
    Stage,
    Text,
    Value,
    stage_of_value,
    stage_sort_key,
)

# id, phase, English name, Chinese name, effect, runs in every layer
ROWS = [
    ("S0", "A", "Initialise", "初始化", "writes", False),
    ("S1", "A", "Tokenize", "切分", "pure", False),
    ("S2", "A", "Look up ids", "查词表", "pure", False),
    ("S3", "A", "Pad and mask", "填充与掩码", "pure", False),
    ("S4", "B", "Embed", "词嵌入", "pure", False),
    ("S5", "B", "Positions", "位置", "pure", False),
    ("S6", "C", "Transformer layers", "逐层前向", "writes", False),
    ("S6.1", "C", "Norm and project", "归一化与投影", "pure", True),
    ("S6.2", "C", "Split heads", "拆成多头", "pure", True),
    ("S6.3", "C", "Rotate", "旋转位置编码", "pure", True),
    ("S6.4", "C", "Masked scores", "掩码分数", "pure", True),
    ("S6.5", "C", "Weigh the values", "加权聚合", "pure", True),
    ("S6.6", "C", "Project and add", "输出投影与残差", "pure", True),
    ("S6.7", "C", "MLP and add", "前馈与残差", "pure", True),
    ("S6.8", "C", "Write the KV cache", "写入KV缓存", "writes", True),
    ("S7", "D", "Take the last position", "取末位", "pure", False),
    ("S8", "D", "Final norm", "末端归一化", "pure", False),
    ("S9", "D", "LM head", "词表投影", "pure", False),
    ("S10", "E", "Adjust", "调整分数", "pure", False),
    ("S11", "E", "Truncate", "截断候选", "pure", False),
    ("S12", "E", "Choose and detokenize", "选取与还原", "random", False),
    ("S13", "F", "Append and repeat", "追加循环", "writes", False),
]

PHASE_ROWS = [
    ("A", "preprocessing", "预处理"),
    ("B", "embedding", "嵌入"),
    ("C", "forward", "前向"),
    ("D", "head", "输出头"),
    ("E", "decoding", "解码"),
    ("F", "the loop", "自回归"),
]

# Every value with the stage at which it first exists, and its shape there.
VALUE_ROWS = {
    "request": ("S0", None),
    "prompt": ("S1", None),
    "decoding_params": ("S0", None),
    "kv_cache": ("S0", "[2, 0, Hkv, dh]"),
    "tokens": ("S1", "[n]"),
    "token_ids": ("S2", "[n]"),
    "padded_token_ids": ("S3", "[B, n_max]"),
    "attention_mask": ("S3", "[B, n_max]"),
    "X": ("S4", "[n, d]"),
    "positions": ("S5", "[n]"),
    "Q": ("S6.1", "[n, H·dh]"),
    "K": ("S6.1", "[n, Hkv·dh]"),
    "V": ("S6.1", "[n, Hkv·dh]"),
    "Q_heads": ("S6.2", "[n, H, dh]"),
    "K_heads": ("S6.2", "[n, Hkv, dh]"),
    "V_heads": ("S6.2", "[n, Hkv, dh]"),
    "Q_pos": ("S6.3", "[n, H, dh]"),
    "K_pos": ("S6.3", "[n, Hkv, dh]"),
    "S_masked": ("S6.4", "[H, n, t]"),
    "A": ("S6.5", "[H, n, t]"),
    "O_heads": ("S6.5", "[n, H, dh]"),
    "X_prime": ("S6.6", "[n, d]"),
    "X_updated": ("S6.7", "[n, d]"),
    "XL": ("S6", "[n, d]"),
    "x_last": ("S7", "[d]"),
    "h": ("S8", "[d]"),
    "logits": ("S9", "[V]"),
    "adjusted_logits": ("S10", "[V]"),
    "candidate_logits": ("S11", "[V]"),
    "probs": ("S12", "[V]"),
    "u": ("S12", None),
    "next_token_id": ("S12", None),
    "text": ("S12", None),
    "finish_reason": ("S13", None),
}

HAN = re.compile(r"[\u4e00-\u9fff]")
ROOT = Path(__file__).parents[1]
LANGUAGES: tuple[Language, ...] = ("en", "zh")


def texts(found: object, path: str) -> Iterator[tuple[str, Text]]:
    """Every Text inside a module-level table, with the way to it."""
    if isinstance(found, Text):
        yield path, found
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        for field in dataclasses.fields(found):
            yield from texts(getattr(found, field.name), f"{path}.{field.name}")
    elif isinstance(found, tuple):
        for index, item in enumerate(found):
            yield from texts(item, f"{path}[{index}]")
    elif hasattr(found, "items"):
        for key, item in found.items():
            yield from texts(item, f"{path}[{key}]")


TABLES = (STAGES, PHASES, SYMBOLS, ROLES, ACTORS, EFFECTS, ENDS, NOTES, WORDS)
LABELS = {k: v for k, v in vars(stages_doc).items() if isinstance(v, Text)}
ALL_TEXTS = [*texts(TABLES, "tables"), *texts(LABELS, "labels")]


def all_values() -> list[Value]:
    made = [value for stage in STAGES for value in stage.outputs]
    return made + [read.value for stage in STAGES for read in stage.inputs]


def test_rows_are_those_of_the_table() -> None:
    rows = [(s.id, s.phase, s.name.en, s.name.zh, s.effect, s.per_layer) for s in STAGES]
    assert rows == ROWS


def test_phases_have_their_names_in_order() -> None:
    assert [(key, name.en, name.zh) for key, name in PHASES.items()] == PHASE_ROWS


def test_values_are_those_of_the_table() -> None:
    found = {}
    for name in {value.name for value in all_values()}:
        stage = stage_of_value(name)
        here = [*stage.outputs, *(read.value for read in stage.inputs)]
        found[name] = (stage.id, next(value.shape for value in here if value.name == name))
    assert found == VALUE_ROWS


def test_values_that_change_on_the_way_state_their_later_shape() -> None:
    assert [v.shape for v in STAGE["S6.8"].outputs if v.name == "kv_cache"] == ["[2, t, Hkv, dh]"]
    assert [v.shape for v in STAGE["S13"].outputs if v.name == "token_ids"] == ["[1]"]


def test_ids_are_unique_and_the_mapping_is_complete() -> None:
    assert len({stage.id for stage in STAGES}) == len(STAGES)
    assert tuple(STAGE.values()) == STAGES
    assert all(key == stage.id for key, stage in STAGE.items())


def test_pipeline_order_is_the_order_of_ids_and_of_phases() -> None:
    shuffled = sorted(STAGES, key=lambda s: s.name.en)
    assert sorted(shuffled, key=lambda s: stage_sort_key(s.id)) == list(STAGES)
    assert "".join(dict.fromkeys(stage.phase for stage in STAGES)) == "ABCDEF"
    assert [s.phase for s in STAGES] == sorted(s.phase for s in STAGES)


def test_only_stages_inside_a_layer_run_once_per_layer() -> None:
    for stage in STAGES:
        assert stage.per_layer == stage.id.startswith("S6."), stage.id


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.id)
def test_every_input_is_made_where_it_says(stage: Stage) -> None:
    for read in stage.inputs:
        if read.from_stage == REQUEST:
            assert read.value.name in {"request", "prompt"}
        else:
            assert read.value in STAGE[read.from_stage].outputs, (stage.id, read.value.name)


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.id)
def test_inputs_and_outputs_are_listed_once(stage: Stage) -> None:
    assert stage.inputs
    assert stage.outputs
    assert len(set(stage.inputs)) == len(stage.inputs)
    assert len({value.name for value in stage.outputs}) == len(stage.outputs)
    assert len(set(stage.goes_to)) == len(stage.goes_to)


def test_readers_and_makers_agree_on_the_dataflow() -> None:
    said_by_readers = {
        (read.from_stage, stage.id)
        for stage in STAGES
        for read in stage.inputs
        if read.from_stage != REQUEST
    }
    said_by_makers = {(s.id, target) for s in STAGES for target in s.goes_to if target != USER}
    assert said_by_makers == said_by_readers


def test_the_table_flows_forward_except_in_its_loops() -> None:
    order = {stage.id: index for index, stage in enumerate(STAGES)}
    back = {
        (read.from_stage, stage.id)
        for stage in STAGES
        for read in stage.inputs
        if read.from_stage != REQUEST and order[read.from_stage] >= order[stage.id]
    }
    next_layer = {("S6.7", "S6")}
    cache_read = {("S6.8", "S6.4"), ("S6.8", "S6.5")}
    next_token = {("S13", "S4"), ("S13", "S10")}
    assert back == next_layer | cache_read | next_token


def test_the_user_gets_the_text_and_the_reason_for_its_end() -> None:
    assert {stage.id for stage in STAGES if USER in stage.goes_to} == {"S12", "S13"}
    assert {stage.id for stage in STAGES if stage.role == "deliver"} == {"S12"}


def test_the_stages_that_touch_randomness_and_cache_are_known() -> None:
    makers = {s.id for s in STAGES if any(v.name == "kv_cache" for v in s.outputs)}
    assert makers == {"S0", "S6.8"}
    assert all(STAGE[key].effect == "writes" for key in makers)
    assert [s.id for s in STAGES if any(v.name == "u" for v in s.outputs)] == ["S12"]
    assert [s.id for s in STAGES if s.effect == "random"] == ["S12"]


def test_labels_cover_exactly_what_stages_use() -> None:
    assert set(ROLES) == {stage.role for stage in STAGES}
    assert set(ACTORS) == {stage.actor for stage in STAGES}
    assert set(EFFECTS) == {stage.effect for stage in STAGES}
    assert set(ENDS) == {REQUEST, USER}


def test_shapes_speak_only_of_known_symbols() -> None:
    for value in all_values():
        if value.shape is None:
            continue
        assert re.fullmatch(r"\[.+\]", value.shape), value
        for symbol in re.split(r", |·", value.shape[1:-1]):
            assert symbol in SYMBOLS or symbol.isdigit(), value
    assert {"n", "B", "d", "H", "Hkv", "dh", "f", "V", "L", "t"} <= set(SYMBOLS)


def test_notes_are_those_below_the_table() -> None:
    assert list(NOTES) == ["prefill", "decode", "ttft", "tpot", "itl", "cost"]
    assert [term.name.en for term in WORDS] == ["top-p", "top-k", "decoding_params"]


def test_every_text_is_in_its_own_language() -> None:
    for path, text in texts(TABLES, "tables"):
        assert text.en.strip(), path
        assert not HAN.search(text.en), path
        assert HAN.search(text.zh), path
        assert not re.search(r" [,;:.]|[,;:.][A-Za-z]{2}", text.en), path


def test_every_chinese_text_is_translated_and_punctuated_as_chinese() -> None:
    for path, text in ALL_TEXTS:
        # Four plain English words in a row are a sentence that nobody has translated.
        assert not re.search(r"(?:\b[a-z]{2,}\b ){3}[a-z]{2,}\b", text.zh), path
        assert not re.search(r"[\u4e00-\u9fff][,;:?!]|[,;:?!][\u4e00-\u9fff]", text.zh), path
        assert "  " not in text.en + text.zh, path


@pytest.mark.parametrize("stage", STAGES, ids=lambda s: s.id)
def test_why_and_comparison_are_one_sentence_and_what_is_prose(stage: Stage) -> None:
    for text in (stage.what, stage.why, stage.like):
        assert text.en[0].isupper()
        assert text.en.endswith(".")
        assert text.zh.endswith("。")
        assert len(HAN.findall(text.zh)) >= 10
    for text in (stage.why, stage.like):
        assert ". " not in text.en
        assert text.zh.count("。") == 1


def test_stage_ids_named_in_texts_exist_and_are_the_same_in_both_languages() -> None:
    for path, text in ALL_TEXTS:
        in_english = re.findall(r"\bS\d+(?:\.\d+)?\b", text.en)
        in_chinese = re.findall(r"(?<![A-Za-z])S\d+(?:\.\d+)?", text.zh)
        assert set(in_english) == set(in_chinese), path
        assert set(in_english) <= set(STAGE), path


def test_sort_key_orders_as_a_reader_does() -> None:
    ordered = ["S0", "S1", "S6", "S6.1", "S6.8", "S6.10", "S7", "S9", "S10", "S13"]
    assert sorted(set(ordered), key=stage_sort_key) == ordered


@pytest.mark.parametrize(
    "stage_id",
    [
        "",
        "S",
        "6",
        "s6",
        "S6.",
        "S.1",
        "S06",
        "S6.0",
        "S6.08",
        "S-1",
        "S6.8.1",
        "S6 ",
        "S6\n",
        "S６",
    ],
)
def test_sort_key_refuses_what_is_not_an_id(stage_id: str) -> None:
    with pytest.raises(ValueError, match="is not a stage id"):
        stage_sort_key(stage_id)


@pytest.mark.parametrize("long", ["S" + "9" * 100_000, "x" * 100_000])
def test_errors_about_long_names_stay_short(long: str) -> None:
    with pytest.raises(ValueError) as bad_id:
        stage_sort_key(long)
    with pytest.raises(LookupError) as bad_name:
        stage_of_value(long)
    assert len(str(bad_id.value)) < 200
    assert len(str(bad_name.value)) < 200


@pytest.mark.parametrize("name", ["", "x", "Logits", "logits ", "kv_cache[0]"])
def test_unknown_value_is_an_error_that_names_it(name: str) -> None:
    with pytest.raises(LookupError, match=re.escape(repr(name))):
        stage_of_value(name)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STAGES[0].id = "S99"  # type: ignore[misc]
    for mapping in (STAGE, PHASES, SYMBOLS, ROLES, ACTORS, EFFECTS, ENDS, NOTES):
        with pytest.raises(TypeError):
            mapping["S99"] = None  # type: ignore[index]
    assert not hasattr(STAGES[0], "__dict__")


def test_module_imports_nothing_of_the_package() -> None:
    tree = ast.parse(Path(stages.__file__).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(alias.name.split(".")[0] != "seethrough" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert (node.module or "").split(".")[0] != "seethrough"


@pytest.mark.parametrize("language", LANGUAGES)
def test_page_in_docs_is_the_generated_one(language: Language) -> None:
    page = (ROOT / "docs" / stages_doc.FILES[language]).read_text(encoding="utf-8")
    assert page == stages_doc.render(language), "run `python -m seethrough.stages_doc`"


@pytest.mark.parametrize("language", LANGUAGES)
def test_page_says_everything_and_its_links_lead_somewhere(language: Language) -> None:
    page = stages_doc.render(language)
    assert "python -m seethrough.stages_doc" in page.splitlines()[0]
    for _, text in texts(TABLES, "tables"):
        assert text.pick(language) in page
    anchors = re.findall(r'<a id="([^"]+)">', page)
    assert anchors == [row[0] for row in ROWS]
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= set(anchors)
    for line in page.splitlines():
        if line.startswith("| [S"):
            assert line.count("|") == 7, line
    assert page.endswith("\n")
    assert "None" not in page


def test_english_page_is_free_of_chinese_but_for_the_link() -> None:
    assert HAN.findall(stages_doc.render("en")) == list("中文版")


def test_command_writes_both_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages_doc.main([str(tmp_path)])
    written = [str(tmp_path / "stages.md"), str(tmp_path / "stages.zh.md")]
    assert capsys.readouterr().out.splitlines() == written
    for language, name in stages_doc.FILES.items():
        assert (tmp_path / name).read_bytes() == stages_doc.render(language).encode()


def test_command_names_a_missing_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        stages_doc.main([str(tmp_path / "nowhere")])
    assert ended.value.code == 2
    assert "nowhere is not a directory" in capsys.readouterr().err
