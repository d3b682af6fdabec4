"""What is compared: meshes and options, in pairs, on the TOML's model or a scaled-down copy of it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import load_plain_text
from fsdp2kit.model.inspect import shrink_config, value_of
from fsdp2kit.parity.reference import Rows

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
METHODS = ("ulysses", "ring", "allgather")


@dataclass(frozen=True)
class Variant:
    """One way to train the same: a mesh, and options that must not change the numbers."""

    dp: int
    cp: int
    method: str
    """Method of context parallelism; "none" where cp is 1."""
    micro_batch_size: int
    strategy: str
    checkpointing: str
    dtype: str = "float32"

    def config(self, base: TrainingConfig, *, model: Path, batches: Sequence[Rows]) -> TrainingConfig:
        """``base`` with this variant's options, to train the model at ``model`` one step on each of ``batches``."""
        kept = {"recipe", "run", "fsdp", "activation_checkpointing", "compile", "preflight"}
        values: dict[str, Any] = base.model_dump(mode="json", include=kept)
        values["fsdp"] |= {"strategy": self.strategy, "param_dtype": self.dtype}
        values["activation_checkpointing"]["mode"] = self.checkpointing
        rows, seq_len = batches[0].input_ids.shape
        values |= {
            "model": {**base.model.model_dump(include={"attention", "trust_remote_code"}), "path": str(model)},
            "mesh": {"cp": self.cp, "dp_replicate": 2 if self.strategy.startswith("hybrid") else "auto"},
            "context_parallel": {"method": "auto" if self.cp == 1 else self.method},
            "data": {"seq_len": seq_len, "pack": base.data.pack},
            "train": {
                "steps": len(batches),
                "global_batch_size": rows,
                "micro_batch_size": self.micro_batch_size,
                "max_grad_norm": 0.5,
            },
            "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
            "lr_schedule": {"warmup_steps": 1},
        }
        return TrainingConfig.model_validate(values)


def variants(base: TrainingConfig, *, world_size: int) -> list[Variant]:
    """Pairwise in float32, then every layout once in the TOML's own dtype."""
    layouts = [
        (world_size // cp, cp, method)
        for cp in range(1, world_size + 1)
        if world_size % cp == 0
        for method in (METHODS if cp > 1 else ("none",))
    ]
    rows = pairs_of(layouts, (1, 2), STRATEGIES, ("none", "full"), valid=lambda row: _fits(row[2], dp=row[0][0]))
    found = [Variant(dp, cp, method, micro, strategy, mode) for (dp, cp, method), micro, strategy, mode in rows]
    own = base.fsdp.strategy
    if base.fsdp.param_dtype != "float32":
        mode = base.activation_checkpointing.mode
        for dp, cp, method in layouts:
            strategy = own if _fits(own, dp=dp) else "full_shard"
            found.append(Variant(dp, cp, method, 1, strategy, mode, base.fsdp.param_dtype))
    return found


def _fits(strategy: str, *, dp: int) -> bool:
    return not strategy.startswith("hybrid") or dp % 2 == 0


def pairs_of(
    *options: Sequence[Any], valid: Callable[[tuple[Any, ...]], bool] = lambda row: True
) -> Iterator[tuple[Any, ...]]:
    """Valid rows in which every value of an option meets every value of each other option that it can (greedy)."""

    def pairs(row: tuple[object, ...]) -> set[tuple[int, object, int, object]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    rows = [row for row in itertools.product(*options) if valid(row)]
    missing = set().union(*(pairs(row) for row in rows))
    while missing:
        best = max(rows, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        yield best


def scaled_down_length(world_size: int) -> int:
    """Tokens in a row of a scaled-down comparison: a number that every mesh and method can slice."""
    slices = 2 * world_size
    return math.ceil(48 / slices) * slices


def write_model(hf_config: PretrainedConfig, config: TrainingConfig, folder: Path, *, full: bool, length: int) -> None:
    """Write the model that is compared: the TOML's own, or a scaled-down copy with random weights.

    Args:
        length: tokens in a row.
    """
    if full and config.model.weights == "pretrained":
        path = str(config.model.path)
        model: Any = load_plain_text(path, hf_config)
    elif full:
        model = _random_model(hf_config)
    else:
        model = _scaled_down(hf_config, seq_len=config.data.seq_len, length=length)
    model.save_pretrained(folder)


def _scaled_down(hf_config: PretrainedConfig, *, seq_len: int, length: int) -> Any:
    """A narrow and shallow copy; where an architecture's widths depend on one another, it is only shallow."""
    problem: Exception | None = None
    for narrow in (True, False):
        try:
            small = shrink_config(hf_config, keep_heads=True, narrow=narrow)
            _keep_position_limits(small, hf_config, seq_len=seq_len, length=length)
            model = _random_model(small)
            with torch.no_grad():
                model(input_ids=torch.zeros((1, 4), dtype=torch.int64), use_cache=False)
            return model
        except Exception as error:  # an architecture may raise anything for sizes that do not suit it
            problem = error
    todo = "compare the model itself with --full"
    raise UserError("parity", f"no scaled-down copy of the model can be built: {problem}", todo) from None


def _random_model(config: PretrainedConfig) -> Any:
    if hasattr(config, "initializer_range"):
        config.initializer_range = 0.1  # at 0.02 attention is almost uniform, which would hide a wrong mask
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _keep_position_limits(small: PretrainedConfig, config: PretrainedConfig, *, seq_len: int, length: int) -> None:
    """Keep rows beyond a limit of positions beyond it, so that the copy does what the model does there."""
    text = small.get_text_config()
    original = config.get_text_config()
    for name in ("max_position_embeddings", "original_max_position_embeddings"):
        if seq_len > (value_of(original, name) or seq_len):
            setattr(text, name, length // 2)
        if seq_len > ((value_of(original, "rope_parameters") or {}).get(name) or seq_len):
            text.rope_parameters[name] = length // 2
