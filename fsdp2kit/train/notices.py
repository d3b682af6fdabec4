"""What the loop tells the user besides metrics: skipped steps, requests to stop, what a run leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.console import counted
from fsdp2kit.errors import NonFiniteFailure
from fsdp2kit.job.distributed import gather_objects
from fsdp2kit.job.process import seconds_alive
from fsdp2kit.job.stop import StopRequest
from fsdp2kit.torch_compat import compiled_graphs
from fsdp2kit.train.run import Run
from fsdp2kit.train.saving import NoCheckpoints
from fsdp2kit.train.step import Batches, GlobalBatch, epoch_of, nonfinite_packs


def tell_plan(run: Run) -> None:
    """Record what was planned, to be compared with the figures of the records."""
    planned = run.memory.planned() if run.memory is not None else {}
    if planned:
        run.metrics.events.record("plan", gib=planned)


def tell_nothing_left(run: Run) -> None:
    """Say why nothing is trained."""
    step = f"step {run.progress.step} of {run.last_step}"
    is_done = run.progress.step >= run.last_step
    done = f"{step} is done" if is_done else f"the run stopped early, after {step}"
    run.metrics.message(f"nothing left to train: {done}")


def tell_skipped(run: Run, batch: GlobalBatch, figures: Mapping[str, float]) -> None:
    """Say which step changed no parameter, and why. Collective."""
    why = f"its loss is {figures['loss']} and its gradient norm {figures['grad_norm']}"
    why += nonfinite_packs(batch, run.config)
    run.metrics.message(f"step {run.progress.step}: skipped, since {why}")


def tell_first_step(run: Run, *, graphs_before: int) -> None:
    """Say how long the first step took, and warn if no layer was compiled that should be.

    Args:
        graphs_before: that had been compiled in this process before.
    """
    run.metrics.message(run.metrics.throughput.first_step())
    if run.config.compile.enabled and compiled_graphs() == graphs_before:
        why = "set TORCH_LOGS=graph_breaks to see why, or compile.enabled = false"
        run.metrics.message(f"warning: compile.enabled = true, but torch.compile compiled nothing; {why}")


def check_nonfinite_steps(run: Run) -> None:
    """Raise a `NonFiniteFailure` if too many steps in a row were skipped."""
    if run.progress.nonfinite_steps < run.config.train.max_nonfinite:
        return
    steps = counted(run.progress.nonfinite_steps, "step")
    raise NonFiniteFailure(
        f"step {run.progress.step}: the loss or gradient of {steps} in a row was not finite "
        "(train.max_nonfinite); the last checkpoint is untouched. Lower the learning rate, or look at the data"
    )


def tell_stop(run: Run, asked: StopRequest) -> None:
    """Say which rank was asked to stop, and how. Collective."""
    reasons = gather_objects(asked.reason)
    named = {rank: reason for rank, reason in enumerate(reasons) if reason is not None}
    # A rank that was told names the one that was asked.
    others = [one if " on rank " in one else f"{one} on rank {rank}" for rank, one in named.items()]
    where = asked.reason or next(iter(others), "by the recipe")
    run.metrics.message(f"asked to stop ({where}) after step {run.progress.step}")
    run.metrics.events.record("stop", step=run.progress.step, reason=where)


def tell_early_end(run: Run, maximizes: str | None) -> None:
    """Say that the run ends before its last step, since evaluations do not improve.

    Args:
        maximizes: as of `Progress.describe_best`.
    """
    what = "eval_loss was never finite"
    if run.progress.best_step is not None:
        what = f"step {run.progress.best_step} was the best ({run.progress.describe_best(maximizes)})"
    run.metrics.message(f"stopped early: {what}")
    run.metrics.events.record("stop", step=run.progress.step, reason=f"early: {what}")


def describe_end(
    run: Run, batches: Batches, checkpoints: Checkpoints | NoCheckpoints, *, is_done: bool, maximizes: str | None
) -> list[str]:
    """What was done and where it is, once everything is written. On one rank alone.

    Args:
        is_done: whether the run is over, and exported.
        maximizes: as of `Progress.describe_best`.
    """
    step = run.progress.step
    lines = []
    if run.memory is not None:
        lines += run.memory.compare(run.metrics.throughput.memory.phases, device_type=run.mesh.device.type)
    how = "done"
    if not is_done:
        how = f"stopped, and {'goes on' if step else 'begins anew'} when it is started again"
    trained = "nothing to train"
    if run.last_step:
        epoch = "".join(f" (epoch {value:.2f})" for value in epoch_of(batches, step).values())
        trained = f"step {step} of {run.last_step}{epoch}, {run.progress.tokens_total:,} supervised tokens"
    lines.append(f"{how}: {trained}, in {timedelta(seconds=round(seconds_alive()))}")
    lines.append(f"metrics: {Path(run.config.run.dir) / 'metrics.jsonl'}")
    return [*lines, *checkpoints.describe_end(is_over=is_done, maximizes=maximizes)]
