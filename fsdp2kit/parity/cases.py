"""What is compared: meshes, methods and options on the ranks at hand, every two values together at least once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fsdp2kit.config.schema import TrainingConfig

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
METHODS = ("ulysses", "ring", "allgather")
Layout = tuple[int, int, str]
"""Data-parallel ranks, context-parallel ranks, and the latter's method ("none" for one)."""


@dataclass(frozen=True)
class Variant:
    """One way to train the same: where the ranks go, and options that must not change the numbers."""

    dp: int
    cp: int
    method: str
    micro_batch_size: int
    strategy: str
    checkpointing: str
    dtype: str = "float32"

    def config(
        self, base: TrainingConfig, *, model: Path, rows: int, seq_len: int, pack: bool, steps: int
    ) -> TrainingConfig:
        """``base`` with this variant's options, on a model and rows of the comparison's own."""
        values: dict[str, Any] = {
            name: section
            for name, section in base.model_dump(mode="json").items()
            if name in ("recipe", "run", "fsdp", "activation_checkpointing", "compile", "preflight")
        }
        values["model"] = {
            "path": str(model),
            "attention": base.model.attention,
            "trust_remote_code": base.model.trust_remote_code,
        }
        replicate = 2 if self.strategy.startswith("hybrid") else "auto"
        values["mesh"] = {"cp": self.cp, "dp_replicate": replicate}
        values["fsdp"] |= {"strategy": self.strategy, "param_dtype": self.dtype}
        values["context_parallel"] = {"method": "auto" if self.cp == 1 else self.method}
        values["activation_checkpointing"]["mode"] = self.checkpointing
        values["data"] = {"seq_len": seq_len, "pack": pack}
        values["train"] = {
            "steps": steps,
            "global_batch_size": rows,
            "micro_batch_size": self.micro_batch_size,
            "max_grad_norm": 0.5,
        }
        values["optimizer"] = {"lr": 1e-3, "weight_decay": 0.1}
        values["lr_schedule"] = {"warmup_steps": 1}
        return TrainingConfig.model_validate(values)

    def as_row(self) -> dict[str, Any]:
        """Its columns in a table."""
        return asdict(self)


def variants(base: TrainingConfig, *, world_size: int) -> list[Variant]:
    """Pairwise in float32, then every layout once in the TOML's own dtype."""
    layouts = list(_layouts(world_size))
    strategies = [name for name in STRATEGIES if not name.startswith("hybrid") or world_size % 2 == 0]
    rows = pairs_of(layouts, (1, 2), strategies, ("none", "full"), valid=_fits)
    found = [Variant(dp, cp, method, micro, strategy, ac) for (dp, cp, method), micro, strategy, ac in rows]
    dtype = base.fsdp.param_dtype
    if dtype != "float32":
        own = base.activation_checkpointing.mode
        for layout in layouts:
            strategy = base.fsdp.strategy if _fits((layout, 1, base.fsdp.strategy, own)) else "full_shard"
            dp, cp, method = layout
            found.append(Variant(dp, cp, method, 1, strategy, own, dtype))
    return found


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


def _layouts(world_size: int) -> Iterator[Layout]:
    for cp in range(1, world_size + 1):
        if world_size % cp == 0:
            for method in METHODS if cp > 1 else ("none",):
                yield world_size // cp, cp, method


def _fits(row: tuple[Any, ...]) -> bool:
    (dp, _, _), _, strategy, _ = row
    return not strategy.startswith("hybrid") or dp % 2 == 0
