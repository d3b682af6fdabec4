"""Moments in 4 bits: what is stored, beside numpy's reading of the documented format, and what becomes of updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fsdp2kit.train.moments import BFloat16Moments, Float32Moments, FourBitMoments, block_size, four_bit_moments
from fsdp2kit.train.rounded_adamw import RoundedAdamW
from fsdp2kit.train.rounding import noise_key, noise_of

FORMAT = FourBitMoments(64)
VALUES = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def noise(length: int, *, seed: int = 0) -> Tensor:
    return noise_of(noise_key(seed), start=0, length=length, device=torch.device("cpu"))


def stored(first: Tensor, second: Tensor, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    return FORMAT.read(FORMAT.rounded(first, second, noise(len(first), seed=seed)))


def halves(pairs: np.ndarray) -> np.ndarray:
    return np.stack((pairs >> 4, pairs & 15), axis=-1).reshape(*pairs.shape[:-1], -1).astype(np.int64)


def decoded(fields: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Both moments in float64, by docs/optimizers.md."""
    exponents, codes = halves(fields["exp_avg_sq.exponents"]), halves(fields["exp_avg.codes"])
    block = exponents.shape[-1] // fields["exp_avg.scale"].shape[-1]
    largest, scale = (
        np.repeat(fields[name].astype(np.float64), block, axis=-1) for name in ("exp_avg_sq.scale", "exp_avg.scale")
    )
    second = largest * 2.0**-exponents
    return scale * (codes - 7) / 7 * np.sqrt(second), second


def some_moments() -> tuple[Tensor, Tensor]:
    """Of elements whose gradients differ by 30 times within a block."""
    generator = torch.Generator().manual_seed(1)
    size = torch.logspace(0, -1.5, 64)
    return size * torch.randn(64, generator=generator), size.square() * torch.rand(64, generator=generator)


def test_a_second_moment_becomes_one_of_two_powers_and_itself_on_average() -> None:
    draws = 20_000
    first, second = some_moments()
    found = stored(first.repeat(draws), second.repeat(draws))[1].view(draws, 64).double().numpy()
    largest = float(second.max())
    for exact, drawn in zip(second.double().numpy(), found.T, strict=True):
        lower = largest * 2.0 ** np.floor(np.log2(exact / largest))
        near_lower, near_upper = np.isclose(drawn, lower, rtol=1e-6), np.isclose(drawn, 2 * lower, rtol=1e-6)
        assert (near_lower | near_upper).all()
        up = (exact - lower) / lower
        # Five standard deviations of a mean of coin tosses, and the noise's own 16 bits.
        assert abs(near_upper.mean() - up) < 5 * (up * (1 - up) / draws) ** 0.5 + 2**-16


def test_a_first_moment_becomes_a_multiple_of_the_second_s_root_and_itself_on_average() -> None:
    draws = 20_000
    first, second = some_moments()
    fields = FORMAT.rounded(first.repeat(draws), second.repeat(draws), noise(64 * draws))
    found, squares = (moment.view(draws, 64).double().numpy() for moment in FORMAT.read(fields))
    steps = fields[1].double().numpy()[:, None] * np.sqrt(squares) / 7
    exact = first.double().numpy()
    assert (np.abs(found - exact) < steps * (1 + 1e-5)).all(), "a neighbour"
    assert np.abs(np.rint(found / steps) - found / steps).max() < 1e-5
    error = (found - exact).mean(axis=0)
    assert (np.abs(error) < 5 * found.std(axis=0) / draws**0.5 + 2**-16 * steps.max(axis=0)).all()


@pytest.mark.parametrize("scale", [1.0, 3.3e-7, 1.7e12])
def test_what_the_format_has_stays(scale: float) -> None:
    second = torch.tensor(np.resize(2.0 ** -np.arange(16), 64) * scale**2, dtype=torch.float32)
    first = torch.tensor(np.resize(np.arange(-7, 8) / 7, 64), dtype=torch.float32) * second.sqrt()
    fields = FORMAT.rounded(first, second, noise(64))
    names = [(name, field.dtype, 64 // field.elements) for name, field in FORMAT.fields.items()]
    assert [(name, field.dtype, len(field)) for (name, *_), field in zip(names, fields, strict=True)] == names
    torch.testing.assert_close(FORMAT.read(fields)[1], second, rtol=1e-6, atol=0)
    # k/7 · 7 may be a float32's last bit off k, which a draw may take for the next level down.
    assert (FORMAT.read(fields)[0] - first).abs().le(1e-6 * first.abs()).float().mean() > 0.95


def test_blocks_do_not_see_one_another() -> None:
    first, second = some_moments()
    factors = torch.tensor([1e6, 0.0, 1e-6, 1.0])
    found = stored(*(torch.cat([moment * factor**n for factor in factors]) for moment, n in ((first, 1), (second, 2))))
    for moment, exact, n in zip(found, (first, second), (1, 2), strict=True):
        rows = moment.view(4, 64)
        assert not rows[1].any(), "a block of zeros stays one"
        for row, factor in zip(rows, factors.tolist(), strict=True):
            assert float(row.norm()) == pytest.approx(float(exact.norm()) * factor**n, rel=0.3)


def test_zeros_in_every_field_are_moments_of_zeros() -> None:
    for kept in (FORMAT, BFloat16Moments(), Float32Moments()):
        fields = [torch.zeros(128 // field.elements, dtype=field.dtype) for field in kept.fields.values()]
        assert all(torch.equal(moment, torch.zeros(128)) for moment in kept.read(fields))


def test_no_second_moment_is_stored_as_zero() -> None:
    for values in (torch.logspace(-30, 0, 64), torch.full((64,), 1e-42), torch.logspace(-44, -37, 64)):
        assert (stored(torch.zeros(64), values)[1] >= torch.finfo(torch.float32).tiny * 0.99).all()


def parameters() -> list[nn.Parameter]:
    """A matrix of uneven blocks, experts, rows that no block divides, a vector."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((40, 576), (3, 20, 96), (50, 100), (512,))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(step: int) -> list[Tensor]:
    """Whose size differs by 1,000 times along a row; some elements never have one."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for parameter in parameters():
        size = torch.logspace(0, -3, parameter.shape[-1])
        size[::17] = 0
        found.append(size * (torch.randn(parameter.shape, generator=generator) + 0.3))
    return found


def test_updates_are_adamws_on_the_moments_that_were_stored() -> None:
    """Step by step in float64, from what the format says that the state holds."""
    ours = parameters()
    optimizer = RoundedAdamW(ours, format_of=four_bit_moments, **VALUES)  # pyright: ignore[reportArgumentType]
    moments = [(np.zeros(p.shape), np.zeros(p.shape)) for p in ours]
    for step in range(1, 31):
        before = [p.detach().double().numpy() for p in ours]
        for parameter, gradient in zip(ours, gradients(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
        for number, parameter in enumerate(ours):
            gradient = gradients(step)[number].double().numpy()
            first, second = moments[number]
            first, second = 0.9 * first + 0.1 * gradient, 0.95 * second + 0.05 * gradient**2
            update = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.95**step)) + 1e-8)
            expected = before[number] * (1 - 0.01 * 0.1) - 0.01 * update
            np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=0, atol=2e-6)
            state = {name: value.numpy() for name, value in optimizer.state[parameter].items()}
            if number >= 2:  # kept in float32
                np.testing.assert_allclose(state["exp_avg"], first, rtol=0, atol=1e-6)
                moments[number] = state["exp_avg"].astype(np.float64), state["exp_avg_sq"].astype(np.float64)
                continue
            moments[number] = decoded(state)
            largest = np.repeat(state["exp_avg_sq.scale"], 64 if number == 0 else 32, axis=-1)
            floored = np.maximum(second, largest * 2.0**-15)
            assert (np.abs(np.log2(moments[number][1] / floored)) <= 1 + 1e-5).all(), "a neighbour of the exact one"
            assert not moments[number][0][..., ::17].any(), "what has no gradient has no first moment"


def test_small_gradients_beside_large_ones_get_updates_of_adamws_size() -> None:
    """The first moment's error is in proportion to what it is divided by, wherever in a block an element stands."""
    rows, steps = 200, 80
    size = torch.logspace(0, -2, 128)  # gradients; the second moment then differs by 10,000 times
    pair = [nn.Parameter(torch.zeros(rows, 128)) for _ in range(2)]
    values = {"lr": 1.0, "betas": (0.9, 0.95), "eps": 1e-12, "weight_decay": 0.0}
    ours = RoundedAdamW([pair[0]], format_of=four_bit_moments, **values)  # pyright: ignore[reportArgumentType]
    theirs = torch.optim.AdamW([pair[1]], **values)  # pyright: ignore[reportArgumentType]
    generator = torch.Generator().manual_seed(0)
    error, exact, together = torch.zeros(3, 128)
    for step in range(steps):
        gradient = size * (torch.randn(rows, 128, generator=generator) + 0.3)
        before = [parameter.detach().clone() for parameter in pair]
        for parameter, optimizer in zip(pair, (ours, theirs), strict=True):
            parameter.grad = gradient.clone()
            optimizer.step()
        if step < 20:
            continue
        mine, its = (parameter.detach() - was for parameter, was in zip(pair, before, strict=True))
        assert mine.abs().max() < 3.5, "no update is much larger than AdamW's, which are 1 at most"
        error += (mine - its).square().sum(dim=0)
        exact += its.square().sum(dim=0)
        together += (mine * its).sum(dim=0)
    assert ((error / exact).sqrt() < 0.75).all()
    # A noisy second moment makes the mean of 1/√v, and so an update, somewhat larger.
    assert ((together / exact > 0.95) & (together / exact < 1.25)).all()


def test_moments_that_hardly_move_still_follow_on_average() -> None:
    """beta2 = 0.999: rounded to nearest, none would ever leave its power of two."""
    blocks, steps = 400, 120
    generator = torch.Generator().manual_seed(0)
    size = torch.logspace(0, -1.5, 64).repeat(blocks)
    exact = torch.zeros(2, 64 * blocks, dtype=torch.float64)
    found = exact.clone()
    for step in range(steps):
        gradient = size * (torch.randn(64 * blocks, generator=generator) + (0.5 if step < 60 else -0.5))
        for moments in (exact, found):
            moments[0] += 0.1 * (gradient - moments[0])
            moments[1] += 0.001 * (gradient.double().square() - moments[1])
        found = torch.stack(stored(found[0].float(), found[1].float(), seed=step)).double()
    error = (found - exact).view(2, blocks, 64)
    deviation = error.std(dim=1)
    assert (error.mean(dim=1).abs() < 5 * deviation / blocks**0.5).all(), "no element drifts"
    rms = exact.view(2, blocks, 64).square().mean(dim=1).sqrt()
    assert (deviation < 0.9 * rms).all(), "nor is it lost in noise"


def test_moments_of_four_bits_take_an_eighth_of_float32() -> None:
    for shape, expected in (
        ((97, 256), 8 + 2 * 32 / 128),
        ((64, 576), 8 + 2 * 32 / 64),
        ((64, 100), 64),
        ((9000,), 64),
    ):
        fields = four_bit_moments(torch.empty(shape)).fields.values()
        assert sum(8 * field.dtype.itemsize / field.elements for field in fields) == expected, shape


def test_blocks_stay_within_rows() -> None:
    sizes = {(97, 256): 256, (64, 576): 64, (64, 1536): 256, (8, 64, 96): 32, (64, 100): None, (4, 256): None}
    for shape, block in sizes.items():
        assert block_size(torch.empty(shape), largest=256) == block
    assert block_size(torch.empty(8192), largest=256) is None
