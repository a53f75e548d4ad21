"""Prompt to ids and ids to text (S1, S2, S12): tokenizer, chat template, stop strings."""
