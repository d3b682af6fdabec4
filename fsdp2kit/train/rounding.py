"""Rounding to bfloat16 that is right on average, with noise that does not depend on the mesh.

The noise of an element is a hash of its place in the whole tensor and of a key, not a draw from a generator. So no
generator state is saved, replicas round alike, and any mesh, device, or order of work gives the same numbers.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


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


def noise_of(key: int, *, start: int, length: int, device: torch.device) -> Tensor:
    """32 random-looking bits for each of the elements ``start`` … ``start + length − 1`` of a tensor, int32."""
    first = (start + key + 2**31) % 2**32 - 2**31  # the counter wraps round, as int32 does
    return scramble(torch.arange(length, dtype=torch.int32, device=device).add_(first))


def scramble(bits: Tensor) -> Tensor:
    """Wellons' "lowbias32" of each int32, in place: a bijection after which every bit depends on all others.

    https://nullprogram.com/blog/2018/07/31/
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        _fold(bits, shift).mul_(factor)  # modulo 2^32
    return _fold(bits, 16)


def _fold(bits: Tensor, shift: int) -> Tensor:
    """``bits ^= bits >> shift``, with zeros shifted in."""
    return bits.bitwise_xor_((bits >> shift).bitwise_and_((1 << (32 - shift)) - 1))
