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
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.parallel.context_parallel.batch import build_shard_batch
from fsdp2kit.parallel.ledger import assert_ledger
from fsdp2kit.parallel.mesh import Mesh
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.progress import Progress
from fsdp2kit.train.evaluation import Evaluation
from fsdp2kit.train.metrics import Metrics
from fsdp2kit.train.out_of_memory import explain_out_of_memory
from fsdp2kit.train.profiling import build_profiler
from fsdp2kit.train.step import Batches, GlobalBatch, Objective, is_finite, next_batch, train_step

# What schedulers and Ctrl-C send.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Checkpoints(Protocol):
    """What the loop calls of `fsdp2kit.checkpoint.run.Checkpoints`."""

    def __enter__(self) -> Any: ...
    def __exit__(self, *exception: Any) -> None: ...
    def save(self, progress: Progress, *, is_over: bool) -> Any: ...
    def export_resumed(self, *, is_over: bool) -> None: ...
    def wait_until_staged(self) -> None: ...
    def has_failed(self) -> bool: ...
    def finish_save(self) -> None: ...


class NoCheckpoints:
    """Saves nothing: for benchmarks and comparisons."""

    def __enter__(self) -> NoCheckpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def save(self, progress: Progress, *, is_over: bool) -> None:
        pass

    def export_resumed(self, *, is_over: bool) -> None:
        pass

    def wait_until_staged(self) -> None:
        pass

    def has_failed(self) -> bool:
        return False

    def finish_save(self) -> None:
        pass


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
    total_steps: int | None = None,
    progress: Progress | None = None,
    checkpoints: Checkpoints | None = None,
    evaluate: Evaluation | None = None,
    heed_signals: bool = True,
    checks_ledger: bool = True,
) -> Progress:
    """Train from ``progress.step`` to the last step of ``[train]``, or until stopped. Collective.

    Args:
        batches: this data-parallel rank's micro-batches, on the host, by index of the global batch.
        objective: the loss of a micro-batch, see `Objective`.
        total_steps: steps of the whole run. Default: `train.steps`; under `train.epochs` only the data tell.
        progress: where to start; by default at the beginning.
        checkpoints: by default nothing is saved.
        evaluate: held-out loss and answers to prompts; None: no evaluation.
        heed_signals: whether Ctrl-C, SIGTERM and SIGUSR1 stop the loop after the current step.
        checks_ledger: whether the first step's dtypes are compared with ``plan.ledger``, as in a run.

    Returns:
        The progress at the end, or where it was asked to stop; it is saved if there are checkpoints.

    Raises:
        RunFailure: a non-finite loss or gradient under ``on_nonfinite = "stop"``; a save that failed; out of memory.
        UserError: a row that cannot be read, a global batch without a supervised token.
    """
    progress, checkpoints = progress or Progress(), checkpoints or NoCheckpoints()
    total = config.train.steps if total_steps is None else total_steps
    if total is None:
        raise ValueError("give total_steps: train.epochs does not say how many that is")
    first, saved_at = progress.step, progress.step
    shard = build_shard_batch(model.config, path=plan.attention, mesh=mesh)
    profiler = build_profiler(
        config.profile,
        trace_dir=Path(config.run.dir) / "trace",
        rank=mesh.rank,
        device_type=mesh.device.type,
        steps=total - first,
        first_step=first + 1,
    )

    def save(now: Progress) -> None:
        position = replace(now, wandb_id=metrics.wandb_id, data=batches.state(now.step))
        checkpoints.save(position, is_over=is_over(now, config, total=total))

    with checkpoints, profiler, explain_out_of_memory(config, model, optimizer, rank=mesh.rank):
        checkpoints.export_resumed(is_over=is_over(progress, config, total=total))
        if total == 0 and evaluate is not None:
            metrics.log({"step": progress.step, **evaluate()})
            metrics.log_samples(progress.step, evaluate.answers())
        elif is_over(progress, config, total=total):
            metrics.message(f"nothing left to train: step {progress.step} of {total} is done")
        metrics.throughput.restart()
        with StopRequest(max_minutes=config.run.max_minutes, signals=heed_signals) as stop:
            while not is_over(progress, config, total=total):
                batch = next_batch(
                    batches, progress.step, mesh=mesh, stop=stop.requested, save_failed=checkpoints.has_failed()
                )
                if batch.save_failed:
                    checkpoints.finish_save()
                if batch.stop:
                    where = stop.reason or "on another rank"
                    metrics.message(f"asked to stop ({where}) after step {progress.step}")
                    break
                torch.manual_seed(stream_seed(config.run.seed, progress.step, mesh.dp_rank))
                is_first = progress.step == first
                watched = is_first and checks_ledger
                with assert_ledger(plan.ledger, model, optimizer) if watched else contextlib.nullcontext():
                    record = train_step(
                        model,
                        optimizer,
                        schedule,
                        batch,
                        objective=objective,
                        shard=shard,
                        config=config,
                        mesh=mesh,
                        step=progress.step + 1,
                        before_update=checkpoints.wait_until_staged,
                        memory=metrics.throughput.memory,
                    )
                if not is_finite(record):
                    why = f"its loss is {record['loss']} and its gradient norm {record['grad_norm']}"
                    metrics.message(f"step {progress.step + 1}: skipped, since {why}")
                progress = progress.after_step(batch.supervised_tokens, batch.input_tokens)
                if is_first:
                    metrics.message(metrics.throughput.first_step())
                eval_loss = report(
                    record, batch, config=config, progress=progress, total=total, metrics=metrics, evaluate=evaluate
                )
                progress = progress.after_evaluation(eval_loss, min_delta=config.eval.min_delta)
                is_best = config.eval.keep_best and progress.best_step == progress.step
                if is_best or is_due(config.checkpoint.every, progress.step):
                    save(progress)
                    saved_at = progress.step
                    metrics.throughput.restart()
                if profiler.step():
                    metrics.throughput.restart()
            if is_over(progress, config, total=total) and first < progress.step < total:
                best = f"{progress.best_eval_loss:.4f}) at {progress.best_step}"
                metrics.message(f"stopped early: eval_loss was lowest ({best}")
            if saved_at != progress.step:
                save(progress)
    return progress


def report(
    record: dict[str, float],
    batch: GlobalBatch,
    *,
    config: TrainingConfig,
    progress: Progress,
    total: int,
    metrics: Metrics,
    evaluate: Evaluation | None,
) -> float | None:
    """Count this step; log it and evaluate if that is due. Returns the held-out loss, if it was evaluated."""
    throughput = metrics.throughput
    throughput.add(batch.input_tokens, batch.supervised_tokens, batch.attention_pairs, batch.seconds)
    is_last = progress.step == total
    evaluates = (
        evaluate is not None and config.eval.every > 0 and (is_last or is_due(config.eval.every, progress.step))
    )
    if not (evaluates or is_last or is_due(config.train.log_every, progress.step)):
        return None
    line: dict[str, Any] = {"step": progress.step, **record}
    line |= {"tokens": batch.supervised_tokens, "input_tokens": batch.input_tokens}
    line |= {f"tokens/{name}": count for name, count in batch.tokens_by_source.items()}
    line |= {"packing_efficiency": batch.input_tokens / batch.capacity}
    line |= {"tokens_total": progress.tokens_total, **throughput.record()}
    if not evaluates or evaluate is None:
        metrics.log(line)
        return None
    line |= evaluate()
    metrics.log(line)
    metrics.log_samples(progress.step, evaluate.answers())
    throughput.restart()
    return line["eval_loss"]


def is_over(progress: Progress, config: TrainingConfig, *, total: int) -> bool:
    """Whether training is over: all steps are done, or evaluations no longer improve."""
    is_stale = config.eval.patience is not None and progress.stale_evaluations >= config.eval.patience
    return is_stale or progress.step >= total


def is_due(every: int, step: int) -> bool:
    """Whether something that happens every ``every`` steps (0: never) happens after ``step``."""
    return every > 0 and step % every == 0


def stream_seed(seed: int, step: int, dp_rank: int) -> int:
    """Seed of a step's randomness (dropout): a function of these three, so no generator state is saved."""
    digest = hashlib.sha256(f"{seed}/{step}/{dp_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class StopRequest:
    """``with StopRequest(max_minutes=…) as stop:`` then ``stop.requested`` on this rank.

    torchrun and most schedulers send SIGTERM, Slurm SIGUSR1 ahead of a time limit, Ctrl-C SIGINT; a second SIGINT
    interrupts as usual. The former handlers are restored at the end of the block.
    """

    def __init__(self, *, max_minutes: float | None = None, signals: bool = True) -> None:
        self._signals = _SIGNALS if signals else ()
        self._deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        self._received: str | None = None
        self._former: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
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
        """The signal's name, or ``run.max_minutes``."""
        if self._received is None and self._deadline is not None and time.monotonic() >= self._deadline:
            return "run.max_minutes"
        return self._received
