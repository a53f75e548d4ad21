"""What a request forbids, prepared once as ids: allowed ids, bad words, ends held back.

Knows how a word is spelled in tokens only through the `encode` function that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from seethrough.errors import ParameterError
from seethrough.sampling.params import EffectiveParams

Ids = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class History:
    """The ids so far: the prompt, and the output of this sample. Arrays spare a conversion."""

    prompt_ids: Sequence[int] | NDArray[np.integer]
    output_ids: Sequence[int] | NDArray[np.integer]

    def tail(self, length: int) -> list[int]:
        """The last `length` ids of prompt and output together (fewer if there are fewer)."""
        output = [int(i) for i in self.output_ids[max(0, len(self.output_ids) - length) :]]
        missing = length - len(output)
        prompt = self.prompt_ids[max(0, len(self.prompt_ids) - missing) :] if missing else ()
        return [int(i) for i in prompt] + output


@dataclass(frozen=True, slots=True)
class Bans:
    """A request's bans as ids; it never changes while the request runs."""

    allowed: Ids | None  # nothing else can be chosen; None: no such list
    ends: Ids  # what would end the request, forbidden before min_tokens
    single: Ids  # bad words of one id: forbidden always
    # Longer bad words by the id before the last: (ids before the last, last). Only those that end
    # with the newest id are looked at.
    longer: dict[int, tuple[tuple[tuple[int, ...], int], ...]]

    def bad_ids(self, history: History) -> Ids:
        """Ids that would complete a bad word now: the last piece, after the others in order.

        The others may lie in the prompt, in the output, or across their border.
        """
        newest = history.tail(1)
        ends_here = self.longer.get(newest[0], ()) if newest else ()
        if not ends_here:
            return self.single
        tail = tuple(history.tail(max(len(before) for before, _ in ends_here)))
        last = [piece for before, piece in ends_here if tail[-len(before) :] == before]
        return np.concatenate([self.single, np.array(last, dtype=np.intp)])


def prepare_bans(
    params: EffectiveParams,
    end_token_ids: Iterable[int],
    vocab_size: int,
    encode: Callable[[str], list[int]],
) -> Bans:
    """Turn a request's bans into ids, once, before its first token.

    Args:
        end_token_ids: the model's end tokens. Those that the logits row does not have are left
            out. With `ignore_eos` they end nothing, so min_tokens does not hold them back.
        vocab_size: the width of the logits row.
        encode: text to ids, without adding special tokens.

    Raises:
        ParameterError: an id outside of the row, or a bad word that cannot be spelled.
    """
    ends = set(params.stop_token_ids)
    if not params.ignore_eos:
        ends.update(i for i in end_token_ids if 0 <= i < vocab_size)
    words = bad_words_to_ids(params.bad_words, encode) if params.bad_words else ()
    sequences = dict.fromkeys((*params.bad_words_ids, *words))
    outside = [i for ids in (*sequences, params.stop_token_ids) for i in ids if i >= vocab_size]
    if outside:
        why = f"a ban names this id, but this model's token ids are 0 to {vocab_size - 1}"
        raise ParameterError("token id", outside[0], why)
    longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for *before, last in sequences:
        if before:
            longer.setdefault(before[-1], []).append((tuple(before), last))
    allowed = params.allowed_token_ids
    return Bans(
        allowed=None if allowed is None else np.array(allowed, dtype=np.intp),
        ends=np.array(sorted(ends), dtype=np.intp),
        single=np.array([ids[0] for ids in sequences if len(ids) == 1], dtype=np.intp),
        longer={key: tuple(items) for key, items in longer.items()},
    )


def bad_words_to_ids(
    words: Iterable[str], encode: Callable[[str], list[int]]
) -> tuple[tuple[int, ...], ...]:
    """Spell each word as it stands and with a leading space, since tokens differ between the two.

    "exaggerated" can be three tokens and " exaggerated" one (vllm-project/vllm#23886). A word given
    with leading spaces is also spelled without them. Equal spellings are kept once.

    Raises:
        ParameterError: a word has no tokens. Its spelling with a space is then not used either: it
            would be the space alone.
    """
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        if not encode(word) or (bare and not encode(bare)):
            why = "the tokenizer gives no token for it, so it cannot be banned; leave it out"
            raise ParameterError("bad_words", word, why)
        forms = (word, bare) if bare != word else (word, " " + word)
        for form in forms:
            if form:
                spellings[tuple(encode(form))] = None
    return tuple(spellings)
