"""Unpacks a GGUF file of the llama architecture into a folder that transformers and vLLM read.

The weights are dequantized and rounded to bfloat16: such an engine computes the same model, but it
reads 16 bits a weight. The tokenizer is the one that seethrough builds from the file's metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file

from seethrough.text.gguf_tokenizer import build
from seethrough.weights.checkpoint import open_checkpoint
from seethrough.weights.files import resolve_model

_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def unpacked(file: Path, cache: Path) -> Path:
    """The folder of this file, written if it is not there yet."""
    status = file.stat()
    key = f"{file.resolve()}\0{status.st_size}\0{status.st_mtime_ns}"
    place = cache / f"{file.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if not place.exists():
        # Written beside and renamed: an interrupted run leaves nothing that looks complete.
        unfinished = cache / f"{place.name}.{os.getpid()}"
        unfinished.mkdir(parents=True)
        unpack(file, unfinished)
        unfinished.rename(place)
    return place


def unpack(file: Path, place: Path) -> None:
    """Write config.json, model.safetensors and the tokenizer's files."""
    config = _config(GGUFReader(file))
    tensors = dict(_tensors(GGUFReader(file), config))
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(config, indent=1))
    backend, _ = build(open_checkpoint(resolve_model(str(file))).metadata)
    backend.save(str(place / "tokenizer.json"))
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(kind))


def _config(reader: GGUFReader) -> dict[str, Any]:
    def get(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    architecture = get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"only the llama architecture is unpacked, not {architecture!r}")
    if reader.get_field("llama.rope.scaling.type") or "rope_freqs.weight" in _names(reader):
        raise ValueError("scaled rotary positions are not unpacked")
    heads, width = get("llama.attention.head_count"), get("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": int(
            next(t for t in reader.tensors if t.name == "token_embd.weight").shape[1]
        ),
        "hidden_size": width,
        "intermediate_size": get("llama.feed_forward_length"),
        "num_hidden_layers": get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("llama.attention.head_count_kv", heads),
        "head_dim": get("llama.attention.key_length", width // heads),
        "max_position_embeddings": get("llama.context_length"),
        "rms_norm_eps": get("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": get("llama.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in _names(reader),
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": get("tokenizer.ggml.eos_token_id"),
    }


def _names(reader: GGUFReader) -> set[str]:
    return {tensor.name for tensor in reader.tensors}


def _tensors(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        name = _TOP_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{_NAMES[part]}.weight"
            if part in ("attn_q", "attn_k"):
                which = "num_attention_heads" if part == "attn_q" else "num_key_value_heads"
                values = halves_from_pairs(values, config[which])
        yield name, torch.from_numpy(values).to(torch.bfloat16).contiguous()


def halves_from_pairs(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order, where the two values that are rotated together are neighbours."""
    head_dim = len(rows) // heads
    return rows.reshape(heads, head_dim // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)
