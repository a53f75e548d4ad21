"""The command line: its verbs, their arguments, and what its exit codes mean.

Modules that compute are imported by the verb that needs them, so that --help is quick.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path

from seethrough import __version__
from seethrough.cli.flags import (
    Flag,
    add_flag,
    fill_from_environment,
    id_pair,
    integer,
    integers,
    name_value,
    names,
    number,
    text,
)
from seethrough.cli.messages import Speaker, detect_language
from seethrough.cli.options import (
    CACHE_DIR,
    ENGINE,
    FILE,
    JSON,
    LANG,
    MODEL,
    QUIET,
    RECORD,
    RECORDING,
    SAMPLING,
    SHOWING,
    SYSTEM,
)
from seethrough.errors import SeethroughError
from seethrough.stages import Language, Text

EXIT_CODES = Text(
    "exit codes: 0 done; 1 the request or something else failed; 2 wrong usage or parameter; "
    "3 the model is missing, unsupported or damaged; 130 interrupted",
    "退出码：0 完成；1 请求或其他步骤失败；2 用法或参数有误；"
    "3 模型缺失、不支持或已损坏；130 被中断",
)
ABOUT = Text(
    "An LLM inference engine that you can see through.",
    "一个看得透的大模型推理引擎。",
)
_PROMPT = Text("the prompt; - reads standard input", "提示词；- 表示从标准输入读取")
_NAME = Text("a short name or a hub id, org/name or org/name:file.gguf", "短名，或 hub 编号")


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument."""

    name: str
    help: Text
    choices: tuple[str, ...] = ()
    optional: bool = True


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb: where its function is, and what it takes."""

    name: str
    help: Text
    function: str  # module:function, imported when the verb runs
    arguments: tuple[Argument, ...]
    flags: tuple[Flag, ...]


_CHAT_FLAG = Flag("chat", Text("render the prompt as a chat first", "先按对话模板渲染"))
_SPECIAL = Flag(
    "special", Text("add the tokens that the tokenizer puts around a text", "加上首尾特殊 token")
)
_TRACE_FLAGS = (
    Flag(
        "stage",
        Text("print one value: a stage such as S6.5", "只显示一个阶段的值，如 S6.5"),
        text,
        "ID",
    ),
    Flag("value", Text("which value of the stage", "该阶段的哪个值"), text, "NAME"),
    Flag("layer", Text("of this layer", "第几层"), integer, "N"),
    Flag("head", Text("of this head", "第几个头"), integer, "N"),
    Flag("token", Text("the row of this position", "只看这个位置"), integer, "N"),
    Flag("stages", Text("keep only these stages", "只保留这些阶段"), names, "IDS"),
    Flag("layers", Text("keep only these layers", "只保留这些层"), integers, "NUMBERS"),
    Flag("heads", Text("keep only these heads", "只保留这些头"), integers, "NUMBERS"),
    Flag("tokens", Text("keep only these positions", "只保留这些位置"), integers, "NUMBERS"),
    Flag(
        "byte-budget", Text("bytes that the trace may keep", "追踪最多保留的字节数"), integer, "N"
    ),
    Flag(
        "out",
        Text("write the arrays and a manifest to a file", "把数组和清单写入文件"),
        Path,
        "FILE",
    ),
)
_REPLAY_FLAGS = (
    Flag(
        "check",
        Text(
            "print `identical`, or the first token that differs and what changed (exit code 1)",
            "只检查：打印 identical；若不同，打印第一个不同的 token 与变化的部分（退出码 1）",
        ),
    ),
    Flag("sample", Text("which sample of the request (0)", "请求的第几个样本（0）"), integer, "N"),
    Flag(
        "set",
        Text(
            "what if: another sampling parameter; repeatable",
            "假如：换一个采样参数；可重复",
        ),
        name_value,
        "NAME=VALUE",
        repeat=True,
    ),
    Flag(
        "force",
        Text(
            "what if: another id as output token POSITION (from 0); repeatable",
            "假如：第 POSITION 个输出 token（从 0 起）换成另一个编号；可重复",
        ),
        id_pair,
        "POSITION=ID",
        repeat=True,
    ),
)
_DIFF_FLAGS = (
    Flag(
        "check",
        Text("exit code 1 if a single bit differs", "只要有一位不同，退出码就是 1"),
    ),
    Flag(
        "tolerance",
        Text("relative error that counts as parting (0.01)", "视为不同的相对误差（0.01）"),
        number,
        "E",
    ),
    *(flag for flag in _TRACE_FLAGS if flag.name in ("stage", "layer", "byte-budget")),
)
_BENCH_FLAGS = (
    Flag("pp", Text("prompt tokens to prefill (512)", "预填充的 token 数（512）"), integer, "N"),
    Flag("tg", Text("tokens to decode (128)", "生成的 token 数（128）"), integer, "N"),
    Flag("batch", Text("requests at once (16)", "同时的请求数（16）"), integer, "N"),
    Flag(
        "depth",
        Text("context before the decoding (16)", "生成之前的上下文长度（16）"),
        integer,
        "N",
    ),
    Flag(
        "repeats",
        Text("runs of each, medians are shown (3)", "每项重复次数，取中位数（3）"),
        integer,
        "N",
    ),
)
_PROMPTED = (Argument("prompt", _PROMPT),)

VERBS: tuple[Verb, ...] = (
    Verb(
        "run",
        Text("complete a prompt, streamed", "补全一个提示词，流式输出"),
        "run:run",
        _PROMPTED,
        (MODEL, FILE, SYSTEM, JSON, *SAMPLING, *ENGINE, *RECORDING, *SHOWING, CACHE_DIR),
    ),
    Verb(
        "chat",
        Text("talk over several turns", "多轮对话"),
        "chat:run",
        (),
        (MODEL, SYSTEM, *SAMPLING, *ENGINE, *RECORDING, *SHOWING, CACHE_DIR),
    ),
    Verb(
        "tokenize",
        Text("pieces, ids and bytes of a text", "文本的 token、编号与字节"),
        "tokenize:run",
        _PROMPTED,
        (MODEL, FILE, SYSTEM, _CHAT_FLAG, _SPECIAL, JSON, LANG, CACHE_DIR),
    ),
    Verb(
        "trace",
        Text("every stage of every token, with its numbers", "每个 token 的每个阶段及其真实数字"),
        "trace:run",
        _PROMPTED,
        (MODEL, FILE, SYSTEM, JSON, *_TRACE_FLAGS, *SAMPLING, *ENGINE, LANG, QUIET, CACHE_DIR),
    ),
    Verb(
        "replay",
        Text(
            "run a recorded request again and show any stage of any token",
            "重放一个已记录的请求，查看任意 token 的任意阶段",
        ),
        "replay:run",
        (
            Argument(
                "request",
                Text(
                    "a request id; last (the default); list shows what is recorded",
                    "请求编号；last（默认）为最近一个；list 列出已记录的请求",
                ),
            ),
        ),
        (RECORD, *_REPLAY_FLAGS, JSON, *_TRACE_FLAGS, MODEL, *ENGINE, LANG, QUIET, CACHE_DIR),
    ),
    Verb(
        "diff",
        Text(
            "two models, or two ways to run one, stage by stage; each is MODEL[,NAME=VALUE…], such "
            "as ,backend=reference",
            "逐阶段比较两个模型，或同一模型的两种运行方式；每方写作 MODEL[,NAME=VALUE…]，例如 "
            ",backend=reference",
        ),
        "diff:run",
        (
            Argument("a", Text("A: the one that is compared with", "A：比较的基准")),
            Argument("b", Text("B: runs along A's ids", "B：沿 A 的 token 编号运行")),
            Argument("prompt", _PROMPT),
        ),
        (MODEL, FILE, JSON, *_DIFF_FLAGS, *SAMPLING, *ENGINE, LANG, QUIET, CACHE_DIR),
    ),
    Verb(
        "bench",
        Text("the machine's limits and this model's speed", "本机上限与模型速度"),
        "bench:run",
        (),
        (MODEL, *_BENCH_FLAGS, JSON, *ENGINE, LANG, QUIET, CACHE_DIR),
    ),
    Verb(
        "pull",
        Text("fetch a model", "拉取模型"),
        "models:pull",
        (Argument("name", _NAME),),
        (LANG, QUIET, CACHE_DIR),
    ),
    Verb(
        "models",
        Text(
            "list the models here; `models show NAME` prints one's program",
            "列出模型；models show 名称 显示其程序",
        ),
        "models:models",
        (
            Argument("action", Text("list or show", "list 或 show"), choices=("list", "show")),
            Argument("name", _NAME),
        ),
        (LANG, CACHE_DIR),
    ),
    Verb(
        "doctor",
        Text("what this machine has, and what is missing", "检查本机环境"),
        "doctor:run",
        (),
        (JSON, LANG, CACHE_DIR),
    ),
)


def build_parser(
    language: Language,
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and that of each verb."""
    parser = argparse.ArgumentParser(
        prog="seethrough", description=ABOUT.pick(language), epilog=EXIT_CODES.pick(language)
    )
    parser.add_argument("--version", action="version", version=f"seethrough {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")
    parsers = {}
    for verb in VERBS:
        words = verb.help.pick(language)
        sub = verbs.add_parser(
            verb.name, help=words, description=words, epilog=EXIT_CODES.pick(language)
        )
        for argument in verb.arguments:
            sub.add_argument(
                argument.name,
                nargs="?" if argument.optional else None,
                choices=argument.choices or None,
                help=argument.help.pick(language),
            )
        for flag in verb.flags:
            add_flag(sub, flag, language)
        parsers[verb.name] = sub
    return parser, parsers


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (usage errors leave through SystemExit with 2)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper):  # what its encoding lacks is spelled, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    language = detect_language(words, os.environ)
    parser, parsers = build_parser(language)
    arguments = parser.parse_args(words)
    if arguments.verb is None:
        parser.print_help()
        return 2
    verb = next(v for v in VERBS if v.name == arguments.verb)
    fill_from_environment(parsers[verb.name], arguments, verb.flags, os.environ)
    speaker = Speaker(language, quiet=bool(getattr(arguments, "quiet", None)))
    try:
        code = _function(verb)(arguments, speaker)
        sys.stdout.flush()
    except SeethroughError as error:
        speaker.complain("error", why=" ".join(str(error).split()))
        return error.exit_code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has enough
        _discard_output()
        return 0
    except OSError as error:  # such as a full disk
        speaker.complain("error", why=error)
        _discard_output()
        return 1
    return code


def _discard_output() -> None:
    """Where standard output takes no more, let Python not complain again when it closes it."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _function(verb: Verb) -> Callable[[argparse.Namespace, Speaker], int]:
    module, _, name = verb.function.partition(":")
    function: Callable[[argparse.Namespace, Speaker], int] = getattr(
        import_module(f"seethrough.cli.{module}"), name
    )
    return function
