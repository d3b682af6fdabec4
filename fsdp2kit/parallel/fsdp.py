"""`fully_shard`: which modules are units, in which precision, and where their shards live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import PreTrainedModel

from fsdp2kit.config.schema import FSDPConfig

_RESHARDS_AFTER_FORWARD = {
    "full_shard": True,
    "shard_grad_op": False,
    "no_shard": False,
    "hybrid_shard": True,
    "hybrid_shard_zero2": False,
}


def apply_fsdp(section: FSDPConfig, model: PreTrainedModel, layers: Sequence[nn.Module], *, mesh: DeviceMesh) -> None:
    """Shard ``model`` over ``mesh``, in place: each decoder layer a unit, then what is left in the root's.

    An untied embedding and an untied head are units of their own, so that their gradients do not share one giant
    reduce-scatter. Tied, they are one parameter, which stays in the root's unit with the final norm.
    """
    policies: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": mixed_precision(section),
        "offload_policy": offload(section, mesh),
    }
    # These two return the loss, which stays as exact as it was computed.
    exact = {**policies, "mp_policy": replace(policies["mp_policy"], output_dtype=None)}
    reshard = section.reshard_after_forward
    if reshard is None:
        reshard = _RESHARDS_AFTER_FORWARD[section.strategy]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard, **policies)
    if head is not None and head.weight is not embedding.weight:
        fully_shard(embedding, reshard_after_forward=reshard, **policies)
        # The head's backward follows its forward at once: freeing it in between would gather it twice.
        fully_shard(head, reshard_after_forward=False, **exact)
    fully_shard(model, reshard_after_forward=False, **exact)


def mixed_precision(section: FSDPConfig) -> MixedPrecisionPolicy:
    """Compute in ``param_dtype``, accumulate and reduce gradients in ``reduce_dtype``; shards stay float32."""
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, section.param_dtype),
        reduce_dtype=getattr(torch, section.reduce_dtype),
        output_dtype=getattr(torch, section.output_dtype) if section.output_dtype else None,
    )


def offload(section: FSDPConfig, mesh: DeviceMesh) -> OffloadPolicy:
    """Where shards live. On a CPU mesh they are on the host already (and torch refuses to offload them there)."""
    if section.offload == "params" and mesh.device_type != "cpu":
        return CPUOffloadPolicy(pin_memory=True)
    return OffloadPolicy()


def shard_device(section: FSDPConfig, device: torch.device) -> torch.device:
    """The device that sharded parameters are kept on."""
    return torch.device("cpu") if section.offload == "params" else device


def reshard_all(model: nn.Module) -> None:
    """Free every unit's unsharded parameters.

    After a forward without backward (evaluation), units that keep their parameters for backward stay unsharded,
    and an optimizer or a checkpoint would then see plain tensors. FSDP's own ``reshard`` is not recursive.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
