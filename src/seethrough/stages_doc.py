"""Knows how the stage table becomes two Markdown pages; all words about stages are in `stages`.

`python -m seethrough.stages_doc` writes `docs/stages.md` and `docs/stages.zh.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from seethrough.stages import (
    ACTORS,
    EFFECTS,
    ENDS,
    NOTES,
    PHASES,
    ROLES,
    STAGES,
    SYMBOLS,
    WORDS,
    Language,
    Phase,
    Stage,
    Term,
    Text,
    Value,
)

FILES: Mapping[Language, str] = {"en": "stages.md", "zh": "stages.zh.md"}

_GENERATED = Text(
    "Generated from src/seethrough/stages.py by `python -m seethrough.stages_doc`. Do not edit.",
    "本文件由 `python -m seethrough.stages_doc` 根据 src/seethrough/stages.py 生成，请勿手工修改。",
)
_OTHER = Text("[中文版](stages.zh.md)", "[English version](stages.md)")
_TITLE = Text("The stages, from prompt to token", "从提示词到 token：推理的各个阶段")
_INTRO = Text(
    "Every stage has one id and one name, used alike in the code, in traces, on the command line "
    "and in the explorer. The order is that of reading; [S6.8](#S6.8) says where the engine "
    "departs from it.",
    "每个阶段都有唯一的编号和名称，在代码、追踪记录、命令行和可视化界面中通用。"
    "以下按便于阅读的次序排列；引擎实际执行次序的不同之处见 [S6.8](#S6.8)。",
)
_SYMBOLS = Text("Symbols", "符号")
_SYMBOL_HEAD = Text("symbol | meaning", "符号 | 含义")
_EFFECTS = Text("Effects", "性质")
_EFFECT_HEAD = Text("effect | meaning", "性质 | 含义")
_TABLE = Text("The table", "总表")
_PHASE = Text("Phase", "阶段组")
_TABLE_HEAD = Text(
    "id | stage | what happens | inputs → outputs | goes to | effect",
    "编号 | 阶段 | 做什么 | 输入 → 输出 | 去向 | 性质",
)
_EACH = Text("Each stage", "逐个阶段")
_WHY = Text("Why", "为什么需要")
_LIKE = Text("Comparison", "打个比方")
_INPUTS = Text("Inputs", "输入")
_OUTPUTS = Text("Outputs", "输出")
_GOES_TO = Text("Goes to", "去向")
_EFFECT = Text("Effect", "性质")
_WHO = Text("Who", "执行者")
_ROLE = Text("role", "作用")
_FROM = Text("from ", "来自 ")
# Chinese puts a space between Han and Latin characters only.
_FROM_END = Text("from ", "来自")
_PER_LAYER = Text("Once per layer, l = 0…L−1.", "每层执行一次，l = 0…L−1。")
_NOTES = Text("Prefill, decode and their times", "预填充、生成与各项耗时")
_WORDS = Text("Words that differ elsewhere", "其他资料中的不同叫法")
_COLON = Text(": ", "：")
_LIST_COMMA = Text(", ", "、")
_LEFT = Text(" (", "（")
_RIGHT = Text(")", "）")


def render(language: Language) -> str:
    """The whole page in one language, as Markdown that ends with a newline."""
    sections = (
        _head(language),
        _symbols(language),
        _effects(language),
        _table(language),
        _details(language),
        _terms(_NOTES, tuple(NOTES.values()), language),
        _terms(_WORDS, WORDS, language),
    )
    return "\n".join(line for section in sections for line in section)


def write(directory: Path) -> list[Path]:
    """Writes both pages into an existing directory and returns their paths; OSError as it comes."""
    written = []
    for language, name in FILES.items():
        path = directory / name
        path.write_text(render(language), encoding="utf-8", newline="\n")
        written.append(path)
    return written


def _head(language: Language) -> Iterator[str]:
    yield f"<!-- {_GENERATED.pick(language)} -->"
    yield ""
    yield f"# {_TITLE.pick(language)}"
    yield ""
    yield _OTHER.pick(language)
    yield ""
    yield _INTRO.pick(language)
    yield ""


def _symbols(language: Language) -> Iterator[str]:
    yield f"## {_SYMBOLS.pick(language)}"
    yield ""
    yield from _table_head(_SYMBOL_HEAD, language)
    for symbol, meaning in SYMBOLS.items():
        yield f"| `{symbol}` | {meaning.pick(language)} |"
    yield ""


def _effects(language: Language) -> Iterator[str]:
    yield f"## {_EFFECTS.pick(language)}"
    yield ""
    yield from _table_head(_EFFECT_HEAD, language)
    for effect in EFFECTS.values():
        yield f"| **{effect.name.pick(language)}** | {effect.meaning.pick(language)} |"
    yield ""


def _table(language: Language) -> Iterator[str]:
    yield f"## {_TABLE.pick(language)}"
    yield ""
    for phase in PHASES:
        yield f"### {_phase_title(phase, language)}"
        yield ""
        yield from _table_head(_TABLE_HEAD, language)
        for stage in STAGES:
            if stage.phase == phase:
                yield _row(stage, language)
        yield ""


def _table_head(head: Text, language: Language) -> Iterator[str]:
    cells = head.pick(language)
    yield f"| {cells} |"
    yield "|---" * (cells.count("|") + 1) + "|"


def _row(stage: Stage, language: Language) -> str:
    comma = _LIST_COMMA.pick(language)
    # A value may come from two stages; the row names it once.
    inputs = comma.join(dict.fromkeys(f"`{read.value.name}`" for read in stage.inputs))
    outputs = comma.join(_value(value) for value in stage.outputs)
    cells = (
        _link(stage.id, language),
        stage.name.pick(language),
        stage.what.pick(language),
        f"{inputs} → {outputs}",
        _targets(stage, language),
        EFFECTS[stage.effect].name.pick(language),
    )
    return f"| {' | '.join(cells)} |"


def _details(language: Language) -> Iterator[str]:
    yield f"## {_EACH.pick(language)}"
    yield ""
    for stage in STAGES:
        yield from _detail(stage, language)


def _detail(stage: Stage, language: Language) -> Iterator[str]:
    def item(label: Text, content: str) -> str:
        return f"- **{label.pick(language)}**{_COLON.pick(language)}{content}"

    effect = EFFECTS[stage.effect]
    yield f'<a id="{stage.id}"></a>'
    yield ""
    yield f"### {stage.id} {stage.name.pick(language)}"
    yield ""
    yield stage.what.pick(language)
    if stage.per_layer:
        yield ""
        yield _PER_LAYER.pick(language)
    yield ""
    yield item(_WHY, stage.why.pick(language))
    yield item(_LIKE, stage.like.pick(language))
    yield item(_INPUTS, _origins(stage, language))
    yield item(_OUTPUTS, _LIST_COMMA.pick(language).join(_value(v) for v in stage.outputs))
    yield item(_GOES_TO, _targets(stage, language))
    yield item(_EFFECT, _with(effect.name.pick(language), effect.meaning.pick(language), language))
    role = f"{_ROLE.pick(language)}{_COLON.pick(language)}{ROLES[stage.role].pick(language)}"
    yield item(_WHO, _with(ACTORS[stage.actor].pick(language), role, language))
    yield ""


def _terms(title: Text, terms: Sequence[Term], language: Language) -> Iterator[str]:
    yield f"## {title.pick(language)}"
    yield ""
    for term in terms:
        name, meaning = term.name.pick(language), term.meaning.pick(language)
        yield f"- **{name}**{_COLON.pick(language)}{meaning}"
    yield ""


def _phase_title(phase: Phase, language: Language) -> str:
    return f"{_PHASE.pick(language)} {phase}{_COLON.pick(language)}{PHASES[phase].pick(language)}"


def _value(value: Value) -> str:
    parts = (f"`{value.name}`", value.shape, value.kind if value.kind != "object" else None)
    return " ".join(part for part in parts if part is not None)


def _origins(stage: Stage, language: Language) -> str:
    origins = []
    for read in stage.inputs:
        word = _FROM_END if read.from_stage in ENDS else _FROM
        origin = word.pick(language) + _link(read.from_stage, language)
        origins.append(_with(_value(read.value), origin, language))
    return _LIST_COMMA.pick(language).join(origins)


def _with(main: str, remark: str, language: Language) -> str:
    """A remark in brackets after the main thing, with the language's own brackets."""
    return f"{main}{_LEFT.pick(language)}{remark}{_RIGHT.pick(language)}"


def _targets(stage: Stage, language: Language) -> str:
    return _LIST_COMMA.pick(language).join(_link(target, language) for target in stage.goes_to)


def _link(place: str, language: Language) -> str:
    end = ENDS.get(place)
    return end.pick(language) if end is not None else f"[{place}](#{place})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: writes both pages into DIRECTORY (`docs` unless given)."""
    parser = argparse.ArgumentParser(
        prog="python -m seethrough.stages_doc", description="Write the stage table as Markdown."
    )
    parser.add_argument("directory", nargs="?", type=Path, default=Path("docs"))
    directory: Path = parser.parse_args(arguments).directory
    if not directory.is_dir():
        parser.error(f"{directory} is not a directory; create it, or run from the repository root")
    for path in write(directory):
        print(path)


if __name__ == "__main__":
    main()
