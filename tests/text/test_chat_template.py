"""Chat templates: what is rendered, against transformers, and what is refused."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from mini_tokenizers import CHATML
from transformers.utils.chat_template_utils import render_jinja_template

from seethrough.errors import ParameterError, TemplateError
from seethrough.text.chat_template import RESERVED, ChatTemplate, render_chat
from seethrough.text.template_process import TemplateLimits, TemplateProcess

CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind'"},
    {"role": "user", "content": "你好 \n there "},
    {"role": "assistant", "content": "hi"},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"a": "é<>&", "b": [1, None]}}}
]

HELPERS = {
    "chatml": CHATML,
    "tojson": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages[0] | tojson }}",
    "tojson options": ""
    "{{ tools | tojson(ensure_ascii=True, separators=(',', ':'), sort_keys=True) }}",
    "strftime_now": "{{ strftime_now('%Y-%m-%d %b') }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}"
    "{{ m.content }}{% break %}{% endfor %}",
    "trim and lstrip": "a\n   {% if true %}\n  b\n   {% endif %}\n  c\n",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}",
    "macro": "{% macro show(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}"
    "{{ show(m) }}{% endfor %}",
    "slices and methods": "{{ messages[::-1][0].content.upper() }}"
    "{{ messages[1]['content'].strip() }}"
    "{{ '%s-%05d' % ('x', 7) }}{{ '{:>5}'.format('y') }}",
    "tests and filters": ""
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') "
    "| join(',') | trim }}{{ tools is defined }}{{ nothing is defined }}{{ nothing }}",
    "bos and flags": "{{ bos_token }}{{ eos_token }}{{ add_generation_prompt }}"
    "{{ enable_thinking }}",
    "dict": "{{ dict(a=1, b=2) | dictsort }}{{ {'k': 'v'}.items() | list }}",
    "no tools": "{% if tools %}T{% else %}none{% endif %}{{ documents is none }}",
}


def ours(template: str, messages: Any = CHAT, **options: Any) -> str:
    return render_chat(template, messages, bos_token="<s>", eos_token="</s>", **options)


def theirs(template: str, messages: Any = CHAT, **options: Any) -> str:
    options = {"add_generation_prompt": True, **options}
    rendered, _ = render_jinja_template(
        [messages], chat_template=template, bos_token="<s>", eos_token="</s>", **options
    )
    return rendered[0]


@pytest.mark.parametrize("name", HELPERS)
def test_every_helper_renders_as_in_transformers(name: str) -> None:
    """oobabooga/textgen#6675."""
    tools = None if name == "no tools" else TOOLS
    for generate in (True, False):
        options = {"tools": tools, "add_generation_prompt": generate, "enable_thinking": False}
        assert ours(HELPERS[name], **options) == theirs(HELPERS[name], **options)


def test_strftime_now_knows_times_too() -> None:
    before = time.strftime("%H:%M")
    assert ours("{{ strftime_now('%H:%M') }}") in {before, time.strftime("%H:%M")}


@pytest.mark.parametrize("text", ["ok", " ends with space ", "two\nlines"])
@pytest.mark.parametrize("body", ["message['content']", "message['content'] | trim"])
def test_continue_final_message_equals_transformers(text: str, body: str) -> None:
    template = CHATML.replace("message['content']", f"({body})")
    chat = [CHAT[1], {"role": "assistant", "content": text}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    rendered = ours(template, chat, **options)
    assert rendered == theirs(template, chat, **options)
    assert rendered.endswith(text if "trim" not in body else text.strip())


USER = {"role": "user", "content": "q"}


@pytest.mark.parametrize(
    ("messages", "generate", "template"),
    [
        ([USER, {"role": "assistant", "content": ""}], False, CHATML),
        ([USER, {"role": "assistant", "content": None}], False, CHATML),
        ([USER, {"role": "assistant", "content": "a"}], True, CHATML),
        ([USER], False, CHATML),
        ([USER, {"role": "assistant", "content": []}], False, CHATML),
        ([USER, {"role": "assistant", "content": "a"}], False, "{{ messages[0].content }}"),
        ([USER, {"role": "assistant", "content": "abc"}], False, "{{ messages[-1].content[:3] }}"),
    ],
)
def test_what_cannot_be_continued_is_refused(messages: Any, generate: bool, template: str) -> None:
    """ai-dynamo/dynamo PR#13841."""
    with pytest.raises(ParameterError, match="continue_final_message"):
        ours(template, messages, continue_final_message=True, add_generation_prompt=generate)


GEMMA_RULES = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m['content'] }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["system", "user"], "System role not supported"),
        (["user", "user"], "Roles must alternate"),
        (["assistant"], "Roles must alternate"),
        (["user", "assistant", "assistant"], "Roles must alternate"),
    ],
)
def test_the_templates_own_message_is_passed_on(roles: list[str], message: str) -> None:
    """janhq/jan#6254, EricLBuehler/mistral.rs#506."""
    with pytest.raises(TemplateError, match=message):
        ours(GEMMA_RULES, [{"role": role, "content": "x"} for role in roles])


@pytest.mark.parametrize("template", [None, ""])
def test_no_template_says_how_to_give_one(template: str | None) -> None:
    """vllm-project/vllm#39279."""
    with pytest.raises(TemplateError, match="--chat-template"):
        ours(template)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "source",
    ["{% for m in messages %}", "{{ messages[ }}", "{% nonsense %}", "{% endif %}", "{{ (" * 5000],
)
def test_a_template_that_does_not_parse_is_refused_at_load(source: str) -> None:
    """ggml-org/llama.cpp PR#14939: never another model's format."""
    with pytest.raises(TemplateError, match="parse"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    ["{{ 1 | no_such_filter }}", "{{ 1 is no_such_test }}", "{% include 'x' %}", "{{ a.b.c }}"],
)
def test_a_template_that_does_not_run_is_an_error(source: str) -> None:
    with pytest.raises(TemplateError):
        ours(source)


# ---------------------------------------------------------------- shapes of messages

STRINGS = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
PARTS = (
    "{% for m in messages %}[{% for part in m['content'] %}<{{ part['text'] }}>"
    "{% endfor %}]{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% set content = m.content %}{% if content is string %}[{{ content }}]"
    "{% else %}[{% for part in content %}<{{ part.text }}>{% endfor %}]{% endif %}{% endfor %}"
)


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("content", "strings", "parts", "both"),
    [
        ("ab", "[ab]", "[<ab>]", "[ab]"),
        ([text_part("a"), text_part("b")], "[a\nb]", "[<a><b>]", "[<a><b>]"),
        ([text_part("a")], "[a]", "[<a>]", "[<a>]"),
        (["a", {"type": "refusal", "refusal": "no"}], "[a\nno]", "[<a><no>]", "[<a><no>]"),
        (None, "[]", "[]", "[]"),
        ("", "[]", "[]", "[]"),
        ([], "[]", "[]", "[]"),
    ],
)
def test_content_in_parts_meets_every_kind_of_template(
    content: Any, strings: str, parts: str, both: str
) -> None:
    """vllm-project/vllm PR#9358."""
    for role in ("system", "user", "assistant"):
        message = [{"role": role, "content": content}]
        assert ours(STRINGS, message) == strings
        assert ours(PARTS, message) == parts
        assert ours(BOTH, message) == both


@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio", "video", "file", None, 3])
def test_a_part_that_is_no_text_is_named(kind: Any) -> None:
    with pytest.raises(ParameterError, match=str(kind)):
        ours(STRINGS, [{"role": "user", "content": [{"type": kind, "text": "x"}]}])


@pytest.mark.parametrize(
    "messages",
    [
        "hi",
        {"role": "user"},
        [],
        ["hi"],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": [3]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": "x", "extra": object()}],
        [{"role": "user", "content": "x", "extra": b"bytes"}],
        [{"role": "user", "content": "x", "deep": json.loads("[" * 200 + "]" * 200)}],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ParameterError):
        ours(STRINGS, messages)


def test_null_content_with_a_tool_call_keeps_the_call() -> None:
    """lmstudio-ai/lmstudio-bug-tracker#261; null is the same as absent."""
    template = (
        "{% for m in messages %}[{{ m.role }}:{{ m['content'] + '' }}{% if m.tool_calls %}"
        "{{ m.tool_calls[0].function.name }}{% endif %}{% if m.name is defined %}!"
        "{% endif %}]{% endfor %}"
    )
    call = [{"id": "1", "type": "function", "function": {"name": "get", "arguments": "{}"}}]
    for assistant in (
        {"role": "assistant", "content": None, "tool_calls": call, "name": None},
        {"role": "assistant", "tool_calls": call},
    ):
        chat = [USER, assistant, {"role": "tool", "content": "42", "tool_call_id": "1"}]
        assert ours(template, chat) == "[user:q][assistant:get][tool:42]"


@pytest.mark.parametrize(
    "name",
    sorted(
        RESERVED
        - {
            "messages",
            "template",
            "tools",
            "documents",
            "add_generation_prompt",
            "continue_final_message",
            "bos_token",
            "eos_token",
        }
    ),
)
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ParameterError, match=name):
        ours(CHATML, **{name: "x"})


def test_the_callers_messages_are_left_alone() -> None:
    messages = [{"role": "assistant", "content": [text_part("a")], "name": None}]
    before = json.dumps(messages)
    ours(PARTS, messages, continue_final_message=True, add_generation_prompt=False)
    assert json.dumps(messages) == before


# ---------------------------------------------------------------- hostile templates

HOSTILE = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "nested loops with output": "{% for i in range(99999) %}"
    "{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "string product": "{{ 'a' * 10**9 }}",
    "list product": "{{ ([0] * 10**9) | length }}",
    "variable product": "{% set n = messages | length * 10**9 %}{{ 'ab' * n }}",
    "huge range": "{{ range(10**12) | list }}",
    "power": "{{ (3 ** (10 ** 9)) % 7 }}",
    "power of a variable": "{% set n = 10 ** 8 %}{{ (n + 1) ** (n * 10) }}",
    "percent width": "{{ '%999999999d' | format(1) }}",
    "percent operator": "{{ '%999999999d' % 1 }}",
    "format width": "{{ '{:>999999999}'.format('x') }}",
    "format precision": "{{ '{:.999999999f}'.format(1.5) }}",
    "centre": "{{ 'x' | center(10**10) }}",
    "ljust": "{{ 'x'.ljust(10**10) }}",
    "indent": "{{ 'a\nb' | indent(10**10) }}",
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro tree": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}"
    "{% endmacro %}{{ m(60) }}",
    "join": "{{ range(99999) | join('a' * 9999) }}",
    "replace": "{% set s = 'a' * 99999 %}{{ s.replace('a', s) }}",
    "doubling": "{% set ns = namespace(s='aa') %}{% for i in range(60) %}"
    "{% set ns.s = ns.s ~ ns.s %}"
    "{% endfor %}{{ ns.s }}",
    "list of lists": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}"
    "{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l }}",
    "json of lists": "{% set ns = namespace(l=[1]) %}{% for i in range(60) %}"
    "{% set ns.l = [ns.l, ns.l] %}"
    "{% endfor %}{{ ns.l | tojson }}",
    "batch": "{{ [1] | batch(10**9, 0) | list | length }}",
    "lipsum": "{{ lipsum(n=99999999) }}",
    "output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
}


def test_memory_is_limited_and_not_output_alone() -> None:
    with pytest.raises(TemplateError, match="memory"):
        ours("{% set x = 'a' * n %}ok", n=10**9)


def test_a_hostile_template_is_stopped_as_the_first_one_too() -> None:
    """A worker that is just being started gets no more time."""
    own = TemplateProcess()
    own.start()
    template = ChatTemplate(HOSTILE["power of a variable"], TemplateLimits(seconds=0.4), own)
    start = time.monotonic()
    with pytest.raises(TemplateError):
        template.run({})
    assert time.monotonic() - start < 5
    own.close()


def test_the_worker_sees_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "1")
    own = TemplateProcess()
    assert ChatTemplate("x", process=own).run({}) == "x"
    assert own._process is not None
    environ = Path(f"/proc/{own._process.pid}/environ")
    if environ.exists():
        assert b"SECRET_OF_THE_CALLER" not in environ.read_bytes()
    own.close()


@pytest.fixture(scope="module")
def process() -> Any:
    own = TemplateProcess()
    yield own
    own.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_end_within_the_limits(name: str, process: TemplateProcess) -> None:
    """NVIDIA/Megatron-LM PR#6818."""
    limits = TemplateLimits(seconds=0.4)
    template = ChatTemplate(HOSTILE[name], limits, process)
    assert ChatTemplate("warm", limits, process).run({}) == "warm"
    start = time.monotonic()
    with pytest.raises(TemplateError):
        template.run({"messages": CHAT})
    assert time.monotonic() - start < 2.5
    assert ChatTemplate("after", limits, process).run({}) == "after"


def test_limits_leave_long_chats_alone() -> None:
    text = "word " * 400_000  # 2 MB
    assert ours(STRINGS, [{"role": "user", "content": text}]) == f"[{text}]"


def test_text_beyond_the_limit_is_refused(process: TemplateProcess) -> None:
    limits = TemplateLimits(max_chars=100)
    assert len(ChatTemplate("{{ 'x' * 90 }}", limits, process).run({})) == 90
    with pytest.raises(TemplateError, match="100 characters"):
        ChatTemplate("{% for i in range(9) %}{{ 'x' * 90 }}{% endfor %}", limits, process).run({})


ESCAPES = [
    "lipsum.__globals__['os'].popen('{cmd}').read()",
    "lipsum.__globals__.os.system('{cmd}')",
    "cycler.__init__.__globals__.os.system('{cmd}')",
    "joiner.__init__.__globals__.os.popen('{cmd}').read()",
    "namespace.__init__.__globals__.sys.modules['os'].system('{cmd}')",
    "''.__class__.__mro__[1].__subclasses__()",
    "''.__class__.__base__.__subclasses__()[100].__init__.__globals__",
    "(lipsum | attr('__globals__'))['os'].system('{cmd}')",
    "(lipsum | attr('__glo' ~ 'bals__'))['os'].system('{cmd}')",
    "self.__init__.__globals__.__builtins__.__import__('os').system('{cmd}')",
    "self._TemplateReference__context.environment.from_string('x')",
    "raise_exception.__globals__['sys'].modules['os'].system('{cmd}')",
    "strftime_now.__globals__['sys'].modules['os'].system('{cmd}')",
    "tojson.__globals__",
    "'{{0.__class__.__mro__}}'.format(1)",
    "('{{0.__class__.__init__.__globals__}}'.format,) | map('call', lipsum) | list",
    "['{{0.__class__.__mro__}}'] | map('format', 1) | list",
    "{{'f': '{{0.__class__.__mro__}}'.format}} | attr('f')",
    "(''|attr('format'))(1)",
    "'{{x.__class__.__mro__}}'.format_map({{'x': 1}})",
    "dict.__subclasses__()",
    "range.__class__.__bases__",
    "messages.append(1)",
    "messages[0].update(x=1)",
    "namespace(__class__=1)",
    "(messages | map(attribute='__class__') | list)[0].__mro__",
    "(messages | map(attribute='__class__.__mro__') | list)",
    "get_flashed_messages.__globals__",
    "url_for.__globals__",
]


@pytest.mark.parametrize("escape", ESCAPES)
def test_no_template_runs_code(escape: str, tmp_path: Path, process: TemplateProcess) -> None:
    """abetlen/llama-cpp-python PR#1462, sgl-project/sglang PR#23660, vercel/ai PR#12451."""
    marker = tmp_path / "marker"
    source = (
        "{{ "
        + escape.replace("{cmd}", f"touch {marker}").replace("{{", "{").replace("}}", "}")
        + " }}"
    )
    try:
        text = ChatTemplate(source, process=process).run({"messages": CHAT})
    except TemplateError:
        text = ""
    assert not marker.exists()
    for leaked in ("<class", "<module", "<function", "__", "built-in", "subclass"):
        assert leaked not in text.replace(str(marker), "")


def test_an_escape_that_works_would_be_seen(tmp_path: Path) -> None:
    """The same payload outside the sandbox does write the file: the test above can fail."""
    import jinja2

    marker = tmp_path / "marker"
    source = "{{ lipsum.__globals__['os'].system('touch " + str(marker) + "') }}"
    jinja2.Environment().from_string(source).render()
    assert marker.exists()


# ---------------------------------------------------------------- the process


def test_templates_render_from_any_thread(process: TemplateProcess) -> None:
    template = ChatTemplate(STRINGS, process=process)
    wrong = []

    def work(place: int) -> None:
        for turn in range(20):
            text = f"{place}-{turn}"
            got = template.run({"messages": [{"content": text}]})
            if got != f"[{text}]":
                wrong.append((text, got))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_worker_that_died_is_replaced(process: TemplateProcess) -> None:
    template = ChatTemplate("x", process=process)
    assert template.run({}) == "x"
    assert process._process is not None
    process._process.kill()
    process._process.wait()
    assert template.run({}) == "x"


def test_a_normal_chat_costs_little(process: TemplateProcess) -> None:
    template = ChatTemplate(CHATML, process=process)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        render_chat(template, CHAT, bos_token=None, eos_token=None)
        best = min(best, time.perf_counter() - start)
    assert best < 0.002
