"""What the loop and a job wire together: figures by arithmetic, the clock, seeds, the ledger, saves, the profiler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp2kit.data.loader import Batch
from fsdp2kit.errors import RunFailure
from fsdp2kit.job.progress import Progress
from fsdp2kit.parity.engine import RankBatches
from fsdp2kit.train import profiling, saving, throughput
from fsdp2kit.train.saving import NoCheckpoints
from fsdp2kit.train.step import cross_entropy
from tests.support.cases import Case, Recorder, Saves, build, run_loop
from tests.support.models import make_batches, tiny_model_dir
from tests.support.workers import WorkerPool
from tests.train.helpers import Evaluates, config_of


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir("smollm2", tmp_path_factory.mktemp("models")).parent


class Padded(RankBatches):
    """Rows of which the loader says that a third of their tokens is padding."""

    def batch(self, index: int) -> list[Batch]:
        return [replace(batch, input_tokens=batch.input_ids.numel() * 2 // 3) for batch in super().batch(index)]


# Figures


def figures(folder: Path, case: Case) -> tuple[dict[str, Any], float, float]:
    """A record of a step of padded rows, the model's FLOPs by parameters and by pairs."""
    sharded = build(config_of(folder, case, steps=1))
    metrics = Recorder(sharded)
    run_loop(sharded, Padded(make_batches(1), 1, sharded.mesh.dp_rank, sharded.mesh.sizes.dp), metrics=metrics)
    flops = sharded.plan.flops
    return metrics.records[0], flops.parameters, flops.attention_per_pair


@pytest.mark.parametrize(("dp", "cp"), [(1, 1), (2, 1), (1, 2)])
def test_speeds_and_flops_are_of_input_tokens_and_of_one_device(
    dp: int, cp: int, pool: WorkerPool, models: Path
) -> None:
    rows = make_batches(1)[0]
    batch = rows.as_batch()
    tokens, capacity = rows.input_ids.numel() * 2 // 3, rows.input_ids.numel()
    for record, parameters, per_pair in pool.run(dp * cp, figures, models, Case("smollm2", dp, cp)):
        seconds = record["step_seconds"]
        assert record["input_tokens"] == tokens
        assert record["packing_efficiency"] == pytest.approx(tokens / capacity)
        assert record["tokens_per_second"] * seconds == pytest.approx(tokens)
        assert record["supervised_tokens_per_second"] * seconds == pytest.approx(batch.supervised_tokens)
        flops = 6 * parameters * tokens + 3 * per_pair * batch.attention_pairs / 2
        assert record["tflops_per_device"] * seconds * 1e12 * dp * cp == pytest.approx(flops)


# The clock


class Clock:
    """Stands in for the module `time`, and goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def wait(self, seconds: float) -> None:
        self.now += seconds


def run_by_the_clock(
    folder: Path,
    steps: int,
    sections: dict[str, dict[str, Any]],
    seconds: tuple[float, float, float],
    losses: Sequence[float] = (),
) -> tuple[list[int], list[float]]:
    """Which steps were saved, and ``step_seconds`` of every step, where a step, an evaluation and a save take so long.

    Args:
        losses: what the evaluations find, in turn.
    """
    clock = Clock()
    of_step, of_evaluation, of_save = seconds
    sharded = build(config_of(folder, Case("smollm2", micro=4), steps=steps, **sections))

    def objective(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        clock.wait(of_step)
        return cross_entropy(model, inputs)

    saves = Saves(lambda step: clock.wait(of_save))
    evaluate = Evaluates(losses, lambda: clock.wait(of_evaluation)) if losses else None
    options: dict[str, Any] = {"checkpoints": saves, "objective": objective, "evaluate": evaluate}
    with pytest.MonkeyPatch.context() as patch:
        for module in (saving, throughput):
            patch.setattr(module, "time", clock)
        metrics = Recorder(sharded)
        run_loop(sharded, RankBatches(make_batches(steps), 4), metrics=metrics, **options)
    return saves.steps, [record["step_seconds"] for record in metrics.records]


def test_neither_evaluations_nor_saves_count_as_training(pool: WorkerPool, models: Path) -> None:
    sections = {"eval": {"every": 1}, "checkpoint": {"every": 2}}
    [(saved, seconds)] = pool.run(1, run_by_the_clock, models, 5, sections, (1.0, 100.0, 1000.0), [2.0] * 5)
    assert saved == [2, 4, 5]
    assert seconds == [1.0] * 5


def test_the_time_to_the_next_checkpoint_begins_with_the_last(pool: WorkerPool, models: Path) -> None:
    sections = {"checkpoint": {"every": "30m"}}
    [(saved, _)] = pool.run(1, run_by_the_clock, models, 8, sections, (600.0, 0.0, 0.0))
    assert saved == [3, 6, 8]


@pytest.mark.parametrize(("keep_best", "saved"), [(True, [1, 2, 4, 6]), (False, [6]), (None, [6])])
def test_the_best_so_far_is_saved_where_it_is_kept(
    keep_best: bool | None, saved: list[int], pool: WorkerPool, models: Path
) -> None:
    sections = {"checkpoint": {"every": 0}, "eval": {"every": 1, "keep_best": keep_best}}
    losses = [3.0, 2.0, 2.5, 1.0, 4.0, 1.0]
    assert pool.run(1, run_by_the_clock, models, 6, sections, (0.5, 0.5, 0.5), losses)[0][0] == saved


# An evaluation's metrics


def shown_where_nothing_is_trained(folder: Path) -> list[list[str]]:
    """Which metrics the console shows of a run that only evaluates."""
    sharded = build(config_of(folder, Case("smollm2"), steps=0))
    evaluate = Evaluates([1.0], shown=["accuracy"])
    shown: list[list[str]] = []
    metrics = Recorder(sharded, on_log=lambda record: shown.append([*metrics.shown]))
    run_loop(sharded, RankBatches(make_batches(1), 1), metrics=metrics, evaluate=evaluate)
    return shown


def test_the_console_shows_an_objectives_metrics_also_where_nothing_is_trained(pool: WorkerPool, models: Path) -> None:
    assert pool.run(1, shown_where_nothing_is_trained, models) == [[["accuracy"]]]


def said_at_an_early_stop(folder: Path) -> list[str]:
    """What a run says whose evaluations are of rewards, which only fall."""
    sharded = build(config_of(folder, Case("smollm2"), steps=5, eval={"every": 1, "patience": 1}))
    evaluate, metrics = Evaluates([-5.0, -4.0], maximizes="eval_reward"), Recorder(sharded)
    run_loop(sharded, RankBatches(make_batches(5), 1), metrics=metrics, evaluate=evaluate)
    return metrics.messages


def test_an_early_stop_names_what_was_measured(pool: WorkerPool, models: Path) -> None:
    (messages,) = pool.run(1, said_at_an_early_stop, models)
    assert "stopped early: step 1 was the best (eval_reward 5)" in messages


# Random streams


def draws(folder: Path, case: Case, first: int) -> list[float]:
    """What a rank draws in each step from ``first`` to the fourth."""
    sharded = build(config_of(folder, case, steps=4))
    drawn: list[float] = []
    torch.manual_seed(dist.get_rank() + 17)  # whatever this process drew before

    def objective(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, None]:
        drawn.append(torch.rand(()).item())
        return model.loss_sum(**inputs), None

    loader = RankBatches(make_batches(4), 4 // sharded.mesh.sizes.dp, sharded.mesh.dp_rank, sharded.mesh.sizes.dp)
    run_loop(sharded, loader, metrics=Recorder(sharded), objective=objective, progress=Progress(step=first))
    return drawn


def test_a_steps_draws_depend_on_the_seed_the_step_and_the_dp_rank_alone(pool: WorkerPool, models: Path) -> None:
    first, second = pool.run(2, draws, models, Case("smollm2", 2), 0)
    assert len({*first, *second}) == 8, "no two steps or ranks draw alike"
    assert pool.run(2, draws, models, Case("smollm2", 2), 2) == [first[2:], second[2:]], (
        "a resume draws as it would have"
    )
    assert pool.run(2, draws, models, Case("smollm2", 1, 2), 0) == [first, first], "ranks of a row draw alike"


# The ledger


def train_under_another_ledger(folder: Path) -> str:
    sharded = build(config_of(folder, Case("smollm2"), steps=1))
    sharded.plan = replace(sharded.plan, ledger=replace(sharded.plan.ledger, gradients="float16"))
    try:
        run_loop(sharded, RankBatches(make_batches(1), 1), metrics=Recorder(sharded))
    except RunFailure as failure:
        return str(failure)
    return ""


def test_a_run_whose_dtypes_are_not_the_ledgers_stops_at_its_first_step(pool: WorkerPool, models: Path) -> None:
    (said,) = pool.run(1, train_under_another_ledger, models)
    assert said == "dtype ledger: gradients should be float16, but torch.float32 was found"


# Saves


class FailsOnRankOne(NoCheckpoints):
    """Background saves of which one rank alone learns that one has failed, after the second step."""

    def __init__(self) -> None:
        self.staged = 0

    def wait_until_staged(self) -> None:
        self.staged += 1

    def has_failed(self) -> bool:
        return dist.get_rank() == 1 and self.staged == 2

    def finish_save(self) -> None:
        raise RunFailure(f"after {self.staged} updates")


def train_until_a_save_fails(folder: Path) -> str:
    sharded = build(config_of(folder, Case("smollm2", 2), steps=5))
    loader = RankBatches(make_batches(5), 1, sharded.mesh.dp_rank, 2)
    try:
        run_loop(sharded, loader, metrics=Recorder(sharded), checkpoints=FailsOnRankOne())
    except RunFailure as failure:
        return str(failure)
    return "trained on"


def test_a_save_that_one_rank_knows_has_failed_stops_all_at_the_same_step(pool: WorkerPool, models: Path) -> None:
    assert pool.run(2, train_until_a_save_fails, models) == ["after 2 updates"] * 2


class Positions(Saves):
    """The progress of every save."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[Progress] = []

    def save(self, progress: Progress, *, is_over: bool) -> None:
        self.saved.append(progress)


class FromAStream(RankBatches):
    def state(self, index: int) -> Any:
        return {"position": index}


def saved_positions(folder: Path) -> list[tuple[str | None, Any]]:
    sharded = build(config_of(folder, Case("smollm2"), steps=2, checkpoint={"every": 1}))
    metrics, saves = Recorder(sharded), Positions()
    metrics.wandb_id = "abc123"
    run_loop(sharded, FromAStream(make_batches(2), 1), metrics=metrics, checkpoints=saves)
    return [(progress.wandb_id, progress.data) for progress in saves.saved]


def test_a_save_knows_the_wandb_run_and_where_the_data_stand(pool: WorkerPool, models: Path) -> None:
    assert pool.run(1, saved_positions, models) == [[("abc123", {"position": 1}), ("abc123", {"position": 2})]]


class Ends(Saves):
    """For every save, its step and whether the run is over."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[tuple[int, bool]] = []

    def save(self, progress: Progress, *, is_over: bool) -> None:
        assert progress.unevaluated is None
        self.saved.append((progress.step, is_over))


def saves_of_a_run_with_an_evaluation_left(folder: Path, step: int) -> list[tuple[int, bool]]:
    """A run of two steps, which was stopped in the evaluation after a step, goes on."""
    config = config_of(folder, Case("smollm2"), steps=2, eval={"every": 1})
    saves = Ends()
    sharded = build(config)
    progress = Progress(step=step, unevaluated={"step": step})
    evaluate = Evaluates([1.0, 2.0])
    options = {"checkpoints": saves, "progress": progress, "evaluate": evaluate}
    run_loop(sharded, RankBatches(make_batches(2), 1), metrics=Recorder(sharded), **options)
    return saves.saved


def test_a_run_whose_last_evaluation_was_left_is_saved_as_over_after_it(pool: WorkerPool, models: Path) -> None:
    """Else every later start would evaluate it again."""
    assert pool.run(1, saves_of_a_run_with_an_evaluation_left, models, 2) == [[(2, True)]]
    assert pool.run(1, saves_of_a_run_with_an_evaluation_left, models, 1) == [[(2, True)]]


# The profiler


def profiler_of_a_resumed_run(folder: Path) -> tuple[int, int]:
    """Which step of the run the profiler is told that it starts with, and how many it is told to expect."""
    told: list[tuple[int, int]] = []
    original = profiling.StepProfiler

    def record(*args: Any, steps: int, first_step: int, **options: Any) -> Any:
        told.append((first_step, steps))
        return original(*args, steps=steps, first_step=first_step, **options)

    profiling.StepProfiler = record
    try:
        sharded = build(config_of(folder, Case("smollm2"), steps=4))
        run_loop(sharded, RankBatches(make_batches(4), 1), metrics=Recorder(sharded), progress=Progress(step=3))
    finally:
        profiling.StepProfiler = original
    return told[0]


def test_the_profiler_of_a_resumed_run_knows_its_steps(pool: WorkerPool, models: Path) -> None:
    assert pool.run(1, profiler_of_a_resumed_run, models) == [(4, 1)]
