"""`seethrough pull`, `models`, `models show`: what is on this machine, and what it is made of."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from seethrough.cli.loading import ProgressLine
from seethrough.cli.messages import Speaker, size_text
from seethrough.cli.table import print_table
from seethrough.stages import STAGE
from seethrough.weights.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from seethrough.model.load import ModelWeights
    from seethrough.model.program import Op
    from seethrough.model.spec import TransformerSpec


def pull(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """Fetch a model into the cache; nothing to do where it is there already."""
    from seethrough.weights.pull import pull as fetch

    bar = ProgressLine(speaker)
    files = fetch(arguments.name or DEFAULT_MODEL, arguments.cache_dir, bar.show)
    bar.clear()
    path = files.weights[0]
    print(speaker.text("pulled", name=files.name, size=size_text(files.nbytes), path=path))
    return 0


def models(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """List the cache, or show one model's program."""
    if arguments.action == "show":
        return show(arguments, speaker)
    from seethrough.weights.files import list_models

    found = list_models(arguments.cache_dir)
    if not found:
        speaker.complain("no_models", name=DEFAULT_MODEL)
        return 0
    rows = [
        [
            model.name,
            size_text(model.nbytes),
            model.files.format if model.files else "–",
            model.problem or speaker.text("usable"),
        ]
        for model in found
    ]
    print_table(speaker.text("models_columns").split("|"), rows)
    return 0


def show(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """The program of a model: the stage table with this model's sizes. Reads no weight data."""
    from seethrough.model.load import understand
    from seethrough.model.program import build_ops
    from seethrough.weights.checkpoint import open_checkpoint
    from seethrough.weights.files import resolve_model

    checkpoint = open_checkpoint(
        resolve_model(arguments.name or DEFAULT_MODEL, arguments.cache_dir)
    )
    weights = understand(checkpoint)
    rows: list[list[str]] = []
    for layers, ops in collapse(build_ops(weights.spec), weights):
        if layers:
            rows.append([speaker.text("show_layers", layers=layers), "", "", "", ""])
        rows += [_row(op, weights, speaker) for op in ops]
    print_table(speaker.text("show_columns").split("|"), rows)
    spec = weights.spec
    kv_bytes = 2 * spec.n_layers * spec.kv_size * (4 if weights.is_f32 else 2)
    print(
        speaker.text(
            "show_totals",
            parameters=f"{sum(_count(t.shape) for t in weights.tensors.values()):,}",
            stored=size_text(weights.nbytes),
            kv=f"{kv_bytes:,}",
            dtype="f32" if weights.is_f32 else "f16",
        )
    )
    if weights.left_aside:
        print(speaker.text("left_aside", names=", ".join(weights.left_aside)))
    return 0


def collapse(ops: Sequence[Op], weights: ModelWeights) -> list[tuple[str, list[Op]]]:
    """Runs of layers that are alike shown once: ("0–29", operations of one of them)."""
    parts: list[tuple[str, list[Op]]] = []
    likeness: list[object] = []
    spans: list[list[int]] = []
    for layer, group in groupby(ops, key=lambda op: op.layer):
        members = list(group)
        alike = [_likeness(op, weights) for op in members]
        if layer is not None and likeness and likeness[-1] == alike:
            spans[-1][1] = layer
            continue
        parts.append(("", members))
        likeness.append(alike)
        spans.append([-1, -1] if layer is None else [layer, layer])
    return [
        ("" if first < 0 else str(first) if first == last else f"{first}–{last}", members)
        for (first, last), (_, members) in zip(spans, parts, strict=True)
    ]


def _likeness(op: Op, weights: ModelWeights) -> object:
    """What two layers must share to be shown as one."""
    attrs = {name: value for name, value in op.attrs.items() if name != "layer"}
    kinds = [_weight_text(name, weights) for name in op.weights if name in weights.tensors]
    tables = [name for name in op.weights if name not in weights.tensors]
    return (op.stage, op.kernel, attrs, kinds, tables, op.outputs)


def _row(op: Op, weights: ModelWeights, speaker: Speaker) -> list[str]:
    attrs = [f"{k}={_short(v)}" for k, v in op.attrs.items() if v is not None and k != "layer"]
    operation = f"{op.kernel}({', '.join(op.inputs)})" + (f" {' '.join(attrs)}" if attrs else "")
    named = [f"{_local(name)} {_weight_text(name, weights)}".rstrip() for name in op.weights]
    output = " ".join(f"{out} {_output_shape(out, weights.spec)}" for out in op.outputs)
    name = STAGE[op.stage].name.pick(speaker.language)
    return [op.stage, name, operation, ", ".join(named), output or "kv_cache"]


def _output_shape(name: str, spec: TransformerSpec) -> str:
    """The shape of a value in this model; n is the number of tokens."""
    heads = f"{spec.n_heads}, {spec.head_dim}"
    shared = f"{spec.n_kv_heads}, {spec.head_dim}"
    widths: dict[str, int | str] = {
        "Q": spec.q_size,
        "K": spec.kv_size,
        "V": spec.kv_size,
        "o": spec.q_size,
        "gate": spec.d_ff,
        "up": spec.d_ff,
        "act": spec.d_ff,
        "logits": spec.vocab_size,
    }
    widths |= dict.fromkeys(("Q_heads", "Q_pos", "O_heads"), heads)
    widths |= dict.fromkeys(("K_heads", "K_pos", "V_heads"), shared)
    rows = "1" if name in ("x_last", "h", "logits") else "n"
    return f"[{rows}, {widths.get(name, spec.d_model)}]"


def _weight_text(name: str, weights: ModelWeights) -> str:
    tensor = weights.tensors.get(name)
    if tensor is None:
        return ""
    return f"{tensor.dtype.name} {list(tensor.shape)}"


def _local(name: str) -> str:
    """A weight's name without its layer."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
