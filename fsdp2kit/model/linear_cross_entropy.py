"""Cross-entropy of a linear head without ever holding all logits: our chunks, or torch's or Liger's fused kernel.

Ours take a few hundred tokens at a time, and compute the gradients in the same pass (softmax − one-hot needs nothing
that backward would bring), so that backward only scales them. A loss that weighs each token by its own factor, which
backward brings, is made of `linear_log_probs`: there backward computes the logits again.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Bytes of float32 logits alive at once. CUDA wants larger matmuls than a CPU's caches do.
_CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}


def rows_at_once(device: torch.device, *, vocabulary: int) -> int:
    """Tokens in a chunk: as many as the device's share of memory for float32 logits holds, one at least."""
    return max(1, _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cuda"]) // (4 * vocabulary))


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Σ over tokens of −log softmax(hidden @ weightᵀ)[label], differentiable in ``hidden`` and ``weight``.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, of hidden's dtype.
        labels: ``[N]`` int64 in ``[0, V)``; there is no ignored label here (see `loss_head.select_supervised`).

    Returns:
        A float32 scalar; 0 with zero gradients where N = 0.
    """
    return _LinearCrossEntropy.apply(hidden, weight, labels)[0]


def linear_log_probs(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden @ weightᵀ ÷ temperature)[label] of each token, differentiable in ``hidden`` and ``weight``.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, of hidden's dtype.
        labels: ``[N]`` int64 in ``[0, V)``.

    Returns:
        The log-probabilities and, detached, the entropies −Σ p log p of the distributions in nats, float32 ``[N]``.
    """
    return _LinearLogProbs.apply(hidden, weight, labels, temperature)


def linear_loss(
    kernel: Literal["chunked", "torch", "liger"], hidden: Tensor, weight: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor | None]:
    """`linear_cross_entropy` by a kernel and, of "chunked" alone, each target's own (float32 ``[N]``, detached)."""
    if kernel == "chunked":
        return _LinearCrossEntropy.apply(hidden, weight, labels)[:2]
    compute = torch_linear_cross_entropy if kernel == "torch" else liger_linear_cross_entropy
    return compute(hidden, weight, labels), None


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


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        needs_grad, trains_head = any(ctx.needs_input_grad[:2]), ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if needs_grad else hidden.new_empty(0)
        grad_weight = weight.new_empty(0) if len(hidden) else torch.zeros_like(weight)
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        for part in _chunks(hidden, weight):
            chunk, target = hidden[part], labels[part, None]
            logits = F.linear(chunk, weight).float()
            wanted, peak = logits.gather(1, target), logits.amax(dim=-1, keepdim=True)
            # Softmax and its normalizer in place, with one exponential an element: logsumexp would take another.
            probabilities = logits.sub_(peak).exp_()
            total = probabilities.sum(dim=-1, keepdim=True)
            losses[part] = (peak + total.log() - wanted).squeeze(1)
            if needs_grad:
                probabilities.div_(total).scatter_add_(1, target, -torch.ones_like(target, dtype=torch.float32))
                grad_logits = probabilities.to(weight.dtype)
                torch.mm(grad_logits, weight, out=grad_hidden[part])
                if not trains_head:
                    pass
                elif part.start == 0:
                    grad_weight = grad_logits.t() @ chunk
                    if part.stop < len(hidden):
                        # Chunks add up in float32: bfloat16 would lose the small contributions of dozens of them.
                        grad_weight = grad_weight.float()
                elif weight.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.t(), chunk)
                else:
                    grad_weight.add_(grad_logits.t() @ chunk)
                del grad_logits
            del logits, probabilities  # or this chunk would live on while the next one is made
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype if trains_head else None
        # Else backward is handed zeros for the outputs that have no gradient, as large as the head.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(losses, grad_hidden, grad_weight)
        return losses.sum(), losses, grad_hidden, grad_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if ctx.weight_dtype is None:
            return grad_hidden * grads[0], None, None
        # In place: a second gradient of the head's size would be gigabytes. A second backward raises.
        return grad_hidden * grads[0], grad_weight.mul_(grads[0]).to(ctx.weight_dtype), None


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(log_probs)
        for part in _chunks(hidden, weight):
            logits = F.linear(hidden[part], weight).float().div_(temperature)
            log_probs[part], entropies[part] = pick_log_probs(logits, labels[part])
            del logits  # or this chunk would live on while the next one is made
        ctx.save_for_backward(hidden, weight, labels)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, labels = ctx.saved_tensors
        trains_hidden, trains_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if trains_hidden else None
        # Chunks add up in float32: bfloat16 would lose the small contributions of dozens of them.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if trains_head else None
        for part in _chunks(hidden, weight):
            logits = F.linear(hidden[part], weight).float().div_(ctx.temperature)
            scale = grads[0][part, None] / ctx.temperature
            grad_logits = logits.softmax(dim=-1).mul_(-scale).scatter_add_(1, labels[part, None], scale)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.add_(grad_logits.t() @ hidden[part])
            del logits, grad_logits
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def _chunks(hidden: Tensor, weight: Tensor) -> list[slice]:
    """As many rows of ``hidden`` at a time as may have their logits in memory."""
    rows = rows_at_once(hidden.device, vocabulary=weight.shape[0])
    return [slice(start, start + rows) for start in range(0, len(hidden), rows)]


def pick_log_probs(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``labels`` ``[N]`` under float32 ``logits`` ``[N, V]``, and the detached entropies."""
    log_softmax = logits.log_softmax(dim=-1)
    detached = log_softmax.detach()
    # A token of probability 0 adds 0 · −inf.
    entropies = -detached.exp().mul_(detached).nansum(dim=-1)
    return log_softmax.gather(1, labels[:, None]).squeeze(1), entropies
