"""The whole way from prompt to text on one page, one function per stage, in plain NumPy.

Naive on purpose: a padded batch, an attention mask, no KV cache, float32 weights, everything
computed again for every token. It is the oracle that the fast parts are compared with, and the
file to read first. The llama way reads from top to bottom; what other families do differently
stands below it, one named function each. Every stage names the module that does it for real.

B requests, n tokens in the longest, d model width, H query heads, Hkv key/value heads, dh head
size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from seethrough.errors import NoCandidatesError
from seethrough.model.positions import inverse_frequencies
from seethrough.model.spec import LayerSpec, NormSpec, TransformerSpec
from seethrough.sampling.params import EffectiveParams
from seethrough.sampling.philox import uniform
from seethrough.sampling.truncate import BORDER

Array = NDArray[Any]
Weights = Mapping[str, Array]


class TextCodec(Protocol):
    """What the pipeline needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Text to ids."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Ids to the vocabulary's own spelling."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text."""
        ...


@dataclass(frozen=True, slots=True)
class Model:
    """A spec, its float32 weights by canonical name, a tokenizer, and what ends a text."""

    spec: TransformerSpec
    weights: Weights
    tokenizer: TextCodec
    end_ids: frozenset[int] = frozenset()


def generate(
    model: Model, prompts: Sequence[str], params: EffectiveParams, pad_side: str = "right"
) -> list[str]:
    """Continue every prompt until an end token or `max_tokens`; stop strings are the engine's."""
    sequences = [initialise(model, prompt, params) for prompt in prompts]  # S0, S1, S2
    while unfinished := [s for s in sequences if s.finish_reason is None]:
        ids, mask = pad_and_mask([s.ids for s in unfinished], pad_side)  # S3
        x = forward(model.spec, model.weights, ids, mask)  # S4 S5 S6
        logits = head(model.spec, model.weights, take_last(x, mask))  # S7 S8 S9
        for sequence, row in zip(unfinished, logits, strict=True):
            adjusted = adjust(row, sequence)  # S10
            candidates = truncate(adjusted, params)  # S11
            token = choose(candidates, sequence)  # S12
            append(sequence, token, model.end_ids)  # S13
    return [model.tokenizer.decode(s.output_ids) for s in sequences]


def forward(spec: TransformerSpec, weights: Weights, ids: Array, mask: Array) -> Array:
    """Ids [B, n] to the hidden state after the last layer, XL [B, n, d]."""
    x = embed(spec, weights, ids)  # S4
    x, positions = add_positions(spec, weights, x, mask)  # S5
    for i, layer in enumerate(spec.layers):  # S6
        w = layer_weights(weights, i)
        q, k, v = norm_and_project(spec, w, x)  # S6.1
        q, k, v = split_heads(spec, w, q, k, v)  # S6.2
        q, k = rotate(spec, layer, q, k, positions)  # S6.3
        scores = masked_scores(spec, layer, q, k, mask, positions)  # S6.4
        heads = weigh_values(scores, v)  # S6.5
        x_prime = project_and_add(spec, w, heads, x)  # S6.6
        x = mlp_and_add(spec, w, x_prime)  # S6.7
        # S6.8 would keep k and v for later tokens; here they are computed again.
    return x


def head(spec: TransformerSpec, weights: Weights, x: Array) -> Array:
    """Hidden states [..., d] to logits [..., V]: S8, then S9."""
    return lm_head(spec, weights, final_norm(spec, weights, x))


# ------------------------------------------------------------------ phase A: preprocessing


@dataclass(slots=True)
class Running:
    """One request on its way: its prompt, what was generated, and how it ended."""

    prompt_ids: list[int]
    params: EffectiveParams
    output_ids: list[int]
    end_ids: frozenset[int]
    finish_reason: str | None = None

    @property
    def ids(self) -> list[int]:
        """Prompt and output together."""
        return self.prompt_ids + self.output_ids


def initialise(model: Model, prompt: str, params: EffectiveParams) -> Running:
    """S0: an empty state for the request. For real: engine/request.py, kv/pool.py."""
    ids = look_up_ids(model.tokenizer, prompt)
    return Running(ids, params, [], model.end_ids)


def tokenize(tokenizer: TextCodec, prompt: str) -> list[str]:
    """S1: cut the text into pieces. For real: text/tokenizer.py."""
    return tokenizer.pieces(look_up_ids(tokenizer, prompt))


def look_up_ids(tokenizer: TextCodec, prompt: str) -> list[int]:
    """S2: every piece becomes its number. (The library does S1 and S2 in one go.)"""
    return tokenizer.encode(prompt)


def pad_and_mask(
    sequences: Sequence[Sequence[int]], side: str = "right", pad_id: int = 0
) -> tuple[Array, Array]:
    """S3: lay requests side by side, [B, n], and say what is real. For real: engine/batch.py."""
    width = max(len(ids) for ids in sequences)
    padded = np.full((len(sequences), width), pad_id, dtype=np.int64)
    mask = np.zeros((len(sequences), width), dtype=bool)
    for row, ids in enumerate(sequences):
        place = slice(0, len(ids)) if side == "right" else slice(width - len(ids), width)
        padded[row, place] = ids
        mask[row, place] = True
    return padded, mask


# ------------------------------------------------------------------ phase B: embedding


def embed(spec: TransformerSpec, weights: Weights, ids: Array) -> Array:
    """S4: each id picks its row of the table. [B, n] -> [B, n, d]. For real: kernels, `embed`."""
    x = weights["embed.weight"][ids] * np.float32(spec.embed_scale)
    return norm(x, weights, "embed_norm", spec.norm) if spec.embed_norm else x


def add_positions(
    spec: TransformerSpec, weights: Weights, x: Array, mask: Array
) -> tuple[Array, Array]:
    """S5: number the real tokens; RoPE and ALiBi leave x alone. For real: `add_positions`."""
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)  # [B, n]; padding counts for nothing
    if spec.positions == "learned":
        x = x + learned_positions(spec, weights, positions)
    elif spec.positions == "sinusoidal":
        x = x + sinusoidal_positions(spec, positions)
    return x, positions


# ------------------------------------------------------------------ phase C: forward, per layer


def layer_weights(weights: Weights, layer: int) -> Weights:
    """The weights of one layer, under short names such as `q.weight`."""
    at = f"layers.{layer}."
    return {name.removeprefix(at): w for name, w in weights.items() if name.startswith(at)}


def norm_and_project(spec: TransformerSpec, w: Weights, x: Array) -> tuple[Array, Array, Array]:
    """S6.1: norm, then three projections. For real: kernels, `rms_norm` and `linear`."""
    x = norm(x, w, "attn_norm", spec.norm)
    return linear(x, w, "q"), linear(x, w, "k"), linear(x, w, "v")  # [B, n, H·dh], [B, n, Hkv·dh]


def split_heads(
    spec: TransformerSpec, w: Weights, q: Array, k: Array, v: Array
) -> tuple[Array, Array, Array]:
    """S6.2: every head works alone. [B, n, H·dh] -> [B, H, n, dh]. For real: `split_heads`."""
    q, k, v = (x.reshape(*x.shape[:2], -1, spec.head_dim).swapaxes(1, 2) for x in (q, k, v))
    if spec.qk_norm:
        q, k = norm_heads(spec, w, q, k)
    return q, k, v


def rotate(
    spec: TransformerSpec, layer: LayerSpec, q: Array, k: Array, positions: Array
) -> tuple[Array, Array]:
    """S6.3: turn pairs of Q and K by an angle that grows with position. For real: `rotate`."""
    if layer.rope is None:
        return q, k
    angles = positions[..., None] * inverse_frequencies(spec.ropes[layer.rope], spec.head_dim)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]  # [B, 1, n, dh/2]

    def turn(x: Array) -> Array:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return turn(q).astype(np.float32), turn(k).astype(np.float32)


def masked_scores(
    spec: TransformerSpec, layer: LayerSpec, q: Array, k: Array, mask: Array, positions: Array
) -> Array:
    """S6.4: q·k, scaled; future and padding become −∞. [B, H, n, n]. For real: `attend`."""
    k = np.repeat(k, spec.n_heads // spec.n_kv_heads, axis=1)  # query heads share key heads
    scores = q @ k.swapaxes(-1, -2) * np.float32(layer.attn_scale)
    if spec.attn_softcap is not None:
        scores = soft_cap(scores, spec.attn_softcap)
    distance = positions[:, None, :, None] - positions[:, None, None, :]  # [B, 1, n, n]
    if spec.positions == "alibi":
        scores = scores - alibi(spec.n_heads, distance)
    visible = mask[:, None, None, :] & (distance >= 0)
    if layer.window is not None:
        visible &= distance < layer.window
    return np.where(visible, scores, np.float32(-np.inf))


def weigh_values(scores: Array, v: Array) -> Array:
    """S6.5: softmax, then the weighted sum of V. -> [B, H, n, dh]. For real: `attend`."""
    v = np.repeat(v, scores.shape[1] // v.shape[1], axis=1)
    return softmax(scores) @ v


def project_and_add(spec: TransformerSpec, w: Weights, heads: Array, x: Array) -> Array:
    """S6.6: join the heads, project, add to the layer's input. For real: `linear`, `add`."""
    joined = heads.swapaxes(1, 2).reshape(*x.shape[:2], -1)  # [B, n, H·dh]
    out = linear(joined, w, "o")
    return x + (norm(out, w, "attn_post_norm", spec.norm) if spec.sandwich_norm else out)


def mlp_and_add(spec: TransformerSpec, w: Weights, x: Array) -> Array:
    """S6.7: norm, widen, bend, narrow, add. For real: `linear`, `gate`, `add`."""
    y = norm(x, w, "mlp_norm", spec.norm)
    if spec.gated_mlp:
        y = activation(spec.activation)(linear(y, w, "gate")) * linear(y, w, "up")
    else:
        y = activation(spec.activation)(linear(y, w, "up"))
    out = linear(y, w, "down")
    return x + (norm(out, w, "mlp_post_norm", spec.norm) if spec.sandwich_norm else out)


# ------------------------------------------------------------------ phase D: head


def take_last(x: Array, mask: Array) -> Array:
    """S7: only the newest real position predicts. [B, n, d] -> [B, d]. For real: `take_rows`."""
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    return x[np.arange(len(x)), last]


def final_norm(spec: TransformerSpec, weights: Weights, x: Array) -> Array:
    """S8: the scale that the head expects. For real: `rms_norm` or `layer_norm`."""
    return norm(x, weights, "final_norm", spec.norm)


def lm_head(spec: TransformerSpec, weights: Weights, h: Array) -> Array:
    """S9: one score per vocabulary entry. [..., d] -> [..., V]. For real: `linear`."""
    table = weights["embed.weight" if spec.tied_head else "head.weight"]
    logits = h @ table.T
    return logits if spec.logit_softcap is None else soft_cap(logits, spec.logit_softcap)


# ------------------------------------------------------------------ phase E: decoding


def adjust(logits: Array, sequence: Running) -> Array:
    """S10: bans, bias, penalties, temperature, in this order. For real: sampling/adjust.py."""
    p, row = sequence.params, logits.astype(np.float32)
    row = ban(row, sequence)
    for token, bias in p.logit_bias.items():
        row[token] += np.float32(bias)
    for token in set(sequence.ids):
        factor = np.float32(p.repetition_penalty)
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(sequence.output_ids):
        row[token] -= np.float32(p.presence_penalty)
    for token in sequence.output_ids:
        row[token] -= np.float32(p.frequency_penalty)
    if p.greedy or p.temperature == 1:
        return row
    return (row - row.max()) / np.float32(p.temperature)


def truncate(row: Array, params: EffectiveParams) -> Array:
    """S11: top-k, top-p, min-p, typical; each on what the last one left. For real: truncate.py."""
    if params.greedy:
        return row
    if params.top_k > 0:
        row = keep(row, by_probability(row)[: params.top_k])
    if params.top_p < 1:
        row = keep(row, nucleus(row, params.top_p))
    if params.min_p > 0:
        probs = softmax(row.astype(np.float64))
        row = keep(row, np.flatnonzero(probs >= params.min_p * (1 - BORDER) * probs.max()))
    if params.typical_p < 1:
        row = keep(row, typical(row, params.typical_p))
    return row


def choose(row: Array, sequence: Running) -> int:
    """S12: the highest, or the first whose cumulative mass exceeds u. For real: choose.py."""
    if sequence.params.greedy:
        return int(np.argmax(row))
    mass = np.cumsum(softmax(row.astype(np.float64)))
    u = uniform(sequence.params.seed, len(sequence.output_ids), 0)
    return int(np.argmax(mass > u * mass[-1]))


# ------------------------------------------------------------------ phase F: the loop


def append(sequence: Running, token: int, end_ids: frozenset[int]) -> None:
    """S13: the token joins its sequence, or ends it. For real: engine/engine.py."""
    sequence.output_ids.append(token)
    p = sequence.params
    if token in p.stop_token_ids or (token in end_ids and not p.ignore_eos):
        sequence.finish_reason = "stop"
    elif len(sequence.output_ids) == p.max_tokens:
        sequence.finish_reason = "length"


# ------------------------------------------------------------------ the parts that stages share


def linear(x: Array, w: Weights, name: str) -> Array:
    """x · Wᵀ, plus the bias where the model has one."""
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def norm(x: Array, w: Weights, name: str, spec: NormSpec) -> Array:
    """RMSNorm: divide by the root mean square, scale. (LayerNorm below.)"""
    scale = w[f"{name}.weight"] + np.float32(spec.weight_offset)
    if spec.kind == "layer":
        return layer_norm(x, scale, w[f"{name}.bias"], spec.eps)
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(spec.eps)) * scale


def softmax(scores: Array) -> Array:
    """Softmax over the last axis; a row that sees nothing (padding) gives zeros."""
    top = scores.max(axis=-1, keepdims=True)
    e = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = e.sum(axis=-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def activation(kind: str) -> Callable[[Array], Array]:
    """The function in the middle of the MLP."""
    return {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu}[kind]


def silu(x: Array) -> Array:
    """x · sigmoid(x)."""
    return x * (0.5 * np.tanh(0.5 * x) + 0.5)


# ------------------------------------------------------------------ what other families do


def layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    """GPT-2, BLOOM, XGLM: subtract the mean, divide by the deviation, scale and shift."""
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + np.float32(eps))
    return centred / deviation * scale + bias


def gelu(x: Array) -> Array:
    """XGLM: x · Φ(x), exactly."""
    return x * np.vectorize(lambda v: 0.5 * (1 + math.erf(v / math.sqrt(2))), otypes="f")(x)


def gelu_tanh(x: Array) -> Array:
    """GPT-2, BLOOM, Gemma: GELU through tanh."""
    return 0.5 * x * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (x + 0.044715 * x**3)))


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0)


def learned_positions(spec: TransformerSpec, weights: Weights, positions: Array) -> Array:
    """GPT-2: a trained vector per position."""
    return weights["positions.weight"][positions + spec.position_offset]


def sinusoidal_positions(spec: TransformerSpec, positions: Array) -> Array:
    """XGLM: sines and cosines of falling frequency; numbering starts at `position_offset`."""
    half, rows = spec.d_model // 2, positions + spec.position_offset
    speed = np.exp(-math.log(10_000) * np.arange(half) / (half - 1))
    angles = rows[..., None] * speed
    odd = np.zeros((*rows.shape, spec.d_model % 2))
    table = np.concatenate([np.sin(angles), np.cos(angles), odd], axis=-1).astype(np.float32)
    return np.where(rows[..., None] == spec.sinusoid_pad, np.float32(0), table)


def alibi(n_heads: int, distance: Array) -> Array:
    """BLOOM: a penalty that grows with distance, steeper in some heads than in others."""
    power = 2 ** math.floor(math.log2(n_heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(n_heads - power)]
    return (np.array(slopes)[None, :, None, None] * distance).astype(np.float32)


def norm_heads(spec: TransformerSpec, w: Weights, q: Array, k: Array) -> tuple[Array, Array]:
    """Qwen3, Gemma 3: each head of Q and K is brought to one scale before it turns."""
    kind = NormSpec("rms", spec.norm.eps, spec.norm.weight_offset)
    return norm(q, w, "q_norm", kind), norm(k, w, "k_norm", kind)


def soft_cap(x: Array, cap: float) -> Array:
    """Gemma: press values into (−cap, cap)."""
    return np.float32(cap) * np.tanh(x / np.float32(cap))


# ------------------------------------------------------------------ candidates


def ban(row: Array, sequence: Running) -> Array:
    """What must not be chosen now: outside the allowed ids, a bad word's end, an early end."""
    p, row = sequence.params, row.copy()
    if p.allowed_token_ids is not None:
        row = keep(row, np.array(p.allowed_token_ids))
    for *before, last in p.bad_words_ids:
        if not before or sequence.ids[-len(before) :] == before:
            row[last] = -np.inf
    if len(sequence.output_ids) < p.min_tokens:
        ends = set(p.stop_token_ids) | (set() if p.ignore_eos else sequence.end_ids)
        row[list(ends)] = -np.inf
    if np.isneginf(row).all():
        raise NoCandidatesError("the bans leave no token to choose from")
    return row


def keep(row: Array, ids: Array) -> Array:
    """The row with everything but `ids` at −∞."""
    out = np.full_like(row, -np.inf)
    out[ids] = row[ids]
    return out


def by_probability(row: Array) -> Array:
    """Candidates, most probable first; ties by lower id."""
    order = np.argsort(-row, kind="stable")
    return order[row[order] > -np.inf]


def nucleus(row: Array, p: float) -> Array:
    """The shortest prefix by probability whose mass exceeds p (all, if none does)."""
    order = by_probability(row)
    mass = np.cumsum(softmax(row.astype(np.float64))[order])
    return order[: int(np.count_nonzero(mass <= p * (1 + BORDER) * mass[-1])) + 1]


def typical(row: Array, p: float) -> Array:
    """Candidates whose surprise is nearest to the expected one, until their mass reaches p."""
    ids = by_probability(row)
    logp = np.log(softmax(row.astype(np.float64))[ids])
    distance = np.abs(-logp - -(np.exp(logp) * logp).sum())
    order = np.argsort(distance, kind="stable")
    mass = np.cumsum(np.exp(logp)[order])
    last = min(int(np.count_nonzero(mass < p * (1 - BORDER))), len(order) - 1)
    return ids[distance <= distance[order[last]]]
