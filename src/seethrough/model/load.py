"""From a checkpoint to a model that can run: family, spec, canonical tensors, program.

Strict both ways: a missing, misshapen or unexpected tensor is an error that names it. What a family
may leave aside is left aside by name and reported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from seethrough.config import Backend, CPUPath
from seethrough.errors import CheckpointError, UnsupportedModelError
from seethrough.kernels import reference
from seethrough.model.config import ConfigReader, shown
from seethrough.model.families import GGUF_FAMILIES, HF_FAMILIES
from seethrough.model.family import Family, Rule
from seethrough.model.positions import alibi_slopes, rotary_table, sinusoid_table
from seethrough.model.program import Program, build_ops
from seethrough.model.run import Interpreted, Model
from seethrough.model.spec import TransformerSpec
from seethrough.weights.checkpoint import Checkpoint
from seethrough.weights.tensor import Tensor

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where and how a program runs.

    Attributes:
        max_model_len: positions that its tables cover.
        max_rows: most rows of one step.
        kv_bytes: bytes of a cached value, 2 or 4.
        kernel_dir: where compiled kernels are kept; None keeps none.
    """

    backend: Backend
    threads: int
    max_model_len: int
    max_rows: int
    kv_bytes: int
    cpu_path: CPUPath | None = None
    kernel_dir: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A checkpoint understood: its family, its spec, and its tensors under canonical names."""

    family: str
    spec: TransformerSpec
    tensors: dict[str, Tensor]
    left_aside: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def is_f32(self) -> bool:
        """Whether all matrices are stored as float32."""
        return all(t.dtype.name == "F32" for t in self.tensors.values() if len(t.shape) == 2)


def understand(checkpoint: Checkpoint) -> ModelWeights:
    """Read the spec and name the tensors. Touches no weight data."""
    family, config = _family_of(checkpoint)
    spec = family.read_spec(config, checkpoint.tensors)
    _check_spec(spec, config)
    named, left_aside = _name_tensors(checkpoint, family, spec)
    spec, named, notes = _settle_head(spec, named)
    _check_tensors(spec, named, config.where, _file_names(family, spec))
    return ModelWeights(family.name, spec, named, tuple(sorted(left_aside)), notes)


def build_program(
    weights: ModelWeights, max_model_len: int, progress: Progress | None = None
) -> Program:
    """The program on the `reference` backend: every weight expanded to float32."""
    spec = weights.spec
    arrays: dict[str, Any] = position_tables(spec, max_model_len)
    for done, (name, tensor) in enumerate(weights.tensors.items()):
        arrays[name] = tensor.to_f32()
        if progress is not None:
            progress(done + 1, len(weights.tensors))
    return Program(spec, build_ops(spec), arrays, reference)


def build_model(
    weights: ModelWeights,
    placement: Placement,
    progress: Progress | None = None,
    compiling: Callable[[str], None] | None = None,
) -> Model:
    """The model on the backend that `placement` names, ready to run: nothing is compiled later.

    `progress` counts weights, `compiling` is told each kernel that is not on disk.
    """
    if placement.backend == "reference":
        program = build_program(weights, placement.max_model_len, progress)
        return Interpreted(program, placement.threads)
    from seethrough.kernels.cpu.path import use

    use(placement.cpu_path)  # before anything that depends on it is imported
    from seethrough.kernels.cpu.compiled import Kernels
    from seethrough.model.compiled import CompiledProgram, pack_weights

    kernels = Kernels(placement.kernel_dir, compiling)
    packed = pack_weights(weights.tensors, kernels, placement.threads, progress)
    packed |= position_tables(weights.spec, placement.max_model_len)
    return CompiledProgram(
        weights.spec,
        packed,
        kernels,
        max_rows=placement.max_rows,
        kv_bytes=placement.kv_bytes,
        threads=placement.threads,
    )


def weight_bytes(weights: ModelWeights, backend: Backend) -> int:
    """Bytes of the weights in memory: `reference` holds float32, `cpu` what the file holds."""
    if backend == "reference":
        return 4 * sum(int(np.prod(t.shape)) for t in weights.tensors.values())
    from seethrough.kernels.cpu.forms import packed_bytes

    return sum(
        packed_bytes(t.dtype.name, t.shape) if len(t.shape) == 2 else 4 * int(np.prod(t.shape))
        for t in weights.tensors.values()
    )


def position_tables(spec: TransformerSpec, length: int) -> dict[str, Any]:
    """The constants that positions need, for positions 0 .. length − 1."""
    tables: dict[str, Any] = {}
    for index, rope in enumerate(spec.ropes):
        cos, sin = rotary_table(rope, spec.head_dim, length)
        tables |= {f"rope.{index}.cos": cos, f"rope.{index}.sin": sin}
    if spec.positions == "sinusoidal":
        rows = length + spec.position_offset
        tables["positions.weight"] = sinusoid_table(rows, spec.d_model, spec.sinusoid_pad)
    if spec.positions == "alibi":
        tables["alibi.slopes"] = alibi_slopes(spec.n_heads)
    return tables


def _family_of(checkpoint: Checkpoint) -> tuple[Family, ConfigReader]:
    if checkpoint.format == "gguf":
        name = checkpoint.metadata.get("general.architecture")
        key, families, where = "general.architecture", GGUF_FAMILIES, checkpoint.name
        values, prefix = checkpoint.metadata, f"{name}."
    else:
        name = checkpoint.config.get("model_type")
        key, families, where = "model_type", HF_FAMILIES, f"{checkpoint.name}/config.json"
        values, prefix = checkpoint.config, ""
        if checkpoint.config.get("quantization_config"):
            raise UnsupportedModelError(
                f"{where}: quantization_config is not supported; use the unquantized checkpoint "
                "or a GGUF file"
            )
    if not isinstance(name, str) or name not in families:
        known = ", ".join(sorted(families))
        raise UnsupportedModelError(
            f"{where}: {key} = {shown(name)} is not supported (known: {known})"
        )
    return families[name], ConfigReader(values, where, prefix)


def _check_spec(spec: TransformerSpec, config: ConfigReader) -> None:
    if spec.n_heads % spec.n_kv_heads:
        raise CheckpointError(
            f"{config.where}: {spec.n_heads} query heads cannot share {spec.n_kv_heads} "
            "key/value heads evenly"
        )
    if spec.ropes and spec.head_dim % 2:
        raise CheckpointError(f"{config.where}: head size {spec.head_dim} is odd, RoPE needs pairs")
    if spec.positions == "sinusoidal" and spec.d_model < 4:
        raise CheckpointError(f"{config.where}: d_model {spec.d_model} is too small for sinusoids")


def _name_tensors(
    checkpoint: Checkpoint, family: Family, spec: TransformerSpec
) -> tuple[dict[str, Tensor], list[str]]:
    """Canonical name -> tensor, and the names left aside."""
    rules = {source: rule for rule in family.rules for source, rule in _per_layer(rule, spec)}
    ignored = {name for p in family.ignored for name in _expand(p, spec)}
    named: dict[str, Tensor] = {}
    left_aside: list[str] = []
    unexpected: list[str] = []
    for name, tensor in checkpoint.tensors.items():
        source = name if name in rules or name in ignored else family.optional_prefix + name
        if source in ignored:
            left_aside.append(name)
        elif source not in rules:
            unexpected.append(name)
        else:
            _apply(rules[source], tensor, spec, named)
    for name in checkpoint.unsupported:
        kept = {name, family.optional_prefix + name} & ignored
        (left_aside if kept else unexpected).append(name)
    if unexpected:
        raise CheckpointError(_listing(checkpoint.name, "unexpected tensors", unexpected))
    return named, left_aside


def _apply(rule: Rule, tensor: Tensor, spec: TransformerSpec, named: dict[str, Tensor]) -> None:
    for target, part in zip(rule.targets, rule.op(tensor, spec), strict=True):
        if target in named:
            raise CheckpointError(f"two tensors of the file are {target}; one is {tensor.name}")
        named[target] = part.renamed(target)


def _per_layer(rule: Rule, spec: TransformerSpec) -> list[tuple[str, Rule]]:
    if "{i}" not in rule.source:
        return [(rule.source, rule)]
    return [
        (
            rule.source.replace("{i}", str(i)),
            replace(rule, targets=tuple(t.replace("{i}", str(i)) for t in rule.targets)),
        )
        for i in range(spec.n_layers)
    ]


def _expand(pattern: str, spec: TransformerSpec) -> list[str]:
    if "{i}" not in pattern:
        return [pattern]
    return [pattern.replace("{i}", str(i)) for i in range(spec.n_layers)]


def _settle_head(
    spec: TransformerSpec, named: dict[str, Tensor]
) -> tuple[TransformerSpec, dict[str, Tensor], tuple[str, ...]]:
    """A tied model may store its head as well: equal to the embedding, it is the embedding.

    Where the two differ, the config contradicts the file; transformers then uses the stored head,
    and so do we, with a note. An untied model without a head is an error (a missing tensor).
    """
    head, embedding = named.get("head.weight"), named.get("embed.weight")
    if not spec.tied_head or head is None or embedding is None:
        return spec, named, ()
    same = head.dtype is embedding.dtype and np.array_equal(head.data, embedding.data)
    if not same:
        note = "the config ties the LM head to the embedding, but a different head is stored: used"
        return replace(spec, tied_head=False), named, (note,)
    return spec, {k: v for k, v in named.items() if k != "head.weight"}, ()


def _file_names(family: Family, spec: TransformerSpec) -> dict[str, str]:
    """Canonical name -> the name that the file's own format has for it."""
    rules = [pair for rule in family.rules for pair in _per_layer(rule, spec)]
    return {target: source for source, rule in rules for target in rule.targets}


def _check_tensors(
    spec: TransformerSpec, named: Mapping[str, Tensor], where: str, file_names: Mapping[str, str]
) -> None:
    """Errors name a tensor as the file does, and as we do."""

    def both(name: str) -> str:
        source = file_names.get(name, name)
        return name if source == name else f"{source} ({name})"

    shapes = spec.tensor_shapes()
    missing = [both(name) for name in shapes if name not in named]
    if missing:
        raise CheckpointError(_listing(where, "missing tensors", missing))
    surplus = [both(name) for name in named if name not in shapes]
    if surplus:
        raise CheckpointError(_listing(where, "tensors that this config has no use for", surplus))
    for name, shape in shapes.items():
        if named[name].shape != shape:
            found = list(named[name].shape)
            raise CheckpointError(
                f"{where}: {both(name)} has shape {found}, expected {list(shape)}"
            )


def _listing(where: str, what: str, names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:8])
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{where}: {len(names)} {what}: {shown}{more}"
