"""The all-to-all between sequence shards and heads, for any number of heads.

With H query heads, G key/value heads and cp ranks, rank r attends with query heads [r·H/cp, (r+1)·H/cp), rounded
so that the first H mod cp ranks have one more, and receives just the key/value heads that those use: a key/value
head is sent to two ranks only where its group of query heads is cut.

Bytes sent per layer and rank in forward, with B·s tokens local to a rank, head width D and e bytes an element:
each rank keeps its own part, so q, k, v cost B·s·D·e·(Σ over other ranks r of H_r + 2·G_r), and the output
B·s·D·e·(cp − 1)·H_own. Backward returns what came: B·s·D·e·(cp − 1)·(H_own + 2·G_own) for the gradients of q, k
and v, and B·s·D·e·(Σ over other ranks r of H_r) for the output's. The same, where heads deal out evenly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class HeadShare:
    """The heads that one rank attends with, as half-open ranges, and how its queries map onto its keys."""

    query: range
    key: range
    key_of_query: tuple[int, ...]
    """For each local query head the local key/value head it uses."""

    @property
    def groups(self) -> int | None:
        """Query heads per key/value head where every local one has the same number in order, else None."""
        if len(self.query) % len(self.key):
            return None
        groups = len(self.query) // len(self.key)
        even = self.key_of_query == tuple(head // groups for head in range(len(self.query)))
        return groups if even else None


def share_heads(num_heads: int, num_kv_heads: int, cp: int) -> tuple[HeadShare, ...]:
    """Deal query heads out over ``cp`` ranks as evenly as they go, each with the key/value heads it needs.

    Raises:
        ValueError: fewer query heads than ranks, or query heads not a multiple of key/value heads.
    """
    if num_heads < cp or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query and {num_kv_heads} key/value heads cannot be dealt out over cp = {cp}")
    group = num_heads // num_kv_heads
    base, extra = divmod(num_heads, cp)
    shares, start = [], 0
    for rank in range(cp):
        query = range(start, start + base + (rank < extra))
        key = range(query.start // group, (query.stop - 1) // group + 1)
        shares.append(HeadShare(query, key, tuple(head // group - key.start for head in query)))
        start = query.stop
    return tuple(shares)


def sequence_to_heads(
    query: Tensor, key: Tensor, value: Tensor, *, shares: Sequence[HeadShare], group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """From all heads of a sequence shard to a share of the heads over the whole sequence, in one all-to-all.

    Args:
        query: ``[B, H, s, D]``, this rank's shard of the sequence (shards are contiguous and in rank order).
        key: ``[B, G, s, D]``.
        value: ``[B, G, s, Dv]``.

    Returns:
        ``[B, H_r, cp·s, D]``, ``[B, G_r, cp·s, D]`` and ``[B, G_r, cp·s, Dv]``.
    """
    mine = shares[dist.get_rank(group)]
    outgoing = [
        _flatten([query[:, _part(share.query)], key[:, _part(share.key)], value[:, _part(share.key)]])
        for share in shares
    ]
    batch, _, length, _ = query.shape
    shapes = [
        (batch, len(mine.query), length, query.shape[-1]),
        (batch, len(mine.key), length, key.shape[-1]),
        (batch, len(mine.key), length, value.shape[-1]),
    ]
    size = sum(torch.Size(shape).numel() for shape in shapes)
    received = _exchange(outgoing, [size] * len(shares), group)
    pieces = [_unflatten(chunk, shapes) for chunk in received]
    query, key, value = (torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
    return query, key, value


def heads_to_sequence(output: Tensor, *, shares: Sequence[HeadShare], group: ProcessGroup) -> Tensor:
    """The way back for attention's output: ``[B, cp·s, H_r, Dv]`` to ``[B, s, H, Dv]``, in one all-to-all."""
    batch, full_length, _, width = output.shape
    length = full_length // len(shares)
    outgoing = [part.reshape(-1) for part in output.split(length, dim=1)]
    shapes = [(batch, length, len(share.query), width) for share in shares]
    received = _exchange(outgoing, [torch.Size(shape).numel() for shape in shapes], group)
    return torch.cat([chunk.view(shape) for chunk, shape in zip(received, shapes, strict=True)], dim=2)


def _part(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _flatten(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _unflatten(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    pieces = flat.split([torch.Size(shape).numel() for shape in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _exchange(outgoing: list[Tensor], incoming_sizes: list[int], group: ProcessGroup) -> list[Tensor]:
    sizes = [chunk.numel() for chunk in outgoing]
    return list(_AllToAll.apply(torch.cat(outgoing), sizes, incoming_sizes, group).split(incoming_sizes))


class _AllToAll(torch.autograd.Function):
    """Uneven all-to-all of a flat tensor; its transpose is the same exchange with the sizes swapped."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        result = flat.new_empty(sum(receive))
        dist.all_to_all_single(result, flat.contiguous(), receive, send, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        result = grads[0].new_empty(sum(ctx.send))
        dist.all_to_all_single(result, grads[0].contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return result, None, None, None
