"""Carries out a `ParallelPlan` on a model; the order of the steps is stated only here."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import agreement
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.model.build import decoder_layers, materialize
from fsdp2kit.model.layer_functions import use_no_kernels
from fsdp2kit.model.liger import apply_liger, give_back
from fsdp2kit.model.loss_head import FORWARDS, attach_loss
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.context_parallel.attention import apply_attention
from fsdp2kit.parallel.context_parallel.flash import apply_flash
from fsdp2kit.parallel.expert_parallel.partition import partition_experts
from fsdp2kit.parallel.fsdp import apply_fsdp
from fsdp2kit.parallel.low_bits import apply_float8, apply_nf4
from fsdp2kit.parallel.plan import ParallelPlan


def parallelize_model(model: PreTrainedModel, plan: ParallelPlan, *, mesh: Mesh) -> PreTrainedModel:
    """Make a meta ``model`` parallel over ``mesh``, in place; its parameters are then allocated, without values.

    Fill them with `load_pretrained`, `initialize` or a checkpoint; build the optimizer after that. Collective.
    Gradients then add up over ranks, where `fully_shard` averages them: divide a loss by the targets of all ranks, as
    `build_mean_loss` does.
    transformers cannot save shards, so ``model.save_pretrained`` raises a `UserError` from here on; `export_model` of
    `fsdp2kit.checkpoint.export_model` writes what it would.

    Args:
        plan: `plan_parallel`'s, for this model and a mesh of these sizes.

    Raises:
        UserError: float8, Liger's kernels or the FlashAttention asked for are not available.
    """
    layers = decoder_layers(model)
    attach_loss(model, own_head=plan.own_head, compiles=plan.compile.enabled)
    # 1. Changes to the computation itself come first, so that all later steps wrap the final one.
    with agreement():
        if plan.activation_checkpointing.mode == "selective":
            give_back()
        apply_liger(plan.model, model, device=mesh.device)
        if plan.float8 is not None:
            apply_float8(plan.float8, model)
        if plan.nf4 is not None:
            apply_nf4(plan.nf4, model)
        apply_flash(plan.attention.flash, device=mesh.device)
    if mesh.device.type == "cpu":
        use_no_kernels(model)
    apply_attention(model, plan.attention, group=mesh.cp_group)
    if plan.experts is not None and mesh.experts is not None:
        partition_experts(model, plan.experts, mesh=mesh.experts)
    # 2. Recomputation is innermost, 3. compile around it, 4. FSDP's hooks outermost: they gather the parameters before
    # a layer is recomputed in backward.
    broken = [model.get_submodule(name) for name in plan.broken_layers] if plan.compile.enabled else []
    for layer in broken:  # torch.compile gives up a recomputed layer whose graph breaks: here recomputation is around
        layer.forward = torch.compile(layer.forward)
    section = plan.activation_checkpointing
    is_compiled = plan.compile.enabled
    apply_activation_checkpointing(section, layers, device_type=mesh.device.type, is_compiled=is_compiled)
    if plan.compile.enabled:
        for layer in layers:
            if layer not in broken:
                layer.compile()
    apply_fsdp(plan.fsdp, model, mesh=mesh.shard, experts=mesh.expert_shard, units=plan.units)
    # 5. Losses are not part of the model's own forward, so FSDP must know of their methods.
    for name in FORWARDS:
        register_fsdp_forward_method(model, name)
    # 6. Only now memory is allocated, for the shards alone.
    shard_device = torch.device("cpu") if plan.fsdp.offload == "params" else mesh.device
    materialize(model, device=shard_device, whole_device=mesh.device)
    vars(model)["save_pretrained"] = _refuse_to_save  # it would leave half a directory
    return model


def _refuse_to_save(*arguments: Any, **options: Any) -> NoReturn:
    """What a sharded model's ``save_pretrained`` does."""
    todo = "call export_model(model, directory) of fsdp2kit.checkpoint.export_model on every rank"
    raise UserError("model.save_pretrained", "the model is sharded, which transformers cannot save", todo)
