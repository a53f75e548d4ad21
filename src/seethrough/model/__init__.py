"""From a config to a spec, from a spec to a program, from a batch to logits (S4 to S9)."""
