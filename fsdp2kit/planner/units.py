"""How large the FSDP units of a plan are: gathered, sharded, and what of them is trained."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from fsdp2kit.config.checks import shard_ranks
from fsdp2kit.model.nf4 import NF4Linear
from fsdp2kit.parallel.fsdp import ignored_modules, parameters_by_unit
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.planner.activations import item_bytes


@dataclass(frozen=True)
class UnitSize:
    """One FSDP unit, each parameter's rows padded to a multiple of the ranks it is sharded over."""

    name: str
    padded: int
    """Elements of its parameters, but for those in 4 bits."""
    packed: int
    """Bytes of those in 4 bits, which are stored and gathered as they are."""
    trained: int
    """Those of parameters that are trained."""
    unpadded: int
    """The same without padding: a gradient has none before it is reduced."""
    tensors: int
    """Number of its parameters that are trained."""
    item: int
    """Bytes of a gathered element."""
    stored: int
    """Bytes of its shards, on all ranks of one copy together."""
    shard_sizes: tuple[int, ...]
    """Bytes of a rank's shard of each parameter."""
    gradient_sizes: tuple[int, ...]
    """Bytes of a rank's shard of each gradient."""
    reshard: bool | int
    gathers_in_backward: bool

    @property
    def whole(self) -> int:
        """Bytes of the gathered parameters."""
        return self.padded * self.item + self.packed


def padded_elements(parameter: nn.Parameter, shards: int) -> int:
    """Elements of a parameter with its rows padded to a multiple of ``shards``, as FSDP2 stores and sends it."""
    rows = len(parameter) if parameter.ndim else 1
    return parameter.numel() // max(1, rows) * math.ceil(rows / shards) * shards


def unit_sizes(model: PreTrainedModel, plan: ParallelPlan) -> list[UnitSize]:
    """The plan's units in its order, the root first."""
    shards, units = shard_ranks(plan.fsdp, plan.sizes), plan.units
    storage = item_bytes(plan.fsdp.storage_dtype)
    inside = parameters_by_unit(model, [unit.name for unit in units], ignored=ignored_modules(plan.fsdp, model))
    in_4_bits = {}
    for layer in map(model.get_submodule, plan.nf4.names if plan.nf4 is not None else ()):
        assert isinstance(layer, nn.Linear), "those are the layers that `plan_nf4` chooses"
        in_4_bits[layer.weight] = padded_elements(NF4Linear(layer, layer.weight.dtype).nf4, shards)
    sizes = []
    for unit in units:
        trained = [parameter for parameter in inside[unit.name] if parameter.requires_grad]
        others = [parameter for parameter in inside[unit.name] if parameter not in in_4_bits]
        padded, learns = (sum(padded_elements(parameter, shards) for parameter in some) for some in (others, trained))
        packed = sum(in_4_bits.get(parameter, 0) for parameter in inside[unit.name])
        item = item_bytes(unit.param_dtype)
        # What is frozen beside adapters is stored as it computes (`apply_fsdp`).
        frozen = storage if plan.adapter is None else item
        shard_sizes = [
            in_4_bits.get(p, padded_elements(p, shards) * (storage if p.requires_grad else frozen)) // shards
            for p in inside[unit.name]
        ]
        sizes.append(
            UnitSize(
                name=unit.name,
                padded=padded,
                packed=packed,
                trained=learns,
                unpadded=sum(parameter.numel() for parameter in trained),
                tensors=len(trained),
                item=item,
                stored=sum(shard_sizes) * shards,
                shard_sizes=tuple(shard_sizes),
                gradient_sizes=tuple(padded_elements(p, shards) // shards * storage for p in trained),
                reshard=unit.reshard_after_forward,
                gathers_in_backward=not isinstance(model.get_submodule(unit.name), nn.Embedding),
            )
        )
    return sizes
