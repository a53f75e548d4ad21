"""From a prompt to its requests (S0): ids, a value for every parameter, and the checks.

Touches neither the engine nor its blocks, so several threads may prepare requests while it runs.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count
from time import perf_counter

from seethrough.engine.jobs import Job
from seethrough.engine.load import Loaded
from seethrough.engine.prompts import Encoded
from seethrough.engine.request import Request, Times
from seethrough.engine.text_output import TextOutput
from seethrough.errors import ContextLengthError, ParameterError
from seethrough.kv.pool import BlockTable
from seethrough.kv.prefix import KeyChain
from seethrough.sampling.bans import prepare_bans
from seethrough.sampling.params import EffectiveParams, SamplingParams, check_vocab, resolve

Encoder = Callable[[], Encoded]
_LONGEST_SALT = 1024


class Intake:
    """Makes jobs for one loaded model. `defaults` come between a request's own and the model's."""

    def __init__(self, loaded: Loaded, defaults: SamplingParams | None) -> None:
        self._loaded = loaded
        self._defaults = defaults
        self._vocab_size = loaded.weights.spec.vocab_size
        self._series = secrets.token_hex(3)  # requests of several processes may be kept together
        self._count = count(1)

    def effective(self, params: SamplingParams | None = None) -> EffectiveParams:
        """What a request with these parameters would run with, and who set each of them."""
        return resolve(
            params or SamplingParams(),
            self._defaults,
            self._loaded.generation_config,
            lambda: secrets.randbits(64),
        )

    def prepare(self, encode: Encoder, asked: SamplingParams, cache_salt: str | None = None) -> Job:
        """Encode a prompt and make the requests of its samples.

        Raises:
            ParameterError, ContextLengthError, TemplateError, TextError: the request cannot run.
        """
        arrival = perf_counter()
        text, ids = encode()
        return self.job(text, ids, self.effective(asked), arrival, cache_salt=cache_salt)

    def job(
        self,
        text: str | None,
        ids: list[int],
        params: EffectiveParams,
        arrival: float,
        *,
        cache_salt: str | None = None,
        alone: bool = False,
        samples: Iterable[int] | None = None,
        forced: Mapping[int, int] | None = None,
    ) -> Job:
        """Requests of a prompt whose ids and parameters are known.

        Args:
            cache_salt: only prompts with the same salt share what is cached.
            alone: compute everything, whatever the prefix cache holds, and leave nothing there.
            samples: which sample indices to make; all `n` where it is None.
            forced: ids by output index that are taken whatever would be chosen.
        """
        loaded = self._loaded
        check_vocab(params, self._vocab_size)
        _check_salt(cache_salt)
        spell = partial(loaded.tokenizer.encode, add_special_tokens=False)
        bans = prepare_bans(params, loaded.end_ids, self._vocab_size, spell)
        max_tokens = self._max_tokens(len(ids), params)
        self._check_forced(forced or {}, max_tokens)
        pool = loaded.engine.pool
        chain = None
        if loaded.config.enable_prefix_caching and not alone:
            chain = KeyChain(cache_salt, pool.block_size)
            chain.extend(ids)
        job = Job(f"req-{self._series}-{next(self._count)}", text, served=not alone)
        for index in range(params.n) if samples is None else samples:
            request = Request(
                request_id=job.request_id,
                prompt_ids=ids,
                params=params,
                bans=bans,
                end_ids=loaded.end_ids,
                max_tokens=max_tokens,
                table=BlockTable(pool),
                # The answer continues the prompt: a space that opens it is a real one.
                text=TextOutput(loaded.tokenizer, params, at_start=False),
                times=Times(arrival),
                sample_index=index,
                chain=None if chain is None else chain.copy(),
                forced=dict(forced or {}),
            )
            job.requests.append(request)
        return job

    def _check_forced(self, forced: Mapping[int, int], max_tokens: int) -> None:
        for index, token_id in forced.items():
            if not 0 <= index < max_tokens:
                why = f"max_tokens is {max_tokens}: the output tokens are 0 to {max_tokens - 1}"
                raise ParameterError("forced", index, why)
            if not 0 <= token_id < self._vocab_size:
                why = f"this model's token ids are 0 to {self._vocab_size - 1}"
                raise ParameterError("forced", token_id, why)

    def _max_tokens(self, prompt_tokens: int, params: EffectiveParams) -> int:
        """The output limit; unset fills the context."""
        longest = self._loaded.report.max_model_len
        room = longest - prompt_tokens
        wanted = params.max_tokens if params.max_tokens is not None else max(room, 1)
        if wanted > room:
            raise ContextLengthError(prompt_tokens, wanted, longest)
        if params.min_tokens > wanted:
            raise ParameterError("min_tokens", params.min_tokens, f"only {wanted} tokens fit")
        return wanted


def _check_salt(salt: str | None) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not 1 <= len(salt) <= _LONGEST_SALT:
        why = f"a text of 1 to {_LONGEST_SALT} characters is expected"
        raise ParameterError("cache_salt", salt, why)
