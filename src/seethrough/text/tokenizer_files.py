"""Knows the tokenizer files of a Hugging Face model folder; knows no GGUF."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers

from ..errors import TokenizerError
from .sources import TokenizerSources


def read_dir(path: Path) -> tuple[tokenizers.Tokenizer, TokenizerSources]:
    """The backend and the other facts from tokenizer.json and the files beside it.

    Raises:
        TokenizerError: a file is missing or broken; the message names it.
    """
    backend = _read_backend(path)
    special = _read_json(path / "special_tokens_map.json")
    config = _read_json(path / "tokenizer_config.json")
    _add_config_tokens(backend, config, path / "tokenizer_config.json")
    templates = _chat_templates(path, config)
    default = templates.get("default")
    if default is None and len(templates) == 1:
        default = next(iter(templates.values()))
    return backend, TokenizerSources(
        bos_token=_token(config, special, "bos_token"),
        eos_token=_token(config, special, "eos_token"),
        pad_token=_token(config, special, "pad_token"),
        chat_template=default,
        chat_templates=templates,
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        seen = sorted(p.name for p in path.glob("*token*")) if path.is_dir() else "no such folder"
        raise TokenizerError(
            f"{file} is missing (found: {seen}). A model folder needs tokenizer.json; "
            "transformers' AutoTokenizer(...).save_pretrained(...) writes one."
        )
    try:
        return tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file} is not UTF-8: {error}") from error
    except Exception as error:
        raise TokenizerError(f"{file} cannot be read as a tokenizer: {error}") from error


def _read_json(file: Path) -> dict[str, object]:
    """The object in `file`, or {} where there is no such file."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} must hold an object, not {type(content).__name__}")
    return content


def _token(config: Mapping[str, object], special: Mapping[str, object], key: str) -> str | None:
    """A token's spelling: the config wins; either may write it plainly or as an object."""
    for source in (config, special):
        value = source.get(key)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            return value
        if value is not None:
            raise TokenizerError(f"{key} must be a string or an object with one, found {value!r}")
    return None


def _add_config_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, object], file: Path
) -> None:
    """Add tokens that only tokenizer_config.json lists, as transformers does, at their own ids."""
    listed = config.get("added_tokens_decoder")
    if listed is None:
        return
    if not isinstance(listed, Mapping):
        raise TokenizerError(f"{file}: added_tokens_decoder must be an object")
    known = backend.get_added_tokens_decoder()
    for key, entry in sorted(listed.items(), key=lambda item: (len(item[0]), item[0])):
        if not key.isdecimal() or not isinstance(entry, Mapping) or "content" not in entry:
            raise TokenizerError(f"{file}: added_tokens_decoder has a broken entry {key!r}")
        if int(key) in known:
            continue
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = tokenizers.AddedToken(
            str(entry["content"]), **{flag: bool(entry.get(flag, False)) for flag in flags}
        )
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != int(key):
            raise TokenizerError(
                f"{file} gives token {token.content!r} the id {key}, but tokenizer.json "
                f"gives it {backend.token_to_id(token.content)}. The two files do not match."
            )


def _chat_templates(path: Path, config: Mapping[str, object]) -> dict[str, str]:
    """Every chat template by name; a file of its own wins over tokenizer_config.json."""
    templates: dict[str, str] = {}
    value = config.get("chat_template")
    if isinstance(value, str):
        templates["default"] = value
    elif isinstance(value, list):
        for entry in value:
            if not isinstance(entry, Mapping) or not isinstance(entry.get("template"), str):
                raise TokenizerError(f"chat_template in {path} has an entry without a template")
            templates[str(entry.get("name", "default"))] = entry["template"]
    elif value is not None:
        raise TokenizerError(f"chat_template in {path} must be a string or a list of templates")
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    own = path / "chat_template.jinja"
    if own.is_file():
        templates["default"] = own.read_text(encoding="utf-8")
    return templates
