"""Seeing inside: a tracer that collects stage values, the trace that shows them, and its file."""
