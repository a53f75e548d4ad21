"""The flags that several verbs share: model, engine settings, sampling, how things are shown."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from seethrough.cli.flags import Flag, folder, id_value, integer, integers, number, text
from seethrough.cli.messages import LANGUAGES
from seethrough.config import BACKENDS, CPU_PATHS, KV_CACHE_DTYPES
from seethrough.sampling.params import SamplingParams
from seethrough.stages import Text

MODEL = Flag(
    "model",
    Text(
        "a GGUF file, a folder, a short name or a pulled hub id (default: smollm2-135m-instruct)",
        "GGUF 文件、目录、短名，或已拉取的 hub 编号（默认 smollm2-135m-instruct）",
    ),
    text,
    "NAME",
)
CACHE_DIR = Flag(
    "cache-dir",
    Text("where pulled models lie (default: ~/.cache/seethrough/models)", "模型缓存目录"),
    Path,
    "DIR",
)
LANG = Flag(
    "lang",
    Text("language of everything that is printed", "显示语言"),
    text,
    choices=tuple(LANGUAGES),
)
QUIET = Flag("quiet", Text("nothing on standard error but errors", "标准错误只显示错误"))
COLOR = Flag(
    "color",
    Text("when to colour the text", "何时使用颜色"),
    text,
    choices=("auto", "always", "never"),
)
JSON = Flag("json", Text("print one JSON object", "只打印一个 JSON 对象"))
FILE = Flag("file", Text("read the prompt from a file", "从文件读取提示词"), Path, "FILE")
SYSTEM = Flag(
    "system",
    Text(
        "a system message: the prompt then goes through the chat template",
        "系统消息；给出后提示词按对话模板渲染",
    ),
    text,
    "TEXT",
)

ENGINE: tuple[Flag, ...] = (
    Flag("threads", Text("threads for the arithmetic", "计算线程数"), integer, "N"),
    Flag("max-model-len", Text("longest context in tokens", "最长上下文（token）"), integer, "N"),
    Flag(
        "kv-cache-dtype",
        Text("type of cached keys and values", "KV 缓存的类型"),
        text,
        choices=tuple(KV_CACHE_DTYPES),
    ),
    Flag("backend", Text("which kernels compute", "计算后端"), text, choices=tuple(BACKENDS)),
    Flag(
        "cpu-path",
        Text(
            "which instructions the cpu backend may use (default: the best there are)",
            "cpu 后端可用的指令集（默认取处理器支持的最佳者）",
        ),
        text,
        choices=tuple(CPU_PATHS),
    ),
    Flag("block-size", Text("positions per KV block", "每个 KV 块的位置数"), integer, "N"),
    Flag("num-kv-blocks", Text("blocks of the KV pool", "KV 池的块数"), integer, "N"),
    Flag(
        "max-num-batched-tokens",
        Text("tokens computed in one step", "每步最多计算的 token 数"),
        integer,
        "N",
    ),
    Flag("max-num-seqs", Text("requests that run at once", "同时运行的请求数"), integer, "N"),
    Flag(
        "long-prefill-token-threshold",
        Text(
            "while others decode, most rows of a step for one prompt",
            "有请求在生成时，单个提示词每步最多预填充的 token 数",
        ),
        integer,
        "N",
    ),
    Flag(
        "enable-prefix-caching",
        Text(
            "compute equal beginnings of prompts once (default: yes)",
            "复用相同前缀的 KV（默认开启）",
        ),
    ),
)

SAMPLING: tuple[Flag, ...] = (
    Flag("temperature", Text("0 is greedy", "温度；0 为贪心"), number, "T"),
    Flag(
        "top-k",
        Text("keep the k most probable; 0 is off", "保留概率最高的 k 个；0 关闭"),
        integer,
        "K",
    ),
    Flag(
        "top-p",
        Text("keep the shortest prefix of this mass", "保留累积概率超过 p 的最短前缀"),
        number,
        "P",
    ),
    Flag(
        "min-p",
        Text("keep this share of the highest probability", "相对最高概率的下限"),
        number,
        "P",
    ),
    Flag(
        "typical-p",
        Text("keep the most typical up to this mass", "典型采样的概率质量"),
        number,
        "P",
    ),
    Flag(
        "repetition-penalty",
        Text("on ids of prompt and output; 1 is off", "重复惩罚；1 关闭"),
        number,
        "R",
    ),
    Flag("presence-penalty", Text("once for each id of the output", "出现惩罚"), number, "A"),
    Flag("frequency-penalty", Text("for each occurrence in the output", "频率惩罚"), number, "A"),
    Flag(
        "logit-bias",
        Text("add VALUE to an id's logit; repeatable", "给某个编号的分数加上 VALUE；可重复"),
        id_value,
        "ID=VALUE",
        repeat=True,
    ),
    Flag("seed", Text("seed of the random stream", "随机种子"), integer, "N"),
    Flag("n", Text("independent samples", "独立样本数"), integer, "N"),
    Flag(
        "max-tokens",
        Text("output limit; unset fills the context", "最多生成的 token 数；不给则用满上下文"),
        integer,
        "N",
    ),
    Flag("min-tokens", Text("no end before so many tokens", "至少生成的 token 数"), integer, "N"),
    Flag(
        "stop",
        Text("a string that ends the text; repeatable", "停止串；可重复"),
        text,
        "TEXT",
        repeat=True,
    ),
    Flag("stop-token-ids", Text("ids that end the text", "停止编号"), integers, "IDS"),
    Flag(
        "include-stop-str-in-output", Text("keep the stop string in the text", "输出中保留停止串")
    ),
    Flag("ignore-eos", Text("end tokens are ordinary tokens", "不因结束 token 而停止")),
    Flag(
        "skip-special-tokens", Text("leave special tokens out of the text", "文本中略去特殊 token")
    ),
    Flag("logprobs", Text("alternatives shown per token", "每个 token 显示的候选数"), integer, "N"),
    Flag(
        "prompt-logprobs",
        Text("the same for the prompt (with --json)", "提示词的候选数（配合 --json）"),
        integer,
        "N",
    ),
    Flag(
        "logprobs-mode",
        Text("which scores are shown", "显示哪一种分数"),
        text,
        choices=("raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"),
    ),
    Flag(
        "bad-words",
        Text("text that must not appear; repeatable", "禁词；可重复"),
        text,
        "TEXT",
        repeat=True,
    ),
    Flag(
        "bad-words-ids",
        Text("the same as ids; repeatable", "禁词（编号）；可重复"),
        integers,
        "IDS",
        repeat=True,
    ),
    Flag(
        "allowed-token-ids", Text("nothing else can be chosen", "只允许这些编号"), integers, "IDS"
    ),
)

RECORD = Flag(
    "record",
    Text(
        "keep finished requests in this directory, so that replay finds them (prompts are private: "
        "off by default)",
        "把完成的请求保存到此目录，供 replay 使用（提示词属于隐私，默认不保存）",
    ),
    folder,
    "DIR",
)
RECORDING: tuple[Flag, ...] = (
    RECORD,
    Flag(
        "record-limit", Text("how many are kept (256)", "最多保存多少个请求（256）"), integer, "N"
    ),
    Flag(
        "record-bytes",
        Text("bytes that they may take (67108864)", "最多占用的字节数（67108864）"),
        integer,
        "N",
    ),
)

SHOWING: tuple[Flag, ...] = (LANG, QUIET, COLOR)


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling flags that were given, as the command line's defaults."""
    given = _given(arguments, SAMPLING)
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams.from_dict(given)


def recording(arguments: argparse.Namespace) -> dict[str, Any]:
    """The recorder's flags that were given."""
    return _given(arguments, RECORDING)


def engine_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine flags that were given."""
    return _given(arguments, ENGINE)


def _given(arguments: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, Any]:
    values = {flag.dest: getattr(arguments, flag.dest, None) for flag in flags}
    return {name: value for name, value in values.items() if value is not None}
