"""llama.cpp's own quantizer, run in its environment: quantize_llama.py SOURCE TYPE TARGET."""

from __future__ import annotations

import sys

from llama_cpp import llama_cpp as c

TYPES = {"q8_0": c.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_k": c.LLAMA_FTYPE_MOSTLY_Q4_K_M}


def main(source: str, kind: str, target: str) -> None:
    """Quantize a file; one that is quantized already is expanded first."""
    params = c.llama_model_quantize_default_params()
    params.ftype = TYPES[kind]
    params.allow_requantize = True
    if c.llama_model_quantize(source.encode(), target.encode(), params) != 0:
        sys.exit(f"llama.cpp could not quantize {source} to {kind}")


if __name__ == "__main__":
    main(*sys.argv[1:])
