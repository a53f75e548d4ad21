"""What a transformer is made of: its sizes, and which part goes where. Knows no family and no file.

A `TransformerSpec` is data. A family file maps a config to one; `program.py` turns one into a list
of operations; `pipeline.py` reads one while it runs. None of them asks for a model's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
PositionScheme = Literal["rope", "learned", "sinusoidal", "alibi"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary embedding: how fast each pair of dimensions turns (S6.3).

    `default` turns pair i by position / theta^(2i/dim). `linear` divides every speed by `factor`.
    `llama3` divides only the slow pairs, with a smooth passage (Llama 3.1). `factors` divides each
    pair by its own number, as GGUF files store the result of a scaling.
    """

    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A normalisation: `rms` divides by the root mean square, `layer` also subtracts the mean.

    `weight_offset` is added to the stored weight (1.0 where the file stores w − 1).
    """

    kind: Literal["rms", "layer"]
    eps: float
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer in attention."""

    attn_scale: float
    """Scores are multiplied by it; 1/√head_dim in most models."""
    rope: int | None = None
    """Index into `TransformerSpec.ropes`, or None where nothing is rotated."""
    window: int | None = None
    """A token sees this many positions, itself included; None sees all."""


@dataclass(frozen=True, slots=True)
class TransformerSpec:
    """A decoder-only transformer as data."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab_size: int
    max_positions: int
    norm: NormSpec
    layers: tuple[LayerSpec, ...]
    activation: Activation
    gated_mlp: bool
    """down(act(gate(x)) · up(x)) if true, down(act(up(x))) if not."""
    positions: PositionScheme
    ropes: tuple[RopeSpec, ...] = ()
    position_offset: int = 0
    """Row of the position table that belongs to position 0."""
    sinusoid_pad: int | None = None
    """Row of a sinusoidal table that is all zeros (the pad id, where the family does that)."""
    embed_scale: float = 1.0
    embed_norm: bool = False
    sandwich_norm: bool = False
    """A second norm on each branch's output, before it is added to the residual."""
    qk_norm: bool = False
    """An RMSNorm over each head of Q and K, before rotation."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = True
    """The LM head is the embedding table."""
    attn_softcap: float | None = None
    """Scores become c·tanh(score / c)."""
    logit_softcap: float | None = None

    @property
    def n_layers(self) -> int:
        """Number of layers, L."""
        return len(self.layers)

    @property
    def q_size(self) -> int:
        """Width of all query heads together, H·dh."""
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together, Hkv·dh."""
        return self.n_kv_heads * self.head_dim

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that this spec needs, by canonical name, with its shape.

        Matrices are [out_features, in_features].
        """
        d, v = self.d_model, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": (v, d)}
        if self.positions == "learned":
            shapes["positions.weight"] = (self.max_positions + self.position_offset, d)
        if self.embed_norm:
            shapes |= self._norm_shapes("embed_norm", d)
        for i in range(self.n_layers):
            shapes |= self._layer_shapes(f"layers.{i}.")
        shapes |= self._norm_shapes("final_norm", d)
        if not self.tied_head:
            shapes["head.weight"] = (v, d)
        return shapes

    def _norm_shapes(self, name: str, size: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (size,)}
        if self.norm.kind == "layer":
            shapes[f"{name}.bias"] = (size,)
        return shapes

    def _layer_shapes(self, at: str) -> dict[str, tuple[int, ...]]:
        d, f = self.d_model, self.d_ff
        linears = {
            "q": (self.q_size, d, self.qkv_bias),
            "k": (self.kv_size, d, self.qkv_bias),
            "v": (self.kv_size, d, self.qkv_bias),
            "o": (d, self.q_size, self.o_bias),
            "up": (f, d, self.mlp_bias),
            "down": (d, f, self.mlp_bias),
        }
        if self.gated_mlp:
            linears["gate"] = (f, d, self.mlp_bias)
        shapes = self._norm_shapes(f"{at}attn_norm", d) | self._norm_shapes(f"{at}mlp_norm", d)
        if self.sandwich_norm:
            shapes |= self._norm_shapes(f"{at}attn_post_norm", d)
            shapes |= self._norm_shapes(f"{at}mlp_post_norm", d)
        if self.qk_norm:
            shapes[f"{at}q_norm.weight"] = shapes[f"{at}k_norm.weight"] = (self.head_dim,)
        for name, (out_features, in_features, bias) in linears.items():
            shapes[f"{at}{name}.weight"] = (out_features, in_features)
            if bias:
                shapes[f"{at}{name}.bias"] = (out_features,)
        return shapes
