"""The model that is compared: the TOML's own, or a small one like it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.twin import shrink_config


def likeness_length(world_size: int) -> int:
    """Tokens in a row of the small likeness: a number that every mesh and method can cut."""
    shards = 2 * world_size
    return math.ceil(48 / shards) * shards


def write_model(
    hf_config: PretrainedConfig, config: TrainingConfig, folder: Path, *, full: bool, world_size: int
) -> None:
    """Write the model that is compared: the TOML's own, or a small likeness with random weights.

    Raises:
        UserError: no small likeness can be built.
    """
    if full and config.model.weights == "pretrained":
        path = str(config.model.path)
        model: Any = AutoModelForCausalLM.from_pretrained(path, config=hf_config, dtype=torch.float32)
    elif full:
        model = _random_model(hf_config)
    else:
        model = _likeness(hf_config, seq_len=config.data.seq_len, length=likeness_length(world_size))
    model.save_pretrained(folder)


def _likeness(hf_config: PretrainedConfig, *, seq_len: int, length: int) -> Any:
    """Narrow and shallow; where the architecture's widths depend on one another in ways of its own, shallow only."""
    problem: Exception | None = None
    for narrow in (True, False):
        try:
            small = shrink_config(hf_config, keep_heads=True, narrow=narrow)
            _keep_sides(small, hf_config, seq_len=seq_len, length=length)
            model = _random_model(small)
            with torch.no_grad():
                model(input_ids=torch.zeros((1, 4), dtype=torch.int64), use_cache=False)
            return model
        except Exception as error:  # whatever an architecture raises for sizes that do not suit it
            problem = error
    todo = "compare the model itself with --full"
    raise UserError("parity", f"no small likeness of the model can be built: {problem}", todo) from None


def _random_model(config: PretrainedConfig) -> Any:
    if hasattr(config, "initializer_range"):
        config.initializer_range = 0.1  # attention is all but uniform at 0.02, and would hide a wrong mask
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _keep_sides(small: PretrainedConfig, config: PretrainedConfig, *, seq_len: int, length: int) -> None:
    """Rows that are beyond a limit of positions stay beyond it, so that what happens there happens here."""
    text, original = small.get_text_config(), config.get_text_config()
    for name in ("max_position_embeddings", "original_max_position_embeddings"):
        if seq_len > (getattr(original, name, None) or seq_len):
            setattr(text, name, length // 2)
        if seq_len > ((getattr(original, "rope_parameters", None) or {}).get(name) or seq_len):
            text.rope_parameters[name] = length // 2
