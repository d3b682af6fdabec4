"""Attention over segments, block by block: partial results merged by their log-sum-exps.

Over one block of keys, query i's scores s give o = Σ exp(s − l)·v with l = log Σ exp(s). Over two blocks it is

    l = logaddexp(l₁, l₂),     o = exp(l₁ − l)·o₁ + exp(l₂ − l)·o₂

so blocks may come in any order (arXiv:2205.14135). Backward needs no merging: with the final l and o, each block's
probabilities exp(s − l) are those of the whole, and its gradients just add up (arXiv:2310.01889).

Three kernels do a block: torch's flash attention on CUDA, over all segments of one band at once (`bands`); its CPU
flash attention, a piece at a time, and plain tensor operations for what neither takes (`pieces`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fsdp2kit.parallel.context_parallel import bands, pieces
from fsdp2kit.parallel.context_parallel.segments import Segment


class Partial:
    """Attention's output over the keys seen so far, and its log-sum-exp, both float32."""

    def __init__(self, query: Tensor) -> None:
        """For ``query`` ``[B, H, s, D]``, before any key."""
        batch, heads, length, width = query.shape
        # Tokens first in memory, as the kernels and the layer after attention want them.
        self.out = query.new_zeros((batch, length, heads, width), dtype=torch.float32).transpose(1, 2)
        """``[B, H, s, D]``."""
        self.lse = query.new_full((batch, length, heads), float("-inf"), dtype=torch.float32).transpose(1, 2)
        """``[B, H, s]``."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], *, scale: float) -> None:
        """Take in a block of keys.

        Args:
            query: ``[B, H, s, D]``; key, value: ``[B, G, m, D]``, H a multiple of G.
            segments: where queries and keys meet.
        """
        attend = bands.attend if bands.is_usable(query) else pieces.attend
        attend(self.out, self.lse, query, key, value, segments, scale=scale)


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
    """Add a block's part to the float32 gradients of query, key and value, in place.

    Args:
        grads: of ``[B, H, s, D]``, ``[B, G, m, D]`` and ``[B, G, m, D]``, tokens first in memory (`zeros_for`).
        grad_out: ``[B, H, s, D]``.
        out: ``[B, H, s, D]`` and lse: ``[B, H, s]`` float32, over all blocks.
    """
    backward = bands.attend_backward if bands.is_usable(query) else pieces.attend_backward
    backward(grads, grad_out, query, key, value, out, lse, segments, scale=scale)


def zeros_for(tensor: Tensor) -> Tensor:
    """Float32 zeros to add gradients of ``tensor`` ``[B, H, s, D]`` up in, tokens first in memory."""
    return torch.zeros_like(
        tensor.transpose(1, 2), dtype=torch.float32, memory_format=torch.contiguous_format
    ).transpose(1, 2)
