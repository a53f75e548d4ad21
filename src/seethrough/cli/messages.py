"""Every sentence that the command line says, in English and Chinese side by side."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from seethrough.cli.terminal import printable
from seethrough.stages import Language, Text

LANGUAGES: tuple[Language, ...] = ("en", "zh")

MESSAGES: Mapping[str, Text] = {
    "error": Text("seethrough: error: {why}", "seethrough：错误：{why}"),
    "loading": Text(
        "{name} ({family}): weights {stored} in the file, {expanded} in memory; "
        "{available} of memory free",
        "{name}（{family}）：权重文件 {stored}，占内存 {expanded}；可用内存 {available}",
    ),
    "chosen": Text(
        "context {context} of {model_context} tokens, KV pool {kv} ({blocks} blocks of "
        "{block_size}, {dtype}), {threads} threads, backend {backend}",
        "上下文 {context}（模型上限 {model_context}）个 token，KV 池 {kv}（{blocks} 块 × {block_size}，"
        "{dtype}），{threads} 个线程，后端 {backend}",
    ),
    "left_aside": Text("tensors left aside: {names}", "未使用的张量：{names}"),
    "compiled": Text(
        "compiled {count} kernels for this processor in {seconds} s; the next start finds them",
        "为本机处理器编译了 {count} 个内核，用时 {seconds} 秒；下次启动直接使用",
    ),
    "progress": Text("{what} {percent}%", "{what} {percent}%"),
    "timing": Text(
        "{prompt} prompt + {completion} completion tokens · load {load} ms · TTFT {ttft} ms · "
        "TPOT {tpot} ms · {rate} tok/s · {reason}",
        "提示 {prompt} + 生成 {completion} 个 token · 加载 {load} ms · 首个 token {ttft} ms · "
        "每个 token {tpot} ms · {rate} token/秒 · {reason}",
    ),
    "failed": Text("the request failed: {why}", "请求失败：{why}"),
    "sample": Text("[sample {index}]", "[样本 {index}]"),
    "chat_hello": Text(
        "Chat with {name}. /help lists the commands; Ctrl-D ends.",
        "与 {name} 对话。/help 查看命令；Ctrl-D 结束。",
    ),
    "chat_help": Text(
        "/clear forget all turns   /drop forget the last turn   /system [TEXT] show or set the "
        "system message\n/params [name=value …] show or set parameters   /save FILE write the "
        "conversation as JSON   /quit",
        "/clear 忘掉全部对话   /drop 忘掉最后一轮   /system [文本] 查看或设置系统消息\n"
        "/params [名称=值 …] 查看或设置参数   /save 文件 把对话存成 JSON   /quit 退出",
    ),
    "chat_cleared": Text("all turns forgotten", "已忘掉全部对话"),
    "chat_dropped": Text("the last turn is forgotten", "已忘掉最后一轮"),
    "chat_nothing": Text("there is no turn", "还没有对话"),
    "chat_system": Text("system message: {text}", "系统消息：{text}"),
    "chat_no_system": Text("no system message of yours", "没有设置系统消息"),
    "chat_saved": Text("saved to {path}", "已保存到 {path}"),
    "chat_save_where": Text("say where: /save FILE", "请给出文件名：/save 文件"),
    "chat_unknown": Text("unknown command {name}; /help lists them", "没有命令 {name}；/help 查看"),
    "chat_stopped": Text("(stopped)", "（已停止）"),
    "round_trip_ok": Text(
        "{count} tokens · round trip: the same text", "{count} 个 token · 还原：与原文一致"
    ),
    "round_trip_bad": Text(
        "{count} tokens · round trip differs: {text}", "{count} 个 token · 还原后不同：{text}"
    ),
    "columns_tokenize": Text("#|id|piece|bytes|text", "#|编号|token|字节|文本"),
    "trace_prompt": Text("prompt: {n} tokens", "提示词：{n} 个 token"),
    "trace_step": Text(
        "─── token {index}: {text}   (computed positions {first}–{last})",
        "─── 第 {index} 个 token：{text}   （计算位置 {first}–{last}）",
    ),
    "trace_skipped": Text("nothing to do in this model", "这个模型在此无事可做"),
    "trace_layers": Text("×{n} layers, glance at layer {layer}", "×{n} 层，此处看第 {layer} 层"),
    "trace_timed_with": Text("timed with {stage}", "计时并入 {stage}"),
    "trace_derived": Text("derived", "推导值"),
    "trace_omitted": Text(
        "{count} values did not fit into the byte budget of {budget}; the first: {first}",
        "有 {count} 个值超出 {budget} 的字节预算，没有保留；第一个是：{first}",
    ),
    "recorded": Text("recorded as {id}", "已记录为 {id}"),
    "unrecorded": Text("the request could not be recorded: {why}", "请求未能记录：{why}"),
    "replay_where": Text(
        "say where the requests were recorded: --record DIR", "请用 --record DIR 指明记录所在目录"
    ),
    "replay_list_columns": Text(
        "id|finished|model|prompt|output|ended|text", "编号|完成时间|模型|提示|生成|结束原因|文本"
    ),
    "replay_none": Text("nothing is recorded in {path}", "{path} 中没有记录"),
    "replay_model_moved": Text(
        "{path} is gone; looking for {name}", "{path} 已不存在；改找 {name}"
    ),
    "replay_path_lacks": Text(
        "recorded on the path {path}, which this processor lacks: {flags}",
        "记录时使用 {path} 路径，而本机处理器缺少：{flags}",
    ),
    "replay_token": Text(
        "output token {index} differs: it was {was}, now it is {now}",
        "第 {index} 个输出 token 不同：当时是 {was}，现在是 {now}",
    ),
    "replay_end": Text(
        "all tokens are the same, but it ended otherwise: it was {was}, now it is {now}",
        "所有 token 相同，但结束方式不同：当时是 {was}，现在是 {now}",
    ),
    "replay_nothing": Text("nothing", "（无）"),
    "replay_parts": Text("changed since then: {parts}", "此后变化的部分：{parts}"),
    "replay_no_part": Text("nothing of the fingerprint has changed", "指纹没有任何部分变化"),
    "replay_not_forced": Text(
        "output token {index} was not forced: the output ended after {count} tokens",
        "第 {index} 个输出 token 未能强制：输出共 {count} 个 token，此前已结束",
    ),
    "replay_side_columns": Text("token|recorded|now", "token|记录时|现在"),
    "replay_was": Text("recorded ({reason}):", "记录时（{reason}）："),
    "replay_now": Text("now ({reason}):", "现在（{reason}）："),
    "replay_parts_at": Text(
        "they part at output token {index}", "从第 {index} 个输出 token 起不同"
    ),
    "replay_never_part": Text("they do not part", "两者没有不同"),
    "diff_sides": Text(
        "two are compared: seethrough diff A B PROMPT, each MODEL[,NAME=VALUE…]",
        "需要比较两方：seethrough diff A B 提示词，每方写作 MODEL[,NAME=VALUE…]",
    ),
    "diff_value_columns": Text(
        "stage|value|layer|relative error|max abs|differing",
        "阶段|值|层|相对误差|最大差|不同的个数",
    ),
    "diff_position_columns": Text(
        "position|next token|p A / B|rank A / B|KL (nats)|KL of candidates|greedy A / B",
        "位置|下一个 token|概率 A / B|名次 A / B|KL (nat)|候选 KL|贪心 A / B",
    ),
    "diff_unlike": Text("not compared: {name}", "未比较：{name}"),
    "diff_unlike_only": Text("what both have is identical to the bit", "两方共有的值逐位相同"),
    "diff_identical": Text("identical to the bit", "逐位相同"),
    "diff_parting": Text("they part at {where}", "开始不同之处：{where}"),
    "diff_beyond": Text(
        "above a relative error of {tolerance} at {where}", "相对误差首次超过 {tolerance}：{where}"
    ),
    "diff_within": Text("no relative error is above {tolerance}", "相对误差都不超过 {tolerance}"),
    "diff_join": Text("; ", "；"),
    "diff_layer": Text("{name} of layer {layer}", "第 {layer} 层的 {name}"),
    "trace_written": Text("written to {path}", "已写入 {path}"),
    "trace_survivors": Text(
        "{before} → {after} candidates, {mass} of the mass kept, {changed} logits changed",
        "候选 {before} → {after} 个，保留概率 {mass}，改动 {changed} 个分数",
    ),
    "trace_before": Text("before", "之前"),
    "trace_after": Text("after", "之后"),
    "trace_greedy": Text("greedy: the highest logit, nothing is drawn", "贪心：取最高分，不抽样"),
    "trace_draw": Text(
        "u = {u}: the first id, in id order, whose cumulative probability exceeds u",
        "u = {u}：按编号顺序，累积概率首次超过 u 的 token",
    ),
    "trace_choice": Text(
        "chosen: id {id} {text}, probability {prob}", "选中：编号 {id} {text}，概率 {prob}"
    ),
    "trace_cut": Text(
        "{rows} × {columns} values; columns {left}–{right} are left out",
        "共 {rows} × {columns} 个值；第 {left}–{right} 列未显示",
    ),
    "trace_end": Text("finish reason: {reason}", "结束原因：{reason}"),
    "pulled": Text("{name}: {size} at {path}", "{name}：{size}，位于 {path}"),
    "no_models": Text(
        "no model yet; `seethrough pull` fetches {name}",
        "还没有模型；运行 `seethrough pull` 获取 {name}",
    ),
    "models_columns": Text("name|size|format|state", "名称|大小|格式|状态"),
    "usable": Text("usable", "可用"),
    "show_columns": Text("stage|name|operation|weights|output", "阶段|名称|运算|权重|输出"),
    "show_layers": Text("layers {layers}", "第 {layers} 层"),
    "show_totals": Text(
        "{parameters} parameters, {stored} in the file; KV cache {kv} bytes a token at {dtype}",
        "{parameters} 个参数，文件 {stored}；KV 缓存每个 token {kv} 字节（{dtype}）",
    ),
    "bench_limits": Text(
        "limits: {read} GB/s read, {peak} GOP/s; so at most {tg} tok/s decoding, {pp} tok/s prefill",
        "上限：读 {read} GB/s，计算 {peak} GOP/s；即生成至多 {tg} token/秒，预填充至多 {pp} token/秒",
    ),
    "bench_pp": Text(
        "prefill of {count}: {rate} tok/s, {share} of the limit",
        "预填充 {count}：{rate} token/秒，达到上限的 {share}",
    ),
    "bench_tg": Text(
        "decode after {count}: {rate} tok/s, {share} of the limit",
        "在 {count} 之后生成：{rate} token/秒，达到上限的 {share}",
    ),
    "bench_batch": Text(
        "{count} requests at once (128 in, 64 out): {rate} output tok/s",
        "{count} 个请求同时（输入 128，输出 64）：{rate} 输出 token/秒",
    ),
    "bench_tg_stages": Text("decoding, time by stage: {shares}", "生成各阶段耗时占比：{shares}"),
    "bench_pp_stages": Text("prefill, time by stage: {shares}", "预填充各阶段耗时占比：{shares}"),
    "doctor_ok": Text("everything is in place", "一切就绪"),
    "doctor_mend": Text("to mend: {what}", "需要处理：{what}"),
    "doctor_no_model": Text(
        "no model in the cache; run `seethrough pull`", "缓存里没有模型；请运行 `seethrough pull`"
    ),
    "doctor_memory": Text(
        "only {free} of memory are free; the default model needs 1 GB",
        "可用内存只有 {free}；默认模型需要 1 GB",
    ),
    "doctor_broken": Text("{name} cannot be used: {why}", "{name} 无法使用：{why}"),
    "doctor_path": Text("{path} (the processor has {flags})", "{path}（处理器具备 {flags}）"),
    "doctor_lacks": Text("{path} lacks {flags}", "{path} 缺少 {flags}"),
    "doctor_kernels": Text("compiled kernels cannot be kept: {why}", "编译好的内核无法保存：{why}"),
    "doctor_missing": Text("{name} is not installed", "没有安装 {name}"),
    "no_prompt": Text(
        "give a prompt, - for standard input, or --file FILE",
        "请给出提示词，或用 - 从标准输入读取，或用 --file 文件",
    ),
    "two_prompts": Text("give either a prompt or --file, not both", "提示词和 --file 只能给一个"),
    "unreadable": Text("{path} cannot be read: {why}", "{path} 无法读取：{why}"),
}


def detect_language(argv: Sequence[str], environment: Mapping[str, str]) -> Language:
    """--lang, then SEETHROUGH_LANG, then the system's locale; English otherwise."""
    wanted = environment.get("SEETHROUGH_LANG", "")
    for place, word in enumerate(argv):
        if word == "--lang" and place + 1 < len(argv):
            wanted = argv[place + 1]
        elif word.startswith("--lang="):
            wanted = word.partition("=")[2]
    if wanted in LANGUAGES:
        return "zh" if wanted == "zh" else "en"
    locale = environment.get("LC_ALL") or environment.get("LANG") or ""
    return "zh" if locale.startswith("zh") else "en"


class Speaker:
    """Says things in one language: results on standard output, all else on standard error."""

    def __init__(self, language: Language, *, quiet: bool = False) -> None:
        self.language: Language = language
        self.quiet = quiet

    def text(self, key: str, **values: Any) -> str:
        """A message, filled in; values are shown as `printable` does."""
        shown = {name: printable(str(value)) for name, value in values.items()}
        return MESSAGES[key].pick(self.language).format(**shown)

    def note(self, key: str, **values: Any) -> None:
        """A message on standard error, unless quiet."""
        if not self.quiet:
            print(self.text(key, **values), file=sys.stderr)

    def complain(self, key: str, **values: Any) -> None:
        """A message on standard error, always."""
        print(self.text(key, **values), file=sys.stderr)


def size_text(nbytes: float) -> str:
    """Bytes for people: 96.6 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} GB"
