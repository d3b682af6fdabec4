"""All segments of one band in one kernel: torch's variable-length flash attention on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsdp2kit.parallel.context_parallel.pieces import merge
from fsdp2kit.parallel.context_parallel.segments import Segment
from fsdp2kit.torch_compat import cuda_flash_attention, cuda_flash_attention_backward


def is_usable(query: Tensor) -> bool:
    """Whether the kernel takes such queries: 16-bit, on CUDA, heads of at most 256 in steps of 8."""
    width = query.shape[-1]
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and width <= 256 and width % 8 == 0


def attend(
    out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], *, scale: float
) -> None:
    """Merge a block of keys into ``out`` and ``lse``, in place; see `kernels.Partial`."""
    for band in _bands(tuple(segments), query.shape[0], query.shape[2], key.shape[2], query.device):
        q, k, v = band.queries.of(query), band.keys.of(key), band.keys.of(value)
        part, part_lse = cuda_flash_attention(q, k, v, **band.bounds(), scale=scale)
        if band.queries.places is None:
            merge(_tokens(out), _tokens(lse), part, part_lse)
            continue
        so_far, lse_so_far = band.queries.of(out), band.queries.of(lse)
        merge(so_far, lse_so_far, part, part_lse)
        _tokens(out).index_copy_(0, band.queries.places, so_far)
        _tokens(lse).index_copy_(0, band.queries.places, lse_so_far)


def attend_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Sequence[Segment],
    *,
    scale: float,
) -> None:
    """Add a block's gradients to ``grads``, in place; see `kernels.attend_backward`."""
    for band in _bands(tuple(segments), query.shape[0], query.shape[2], key.shape[2], query.device):
        parts = cuda_flash_attention_backward(
            band.queries.of(grad_out),
            band.queries.of(query),
            band.keys.of(key),
            band.keys.of(value),
            band.queries.of(out),
            band.queries.of(lse),
            **band.bounds(),
            scale=scale,
        )
        for total, part, rows in zip(grads, parts, (band.queries, band.keys, band.keys), strict=True):
            if rows.places is None:
                _tokens(total).add_(part)
            else:
                _tokens(total).index_add_(0, rows.places, part.to(total.dtype))


class _Rows(NamedTuple):
    """One side of a band: the tokens of its segments, one segment after the other."""

    places: Tensor | None
    """``[n]`` int64 among all rows' tokens, flattened; None: all of them, in order."""
    borders: Tensor
    """``[segments + 1]`` int32."""
    longest: int

    def of(self, tensor: Tensor) -> Tensor:
        """``[n, H, …]`` of ``[B, H, s, …]``."""
        flat = _tokens(tensor)
        return flat if self.places is None else flat[self.places]


class _Band(NamedTuple):
    """Segments with the same bounds and no query in common."""

    queries: _Rows
    keys: _Rows
    left: int
    right: int

    def bounds(self) -> dict[str, Any]:
        """What the kernel wants to know beside the tensors."""
        return {
            "q_borders": self.queries.borders,
            "k_borders": self.keys.borders,
            "q_longest": self.queries.longest,
            "k_longest": self.keys.longest,
            "left": self.left,
            "right": self.right,
        }


@lru_cache(maxsize=16)
def _bands(
    segments: tuple[Segment, ...], rows: int, q_length: int, k_length: int, device: torch.device
) -> list[_Band]:
    """The segments of ``rows`` rows of ``q_length`` queries and ``k_length`` keys, by band.

    Every layer asks the same of one micro-batch, so the answers stay on the device for a while.
    """
    piles: list[list[Segment]] = []
    for segment in segments:
        for pile in piles:
            if (pile[0].left, pile[0].right) == (segment.left, segment.right) and not _meets_any(segment, pile):
                pile.append(segment)
                break
        else:
            piles.append([segment])
    found = []
    for pile in piles:
        pile.sort(key=lambda s: (s.row, s.q_start))
        queries = [range(s.row * q_length + s.q_start, s.row * q_length + s.q_stop) for s in pile]
        keys = [range(s.row * k_length + s.k_start, s.row * k_length + s.k_stop) for s in pile]
        sides = _rows(queries, rows * q_length, device), _rows(keys, rows * k_length, device)
        found.append(_Band(*sides, pile[0].left, pile[0].right))
    return found


def _meets_any(segment: Segment, pile: list[Segment]) -> bool:
    """Whether a query of ``segment`` is in the pile already: one kernel writes a query's result once."""
    return any(
        other.row == segment.row and other.q_start < segment.q_stop and segment.q_start < other.q_stop
        for other in pile
    )


def _rows(ranges: list[range], total: int, device: torch.device) -> _Rows:
    places = torch.cat([torch.arange(each.start, each.stop) for each in ranges])
    borders = torch.tensor([0, *map(len, ranges)]).cumsum(0).to(torch.int32)
    whole = torch.equal(places, torch.arange(total))
    return _Rows(None if whole else _to(places, device), _to(borders, device), max(map(len, ranges)))


def _to(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _tokens(tensor: Tensor) -> Tensor:
    """``[B·s, H, …]`` of ``[B, H, s, …]``, a view where tokens come first in memory."""
    return tensor.transpose(1, 2).flatten(0, 1)
