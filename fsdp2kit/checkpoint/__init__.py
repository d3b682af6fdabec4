"""Kept: training state to distributed checkpoints and back, and on to Hugging Face directories.

Empty on purpose: ``python -m fsdp2kit.checkpoint verify`` must not wait for torch to be imported.
"""
