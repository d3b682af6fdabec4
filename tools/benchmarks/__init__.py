"""Benchmarks: what `tools/bench.py` measures, as functions that return plain, JSON-ready dictionaries."""
