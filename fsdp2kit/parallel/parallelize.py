"""The one place that states the order in which a model is made parallel."""

from __future__ import annotations

import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.model.build import decoder_layers, materialize
from fsdp2kit.model.choose_loss import LossChoice, choose_loss
from fsdp2kit.model.liger import apply_liger
from fsdp2kit.model.loss_head import attach_loss
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.compile import apply_compile
from fsdp2kit.parallel.context_parallel.attention import apply_attention
from fsdp2kit.parallel.context_parallel.choose import choose_path
from fsdp2kit.parallel.context_parallel.path import AttentionPath
from fsdp2kit.parallel.float8 import apply_float8
from fsdp2kit.parallel.fsdp import apply_fsdp, shard_device
from fsdp2kit.parallel.mesh import Mesh


def parallelize_model(
    model: PreTrainedModel,
    config: TrainingConfig,
    *,
    mesh: Mesh,
    device: torch.device,
    path: AttentionPath | None = None,
    loss: LossChoice | None = None,
) -> PreTrainedModel:
    """Spread a meta ``model`` over ``mesh``, in place; its parameters are then allocated but hold no values.

    Fill them with `load_pretrained`, `initialize` or a checkpoint; build the optimizer after that.

    Args:
        path: the way that attention goes, the same as for `build_shard_batch`; by default what `choose_path` says.
        loss: what computes the loss; by default what `choose_loss` says.

    Raises:
        UserError: transformers names no layer class for this model, float8, Liger's kernels or the loss kernel are
            not to be had, or ``compile.cache_dir`` cannot be written to.
    """
    path = path or choose_path(config, model, cp=mesh.sizes.cp, device_type=device.type)
    layers = decoder_layers(model)
    loss = loss or choose_loss(config, model, device=device)
    head = attach_loss(model, kernel=loss.kernel)
    # 1. What changes the computation itself comes first, so that everything after wraps the final one.
    apply_liger(config.model, model, device=device)
    apply_float8(config.float8, model, fsdp=config.fsdp, shards=mesh.shard.shape[-1], device=device)
    apply_attention(model, path, group=mesh.cp_group)
    # 2. Recomputation inside, 3. compiled around it, 4. FSDP's hooks outermost: parameters are gathered before
    # a layer runs again in backward.
    apply_activation_checkpointing(config.activation_checkpointing, layers, device_type=device.type)
    apply_compile(config.compile, layers)
    apply_fsdp(config.fsdp, model, mesh=mesh.shard)
    # 5. The loss reads parameters, so it must be a method that FSDP's hooks surround, on root and head alike.
    for module in {id(module): module for module in (model, head)}.values():
        register_fsdp_forward_method(module, "loss_sum")
    # 6. Only now is memory allocated, and just for the shards.
    materialize(model, device=shard_device(config.fsdp, device), whole_device=device)
    return model
