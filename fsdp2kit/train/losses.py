"""Normalisation: one mean over the supervised tokens of the global batch, whatever the mesh.

    loss = Σ over all ranks and micro-batches of the cross-entropy ÷ T,   T = supervised tokens of the global batch

FSDP2 *averages* gradients over its mesh of W ranks (data- and context-parallel alike), so each rank
back-propagates W / T times its own sum. Setting a divide factor instead would select a reduction that gloo
refuses and NCCL gets wrong in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2kit.distributed import gather_objects
from fsdp2kit.errors import RunFailure


def accumulate_gradients(
    model: Any,
    micro_batches: Sequence[Callable[[], dict[str, Any]]],
    *,
    tokens: int,
    reduce_every: bool = False,
    gather_once: bool = False,
    end_phase: Callable[[str], None] = lambda phase: None,
) -> Tensor:
    """Forward and backward over a rank's micro-batches; gradients are reduced once, with the last one.

    Args:
        model: a sharded model with ``loss_sum`` (see `fsdp2kit.model.loss_head.attach_loss`).
        micro_batches: functions that return ``loss_sum``'s arguments, called one after the other, so that only
            one micro-batch is on the device at a time.
        tokens: supervised tokens of the global batch.
        reduce_every: reduce after every micro-batch: the unsharded gradients need no memory between them.
        gather_once: keep what was gathered until the last micro-batch is done, for units that stay whole from forward
            to backward anyway: their parameters do not change in between.
        end_phase: called with "forward" and "backward" when each is over.

    Returns:
        This rank's summed cross-entropy ÷ ``tokens``, a float32 scalar on the device; summed over all ranks it
        is the loss. Of a mix (the inputs have ``groups``), float32 ``[1 + G]``: the same, and each source's part.
    """
    scale = world_size() / tokens
    total = None
    for number, inputs in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(reduce_every or last)
        model.set_reshard_after_backward(last or not gather_once)
        loss = model.loss_sum(**inputs())
        end_phase("forward")
        loss, parts = loss if isinstance(loss, tuple) else (loss, None)
        (loss * scale).backward()
        end_phase("backward")
        found = loss.detach() if parts is None else torch.cat([loss.detach()[None], parts.to(loss.dtype)])
        total = found if total is None else total + found
    assert total is not None, "a data-parallel rank has at least one micro-batch"
    return total / tokens


def gradient_norm(model: nn.Module) -> Tensor:
    """The global L2 norm of all gradients, before clipping: a float32 scalar, the same on every rank."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if any(gradient.device.type == "cpu" for gradient in gradients):
        # torch's float32 norm on a CPU adds squares one after the other: 1e-4 off at 28 million of them, and off by
        # another amount for each way of sharding them.
        norm = torch.linalg.vector_norm(torch.stack([_norm(gradient) for gradient in gradients])).float()
    else:
        norm = torch.nn.utils.get_total_norm(gradients)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _norm(gradient: Tensor) -> Tensor:
    """The L2 norm, a float64 scalar: rows in float32, which are short enough for it, and float64 over the rows.

    float64 over all elements would first copy them to float64: 5 % of a step of SmolLM2 with 8 layers.
    """
    rows = torch.linalg.vector_norm(gradient, dim=-1) if gradient.ndim > 1 else gradient
    return torch.linalg.vector_norm(rows, dtype=torch.float64)


def sum_loss(loss: Tensor) -> Tensor:
    """Sum of ``loss`` over all ranks."""
    if world_size() > 1:
        dist.all_reduce(loss)
    return loss


def is_finite(record: Mapping[str, float]) -> bool:
    """Whether the step of this record changed the parameters: where loss or gradient norm is not finite, none does."""
    return math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])


def raise_nonfinite(local_loss: Tensor, norm: float, *, step: int) -> None:
    """Say which step and which ranks had the non-finite loss.

    Raises:
        RunFailure: always, on every rank.
    """
    ranks = [
        rank for rank, finite in enumerate(gather_objects(math.isfinite(local_loss.flatten()[0].item()))) if not finite
    ]
    if ranks:
        what = f"the loss is not finite on rank {', '.join(map(str, ranks))}"
    else:
        what = f"the gradient norm is {norm} although every rank's loss is finite"
    raise RunFailure(
        f"step {step}: {what}; the last checkpoint is untouched. Lower the learning rate, look at this batch, "
        'or set train.on_nonfinite = "skip"'
    )


def world_size() -> int:
    """Ranks in the job; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1
