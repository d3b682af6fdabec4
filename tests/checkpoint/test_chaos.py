"""Killed at any moment, a run loses nothing that was complete and ends as if it had never been killed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.chaos import Harness, Kill, draw, tally
from tests.support.models import demo_model_dir, slow
from tests.support.short_run import EVERY, STEPS, TOML, outcome

SIZE = 2


def kill_runs(folder: Path, *, runs: int, seed: int, options: Sequence[str] = ()) -> list[Kill]:
    """Kill so many runs, half of which save asynchronously; every one must end as the one that is not killed."""
    toml = folder / "run.toml"
    toml.write_text(TOML)
    harness = Harness(folder / "starts", toml=toml, size=SIZE)
    assert harness.start([f"run.dir='{folder / 'straight'}'", *options]) == -1
    expected = outcome(folder / "straight")
    assert len(expected[0]) == STEPS
    generator, kills, killed_runs = random.Random(seed), [], 0
    while killed_runs < runs:
        run_dir = folder / f"run-{killed_runs:03d}"
        shutil.rmtree(run_dir, ignore_errors=True)  # of one that came to its end before its doom did
        dooms = [draw(generator, size=SIZE, saves=STEPS // EVERY) for _ in range(generator.randint(1, 3))]
        is_async = str(killed_runs % 2 == 1).lower()
        found = harness.kill_and_resume(run_dir, [f"checkpoint.async_save={is_async}", *options], dooms)
        assert outcome(run_dir) == expected, f"{run_dir}: {found}"
        kept = sorted(path.name for path in (run_dir / "checkpoints").glob("*"))
        if found and found[-1].newest == STEPS:
            kept = kept[-1:]  # killed between publication and retention: a start that trains no step deletes nothing
        assert kept == [f"step-{STEPS:06d}"]
        kills += found
        killed_runs += bool(found)
    return kills


@pytest.mark.parametrize("runs", [1, slow(3)])
def test_killed_runs_end_as_if_they_had_not_been(
    runs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kills = kill_runs(tmp_path, runs=runs, seed=1)
    with capsys.disabled():
        print(f"\n{tally(kills)}")


@pytest.mark.full
def test_killed_runs_of_partitioned_experts_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what they kept goes on with another ep as what was never killed goes on with the same."""
    model = demo_model_dir(tmp_path / "model", kind="qwen3_moe")
    options = [f"model.path='{model}'", "model.weights=pretrained", "model.config=none"]
    kills = kill_runs(tmp_path, runs=2, seed=5, options=[*options, "mesh.ep=2"])
    harness, losses = Harness(tmp_path / "more", toml=tmp_path / "run.toml", size=SIZE), []
    for name, ep in (("straight", 2), ("run-001", 1)):
        more = [f"run.dir='{tmp_path / name}'", f"mesh.ep={ep}", f"train.steps={STEPS + 2}"]
        assert harness.start([*options, *more]) == STEPS
        losses.append([number[1] for number in outcome(tmp_path / name)[0]])
    assert len(losses[0]) == STEPS + 2
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    with capsys.disabled():
        print(f"\n{tally(kills)}")


@pytest.mark.slow
def test_killed_runs_with_adapters_lose_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What they keep is the adapters; the model beside them comes from its own directory at every start."""
    model = demo_model_dir(tmp_path / "model")
    options = [f"model.path='{model}'", "model.weights=pretrained", "model.config=none", "lora.rank=4"]
    kills = kill_runs(tmp_path, runs=2, seed=3, options=options)
    [kept] = (tmp_path / "run-000" / "hf").glob("*.safetensors")
    assert kept.name == "adapter_model.safetensors"
    with capsys.disabled():
        print(f"\n{tally(kills)}")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_killed_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kills = kill_runs(tmp_path, runs=100, seed=2)
    with capsys.disabled():
        print(f"\n{tally(kills)}")
