"""What ranks send each other for attention: keys and values (ring, allgather) or heads (Ulysses).

The package's docstring draws all three. What a rank sends per layer, with B rows of s tokens on each rank, G key/value
heads of width D, n = B·s·G·2·D numbers in a rank's keys and values, and e bytes a number:

* Ring: forward (cp − 1)·n·e; backward (cp − 1)·n·e + cp·n·4, as gradients add up in float32.
* Allgather: forward (cp − 1)·n·e; backward (cp − 1)·n·e + (cp − 1)·n·4.
* Ulysses, where rank r attends with H_r query heads and G_r key/value heads: forward
  B·s·D·e·(Σ over other ranks r of H_r + 2·G_r) for queries, keys and values, and B·s·D·e·(cp − 1)·H_own for the
  output; backward B·s·D·e·(cp − 1)·(H_own + 2·G_own) for their gradients, and
  B·s·D·e·(Σ over other ranks r of H_r) for the output's. Both are equal where heads divide evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fsdp2kit.parallel.context_parallel.layout import gather_sequence, reduce_scatter, tokens_first
from fsdp2kit.torch_compat import group_named

Pair = tuple[Tensor, Tensor]
"""Keys and values ``[B, G, m, D]``, or their gradients."""


def build_exchange(name: str, group: str) -> KeyExchange:
    """The exchange "ring" or "allgather" over the process group of that name; "none": all keys are here."""
    if name == "none":
        return KeyExchange()
    return {"ring": Ring, "allgather": AllGather}[name](group_named(group))


class KeyExchange:
    """How other ranks' keys and values reach a rank, and their gradients go back. The base class: no exchange.

    For one forward or one backward pass. In backward each visit calls `return_gradients`; `own_gradients` comes last.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group: Any = group
        self._grads: Pair | None = None

    def visit_blocks(self, own: Pair, visit: Callable[[int, Tensor, Tensor], None]) -> None:
        """Call ``visit(step, key, value)`` for each block of keys and values, starting from this rank's own.

        A call and not a generator: a loop over one would keep a block alive while the next but one is allocated.
        """
        visit(0, *own)

    def return_gradients(self, grads: Pair) -> None:
        """Take this rank's gradients of the block that is being visited."""
        self._grads = grads

    def own_gradients(self) -> Pair:
        """The sum over ranks of the gradients of this rank's own keys and values."""
        assert self._grads is not None, "there is at least one block"
        return self._grads


class Ring(KeyExchange):
    """Keys and values go round the ranks (arXiv:2310.01889).

    The next block arrives while the current one is worked on: beside its own keys and values, a rank holds at most
    these two. In backward the blocks go round once more, and the gradients of each follow it one step later; after cp
    steps they are back at the block's owner. A group of one rank sends nothing.
    """

    _arriving: Callable[[], Pair] | None = None
    """Waits for the gradients that the ranks before have of the block that is worked on next."""

    def visit_blocks(self, own: Pair, visit: Callable[[int, Tensor, Tensor], None]) -> None:
        """The rank's own block, then that of the rank before it, and so on."""
        key, value = own
        block = (tokens_first(key), tokens_first(value))
        cp = self.group.size()
        for step in range(cp):
            arriving = self._pass_on(block) if step < cp - 1 else None
            visit(step, *block)
            if arriving:
                block = arriving()

    def return_gradients(self, grads: Pair) -> None:
        """Add the gradients that earlier ranks found for this block, and pass the float32 sums on."""
        grads = grads[0].float(), grads[1].float()
        if self._arriving:
            for mine, theirs in zip(grads, self._arriving(), strict=True):
                mine.add_(theirs)
        self._arriving = self._pass_on(grads)

    def own_gradients(self) -> Pair:
        """What arrives after the last step."""
        assert self._arriving is not None, "a ring has at least one step"
        return self._arriving()

    def _pass_on(self, pair: Pair) -> Callable[[], Pair]:
        """Start sending to the next rank and receiving from the one before; the result waits for what arrives."""
        cp = self.group.size()
        rank = self.group.rank()
        # Memory goes over the wire as it lies: both ends hold tensors of the same strides.
        received = (torch.empty_like(pair[0]), torch.empty_like(pair[1]))
        sends = [dist.P2POp(dist.isend, _flat(t), group=self.group, group_peer=(rank + 1) % cp) for t in pair]
        receives = [dist.P2POp(dist.irecv, _flat(t), group=self.group, group_peer=(rank - 1) % cp) for t in received]
        pending = dist.batch_isend_irecv([*sends, *receives])

        def wait() -> Pair:
            while pending:
                pending.pop().wait()  # and dropped: a request keeps the block alive that it sent
            return received

        return wait


def _flat(tensor: Tensor) -> Tensor:
    """A view of the tensor's memory that is contiguous."""
    return tensor if tensor.is_contiguous() else tensor.transpose(1, 2)


class AllGather(KeyExchange):
    """All keys and values are gathered at once, as Llama 3 was trained (arXiv:2407.21783, section 3.3.2).

    They come as one block in the order of the sequence. Nothing gathered is kept for backward: it is gathered again.
    """

    def visit_blocks(self, own: Pair, visit: Callable[[int, Tensor, Tensor], None]) -> None:
        """One block, ``[B, G, cp·s, D]``, of one all-gather."""
        visit(0, *gather_sequence(torch.stack(own), group=self.group, method="allgather", dim=3))

    def own_gradients(self) -> Pair:
        """The rank's part of one reduce-scatter."""
        cp = self.group.size()
        parts = torch.stack([gradient.float() for gradient in super().own_gradients()]).movedim(3, 0).chunk(2 * cp)
        # From the order of the sequence to one rank's two chunks after the other's.
        whole = torch.cat([part for rank in range(cp) for part in (parts[rank], parts[-1 - rank])])
        grad_key, grad_value = reduce_scatter(whole, self.group).movedim(0, 3)
        return grad_key, grad_value


def bytes_sent(
    method: str, *, heads: int, key_heads: int, width: int, tokens: int, cp: int, item: int, rank: int = 0
) -> tuple[int, int]:
    """Bytes that a rank sends for one layer in forward and in backward, by the formulae at the top of this file.

    Args:
        tokens: B·s, of this rank.
        item: bytes of an element of keys and values.
    """
    if method == "ulysses":
        shares = share_heads(heads, key_heads, cp)
        mine = shares[rank]
        others = [share for number, share in enumerate(shares) if number != rank]
        there = sum(len(share.query) + 2 * len(share.key) for share in others) + (cp - 1) * len(mine.query)
        back = (cp - 1) * (len(mine.query) + 2 * len(mine.key)) + sum(len(share.query) for share in others)
        return tokens * width * item * there, tokens * width * item * back
    numbers = tokens * key_heads * 2 * width
    gradients = (cp if method == "ring" else cp - 1) * numbers * 4
    return (cp - 1) * numbers * item, (cp - 1) * numbers * item + gradients


@dataclass(frozen=True)
class HeadShare:
    """The heads that one rank attends with under Ulysses, and which keys its queries use.

    Rank r has query heads [r·H/cp, (r+1)·H/cp), rounded so that the first H mod cp ranks have one more, and just the
    key/value heads that those use: two ranks get the same key/value head only where its group of query heads is cut.
    """

    query: range
    key: range
    key_of_query: tuple[int, ...]
    """For each local query head the local key/value head it uses."""

    @property
    def groups(self) -> int | None:
        """Query heads per key/value head where every local one has the same number in order, else None."""
        groups = len(self.query) // len(self.key)
        even = self.key_of_query == tuple(head // groups for head in range(len(self.query)))
        return groups if even else None

    def of(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This share of queries ``[B, H, …]`` and of keys and values ``[B, G, …]``: views."""
        q, k = (slice(heads.start, heads.stop) for heads in (self.query, self.key))
        return query[:, q], key[:, k], value[:, k]


def share_heads(num_heads: int, num_kv_heads: int, cp: int) -> tuple[HeadShare, ...]:
    """Divide query heads over ``cp`` ranks as evenly as they go, each with the key/value heads it needs."""
    if num_heads < cp or num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query and {num_kv_heads} key/value heads cannot be divided over cp = {cp}")
    group = num_heads // num_kv_heads
    base, extra = divmod(num_heads, cp)
    shares = []
    start = 0
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
    outgoing = [torch.cat([part.reshape(-1) for part in share.of(query, key, value)]) for share in shares]
    shapes = [part.shape for part in shares[dist.get_rank(group)].of(query, key, value)]  # from every rank
    sizes = [shape.numel() for shape in shapes]
    received = [chunk.split(sizes) for chunk in all_to_all(outgoing, [sum(sizes)] * len(shares), group)]
    query, key, value = (
        torch.cat([flat.view(shape) for flat in flats], dim=2)
        for shape, flats in zip(shapes, zip(*received, strict=True), strict=True)
    )
    return query, key, value


def heads_to_sequence(output: Tensor, *, shares: Sequence[HeadShare], group: ProcessGroup) -> Tensor:
    """The way back for attention's output: ``[B, cp·s, H_r, Dv]`` to ``[B, s, H, Dv]``, in one all-to-all."""
    batch, full_length, _, width = output.shape
    length = full_length // len(shares)
    outgoing = [part.reshape(-1) for part in output.split(length, dim=1)]
    shapes = [(batch, length, len(share.query), width) for share in shares]
    received = all_to_all(outgoing, [torch.Size(shape).numel() for shape in shapes], group)
    return torch.cat([chunk.view(shape) for chunk, shape in zip(received, shapes, strict=True)], dim=2)


def all_to_all(outgoing: list[Tensor], incoming_sizes: list[int], group: ProcessGroup) -> Sequence[Tensor]:
    """One flat tensor to each rank, and one of the given size from each."""
    sizes = [chunk.numel() for chunk in outgoing]
    return _AllToAll.apply(torch.cat(outgoing), sizes, incoming_sizes, group).split(incoming_sizes)


class _AllToAll(torch.autograd.Function):
    """Uneven all-to-all of a flat tensor; its transpose is the same exchange with the sizes swapped."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, send: list[int], receive: list[int], group: ProcessGroup) -> Tensor:
        ctx.send = send
        ctx.receive = receive
        ctx.group = group
        result = flat.new_empty(sum(receive))
        dist.all_to_all_single(result, flat.contiguous(), receive, send, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        result = grads[0].new_empty(sum(ctx.send))
        dist.all_to_all_single(result, grads[0].contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return result, None, None, None
