"""GGUF: the container, its metadata, its quantized blocks. Knows no architecture and no names."""
