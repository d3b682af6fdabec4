"""The compiled update beside plain operations: by Inductor for a CPU, and what is done if it fails or differs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from logging.handlers import BufferingHandler
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fsdp2kit.config.schema import AdamWConfig
from fsdp2kit.optim import build, update_kernel
from fsdp2kit.optim.rounded_adamw import RoundedAdamW
from fsdp2kit.optim.rounded_update import counter, rounded_update, update_factors
from fsdp2kit.optim.update_kernel import Shard, UpdateKernel
from fsdp2kit.torch_compat import compiled_graphs
from tests.optim import helpers
from tests.support.workers import WorkerPool

# (runs, elements of each, elements that lie before the gradient)
SHAPES = [(1, 1001, 0), (1, 37, 8), (1, 100, 3), (3, 501, 0), (7, 64, 1), (1, 5000, 0)]


def shard_of(runs: int, length: int, before: int, dtype: torch.dtype, *, step: int) -> Shard:
    generator = torch.Generator().manual_seed(runs + length)

    def numbers(kind: torch.dtype, offset: int = 0) -> Tensor:
        drawn = torch.randn(offset + runs * length, generator=generator).to(kind)
        return drawn[offset:].view(runs, length)

    tensors = numbers(dtype), numbers(dtype, before), numbers(torch.bfloat16), numbers(torch.bfloat16).abs()
    factors = update_factors(lr=0.01 / step, betas=(0.9, 0.98), eps=1e-7, weight_decay=0.1, step=step)
    return Shard(*tensors, counter=2**31 - 500, stride=2**30 + 77, factors=factors)


def by_plain_operations(shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
    runs, length = shard.parameter.shape
    starts = [shard.counter + run * shard.stride for run in range(runs)]
    counters = torch.cat([counter(start, start=0, length=length, device=torch.device("cpu")) for start in starts])
    inputs = [tensor.flatten() for tensor in shard.tensors]
    return rounded_update(*inputs, counters=counters, factors=torch.tensor(shard.factors))


def exact_root(tensor: Tensor) -> Tensor:
    """torch's own square root on a CPU, MKL's, may differ in float32's last bit."""
    return tensor.copy_(torch.from_numpy(np.sqrt(tensor.numpy())))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor's imports
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_updates_equal_plain_ones_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, graphs = UpdateKernel(), compiled_graphs()
    for step, shape in enumerate(SHAPES, start=1):
        shard = shard_of(*shape, dtype, step=step)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "sqrt_", exact_root)
            expected = by_plain_operations(shard)
        assert kernel.update([shard]) == []
        found = (shard.parameter, shard.exp_avg, shard.exp_avg_sq)
        assert all(torch.equal(mine.flatten(), other) for mine, other in zip(found, expected, strict=True))
    assert compiled_graphs() - graphs <= 4, "one run, several, and gradients that begin elsewhere"


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile returns runs as it was written."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def stepped(parameter: Tensor, *, compiles: bool | None) -> list[Tensor]:
    mine = nn.Parameter(parameter.clone())
    optimizer = RoundedAdamW([mine], lr=0.01, betas=(0.9, 0.98), eps=1e-7, weight_decay=0.1, compiles=compiles)
    for step in range(3):
        mine.grad = torch.randn(mine.shape, generator=torch.Generator().manual_seed(step)).to(mine.dtype)
        optimizer.step()
    return [mine.detach(), *optimizer.state[mine].values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_by_kernels_equal_plain_steps(dtype: torch.dtype, as_written: None, monkeypatch: Any) -> None:
    parameter = torch.randn(30, 41, generator=torch.Generator().manual_seed(0)).to(dtype)
    monkeypatch.setattr(update_kernel, "_MOST", 997)
    assert all(map(torch.equal, stepped(parameter, compiles=True), stepped(parameter, compiles=False)))


def fails(*_: Any) -> Any:
    raise RuntimeError("no compiler\nand more")


def without_noise(parameter: Tensor, gradient: Tensor, first: Tensor, second: Tensor, *rest: Tensor) -> None:
    new = rounded_update(parameter, gradient, first, second, torch.zeros_like(parameter, dtype=torch.int32), rest[1])
    for target, value in zip((parameter, first, second), new, strict=True):
        target.copy_(value)


@pytest.mark.parametrize(
    ("other", "says"),
    [(fails, "cannot be used here (RuntimeError: no compiler); the run"), (without_noise, "other numbers")],
)
def test_what_fails_or_differs_is_left_with_one_warning(
    other: Any, says: str, as_written: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(update_kernel, "_update_run", other)
    parameter = torch.randn(30, 41)
    assert all(map(torch.equal, stepped(parameter, compiles=True), stepped(parameter, compiles=False)))
    (record,) = caplog.records
    assert says in record.getMessage()


def test_a_failure_after_the_trial_is_finished_by_plain_operations(
    as_written: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parameter = torch.randn(30, 41)
    monkeypatch.setattr(update_kernel, "_update_run", fails)
    monkeypatch.setattr(UpdateKernel, "_agrees", lambda *_: True)
    assert all(map(torch.equal, stepped(parameter, compiles=True), stepped(parameter, compiles=False)))
    assert len(caplog.records) == 1


def test_parameters_on_the_host_are_updated_by_plain_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ``fsdp.offload = "params"``: nothing is compiled."""
    monkeypatch.setattr(torch, "compile", fails)
    parameter = torch.randn(30, 41)
    assert all(map(torch.equal, stepped(parameter, compiles=None), stepped(parameter, compiles=False)))


@contextmanager
def exact_roots() -> Iterator[None]:
    with patch.object(Tensor, "sqrt_", exact_root):
        yield


def on_a_mesh(way: str, on_host: bool, dtype: torch.dtype) -> tuple[list[str], list[str], int]:
    """Steps on FSDP2's shards beside plain steps of whole parameters: tensors that differ, warnings, and graphs.

    Args:
        way: "compiled"; "as written": without a compiler; "fails": the compiler does.
        on_host: whether moments are brought from the host and taken back in parts.
    """
    section = AdamWConfig(name="adamw_bf16", lr=0.01, betas=(0.9, 0.98), eps=1e-7, weight_decay=0.1)
    steps = partial(helpers.updated, section, dtype=dtype, state=True)
    with exact_roots():
        expected = steps(shard=0)
    torch.compiler.reset()
    warnings, graphs = BufferingHandler(1000), compiled_graphs()
    logging.getLogger("fsdp2kit").addHandler(warnings)
    try:
        with patch.object(build, "RoundedAdamW", partial(RoundedAdamW, compiles=True)):
            if way == "compiled":
                found = steps(second=True, on_host=on_host)
            else:
                with exact_roots(), patch.object(torch, "compile", lambda f, **_: f if way == "as written" else fails):
                    found = steps(second=True, on_host=on_host)
    finally:
        logging.getLogger("fsdp2kit").removeHandler(warnings)
    assert found.keys() == expected.keys()
    differing = [name for name, value in found.items() if not np.array_equal(value, expected[name])]
    return differing, [record.getMessage() for record in warnings.buffer], compiled_graphs() - graphs


@pytest.mark.parametrize("on_host", [False, True])
def test_shards_of_a_mesh_are_updated_as_whole_parameters(on_host: bool, pool: WorkerPool) -> None:
    for differing, warnings, graphs in pool.run(2, on_a_mesh, "as written", on_host, torch.bfloat16):
        assert (differing, warnings, graphs) == ([], [], 0)


@pytest.mark.full
@pytest.mark.parametrize(("on_host", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_compiled_updates_of_shards_are_those_of_whole_parameters(
    on_host: bool, dtype: torch.dtype, pool: WorkerPool
) -> None:
    for differing, warnings, graphs in pool.run(2, on_a_mesh, "compiled", on_host, dtype):
        assert (differing, warnings) == ([], [])
        assert 2 <= graphs <= 4, "one run, several, and gradients that begin elsewhere"


@pytest.mark.parametrize("on_host", [False, True])
def test_a_rank_whose_compiler_fails_warns_once(on_host: bool, pool: WorkerPool) -> None:
    for differing, warnings, _ in pool.run(2, on_a_mesh, "fails", on_host, torch.float32):
        assert differing == []
        (warning,) = warnings
        assert "cannot be used here (RuntimeError: no compiler)" in warning
