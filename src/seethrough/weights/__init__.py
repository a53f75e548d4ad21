"""File to named tensors: finding a model, safetensors, GGUF. Knows nothing of any architecture."""
