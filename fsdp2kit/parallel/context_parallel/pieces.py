"""Segments a piece at a time: torch's flash attention for the CPU, and plain operations where it does not serve."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp2kit.parallel.context_parallel.segments import Segment
from fsdp2kit.torch_compat import cpu_flash_attention, cpu_flash_attention_backward

TILE = 512
"""Queries at a time where a diagonal cuts a segment, so that no mask is larger than this times its keys."""


def attend(
    out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], *, scale: float
) -> None:
    """Merge a block of keys into ``out`` and ``lse``, in place; see `kernels.Partial`."""
    forward = cpu_flash_attention if query.device.type == "cpu" else plain_attention
    for piece in _pieces(segments):
        q, k, v = _cut(query, piece.q), _cut(key, piece.k), _cut(value, piece.k)
        part, part_lse = forward(q, k, v, causal=piece.causal, mask=piece.mask(q), scale=scale)
        merge(_cut(out, piece.q), _cut(lse, piece.q), part, part_lse)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take a partial result in, in place: ``[…, D]`` and ``[…]``."""
    merged = torch.logaddexp(lse, part_lse)
    out.mul_((lse - merged).exp().unsqueeze(-1)).add_(part * (part_lse - merged).exp().unsqueeze(-1))
    lse.copy_(merged)


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
    backward = cpu_flash_attention_backward if query.device.type == "cpu" else plain_attention_backward
    for piece in _pieces(segments):
        q, k, v = _cut(query, piece.q), _cut(key, piece.k), _cut(value, piece.k)
        final = (_cut(grad_out, piece.q), q, k, v, _cut(out, piece.q), _cut(lse, piece.q))
        parts = backward(*final, causal=piece.causal, mask=piece.mask(q), scale=scale)
        for total, part, places in zip(grads, parts, (piece.q, piece.k, piece.k), strict=True):
            _cut(total, places).add_(part)


class _Places(NamedTuple):
    row: int
    start: int
    stop: int


def _cut(tensor: Tensor, places: _Places) -> Tensor:
    """``[1, H, n, …]`` of ``[B, H, s, …]``: a view."""
    return tensor[places.row : places.row + 1, :, places.start : places.stop]


class _Piece(NamedTuple):
    """A part of a segment that one kernel call does: full, causal over a square, or masked."""

    q: _Places
    k: _Places
    causal: bool = False
    left: int = -1
    right: int = -1

    def mask(self, query: Tensor) -> Tensor | None:
        """``[n, m]`` of 0 and −inf in the query's dtype, or None where no diagonal cuts it."""
        if self.left < 0 and self.right < 0:
            return None
        queries, keys = self.q.stop - self.q.start, self.k.stop - self.k.start
        # How far each key lies past its query's own place.
        past = torch.arange(keys, device=query.device) - torch.arange(queries, device=query.device)[:, None]
        past -= keys - queries
        hidden = torch.zeros_like(past, dtype=torch.bool)
        if self.right >= 0:
            hidden |= past > self.right
        if self.left >= 0:
            hidden |= past < -self.left
        return torch.zeros_like(past, dtype=query.dtype).masked_fill_(hidden, float("-inf"))


def _pieces(segments: Sequence[Segment]) -> Iterator[_Piece]:
    for s in segments:
        q, k = _Places(s.row, s.q_start, s.q_stop), _Places(s.row, s.k_start, s.k_stop)
        if s.is_full:
            yield _Piece(q, k)
        elif s.left < 0 and s.right == 0 and s.q_stop - s.q_start <= s.k_stop - s.k_start:
            # Causal: all keys before the square at the end are seen by all, and the kernel knows a causal square.
            corner = s.k_stop - (s.q_stop - s.q_start)
            if corner > s.k_start:
                yield _Piece(q, k._replace(stop=corner))
            yield _Piece(q, k._replace(start=corner), causal=True)
        else:
            yield from _tiles(s)


def _tiles(s: Segment) -> Iterator[_Piece]:
    """Rows of at most `TILE` queries, each with no more keys than its band reaches."""
    shift = s.k_stop - s.q_stop  # from a query's place to that of the key on its diagonal
    for start in range(s.q_start, s.q_stop, TILE):
        stop = min(start + TILE, s.q_stop)
        first, last = s.k_start, s.k_stop
        if s.left >= 0:
            first = max(first, start + shift - s.left)
        if s.right >= 0:
            last = min(last, stop + shift + s.right)
        # A band counts from the corner where queries and keys end, and both ends have moved.
        moved = (last - stop) - shift
        yield _Piece(
            _Places(s.row, start, stop),
            _Places(s.row, first, last),
            left=-1 if s.left < 0 else s.left + moved,
            right=-1 if s.right < 0 else s.right - moved,
        )


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[1, H, n, D]`` and log-sum-exp ``[1, H, n]``, float32, in plain tensor operations."""
    scores = _scores(query, key, causal=causal, mask=mask, scale=scale)
    lse = scores.logsumexp(-1)
    return _grouped_matmul((scores - lse.unsqueeze(-1)).exp(), value.float()), lse


def plain_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, float32, given the final output and log-sum-exp."""
    grad_out, query, key, value = grad_out.float(), query.float(), key.float(), value.float()
    weights = (_scores(query, key, causal=causal, mask=mask, scale=scale) - lse.unsqueeze(-1)).exp()
    delta = (grad_out * out.float()).sum(-1, keepdim=True)
    grad_scores = weights * (_grouped_matmul(grad_out, value.transpose(-1, -2)) - delta) * scale
    groups = key.shape[1]
    return (
        _grouped_matmul(grad_scores, key),
        _sum_groups(grad_scores.transpose(-1, -2) @ query, groups),
        _sum_groups(weights.transpose(-1, -2) @ grad_out, groups),
    )


def _scores(query: Tensor, key: Tensor, *, causal: bool, mask: Tensor | None, scale: float) -> Tensor:
    scores = _grouped_matmul(query.float(), key.float().transpose(-1, -2)) * scale
    if causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    return scores if mask is None else scores + mask


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """``[1, H, a, b] @ [1, G, b, c]``, each of the G shared by H/G neighbours."""
    return left @ right.repeat_interleave(left.shape[1] // right.shape[1], dim=1)


def _sum_groups(tensor: Tensor, groups: int) -> Tensor:
    return tensor.unflatten(1, (groups, -1)).sum(2)
