"""Benchmarks: what `fsdp2kit bench` measures, as functions that return plain, JSON-ready dictionaries."""
