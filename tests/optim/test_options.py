"""Muon and low-bit AdamW on shards equal torch's and torchao's own on whole tensors; runs resume bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fsdp2kit.config.checks import check_config
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.config.sections.lr_schedule import PlainScheduleConfig
from fsdp2kit.config.sections.optimizer import OptimizerConfig
from fsdp2kit.errors import UserError
from fsdp2kit.optim.build import block_size, build_lr_schedule, build_optimizer
from fsdp2kit.optim.muon import hidden_matrices
from tests.optim import helpers
from tests.support.models import ADAMW_8BIT, full, needs_torchao
from tests.support.workers import WorkerPool

VALUES: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.98), "eps": 1e-7, "weight_decay": 0.1}
OPTIONS = ["muon", ADAMW_8BIT, "adamw_bf16"]
EXACT = ["muon", ADAMW_8BIT]  # test_rounded_adamw.py has the bounds of the other
MUON = {"wide.weight", "tall.weight", "same.weight", "odd.weight", "row.weight"}
LAYOUTS = [(1, 1), pytest.param(3, 1, marks=pytest.mark.slow), full(4, 2)]  # ranks, replicas


def section_of(name: str) -> OptimizerConfig:
    return TrainingConfig.model_validate({"recipe": "x", "optimizer": {"name": name, **VALUES}}).optimizer


def plain_run(build: Callable[[dict[str, Tensor]], list[torch.optim.Optimizer]]) -> dict[str, np.ndarray]:
    """The parameters after the same steps in one process, on whole tensors, with optimizers built by the test."""
    named = dict(helpers.make_net().named_parameters())
    optimizers = build(dict(named))
    with torch.compiler.set_stance("force_eager"):
        for step in range(helpers.STEPS):
            for name, gradient in helpers.gradients(step).items():
                named[name].grad = gradient
            for optimizer in optimizers:
                optimizer.step()
    return {name: parameter.numpy(force=True) for name, parameter in named.items()}


def adamw(parameters: dict[str, Tensor]) -> list[torch.optim.Optimizer]:
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW([group for group in groups if group["params"]], **VALUES)]


def muon(parameters: dict[str, Tensor]) -> list[torch.optim.Optimizer]:
    matrices = [parameters.pop(name) for name in sorted(MUON)]
    theirs = torch.optim.Muon(matrices, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return [theirs, *adamw(parameters)]


def torchao_8bit(parameters: dict[str, Tensor]) -> list[torch.optim.Optimizer]:
    from torchao import optim

    large = [parameters.pop(name) for name in ("embed.weight", "wide.weight", "same.weight", "head.weight")]
    tall = [parameters.pop("tall.weight"), parameters.pop("experts")]  # rows of 192 = 3 × 64, and of 64
    return [optim.AdamW8bit(large, **VALUES), optim.AdamW8bit(tall, block_size=64, **VALUES), *adamw(parameters)]


REFERENCES = {"muon": muon, "adamw_8bit": torchao_8bit}


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(("ranks", "replicas"), LAYOUTS)
def test_updates_equal_those_of_whole_tensors(name: str, ranks: int, replicas: int, pool: WorkerPool) -> None:
    expected = plain_run(REFERENCES[name])
    if name != "muon" and ranks == replicas:
        del expected["row.weight"]  # on several shards it stays float32, because one would have no row
    for found in pool.run(ranks, helpers.updated, section_of(name), replicate=replicas):
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, rtol=0, atol=1e-6, err_msg=key)
    start = {key: p.numpy(force=True) for key, p in helpers.make_net().named_parameters()}
    assert all(np.abs(expected[key] - start[key]).max() > 1e-3 for key in expected), "the updates are far above that"


@pytest.mark.full
def test_muon_is_the_same_with_its_state_on_the_host(pool: WorkerPool) -> None:
    plain, hosted = (pool.run(2, helpers.updated, section_of("muon"), on_host=on_host)[0] for on_host in (False, True))
    assert all(np.array_equal(plain[name], hosted[name]) for name in plain)


def test_muon_takes_linear_maps_alone() -> None:
    net = helpers.make_net()
    net.odd.weight.requires_grad_(False)
    found = {id(matrix) for matrix in hidden_matrices(net)}
    assert {name for name, p in net.named_parameters() if id(p) in found} == MUON - {"odd.weight"}
    net.head.weight = net.embed.weight
    assert len(hidden_matrices(net)) == len(MUON) - 1


@pytest.mark.parametrize("name", [full("muon"), *OPTIONS[1:]])
def test_a_resumed_run_goes_on_bit_for_bit(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    for straight, resumed in pool.run(2, helpers.interrupted, tmp_path, section_of(name)):
        assert straight.keys() == resumed.keys()
        assert all(np.array_equal(straight[key], resumed[key]) for key in straight)
    codes = {key for key in straight if key.endswith(".codes")}
    assert bool(codes) == (name == "adamw_8bit")
    assert all(straight[key].dtype == np.uint8 for key in codes)


@pytest.mark.full
@pytest.mark.parametrize("name", [*EXACT, pytest.param("adamw_bf16", marks=pytest.mark.slow)])
def test_a_checkpoint_is_read_on_any_number_of_ranks(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, helpers.interrupted, tmp_path, section_of(name))
    (expected, *_) = pool.run(2, helpers.restored, tmp_path, section_of(name))
    for ranks in (1, 3):
        for found in pool.run(ranks, helpers.restored, tmp_path, section_of(name)):
            assert found.keys() == expected.keys()
            assert all(np.array_equal(found[key], expected[key]) for key in expected)


@needs_torchao
def test_moments_in_another_format_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    pool.run(2, helpers.interrupted, tmp_path, section_of("adamw_bf16"))
    with pytest.raises(AssertionError, match=r"UserError: .*exp_avg.* moments are stored in another format"):
        pool.run(2, helpers.restored, tmp_path, section_of("adamw_8bit"))


def test_blocks_stay_within_rows() -> None:
    sizes = {(97, 256): 256, (64, 576): 64, (64, 1536): 256, (8, 64, 96): 32, (64, 100): None, (4, 256): None}
    for shape, block in sizes.items():
        assert block_size(torch.empty(shape)) == block
    assert block_size(torch.empty(8192)) is None


@needs_torchao
def test_low_bit_state_does_not_depend_on_the_mesh(pool: WorkerPool) -> None:
    one, two = (pool.run(ranks, helpers.trained, section_of("adamw_8bit"))[0] for ranks in (1, 2))
    assert one.keys() == two.keys()
    for key in one:
        if key.endswith(".scale"):
            np.testing.assert_allclose(one[key], two[key], rtol=1e-4, atol=1e-9, err_msg=key)


@pytest.mark.full
@pytest.mark.parametrize("name", ["adamw", *OPTIONS])
def test_the_ledger_says_what_moments_are(name: str, pool: WorkerPool) -> None:
    kept = {"adamw": "float32", "muon": "float32", "adamw_bf16": "bfloat16"}.get(name, "uint8 or float32")
    assert pool.run(2, helpers.ledger_of_a_step, section_of(name), None) == [kept] * 2
    for said in pool.run(2, helpers.ledger_of_a_step, section_of(name), "float16"):
        assert said.startswith("dtype ledger: optimizer should be float16, but torch.")
    if name == "adamw_8bit":
        for said in pool.run(2, helpers.ledger_of_a_step, section_of(name), "float32"):
            assert said == "dtype ledger: optimizer should be float32, but torch.uint8 was found"


@pytest.mark.parametrize("name", OPTIONS)
def test_one_schedule_moves_every_group(name: str) -> None:
    optimizer = build_optimizer(section_of(name), helpers.make_net())
    schedule = build_lr_schedule(PlainScheduleConfig(name="linear", warmup_steps=4), optimizer, total_steps=8, step=1)
    rates = []
    for _ in range(3):
        assert len({float(group["lr"]) for group in optimizer.param_groups}) == 1
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([0.0025, 0.005, 0.0075], rel=1e-6)


def test_what_does_not_go_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**sections: Any) -> str:
        values = {"recipe": "x", "model": {"path": "m"}, "train": {"steps": 1}, **sections}
        with pytest.raises(UserError) as caught:
            check_config(TrainingConfig.model_validate(values), world_size=1, local_world_size=1)
        return str(caught.value)

    for offload in ("params", "optimizer"):
        text = said(optimizer={"name": "adamw_8bit"}, fsdp={"offload": offload})
        assert text.startswith(f"fsdp.offload: '{offload}' with optimizer.name = 'adamw_8bit'")
    text = said(optimizer={"name": "adamw_8bit"}, fsdp={"storage_dtype": "bfloat16"})
    assert text.startswith("fsdp.storage_dtype: 'bfloat16' with optimizer.name = 'adamw_8bit'")
    assert said(optimizer={"name": "muon"}, fsdp={"offload": "params"}).startswith("fsdp.offload: 'params' with")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'torchao>=0.18'" in said(optimizer={"name": "adamw_8bit"})


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UserError, match=r"optimizer\.name.*pip install 'torchao>=0\.18'"):
        build_optimizer(section_of("adamw_8bit"), helpers.make_net())
