"""Tensor parallelism of a model that only generates, by transformers' own plan (docs/grpo.md).

Weights are split over neighbouring ranks, attention's by heads, and with them the cache of keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed import utils as transformers_meshes

from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import world_size
from fsdp2kit.job.mesh import device_mesh
from fsdp2kit.model.inspect import value_of
from fsdp2kit.weights.record import find_ties


def check_tensor_parallel(model: PreTrainedModel, tp: int) -> None:
    """Refuse a model that transformers cannot split over ``tp`` ranks with whole heads on each."""
    if tp == 1:
        return
    name = type(model).__name__
    config = model.config.get_text_config()
    if not any("*" in rule for rule in model.tp_plan or {}):
        what = f"{tp}, but transformers {transformers.__version__} has no tensor-parallel plan for {name}"
        raise UserError("rollout.tp", what, "leave it out")
    for key in ("num_key_value_heads", "num_attention_heads"):
        heads = value_of(config, key) or 0
        for count in (count for count in (heads if isinstance(heads, list) else [heads]) if count % tp):
            what = f"{tp} does not divide the model's {key} {count}"
            raise UserError("rollout.tp", what, "use a divisor of it")


def apply_tensor_parallel(model: Any, tp: int, *, device: torch.device) -> DeviceMesh:
    """Split a model on meta over each ``tp`` neighbouring ranks of the job, in place; every rank calls it.

    Parameters become DTensors that keep the shape of the whole. Generate with gradients off.

    Returns:
        The mesh of this rank and those it shares the model with.
    """
    mesh = device_mesh(device.type, {"pp": 1, "fsdp": world_size() // tp, "tp": tp})
    ties = find_ties(model)
    plan = dict(model.tp_plan)
    for alias, name in ties.items():
        # transformers splits before it ties: both have to be split alike, or neither.
        modules = [tensor.rpartition(".")[0] for tensor in (name, alias)]
        first, second = (plan.get(module, "") for module in modules)
        if first != "embedding_rowwise" or not second.startswith("colwise"):
            plan = {rule: style for rule, style in plan.items() if rule not in modules}
        _set(model, alias, nn.Parameter(torch.empty_like(model.get_parameter(name)), requires_grad=False))
    model.tp_plan = plan
    given = mesh
    if hasattr(transformers_meshes, "TransformersDeviceMesh"):  # from 5.19 on: the meshes of dense layers and experts
        given = transformers_meshes.TransformersDeviceMesh(mesh, mesh)
    try:
        model.maybe_distribute_model(model, DistributedConfig(tp_size=tp), given)
    except ValueError as error:
        what = f"transformers cannot split the model over {tp} ranks: {error}"
        raise UserError("rollout.tp", what, "use fewer") from None
    for alias, name in ties.items():
        _set(model, alias, model.get_parameter(name))
    return mesh["tp"]


def fill_split(target: Tensor, whole: Tensor) -> None:
    """Copy a tensor into ``target``, or this rank's part of it where that is split.

    `fsdp2kit.weights.shards` fills ranges of rows. The part of a fused tensor (`gate_up_proj`) is not one.
    """
    if isinstance(target, DTensor):
        part = distribute_tensor(whole.contiguous(), target.device_mesh, target.placements, src_data_rank=None)
        target = target.to_local()
        whole = part.to_local()
    target.copy_(whole)


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, parameter)
