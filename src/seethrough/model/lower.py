"""A program's operations as records for the `cpu` kernels: which buffers, which kernel, who waits.

One value has one buffer, reused by every layer. Three things are joined on the way, each of which
leaves every value where a tracer finds it: an addition and the norm that reads its sum, a value and
its quantized form, a key's rotation and its way into the cache. Threads meet only where a record
reads what another one wrote since they last met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seethrough.kernels.cpu.compiled import Kernels
from seethrough.kernels.cpu.forms import ACT_BYTES, BLOCK, LANES
from seethrough.kernels.cpu.memory import aligned
from seethrough.kernels.cpu.record import RECORD_WORDS, A, E, L, R, S
from seethrough.kernels.cpu.weights import Packed
from seethrough.model.program import Op
from seethrough.model.spec import TransformerSpec

F32 = NDArray[np.float32]
Words = dict[int, int]
_HEAD_VALUES = ("x_last", "h", "logits")  # one row per wanted logit, not per token


@dataclass(frozen=True, slots=True)
class Buffer:
    """Room for one value of every row. `quantized` is its int8 form, where a matrix wants it."""

    name: str
    width: int
    floats: F32  # [rows, stride]

    @property
    def address(self) -> int:
        """Where the first row lies."""
        return int(self.floats.ctypes.data)

    @property
    def stride(self) -> int:
        """Bytes from row to row."""
        return int(self.floats.strides[0])


@dataclass(slots=True)
class Record:
    """One kernel call in the making: its words, what it reads and writes, the ops that it does."""

    kernel: int
    rows: S
    words: dict[int, int]
    reads: set[str]
    writes: set[str]
    ops: list[int]
    quantizes: bool = False  # whether it can write its output's int8 form as well
    barrier: bool = False


@dataclass(frozen=True, slots=True)
class Lowered:
    """What the compiled loop runs.

    Attributes:
        records: int64 [n, RECORD_WORDS].
        ops: for every record the numbers of the operations that are complete after it.
        attends: layer of every record that makes scores.
        buffers: the buffer of every value name.
    """

    records: NDArray[np.int64]
    ops: tuple[tuple[int, ...], ...]
    attends: Mapping[int, int]
    buffers: Mapping[str, Buffer]
    keep: tuple[Any, ...]  # what the records point to


@dataclass(slots=True)
class _State:
    records: list[Record] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    quantized: dict[str, NDArray[np.uint8]] = field(default_factory=dict)
    makers: dict[str, Record] = field(default_factory=dict)  # last record that wrote a value
    attends: dict[int, int] = field(default_factory=dict)
    keep: list[Any] = field(default_factory=list)


class Lowering:
    """Turns the operations of one program into records, in order."""

    def __init__(
        self,
        spec: TransformerSpec,
        weights: Mapping[str, Packed | F32],
        kernels: Kernels,
        max_rows: int,
        kv_bytes: int,
    ) -> None:
        self.spec, self.weights, self.kernels = spec, weights, kernels
        self.max_rows, self.kv_bytes = max_rows, kv_bytes
        self.state = _State()

    def lower(self, ops: Iterable[Op]) -> Lowered:
        """The records of these operations."""
        for number, op in enumerate(ops):
            _LOWER[op.kernel](self, number, op)
        self._place_barriers()
        state = self.state
        table = np.zeros((len(state.records), RECORD_WORDS), dtype=np.int64)
        for row, record in zip(table, state.records, strict=True):
            row[R.KERNEL], row[R.BARRIER], row[R.ROWS] = record.kernel, record.barrier, record.rows
            for word, value in record.words.items():
                row[word] = value
        done = tuple(tuple(record.ops) for record in state.records)
        keep = (*state.keep, *state.quantized.values(), self.weights)
        return Lowered(table, done, state.attends, state.buffers, keep)

    def _place_barriers(self) -> None:
        read, written = set[str](), set[str]()
        for record in self.state.records:
            waits = record.reads & written or record.writes & (read | written)
            if waits:
                record.barrier = True
                read, written = set(), set()
            read |= record.reads
            written |= record.writes

    # --- The parts that all operations use. ---

    def buffer(self, name: str, width: int | None = None) -> Buffer:
        """The buffer of a value, made on first use."""
        buffers = self.state.buffers
        if name not in buffers:
            if width is None:
                raise KeyError(f"value {name} is read before it is made")
            stride = -(-width // LANES) * LANES
            room = aligned(4 * self.max_rows * stride).view(np.float32)
            buffers[name] = Buffer(name, width, room.reshape(self.max_rows, stride))
        return buffers[name]

    def alias(self, number: int, op: Op) -> None:
        """The same numbers under another name."""
        source, target = op.inputs[0], op.outputs[0]
        self.state.buffers[target] = self.state.buffers[source]
        self.state.makers[target] = self.state.makers[source]
        self.state.makers[source].ops.append(number)

    def add(
        self,
        number: int | None,
        kernel: int,
        words: dict[int, int],
        reads: Iterable[str],
        writes: Iterable[str],
        rows: S = S.ROWS,
    ) -> Record:
        """Append a record; names stand for the buffers behind them."""
        buffers = self.state.buffers
        written = {buffers[n].name if n in buffers else n for n in writes}
        read = {buffers[n].name if n in buffers else n for n in reads}
        ops = [] if number is None else [number]
        record = Record(kernel, rows, words, read, written, ops)
        self.state.records.append(record)
        for name in writes:
            self.state.makers[name] = record
        return record

    def kernel(self, name: str) -> int:
        """A kernel's address; it is compiled if it is not on disk."""
        return self.kernels.address(name)

    def floats(self, name: str) -> int:
        """Address of a float vector or table among the weights."""
        value = self.weights[name]
        if isinstance(value, Packed):
            raise TypeError(f"{name} is a packed matrix, not a vector")
        return int(value.ctypes.data)

    def padded(self, values: F32) -> int:
        """Address of a copy of a vector, padded to whole registers with zeros."""
        room = aligned(4 * (-(-values.size // LANES) * LANES)).view(np.float32)
        room[: values.size] = values.reshape(-1)
        self.state.keep.append(room)
        return int(room.ctypes.data)

    def matrix(self, name: str) -> Packed:
        """A packed matrix among the weights."""
        value = self.weights[name]
        if not isinstance(value, Packed):
            raise TypeError(f"{name} is not a packed matrix")
        return value

    def quantize(self, name: str) -> tuple[int, int]:
        """Address and row stride of a value's int8 form; its maker writes it where it can."""
        state, buffer = self.state, self.buffer(name)
        stride = buffer.width // BLOCK * ACT_BYTES
        at = state.quantized.setdefault(buffer.name, aligned(self.max_rows * stride))
        address, maker = int(at.ctypes.data), state.makers[name]
        form = f"{buffer.name}.int8"
        if form not in maker.writes:
            words: Words = {E.Q: address, E.Q_STRIDE: stride}
            if maker.quantizes:
                maker.words |= words
                maker.writes.add(form)
            else:
                words |= _input(buffer) | {E.SIZE: buffer.width}
                kernel = self.kernel("quantize")
                record = self.add(None, kernel, words, [name], [form], maker.rows)
                record.writes = {form}
                maker.writes.add(form)
        return address, stride


def _input(buffer: Buffer) -> Words:
    return {E.X: buffer.address, E.X_STRIDE: buffer.stride}


def _output(buffer: Buffer) -> Words:
    return {E.Y: buffer.address, E.Y_STRIDE: buffer.stride}


def _other(buffer: Buffer) -> Words:
    return {E.OTHER: buffer.address, E.OTHER_STRIDE: buffer.stride}


def float_bits(value: float) -> int:
    """A float32's bits as an integer: how a record carries a number."""
    return int(np.float32(value).view(np.uint32))


def _rows_of(name: str) -> S:
    return S.LOGIT_ROWS if name in _HEAD_VALUES else S.ROWS


def _embed(low: Lowering, number: int, op: Op) -> None:
    table = low.matrix(op.weights[0])
    out = low.buffer(op.outputs[0], table.columns)
    words: Words = _output(out) | {
        E.SIZE: table.columns,
        E.WEIGHT: table.address,
        E.GROUP_BYTES: table.group_bytes,
        E.NUMBER: float_bits(op.attrs["scale"]),
    }
    kernel = low.kernel(f"embed_{table.dtype}")
    low.add(number, kernel, words, [], op.outputs)


def _add_positions(low: Lowering, number: int, op: Op) -> None:
    x = low.buffer(op.inputs[0])
    table = low.weights[op.weights[0]]
    if isinstance(table, Packed):
        raise TypeError("a position table stays a plain array")
    words: Words = (
        _input(x)
        | _output(x)
        | {
            E.SIZE: x.width,
            E.WEIGHT: int(table.ctypes.data),
            E.NUMBER: op.attrs["offset"],
        }
    )
    kernel = low.kernel("add_positions")
    low.add(number, kernel, words, [op.inputs[0]], op.outputs)


def _norm(low: Lowering, number: int, op: Op) -> None:
    name, out_name = op.inputs[0], op.outputs[0]
    source = low.buffer(name)
    weight = low.weights[op.weights[0]]
    size = int(np.size(weight)) if not isinstance(weight, Packed) else 0
    out = low.buffer(out_name, source.width)
    words: Words = {
        **_input(source),
        **_output(out),
        E.SIZE: size,
        E.HEADS: source.width // size,
        E.WEIGHT: low.padded(np.asarray(weight) + np.float32(op.attrs["weight_offset"])),
        E.BIAS: low.padded(np.asarray(low.weights[op.weights[1]])) if len(op.weights) > 1 else 0,
        E.NUMBER: float_bits(op.attrs["eps"]),
    }
    kernel = low.kernel(op.kernel)
    maker = low.state.makers[name]
    if _joins(low, maker, source, size):
        # The addition before it: its record becomes this norm's.
        addition = low.state.records.pop()
        words |= {
            E.X: addition.words[E.X],
            E.X_STRIDE: addition.words[E.X_STRIDE],
            E.OTHER: addition.words[E.OTHER],
            E.OTHER_STRIDE: addition.words[E.OTHER_STRIDE],
            E.SUM: source.address,
            E.SUM_STRIDE: source.stride,
        }
        record = low.add(number, kernel, words, addition.reads, [name, out_name], maker.rows)
        record.ops = [*addition.ops, number]
    else:
        record = low.add(number, kernel, words, [name], [out_name], _rows_of(out_name))
    record.quantizes = source.width == size


def _joins(low: Lowering, maker: Record, source: Buffer, size: int) -> bool:
    is_addition = maker.kernel == low.kernel("add")
    return is_addition and maker is low.state.records[-1] and source.width == size


def _linear(low: Lowering, number: int, op: Op) -> None:
    name, matrix = op.inputs[0], low.matrix(op.weights[0])
    x = low.buffer(name)
    address, stride = low.quantize(name) if matrix.quantized else (x.address, x.stride)
    out = low.buffer(op.outputs[0], matrix.rows)
    bias = low.padded(np.asarray(low.weights[op.weights[1]])) if len(op.weights) > 1 else 0
    words: Words = {
        L.WEIGHTS: matrix.address,
        L.GROUP_BYTES: matrix.group_bytes,
        L.GROUPS: matrix.groups,
        L.DEPTH: matrix.depth,
        L.X: address,
        L.X_STRIDE: stride,
        L.Y: out.address,
        L.Y_STRIDE: out.stride,
        L.BIAS: bias,
    }
    kernel = low.kernel(f"linear_{matrix.dtype}")
    reads = [f"{x.name}.int8" if matrix.quantized else name]
    low.add(number, kernel, words, reads, op.outputs, _rows_of(op.outputs[0]))


def _rotate(low: Lowering, number: int, op: Op) -> None:
    x = low.buffer(op.inputs[0])
    out = low.buffer(op.outputs[0], x.width)
    words: Words = (
        _input(x)
        | _output(out)
        | {
            E.SIZE: low.spec.head_dim,
            E.HEADS: x.width // low.spec.head_dim,
            E.COS: low.floats(op.weights[0]),
            E.SIN: low.floats(op.weights[1]),
        }
    )
    kernel = low.kernel("rotate")
    low.add(number, kernel, words, [op.inputs[0]], op.outputs)


def _write_kv(low: Lowering, number: int, op: Op) -> None:
    k_name, v_name = op.inputs[:2]
    k, v = low.buffer(k_name), low.buffer(v_name)
    words: Words = (
        _input(k)
        | _output(k)
        | _other(v)
        | {
            E.SIZE: low.spec.head_dim,
            E.HEADS: low.spec.n_kv_heads,
            E.LAYER: op.attrs["layer"],
        }
    )
    reads, writes, ops = [k_name, v_name], ["kv"], [number]
    maker = low.state.makers[k_name]
    is_rotation = maker.kernel == low.kernel("rotate")
    if is_rotation and maker is low.state.records[-1]:
        rotation = low.state.records.pop()
        for word in (E.X, E.X_STRIDE, E.COS, E.SIN):
            words[word] = rotation.words[word]
        reads = [*rotation.reads, v_name]
        writes, ops = ["kv", k_name], [*rotation.ops, number]
    kernel = low.kernel(f"write_{low.kv_bytes}")
    low.add(number, kernel, words, reads, writes).ops = ops


def _attend(low: Lowering, number: int, op: Op) -> None:
    spec, q = low.spec, low.buffer(op.inputs[0])
    out = low.buffer(op.outputs[0], spec.q_size)
    slopes = low.floats(op.weights[0]) if op.weights else 0
    words: Words = {
        A.Q: q.address,
        A.Q_STRIDE: q.stride,
        A.Y: out.address,
        A.Y_STRIDE: out.stride,
        A.HEADS: spec.n_heads,
        A.KV_HEADS: spec.n_kv_heads,
        A.SIZE: spec.head_dim,
        A.LAYER: op.attrs["layer"],
        A.SCALE: float_bits(op.attrs["scale"]),
        A.CAP: float_bits(op.attrs["softcap"] or 0.0),
        A.WINDOW: op.attrs["window"] or 0,
        A.SLOPES: slopes,
    }
    name = f"attend_{low.kv_bytes}"
    kernel = low.kernel(name)
    low.state.attends[len(low.state.records)] = op.attrs["layer"]
    low.add(None, kernel, words, [op.inputs[0], "kv"], [op.outputs[0], "partials"])
    joining = low.kernel("join_pieces")
    low.add(number, joining, dict(words), ["partials"], op.outputs)


def _add(low: Lowering, number: int, op: Op) -> None:
    x, other = (low.buffer(name) for name in op.inputs)
    out = low.buffer(op.outputs[0], x.width)
    words: Words = _input(x) | _other(other) | _output(out) | {E.SIZE: x.width}
    low.add(number, low.kernel("add"), words, op.inputs, op.outputs)


def _activation(low: Lowering, number: int, op: Op) -> None:
    kind, gated = op.attrs["kind"], op.kernel == "gate"
    x = low.buffer(op.inputs[0])
    out = low.buffer(op.outputs[0], x.width)
    words: Words = _input(x) | _output(out) | {E.SIZE: x.width}
    if gated:
        words |= _other(low.buffer(op.inputs[1]))
    kernel = low.kernel(f"{op.kernel}_{kind}")
    low.add(number, kernel, words, op.inputs, op.outputs).quantizes = True


def _take_rows(low: Lowering, number: int, op: Op) -> None:
    x = low.buffer(op.inputs[0])
    out = low.buffer(op.outputs[0], x.width)
    words: Words = _input(x) | _output(out) | {E.SIZE: x.width}
    kernel = low.kernel("take_rows")
    low.add(number, kernel, words, op.inputs[:1], op.outputs, S.LOGIT_ROWS)


def _softcap(low: Lowering, number: int, op: Op) -> None:
    x = low.buffer(op.inputs[0])
    words: Words = _input(x) | {E.SIZE: x.width, E.NUMBER: float_bits(op.attrs["cap"])}
    kernel = low.kernel("softcap")
    low.add(number, kernel, words, op.inputs, op.outputs, _rows_of(op.outputs[0]))


_LOWER: dict[str, Callable[[Lowering, int, Op], None]] = {
    "embed": _embed,
    "add_positions": _add_positions,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "linear": _linear,
    "split_heads": Lowering.alias,
    "merge_heads": Lowering.alias,
    "rotate": _rotate,
    "write_kv": _write_kv,
    "attend": _attend,
    "add": _add,
    "activate": _activation,
    "gate": _activation,
    "take_rows": _take_rows,
    "softcap": _softcap,
}
