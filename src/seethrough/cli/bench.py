"""`seethrough bench`: the machine's limits, then this model's speed, then both as JSON."""

from __future__ import annotations

import argparse

from seethrough.cli.loading import load_llm
from seethrough.cli.messages import Speaker
from seethrough.cli.terminal import print_json
from seethrough.errors import ParameterError

_DEFAULTS = {"pp": 512, "tg": 128, "batch": 16, "depth": 16, "repeats": 3}


def run(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """Measure; the last line of standard output is one JSON object."""
    from seethrough.engine.measure import limits, measure, to_json

    asked = {name: _count(arguments, name) for name in _DEFAULTS}
    llm = load_llm(arguments, speaker)
    found = limits(llm.weights, llm.report, asked["depth"] + asked["tg"] // 2, asked["pp"])
    lines = not arguments.json
    if lines:
        print(
            speaker.text(
                "bench_limits",
                read=f"{found.read_gb_s:.1f}",
                peak=f"{found.gop_s:.0f}",
                tg=f"{found.tg_tok_s:.1f}",
                pp=f"{found.pp_tok_s:.0f}",
            ),
            flush=True,
        )
    figures = measure(llm, found, **asked)
    if lines:
        for key, count, rate, share in (
            ("bench_pp", asked["pp"], figures.pp_tok_s, figures.pp_share),
            ("bench_tg", asked["depth"], figures.tg_tok_s, figures.tg_share),
        ):
            print(speaker.text(key, count=count, rate=f"{rate:.1f}", share=f"{share:.0%}"))
        together = f"{figures.batch_tok_s:.1f}"
        print(speaker.text("bench_batch", count=asked["batch"], rate=together))
        for key, stages in (
            ("bench_tg_stages", figures.tg_stages),
            ("bench_pp_stages", figures.pp_stages),
        ):
            shares = ", ".join(f"{stage} {share}%" for stage, share in stages.items())
            print(speaker.text(key, shares=shares))
    print_json(to_json(llm.report, found, figures, **asked))
    return 0


def _count(arguments: argparse.Namespace, name: str) -> int:
    value = getattr(arguments, name)
    value = _DEFAULTS[name] if value is None else value
    if value < 1:
        raise ParameterError(f"--{name}", value, "1 or more is expected")
    return int(value)
