"""Reads a model's config (config.json, or GGUF metadata) key by key; every error names the key.

`null` equals absent. Sizes are bounded, so that a hostile config cannot ask for the moon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seethrough.errors import CheckpointError, UnsupportedModelError
from seethrough.model.spec import Activation, RopeSpec

# Names that configs use for the activations that we have.
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
MAX_SIZE = 1 << 24
MAX_LAYERS = 1 << 12
MAX_POSITIONS = 1 << 31
MAX_NUMBER = 3.4e38  # what float32 holds


class ConfigReader:
    """Typed access to a config mapping. `where` names the file in errors."""

    def __init__(self, values: Mapping[str, Any], where: str, prefix: str = "") -> None:
        self.values = values
        self.where = where
        self.prefix = prefix

    def get(self, key: str) -> Any:
        """The raw value, None if absent or null."""
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None, *, most: int = MAX_SIZE) -> int:
        """A positive integer up to `most`; without a default it must be there."""
        value = self.get(key)
        if value is None:
            value = self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.malformed(key, f"{shown(value)} is not an integer")
        if not 1 <= value <= most:
            raise self.malformed(key, f"{shown(value)} is not between 1 and {most}")
        return value

    def count(self, key: str, default: int) -> int:
        """Zero or more."""
        return default if self.get(key) is None else 0 if self.get(key) == 0 else self.integer(key)

    def optional_integer(self, key: str, *, most: int = MAX_SIZE) -> int | None:
        """A positive integer, or None if absent or null."""
        return None if self.get(key) is None else self.integer(key, most=most)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number that float32 can hold."""
        value = self.get(key)
        if value is None:
            value = self._default(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.malformed(key, f"{shown(value)} is not a number")
        if not 0 < value <= MAX_NUMBER:  # an integer of 400 digits has no float to be tested by
            raise self.malformed(key, f"{shown(value)} is not a positive finite number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A positive finite number, or None if absent or null."""
        return None if self.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.malformed(key, f"{shown(value)} is not true or false")
        return value

    def activation(self, key: str, default: str) -> Activation:
        """One of the activations that we have."""
        name = self.get(key) or default
        if not isinstance(name, str) or name not in _ACTIVATIONS:
            raise self.unsupported(key, name, f"known: {', '.join(sorted(_ACTIVATIONS))}")
        return _ACTIVATIONS[name]

    def layer_types(self, key: str, n_layers: int) -> list[str] | None:
        """One of full_attention / sliding_attention per layer, or None if not given."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != n_layers:
            raise self.malformed(key, f"is not a list of {n_layers} layer types")
        for kind in value:
            if kind not in ("full_attention", "sliding_attention"):
                raise self.unsupported(key, kind, "known: full_attention, sliding_attention")
        return value

    def section(self, key: str) -> ConfigReader:
        """A nested mapping; empty if absent or null."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.malformed(key, f"{type(value).__name__} is not a mapping")
        return ConfigReader(value, f"{self.where}: {self.prefix}{key}")

    def refuse(self, key: str, *, unless: Any) -> None:
        """An option that we lack: an error if it is set to anything but `unless` or null."""
        value = self.get(key)
        if value is not None and value != unless:
            raise self.unsupported(key, value, f"only {unless!r} is")

    def malformed(self, key: str, why: str) -> CheckpointError:
        """The error for a value of the wrong type or range."""
        return CheckpointError(f"{self.where}: {self.prefix}{key}: {why}")

    def unsupported(self, key: str, value: object, hint: str) -> UnsupportedModelError:
        """The error for something that exists elsewhere but not here."""
        return UnsupportedModelError(
            f"{self.where}: {self.prefix}{key} = {shown(value)} is not supported ({hint})"
        )

    def _default(self, key: str, default: float | None) -> float:
        if default is None:
            raise CheckpointError(f"{self.where}: {self.prefix}{key} is missing")
        return default


def shown(value: object) -> str:
    """A value of a file for an error message; whatever its size, the message stays readable."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def rope_from_config(config: ConfigReader, default_theta: float = 10_000.0) -> RopeSpec:
    """The rotary embedding of a config.json, in the new or the old spelling.

    New: `rope_parameters {rope_type, rope_theta, …}`. Old: `rope_theta` beside
    `rope_scaling {type | rope_type, factor, …}`.
    """
    scaling = config.section("rope_scaling")
    new = config.section("rope_parameters")
    rope = scaling if scaling.values else new
    theta = rope.number("rope_theta", config.number("rope_theta", default_theta))
    config.refuse("partial_rotary_factor", unless=1.0)
    return rope_spec(rope, theta, config.get("max_position_embeddings"))


def rope_spec(rope: ConfigReader, theta: float, max_positions: int | None) -> RopeSpec:
    """A `RopeSpec` from one mapping of rope parameters."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    rope.refuse("partial_rotary_factor", unless=1.0)
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(kind="linear", theta=theta, factor=rope.number("factor"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.malformed("high_freq_factor", f"{high} is not above low_freq_factor {low}")
        original = rope.integer(
            "original_max_position_embeddings", max_positions, most=MAX_POSITIONS
        )
        return RopeSpec("llama3", theta, rope.number("factor"), low, high, original)
    raise rope.unsupported("rope_type", kind, "known: default, linear, llama3")
