"""How AdamW's moments are kept: in float32, in bfloat16, or in 4 bits and a scale for each block of a row.

What is stored is rounded stochastically, with noise from `fsdp2kit.train.rounding`: its mean is the value itself.
Rounded to nearest, a moment that moves by a tenth or a twentieth of itself a step stays at the same one of 16 levels
for good (arXiv:2505.00347 calls it signal swamping).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

    suffix: str
    """Of its name in the optimizer's state, after the name of the moment."""
    dtype: torch.dtype
    elements: int = 1


class MomentFormat(Protocol):
    """What a moment is stored as. Instances that are equal are stored alike."""

    @property
    def fields(self) -> tuple[Field, ...]:
        """The tensors that hold it. All zeros: a moment of zeros."""
        ...

    def read(self, stored: Sequence[Tensor]) -> Tensor:
        """The moment of n elements, float32 ``[n]``, from flat fields."""
        ...

    def rounded(self, values: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        """The fields that hold ``values`` (float32 ``[n]``).

        Args:
            noise: int32 ``[n]``, of which the lower 16 bits are used.
        """
        ...


@dataclass(frozen=True)
class Float32:
    """As it is computed."""

    fields = (Field("", torch.float32),)

    def read(self, stored: Sequence[Tensor]) -> Tensor:
        return stored[0].clone()

    def rounded(self, values: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        return (values,)


@dataclass(frozen=True)
class BFloat16:
    """Rounded to bfloat16.

    Args:
        floor: what is positive is stored as this at least.
    """

    floor: float = 0.0
    fields = (Field("", torch.bfloat16),)

    def read(self, stored: Sequence[Tensor]) -> Tensor:
        return stored[0].float()

    def rounded(self, values: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        if self.floor:
            values = torch.where(values > 0, values.clamp(min=self.floor), values)
        return (round_stochastically(values, noise),)


@dataclass(frozen=True)
class FourBitSigned:
    """k·|k|/49 of a block's largest magnitude, for k = −7 … 7: finer near 0, where most of a block is."""

    block: int

    @property
    def fields(self) -> tuple[Field, ...]:
        return (Field(".codes", torch.uint8, 2), Field(".scale", torch.float32, self.block))

    def read(self, stored: Sequence[Tensor]) -> Tensor:
        codes, scale = stored
        k = _unpacked(codes).float().sub_(7)
        return (k.mul_(k.abs()).div_(49).view(-1, self.block) * scale[:, None]).view(-1)

    def rounded(self, values: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        parts, scale = _relative(values, self.block)
        squares = parts.abs().mul_(49)
        k = squares.sqrt().floor_()
        above = squares.sub_(k * k).div_(k * 2 + 1)  # how far it is on the way to (k + 1)²
        draw = (noise & 0xFFFF).float().add_(0.5).div_(2**16)
        k.add_(draw < above).mul_(parts.sign()).add_(7)
        return _packed(k), scale


@dataclass(frozen=True)
class FourBitPositive:
    """2^-k of a block's largest, for k = 0 … 15: what a second moment divides by matters in proportion to itself.

    There is no 0 beside a block's larger elements: what is below 2^-15 of the largest is stored as that, so that no
    denominator shrinks to ``eps`` by rounding.
    """

    block: int

    @property
    def fields(self) -> tuple[Field, ...]:
        return (Field(".exponents", torch.uint8, 2), Field(".scale", torch.float32, self.block))

    def read(self, stored: Sequence[Tensor]) -> Tensor:
        exponents, scale = stored
        bits = (127 - _unpacked(exponents).int()).bitwise_left_shift_(23)  # a float32 of mantissa 0
        return (bits.view(torch.float32).view(-1, self.block) * scale[:, None]).view(-1)

    def rounded(self, values: Tensor, noise: Tensor) -> tuple[Tensor, ...]:
        parts, scale = _relative(values, self.block, smallest=_TINY * 2**15)
        bits = parts.clamp_(min=2**-15).view(torch.int32)
        # A uniform number added to the mantissa carries into the exponent with the probability mantissa / 2^23.
        bits = bits + (noise & 0xFFFF).mul_(2**7).add_(2**6)
        return _packed(127 - (bits >> 23)), scale


def _relative(values: Tensor, block: int, *, smallest: float = 0.0) -> tuple[Tensor, Tensor]:
    """``values`` over the largest magnitude of their block, and these magnitudes; ``smallest`` at least, if not 0."""
    blocks = values.view(-1, block)
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


def bfloat16_moments(_parameter: Tensor) -> tuple[MomentFormat, MomentFormat]:
    """Both moments in bfloat16. A second moment that is not 0 stays above 0."""
    return BFloat16(), BFloat16(floor=_TINY)


def four_bit_moments(parameter: Tensor) -> tuple[MomentFormat, MomentFormat]:
    """Both moments in 4 bits, or in float32 where `block_size` says so."""
    block = block_size(parameter, largest=_LARGEST_BLOCK)
    return (Float32(), Float32()) if block is None else (FourBitSigned(block), FourBitPositive(block))


FORMATS: dict[str, Callable[[Tensor], tuple[MomentFormat, MomentFormat]]] = {
    "adamw_bf16": bfloat16_moments,
    "adamw_4bit": four_bit_moments,
}
"""By ``optimizer.name``: the formats of a parameter's first and second moment."""


def block_size(parameter: Tensor, *, largest: int) -> int | None:
    """Elements that share a scale: the largest power of two that divides the rows, or None: keep float32 moments.

    A block never leaves a row, so every mesh that shards rows has the same blocks. Vectors and small tensors are not
    quantised.
    """
    block = math.gcd(parameter.shape[-1] if parameter.ndim else 1, largest)
    if parameter.ndim < 2 or parameter.numel() < _SMALLEST_TENSOR or block < _SMALLEST_BLOCK:
        return None
    return block
