"""The training loop.

Between two steps the ranks exchange a few host numbers, in one collective on gloo: whether reading the batch failed on
a rank, whether a rank was asked to stop or for a profile, how many tokens the global batch has. Within a step the host
waits for the device once, to read loss and gradient norm.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fsdp2kit.checkpoint.checkpoints import Checkpoints
from fsdp2kit.job import meeting, status, stop
from fsdp2kit.job.distributed import is_lost_rank
from fsdp2kit.job.lost_ranks import outlive_torchrun
from fsdp2kit.job.process import seconds_alive
from fsdp2kit.job.progress import Progress
from fsdp2kit.parallel.context_parallel.batch import build_slice_batch
from fsdp2kit.parallel.ledger import assert_ledger
from fsdp2kit.torch_compat import compiled_graphs
from fsdp2kit.train import notices
from fsdp2kit.train.balance import Balance, NoBalance, build_balance
from fsdp2kit.train.evaluating import Evaluates, Evaluations
from fsdp2kit.train.metrics import RECORD_KEYS
from fsdp2kit.train.out_of_memory import explain_out_of_memory
from fsdp2kit.train.profiling import run_profiler
from fsdp2kit.train.run import Run
from fsdp2kit.train.saving import NoCheckpoints, Saves
from fsdp2kit.train.step import (
    Batches,
    GlobalBatch,
    MetricNames,
    Objective,
    accumulate_gradients,
    clip_gradients,
    epoch_of,
    is_due,
    is_finite,
    next_batch,
    raise_nonfinite,
    step_figures,
)


def train_loop(
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
    config = run.config
    mesh = run.mesh
    metrics = run.metrics
    first_step = run.progress.step + 1
    checkpoints = run.checkpoints or NoCheckpoints()
    saves = Saves(checkpoints, config.checkpoint, batches, metrics=metrics, step=run.progress.step)
    evaluations = Evaluations(evaluate, config.eval, metrics=metrics, last_step=run.last_step)
    balance = build_balance(config.moe, model, plan=run.plan, mesh=mesh, metrics=metrics)
    shard = build_slice_batch(model.config, path=run.plan.attention, mesh=mesh)
    names = MetricNames(reserved=RECORD_KEYS)
    graphs = compiled_graphs()  # of earlier runs in this process

    with (
        checkpoints,
        run_profiler(config, mesh=mesh, metrics=metrics, first_step=first_step, last_step=run.last_step) as profiler,
        balance,
        explain_out_of_memory(config, model, optimizer, mesh.sizes, rank=mesh.rank),
        saving_when_torchrun_ends(),
        stop.listening(max_minutes=config.run.max_minutes, signals=run.checkpoints is not None) as asked,
    ):
        begin(run, evaluations, saves, checkpoints)

        while not run.is_over and run.progress.unevaluated is None:
            # Batch: with its counts, ranks exchange what they were asked for, so that all of them do it.
            status.begin("", step=run.progress.step + 1)
            batch = next_batch(
                batches,
                run.progress.step,
                mesh=mesh,
                stop=asked.requested,
                save_failed=checkpoints.has_failed(),
                save_due=mesh.rank == 0 and saves.is_time(),
                profile=profiler.is_asked,
            )
            if batch.save_failed:
                checkpoints.finish_save()  # raises the failure
            if batch.stop:
                break
            if batch.save_due:
                saves.save_unless_saved(run.progress, is_over=False)

            # Step
            torch.manual_seed(stream_seed(config.run.seed, run.progress.step, mesh.dp_rank))
            is_first = not metrics.throughput.has_begun
            with assert_ledger(run.plan.ledger, model, optimizer) if is_first else contextlib.nullcontext():
                figures = train_step(
                    run,
                    model,
                    optimizer,
                    schedule,
                    batch,
                    objective=objective,
                    shard=shard,
                    balance=balance,
                    names=names,
                )

            # Count
            run.progress = run.progress.after_step(
                batch.supervised_tokens, batch.input_tokens, is_finite=is_finite(figures)
            )
            if not is_finite(figures):
                notices.tell_skipped(run, batch, figures)
            if is_first:
                notices.tell_first_step(run, graphs_before=graphs)
            metrics.throughput.add(batch.input_tokens, batch.supervised_tokens, batch.attention_pairs, batch.seconds)

            # Evaluate, log
            step = run.progress.step
            metrics.shown = names.shown
            evaluates = evaluations.is_due(step)
            if evaluates or step == run.last_step or is_due(config.train.log_every, step):
                record = step_record(run, batches, batch, figures)
                if evaluates:
                    run.progress = evaluations.evaluate_and_log(run.progress, record)
                else:
                    metrics.log(record)
            notices.check_nonfinite_steps(run)

            # Save
            if evaluations.found_best(run.progress) or is_due(config.checkpoint.every, step):
                saves.save(run.progress, is_over=run.is_over)
            profiler.end_step(is_asked=batch.profile)

        # Stop
        if not run.is_over:
            notices.tell_stop(run, asked)
        elif first_step <= run.progress.step < run.last_step:
            notices.tell_early_end(run, evaluations.maximizes)
        asked.lift_time_limit()
        saves.save_unless_saved(run.progress, is_over=run.is_over)
        checkpoints.finish_save()
        is_done = run.is_over and not checkpoints.left_an_export
        if run.is_over and not is_done:
            metrics.events.record("stop", step=run.progress.step, reason=asked.reason)

    if mesh.rank == 0:
        lines = notices.describe_end(run, batches, checkpoints, is_done=is_done, maximizes=evaluations.maximizes)
        for line in lines:
            metrics.message(line)
    outcome = "done" if is_done else "stopped"
    metrics.events.record("end", step=run.progress.step, outcome=outcome, seconds=round(seconds_alive(), 1))
    return run.progress


def begin(run: Run, evaluations: Evaluations, saves: Saves, checkpoints: Checkpoints | NoCheckpoints) -> None:
    """Do before the first step what the start before has left, and evaluate a run without steps. Collective."""
    notices.tell_plan(run)
    run.progress = evaluations.begin(run.progress)
    if run.progress.unevaluated is not None:
        record = run.progress.unevaluated
        run.progress = replace(run.progress, unevaluated=None)
        run.progress = evaluations.evaluate_and_log(run.progress, record, is_completed=True)
        if run.is_over or evaluations.found_best(run.progress):
            stop.begin_to_change()
            saves.save(run.progress, is_over=run.is_over)
    checkpoints.export_resumed(run.progress, is_over=run.is_over)
    if run.last_step == 0 and evaluations.are_wanted:
        run.progress = evaluations.evaluate_and_log(run.progress, {"step": run.progress.step})
    elif run.is_over:
        notices.tell_nothing_left(run)
    run.metrics.throughput.restart()


def train_step(
    run: Run,
    model: Any,
    optimizer: Optimizer,
    schedule: LambdaLR,
    batch: GlobalBatch,
    *,
    objective: Objective,
    names: MetricNames,
    shard: Callable[[Any], dict[str, Any]],
    balance: Balance | NoBalance,
) -> dict[str, float]:
    """One optimizer step on one global batch; the parameters stay if loss or gradient is not finite. Collective.

    Args:
        names: of the objective's metrics.
        shard: from a micro-batch on the host to this rank's inputs of ``objective``, on the device.

    Returns:
        What `step_figures` returns.
    """
    section = run.config.train
    memory = run.metrics.throughput.memory
    memory.end(None)
    local_sums = accumulate_gradients(
        model,
        batch,
        objective=objective,
        names=names,
        shard=shard,
        balance=balance,
        fsdp=run.config.fsdp,
        end_phase=memory.end,
    )
    norm = clip_gradients(model, max_norm=section.max_grad_norm)
    lr = float(optimizer.param_groups[0]["lr"])  # a tensor in torchao's optimizers
    figures = step_figures(local_sums, norm, lr, batch, names=names.names, mesh=run.mesh)
    stop.begin_to_change()
    if is_finite(figures):
        if run.checkpoints is not None:
            run.checkpoints.wait_until_staged()  # a save may still be copying what the step changes
        optimizer.step()
    elif section.on_nonfinite == "stop":
        raise_nonfinite(local_sums, figures["grad_norm"], batch, config=run.config, step=run.progress.step + 1)
    balance.end_step(moves=is_finite(figures))
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    memory.end("optimizer")
    return figures


def step_record(run: Run, batches: Batches, batch: GlobalBatch, figures: Mapping[str, float]) -> dict[str, Any]:
    """The record of the step that was just counted. Collective.

    Args:
        figures: of `train_step`.
    """
    step = run.progress.step
    return {
        "step": step,
        **epoch_of(batches, step),
        **figures,
        "tokens": batch.supervised_tokens,
        "input_tokens": batch.input_tokens,
        **{f"tokens/{name}": count for name, count in batch.tokens_by_source.items()},
        "packing_efficiency": batch.input_tokens / batch.capacity,
        "tokens_total": run.progress.tokens_total,
        **run.metrics.throughput.record(),
    }


@contextlib.contextmanager
def saving_when_torchrun_ends() -> Iterator[None]:
    """Inside, ranks whose torchrun has ended save first. After an error they outlive it until they have said why."""
    meeting.stop_watching()
    try:
        yield
    except Exception as error:
        outlive_torchrun(error, is_lost=is_lost_rank(error))
        raise


def stream_seed(seed: int, step: int, dp_rank: int) -> int:
    """Seed of a step's randomness (dropout): a function of these three, so no generator state is saved."""
    digest = hashlib.sha256(f"{seed}/{step}/{dp_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
