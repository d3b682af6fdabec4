"""Fewer experts than ranks: each rank holds a part of every expert, and none holds padding."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import local_part
from fsdp2kit.parity.engine import Sharded
from fsdp2kit.parity.reference import errors, plain_loop, worst_relative
from tests.planner.helpers.models import MIXTRAL, config_of, planned, rl_config, small
from tests.support.cases import Case, run_cases
from tests.support.models import beyond, demo_model_dir, full, make_batches, slow, tiny_model_dir
from tests.support.runs import losses, resume, runner, write_run
from tests.support.workers import WorkerPool

CASES = [
    Case("mixtral_few", 2, 2, 1, checkpointing="full"),
    Case("mixtral_few", 4, 1, 1, (("strategy", "shard_grad_op"),), checkpointing="selective"),
]


def held_on_this_rank(folder: Path, case: Case) -> dict[str, int]:
    """Elements of this rank's shard of each parameter of experts."""
    sharded = Sharded(case.config(folder, steps=1, rows=4), world=distributed.start())
    return {name: local_part(p).numel() for name, p in sharded.model.named_parameters() if p.ndim == 3}


@pytest.mark.full
def test_training_equals_the_plain_loop(pool: WorkerPool, tmp_path: Path) -> None:
    path = tiny_model_dir("mixtral_few", tmp_path)
    exact, other = (plain_loop(path, make_batches(), lr=1e-3, micro_batch_size=size) for size in (4, 1))
    for case, found in zip(CASES, pool.run(4, run_cases, tmp_path, CASES)[0], strict=True):
        assert found.gradients.keys() == exact.gradients.keys()
        assert not beyond(errors(found, exact), errors(other, exact)), case


@pytest.mark.full
def test_every_rank_holds_as_much(pool: WorkerPool, tmp_path: Path) -> None:
    tiny_model_dir("mixtral_few", tmp_path)
    first, *others = pool.run(4, held_on_this_rank, tmp_path, Case("mixtral_few", 4, 1, 1))
    assert first
    assert all(sizes == first for sizes in others)
    assert all(size > 0 for size in first.values())


@pytest.mark.full
def test_the_plan_has_no_padding() -> None:
    """Eight experts take as much of 16 ranks as of 8, but not where they go to an engine, in rows."""
    eight, sixteen = (planned(config_of(small(MIXTRAL), ranks=ranks), ranks=ranks) for ranks in (8, 16))
    whole = [plan.peaks["save"].bytes["parameters"] * ranks for plan, ranks in ((eight, 8), (sixteen, 16))]
    assert whole[1] == pytest.approx(whole[0], rel=1e-3)
    rewards = {
        "reward": [{"function": "a:b"}],
        "data": {"path": "x", "seq_len": 512},
        "train": {"global_batch_size": 32},
    }
    padded = planned(rl_config(small(MIXTRAL), **rewards), ranks=16).peaks["save"].bytes["parameters"] * 16
    assert padded > 1.5 * whole[0]


# Where a run saves, and where it is resumed. Both ways with one optimizer; each of them once.
RESUMED = {
    "adamw": ((4, 2), (4, 1), (2, 4)),
    "adamw_bf16": ((4, 2),),
    "adamw_8bit": ((4, 2),),
    "muon": ((4, 2),),
}


@pytest.mark.parametrize("optimizer", [full(name) if name == "adamw" else slow(name) for name in RESUMED])
def test_resumes_on_a_mesh_where_they_are_sharded_by_rows(optimizer: str, pool: WorkerPool, tmp_path: Path) -> None:
    if optimizer == "adamw_8bit":
        pytest.importorskip("torchao")
    toml = write_run(
        demo_model_dir(tmp_path, kind="mixtral_few"),
        steps=4,
        checkpoint='every = 2, keep = 9, export_hf = "never"',
        more=f'optimizer.name = "{optimizer}"',
    )
    run, straight = runner(pool, toml), {}
    for size in dict.fromkeys(saved for saved, _ in RESUMED[optimizer]):
        run(tmp_path / f"straight-{size}", size)
        straight[size] = losses(tmp_path / f"straight-{size}")
        assert worst_relative(straight[size], straight[4]) < 1e-5
    for saved, resumed in RESUMED[optimizer]:
        checkpoint = tmp_path / f"straight-{saved}" / "checkpoints" / "step-000002"
        records = resume(run, checkpoint, tmp_path / f"{saved}-{resumed}", resumed)
        assert worst_relative([line["loss"] for line in records], straight[saved][2:]) < 1e-5
