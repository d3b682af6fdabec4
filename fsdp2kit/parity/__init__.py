"""The parity gate: does a TOML train on a mesh as plain transformers does in one process?"""
