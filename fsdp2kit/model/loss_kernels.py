"""What computes the loss on the head: our chunks, or one of the fused kernels of torch and Liger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2kit.model.linear_cross_entropy import (
    Groups,
    grouped_linear_cross_entropy,
    linear_cross_entropy,
    rows_at_once,
)

LossKernel = Literal["chunked", "torch", "liger", "own_head"]
"""`choose_loss` says which can be had; "own_head" is the model's own forward, in chunks (see `loss_head`)."""

HeadLoss = Callable[[Tensor, Tensor, Tensor, Groups | None], tuple[Tensor, Tensor | None]]
"""From hidden states ``[N, H]``, the head's weight ``[V, H]``, labels ``[N]`` and groups to the summed cross-entropy
(float32 scalar) and each group's part of it, where there are groups: as `grouped_linear_cross_entropy`."""


def linear_loss(kernel: Literal["chunked", "torch", "liger"]) -> HeadLoss:
    """The summed cross-entropy of logits ``hidden @ weightᵀ``; "torch" and "liger" raise ValueError for groups."""
    if kernel == "chunked":
        return grouped_linear_cross_entropy
    compute = torch_linear_cross_entropy if kernel == "torch" else liger_linear_cross_entropy

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor, groups: Groups | None) -> tuple[Tensor, None]:
        if groups is not None:
            raise ValueError(f"the loss kernel {kernel!r} gives no losses by group; use 'chunked'")
        return compute(hidden, weight, labels), None

    return loss


def torch_linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`linear_cross_entropy` by torch's own kernel (from torch 2.13 on), in chunks of as many rows.

    In 16 bits it adds up the loss, and takes the factor that gradients are scaled by, in that dtype.
    """
    rows = rows_at_once(hidden.device, vocabulary=weight.shape[0])
    options = nn.LinearCrossEntropyOptions(batch_chunk_size=rows)
    return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options).float()


def liger_linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """`linear_cross_entropy` by Liger's Triton kernels, on CUDA; the weight's gradient adds up in float32.

    It sizes its chunks itself, and makes the host wait for the device.
    """
    if not len(hidden):
        return linear_cross_entropy(hidden, weight, labels)  # Liger's divides by the number of rows
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyLoss,
    )

    if torch.is_grad_enabled() and not hidden.requires_grad:
        # Where all but the head is frozen: Liger's has no gradient for a weight without one for the hidden states.
        hidden = hidden.detach().requires_grad_()
    return LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)(weight, hidden, labels)
