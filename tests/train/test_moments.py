"""The formats of AdamW's moments: levels and means beside numpy's, and moving averages beside exact ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp2kit.train.moments import (
    BFloat16,
    Float32,
    FourBitPositive,
    FourBitSigned,
    MomentFormat,
    block_size,
    four_bit_moments,
)
from fsdp2kit.train.rounding import noise_key, noise_of

SQUARES = np.array([k * abs(k) / 49 for k in range(-7, 8)])
POWERS = 2.0 ** np.arange(-15, 1)
LEVELS: dict[type, np.ndarray] = {FourBitSigned: SQUARES, FourBitPositive: POWERS}
SIGNED, POSITIVE = FourBitSigned(64), FourBitPositive(64)


def noise(length: int, *, seed: int = 0) -> Tensor:
    return noise_of(noise_key(seed), start=0, length=length, device=torch.device("cpu"))


def stored(kept: MomentFormat, values: Tensor, *, seed: int = 0) -> Tensor:
    return kept.read(kept.rounded(values, noise(len(values), seed=seed)))


def values_for(kept: MomentFormat) -> Tensor:
    values = torch.randn(64, generator=torch.Generator().manual_seed(1))
    return values if kept == SIGNED else values.square()


@pytest.mark.parametrize("kept", [SIGNED, POSITIVE])
def test_a_value_becomes_one_of_its_neighbours_and_itself_on_average(kept: MomentFormat) -> None:
    draws = 20_000
    values = values_for(kept)
    found = stored(kept, values.repeat(draws)).view(draws, 64).double().numpy()
    largest = float(values.abs().max())
    levels = LEVELS[type(kept)] * largest
    for exact, drawn in zip(values.double().numpy(), found.T, strict=True):
        place = int(np.clip(np.searchsorted(levels, exact), 1, len(levels) - 1))
        lower, upper = levels[place - 1 : place + 1]
        near_lower, near_upper = np.isclose(drawn, lower, rtol=1e-6), np.isclose(drawn, upper, rtol=1e-6)
        assert (near_lower | near_upper).all()
        up = (exact - lower) / (upper - lower)
        # Five standard deviations of a mean of coin tosses, and the noise's own 16 bits.
        bound = 5 * (up * (1 - up) / draws) ** 0.5 + 2**-16
        assert abs(near_upper.mean() - up) < bound


@pytest.mark.parametrize("kept", [SIGNED, POSITIVE])
@pytest.mark.parametrize("scale", [1.0, 3.3e-7, 1.7e19])
def test_what_a_format_has_stays(kept: MomentFormat, scale: float) -> None:
    values = torch.tensor(np.resize(LEVELS[type(kept)], 64) * scale, dtype=torch.float32)
    assert values.abs().max() == np.float32(scale)
    for draw in (noise(64), torch.zeros(64, dtype=torch.int32), torch.full((64,), -1, dtype=torch.int32)):
        fields = kept.rounded(values, draw)
        assert [(field.dtype, len(field)) for field in fields] == [(torch.uint8, 32), (torch.float32, 1)]
        torch.testing.assert_close(kept.read(fields), values, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kept", [SIGNED, POSITIVE])
def test_blocks_do_not_see_one_another(kept: MomentFormat) -> None:
    block = values_for(kept)
    values = torch.cat((block * 1e12, torch.zeros(64), block * 1e-12, block))
    found = stored(kept, values).view(4, 64)
    assert not found[1].any(), "a block of zeros stays one"
    largest = float(block.abs().max())
    for row, factor in ((0, 1e12), (2, 1e-12), (3, 1.0)):
        assert float(found[row].abs().max()) == pytest.approx(largest * factor, rel=1e-6)
        assert found[row].abs().min() < 0.1 * largest * factor


def test_zeros_in_every_field_are_a_moment_of_zeros() -> None:
    for kept in (SIGNED, POSITIVE, BFloat16(), Float32()):
        fields = [torch.zeros(128 // field.elements, dtype=field.dtype) for field in kept.fields]
        assert torch.equal(kept.read(fields), torch.zeros(128))


def test_nothing_positive_is_stored_as_zero() -> None:
    for values in (torch.logspace(-30, 0, 64), torch.full((64,), 1e-42), torch.logspace(-44, -37, 64)):
        assert (stored(POSITIVE, values) >= torch.finfo(torch.float32).tiny * 0.99).all()


@pytest.mark.parametrize(("kept", "decay"), [(SIGNED, 0.9), (POSITIVE, 0.95), (POSITIVE, 0.999)])
def test_a_moving_average_is_followed_on_average(kept: MomentFormat, decay: float) -> None:
    """Elements of a block whose inputs differ by up to 30 times, and change in the middle."""
    blocks, steps = 400, 120
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(0, -1.5, 64).repeat(blocks)
    exact, found = torch.zeros(2, 64 * blocks, dtype=torch.float64)
    for step in range(steps):
        inputs = size * torch.randn(64 * blocks, generator=generator)
        trend = size if step < steps // 2 else -size
        inputs = inputs.square() if kept == POSITIVE else inputs + trend
        exact = decay * exact + (1 - decay) * inputs.double()
        found = decay * found + (1 - decay) * inputs.double()
        found = stored(kept, found.float(), seed=step).double()
    error, size = (found - exact).view(blocks, 64), exact.view(blocks, 64).square().mean(dim=0).sqrt()
    deviation = error.std(dim=0)
    assert (error.mean(dim=0).abs() < 5 * deviation / blocks**0.5).all(), "no element drifts"
    assert (deviation < 1.2 * size).all(), "nor is it lost in noise"


def test_moments_of_four_bits_take_an_eighth_of_float32() -> None:
    for shape, expected in (
        ((97, 256), 8 + 2 * 32 / 128),
        ((64, 576), 8 + 2 * 32 / 64),
        ((64, 100), 64),
        ((9000,), 64),
    ):
        fields = [field for kept in four_bit_moments(torch.empty(shape)) for field in kept.fields]
        bits = sum(8 * field.dtype.itemsize / field.elements for field in fields)
        assert bits == expected, shape


def test_blocks_stay_within_rows() -> None:
    sizes = {(97, 256): 256, (64, 576): 64, (64, 1536): 256, (8, 64, 96): 32, (64, 100): None, (4, 256): None}
    for shape, block in sizes.items():
        assert block_size(torch.empty(shape), largest=256) == block
    assert block_size(torch.empty(8192), largest=256) is None
