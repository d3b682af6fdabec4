"""Benchmarks: what `tools/bench.py` measures, as functions that return plain, JSON-ready dictionaries.

Each result holds its own provenance (command, versions, device), so that a figure never travels without it.
"""
