"""Trains the tokenizers that the text tests share."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors, trainers
from tokenizers import pre_tokenizers as pre

from seethrough.text.tokenizer import Tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog. don't you think so? yes, it's fine!",
    "in the house there is one hello and another hello, world. One. Two. Three.",
    "Größe Ivić naïve café 你好 世界 ď 👋🏽 👨‍👩‍👧 \n\t tabs and  double  spaces   here",
    "<think> user assistant system end start im tool call code def return 12345 67890",
] * 4

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' "
    "+ message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL = ["<|im_start|>", "<|im_end|>"]
PLAIN_MARKERS = ["<tool_call>", "</think>"]


@dataclass(frozen=True)
class Mini:
    kind: str
    ours: Tokenizer
    oracle: tokenizers.Tokenizer


def save_and_load(
    backend: tokenizers.Tokenizer, folder: Path | None = None, **config: object
) -> Tokenizer:
    """What `from_dir` makes of `backend`, saved as a model folder with this tokenizer_config."""
    folder = folder or Path(tempfile.mkdtemp())
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_dir(folder)


def _mini(kind: str, backend: tokenizers.Tokenizer, **config: object) -> Mini:
    oracle = tokenizers.Tokenizer.from_str(backend.to_str())
    return Mini(kind, save_and_load(backend, **config), oracle)


def add_markers(backend: tokenizers.Tokenizer) -> None:
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    backend.add_tokens([AddedToken(t, normalized=False) for t in PLAIN_MARKERS])


def byte_bpe() -> Mini:
    """Byte-level BPE without BOS."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    add_markers(backend)
    return _mini("byte_bpe", backend, eos_token="<|im_end|>")


def _sentencepiece_like(kind: str) -> Mini:
    """BPE over ▁ with byte fallback, and BOS; the prefix by normalizer or by Metaspace."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.train_from_iterator(
        [text for text in CORPUS if text.isascii()],
        trainers.BpeTrainer(vocab_size=300, show_progress=False),
    )
    trained = json.loads(raw.to_str())["model"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab.update({f"<0x{byte:02X}>": 3 + byte for byte in range(256)})
    for piece in trained["vocab"]:
        vocab.setdefault(piece, len(vocab))
    merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in trained["merges"]]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if kind == "sp_legacy":
        backend.normalizer = raw.normalizer
    else:
        backend.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    add_markers(backend)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return _mini(kind, backend, bos_token="<s>", eos_token={"content": "</s>"})


def wordpiece() -> Mini:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300,
        special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return _mini("wordpiece", backend, bos_token="[CLS]", pad_token="[PAD]")


def unigram() -> Mini:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=150,
        special_tokens=["<unk>", "<s>", "</s>"],
        unk_token="<unk>",
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    add_markers(backend)
    return _mini("unigram", backend, bos_token="<s>", eos_token="</s>")


MAKERS: dict[str, Callable[[], Mini]] = {
    "byte_bpe": byte_bpe,
    "sp_legacy": lambda: _sentencepiece_like("sp_legacy"),
    "sp_first": lambda: _sentencepiece_like("sp_first"),
    "wordpiece": wordpiece,
    "unigram": unigram,
}
KINDS = list(MAKERS)
