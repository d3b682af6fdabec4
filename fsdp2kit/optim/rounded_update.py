"""AdamW's update with stochastic rounding, as one function of tensors, and the noise that it rounds with."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_TINY = torch.finfo(torch.bfloat16).tiny  # 2^-126, the smallest number of full precision, here as in float32


def update_factors(
    *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int
) -> list[float]:
    """What `rounded_update` takes as ``factors``, in float64.

    Args:
        step: number of the update, from 1.
    """
    beta1, beta2 = betas
    return [
        beta1,
        1 - beta1,
        beta2,
        1 - beta2,
        1 - beta2**step,
        eps,
        1 - lr * weight_decay,
        lr / (1 - beta1**step),
    ]


def rounded_update(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, counters: Tensor, factors: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """AdamW (arXiv:1711.05101, algorithm 2), computed in float32; it uses the moments before they are rounded.

    Every operation works on single elements, so it can be run on any part of a parameter, and compiled to one kernel.
    Products and sums are separate operations: fused, they would round differently at the end of a vector, and the
    numbers would depend on how elements are cut into pieces.

    Args:
        parameter, gradient: of any float dtype. exp_avg, exp_avg_sq: bfloat16. All have one shape.
        counters: int32, of that shape, from `counter`; may be overwritten.
        factors: float32 ``[8]``, from `update_factors`.

    Returns:
        The new parameter, of its dtype, and the new moments. The parameter is rounded stochastically if it is
        bfloat16, the moments always.
    """
    beta1, rest1, beta2, rest2, correction2, eps, kept, rate = factors.unbind()
    gradient = gradient.float()
    new_avg = exp_avg.float().mul_(beta1).add_(gradient * rest1)
    new_avg_sq = exp_avg_sq.float().mul_(beta2).add_(gradient.square().mul_(rest2))
    denominator = (new_avg_sq / correction2).sqrt_().add_(eps)
    updated = (parameter.float() * kept).sub_((new_avg / denominator).mul_(rate))

    noise = scramble(counters)
    # Below 2^-126 rounding is coarser, down to 0, and a next denominator could be eps alone; 0 itself stays.
    new_avg_sq = torch.where(new_avg_sq > 0, new_avg_sq.clamp(min=_TINY), new_avg_sq)
    rounded_avg = round_stochastically(new_avg, noise)
    rounded_avg_sq = round_stochastically(new_avg_sq, noise >> 16)
    if parameter.dtype == torch.bfloat16:
        updated = round_stochastically(updated, scramble(noise))
    return updated.to(parameter.dtype), rounded_avg, rounded_avg_sq


def round_stochastically(values: Tensor, noise: Tensor) -> Tensor:
    """``values`` in bfloat16: each becomes one of its two neighbours, the nearer one with the greater probability.

    The mean over the noise is the value itself. Values that bfloat16 has stay what they are, infinities and NaN
    included; above its largest, 3.39e38, the upper neighbour is infinity.

    Args:
        values: float32.
        noise: int32, of the same shape; the lower 16 bits are used.
    """
    # A bfloat16 is the upper half of a float32. Adding a uniform number to the lower half carries into the upper one
    # with probability lower half / 2^16; sign and magnitude are apart, so this holds for negative numbers as well.
    kept = ((noise & 0xFFFF) + values.view(torch.int32)).bitwise_and_(-0x10000).view(torch.float32)
    return torch.where(values.isnan(), values, kept).bfloat16()


def noise_key(*parts: int) -> int:
    """A 32-bit key that is a function of ``parts``."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "big")


def as_int32(number: int) -> int:
    """``number`` modulo 2^32, from −2^31 on: int32 arithmetic wraps round to it."""
    return (number + 2**31) % 2**32 - 2**31


def counter(key: int, *, start: int, length: int, device: torch.device) -> Tensor:
    """What `scramble` makes noise of: int32 ``[length]``, for the elements from ``start`` on of a tensor."""
    return torch.arange(length, dtype=torch.int32, device=device).add_(as_int32(start + key))


def scramble(bits: Tensor) -> Tensor:
    """Wellons' "lowbias32" (https://nullprogram.com/blog/2018/07/31/) of each int32, in place: a bijection."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        _fold(bits, shift).mul_(factor)  # modulo 2^32
    return _fold(bits, 16)


def _fold(bits: Tensor, shift: int) -> Tensor:
    """``bits ^= bits >> shift``, with zeros shifted in."""
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))
