"""The loop: one step is one screen, top to bottom.

Between two steps the ranks exchange a handful of host numbers, in one collective on gloo: did reading the batch
fail anywhere, was any rank asked to stop, how many tokens does the global batch have. Within a step the host waits
for the device once, to read loss and gradient norm.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fsdp2kit.parallel.compile import keep_compiled
from fsdp2kit.progress import Progress
from fsdp2kit.train.global_batch import Batches, GlobalBatch, next_batch
from fsdp2kit.train.losses import accumulate_gradients, gradient_norm, is_finite, raise_nonfinite, sum_loss
from fsdp2kit.train.plan import Plan, judge
from fsdp2kit.train.saving import Saving
from fsdp2kit.train.signals import StopRequest
from fsdp2kit.train.throughput import Throughput


@dataclass(frozen=True)
class Hooks:
    """What the recipe built and the loop calls; each may be left out."""

    log: Callable[[dict[str, Any]], None] = lambda record: None
    save: Callable[[Progress], object] | None = None
    saving: Saving = field(default_factory=Saving)
    evaluate: Callable[[], Mapping[str, float]] | None = None
    """Metrics of the held-out data; ``eval_loss`` among them."""
    sample: Callable[[int], None] = lambda step: None
    """Lets the model answer, after an evaluation at a step."""
    profile: Callable[[], bool] = lambda: False
    """Called when a step is over; returns whether it took time that is no training."""
    first_step: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    message: Callable[[str], None] = field(default=print)


def train(
    model: Any,
    optimizer: Optimizer,
    schedule: LambdaLR,
    batches: Batches,
    to_device: Callable[[Any], dict[str, Any]],
    *,
    plan: Plan,
    progress: Progress,
    throughput: Throughput,
    hooks: Hooks,
) -> Progress:
    """Train from ``progress.step`` to ``plan.total_steps``.

    Args:
        batches: from a global batch's index to this data-parallel rank's micro-batches, on the host.
        to_device: from one of these to the arguments of ``model.loss_sum``, on the device.
        throughput: turns counts and seconds into the speeds of a metrics record.

    Returns:
        How far it came: to the end, or less where it was asked to stop. A checkpoint of that is written.

    Raises:
        RunFailure: a non-finite loss or gradient under ``on_nonfinite = "stop"``; a save that failed.
        UserError: a row that cannot be read, a global batch without a supervised token.
    """
    saved_at = first = progress.step
    if plan.total_steps == 0 and hooks.evaluate:
        hooks.log({"step": progress.step, **hooks.evaluate()})
        hooks.sample(progress.step)
    elif plan.is_over(progress):
        hooks.message(f"nothing left to train: step {progress.step} of {plan.total_steps} is done")
    throughput.restart()
    with StopRequest(max_minutes=plan.max_minutes, signals=plan.heeds_signals) as stop:
        while not plan.is_over(progress):
            batch = next_batch(
                batches,
                progress.step,
                stop=stop.requested,
                cp_size=plan.cp_size,
                source_names=plan.source_names,
                save_failed=hooks.saving.has_failed(),
            )
            if batch.save_failed:
                hooks.saving.finish()
            if batch.stop:
                hooks.message(f"asked to stop ({stop.reason or 'on another rank'}) after step {progress.step}")
                break
            torch.manual_seed(stream_seed(plan.seed, progress.step, plan.dp_rank))
            throughput.memory.start()
            with hooks.first_step() if progress.step == first else contextlib.nullcontext():
                record = train_step(
                    model,
                    optimizer,
                    schedule,
                    batch,
                    to_device,
                    plan=plan,
                    step=progress.step + 1,
                    before_update=hooks.saving.wait_until_staged,
                    end_phase=throughput.memory.end,
                )
            if progress.step == first:
                for line in (throughput.first_step(), *keep_compiled()):
                    hooks.message(line)
            if not is_finite(record):
                loss, norm = record["loss"], record["grad_norm"]
                hooks.message(
                    f"step {progress.step + 1}: skipped, since its loss is {loss} and its gradient norm {norm}"
                )
            progress = progress.after_step(batch.supervised_tokens, batch.input_tokens)
            throughput.add(batch.input_tokens, batch.supervised_tokens, batch.attention_pairs, batch.seconds)
            eval_loss = report(record, batch, plan=plan, progress=progress, throughput=throughput, hooks=hooks)
            progress = judge(progress, eval_loss, plan=plan)
            is_best = plan.keep_best and progress.best_step == progress.step
            if hooks.save and (is_best or plan.is_due(plan.save_every, progress.step)):
                hooks.save(progress)
                saved_at = progress.step
                throughput.restart()
            if hooks.profile():
                throughput.restart()
        if plan.is_over(progress) and first < progress.step < plan.total_steps:
            hooks.message(
                f"stopped early: eval_loss was lowest ({progress.best_eval_loss:.4f}) at {progress.best_step}"
            )
        if hooks.save and saved_at != progress.step:
            hooks.save(progress)
    for line in keep_compiled():  # evaluation and answers to prompts are compiled for themselves
        hooks.message(line)
    return progress


def report(
    record: dict[str, float],
    batch: GlobalBatch,
    *,
    plan: Plan,
    progress: Progress,
    throughput: Throughput,
    hooks: Hooks,
) -> float | None:
    """Log this step where it is due, with the held-out loss where that is due, which is returned."""
    evaluates = hooks.evaluate is not None and plan.is_due(plan.evaluate_every, progress.step, also_last=True)
    if not evaluates and not plan.is_due(plan.log_every, progress.step, also_last=True):
        return None
    line: dict[str, Any] = {"step": progress.step, **record}
    line |= {"tokens": batch.supervised_tokens, "input_tokens": batch.input_tokens}
    line |= {f"tokens/{name}": count for name, count in batch.tokens_by_source.items()}
    line |= {"packing_efficiency": batch.input_tokens / batch.places}
    line |= {"tokens_total": progress.tokens_total, **throughput.record()}
    if evaluates and hooks.evaluate is not None:
        line |= hooks.evaluate()
    hooks.log(line)
    if evaluates:
        hooks.sample(progress.step)
        throughput.restart()
    return line.get("eval_loss")


def train_step(
    model: Any,
    optimizer: Optimizer,
    schedule: LambdaLR,
    batch: GlobalBatch,
    to_device: Callable[[Any], dict[str, Any]],
    *,
    plan: Plan,
    step: int,
    before_update: Callable[[], None] = lambda: None,
    end_phase: Callable[[str], None] = lambda phase: None,
) -> dict[str, float]:
    """One optimizer step on one global batch.

    Args:
        before_update: called between backward and the optimizer, which changes what a save may still be copying.
        end_phase: called with "forward", "backward" and "optimizer" when each is over.

    Returns:
        ``loss``, ``grad_norm`` (before clipping) and ``lr`` of this step; of a mix also ``loss/NAME``, the mean over
        that source's supervised tokens, where it has any in this batch.
    """
    inputs = [lambda micro=micro: to_device(micro) for micro in batch.micro_batches]
    local_loss = accumulate_gradients(
        model,
        inputs,
        tokens=batch.supervised_tokens,
        reduce_every=plan.reduce_every_micro_batch,
        gather_once=plan.gather_once,
        end_phase=end_phase,
    )
    norm = gradient_norm(model)
    if plan.max_grad_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), plan.max_grad_norm, norm)
    lr = float(optimizer.param_groups[0]["lr"])  # torchao's optimizers keep a tensor, which the schedule fills anew
    loss_value, *parts, norm_value = _read(sum_loss(local_loss.clone()), norm)
    record = {"loss": loss_value, "grad_norm": norm_value, "lr": lr}
    for (name, tokens), part in zip(batch.tokens_by_source.items(), parts, strict=False):
        if tokens:
            record[f"loss/{name}"] = part * batch.supervised_tokens / tokens
    if is_finite(record):
        before_update()
        optimizer.step()
    elif plan.on_nonfinite == "stop":
        raise_nonfinite(local_loss, norm_value, step=step)
    schedule.step()
    optimizer.zero_grad(set_to_none=True)
    end_phase("optimizer")
    return record


def stream_seed(seed: int, step: int, dp_rank: int) -> int:
    """Seed of whatever randomness a step has: a function of these three, so no generator state needs saving."""
    digest = hashlib.sha256(f"{seed}/{step}/{dp_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _read(*figures: Tensor) -> Iterable[float]:
    """Device scalars and vectors to host numbers in one wait."""
    return torch.cat([figure.detach().to(figures[0].device, torch.float64).flatten() for figure in figures]).tolist()
