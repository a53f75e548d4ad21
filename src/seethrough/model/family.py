"""What a family is: two mappings, from its config to a spec and from its tensor names to ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from seethrough.model.config import ConfigReader
from seethrough.model.spec import TransformerSpec
from seethrough.model.tensor_ops import TensorOp, keep
from seethrough.weights.tensor import Tensor

SpecReader = Callable[[ConfigReader, Mapping[str, Tensor]], TransformerSpec]


@dataclass(frozen=True, slots=True)
class Rule:
    """One tensor of the file, and the canonical tensor or tensors that it becomes.

    `{i}` in both names stands for the layer.
    """

    source: str
    targets: tuple[str, ...]
    op: TensorOp = keep


@dataclass(frozen=True, slots=True)
class Family:
    """A family as found in one file format."""

    name: str
    read_spec: SpecReader
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    """Tensors that may be in the file and carry nothing: they are left aside, by name."""
    optional_prefix: str = ""
    """Taken off the names of tensors that have it: some files were saved without."""


def rename(source: str, target: str, op: TensorOp = keep) -> Rule:
    """A rule with one target."""
    return Rule(source, (target,), op)


def linears(source: str, target: str, op: TensorOp = keep) -> tuple[Rule, ...]:
    """Rules for weight and bias of a linear layer or a norm; the spec says which of them exist."""
    names = ("weight", "bias")
    return tuple(rename(f"{source}.{name}", f"{target}.{name}", op) for name in names)
