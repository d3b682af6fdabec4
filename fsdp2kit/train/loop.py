"""The training loop.

Between two steps the ranks exchange a few host numbers, in one collective on gloo: whether reading the batch failed on
a rank, whether a rank was asked to stop, how many tokens the global batch has. Within a step the host waits for the
device once, to read loss and gradient norm.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fsdp2kit import torchrun
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.console import counted
from fsdp2kit.distributed import gather_objects, seconds_alive
from fsdp2kit.errors import RunFailure
from fsdp2kit.parallel.context_parallel.batch import build_slice_batch
from fsdp2kit.parallel.ledger import assert_ledger
from fsdp2kit.parallel.mesh import Mesh
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.planner.estimate import MemoryPlan
from fsdp2kit.progress import Progress
from fsdp2kit.train.metrics import RECORD_KEYS, Metrics
from fsdp2kit.train.out_of_memory import explain_out_of_memory
from fsdp2kit.train.profiling import StepProfiler
from fsdp2kit.train.step import Batches, GlobalBatch, Measured, Objective, is_finite, next_batch, train_step

# What schedulers and Ctrl-C send.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Checkpoints(Protocol):
    """What the loop calls of `fsdp2kit.checkpoint.run.Checkpoints`."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *exception: Any) -> None: ...
    def save(self, progress: Progress, *, is_over: bool) -> Any: ...
    def export_resumed(self, progress: Progress, *, is_over: bool) -> None: ...
    def wait_until_staged(self) -> None: ...
    def has_failed(self) -> bool: ...
    def finish_save(self) -> None: ...
    def describe_end(self, *, is_over: bool) -> list[str]: ...


class Evaluates(Protocol):
    """What the loop calls of `fsdp2kit.train.evaluation.Evaluation`, or of a recipe's own.

    It may have ``measured_by``, texts by name: losses with the same ones are compared, for the best step.
    """

    def __call__(self) -> Mapping[str, float]: ...
    def answers(self) -> Sequence[Mapping[str, Any]]: ...


class NoCheckpoints(Checkpoints):
    """Saves nothing, by the protocol's empty methods: for benchmarks and comparisons."""

    def has_failed(self) -> bool:
        return False

    def describe_end(self, *, is_over: bool) -> list[str]:
        return []


def train(
    model: Any,
    optimizer: Optimizer,
    schedule: LambdaLR,
    batches: Batches,
    *,
    objective: Objective,
    config: TrainingConfig,
    plan: ParallelPlan,
    mesh: Mesh,
    metrics: Metrics,
    memory: MemoryPlan | None = None,
    total_steps: int | None = None,
    progress: Progress | None = None,
    checkpoints: Checkpoints | None = None,
    evaluate: Evaluates | None = None,
) -> Progress:
    """Train from ``progress.step`` to the last step of ``[train]``, or until stopped. Collective.

    Args:
        batches: this data-parallel rank's micro-batches, on the host, by index of the global batch.
        objective: the loss of a micro-batch, see `Objective`.
        memory: what was planned, to be shown beside what was measured.
        total_steps: steps of the whole run. Default: `train.steps`; under `train.epochs` only the data tell.
        progress: where to start; by default at the beginning.
        checkpoints: by default nothing is saved, and Ctrl-C, SIGTERM and SIGUSR1 do not wait for the end of a step.
        evaluate: held-out loss and answers to prompts; None: no evaluation.

    Returns:
        The progress at the end, or where it was asked to stop; it is saved if there are checkpoints.

    Raises:
        RunFailure: a non-finite loss or gradient under ``on_nonfinite = "stop"``, or more in a row than
            ``max_nonfinite``; a dtype that is not the ledger's; a save that failed; out of memory.
        UserError: a row that cannot be read, a global batch without a supervised token.
    """
    saves = checkpoints or NoCheckpoints()  # pyright: ignore[reportAbstractUsage]
    total = config.train.steps if total_steps is None else total_steps
    if total is None:
        raise ValueError("give total_steps: train.epochs does not say how many that is")
    run = _Run(batches, total, config, metrics, saves, evaluate, progress or Progress())
    profiler = run.build_profiler(mesh)
    shard = build_slice_batch(model.config, path=plan.attention, mesh=mesh)
    measured = Measured(objective, reserved=RECORD_KEYS)
    step = partial(train_step, model, optimizer, schedule, objective=measured, shard=shard, config=config, mesh=mesh)
    step = partial(step, before_update=saves.wait_until_staged, memory=metrics.throughput.memory)
    with saves, profiler, explain_out_of_memory(config, model, optimizer, mesh.sizes, rank=mesh.rank):
        run.begin()
        with StopRequest(max_minutes=config.run.max_minutes, signals=checkpoints is not None) as stop:
            while not run.is_over and (batch := run.next_batch(stop, mesh=mesh)):
                torch.manual_seed(stream_seed(config.run.seed, run.progress.step, mesh.dp_rank))
                is_first = not metrics.throughput.has_begun
                with assert_ledger(plan.ledger, model, optimizer) if is_first else contextlib.nullcontext():
                    record = step(batch, step=run.progress.step + 1)
                metrics.shown = measured.shown
                run.finish_step(batch, record)
                if profiler.step():
                    metrics.throughput.restart()
            run.end()
    if mesh.rank == 0:
        compared = memory.compare(metrics.throughput.memory.phases, device_type=mesh.device.type) if memory else []
        for line in (*compared, *run.describe_end()):
            metrics.message(line)
    return run.progress


@dataclass
class _Run:
    """How far one call of `train` has come; it logs, evaluates and saves when that is due."""

    batches: Batches
    total: int
    config: TrainingConfig
    metrics: Metrics
    checkpoints: Checkpoints
    evaluate: Evaluates | None
    progress: Progress

    def __post_init__(self) -> None:
        self.first = self.saved_at = self.progress.step
        self.saved_time = time.monotonic()
        self.measured_by: dict[str, str] = {}

    def build_profiler(self, mesh: Mesh) -> StepProfiler:
        """What traces the steps that ``[profile]`` asks for."""
        return StepProfiler(
            self.config.profile,
            trace_dir=Path(self.config.run.dir) / "trace",
            rank=mesh.rank,
            device_type=mesh.device.type,
            steps=self.total - self.first,
            first_step=self.first + 1,
        )

    @property
    def is_over(self) -> bool:
        return self.progress.is_over(self.total, patience=self.config.eval.patience)

    def begin(self) -> None:
        """What comes before the first step."""
        self._compare_best()
        self.checkpoints.export_resumed(self.progress, is_over=self.is_over)
        if self.total == 0 and self.evaluate is not None:
            self._log({"step": self.progress.step}, evaluates=True)
        elif self.is_over:
            step = f"step {self.progress.step} of {self.total}"
            done = f"{step} is done" if self.progress.step >= self.total else f"the run stopped early, after {step}"
            self.metrics.message(f"nothing left to train: {done}")
        self.metrics.throughput.restart()

    def _compare_best(self) -> None:
        """Forget the best step where evaluations measure by something else from here on. Collective."""
        if self.evaluate is None:
            return
        forgotten = self.progress.best_step
        by = dict(getattr(self.evaluate, "measured_by", {}))  # a recipe's own may be any function
        self.measured_by = gather_objects(by)[0]  # ranks that read different copies of the rows would part
        self.progress, differing = self.progress.compared_by(self.measured_by)
        if differing:
            why = f"{', '.join(differing)} changed since step {forgotten} was the best"
            self.metrics.message(f"evaluations are compared anew from step {self.progress.step} on: {why}")

    def next_batch(self, stop: StopRequest, *, mesh: Mesh) -> GlobalBatch | None:
        """The next global batch, after a save if the time has come; None if a rank was asked to stop. Collective."""
        seconds, failed = self.config.checkpoint.every_seconds, self.checkpoints.has_failed()
        # Rank 0's clock is everybody's.
        due = mesh.rank == 0 and seconds is not None and time.monotonic() - self.saved_time >= seconds
        batch = next_batch(
            self.batches, self.progress.step, mesh=mesh, stop=stop.requested, save_failed=failed, save_due=due
        )
        if batch.save_failed:
            self.checkpoints.finish_save()
        if not batch.stop:
            if batch.save_due and self.saved_at != self.progress.step:
                self._save()
            return batch
        where = stop.reason or "on another rank"
        self.metrics.message(f"asked to stop ({where}) after step {self.progress.step}")
        return None

    def finish_step(self, batch: GlobalBatch, record: dict[str, float]) -> None:
        """Count a step; log it, evaluate and save, whatever of these is due. Collective."""
        config, metrics, throughput = self.config, self.metrics, self.metrics.throughput
        good = is_finite(record)
        self.progress = self.progress.after_step(batch.supervised_tokens, batch.input_tokens, is_finite=good)
        if not good:
            why = f"its loss is {record['loss']} and its gradient norm {record['grad_norm']}"
            metrics.message(f"step {self.progress.step}: skipped, since {why}")
        if not throughput.has_begun:
            metrics.message(throughput.first_step())
        throughput.add(batch.input_tokens, batch.supervised_tokens, batch.attention_pairs, batch.seconds)
        step, every = self.progress.step, config.eval.every
        is_last = step == self.total
        evaluates = self.evaluate is not None and every > 0 and (is_last or is_due(every, step))
        if evaluates or is_last or is_due(config.train.log_every, step):
            line: dict[str, Any] = {"step": step, **self._epoch(), **record}
            line |= {"tokens": batch.supervised_tokens, "input_tokens": batch.input_tokens}
            line |= {f"tokens/{name}": count for name, count in batch.tokens_by_source.items()}
            line |= {"packing_efficiency": batch.input_tokens / batch.capacity}
            line |= {"tokens_total": self.progress.tokens_total, **throughput.record()}
            self._log(line, evaluates=evaluates)
        if self.progress.nonfinite_steps >= config.train.max_nonfinite:
            steps = counted(self.progress.nonfinite_steps, "step")
            raise RunFailure(
                f"step {step}: the loss or gradient of {steps} in a row was not finite "
                "(train.max_nonfinite); the last checkpoint is untouched. Lower the learning rate, or look at the data"
            )
        is_best = config.eval.keeps_best and self.progress.best_step == step
        if is_best or is_due(config.checkpoint.every, step):
            self._save()

    def end(self) -> None:
        """What comes after the last step."""
        if self.is_over and self.first < self.progress.step < self.total:
            loss, best = self.progress.best_eval_loss, self.progress.best_step
            lowest = "was never finite" if loss is None else f"was lowest ({loss:.4f}) at step {best}"
            self.metrics.message(f"stopped early: eval_loss {lowest}")
        if self.saved_at != self.progress.step:
            self._save()

    def describe_end(self) -> list[str]:
        """What was done and where it is, once everything is written; for rank 0."""
        step, tokens = self.progress.step, self.progress.tokens_total
        how = "done" if self.is_over else "stopped, and goes on when it is started again"
        epoch = "".join(f" (epoch {value:.2f})" for value in self._epoch().values())
        seconds = timedelta(seconds=round(seconds_alive()))
        trained = (
            f"step {step} of {self.total}{epoch}, {tokens:,} supervised tokens" if self.total else "nothing to train"
        )
        lines = [f"{how}: {trained}, in {seconds}"]
        lines.append(f"metrics: {Path(self.config.run.dir) / 'metrics.jsonl'}")
        return [*lines, *self.checkpoints.describe_end(is_over=self.is_over)]

    def _epoch(self) -> dict[str, float]:
        """``epoch``: passes over the data so far; nothing for a stream, and for batches that know of none."""
        steps = getattr(self.batches, "steps_per_epoch", 0)
        return {"epoch": self.progress.step / steps} if steps else {}

    def _log(self, line: dict[str, Any], *, evaluates: bool) -> None:
        if not evaluates or self.evaluate is None:
            self.metrics.log(line)
            return
        line |= self.evaluate()
        # What a recipe of one's own evaluates with may be any function.
        if (objective := getattr(self.evaluate, "objective", None)) is not None:
            self.metrics.shown = objective.shown
        self.metrics.log(line)
        self.metrics.log_samples(self.progress.step, self.evaluate.answers())
        min_delta, by = self.config.eval.min_delta, self.measured_by
        self.progress = self.progress.after_evaluation(line["eval_loss"], min_delta=min_delta, by=by)
        self.metrics.throughput.restart()

    def _save(self) -> None:
        state = self.batches.state(self.progress.step)
        position = replace(self.progress, wandb_id=self.metrics.wandb_id, data=state)
        self.checkpoints.save(position, is_over=self.is_over)
        self.saved_at, self.saved_time = self.progress.step, time.monotonic()
        self.metrics.throughput.restart()


def is_due(every: int | str, step: int) -> bool:
    """Whether something that happens every ``every`` steps (0, or a time: never) happens after ``step``."""
    return isinstance(every, int) and every > 0 and step % every == 0


def stream_seed(seed: int, step: int, dp_rank: int) -> int:
    """Seed of a step's randomness (dropout): a function of these three, so no generator state is saved."""
    digest = hashlib.sha256(f"{seed}/{step}/{dp_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class StopRequest:
    """``with StopRequest(max_minutes=…) as stop:`` then ``stop.requested`` on this rank.

    torchrun and most schedulers send SIGTERM, Slurm SIGUSR1 ahead of a time limit, Ctrl-C SIGINT; a second SIGINT
    interrupts as usual. The former handlers are restored at the end of the block. A torchrun that was killed sends
    nothing; that it is gone is seen here too.
    """

    def __init__(self, *, max_minutes: float | None = None, signals: bool = True) -> None:
        self._signals = _SIGNALS if signals else ()
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._received: str | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        torchrun.stop_watching()
        for number in self._signals:
            if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                continue  # a background job: Ctrl-C in the terminal is not for it
            try:
                self._former[number] = signal.signal(number, self._note)
            except ValueError:  # not the main thread (e.g. a notebook's): the caller handles signals
                break
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(number, self._former[number])  # pyright: ignore[reportArgumentType]

    @property
    def requested(self) -> bool:
        """Whether this rank has been asked to stop."""
        return self.reason is not None

    @property
    def reason(self) -> str | None:
        """The signal's name, that torchrun is gone, or ``run.max_minutes``."""
        if self._received is not None:
            return self._received
        if torchrun.is_gone():
            return "torchrun has ended"
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return "run.max_minutes"
        return None
