"""How large the FSDP units of a plan are: gathered, sharded, and what of them is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from fsdp2kit.config.checks import shard_ranks
from fsdp2kit.parallel.fsdp import ignored_modules, parameters_by_unit
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.planner.activations import item_bytes


@dataclass(frozen=True)
class UnitSize:
    """Elements of one FSDP unit, each parameter's rows padded to a multiple of the ranks it is sharded over."""

    name: str
    padded: int
    trained: int
    """Those of parameters that are trained."""
    tensors: int
    """Number of its parameters that are trained."""
    item: int
    """Bytes of a gathered element."""
    stored: int
    """Bytes of its shards, on all ranks of one copy together."""
    reshard: bool | int
    gathers_in_backward: bool

    @property
    def whole(self) -> int:
        """Bytes of the gathered parameters."""
        return self.padded * self.item


def padded_elements(parameter: nn.Parameter, shards: int) -> int:
    """Elements of a parameter with its rows padded to a multiple of ``shards``, as FSDP2 stores and sends it."""
    rows = len(parameter) if parameter.ndim else 1
    return parameter.numel() // max(1, rows) * math.ceil(rows / shards) * shards


def unit_sizes(model: PreTrainedModel, plan: ParallelPlan) -> list[UnitSize]:
    """The plan's units in its order, the root first."""
    shards, units = shard_ranks(plan.fsdp, plan.sizes), plan.units
    storage = item_bytes(plan.fsdp.storage_dtype)
    inside = parameters_by_unit(model, [unit.name for unit in units], ignored=ignored_modules(plan.fsdp, model))
    sizes = []
    for unit in units:
        trained = [parameter for parameter in inside[unit.name] if parameter.requires_grad]
        padded, learns = (
            sum(padded_elements(parameter, shards) for parameter in some) for some in (inside[unit.name], trained)
        )
        item = item_bytes(unit.param_dtype)
        sizes.append(
            UnitSize(
                name=unit.name,
                padded=padded,
                trained=learns,
                tensors=len(trained),
                item=item,
                # What is frozen beside adapters is stored as it computes (`apply_fsdp`).
                stored=learns * storage + (padded - learns) * (storage if plan.adapter is None else item),
                reshard=unit.reshard_after_forward,
                gathers_in_backward=not isinstance(model.get_submodule(unit.name), nn.Embedding),
            )
        )
    return sizes
