"""The training loop.

Between two steps the ranks exchange a few host numbers, in one collective on gloo: whether reading the batch failed on
a rank, whether a rank was asked to stop or for a profile, how many tokens the global batch has. Within a step the host
waits for the device once, to read loss and gradient norm.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.console import counted
from fsdp2kit.errors import NonFiniteFailure
from fsdp2kit.job import meeting, status, stop
from fsdp2kit.job.distributed import gather_objects, is_lost_rank, seconds_alive
from fsdp2kit.job.lost_ranks import outlive_torchrun
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.job.profile_request import FILE, ProfileRequest, noting_sigusr2
from fsdp2kit.job.progress import Progress
from fsdp2kit.job.stop import Stopped, StopRequest
from fsdp2kit.parallel.context_parallel.batch import build_slice_batch
from fsdp2kit.parallel.ledger import assert_ledger
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.planner.estimate import MemoryPlan
from fsdp2kit.torch_compat import compiled_graphs
from fsdp2kit.train.balance import Balance, NoBalance, build_balance
from fsdp2kit.train.metrics import RECORD_KEYS, Metrics
from fsdp2kit.train.out_of_memory import explain_out_of_memory
from fsdp2kit.train.profiling import StepProfiler, Window
from fsdp2kit.train.step import (
    Batches,
    GlobalBatch,
    Measured,
    Objective,
    accumulate_gradients,
    clip_gradients,
    is_finite,
    next_batch,
    nonfinite_packs,
    raise_nonfinite,
    step_record,
)


class Evaluates(Protocol):
    """What the loop calls of `fsdp2kit.train.evaluation.Evaluation`, or of a recipe's own.

    It may have ``measured_by``, texts by name: losses with the same ones are compared, for the best step. It may have
    ``maximizes``, the name of a metric that is −``eval_loss``: the best is then shown by that metric.
    """

    def __call__(self) -> Mapping[str, float]: ...
    def answers(self) -> Sequence[Mapping[str, Any]]: ...


class NoCheckpoints:
    """Saves nothing: for benchmarks and comparisons. It has what the loop calls of `Checkpoints`."""

    left_an_export = False

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: Any) -> None: ...
    def save(self, progress: Progress, *, is_over: bool) -> None: ...
    def export_resumed(self, progress: Progress, *, is_over: bool) -> None: ...
    def wait_until_staged(self) -> None: ...
    def finish_save(self) -> None: ...

    def has_failed(self) -> bool:
        return False

    def describe_end(self, *, is_over: bool, maximizes: str | None) -> list[str]:
        return []


@dataclass
class Run:
    """What a run has besides its model and its data, as a recipe builds it."""

    config: TrainingConfig
    mesh: Mesh
    plan: ParallelPlan
    metrics: Metrics
    progress: Progress = field(default_factory=Progress)
    """Where the run stands, at first where it starts; `train` moves it on."""
    checkpoints: Checkpoints | NoCheckpoints | None = None
    """None: nothing is saved, and signals do not wait for the end of a step."""
    total_steps: int | None = None
    """Steps of the whole run. None: `train.steps`; under `train.epochs` only the data tell."""
    memory: MemoryPlan | None = None
    """What was planned, to be shown beside what was measured."""


def train(
    run: Run,
    model: Any,
    optimizer: Optimizer,
    schedule: LambdaLR,
    batches: Batches,
    *,
    objective: Objective,
    evaluate: Evaluates | None = None,
) -> Progress:
    """Train from ``run.progress`` to the last step of the run, or until stopped. Collective.

    Args:
        batches: this data-parallel rank's micro-batches, on the host, by index of the global batch.
        objective: the loss of a micro-batch, see `Objective`.
        evaluate: held-out loss and answers to prompts; None: no evaluation.

    Returns:
        The progress at the end, or where it was asked to stop; it is saved if there are checkpoints.

    Raises:
        NonFiniteFailure: a non-finite loss or gradient under ``on_nonfinite = "stop"``, or more in a row than
            ``max_nonfinite``.
        RunFailure: a dtype that is not the ledger's; a save that failed; out of memory.
        UserError: a row that cannot be read, a global batch without a supervised token.
    """
    config, mesh, metrics = run.config, run.mesh, run.metrics
    balance = build_balance(config.moe, model, plan=run.plan, mesh=mesh, metrics=metrics)
    loop, measured = _Loop(run, batches, evaluate), Measured(balance.objective(objective), reserved=RECORD_KEYS)
    shard = balance.shard(build_slice_batch(model.config, path=run.plan.attention, mesh=mesh))
    explained = explain_out_of_memory(config, model, optimizer, mesh.sizes, rank=mesh.rank)
    stopping = StopRequest(max_minutes=config.run.max_minutes, signals=run.checkpoints is not None)
    with loop.checkpoints, loop.profiler, balance, explained, saving_when_torchrun_ends(), stopping as asked:
        loop.begin()
        with loop.profile_request() as request:
            while not loop.is_over and (batch := loop.next_batch(asked, request)):
                torch.manual_seed(stream_seed(config.run.seed, run.progress.step, mesh.dp_rank))
                is_first = not metrics.throughput.has_begun
                with assert_ledger(run.plan.ledger, model, optimizer) if is_first else contextlib.nullcontext():
                    record = train_step(
                        run, model, optimizer, schedule, batch, objective=measured, shard=shard, balance=balance
                    )
                metrics.shown = measured.shown
                loop.finish_step(batch, record)
                loop.step_profiler(batch, request)
            loop.end(asked)
    if mesh.rank == 0:
        for line in loop.describe_end():
            metrics.message(line)
    outcome = "done" if loop.is_done else "stopped"
    metrics.events.record("end", step=run.progress.step, outcome=outcome, seconds=round(seconds_alive(), 1))
    return run.progress


def train_step(
    run: Run,
    model: Any,
    optimizer: Optimizer,
    schedule: LambdaLR,
    batch: GlobalBatch,
    *,
    objective: Measured,
    shard: Callable[[Any], dict[str, Any]],
    balance: Balance | NoBalance,
) -> dict[str, float]:
    """One optimizer step on one global batch; the parameters stay if loss or gradient is not finite. Collective.

    Args:
        shard: from a micro-batch on the host to this rank's inputs of ``objective``, on the device.

    Returns:
        The figures of `step_record`.
    """
    section, memory = run.config.train, run.metrics.throughput.memory
    memory.end(None)
    local_loss = accumulate_gradients(
        model, batch, objective=objective, shard=shard, fsdp=run.config.fsdp, end_phase=memory.end
    )
    norm = clip_gradients(model, max_norm=section.max_grad_norm)
    lr = float(optimizer.param_groups[0]["lr"])  # a tensor in torchao's optimizers
    record = step_record(local_loss, norm, lr, batch, names=objective.names, mesh=run.mesh)
    stop.begin_to_change()
    if is_finite(record):
        if run.checkpoints is not None:
            run.checkpoints.wait_until_staged()  # a save may still be copying what the step changes
        optimizer.step()
    elif section.on_nonfinite == "stop":
        raise_nonfinite(local_loss, record["grad_norm"], batch, config=run.config, step=run.progress.step + 1)
    balance.end_step(moves=is_finite(record))
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    memory.end("optimizer")
    return record


class _Loop:
    """What one call of `train` does around its steps: it logs, evaluates and saves when that is due."""

    def __init__(self, run: Run, batches: Batches, evaluate: Evaluates | None) -> None:
        total = run.config.train.steps if run.total_steps is None else run.total_steps
        if total is None:
            raise ValueError("give total_steps: train.epochs does not say how many that is")
        self.run, self.batches, self.evaluate, self.total = run, batches, evaluate, total
        self.config, self.metrics = run.config, run.metrics
        self.checkpoints = run.checkpoints or NoCheckpoints()
        # What a recipe of one's own evaluates with may be any function.
        self.maximizes: str | None = getattr(evaluate, "maximizes", None)
        self.measured_by: dict[str, str] = {}
        self.first = self.saved_at = run.progress.step
        self.saved_time = time.monotonic()
        self.profiler = StepProfiler(
            self.config.profile,
            trace_dir=Path(self.config.run.dir) / "trace",
            rank=run.mesh.rank,
            device_type=run.mesh.device.type,
            steps=total - self.first,
            first_step=self.first + 1,
            events=self.metrics.events,
        )
        self.window: Window | None = None
        self.graphs = compiled_graphs()  # of earlier runs in this process

    @property
    def is_over(self) -> bool:
        return self.run.progress.is_over(self.total, patience=self.config.eval.patience)

    @property
    def is_done(self) -> bool:
        """Whether the run is over, and exported."""
        return self.is_over and not self.checkpoints.left_an_export

    @contextlib.contextmanager
    def profile_request(self) -> Iterator[ProfileRequest]:
        """Whether a profile is asked for; rank 0 looks for the file."""
        file = Path(self.config.run.dir) / FILE if self.run.mesh.rank == 0 else None
        with noting_sigusr2() as noted:
            yield ProfileRequest(noted, file=file, message=self.metrics.message)

    def step_profiler(self, batch: GlobalBatch, request: ProfileRequest) -> None:
        """Tell the profiler of a step. If a rank was asked for a profile before it, a window begins."""
        asked = self.window if batch.profile else None
        if asked is not None:
            request.take()
            first = self.first + asked.before + 1
            last = min(first + asked.steps - 1, self.total)
            self.metrics.message(f"asked for a profile: steps {first} to {last} are traced into {asked.folder}")
        if self.profiler.step(asked):
            self.metrics.throughput.restart()

    def begin(self) -> None:
        """Compare, export and report before the first step."""
        if self.run.memory is not None and (planned := self.run.memory.planned()):
            self.metrics.events.record("plan", gib=planned)
        self._compare_best()
        if (record := self.run.progress.unevaluated) is not None:
            self._finish_record(record)
        self.checkpoints.export_resumed(self.run.progress, is_over=self.is_over)
        if self.total == 0 and self.evaluate is not None:
            self._log({"step": self.run.progress.step}, evaluates=True)
        elif self.is_over:
            step = f"step {self.run.progress.step} of {self.total}"
            is_done = self.run.progress.step >= self.total
            done = f"{step} is done" if is_done else f"the run stopped early, after {step}"
            self.metrics.message(f"nothing left to train: {done}")
        self.metrics.throughput.restart()

    def _compare_best(self) -> None:
        """Forget the best step where evaluations measure by something else from here on. Collective."""
        if self.evaluate is None:
            return
        forgotten = self.run.progress.best_step
        by = dict(getattr(self.evaluate, "measured_by", {}))
        self.measured_by = gather_objects(by)[0]  # ranks that read different copies of the rows would part
        self.run.progress, differing = self.run.progress.compared_by(self.measured_by)
        if differing:
            why = f"{', '.join(differing)} changed since step {forgotten} was the best"
            self.metrics.message(f"evaluations are compared anew from step {self.run.progress.step} on: {why}")

    def _finish_record(self, record: dict[str, Any]) -> None:
        """Log the step whose evaluation was left in the start before, with that evaluation. Collective."""
        self.run.progress = replace(self.run.progress, unevaluated=None)
        self._log(record, evaluates=True, is_completed=True)
        is_best = self.config.eval.keeps_best and self.run.progress.best_step == self.run.progress.step
        if self.is_over or is_best:
            stop.begin_to_change()
            self._save()

    def next_batch(self, asked: StopRequest, request: ProfileRequest) -> GlobalBatch | None:
        """The next global batch, after a save if the time has come; None if a rank was asked to stop. Collective."""
        if self.run.progress.unevaluated is not None:  # all ranks have left that evaluation
            self._note_stop(asked)
            return None
        mesh, seconds, failed = self.run.mesh, self.config.checkpoint.every_seconds, self.checkpoints.has_failed()
        # Rank 0's clock decides for all.
        status.begin("", step=self.run.progress.step + 1)
        due = mesh.rank == 0 and seconds is not None and time.monotonic() - self.saved_time >= seconds
        self.window = self.profiler.next_window()  # a request waits where there is none
        batch = next_batch(
            self.batches,
            self.run.progress.step,
            mesh=mesh,
            stop=asked.requested,
            save_failed=failed,
            save_due=due,
            profile=self.window is not None and request.is_asked,
        )
        if batch.save_failed:
            self.checkpoints.finish_save()
        if not batch.stop:
            if batch.save_due and self.saved_at != self.run.progress.step:
                self._save()
            return batch
        self._note_stop(asked)
        return None

    def _note_stop(self, asked: StopRequest) -> None:
        """Say who was asked, and how. Collective."""
        reasons = gather_objects(asked.reason)
        named = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
        # A rank that was told names the one that was asked.
        others = [one if " on rank " in one else f"{one} on rank {rank}" for rank, one in named.items()]
        where = asked.reason or next(iter(others), "by the recipe")
        self.metrics.message(f"asked to stop ({where}) after step {self.run.progress.step}")
        self.metrics.events.record("stop", step=self.run.progress.step, reason=where)

    def finish_step(self, batch: GlobalBatch, record: dict[str, float]) -> None:
        """Count a step; log, evaluate and save where that is due. Collective."""
        config, metrics, throughput = self.config, self.metrics, self.metrics.throughput
        good = is_finite(record)
        self.run.progress = self.run.progress.after_step(batch.supervised_tokens, batch.input_tokens, is_finite=good)
        if not good:
            why = f"its loss is {record['loss']} and its gradient norm {record['grad_norm']}"
            why += nonfinite_packs(batch, config)
            metrics.message(f"step {self.run.progress.step}: skipped, since {why}")
        if not throughput.has_begun:
            metrics.message(throughput.first_step())
            if config.compile.enabled and compiled_graphs() == self.graphs:
                why = "set TORCH_LOGS=graph_breaks to see why, or compile.enabled = false"
                metrics.message(f"warning: compile.enabled = true, but torch.compile compiled nothing; {why}")
        throughput.add(batch.input_tokens, batch.supervised_tokens, batch.attention_pairs, batch.seconds)
        step, every = self.run.progress.step, config.eval.every
        is_last = step == self.total
        evaluates = self.evaluate is not None and every > 0 and (is_last or is_due(every, step))
        if evaluates or is_last or is_due(config.train.log_every, step):
            line: dict[str, Any] = {"step": step, **self._epoch(), **record}
            line |= {"tokens": batch.supervised_tokens, "input_tokens": batch.input_tokens}
            line |= {f"tokens/{name}": count for name, count in batch.tokens_by_source.items()}
            line |= {"packing_efficiency": batch.input_tokens / batch.capacity}
            line |= {"tokens_total": self.run.progress.tokens_total, **throughput.record()}
            self._log(line, evaluates=evaluates)
        if self.run.progress.nonfinite_steps >= config.train.max_nonfinite:
            steps = counted(self.run.progress.nonfinite_steps, "step")
            raise NonFiniteFailure(
                f"step {step}: the loss or gradient of {steps} in a row was not finite "
                "(train.max_nonfinite); the last checkpoint is untouched. Lower the learning rate, or look at the data"
            )
        is_best = config.eval.keeps_best and self.run.progress.best_step == step
        if is_best or is_due(config.checkpoint.every, step):
            self._save()

    def end(self, asked: StopRequest) -> None:
        """Report and save after the last step."""
        asked.lift_time_limit()
        if self.is_over and self.first < self.run.progress.step < self.total:
            best, what = self.run.progress.best_step, "eval_loss was never finite"
            if best is not None:
                what = f"step {best} was the best ({self.run.progress.describe_best(self.maximizes)})"
            self.metrics.message(f"stopped early: {what}")
            self.metrics.events.record("stop", step=self.run.progress.step, reason=f"early: {what}")
        if self.saved_at != self.run.progress.step:
            self._save()
        self.checkpoints.finish_save()
        if self.is_over and not self.is_done:
            self.metrics.events.record("stop", step=self.run.progress.step, reason=asked.reason)

    def describe_end(self) -> list[str]:
        """What was done and where it is, once everything is written; for rank 0."""
        step, tokens = self.run.progress.step, self.run.progress.tokens_total
        goes_on = "goes on" if step else "begins anew"
        how = "done" if self.is_done else f"stopped, and {goes_on} when it is started again"
        epoch = "".join(f" (epoch {value:.2f})" for value in self._epoch().values())
        seconds = timedelta(seconds=round(seconds_alive()))
        trained = (
            f"step {step} of {self.total}{epoch}, {tokens:,} supervised tokens" if self.total else "nothing to train"
        )
        phases, device_type = self.metrics.throughput.memory.phases, self.run.mesh.device.type
        return [
            *(self.run.memory.compare(phases, device_type=device_type) if self.run.memory else []),
            f"{how}: {trained}, in {seconds}",
            f"metrics: {Path(self.config.run.dir) / 'metrics.jsonl'}",
            *self.checkpoints.describe_end(is_over=self.is_done, maximizes=self.maximizes),
        ]

    def _epoch(self) -> dict[str, float]:
        """``epoch``: passes over the data so far; nothing for a stream, and for batches that know of none."""
        steps = getattr(self.batches, "steps_per_epoch", 0)
        return {"epoch": self.run.progress.step / steps} if steps else {}

    def _log(self, line: dict[str, Any], *, evaluates: bool, is_completed: bool = False) -> None:
        if not evaluates or self.evaluate is None:
            self.metrics.log(line)
            return
        status.begin("evaluating")
        try:
            figures = self.evaluate()
        except Stopped:  # a part of an evaluation is none: it is done again, and then the step is logged
            record = line if is_completed else self.metrics.completed(line)
            self.run.progress = replace(self.run.progress, unevaluated=record)
            return
        if (objective := getattr(self.evaluate, "objective", None)) is not None:
            self.metrics.shown = objective.shown
        self.metrics.log({**line, **figures}, is_completed=is_completed)
        min_delta, by = self.config.eval.min_delta, self.measured_by
        self.run.progress = self.run.progress.after_evaluation(figures["eval_loss"], min_delta=min_delta, by=by)
        with contextlib.suppress(Stopped):  # samples without some of the answers are not written
            self.metrics.log_samples(self.run.progress.step, self.evaluate.answers())
        self.metrics.throughput.restart()

    def _save(self) -> None:
        status.begin("saving a checkpoint")
        state = self.batches.state(self.run.progress.step)
        position = replace(self.run.progress, wandb_id=self.metrics.wandb_id, data=state)
        self.checkpoints.save(position, is_over=self.is_over)
        self.saved_at, self.saved_time = self.run.progress.step, time.monotonic()
        self.metrics.throughput.restart()


@contextlib.contextmanager
def saving_when_torchrun_ends() -> Iterator[None]:
    """Inside, ranks whose torchrun has ended save first. After an error they outlive it until they have said why."""
    meeting.stop_watching()
    try:
        yield
    except Exception as error:
        outlive_torchrun(error, is_lost=is_lost_rank(error))
        raise


def is_due(every: int | str, step: int) -> bool:
    """Whether something that happens every ``every`` steps (0, or a time: never) happens after ``step``."""
    return isinstance(every, int) and every > 0 and step % every == 0


def stream_seed(seed: int, step: int, dp_rank: int) -> int:
    """Seed of a step's randomness (dropout): a function of these three, so no generator state is saved."""
    digest = hashlib.sha256(f"{seed}/{step}/{dp_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
