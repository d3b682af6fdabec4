"""Cross-entropy of a linear head, a few hundred tokens at a time, with the gradients of the same pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Bytes of float32 logits alive at once. CUDA wants larger matrix products than a CPU's caches do.
_CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}


def rows_at_once(device: torch.device, *, vocabulary: int) -> int:
    """Tokens in a chunk: as many as the device's share of memory for float32 logits holds, one at least."""
    return max(1, _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cuda"]) // (4 * vocabulary))


@dataclass(frozen=True)
class Groups:
    """Which of ``count`` groups (the sources of a mix) each target belongs to."""

    of: Tensor
    """``[N]`` int64 in ``[0, count)``."""
    count: int

    def sums(self, losses: Tensor, *, start: int = 0) -> Tensor:
        """float64 ``[count]``: each group's sum over ``losses`` ``[n]``, those of the targets from ``start`` on.

        In float64, since ``index_add_`` adds thousands of tokens one after the other.
        """
        sums = torch.zeros(self.count, dtype=torch.float64, device=losses.device)
        return sums.index_add_(0, self.of[start : start + len(losses)], losses.detach().double())


def linear_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Σ over tokens of −log softmax(hidden @ weightᵀ)[label], differentiable in ``hidden`` and ``weight``.

    Args:
        hidden: ``[N, H]``.
        weight: ``[V, H]``, of hidden's dtype.
        labels: ``[N]`` int64 in ``[0, V)``; there is no ignored label here (see `loss_head.select_supervised`).

    Returns:
        A float32 scalar; 0 with zero gradients where N = 0.
    """
    return grouped_linear_cross_entropy(hidden, weight, labels, None)[0]


def grouped_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, groups: Groups | None
) -> tuple[Tensor, Tensor | None]:
    """`linear_cross_entropy`, and each group's part of it where there are groups, detached."""
    loss, sums, _, _ = _LinearCrossEntropy.apply(hidden, weight, labels, groups)
    return loss, sums


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, groups: Groups | None
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        needs_grad = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if needs_grad else hidden.new_empty(0)
        grad_weight = weight.new_empty(0) if len(hidden) else torch.zeros_like(weight)
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        sums = groups.sums(loss.expand(0)) if groups is not None else None
        rows = rows_at_once(hidden.device, vocabulary=weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            chunk, target = hidden[start : start + rows], labels[start : start + rows, None]
            logits = F.linear(chunk, weight).float()
            wanted, peak = logits.gather(1, target), logits.amax(dim=-1, keepdim=True)
            # Softmax and its normalizer in place, with one exponential an element: logsumexp would take another.
            probabilities = logits.sub_(peak).exp_()
            total = probabilities.sum(dim=-1, keepdim=True)
            losses = peak + total.log() - wanted
            loss += losses.sum()
            if groups is not None and sums is not None:
                sums += groups.sums(losses.squeeze(1), start=start)
            if needs_grad:
                probabilities.div_(total).scatter_add_(1, target, -torch.ones_like(target, dtype=torch.float32))
                grad_logits = probabilities.to(weight.dtype)
                torch.mm(grad_logits, weight, out=grad_hidden[start : start + rows])
                if start == 0:
                    grad_weight = grad_logits.t() @ chunk
                    if rows < len(hidden):
                        # Chunks add up in float32: bfloat16 would lose the small contributions of dozens of them.
                        grad_weight = grad_weight.float()
                elif weight.dtype == torch.float32:
                    grad_weight.addmm_(grad_logits.t(), chunk)
                else:
                    grad_weight.add_(grad_logits.t() @ chunk)
                del grad_logits
            del logits, probabilities  # or this chunk would live on while the next one is made
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        # Else backward is handed zeros for the outputs that have no gradient, as large as the head.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(grad_hidden, grad_weight, *([] if sums is None else [sums]))
        return loss, sums, grad_hidden, grad_weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # In place: a second gradient of the head's size would be gigabytes. A second backward raises.
        return grad_hidden * grads[0], grad_weight.mul_(grads[0]).to(ctx.weight_dtype), None, None
