"""Writes GGUF files to measure with: a real model's shape with random blocks, or a requantization.

    bench/synthetic.py --shape 8b --type q4_k --out 8b.gguf
    bench/synthetic.py --requantize q4_0 --model smollm2-135m-instruct --out small.gguf

Speed depends on shapes and types, hardly on values; scales are such that activations stay finite.
The types of a file are those that llama.cpp's own quantizer gives it: K-quants where a row is a
multiple of 256 (else the type that it falls back to), Q6_K for the head and, in a Q4_K file, for
half of ffn_down and attn_v.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from blocks import GGUF_TYPES, random_blocks
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, dequantize, quantize

from seethrough.weights.catalog import DEFAULT_MODEL
from seethrough.weights.files import resolve_model


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a llama model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    vocab: int
    context: int
    tied: bool
    rope_base: float = 500000.0


SHAPES = {
    "135m": Shape(30, 576, 9, 3, 64, 1536, 49152, 8192, True, 100000.0),
    "1b": Shape(16, 2048, 32, 8, 64, 8192, 128256, 16384, True),
    "8b": Shape(32, 4096, 32, 8, 128, 14336, 128256, 16384, False),
}
TYPES = ("q4_0", "q4_k")
# What llama.cpp takes where rows are no multiple of 256.
_FALLBACK = {"q4_k": "q5_0", "q6_k": "q8_0"}
_FILE_TYPES = {"q4_0": 2, "q4_k": 15}


@dataclass(frozen=True, slots=True)
class _Planned:
    name: str
    rows: int
    columns: int
    kind: str


def plan(shape: Shape, kind: str) -> Iterator[_Planned]:
    """Every matrix with the type that llama.cpp's quantizer would give it."""

    def matrix(name: str, rows: int, columns: int, kind: str) -> _Planned:
        return _Planned(name, rows, columns, _FALLBACK.get(kind, kind) if columns % 256 else kind)

    q, kv, width, ff = (
        shape.heads * shape.head_dim,
        shape.kv_heads * shape.head_dim,
        shape.width,
        shape.ff,
    )
    yield matrix("token_embd.weight", shape.vocab, width, "q6_k" if shape.tied else kind)
    if not shape.tied:
        yield matrix("output.weight", shape.vocab, width, "q6_k")
    for layer in range(shape.layers):
        more = "q6_k" if kind == "q4_k" and _more_bits(layer, shape.layers) else kind
        for part, rows, columns, of_type in (
            ("attn_q", q, width, kind),
            ("attn_k", kv, width, kind),
            ("attn_v", kv, width, more),
            ("attn_output", width, q, kind),
            ("ffn_gate", ff, width, kind),
            ("ffn_up", ff, width, kind),
            ("ffn_down", width, ff, more),
        ):
            yield matrix(f"blk.{layer}.{part}.weight", rows, columns, of_type)


def _more_bits(layer: int, layers: int) -> bool:
    """llama.cpp's rule: the first and last eighth, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def write_random(shape: Shape, kind: str, out: Path, seed: int = 0) -> None:
    """Write a model of this shape; one tensor is in memory at a time."""
    writer = GGUFWriter(out, "llama")
    _write_metadata(writer, shape, kind)
    norms = ["output_norm.weight"] + [
        f"blk.{layer}.{part}.weight"
        for layer in range(shape.layers)
        for part in ("attn_norm", "ffn_norm")
    ]
    matrices = list(plan(shape, kind))
    for name in norms:
        writer.add_tensor_info(name, (shape.width,), np.dtype(np.float32), 4 * shape.width)
    for m in matrices:
        raw_type = GGUF_TYPES[m.kind]
        stored = (m.rows, raw_type.row_bytes(m.columns))
        nbytes = stored[0] * stored[1]
        writer.add_tensor_info(m.name, stored, np.dtype(np.uint8), nbytes, raw_type.number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms:
        writer.write_tensor_data(np.ones(shape.width, np.float32))
    rng = np.random.default_rng(seed)
    for m in matrices:
        writer.write_tensor_data(random_blocks(m.kind, m.rows, m.columns, rng))
    writer.close()


def _write_metadata(writer: GGUFWriter, shape: Shape, kind: str) -> None:
    writer.add_name(f"random {shape.layers}x{shape.width} {kind}")
    writer.add_file_type(_FILE_TYPES[kind])
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    tokens, types = _tokens(shape.vocab)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
    writer.add_add_bos_token(False)


def _tokens(count: int) -> tuple[list[str], list[int]]:
    """An end token, the 256 bytes in GPT-2's spelling, one merge, and words nobody uses."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    real = ["<|end|>", *spelling, "ab"]
    control, normal = 3, 1
    unused = [f"unused{i}" for i in range(count - len(real))]
    return real + unused, [control] + [normal] * (count - 1)


def requantize(source: Path, kind: str, out: Path) -> None:
    """Copy a file with its block matrices dequantized and quantized anew; the rest stays.

    The token table (here also the head) keeps its type, as with llama.cpp's quantizer.
    """
    wanted = GGMLQuantizationType[kind.upper()]
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value: Any = _FILE_TYPES[kind] if name == "general.file_type" else field.contents()
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, value, field.types[0], inner)
    for tensor in reader.tensors:
        data, of_type = tensor.data, tensor.tensor_type
        if tensor.name.startswith("blk.") and len(tensor.shape) == 2:
            data, of_type = quantize(dequantize(data, of_type), wanted), wanted
        writer.add_tensor(tensor.name, data, raw_dtype=of_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=SHAPES)
    what.add_argument("--requantize", choices=("q4_0",), help="the type to quantize --model to")
    parser.add_argument("--type", choices=TYPES, default="q4_0", help="with --shape")
    parser.add_argument("--layers", type=int, help="with --shape: fewer layers than it has")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="with --requantize")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args(arguments)
    if asked.requantize:
        requantize(resolve_model(asked.model).weights[0], asked.requantize, asked.out)
    else:
        shape = SHAPES[asked.shape]
        shape = replace(shape, layers=asked.layers or shape.layers)
        write_random(shape, asked.type, asked.out)
    print(f"{asked.out}: {asked.out.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
