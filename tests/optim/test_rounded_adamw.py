"""AdamW with moments in bfloat16: rounding beside exact arithmetic, updates beside torch's, meshes beside none."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fsdp2kit.config.schema import AdamWConfig, FSDPConfig, TrainingConfig
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.optim.rounded_adamw import RoundedAdamW
from fsdp2kit.optim.rounded_update import counter, noise_key, round_stochastically, scramble
from fsdp2kit.parallel.ledger import assert_ledger, dtype_ledger
from fsdp2kit.torch_compat import TorchDispatchMode
from tests.optim import helpers
from tests.support.workers import WorkerPool

VALUES: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.1}
SECTION = AdamWConfig(name="adamw_bf16", **VALUES)


def noise(length: int, *, seed: int = 0) -> Tensor:
    return scramble(counter(noise_key(seed), start=0, length=length, device=torch.device("cpu")))


def neighbours(value: float) -> tuple[float, float]:
    """The bfloat16 numbers around ``value``, by truncating its 32 bits towards 0 and by one step away from it."""
    bits = np.float32(value).view(np.uint32)
    inner = np.uint32(bits & np.uint32(0xFFFF0000))
    outer = inner if inner == bits else np.uint32(inner + 0x10000)
    return float(inner.view(np.float32)), float(outer.view(np.float32))


@pytest.mark.parametrize("value", [1.001, -3.3, 7.7e-12, -1.5e-39, 2.5e-41, 255.9, 3.0e38, 0.99999994])
def test_a_value_becomes_one_of_its_neighbours_and_itself_on_average(value: float) -> None:
    draws = 200_000
    exact = float(np.float32(value))
    inner, outer = neighbours(value)
    rounded = round_stochastically(torch.full((draws,), value), noise(draws)).double()

    assert set(rounded.tolist()) == {inner, outer}
    up = (exact - inner) / (outer - inner)
    # Five standard deviations of a mean of coin tosses: a right rounding fails once in two million.
    assert abs(float((rounded == outer).double().mean()) - up) < 5 * (up * (1 - up) / draws) ** 0.5


def test_what_bfloat16_has_stays() -> None:
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = codes.view(torch.bfloat16)  # all there are, with zeros, subnormals, infinities and NaN
    for draw in (noise(2**16), torch.full((2**16,), -1, dtype=torch.int32)):
        rounded = round_stochastically(values.float(), draw)
        is_number = ~values.isnan()
        assert torch.equal(rounded[is_number].view(torch.int16), codes[is_number])
        assert rounded[~is_number].isnan().all()
    every = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert every.isnan().all()
    assert round_stochastically(every, torch.zeros(4, dtype=torch.int32)).isnan().all()
    assert round_stochastically(every, torch.full((4,), -1, dtype=torch.int32)).isnan().all()


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_the_hash_is_the_published_one(length: int) -> None:
    with np.errstate(over="ignore"):
        x = np.arange(length, dtype=np.uint32) + np.uint32(2**32 - 3)
        x ^= x >> 16
        x *= np.uint32(0x7FEB352D)
        x ^= x >> 15
        x *= np.uint32(0x846CA68B)
        x ^= x >> 16
    found = scramble(counter(2**32 - 5, start=2, length=length, device=torch.device("cpu")))
    assert np.array_equal(found.numpy().view(np.uint32), x)


def pair(dtype: torch.dtype, steps: int, rows: int = 300, **changes: Any) -> tuple[Any, Any, Any, Any]:
    """The same steps by torch's AdamW in float32 and by ours: both parameters, both optimizers."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(rows, 192, generator=generator).to(dtype)
    theirs, ours = nn.Parameter(start.float()), nn.Parameter(start.clone())
    reference = torch.optim.AdamW([theirs], **VALUES)
    optimizer = RoundedAdamW([ours], **{**VALUES, **changes})
    for _ in range(steps):
        theirs.grad = torch.randn(rows, 192, generator=generator).to(dtype).float()
        ours.grad = theirs.grad.to(dtype)
        reference.step()
        optimizer.step()
    return theirs, ours, reference.state[theirs], optimizer.state[ours]


def test_updates_are_those_of_float32_adamw_within_what_bfloat16_can_say() -> None:
    theirs, ours, _, _ = pair(torch.float32, 1)
    # Before anything was stored the first update has no rounding but float32's.
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)

    theirs, ours, reference, state = pair(torch.float32, 50)
    for name, decay in (("exp_avg", 0.9), ("exp_avg_sq", 0.98)):
        assert state[name].dtype == torch.bfloat16
        # Each store moves a value by at most 1/128 of itself; earlier moves decay.
        bound = reference[name].abs().max() / 128 / (1 - decay)
        error = state[name].float() - reference[name]
        assert error.abs().max() < bound
        assert abs(float(error.mean())) < 5 * float(error.std()) / error.numel() ** 0.5
    moved = (theirs - pair(torch.float32, 0)[0]).abs().mean()
    assert (ours - theirs).abs().mean() < 0.01 * moved


def test_the_two_moments_are_rounded_independently() -> None:
    _, _, reference, state = pair(torch.float32, 1)
    first, second = ((state[name].float() - reference[name]).flatten() for name in ("exp_avg", "exp_avg_sq"))
    away_from_zero = first * reference["exp_avg"].flatten().sign()
    together = float(torch.corrcoef(torch.stack([away_from_zero, second]))[0, 1])
    assert abs(together) < 5 / first.numel() ** 0.5


def test_small_updates_of_bfloat16_parameters_are_kept_on_average() -> None:
    size, steps, lr = 20_000, 40, 1e-4  # an update is 1/10000 of a parameter: far below half a bfloat16 step
    parameters = [nn.Parameter(torch.ones(size, dtype=torch.bfloat16)) for _ in range(2)]
    values: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8}
    for parameter, optimizer in zip(
        parameters,
        (
            RoundedAdamW([parameters[0]], **values),
            torch.optim.AdamW([parameters[1]], weight_decay=0, **values),
        ),
        strict=True,
    ):
        for _ in range(steps):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert torch.equal(parameters[1], torch.ones(size, dtype=torch.bfloat16)), "to nearest, all are lost"
    moved = 1 - parameters[0].detach().double()
    # A walk of `steps` coin tosses, each a step of 1/256 with probability lr · 256.
    chance = lr * 256
    deviation = (steps * chance * (1 - chance) / size) ** 0.5 / 256
    assert abs(float(moved.mean()) - lr * steps) < 5 * deviation + 0.02 * lr * steps


def test_a_second_moment_falls_and_never_becomes_zero() -> None:
    parameter = nn.Parameter(torch.zeros(10_000))
    optimizer = RoundedAdamW([parameter], lr=0.0, betas=(0.9, 0.999), eps=1e-30)
    for step in range(101):
        parameter.grad = torch.full_like(parameter, float(step == 0))
        optimizer.step()
    squares = optimizer.state[parameter]["exp_avg_sq"].double()
    assert float(squares.mean()) == pytest.approx(0.001 * 0.999**100, rel=0.002)  # nearest: 0.001 for ever

    parameter = nn.Parameter(torch.zeros(1000))
    optimizer = RoundedAdamW([parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-30)
    for _ in range(20):
        parameter.grad = torch.full_like(parameter, 1e-20)  # its square is below what bfloat16 has
        optimizer.step()
    assert (optimizer.state[parameter]["exp_avg_sq"] > 0).all()
    assert parameter.abs().max() <= 20 * 1e-3
    parameter = nn.Parameter(torch.zeros(10))
    optimizer = RoundedAdamW([parameter], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    parameter.grad = torch.zeros(10)
    optimizer.step()
    assert not optimizer.state[parameter]["exp_avg_sq"].any()
    assert not parameter.any()


@pytest.mark.full
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_numbers_do_not_depend_on_how_elements_are_cut(dtype: torch.dtype) -> None:
    whole = pair(dtype, 5, rows=12, elements_at_once=10**6)
    for size in (997, 64, 1):  # of 2,304 elements
        cut = pair(dtype, 5, rows=12, elements_at_once=size)
        assert torch.equal(cut[1], whole[1])
        assert all(torch.equal(cut[3][key], whole[3][key]) for key in whole[3])
    other = pair(dtype, 5, rows=12, seed=1)
    assert any(not torch.equal(other[3][key], whole[3][key]) for key in whole[3])


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_mesh_has_the_numbers_of_one_process(dtype: torch.dtype, pool: WorkerPool) -> None:
    expected = helpers.updated(SECTION, shard=0, dtype=dtype, state=True)
    for replicate, shard in ((1, 1), (1, 3), (2, 2)):  # of one parameter two ranks of three have no row
        for found in pool.run(
            replicate * shard, helpers.updated, SECTION, replicate=replicate, dtype=dtype, state=True
        ):
            assert all(np.array_equal(found[key], expected[key]) for key in expected)
    for found in pool.run(2, helpers.updated, SECTION, on_host=True, dtype=dtype, state=True):
        assert all(np.array_equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_state_dict_keeps_the_moments_and_the_noise(dtype: torch.dtype) -> None:
    net = nn.Linear(192, 30, dtype=dtype)
    optimizer = build_optimizer(SECTION, net)

    def steps(net: nn.Module, optimizer: torch.optim.Optimizer, which: range) -> None:
        for step in which:
            generator = torch.Generator().manual_seed(step)
            for parameter in net.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(dtype)
            optimizer.step()

    steps(net, optimizer, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    again = copy.deepcopy(net)
    resumed = build_optimizer(SECTION, again)
    resumed.load_state_dict(saved)
    for mine, its in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert all(torch.equal(mine[key], its[key]) and mine[key].dtype == its[key].dtype for key in mine)
    steps(net, optimizer, range(3, 6))
    steps(again, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    net = helpers.make_net()
    net.head.weight.requires_grad_(False)
    optimizer = build_optimizer(SECTION, net)
    net.odd.weight.grad = torch.ones_like(net.odd.weight)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    optimizer.step()
    changed = {name for name, parameter in net.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == {"odd.weight"}
    assert list(optimizer.state) == [net.odd.weight]


def bfloat16_ledger() -> str:
    model = helpers.make_net().bfloat16()
    optimizer = build_optimizer(SECTION, model)
    fsdp = FSDPConfig(param_dtype="bfloat16", storage_dtype="bfloat16")
    ledger = dtype_ledger(TrainingConfig(recipe="none", fsdp=fsdp, optimizer=SECTION), export="float32")
    with assert_ledger(ledger, model, optimizer):
        for name, parameter in model.named_parameters():
            parameter.grad = helpers.gradients(0)[name].bfloat16()
        optimizer.step()
    return str(ledger)


def test_the_ledger_says_how_it_rounds() -> None:
    said = bfloat16_ledger()
    assert "optimizer bfloat16" in said
    assert said.endswith("what the optimizer stores in fewer bits than float32 gets stochastic rounding")


def test_other_optimizers_warn() -> None:
    config = TrainingConfig(recipe="none", fsdp=FSDPConfig(storage_dtype="bfloat16"))
    assert "are lost" in str(dtype_ledger(config, export="float32"))
    float32 = dtype_ledger(TrainingConfig(recipe="none", optimizer=SECTION), export="float32")
    assert (float32.storage, float32.optimizer) == ("float32", "bfloat16")


class Launches(TorchDispatchMode):
    """Counts the operators that a device would run a kernel for, or several."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "detach" not in func.name()
        return func(*args, **(kwargs or {}))


def launches(parameters: int) -> int:
    """Of a second step, whose parameters are small enough to be updated together."""
    model = nn.ParameterList([nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16)) for _ in range(parameters)])
    optimizer = build_optimizer(SECTION, model)
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Launches() as mode:
        optimizer.step()
    return mode.count


def test_parameters_share_their_kernels() -> None:
    """A model of 8B has 291: at a kernel for each of their steps launching would take longer than updating."""
    each = (launches(30) - launches(10)) / 20
    assert each <= 4  # the count on the host and reading it, and a counter's two
