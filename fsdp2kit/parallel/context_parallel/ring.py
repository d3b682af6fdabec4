"""Ring attention: keys and values travel round the ranks while each computes with what it holds (arXiv:2310.01889).

        step 0           step 1           step 2           step 3
    rank 0: q0·kv0   →   q0·kv3       →   q0·kv2       →   q0·kv1
    rank 1: q1·kv1   →   q1·kv0       →   q1·kv3       →   q1·kv2
    rank 2: q2·kv2   →   q2·kv1       →   q2·kv0       →   q2·kv3
    rank 3: q3·kv3   →   q3·kv2       →   q3·kv1       →   q3·kv0

kv0 is what rank 0 holds: with zigzag, a chunk from the head and one from the tail. While a block is worked on, the
next one arrives: beside its own keys and values, a rank never holds more than these two. In backward the blocks go
round once more, each with its float32 gradients a step behind it, which come home after cp steps.

Bytes sent per layer and rank, with n = B·s·G·(D + D) numbers in a rank's keys and values, e bytes each: forward
(cp − 1)·n·e, backward (cp − 1)·n·e + cp·n·4 (gradients add up in float32). cp = 1 sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp2kit.parallel.context_parallel.kernels import Partial, attend_backward, zeros_for
from fsdp2kit.parallel.context_parallel.segments import Segment

Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""


def ring_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], *, scale: float, group: ProcessGroup
) -> Partial:
    """Attention of this rank's queries ``[B, H, s, D]`` to every rank's keys and values ``[B, G, s, D]``."""
    partial = Partial(query)
    block = (key.contiguous(), value.contiguous())
    cp = dist.get_world_size(group)
    for step in range(cp):
        arrival = _pass_on(block, group) if step < cp - 1 else None
        partial.attend(query, *block, _of_step(segments, step), scale=scale)
        if arrival:
            block = arrival()
    return partial


def ring_backward(
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
    grad_query = zeros_for(query)
    block = (key.contiguous(), value.contiguous())
    cp = dist.get_world_size(group)
    follows: Callable[[], Pair] | None = None
    for step in range(cp):
        arrival = _pass_on(block, group) if step < cp - 1 else None
        grad_key, grad_value = zeros_for(key), zeros_for(value)
        grads = (grad_query, grad_key, grad_value)
        attend_backward(grads, grad_out, query, *block, out, lse, _of_step(segments, step), scale=scale)
        if follows:  # what the ranks before added to this block's gradients
            for mine, theirs in zip((grad_key, grad_value), follows(), strict=True):
                mine.add_(theirs)
        follows = _pass_on((grad_key, grad_value), group)
        if arrival:
            block = arrival()
    assert follows is not None, "a ring has at least one step"
    return (grad_query, *follows())


def _of_step(segments: Sequence[Segment], step: int) -> list[Segment]:
    return [segment for segment in segments if segment.step == step]


def _pass_on(pair: Pair, group: ProcessGroup) -> Callable[[], Pair]:
    """Start sending to the next rank and receiving from the one before; the result waits for what arrives."""
    cp, rank = dist.get_world_size(group), dist.get_rank(group)
    # Memory goes over the wire as it lies: both ends hold tensors of the same strides.
    received = (torch.empty_like(pair[0]), torch.empty_like(pair[1]))
    sends = [dist.P2POp(dist.isend, _flat(t), group=group, group_peer=(rank + 1) % cp) for t in pair]
    receives = [dist.P2POp(dist.irecv, _flat(t), group=group, group_peer=(rank - 1) % cp) for t in received]
    pending = dist.batch_isend_irecv([*sends, *receives])

    def wait() -> Pair:
        while pending:
            pending.pop().wait()  # and forgotten: a request keeps the block alive that it sent
        return received

    return wait


def _flat(tensor: Tensor) -> Tensor:
    """A view of the tensor's memory that is contiguous."""
    return tensor if tensor.is_contiguous() else tensor.transpose(1, 2)
