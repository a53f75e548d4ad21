"""One file per family: how its config maps to a spec and its tensor names to ours; no forward."""

from __future__ import annotations

from collections.abc import Mapping

from seethrough.model.families import bloom, gemma3, gguf, gpt2, llama, mistral, qwen, xglm
from seethrough.model.family import Family

# config.json's model_type -> family
HF_FAMILIES: Mapping[str, Family] = {
    "llama": llama.LLAMA,
    "mistral": mistral.MISTRAL,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "gemma3_text": gemma3.GEMMA3,
    "gpt2": gpt2.GPT2,
    "bloom": bloom.BLOOM,
    "xglm": xglm.XGLM,
}

# general.architecture -> family. Mistral's files say `llama`.
GGUF_FAMILIES: Mapping[str, Family] = {
    "llama": gguf.LLAMA,
    "qwen2": gguf.QWEN2,
    "qwen3": gguf.QWEN3,
    "gemma3": gguf.GEMMA3,
}
