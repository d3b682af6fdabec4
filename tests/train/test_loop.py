"""The loop: normalisation, when gradients are reduced, non-finite steps, evaluation, stopping, agreement."""

from __future__ import annotations

import itertools
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor

from fsdp2kit.config.schema import CheckpointConfig, EvalConfig, FSDPConfig, MeshConfig, TrainConfig
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.job import distributed
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.job.process import seconds_alive
from fsdp2kit.job.progress import Progress
from fsdp2kit.job.stop import Stopped, listening
from fsdp2kit.parity.engine import RankBatches
from fsdp2kit.parity.reference import (
    IGNORE,
    Rows,
    cross_entropy_sum,
    errors,
    load_plain,
    plain_logits,
    plain_loop,
)
from fsdp2kit.train import evaluation, loop, notices, saving
from fsdp2kit.train.evaluating import Evaluations
from fsdp2kit.train.evaluation import build_evaluation
from fsdp2kit.train.loop import stream_seed
from fsdp2kit.train.run import Run
from fsdp2kit.train.step import (
    accumulate_gradients,
    clip_gradients,
    cross_entropy,
    gradient_norm,
    is_due,
    next_batch,
    step_figures,
)
from tests.support.cases import Case, Recorder, Saves, build, run_cases, run_loop
from tests.support.models import VOCABULARY, beyond, full, make_batches, slow, tiny_model, tiny_model_dir
from tests.support.traffic import count_traffic
from tests.support.workers import WorkerPool
from tests.train.helpers import Evaluates, config_of

POISON = VOCABULARY - 1  # a token whose embedding is infinite in the models of the non-finite tests


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in ("smollm2", "llama3", "granite", "cohere"):
        tiny_model_dir(kind, folder)
    poisoned = tiny_model("llama3")
    poisoned.get_input_embeddings().weight.data[POISON] = float("inf")
    poisoned.save_pretrained(folder / "poisoned")
    return folder


# Normalisation


def _lopsided() -> list[Rows]:
    """Rows with 1, 0, all and 3 targets: on four ranks, one has none; with cp, parts of rows have none."""
    batches = make_batches(2)
    for batch in batches:
        batch.labels[:, :-1] = batch.input_ids[:, 1:]
        batch.labels[:, -1] = IGNORE
        batch.labels[0, :40] = IGNORE
        batch.labels[0, 41:] = IGNORE
        batch.labels[1] = IGNORE
        batch.labels[3, 3:] = IGNORE
    return batches


@pytest.mark.parametrize(
    "kind",
    ["llama3", full("granite"), *(pytest.param(each, marks=pytest.mark.slow) for each in ("smollm2", "cohere"))],
)
def test_tokens_weigh_the_same_wherever_they_lie(kind: str, pool: WorkerPool, models: Path) -> None:
    batches = _lopsided()
    assert [int((row != IGNORE).sum()) for row in batches[0].labels] == [1, 0, 47, 3]
    plain, other = (plain_loop(models / kind, batches, micro_batch_size=size, lr=1e-3) for size in (4, 1))
    cases = [Case(kind, 4, 1), Case(kind, 2, 2), Case(kind, 2, 2, 2), Case(kind, 1, 4, 2)]
    if kind == "smollm2":
        cases.append(Case(kind, 4, 1, fsdp=(("strategy", "no_shard"),)))
    for case, found in zip(cases, pool.run(4, run_cases, models, cases, batches)[0], strict=True):
        assert not beyond(errors(found, plain), errors(other, plain)), case


# Reductions


UNITS = 3  # two layers and the root


@pytest.mark.parametrize(
    ("fsdp", "kind", "every"),
    [
        ((), "reduce_scatter", True),
        ((("reduce_every_micro_batch", False),), "reduce_scatter", False),
        full((("strategy", "shard_grad_op"),), "reduce_scatter", True),
        full((("strategy", "no_shard"),), "all_reduce", False),
        # Sums in bfloat16 would lose what float32 keeps.
        full((("storage_dtype", "bfloat16"),), "reduce_scatter", False),
        full((("storage_dtype", "bfloat16"), ("reduce_every_micro_batch", True)), "reduce_scatter", True),
    ],
)
def test_sharded_gradients_are_reduced_with_every_micro_batch(
    fsdp: tuple[tuple[str, Any], ...], kind: str, every: bool, pool: WorkerPool, models: Path
) -> None:
    for found in pool.run(2, _count_reductions, models, Case("smollm2", 2, 1, fsdp=fsdp)):
        expected = [UNITS * number if every else 0 for number in range(5)]
        assert found[kind] == [*expected[:-1], expected[-1] if every else UNITS]


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
def test_replicas_of_shards_are_reduced_once_a_step(strategy: str, pool: WorkerPool, models: Path) -> None:
    """Shards of every micro-batch add up on each rank; then they are summed between the replicas."""
    case = Case("smollm2", 4, 1, fsdp=(("strategy", strategy),), dp_replicate=2)
    for found in pool.run(4, _count_reductions, models, case):
        assert found["reduce_scatter"] == [UNITS * number for number in range(3)]
        assert found["all_reduce"] == [0, 0, UNITS]


def _count_reductions(folder: Path, case: Case) -> dict[str, list[int]]:
    """Reductions done when each micro-batch starts, and in all."""
    sharded = build(case.config(folder, steps=1, rows=8))
    mesh, model = sharded.mesh, sharded.model
    batch = next_batch(RankBatches(make_batches(1, rows=8), 1, mesh.dp_rank, mesh.sizes.dp), 0, mesh=mesh)
    done: dict[str, list[int]] = {"reduce_scatter": [], "all_reduce": []}

    def note() -> None:
        for kind, counts in done.items():
            counts.append(traffic.calls.get(kind, 0))

    def inputs(micro: Any) -> dict[str, Any]:
        note()
        return sharded.inputs(micro)

    with count_traffic() as traffic:
        accumulate_gradients(model, batch, objective=cross_entropy, shard=inputs, fsdp=sharded.config.fsdp)
        note()
    assert all(parameter.grad is not None for parameter in model.parameters())
    return done


# The gradient norm


def test_the_norm_of_a_large_gradient_is_exact() -> None:
    """Torch's own in float32 adds millions of squares up one after the other on a CPU, so shards change it."""
    layer = nn.Embedding(1 << 17, 128)
    layer.weight.grad = torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0))
    expected = layer.weight.grad.double().square().sum().sqrt().item()
    assert gradient_norm(layer).item() == pytest.approx(expected, rel=1e-6)


# Non-finite steps


def _poisoned_batches() -> list[Rows]:
    """Four steps of two rows each; the third step's second row holds the token whose embedding is infinite."""
    batches = [batch[0:2] for batch in make_batches(4)]
    for batch in batches:
        batch.input_ids.remainder_(POISON)
        batch.labels[batch.labels == POISON] = 0
    batches[2].input_ids[1, 0] = POISON
    return batches


def _train_poisoned(
    folder: Path, choice: str, most: int = 5, progress: Progress | None = None
) -> tuple[list[dict[str, Any]], list[list[bytes]], str]:
    """Records, this rank's shards after each step (and at the end), and the failure's message."""
    section = {"on_nonfinite": choice, "max_nonfinite": most}
    sharded = build(config_of(folder, Case("poisoned", 2, 1), steps=4, rows=2, train=section))
    shards: list[list[bytes]] = []

    def keep(record: dict[str, Any] | None = None) -> None:
        shards.append([parameter.to_local().detach().numpy().tobytes() for parameter in sharded.model.parameters()])

    metrics = Recorder(sharded, on_log=keep)
    try:
        loader = RankBatches(_poisoned_batches(), 1, sharded.mesh.dp_rank, 2)
        run_loop(sharded, loader, metrics=metrics, progress=progress)
    except RunFailure as failure:
        metrics.message(str(failure))
    keep()
    return metrics.records, shards, next(line for line in reversed(metrics.messages) if line.startswith("step "))


def test_a_nonfinite_step_stops_naming_step_and_rank(pool: WorkerPool, models: Path) -> None:
    for records, shards, message in pool.run(2, _train_poisoned, models, "stop"):
        assert message.startswith("step 3: the loss is not finite on rank 1; ")
        assert [record["step"] for record in records] == [1, 2]
        assert shards[-1] == shards[-2], "the parameters of step 2 are untouched"
        assert shards[0] != shards[1]


def test_a_nonfinite_step_is_skipped(pool: WorkerPool, models: Path) -> None:
    for records, shards, message in pool.run(2, _train_poisoned, models, "skip"):
        assert message == "step 3: skipped, since its loss is nan and its gradient norm nan"
        assert [record["step"] for record in records] == [1, 2, 3, 4]
        finite = [torch.tensor([record["loss"], record["grad_norm"]]).isfinite().all().item() for record in records]
        assert finite == [True, True, False, True]
        assert shards[1] == shards[2], "step 3 changed nothing"
        assert shards[2] != shards[3], "step 4 did"
        assert records[3]["lr"] < records[2]["lr"] < records[1]["lr"], "the schedule goes on"


def test_too_many_nonfinite_steps_in_a_row_stop(pool: WorkerPool, models: Path) -> None:
    for records, shards, message in pool.run(2, _train_poisoned, models, "skip", 1):
        assert message.startswith(
            "step 3: the loss or gradient of 1 step in a row was not finite (train.max_nonfinite)"
        )
        assert [record["step"] for record in records] == [1, 2, 3]
        assert shards[-1] == shards[1], "the parameters of step 2 are untouched"
    # A resumed run counts on: steps 1 and 2 were skipped before it was stopped.
    before = Progress(step=2, nonfinite_steps=2)
    for _, _, message in pool.run(2, _train_poisoned, models, "skip", 3, before):
        assert message.startswith("step 3: the loss or gradient of 3 steps in a row was not finite")
    for records, _, _ in pool.run(2, _train_poisoned, models, "skip", 4, before):
        assert [record["step"] for record in records] == [3, 4]


def test_a_good_step_ends_the_row() -> None:
    progress = Progress()
    for good, count in [(True, 0), (False, 1), (False, 2), (True, 0), (False, 1)]:
        progress = progress.after_step(1, 1, is_finite=good)
        assert progress.nonfinite_steps == count


# The start


def _train_from_the_start(folder: Path, compiled: bool) -> tuple[list[dict[str, Any]], list[str], float]:
    """Records of every second of four steps, messages, and how long this process has run since it was started."""
    original = nn.Module.compile
    torch.compiler.reset()
    nn.Module.compile = lambda self: original(self, backend="eager")
    try:
        _, metrics = _run(folder, steps=4, compiled=compiled, log_every=2)
    finally:
        nn.Module.compile = original
    return metrics.records, metrics.messages[:-2], seconds_alive()  # without the lines of the end


def _compile_nothing(folder: Path, compiled: bool) -> list[str]:
    counters["stats"].clear()
    with mock.patch.object(nn.Module, "compile"):
        _, metrics = _run(folder, steps=2, compiled=compiled)
    return [line for line in metrics.messages if line.startswith("warning")]


def test_a_run_says_once_that_nothing_was_compiled(pool: WorkerPool, models: Path) -> None:
    assert pool.run(1, _compile_nothing, models, False) == [[]]
    [[line]] = pool.run(1, _compile_nothing, models, True)
    assert "compile.enabled = true, but torch.compile compiled nothing" in line


@pytest.mark.full
def test_the_first_record_says_how_long_the_start_took(pool: WorkerPool, models: Path) -> None:
    for compiled in (False, True):
        ((first, second), (line,), alive) = pool.run(1, _train_from_the_start, models, compiled)[0]
        seconds = first["seconds_to_first_step"]
        assert 0 < seconds < alive
        assert line.startswith(f"first step done {seconds:.1f} s after the start")
        if compiled:
            assert 0 < first["compile_seconds"] < seconds
            assert line.endswith(f"{first['compile_seconds']:.1f} s of which compiled layers")
        assert not {"seconds_to_first_step", "compile_seconds"} & second.keys()


@pytest.mark.full
def test_a_process_knows_when_it_began() -> None:
    program = "import time; time.sleep(1); from fsdp2kit.job.process import seconds_alive; print(seconds_alive())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert 0.9 < float(done.stdout) < time.monotonic() - began + 0.1


# Evaluation


@pytest.fixture(scope="module")
def expected_evaluation(models: Path) -> float:
    """Mean loss over all targets of the evaluation's batches, of the model as it is on disk."""
    model, batches = load_plain(models / "smollm2").eval(), make_batches(3, seed=5)
    with torch.no_grad():
        total = sum(cross_entropy_sum(plain_logits(model, rows).double(), rows.labels).item() for rows in batches)
    return total / sum(rows.targets for rows in batches)


@pytest.mark.parametrize(("dp", "cp"), [(1, 2), full(2, 2), *(slow(*each) for each in ((1, 1), (2, 1)))])
def test_evaluation_is_the_mean_and_leaves_no_trace(
    dp: int, cp: int, pool: WorkerPool, models: Path, expected_evaluation: float
) -> None:
    for strategy in ("full_shard", "shard_grad_op"):
        case = Case("smollm2", dp, cp, 2 if dp == 1 else 1, (("strategy", strategy),))
        for first, losses, undisturbed in pool.run(case.world, _train_with_evaluation, models, case):
            assert first == pytest.approx(expected_evaluation, rel=1e-6)
            assert losses == undisturbed


def _train_with_evaluation(folder: Path, case: Case) -> tuple[float, list[float], list[float]]:
    """The first evaluation, and the losses of a run with evaluations and of one without."""
    curves: list[list[float]] = []
    held_out = make_batches(3, seed=5)
    first = 0.0
    for evaluates in (True, False):
        config = config_of(folder, case, steps=3, eval={"every": 1 if evaluates else 0})
        sharded = build(config)
        model, share = sharded.model, (sharded.mesh.dp_rank, sharded.mesh.sizes.dp)
        held = {"": RankBatches(held_out, 2 // share[1], *share)}
        inner = build_evaluation(config.eval, model, held, plan=sharded.plan, mesh=sharded.mesh)
        assert inner is not None

        def evaluate(model: Any = model, inner: Any = inner) -> dict[str, float]:
            record = inner()
            assert model.training
            # Parameters are shards again: what an optimizer or a checkpoint would be made of.
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
            return record

        evaluate.answers = inner.answers  # pyright: ignore[reportFunctionMemberAccess]
        if evaluates:
            first = evaluate()["eval_loss"]
        metrics = Recorder(sharded)
        loader = RankBatches(make_batches(3), case.micro, *share)
        run_loop(sharded, loader, metrics=metrics, evaluate=evaluate if evaluates else None)
        curves.append([record["loss"] for record in metrics.records])
        assert all(("eval_loss" in record) is evaluates for record in metrics.records)
    return first, curves[0], curves[1]


# Stopping


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_asks_to_stop(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with listening() as stop:
        assert (stop.requested, stop.reason) == (False, None)
        signal.raise_signal(number)
        assert (stop.requested, stop.reason) == (True, number.name)
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_leaves_at_once() -> None:
    with listening() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with listening() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_time_runs_out() -> None:
    with listening(max_minutes=0.001) as stop:
        assert not stop.requested
        time.sleep(0.07)
        assert stop.reason == "run.max_minutes"


def test_all_ranks_stop_where_one_was_asked_to(pool: WorkerPool, models: Path) -> None:
    results = pool.run(2, _train_until_signalled, models)
    for step, saved, _ in results:
        assert (step, saved) == (2, [2])
    assert ["asked to stop (SIGUSR1 on rank 1) after step 2" in text for _, _, text in results] == [True, False]
    assert "asked to stop (SIGUSR1) after step 2" in results[1][2]


def _train_until_signalled(folder: Path) -> tuple[int, list[int], str]:
    def signal_rank_one(record: dict[str, Any]) -> None:
        if record["step"] == 2 and dist.get_rank() == 1:
            signal.raise_signal(signal.SIGUSR1)

    saves = Saves()
    progress, metrics = _run(folder, steps=5, on_log=signal_rank_one, checkpoints=saves)
    return progress.step, saves.steps, " ".join(metrics.messages)


def _run(
    folder: Path,
    *,
    steps: int,
    compiled: bool = False,
    on_log: Callable[[dict[str, Any]], object] = lambda record: None,
    log_every: int = 1,
    save_every: int | str = 0,
    evaluate_every: int = 0,
    **options: Any,
) -> tuple[Progress, Recorder]:
    """Train the tiny model on every rank as a data-parallel one; ``options`` are `train`'s."""
    config = config_of(
        folder,
        Case("smollm2", dist.get_world_size(), 1),
        steps=steps,
        compile={"enabled": compiled},
        train={"log_every": log_every},
        checkpoint={"every": save_every},
        eval={"every": evaluate_every},
    )
    sharded = build(config)
    metrics = Recorder(sharded, on_log=on_log)
    loader = RankBatches(make_batches(max(steps, 1)), 1, sharded.mesh.dp_rank, sharded.mesh.sizes.dp)
    return run_loop(sharded, loader, metrics=metrics, **options), metrics


# What happens when


def test_what_is_due_happens_once(pool: WorkerPool, models: Path) -> None:
    [(events, progress)] = pool.run(1, _events, models, {"log_every": 2, "save_every": 2, "evaluate_every": 4}, 5)
    assert events == ["log 2", "save 2", "evaluate", "log 4", "save 4", "evaluate", "log 5", "save 5"]
    batches = make_batches(5)
    assert progress.step == 5
    assert progress.tokens_total == sum(batch.targets for batch in batches)
    assert progress.input_tokens_total == sum(batch.input_ids.numel() for batch in batches)


@pytest.mark.parametrize("ahead", [0, 1])
def test_checkpoints_by_time_follow_rank_0(ahead: int, pool: WorkerPool, models: Path) -> None:
    saved = [1, 2, 3] if ahead == 0 else [3]
    assert pool.run(2, _saves_where_a_clock_runs_ahead, models, ahead) == [saved] * 2


def _saves_where_a_clock_runs_ahead(folder: Path, ahead: int) -> list[int]:
    """Steps that were saved, where an hour passes between two looks at the clock of one rank."""
    saves = Saves()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == ahead:
            hours = itertools.count()
            patch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: 3600.0 * next(hours)))
        _run(folder, steps=3, save_every="30m", checkpoints=saves)
    return saves.steps


def test_no_step_only_evaluates(pool: WorkerPool, models: Path) -> None:
    [(events, progress)] = pool.run(1, _events, models, {}, 0)
    assert (events, progress.step) == (["evaluate", "log 0"], 0)


def test_a_finished_run_trains_no_further(pool: WorkerPool, models: Path) -> None:
    [(events, progress)] = pool.run(1, _events, models, {"save_every": 2}, 3, Progress(step=3))
    assert (events, progress.step) == ([], 3)


def _events(
    folder: Path, changes: dict[str, Any], steps: int, progress: Progress | None = None
) -> tuple[list[str], Progress]:
    events: list[str] = []
    done, _ = _run(
        folder,
        steps=steps,
        progress=progress,
        on_log=lambda record: events.append(f"log {record['step']}"),
        checkpoints=Saves(lambda step: events.append(f"save {step}")),
        evaluate=Evaluates(itertools.repeat(1.0), lambda: events.append("evaluate")),
        **changes,
    )
    return events, done


def test_epochs_are_turned_into_steps() -> None:
    assert TrainConfig(epochs=3).total_steps(4) == 12
    assert TrainConfig(steps=5).total_steps(4) == 5


# Errors on one rank


class _Broken(RankBatches):
    """Batches that one rank cannot read from the third on."""

    def batch(self, index: int) -> list[Any]:
        if index == 2 and self.dp_rank == 1:
            raise UserError("rows.jsonl: line 7", "is not JSON", "mend it")
        if index == 3 and self.dp_rank == 0:
            raise ValueError("a bug")
        return super().batch(index)


def test_a_row_that_one_rank_cannot_read_is_everyones_error(pool: WorkerPool) -> None:
    results = pool.run(2, _read_broken)
    assert [result[0] for result in results] == ["UserError: rows.jsonl: line 7: is not JSON; mend it"] * 2
    assert [result[1] for result in results] == ["ValueError: a bug", "RunFailure: rank 0 failed: ValueError: a bug"]
    assert results[0][2] == results[1][2]
    assert "UserError: global batch 4: has no supervised token" in results[0][2]


def _read_broken() -> list[str]:
    batches = make_batches(5)
    batches[4].labels.fill_(IGNORE)
    loader = _Broken(batches, 1, dist.get_rank(), 2)
    mesh = build_mesh(MeshConfig(), FSDPConfig(), world=distributed.start())
    assert next_batch(loader, 1, mesh=mesh).supervised_tokens == batches[1].targets
    found = []
    for index in (2, 3, 4):
        try:
            next_batch(loader, index, mesh=mesh)
        except (UserError, RunFailure, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_counts_are_of_the_whole_job_once(pool: WorkerPool) -> None:
    batch = make_batches(1)[0].as_batch()
    for counts in pool.run(4, _counts):
        assert counts == (batch.supervised_tokens, batch.input_tokens, batch.attention_pairs, False)


def _counts() -> tuple[int, int, int, bool]:
    loader = RankBatches(make_batches(1), 1, dist.get_rank() // 2, 2)  # two data-parallel ranks, cp = 2
    batch = next_batch(loader, 0, mesh=build_mesh(MeshConfig(cp=2), FSDPConfig(), world=distributed.start()))
    return batch.supervised_tokens, batch.input_tokens, batch.attention_pairs, batch.stop


def test_random_streams_differ_by_seed_step_and_rank_alone() -> None:
    seeds = [stream_seed(seed, step, rank) for seed in range(3) for step in range(3) for rank in range(3)]
    assert len(set(seeds)) == 27
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert stream_seed(1, 2, 0) == stream_seed(1, 2, 0)


def test_due() -> None:
    assert [step for step in range(1, 8) if is_due(3, step)] == [3, 6]
    assert not any(is_due(every, step) for every in (0, "30m") for step in range(8))


@pytest.mark.parametrize(
    ("every", "is_there", "last", "expected"),
    [(3, True, 7, [3, 6, 7]), (3, True, 6, [3, 6]), (0, True, 7, []), (3, False, 7, []), (9, True, 2, [2])],
)
def test_when_a_run_is_evaluated(every: int, is_there: bool, last: int, expected: list[int]) -> None:
    evaluate, section, nothing = (Evaluates([1.0]) if is_there else None), EvalConfig(every=every), cast(Any, None)
    evaluations = Evaluations(evaluate, section, metrics=nothing, last_step=last)
    assert [step for step in range(1, last + 1) if evaluations.is_due(step)] == expected


@pytest.mark.parametrize(
    ("section", "expected"),
    [({}, False), ({"keep_best": True}, True), ({"patience": 2}, True), ({"patience": 2, "keep_best": False}, False)],
)
def test_the_best_step_is_kept_where_the_section_says(section: dict[str, Any], expected: bool) -> None:
    evaluations = Evaluations(None, EvalConfig(**section), metrics=cast(Any, None), last_step=9)
    assert evaluations.found_best(Progress(step=4, best_step=4)) is expected
    assert not evaluations.found_best(Progress(step=5, best_step=4))


def test_a_change_of_what_is_measured_begins_the_comparison_anew() -> None:
    said: list[str] = []
    metrics: Any = SimpleNamespace(message=said.append)
    before = Progress(step=8, best_step=6, best_eval_loss=1.5, best_by={"rows": "a", "eval.steps": "3"})
    for measured_by, best in (({"eval.steps": "3", "rows": "a"}, 6), ({"eval.steps": "4", "rows": "a"}, None)):
        evaluate = Evaluates([], measured_by=measured_by)
        assert Evaluations(evaluate, EvalConfig(), metrics=metrics, last_step=9).begin(before).best_step == best
    why = "eval.steps changed since step 6 was the best"
    assert said == [f"evaluations are compared anew from step 8 on: {why}"]


class _Sets(nn.Linear):
    """A model without a config."""

    config = None


def _evaluation(monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], *, steps: int | None, named: bool) -> Any:
    """Evaluates sets of ``sizes`` batches. Each batch has 2 targets, 4 items, its index as its loss, and 8 hits.

    Args:
        named: with the objective that counts hits.
    """

    def next_batch(batches: Any, index: int, **_: Any) -> Any:
        return SimpleNamespace(stop=False, supervised_tokens=2, num_items=4, micro_batches=[{"at": float(index)}])

    def objective(model: Any, inputs: Any) -> Any:
        return torch.tensor(inputs["at"]), None, {"hits": torch.tensor(8.0)}

    model: Any = _Sets(1, 1)
    model.loss_sum = lambda at: torch.tensor(at)
    mesh: Any = SimpleNamespace(sum_loss=lambda total: total)
    monkeypatch.setattr(evaluation, "next_batch", next_batch)
    monkeypatch.setattr(evaluation, "build_slice_batch", lambda *_, **__: dict)
    sets: Any = {name: SimpleNamespace(steps_per_epoch=count) for name, count in sizes.items()}
    plan, own = cast(Any, SimpleNamespace(attention=None)), objective if named else None
    return evaluation.Evaluation(EvalConfig(steps=steps), model, sets, [], plan, mesh, None, own)


@pytest.mark.parametrize(("steps", "batches"), [(None, (5, 2)), (3, (3, 2)), (5, (5, 2)), (9, (5, 2)), (1, (1, 1))])
def test_held_out_sets_weigh_by_their_targets(
    steps: int | None, batches: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _evaluation(monkeypatch, {"a": 5, "b": 2}, steps=steps, named=False)()
    sums = [sum(range(count)) for count in batches]
    losses = {"": sum(sums) / sum(batches) / 2, "/a": sums[0] / batches[0] / 2, "/b": sums[1] / batches[1] / 2}
    expected = {f"eval_loss{name}": loss for name, loss in losses.items()}
    assert found == pytest.approx(expected | {f"eval_perplexity{at}": math.exp(loss) for at, loss in losses.items()})


def test_an_objectives_held_out_figures_are_means_over_its_items(monkeypatch: pytest.MonkeyPatch) -> None:
    built = _evaluation(monkeypatch, {"": 5, "b": 3}, steps=None, named=True)
    assert built() == {"eval_loss": 13 / 32, "eval_hits": 2.0, "eval_loss/b": 3 / 12, "eval_hits/b": 2.0}
    assert (built.model.training, built.shown) == (True, ["hits"])


def test_the_loss_of_a_source_is_by_its_own_tokens() -> None:
    """Items need not be targets; a source without tokens in the batch has no loss."""
    batch: Any = SimpleNamespace(num_items=4, tokens_by_source={"a": 10, "none": 0, "b": 2})
    mesh: Any = SimpleNamespace(sum_loss=lambda sums: sums)
    local = torch.tensor([6.0, 5.0, 0.0, 1.0, 7.0])
    found = step_figures(local, torch.tensor(3.0), 0.5, batch, names=["hits"], mesh=mesh)
    assert found == {"loss": 6.0, "grad_norm": 3.0, "lr": 0.5, "hits": 7.0, "loss/a": 5.0 * 4 / 10, "loss/b": 2.0}


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0])
def test_gradients_are_clipped_as_torch_clips_them(max_norm: float) -> None:
    torch.manual_seed(0)
    model, reference = (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)) for _ in range(2))
    model[2].bias.requires_grad_(False)
    reference[2].bias.requires_grad_(False)
    reference.load_state_dict(model.state_dict())
    for one in (model, reference):
        one(torch.arange(6.0).view(2, 3)).square().sum().backward()
    expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm or math.inf)
    torch.testing.assert_close(clip_gradients(model, max_norm=max_norm), expected)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    assert gradient_norm(nn.Linear(2, 2)) == 0


def test_a_save_that_is_there_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that a run resumed from counts as saved, and the clock begins with it."""
    now, saved = 0.0, Saves()
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now))
    batches: Any = SimpleNamespace(state=lambda index: None)
    metrics: Any = SimpleNamespace(wandb_id=None, throughput=SimpleNamespace(restart=lambda: None))
    section = CheckpointConfig(every="1m")
    saves = saving.Saves(saved, section, batches, metrics=metrics, step=3)
    for step, seconds in ((3, 59.0), (4, 60.0), (4, 61.0), (5, 120.0)):
        now = seconds
        due = saves.is_time()
        assert due is (seconds in (60.0, 120.0))
        saves.save_unless_saved(Progress(step=step), is_over=False)
    assert saved.steps == [4, 5]
    never = saving.Saves(saved, CheckpointConfig(every=2), batches, metrics=metrics, step=3)
    assert not never.is_time()


@pytest.mark.parametrize(("total", "configured", "last"), [(0, 5, 0), (7, 5, 7), (None, 5, 5), (None, 0, 0)])
def test_the_data_decide_about_the_last_step_where_they_know_it(total: int | None, configured: int, last: int) -> None:
    config: Any = SimpleNamespace(train=SimpleNamespace(steps=configured), eval=SimpleNamespace(patience=None))
    nothing: Any = None
    run = Run(config, nothing, nothing, nothing, Progress(step=5), total_steps=total)
    assert (run.last_step, run.is_over) == (last, last <= 5)
    config.train.steps = None
    run.total_steps = None
    with pytest.raises(ValueError, match="give total_steps"):
        _ = run.last_step


@pytest.mark.parametrize(
    ("progress", "last", "is_done", "says"),
    [
        (
            Progress(step=8, tokens_total=12345),
            8,
            True,
            "done: step 8 of 8 (epoch 2.00), 12,345 supervised tokens, in ",
        ),
        (
            Progress(step=3),
            8,
            False,
            "stopped, and goes on when it is started again: step 3 of 8 (epoch 0.75), 0 supe",
        ),
        (Progress(), 8, False, "stopped, and begins anew when it is started again: step 0 of 8 (epoch 0.00), 0 super"),
        (Progress(), 0, True, "done: nothing to train, in "),
    ],
)
def test_the_last_lines_say_what_was_done(progress: Progress, last: int, is_done: bool, says: str) -> None:
    config: Any = SimpleNamespace(run=SimpleNamespace(dir="runs/x"))
    run: Any = SimpleNamespace(config=config, progress=progress, last_step=last, memory=None)
    batches: Any = SimpleNamespace(steps_per_epoch=4)
    first, second = notices.describe_end(run, batches, Saves(), is_done=is_done, maximizes=None)
    assert first.startswith(says)
    assert second == "metrics: runs/x/metrics.jsonl"


@pytest.mark.parametrize(
    ("reasons", "says"),
    [
        ([None, "SIGTERM"], "SIGTERM on rank 1"),
        ([None, None, "SIGTERM on rank 3", "SIGTERM"], "SIGTERM on rank 3"),
        (["run.max_minutes", None], "run.max_minutes"),
        ([None, None], "by the recipe"),
    ],
)
def test_who_was_asked_to_stop_is_told(reasons: list[str | None], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    events = SimpleNamespace(record=lambda kind, **fields: said.append((kind, fields)))
    metrics = SimpleNamespace(message=said.append, events=events)
    run, asked = cast(Any, SimpleNamespace(metrics=metrics, progress=Progress(step=2))), SimpleNamespace()
    asked.reason = reasons[0]
    monkeypatch.setattr(notices, "gather_objects", lambda _: reasons)
    notices.tell_stop(run, cast(Any, asked))
    assert said == [f"asked to stop ({says}) after step 2", ("stop", {"step": 2, "reason": says})]


@pytest.mark.parametrize(("norm", "made"), [(1.0, True), (math.inf, False), (math.nan, False)])
def test_a_step_waits_for_a_save_that_copies_what_it_changes(
    norm: float, made: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that changes no parameter need not, but all else goes on with it."""
    done: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_, **__: done.append(name)

    monkeypatch.setattr(loop, "accumulate_gradients", lambda *_, **__: torch.tensor(2.0))
    monkeypatch.setattr(loop, "clip_gradients", lambda *_, **__: torch.tensor(norm))
    memory = SimpleNamespace(end=lambda phase: None)
    section = SimpleNamespace(max_grad_norm=1.0, on_nonfinite="skip")
    run: Any = SimpleNamespace(
        config=SimpleNamespace(train=section, fsdp=None),
        metrics=SimpleNamespace(throughput=SimpleNamespace(memory=memory)),
        mesh=SimpleNamespace(sum_loss=lambda loss: loss),
        checkpoints=SimpleNamespace(wait_until_staged=note("copied")),
    )
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": 0.5}], step=note("step"), zero_grad=note("zeroed"))
    batch: Any = SimpleNamespace(num_items=1, tokens_by_source={})
    balance: Any = SimpleNamespace(end_step=lambda *, moves: done.append(f"moves {moves}"))
    schedule: Any = SimpleNamespace(step=note("schedule"))
    options: Any = {"objective": None, "names": SimpleNamespace(names=()), "shard": None, "balance": balance}
    loop.train_step(run, nn.Linear(1, 1), optimizer, schedule, batch, **options)
    assert done == [*(["copied", "step"] if made else []), f"moves {made}", "schedule", "zeroed"]


@pytest.mark.parametrize("where", ["evaluation", "answers", "nowhere"])
@pytest.mark.parametrize("is_completed", [True, False])
def test_an_evaluation_that_is_left_is_logged_by_the_next_start(where: str, is_completed: bool) -> None:
    """The record is completed once, with what this start alone knows; answers that are left are not written."""

    def leave(here: str) -> None:
        if where == here:
            raise Stopped("SIGTERM")

    logged: list[Any] = []
    metrics: Any = SimpleNamespace(
        completed=lambda record: {**record, "gap": 1.0},
        log=lambda record, *, is_completed: logged.append((record, is_completed)),
        log_samples=lambda step, answers: logged.append(answers),
        throughput=SimpleNamespace(restart=lambda: None),
    )
    evaluate = Evaluates([2.5], lambda: leave("evaluation"))
    evaluate.answers = lambda: leave("answers") or ["yes"]  # type: ignore[method-assign]
    evaluations = Evaluations(evaluate, EvalConfig(), metrics=metrics, last_step=4)
    progress = evaluations.evaluate_and_log(Progress(step=4), {"step": 4}, is_completed=is_completed)
    if where == "evaluation":
        assert progress == Progress(step=4, unevaluated={"step": 4} if is_completed else {"step": 4, "gap": 1.0})
        assert (logged, progress.is_over(4, patience=None)) == ([], False)
        return
    assert (progress.unevaluated, progress.best_eval_loss) == (None, 2.5)
    assert logged == [({"step": 4, "eval_loss": 2.5}, is_completed), *([["yes"]] if where == "nowhere" else [])]
