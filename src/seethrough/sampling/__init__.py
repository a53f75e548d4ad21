"""Logits to one token id (S10, S11, S12): parameters, adjust, truncate, choose."""

from __future__ import annotations

from seethrough.sampling.bans import Bans, History, prepare_bans
from seethrough.sampling.logprobs import Logprob, prompt_logprobs
from seethrough.sampling.params import EffectiveParams, SamplingParams, check_vocab, resolve
from seethrough.sampling.record import Candidate, SamplingRecord, StepRecord
from seethrough.sampling.sampler import Sampled, sample

__all__ = [
    "Bans",
    "Candidate",
    "EffectiveParams",
    "History",
    "Logprob",
    "Sampled",
    "SamplingParams",
    "SamplingRecord",
    "StepRecord",
    "check_vocab",
    "prepare_bans",
    "prompt_logprobs",
    "resolve",
    "sample",
]
