"""Frozen weights that are stored in 4 bits: QLoRA's NF4 (arXiv:2305.14314), as bitsandbytes has it; linear layers.

A block is 64 consecutive elements of the flattened weight. Each is stored as the index of the nearest of 16 levels
(quantiles of a normal distribution), and the block has one float32 scale, its largest magnitude: 36 bytes a block.

A weight is one ordinary uint8 parameter, so FSDP2 shards and gathers it as any other. One of its rows holds as many of
the weight's rows as fill whole blocks, so no mesh cuts a block. Experts in 4 bits are in `grouped_experts`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2kit.job.distributed import local_part
from fsdp2kit.torch_compat import local_slices

BLOCK = 64
"""Elements that share a scale."""
BLOCK_BYTES = BLOCK // 2 + 4
"""Bytes of a stored block: two elements a byte, and the scale in float32."""
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_SMALLEST = 1e-38  # divisor for a block of zeros
_AT_A_TIME = 1 << 22  # elements


def quantize(values: Tensor) -> Tensor:
    """Floating-point ``[rows, n]``, n a multiple of 64, as uint8 ``[rows, n / 64 · 36]``.

    A row holds its blocks' codes, two a byte, the first in the high bits; then the blocks' scales.
    """
    blocks = values.float().view(len(values), -1, BLOCK)
    scales = blocks.abs().amax(-1)
    levels = torch.tensor(LEVELS, device=values.device)
    normed = blocks * (1.0 / scales.clamp(min=_SMALLEST))[..., None]
    codes = torch.bucketize(normed, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8).flatten(1)
    return torch.cat([codes[:, ::2] << 4 | codes[:, 1::2], scales.view(torch.uint8)], dim=1)


def dequantize(stored: Tensor, pairs: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `quantize`, as ``[…, width]`` of ``dtype``; computed in float32.

    Args:
        pairs: `level_pairs`, on the device.
    """
    count = stored.shape[1] // BLOCK_BYTES  # blocks in a row
    codes, scales = stored.split([count * BLOCK // 2, count * 4], dim=1)
    values = F.embedding(codes.int(), pairs).view(len(stored), count, BLOCK)
    values = values.mul_(scales.view(torch.float32)[..., None]).to(dtype)
    return values.view(len(stored) * count * BLOCK // width, width)


def level_pairs() -> Tensor:
    """The two levels that a byte of codes stands for, ``[256, 2]`` float32."""
    levels = torch.tensor(LEVELS)
    return torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)


@dataclass(frozen=True)
class NF4Layout:
    """How matrices ``[E, rows, width]`` are stored, uint8 ``[E · stored_rows, bytes]``: each begins a stored row."""

    matrices: int
    rows: int
    width: int

    @classmethod
    def of(cls, weight: Tensor) -> NF4Layout:
        """That of one matrix ``[rows, width]``, or of several ``[E, rows, width]``."""
        return cls(math.prod(weight.shape[:-2]), *weight.shape[-2:])

    @property
    def together(self) -> int:
        """Rows of a matrix in one stored row; a matrix's last stored row is padded with zeros."""
        return BLOCK // math.gcd(BLOCK, self.width)

    @property
    def stored_rows(self) -> int:
        """Stored rows of one matrix."""
        return -(-self.rows // self.together)

    def parameter(self, device: torch.device) -> nn.Parameter:
        """The frozen parameter, without values."""
        shape = (self.matrices * self.stored_rows, self.together * self.width // BLOCK * BLOCK_BYTES)
        return nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=device), requires_grad=False)

    def unpack(self, stored: Tensor, pairs: Tensor, dtype: torch.dtype) -> Tensor:
        """All matrices ``[E, rows, width]`` of the whole parameter; some rows at a time, which `dequantize` widens."""
        shape = (len(stored), self.together * self.width)
        values = torch.empty(shape, dtype=dtype, device=stored.device)
        step = max(1, _AT_A_TIME // shape[1])
        for part, into in zip(stored.split(step), values.split(step), strict=True):
            into.copy_(dequantize(part, pairs, shape[1], dtype))
        return values.view(self.matrices, -1, self.width)[:, : self.rows]

    @torch.no_grad()
    def fill(self, stored: Tensor, rows_of: Callable[[int, int, int], Tensor]) -> None:
        """Quantise this rank's share of the parameter, some rows at a time.

        Args:
            rows_of: from a matrix's number, its first row that is wanted and the one after the last, to these rows
                ``[n, width]``, of any floating-point dtype.
        """
        local, start = local_part(stored), local_slices(stored)[0].start
        step, done = max(1, _AT_A_TIME // (self.together * self.width)), 0
        while done < len(local):
            matrix, row = divmod(start + done, self.stored_rows)
            count = min(step, len(local) - done, self.stored_rows - row)
            first, last = row * self.together, (row + count) * self.together
            rows = rows_of(matrix, first, min(last, self.rows)).to(local.device)
            whole = F.pad(rows, (0, 0, 0, last - first - len(rows)))
            local[done : done + count].copy_(quantize(whole.view(count, -1)))
            done += count


class NF4Linear(nn.Module):
    """A linear layer with a frozen weight in 4 bits, which is dequantised at each use and not kept."""

    pairs: Tensor

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """A layer of the same sizes, device and bias as ``linear``; `fill` gives the weight its values.

        Args:
            dtype: of the dequantised `weight`.
        """
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, dtype
        self.layout = NF4Layout.of(linear.weight)
        self.nf4 = self.layout.parameter(linear.weight.device)
        self.bias = linear.bias
        self.register_buffer("pairs", level_pairs(), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The dequantised weight, ``[out, in]``; peft's DoRA reads it, for one."""
        return self.unpack(self.nf4)[: self.out_features]

    def unpack(self, stored: Tensor) -> Tensor:
        """The weight's rows ``[n, in]`` of some stored rows."""
        return dequantize(stored, self.pairs, self.in_features, self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weightᵀ + bias``."""
        return _Linear.apply(x, self.nf4, self.pairs, self.bias, self.in_features, self.out_features)

    def fill(self, weight: Any) -> None:
        """Quantise this rank's rows of a weight.

        Args:
            weight: sliceable, ``[out, in]``, of any floating-point dtype.
        """
        self.layout.fill(self.nf4, lambda _, first, last: weight[first:last])

    def plain(self) -> nn.Linear:
        """The layer as it was, on meta."""
        return nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta", dtype=self.dtype)


class _Linear(torch.autograd.Function):
    """Keeps the stored bytes for backward; autograd would keep the dequantised weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, stored: Tensor, pairs: Tensor, bias: Tensor | None, width: int, rows: int
    ) -> Tensor:
        ctx.save_for_backward(stored, pairs)
        ctx.width, ctx.rows = width, rows
        return F.linear(x, dequantize(stored, pairs, width, x.dtype)[:rows], bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        stored, pairs = ctx.saved_tensors
        weight = dequantize(stored, pairs, ctx.width, gradients[0].dtype)[: ctx.rows]
        return gradients[0] @ weight, None, None, None, None, None
