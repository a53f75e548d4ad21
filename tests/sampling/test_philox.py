"""Philox4x32-10 against the known answers that are published with Random123."""

from __future__ import annotations

import numpy as np
import pytest

from seethrough.sampling.philox import philox4x32, uniform

# tests/kat_vectors of DEShawResearch/random123: counter, key, result.
KNOWN = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter: str, key: str, result: str) -> None:
    assert philox4x32(words(counter), words(key)) == words(result)  # type: ignore[arg-type]


def test_uniform_layout() -> None:
    # Seed 0, first token of the first sample: counter and key of the first vector.
    assert uniform(0, 0, 0) == ((0xE169C58D << 32 | 0x6627E8D5) >> 11) / 2**53
    # Low word of the seed first; the counter is (output index, sample index, 0, 0).
    low, high, _, _ = philox4x32((5, 9, 0, 0), (0x299F31D0, 0xA4093822))
    assert uniform(0xA4093822299F31D0, 5, 9) == ((high << 32 | low) >> 11) / 2**53


def test_every_coordinate_matters() -> None:
    seeds = (0, 1, 2**32, 2**63, 2**64 - 1)
    draws = {uniform(s, o, k) for s in seeds for o in range(20) for k in range(5)}
    assert len(draws) == len(seeds) * 100


def test_uniform_is_uniform_along_both_indices() -> None:
    for draws in (
        [uniform(42, i, 0) for i in range(20_000)],
        [uniform(42, 0, i) for i in range(20_000)],
    ):
        assert min(draws) >= 0
        assert max(draws) < 1
        counts = np.bincount((np.array(draws) * 100).astype(int), minlength=100)
        chi_square = ((counts - 200.0) ** 2 / 200).sum()
        assert 50 < chi_square < 160  # 99 degrees of freedom: p about 1e-4 on either side
        assert all(x * 2**53 == int(x * 2**53) for x in draws[:100])


@pytest.mark.parametrize("bad", [(-1, 0, 0), (2**64, 0, 0), (0, 2**32, 0), (0, 0, -1)])
def test_out_of_range(bad: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        uniform(*bad)
