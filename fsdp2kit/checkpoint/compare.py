"""Do a checkpoint and a Hugging Face directory hold the same model? Both are loaded, and their logits compared."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.checkpoint.loading import load_weights
from fsdp2kit.errors import RunFailure

_TOKENS = 32


def compare_logits(checkpoint: Path, hf_dir: Path) -> str:
    """Load the directory with `from_pretrained`, the checkpoint into a model of its own, and compare their logits.

    Both are whole in memory, in the directory's dtype.

    Returns:
        One line that says that they agree.

    Raises:
        RunFailure: they do not.
    """
    config = AutoConfig.from_pretrained(hf_dir, local_files_only=True)
    ids = torch.arange(_TOKENS)[None] * 7 % config.get_text_config().vocab_size
    theirs = AutoModelForCausalLM.from_pretrained(hf_dir, dtype="auto", local_files_only=True).eval()
    ours = AutoModelForCausalLM.from_config(config, dtype=theirs.dtype).eval()
    load_weights(checkpoint, ours)
    with torch.no_grad():
        logits = [model(input_ids=ids, use_cache=False).logits.float() for model in (ours, theirs)]
    if not torch.equal(logits[0], logits[1]):
        difference = (logits[0] - logits[1]).abs().max().item()
        raise RunFailure(f"{hf_dir}: its logits differ from those of {checkpoint} by up to {difference}")
    return f"{hf_dir}: gives the same logits as {checkpoint}, on {_TOKENS} tokens, bit for bit"
