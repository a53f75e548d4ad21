"""`seethrough tokenize`: pieces, ids and bytes of a text, and whether it comes back the same.

Loads the tokenizer alone; no weight is read.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from seethrough.cli.loading import read_prompt
from seethrough.cli.messages import Speaker
from seethrough.cli.probability import quoted
from seethrough.cli.table import print_table
from seethrough.cli.terminal import print_json
from seethrough.weights.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from seethrough.text.tokenizer import Tokenizer


def run(arguments: argparse.Namespace, speaker: Speaker) -> int:
    """Print the table, or one JSON object."""
    from seethrough.engine.load import load_tokenizer
    from seethrough.weights.files import resolve_model

    text = read_prompt(arguments, speaker)
    files = resolve_model(arguments.model or DEFAULT_MODEL, arguments.cache_dir)
    tokenizer = load_tokenizer(files)
    if arguments.chat or arguments.system is not None:
        text, ids = _chat(tokenizer, text, arguments.system)
    else:
        ids = tokenizer.encode(text, add_special_tokens=arguments.special is not False)
    back = _round_trip(tokenizer, text, ids)
    if arguments.json:
        _print_json(tokenizer, text, ids, back)
        return 0
    if arguments.chat or arguments.system is not None:
        print(text)
    rows = [
        [str(place), str(token_id), piece, raw.hex(" "), quoted(raw.decode("utf-8", "replace"))]
        for place, (token_id, piece, raw) in enumerate(_tokens(tokenizer, ids))
    ]
    print_table(speaker.text("columns_tokenize").split("|"), rows)
    key = "round_trip_ok" if back == text else "round_trip_bad"
    print(speaker.text(key, count=len(ids), text=quoted(back)))
    return 0


def _chat(tokenizer: Tokenizer, text: str, system: str | None) -> tuple[str, list[int]]:
    """The rendered conversation and its ids."""
    from seethrough.text.chat import encode_chat
    from seethrough.text.chat_template import render_chat

    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    rendered = render_chat(
        tokenizer.chat_template,
        messages,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
    )
    return rendered, encode_chat(tokenizer, tokenizer.chat_template, messages)


def _tokens(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[int, str, bytes]]:
    pieces = tokenizer.pieces(ids)
    raw = [tokenizer.token_bytes(token_id) for token_id in ids]
    return list(zip(ids, pieces, raw, strict=True))


def _round_trip(tokenizer: Tokenizer, text: str, ids: list[int]) -> str:
    """The ids as text again, without the BOS token that encoding put first."""
    added = ids[:1] == [tokenizer.bos_token_id] and not text.startswith(tokenizer.bos_token or "\0")
    return tokenizer.decode(ids[1:] if added else ids, skip_special_tokens=False)


def _print_json(tokenizer: Tokenizer, text: str, ids: list[int], back: str) -> None:
    body = {
        "text": text,
        "count": len(ids),
        "token_ids": ids,
        "pieces": tokenizer.pieces(ids),
        "bytes": [tokenizer.token_bytes(token_id).hex() for token_id in ids],
        "round_trip": back,
        "round_trip_ok": back == text,
    }
    print_json(body)
