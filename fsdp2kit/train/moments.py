"""How AdamW's moments are kept: in float32, in bfloat16, or in 4 bits and a scale for each block of a row.

What is stored is rounded stochastically, with noise from `fsdp2kit.train.rounding`: its mean is the value itself.
Rounded to nearest, a moment that moves by a tenth or a twentieth of itself a step stays at the same one of 16 levels
for good (arXiv:2505.00347 calls it signal swamping).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from fsdp2kit.train.rounding import round_stochastically

_LARGEST_BLOCK = 128
_SMALLEST_BLOCK = 32
_SMALLEST_TENSOR = 4096
_TINY = torch.finfo(torch.bfloat16).tiny  # 2^-126, the smallest number of full precision, here as in float32


@dataclass(frozen=True)
class Field:
    """A stored tensor: an entry for every ``elements`` neighbours of a row of the parameter."""

    dtype: torch.dtype
    elements: int = 1


class MomentFormat(Protocol):
    """What the two moments of a parameter are stored as. Instances that are equal store alike."""

    @property
    def fields(self) -> Mapping[str, Field]:
        """The tensors that hold them, by name in the optimizer's state. All zeros: moments of zeros."""
        ...

    def read(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The first and the second moment of n elements, float32 ``[n]`` each, from flat fields."""
        ...

    def rounded(self, exp_avg: Tensor, exp_avg_sq: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        """The fields that hold these moments (float32 ``[n]``).

        Args:
            noise: int32 ``[n]``, of which each moment uses one half.
        """
        ...


@dataclass(frozen=True)
class Float32Moments:
    """As they are computed."""

    fields = MappingProxyType({"exp_avg": Field(torch.float32), "exp_avg_sq": Field(torch.float32)})

    def read(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        exp_avg, exp_avg_sq = stored
        return exp_avg.clone(), exp_avg_sq.clone()

    def rounded(self, exp_avg: Tensor, exp_avg_sq: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        return exp_avg, exp_avg_sq


@dataclass(frozen=True)
class BFloat16Moments:
    """Rounded to bfloat16."""

    fields = MappingProxyType({"exp_avg": Field(torch.bfloat16), "exp_avg_sq": Field(torch.bfloat16)})

    def read(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        exp_avg, exp_avg_sq = stored
        return exp_avg.float(), exp_avg_sq.float()

    def rounded(self, exp_avg: Tensor, exp_avg_sq: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        # Below 2^-126 rounding is coarser, down to 0, and a next denominator could be eps alone; 0 itself stays.
        exp_avg_sq = torch.where(exp_avg_sq > 0, exp_avg_sq.clamp(min=_TINY), exp_avg_sq)
        return round_stochastically(exp_avg, noise), round_stochastically(exp_avg_sq, noise >> 16)


@dataclass(frozen=True)
class FourBitMoments:
    """4 bits an element, and a float32 scale for each moment of a block: neighbours in a row.

    The second moment is 2^-k of the block's largest, k = 0 … 15: an update divides by its root, so that its error
    matters in proportion to itself. There is no 0 beside a block's larger elements: what is below 2^-15 of the largest
    is stored as that.

    The first is k/7, k = −7 … 7, of the block's largest ratio to the root of the second *as stored*. Such ratios are
    what updates are made of, and alike over a block where gradients are not: an element of small gradients gets no
    larger an error in its updates than one of large ones.
    """

    block: int

    @property
    def fields(self) -> Mapping[str, Field]:
        codes, scale = Field(torch.uint8, 2), Field(torch.float32, self.block)
        names = ("exp_avg.codes", "exp_avg.scale", "exp_avg_sq.exponents", "exp_avg_sq.scale")
        return dict(zip(names, (codes, scale) * 2, strict=True))

    def read(self, stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        codes, scale, exponents, largest = stored
        exp_avg_sq = self._squares(exponents, largest)
        ratios = self._scaled(_unpacked(codes).float().sub_(7).div_(7), scale)
        return ratios.mul_(exp_avg_sq.sqrt()), exp_avg_sq

    def rounded(self, exp_avg: Tensor, exp_avg_sq: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        exponents, largest = self._rounded_squares(exp_avg_sq, noise >> 16)
        root = self._squares(exponents, largest).sqrt_()
        ratios, scale = self._relative(exp_avg / torch.where(root > 0, root, torch.inf))
        draw = (noise & 0xFFFF).float().add_(0.5).div_(2**16)
        k = ratios.mul_(7).add_(draw).floor_()
        return _packed(k.add_(7)), scale, exponents, largest

    def _rounded_squares(self, exp_avg_sq: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        parts, largest = self._relative(exp_avg_sq, smallest=_TINY * 2**15)
        bits = parts.clamp_(min=2**-15).view(torch.int32)
        # A uniform number added to the mantissa carries into the exponent with the probability mantissa / 2^23.
        bits = bits + (noise & 0xFFFF).mul_(2**7).add_(2**6)
        return _packed(127 - (bits >> 23)), largest

    def _squares(self, exponents: Tensor, largest: Tensor) -> Tensor:
        bits = (127 - _unpacked(exponents).int()).bitwise_left_shift_(23)  # a float32 of mantissa 0
        return self._scaled(bits.view(torch.float32), largest)

    def _scaled(self, parts: Tensor, scale: Tensor) -> Tensor:
        return (parts.view(-1, self.block) * scale[:, None]).view(-1)

    def _relative(self, values: Tensor, *, smallest: float = 0.0) -> tuple[Tensor, Tensor]:
        """``values`` over the largest magnitude of their block, and these magnitudes: ``smallest`` at least, or 0."""
        blocks = values.view(-1, self.block)
        scale = blocks.abs().amax(dim=1)
        if smallest:
            scale = torch.where(scale > 0, scale.clamp(min=smallest), scale)
        return (blocks / torch.where(scale > 0, scale, 1)[:, None]).view(-1), scale


def _packed(codes: Tensor) -> Tensor:
    """Numbers 0 … 15 as uint8, two in each."""
    pairs = codes.to(torch.uint8).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1]


def _unpacked(pairs: Tensor) -> Tensor:
    return torch.stack((pairs >> 4, pairs & 15), dim=1).view(-1)


def bfloat16_moments(_parameter: Tensor) -> MomentFormat:
    """Both moments in bfloat16. A second moment that is not 0 stays above 0."""
    return BFloat16Moments()


def four_bit_moments(parameter: Tensor) -> MomentFormat:
    """Both moments in 4 bits, or in float32 where `block_size` says so."""
    block = block_size(parameter, largest=_LARGEST_BLOCK)
    return Float32Moments() if block is None else FourBitMoments(block)


FORMATS: dict[str, Callable[[Tensor], MomentFormat]] = {
    "adamw_bf16": bfloat16_moments,
    "adamw_4bit": four_bit_moments,
}
"""By ``optimizer.name``: the format of a parameter's moments."""


def block_size(parameter: Tensor, *, largest: int) -> int | None:
    """Elements that share a scale: the largest power of two that divides the rows, or None: keep float32 moments.

    A block never leaves a row, so every mesh that shards rows has the same blocks. Vectors and small tensors are not
    quantised.
    """
    block = math.gcd(parameter.shape[-1] if parameter.ndim else 1, largest)
    if parameter.ndim < 2 or parameter.numel() < _SMALLEST_TENSOR or block < _SMALLEST_BLOCK:
        return None
    return block
