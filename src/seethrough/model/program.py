"""A model as a flat list of operations, built once per load from its spec (S4 to S9).

Each record names an operation of `kernels/ops.py`, the stage that it belongs to, and its inputs,
weights and outputs. Read from top to bottom it is the stage table with this model's sizes; `run.py`
executes it. Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from seethrough.kernels.ops import Ops
from seethrough.model.spec import LayerSpec, TransformerSpec


@dataclass(frozen=True, slots=True)
class Op:
    """One operation: `outputs = kernel(*inputs, *weights, **attrs)`."""

    stage: str
    kernel: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...] = ()
    layer: int | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of a model, with the backend that runs them and the weights they name."""

    spec: TransformerSpec
    ops: tuple[Op, ...]
    weights: Mapping[str, Any]
    kernels: Ops


def build_ops(spec: TransformerSpec) -> tuple[Op, ...]:
    """The program of `spec`: embed, L layers, head."""
    return tuple(_Builder(spec).all())


class _Builder:
    """Writes the records in order; holds nothing but the spec."""

    def __init__(self, spec: TransformerSpec) -> None:
        self.spec = spec

    def all(self) -> Iterator[Op]:
        yield from self._embed()
        for index, layer in enumerate(self.spec.layers):
            x = "X" if index == 0 else "X_updated"
            for op in (*self._attention(index, layer, x), *self._mlp(index)):
                yield Op(op.stage, op.kernel, op.inputs, op.outputs, op.weights, index, op.attrs)
        yield from self._head()

    def _embed(self) -> Iterator[Op]:
        s = self.spec
        scale = {"scale": s.embed_scale}
        yield Op("S4", "embed", ("token_ids",), ("X",), ("embed.weight",), attrs=scale)
        if s.embed_norm:
            yield self._norm("S4", "X", "X", "embed_norm")
        if s.positions in ("learned", "sinusoidal"):
            offset = {"offset": s.position_offset}
            inputs = ("X", "positions")
            yield Op("S5", "add_positions", inputs, ("X",), ("positions.weight",), attrs=offset)

    def _attention(self, i: int, layer: LayerSpec, x: str) -> Iterator[Op]:
        s, at = self.spec, f"layers.{i}."
        yield self._norm("S6.1", x, "x_norm", f"{at}attn_norm")
        for out in ("Q", "K", "V"):
            yield self._linear("S6.1", "x_norm", out, f"{at}{out.lower()}", s.qkv_bias)
        for out, n in (("Q", s.n_heads), ("K", s.n_kv_heads), ("V", s.n_kv_heads)):
            yield Op("S6.2", "split_heads", (out,), (f"{out}_heads",), attrs={"n_heads": n})
        if s.qk_norm:
            yield self._norm("S6.2", "Q_heads", "Q_heads", f"{at}q_norm", kind="rms")
            yield self._norm("S6.2", "K_heads", "K_heads", f"{at}k_norm", kind="rms")
        q, k = "Q_heads", "K_heads"
        if layer.rope is not None:
            tables = (f"rope.{layer.rope}.cos", f"rope.{layer.rope}.sin")
            yield Op("S6.3", "rotate", (q, "positions"), ("Q_pos",), tables)
            yield Op("S6.3", "rotate", (k, "positions"), ("K_pos",), tables)
            q, k = "Q_pos", "K_pos"
        # Before the scores: a token also attends to itself, and reads itself from the cache.
        yield Op("S6.8", "write_kv", (k, "V_heads", "slots", "kv"), (), attrs={"layer": i})
        attrs = {
            "layer": i,
            "scale": layer.attn_scale,
            "window": layer.window,
            "softcap": s.attn_softcap,
        }
        slopes = ("alibi.slopes",) if s.positions == "alibi" else ()
        yield Op("S6.5", "attend", (q, "kv", "batch"), ("O_heads",), slopes, attrs=attrs)
        yield Op("S6.6", "merge_heads", ("O_heads",), ("o",))
        yield self._linear("S6.6", "o", "attn_out", f"{at}o", s.o_bias)
        if s.sandwich_norm:
            yield self._norm("S6.6", "attn_out", "attn_out", f"{at}attn_post_norm")
        yield Op("S6.6", "add", (x, "attn_out"), ("X_prime",))

    def _mlp(self, i: int) -> Iterator[Op]:
        s, at = self.spec, f"layers.{i}."
        kind = {"kind": s.activation}
        yield self._norm("S6.7", "X_prime", "x_norm", f"{at}mlp_norm")
        if s.gated_mlp:
            yield self._linear("S6.7", "x_norm", "gate", f"{at}gate", s.mlp_bias)
        yield self._linear("S6.7", "x_norm", "up", f"{at}up", s.mlp_bias)
        if s.gated_mlp:
            yield Op("S6.7", "gate", ("gate", "up"), ("act",), attrs=kind)
        else:
            yield Op("S6.7", "activate", ("up",), ("act",), attrs=kind)
        yield self._linear("S6.7", "act", "mlp_out", f"{at}down", s.mlp_bias)
        if s.sandwich_norm:
            yield self._norm("S6.7", "mlp_out", "mlp_out", f"{at}mlp_post_norm")
        yield Op("S6.7", "add", ("X_prime", "mlp_out"), ("X_updated",))

    def _head(self) -> Iterator[Op]:
        s = self.spec
        head = "embed.weight" if s.tied_head else "head.weight"
        yield Op("S7", "take_rows", ("X_updated", "logit_rows"), ("x_last",))
        yield self._norm("S8", "x_last", "h", "final_norm")
        yield Op("S9", "linear", ("h",), ("logits",), (head,))
        if s.logit_softcap is not None:
            yield Op("S9", "softcap", ("logits",), ("logits",), attrs={"cap": s.logit_softcap})

    def _norm(self, stage: str, x: str, out: str, weight: str, kind: str | None = None) -> Op:
        norm = self.spec.norm
        kind = kind or norm.kind
        weights = (f"{weight}.weight",) if kind == "rms" else (f"{weight}.weight", f"{weight}.bias")
        attrs = {"eps": norm.eps, "weight_offset": norm.weight_offset}
        return Op(stage, f"{kind}_norm", (x,), (out,), weights, attrs=attrs)

    @staticmethod
    def _linear(stage: str, x: str, out: str, weight: str, bias: bool) -> Op:
        weights = (f"{weight}.weight", f"{weight}.bias") if bias else (f"{weight}.weight",)
        return Op(stage, "linear", (x,), (out,), weights)
