"""`fully_shard`: which modules are units, in which precision, and where their shards live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

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

from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.schema import FSDPConfig, TrainingConfig
from fsdp2kit.parallel.gloo import exchange_directly
from fsdp2kit.parallel.units import Unit, ignored_modules, plan_units

_RESHARDS_AFTER_FORWARD = {
    "full_shard": True,
    "shard_grad_op": False,
    "no_shard": False,
    "hybrid_shard": True,
    "hybrid_shard_zero2": False,
}


def apply_fsdp(section: FSDPConfig, model: PreTrainedModel, *, mesh: DeviceMesh) -> list[Unit]:
    """Shard ``model`` over ``mesh``, in place, and say in which units (`plan_units`).

    Raises:
        UserError: units that the model does not have.
    """
    units = plan_units(section, model)
    ignored = {p for _, module in ignored_modules(section, model) for p in module.parameters(recurse=False)}
    for parameter in model.parameters():
        # A shard keeps the dtype of what is sharded; nothing would cast an ignored parameter later.
        dtype = section.param_dtype if parameter in ignored else section.storage_dtype
        parameter.data = parameter.data.to(getattr(torch, dtype))
    reshard = reshards_after_forward(section)
    head = model.get_output_embeddings()
    for unit in reversed(units):  # from the inside out, as torch wants them
        returns_loss = unit.is_root or unit.module is head
        fully_shard(
            unit.module,
            mesh=mesh,
            # The head's backward follows its forward at once, and the root's outlives all: freeing them in between
            # would gather them twice.
            reshard_after_forward=False if returns_loss else reshard,
            mp_policy=_precision_of(unit, section, returns_loss=returns_loss),
            offload_policy=offload(section, mesh),
            ignored_params=ignored or None,
        )
        if isinstance(unit.module, FSDPModule) and isinstance(unit.module, nn.Embedding):
            unit.module.set_unshard_in_backward(False)  # a look-up's gradient does not depend on the table
    apply_prefetch(section, units)
    exchange_directly((unit.module for unit in units), mesh)
    return units


def apply_prefetch(section: FSDPConfig, units: Sequence[Unit]) -> None:
    """How many units are gathered ahead of the one that runs. FSDP2 has no limiter: these numbers are the window.

    Left alone, FSDP2 gathers nothing ahead in forward, where the host runs ahead of the device anyhow, and one unit in
    backward, in the order in which they ran. An empty list of modules would change nothing of that.
    """
    modules: list[FSDPModule] = [unit.module for unit in units if isinstance(unit.module, FSDPModule)]
    ahead = section.forward_prefetch
    if ahead:
        for number, module in enumerate(modules):
            module.set_modules_to_forward_prefetch(modules[number + 1 : number + 1 + ahead])
    ahead = section.backward_prefetch
    if ahead != 1:
        # Backward begins with the root, and the units follow it last to first.
        for number, module in enumerate(modules):
            last = number if number else len(modules)
            following = modules[max(1, last - ahead) : last][::-1]
            # Itself, which is there already, is how FSDP2 is told to gather nothing ahead.
            module.set_modules_to_backward_prefetch(following or [module])


def _precision_of(unit: Unit, section: FSDPConfig, *, returns_loss: bool) -> MixedPrecisionPolicy:
    policy = mixed_precision(section)
    if returns_loss:
        return replace(policy, output_dtype=None)  # the loss stays as exact as it was computed
    if unit.param_dtype == section.param_dtype:
        return policy
    # The next product has weights in the compute dtype, and would refuse anything else.
    output = section.output_dtype or section.param_dtype
    return replace(policy, param_dtype=getattr(torch, unit.param_dtype), output_dtype=getattr(torch, output))


def reshards_after_forward(section: FSDPConfig) -> bool | int:
    """Whether units are freed after forward, or to how many ranks they are resharded."""
    reshard = section.reshard_after_forward
    return _RESHARDS_AFTER_FORWARD[section.strategy] if reshard is None else reshard


def mixed_precision(section: FSDPConfig) -> MixedPrecisionPolicy:
    """Compute in ``param_dtype``, accumulate and reduce gradients in ``reduce_dtype``."""
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


def describe_fsdp(config: TrainingConfig, model: PreTrainedModel, *, sizes: MeshSizes, device_type: str) -> list[str]:
    """What a user should see of the sharding at the start: the units, the prefetch window, and what has no effect.

    Args:
        model: before it is sharded.
    """
    section = config.fsdp
    counts = Counter("root" if unit.is_root else type(unit.module).__name__ for unit in plan_units(section, model))
    units = ", ".join(f"{count} {name}" for name, count in counts.items())
    ranks = 1 if section.strategy == "no_shard" else sizes.dp_shard * sizes.cp
    lines = [
        f"fsdp: {section.strategy} over {ranks} ranks; units: {units}; "
        f"gathered ahead: {section.forward_prefetch} in forward, {section.backward_prefetch} in backward"
    ]
    total = sum(parameter.numel() for parameter in model.parameters())
    frozen = sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad)
    if frozen:
        lines.append(f"frozen: {frozen:,} of {total:,} parameters")
    if ignored := ignored_modules(section, model):
        whole = {id(p): p.numel() for _, module in ignored for p in module.parameters()}
        lines.append(f"kept whole on every rank: {sum(whole.values()):,} parameters, stored in {section.param_dtype}")
    if device_type == "cpu":
        lines += ["gathered and reduced by messages from rank to rank (gloo)"] if ranks > 1 else []
        offloaded = [f"fsdp.offload = {section.offload!r}"] if section.offload != "none" else []
        offloaded += ["activation_checkpointing.offload"] if config.activation_checkpointing.offload else []
        lines += [f"{what} has no effect on a CPU run: everything is in host memory already" for what in offloaded]
    return lines


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
