"""Held-out loss and perplexity, the same for every mesh, and what the model answers to a few questions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fsdp2kit.parallel.fsdp import reshard_all
from fsdp2kit.train.global_batch import Batches, next_batch
from fsdp2kit.train.losses import sum_loss
from fsdp2kit.train.plan import Plan


def evaluate(
    model: Any, sets: Mapping[str, Batches], to_device: Callable[[Any], dict[str, Any]], *, plan: Plan
) -> dict[str, float]:
    """Mean loss over the supervised tokens of held-out sets, and its exponential, the perplexity. Collective.

    Args:
        sets: held-out batches by name; "" is the set without a name.

    Returns:
        ``eval_loss`` and ``eval_perplexity`` over all tokens of all sets, and ``eval_loss/NAME`` and
        ``eval_perplexity/NAME`` of each that has a name.
    """
    model.eval()
    record: dict[str, float] = {}
    all_loss, all_tokens = 0.0, 0
    for name, batches in sets.items():
        loss, tokens = _sum_of_set(model, batches, to_device, plan=plan)
        all_loss, all_tokens = all_loss + loss, all_tokens + tokens
        if name:
            record |= _figures(loss / tokens, f"/{name}")
    # Units that keep their parameters for a backward that never comes would hide the shards from checkpoints.
    reshard_all(model)
    model.train()
    return {**_figures(all_loss / all_tokens, ""), **record}


@torch.no_grad()
def _sum_of_set(
    model: Any, batches: Batches, to_device: Callable[[Any], dict[str, Any]], *, plan: Plan
) -> tuple[float, int]:
    """The summed loss of a set's supervised tokens over all ranks, and their number."""
    total: Tensor | None = None
    tokens = 0
    steps = batches.steps_per_epoch
    for index in range(min(steps, plan.evaluate_steps or steps)):
        batch = next_batch(batches, index, stop=False, cp_size=plan.cp_size)
        tokens += batch.supervised_tokens
        for micro in batch.micro_batches:
            loss = model.loss_sum(**to_device(micro)).double()
            total = loss if total is None else total + loss
    assert total is not None, "an evaluation has at least one batch"
    return sum_loss(total).item(), tokens


def _figures(loss: float, suffix: str) -> dict[str, float]:
    return {f"eval_loss{suffix}": loss, f"eval_perplexity{suffix}": math.exp(min(loss, 700.0))}
