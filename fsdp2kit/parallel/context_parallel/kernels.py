"""Attention over segments, block by block; the blocks' results are merged by their log-sum-exps.

Over one block of keys, query i's scores s give o = Σ exp(s − l)·v with l = log Σ exp(s). Over two blocks it is

    l = logaddexp(l₁, l₂),     o = exp(l₁ − l)·o₁ + exp(l₂ − l)·o₂

so blocks may come in any order (arXiv:2205.14135). Backward needs no merging: with the final l and o, each block's
probabilities exp(s − l) are those of the whole, and its gradients just add up (arXiv:2310.01889).

A sink is one more logit z of every query of a head, without a value: with l' = logaddexp(l, z) the output becomes
o' = exp(l − l')·o. It comes last, and the formulae of backward stand as they are, of o' and l': the probabilities are
exp(s − l'), and the sink, whose probability is exp(z − l') and whose value is zero, adds nothing to Σ p·dp = do'·o'.

A block is computed by one of three kernels: on CUDA by torch's variable-length flash attention, one call for all
segments with the same diagonals; on the CPU by torch's flash attention for the CPU, one tile of a segment a call; by
plain tensor operations, tile by tile as well, where CUDA's kernel does not take the dtype or the width of the heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fsdp2kit.job.distributed import to_device
from fsdp2kit.parallel.context_parallel.segments import Segment
from fsdp2kit.torch_compat import (
    BackwardInputs,
    VarlenBounds,
    cpu_flash_attention,
    cpu_flash_attention_backward,
    cuda_flash_attention,
    cuda_flash_attention_backward,
)

TILE = 512
"""Queries at a time where a mask or scores are formed, so that these are not larger than this times the keys."""

Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of query ``[B, H, s, D]``, key and value ``[B, G, m, D]``; tokens are the outermost dimension in memory.
Float32, or 16 bits where one kernel call made all of them."""

Totals = tuple[Tensor | None, Tensor | None, Tensor | None]
"""`Gradients` to add to; None: none so far."""


class RunningAttention:
    """Attention's output over the keys seen so far, and its log-sum-exp (float32), tokens first in memory.

    The output adds up in float32. Where one kernel call gives all of it, its result is used as it is: adding it to
    zeros would take as long as the attention of short documents.
    """

    def __init__(self, query: Tensor, *, scale: float) -> None:
        """For ``query`` ``[B, H, s, D]``, before any key."""
        self.query = query
        self.scale = scale
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def out(self) -> Tensor:
        """``[B, H, s, D]``."""
        return (self._found or self.totals())[0]

    @property
    def lse(self) -> Tensor:
        """``[B, H, s]``."""
        return (self._found or self.totals())[1]

    def totals(self) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp, both float32, to be added to in place."""
        if self._found is None:
            batch, heads, length, _ = self.query.shape
            lse = self.query.new_full((batch, length, heads), float("-inf"), dtype=torch.float32)
            self._found = zeros_for(self.query), lse.transpose(1, 2)
        out, lse = self._found
        self._found = out.float(), lse
        return self._found

    def attend(self, key: Tensor, value: Tensor, segments: Sequence[Segment]) -> None:
        """Add a block of keys and values ``[B, G, m, D]`` (H a multiple of G), which ``segments`` index."""
        attend = self._attend_varlen if varlen_is_usable(self.query) else self._attend_tiles
        attend(key, value, segments)

    def add_sinks(self, sinks: Tensor) -> None:
        """Count one more logit of each head, ``[H]``, in; after all keys."""
        lse = torch.logaddexp(self.lse, sinks.float()[:, None])
        self._found = self.out.mul_((self.lse - lse).exp().unsqueeze(-1)), lse

    def _attend_tiles(self, key: Tensor, value: Tensor, segments: Sequence[Segment]) -> None:
        """One kernel call per tile: torch's own on the CPU, plain operations elsewhere."""
        forward = cpu_flash_attention if key.device.type == "cpu" else plain_attention
        out, lse = self.totals()
        for tile in _tiles(segments, is_fused=forward is not plain_attention):
            q = tile.queries_of(self.query)
            k = tile.keys_of(key)
            v = tile.keys_of(value)
            part = forward(q, k, v, causal=tile.is_causal_square, mask=_mask(tile, q), scale=self.scale)
            merge(tile.queries_of(out), tile.queries_of(lse), *part)

    def _attend_varlen(self, key: Tensor, value: Tensor, segments: Sequence[Segment]) -> None:
        """All segments with the same diagonals in one kernel call, on CUDA."""
        for call in _varlen_calls(tuple(segments), self.query.shape, key.shape, key.device):
            q = call.queries_of(self.query)
            k = call.keys_of(key)
            v = call.keys_of(value)
            part = cuda_flash_attention(q, k, v, call.bounds, scale=self.scale)
            if call.queries is None and self._found is None:
                self._found = _heads_first(part[0], self.query), _heads_first(part[1], self.query)
                continue
            total_out, total_lse = self.totals()
            out = call.queries_of(total_out)
            lse = call.queries_of(total_lse)
            merge(out, lse, *part)
            if call.queries is not None:  # then these are copies
                _tokens(total_out).index_copy_(0, call.queries, out)
                _tokens(total_lse).index_copy_(0, call.queries, lse)


def attend_backward(totals: Totals, inputs: BackwardInputs, segments: Sequence[Segment], *, scale: float) -> Gradients:
    """The gradients of query, key and value with a block's part added, some of them in place.

    Args:
        inputs: key and value of the block, ``[B, G, m, D]``; all else is of this rank's queries, ``[B, H, s, …]``.
    """
    backward = _backward_varlen if varlen_is_usable(inputs.query) else _backward_tiles
    return backward(totals, inputs, segments, scale=scale)


def sinks_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """The gradient of ``sinks`` ``[H]``: −Σ p·(do·o) over these queries, with p the probabilities of the sinks.

    Args:
        grad_out, out: ``[B, H, s, D]``; lse: ``[B, H, s]``, which counts the sinks.
    """
    weight = (sinks.float()[:, None] - lse).exp()
    return -(weight * (grad_out.float() * out.float()).sum(-1)).sum((0, 2)).to(sinks.dtype)


def zeros_for(tensor: Tensor) -> Tensor:
    """Float32 zeros to add gradients of ``tensor`` ``[B, H, s, D]`` up in, tokens first in memory."""
    return torch.zeros_like(
        tensor.transpose(1, 2), dtype=torch.float32, memory_format=torch.contiguous_format
    ).transpose(1, 2)


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the result over further keys into ``out`` ``[…, D]`` and ``lse`` ``[…]``, in place."""
    merged = torch.logaddexp(lse, part_lse)
    out.mul_((lse - merged).exp().unsqueeze(-1)).add_(part * (part_lse - merged).exp().unsqueeze(-1))
    lse.copy_(merged)


def _backward_tiles(totals: Totals, inputs: BackwardInputs, segments: Sequence[Segment], *, scale: float) -> Gradients:
    grads = _begun(totals, inputs)
    backward = cpu_flash_attention_backward if inputs.key.device.type == "cpu" else plain_attention_backward
    for tile in _tiles(segments, is_fused=backward is not plain_attention_backward):
        of_tile = _inputs_of(tile, inputs)
        mask = _mask(tile, of_tile.query)
        parts = backward(of_tile, causal=tile.is_causal_square, mask=mask, scale=scale)
        for total, part, of in zip(grads, parts, (tile.queries_of, tile.keys_of, tile.keys_of), strict=True):
            of(total).add_(part)
    return grads


def _begun(totals: Totals, inputs: BackwardInputs) -> Gradients:
    """The totals, zeros where there are none so far."""
    pairs = zip(totals, (inputs.query, inputs.key, inputs.value), strict=True)
    query, key, value = (zeros_for(of) if total is None else total for total, of in pairs)
    return query, key, value


def _inputs_of(part: Segment | _VarlenCall, inputs: BackwardInputs) -> BackwardInputs:
    """What one kernel call is given of a block's inputs."""
    grad_out, query, key, value, out, lse = inputs
    q = part.queries_of
    k = part.keys_of
    return BackwardInputs(q(grad_out), q(query), k(key), k(value), q(out), q(lse))


def _tiles(segments: Sequence[Segment], *, is_fused: bool) -> Iterator[Segment]:
    """The segments in parts that one kernel call computes: full, a causal square, or small enough for a mask.

    Args:
        is_fused: whether the kernel forms no scores. If it forms them, every part is small.
    """
    for s in segments:
        if not is_fused:
            yield from _masked_tiles(s)
        elif s.left < 0 and s.right == 0:
            # Causal: all queries see the keys before the square at the end, and the kernel knows a causal square.
            corner = s.k_stop - (s.q_stop - s.q_start)
            if corner > s.k_start:
                yield s._replace(k_stop=corner, right=-1)
            yield s._replace(k_start=corner)
        elif s.is_full:
            yield s
        else:
            yield from _masked_tiles(s)


def _masked_tiles(s: Segment) -> Iterator[Segment]:
    """At most `TILE` queries each, with no more keys than these see."""
    shift = s.k_stop - s.q_stop  # from a query's index to that of the key on its diagonal
    for start in range(s.q_start, s.q_stop, TILE):
        stop = min(start + TILE, s.q_stop)
        first = s.k_start
        last = s.k_stop
        if s.left >= 0:
            first = max(first, start + shift - s.left)
        if s.right >= 0:
            last = min(last, stop + shift + s.right)
        # Bounds count from the corner where queries and keys end, and both ends have moved.
        moved = (last - stop) - shift
        left = -1 if s.left < 0 else s.left + moved
        right = -1 if s.right < 0 else s.right - moved
        yield Segment(s.step, s.row, start, stop, first, last, left, right)


def _mask(tile: Segment, query: Tensor) -> Tensor | None:
    """``[n, m]`` of 0 and −inf in the query's dtype, or None for a tile that needs none."""
    if tile.is_full or tile.is_causal_square:
        return None
    queries = tile.q_stop - tile.q_start
    keys = tile.k_stop - tile.k_start
    # How far each key lies past its query's diagonal.
    past = torch.arange(keys, device=query.device) - torch.arange(queries, device=query.device)[:, None]
    past -= keys - queries
    hidden = torch.zeros_like(past, dtype=torch.bool)
    if tile.right >= 0:
        hidden |= past > tile.right
    if tile.left >= 0:
        hidden |= past < -tile.left
    return torch.zeros_like(past, dtype=query.dtype).masked_fill_(hidden, float("-inf"))


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[1, H, n, D]`` and log-sum-exp ``[1, H, n]``, float32, in plain tensor operations."""
    scores = _scores(query, key, causal=causal, mask=mask, scale=scale)
    lse = scores.logsumexp(-1)
    return _grouped_matmul((scores - lse.unsqueeze(-1)).exp(), value.float()), lse


def plain_attention_backward(
    inputs: BackwardInputs, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, float32, given the final output and log-sum-exp."""
    grad_out, query, key, value, out, lse = (tensor.float() for tensor in inputs)
    weights = (_scores(query, key, causal=causal, mask=mask, scale=scale) - lse.unsqueeze(-1)).exp()
    delta = (grad_out * out).sum(-1, keepdim=True)
    grad_scores = weights * (_grouped_matmul(grad_out, value.transpose(-1, -2)) - delta) * scale
    groups = key.shape[1]
    return (
        _grouped_matmul(grad_scores, key),
        (grad_scores.transpose(-1, -2) @ query).unflatten(1, (groups, -1)).sum(2),
        (weights.transpose(-1, -2) @ grad_out).unflatten(1, (groups, -1)).sum(2),
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


def varlen_is_usable(query: Tensor) -> bool:
    """Whether CUDA's kernel takes such queries: 16-bit, on CUDA, of a width that it has."""
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and takes_width(query.shape[-1])


def takes_width(width: int) -> bool:
    """Whether CUDA's kernel takes heads of that width: at most 256, in steps of 8."""
    return width <= 256 and width % 8 == 0


def _backward_varlen(
    totals: Totals, inputs: BackwardInputs, segments: Sequence[Segment], *, scale: float
) -> Gradients:
    of = inputs.query, inputs.key, inputs.value
    for call in _varlen_calls(tuple(segments), inputs.query.shape, inputs.key.shape, inputs.key.device):
        parts = cuda_flash_attention_backward(_inputs_of(call, inputs), call.bounds, scale=scale)
        query, key, value = map(_added, totals, parts, (call.queries, call.keys, call.keys), of)
        totals = query, key, value
    return _begun(totals, inputs)


def _added(total: Tensor | None, part: Tensor, index: Tensor | None, of: Tensor) -> Tensor:
    """The gradient of ``of`` with a kernel call's ``part`` of it, ``[n, H, D]`` at ``index``, added."""
    if total is None and index is None:
        return _heads_first(part, of)
    total = zeros_for(of) if total is None else total.float()
    if index is None:
        _tokens(total).add_(part)
    else:
        _tokens(total).index_add_(0, index, part.to(total.dtype))
    return total


class _VarlenCall(NamedTuple):
    """Segments that one kernel call computes: they have the same bounds, and no query in common."""

    queries: Tensor | None
    """``[n]`` int64: the segments' queries, one segment after the other, by their index among the tokens of all rows;
    None: all tokens, in order."""
    keys: Tensor | None
    """The same of the keys."""
    bounds: VarlenBounds

    def queries_of(self, tensor: Tensor) -> Tensor:
        """``[n, H, …]`` of ``[B, H, s, …]``."""
        return _tokens(tensor) if self.queries is None else _tokens(tensor)[self.queries]

    def keys_of(self, tensor: Tensor) -> Tensor:
        """``[n, G, …]`` of ``[B, G, m, …]``."""
        return _tokens(tensor) if self.keys is None else _tokens(tensor)[self.keys]


# A ring has as many blocks as ranks, twice where layers with a window alternate with others.
@lru_cache(maxsize=128)
def _varlen_calls(
    segments: tuple[Segment, ...], query: torch.Size, key: torch.Size, device: torch.device
) -> list[_VarlenCall]:
    """The kernel calls for the segments of queries ``[B, H, s, D]`` and a block of keys ``[B, G, m, D]``.

    Every layer asks the same of one micro-batch, so the last answers are kept, on the device.
    """
    rows, _, q_length, _ = query
    k_length = key[2]
    groups: list[list[Segment]] = []
    for segment in segments:
        if segment.left < 0 and segment.q_stop - segment.q_start == 1:
            segment = segment._replace(right=0)  # the only query sees all keys either way: no group of its own
        for group in groups:
            same_bounds = (group[0].left, group[0].right) == (segment.left, segment.right)
            rest = [s for s in group if s.row == segment.row]  # none of them may share a query with it
            if same_bounds and all(s.q_stop <= segment.q_start or segment.q_stop <= s.q_start for s in rest):
                group.append(segment)
                break
        else:
            groups.append([segment])
    calls = []
    for group in groups:
        group.sort(key=lambda s: (s.row, s.q_start))
        queries = [range(s.row * q_length + s.q_start, s.row * q_length + s.q_stop) for s in group]
        keys = [range(s.row * k_length + s.k_start, s.row * k_length + s.k_stop) for s in group]
        q_index, q_borders, q_longest = _join_ranges(queries, rows * q_length, device)
        k_index, k_borders, k_longest = _join_ranges(keys, rows * k_length, device)
        bounds = VarlenBounds(q_borders, k_borders, q_longest, k_longest, group[0].left, group[0].right)
        calls.append(_VarlenCall(q_index, k_index, bounds))
    return calls


def _join_ranges(ranges: list[range], total: int, device: torch.device) -> tuple[Tensor | None, Tensor, int]:
    """The ranges' indices one after the other (None: these are all ``total``, in order), borders and longest."""
    index = torch.cat([torch.arange(each.start, each.stop) for each in ranges])
    borders = torch.tensor([0, *map(len, ranges)]).cumsum(0).to(torch.int32)
    is_whole = torch.equal(index, torch.arange(total))
    return None if is_whole else to_device(index, device), to_device(borders, device), max(map(len, ranges))


def _heads_first(tokens: Tensor, like: Tensor) -> Tensor:
    """``[B, H, s, …]`` of ``[B·s, H, …]``, still with tokens first in memory, whatever the kernel made of it."""
    return tokens.contiguous().unflatten(0, (like.shape[0], like.shape[2])).transpose(1, 2)


def _tokens(tensor: Tensor) -> Tensor:
    """``[B·s, H, …]`` of ``[B, H, s, …]``, a view where tokens come first in memory."""
    return tensor.transpose(1, 2).flatten(0, 1)
