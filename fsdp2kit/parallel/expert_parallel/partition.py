"""Which modules are experts, whether they can be partitioned, and their partitioning."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import local_part
from fsdp2kit.parallel.expert_parallel.exchange import shares
from fsdp2kit.parallel.expert_parallel.experts import ExpertKind, register_kind, routed_experts
from fsdp2kit.weights.experts import expert_parameters, find_experts, unlike_experts

_serial = itertools.count()


@dataclass(frozen=True)
class ExpertPlan:
    """The experts that are partitioned over `ranks`."""

    modules: tuple[str, ...]
    """Names of the modules that hold a layer's experts."""
    num_experts: int
    """The largest number of experts in a layer."""
    ranks: int

    def __str__(self) -> str:
        held = shares(self.num_experts, self.ranks)
        each = f"{held[0]}" if len(set(held)) == 1 else f"at most {held[0]}"
        layers = f"{self.num_experts} in each of {len(self.modules)} layers"
        return f"experts: {layers}, over ep {self.ranks}: {each} on a rank"


def plan_experts(model: PreTrainedModel, sizes: MeshSizes) -> ExpertPlan | None:
    """How a model's experts are partitioned; None where ``ep`` is 1.

    Raises:
        UserError: the model has no experts, fewer than ranks, or experts that compute in another way.
    """
    if sizes.ep == 1:
        return None
    kind = type(model).__name__
    modules = find_experts(model)
    if not modules:
        what = f"{sizes.ep}, but {kind} has no experts that transformers' interface for experts knows"
        raise UserError("mesh.ep", what, "use 1")
    for name, module in modules.items():
        _check(name, module, sizes)
    return ExpertPlan(tuple(modules), max(module.num_experts for module in modules.values()), sizes.ep)


def _check(name: str, module: Any, sizes: MeshSizes) -> None:
    if unlike := unlike_experts(module):
        what = f"{sizes.ep}, but {type(module).__name__} ({name}) has {', '.join(unlike)}"
        raise UserError("mesh.ep", what, "use 1: such experts are not partitioned")
    held = shares(module.num_experts, sizes.ep)
    if 0 in held:
        fitting = [n for n in range(1, sizes.ep + 1) if sizes.ep % n == 0 and 0 not in shares(module.num_experts, n)]
        what = f"{sizes.ep} ranks for {module.num_experts} experts, of which a rank would hold none"
        raise UserError("mesh.ep", what, f"use {' or '.join(map(str, fitting))}")
    ranks = sizes.dp_shard * sizes.cp // sizes.ep
    for key, parameter in module.named_parameters():
        if shard_dim(parameter.shape, ranks=ranks) is None:
            what = f"leaves {ranks} ranks for each expert, and {name}.{key} {list(parameter.shape)} has no side"
            raise UserError("mesh.ep", f"{what} that {ranks} divides", "use another ep or dp_shard")


def shard_dim(shape: torch.Size, *, ranks: int) -> int | None:
    """Over which dimension of ``[E, …]`` each rank's experts are sharded; None if none is a multiple of ``ranks``.

    Never over the experts, which are partitioned already.
    """
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), None)


def partition_experts(model: PreTrainedModel, plan: ExpertPlan, *, mesh: DeviceMesh) -> None:
    """Leave each rank its experts, in place, and let layers send their tokens to them.

    Parameters become DTensors of all experts, sharded over the mesh's dimension "expert".

    Args:
        model: on meta.
        mesh: `Mesh.experts`.
    """
    experts = mesh["expert"]
    for name in plan.modules:
        module: Any = model.get_submodule(name)
        for key, parameter in module.named_parameters():
            held = shares(len(parameter), plan.ranks)[experts.get_local_rank()]
            local = parameter.detach().new_empty((held, *parameter.shape[1:]))
            whole = DTensor.from_local(
                local, experts, [Shard(0)], run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            setattr(module, key, nn.Parameter(whole, requires_grad=parameter.requires_grad))
    _use(model, plan, group=experts.get_group().group_name)


def _use(model: PreTrainedModel, plan: ExpertPlan, *, group: str) -> None:
    """Let the experts of ``model`` compute by `routed_experts`."""
    name = f"fsdp2kit_{next(_serial)}"  # the operator's table of kinds is global to the process
    for path in plan.modules:
        module: Any = model.get_submodule(path)
        gate = module._apply_gate if module.has_gate else module.act_fn
        kind = ExpertKind(f"{name}.{path}", gate, module.is_transposed, module.has_bias)
        register_kind(kind)
        module.forward = MethodType(_forward_of(kind, group), module)


def _forward_of(kind: ExpertKind, group: str) -> Callable[[Any, Tensor, Tensor, Tensor], Tensor]:
    """The forward of partitioned experts; the module holds it, and it holds their kind."""

    def forward(self: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        own = [local_part(self.get_parameter(key)) for key in expert_parameters(self)]
        return routed_experts(hidden, index, weights, own, self.num_experts, kind.name, group)[0]

    return forward
