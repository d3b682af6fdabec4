"""Which rank gets which tokens' vectors, and the exchange there and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2kit.torch_compat import group_named


@dataclass(frozen=True)
class Routing:
    """The way of a layer's (token, expert) pairs to the ranks that hold the experts."""

    order: Tensor
    """``[T·K]``: the pairs sorted by expert, by their numbers."""
    counts: Tensor
    """``[ranks, E]`` on the host: the pairs that each rank sends to each of this rank's experts."""
    sent: list[int]
    """How many pairs go to each rank."""
    group: Any

    @property
    def sizes(self) -> list[int]:
        """Pairs of each of this rank's experts."""
        return self.counts.sum(0).tolist()

    @cached_property
    def ends(self) -> Tensor:
        """``[E]``: where the rows of each of this rank's experts end, on the device."""
        return self.counts.sum(0).cumsum(0, dtype=torch.int32).to(self.order.device)

    def to_experts(self, pairs: Tensor) -> Tensor:
        """From sorted pairs ``[T·K, …]`` to the rows of this rank's experts ``[R, …]``, sorted by expert."""
        if self.group.size() == 1:
            return pairs
        return self._exchange(pairs, self.sent, self._received)[self._by_expert]

    def to_tokens(self, rows: Tensor) -> Tensor:
        """From rows of this rank's experts ``[R, …]`` back to its pairs ``[T·K, …]``, in the order of its tokens."""
        sorted_pairs = rows
        if self.group.size() > 1:
            ordered = torch.empty_like(rows)
            ordered[self._by_expert] = rows
            sorted_pairs = self._exchange(ordered, self._received, self.sent)
        pairs = torch.empty_like(sorted_pairs)
        pairs[self.order] = sorted_pairs
        return pairs

    @property
    def _received(self) -> list[int]:
        return self.counts.sum(1).tolist()

    @cached_property
    def _by_expert(self) -> Tensor:
        """``[R]``: received rows, which come sender by sender, sorted by expert."""
        experts = torch.arange(self.counts.shape[1]).repeat(self.counts.shape[0])
        return experts.repeat_interleave(self.counts.flatten()).argsort(stable=True).to(self.order.device)

    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), list(received), list(sent), group=self.group)
        return out


def plan_exchange(index: Tensor, *, num_experts: int, group: str, counts: Tensor | None = None) -> Routing:
    """The routing of ``index`` ``[T, K]``. Collective; the host waits for the device once.

    Args:
        counts: of the routing made in forward; None: ask the other ranks.
    """
    ranks = group_named(group)
    experts = index.reshape(-1)
    order = experts.argsort(stable=True)
    mine = torch.bincount(experts, minlength=num_experts)
    owned = shares(num_experts, ranks.size())
    if counts is None:
        own = owned[ranks.rank()]
        found = mine.new_empty(ranks.size() * own)
        if ranks.size() == 1:
            found = mine
        else:
            dist.all_to_all_single(found, mine, [own] * ranks.size(), owned, group=ranks)
        counts = found.view(ranks.size(), own).cpu()
    sent = [int(part.sum()) for part in mine.cpu().split(owned)]
    return Routing(order, counts, sent, ranks)


def shares(num_experts: int, ranks: int) -> list[int]:
    """How many experts each rank holds; neighbours, as `torch.chunk` cuts them."""
    most = -(-num_experts // ranks)
    return [max(0, min(most, num_experts - rank * most)) for rank in range(ranks)]
