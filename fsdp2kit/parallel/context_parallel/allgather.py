"""Gathered keys and values, as Llama 3 was trained (arXiv:2407.21783, section 3.3.2).

    rank 0  q: chunks 0, 7         k, v: 0 7 │ 1 6 │ 2 5 │ 3 4   →   in order: 0 1 2 3 4 5 6 7
    rank 1  q: chunks 1, 6                └──── all-gather ───┘
    …

Each rank sees all keys at once, in the order of the sequence, and its own queries only; with zigzag chunks every
rank has the same work. Nothing gathered is kept for backward: it is gathered again, and the gradients of keys and
values go home by reduce-scatter.

Bytes sent per layer and rank, with n = B·s·G·(D + D) numbers in a rank's keys and values, e bytes each: forward
(cp − 1)·n·e, backward (cp − 1)·n·e + (cp − 1)·n·4 (gradients add up in float32).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp2kit.parallel.context_parallel.kernels import Partial, attend_backward, zeros_for
from fsdp2kit.parallel.context_parallel.layout import by_rank, in_order
from fsdp2kit.parallel.context_parallel.segments import Segment
from fsdp2kit.torch_compat import all_gather_single, reduce_scatter_single


def allgather_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], *, scale: float, group: ProcessGroup
) -> Partial:
    """Attention of this rank's queries ``[B, H, s, D]`` to every rank's keys and values ``[B, G, s, D]``."""
    partial = Partial(query)
    partial.attend(query, *_gather(key, value, group), segments, scale=scale)
    return partial


def allgather_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Sequence[Segment],
    *,
    scale: float,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 gradients of this rank's query, key and value."""
    keys, values = _gather(key, value, group)
    grads = (zeros_for(query), zeros_for(keys), zeros_for(values))
    attend_backward(grads, grad_out, query, keys, values, out, lse, segments, scale=scale)
    return (grads[0], *_scatter(*grads[1:], group))


def _gather(key: Tensor, value: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """``[B, G, cp·s, D]`` each, in the order of the sequence, in one all-gather."""
    cp = dist.get_world_size(group)
    mine = torch.stack([key, value]).movedim(3, 0).contiguous()  # [s, 2, B, G, D]
    gathered = mine.new_empty((cp * mine.shape[0], *mine.shape[1:]))
    all_gather_single(gathered, mine, group=group)
    keys, values = in_order(gathered, cp=cp, method="allgather").movedim(0, 3).unbind()
    return keys, values


def _scatter(grad_keys: Tensor, grad_values: Tensor, group: ProcessGroup) -> tuple[Tensor, Tensor]:
    """The sum over ranks of the gradients of this rank's own keys and values."""
    cp = dist.get_world_size(group)
    whole = by_rank(torch.stack([grad_keys, grad_values]).movedim(3, 0), cp=cp, method="allgather").contiguous()
    mine = whole.new_empty((whole.shape[0] // cp, *whole.shape[1:]))
    reduce_scatter_single(mine, whole, group=group)
    grad_key, grad_value = mine.movedim(0, 3).unbind()
    return grad_key, grad_value
