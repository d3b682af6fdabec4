"""Optimizer and learning-rate schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule,
)

from fsdp2kit.config.schema import LRScheduleConfig, OptimizerConfig
from fsdp2kit.parallel.float8 import keep_scales
from fsdp2kit.train.adamw_8bit import build_adamw_8bit
from fsdp2kit.train.host_state import keep_state_on_host
from fsdp2kit.train.moments import FORMATS
from fsdp2kit.train.muon import MuonAdamW, hidden_matrices
from fsdp2kit.train.rounded_adamw import RoundedAdamW


def build_optimizer(
    section: OptimizerConfig, model: nn.Module, *, state_on_host: bool = False
) -> torch.optim.Optimizer:
    """The optimizer of ``section.name`` over the trainable parameters.

    Norms and biases (fewer than two dimensions) are not decayed. Build it after the model is sharded and its
    parameters are where they stay.

    Args:
        state_on_host: keep the moments in pinned host memory (`keep_state_on_host`), where parameters are not.

    Raises:
        UserError: the optimizer is torchao's, and that is not installed.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if section.name == "muon":
        matrices = hidden_matrices(model)
        inside = {id(matrix) for matrix in matrices}
        optimizer: torch.optim.Optimizer = MuonAdamW(
            _groups(matrices, section),
            _groups([parameter for parameter in trainable if id(parameter) not in inside], section),
            lr=section.lr,
            momentum=section.muon_momentum,
            betas=section.betas,
            eps=section.eps,
        )
    elif section.name == "adamw":
        optimizer = torch.optim.AdamW(
            _groups(trainable, section),
            lr=section.lr,
            betas=section.betas,
            eps=section.eps,
            fused=True,  # one kernel over all shards, on CPU and CUDA alike
        )
    elif section.name in FORMATS:
        optimizer = RoundedAdamW(
            _groups(trainable, section),
            format_of=FORMATS[section.name],
            lr=section.lr,
            betas=section.betas,
            eps=section.eps,
        )
    else:
        return build_adamw_8bit(section, _groups(trainable, section))
    if state_on_host and any(parameter.device.type != "cpu" for parameter in trainable):
        keep_state_on_host(optimizer)
    keep_scales(model, optimizer)
    return optimizer


def _groups(parameters: Sequence[nn.Parameter], section: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameter groups, the decayed and then the others, without empty ones."""
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    exempt = [parameter for parameter in parameters if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": section.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_lr_schedule(
    section: LRScheduleConfig, optimizer: torch.optim.Optimizer, *, total_steps: int, step: int = 0
) -> LambdaLR:
    """A transformers schedule, positioned at ``step``: the next optimizer step uses the rate of that step.

    The position is a number, not saved state, so a resumed run may change the schedule or the peak rate.

    Args:
        total_steps: length of the whole run in optimizer steps.
        step: optimizer steps already taken.
    """
    warmup = section.warmup_steps
    if section.name == "constant":
        schedule = get_constant_schedule_with_warmup(optimizer, warmup)
    elif section.name == "linear":
        schedule = get_linear_schedule_with_warmup(optimizer, warmup, total_steps)
    elif section.name == "cosine":
        schedule = get_cosine_with_min_lr_schedule_with_warmup(
            optimizer, warmup, total_steps, min_lr_rate=section.min_lr_ratio
        )
    else:
        decay = section.decay_steps or max(1, total_steps // 10)
        schedule = get_wsd_schedule(
            optimizer, warmup, decay, num_training_steps=total_steps, min_lr_ratio=section.min_lr_ratio
        )
    schedule.last_epoch = step
    for group, base, factor in zip(optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True):
        group["lr"] = base * factor(step)
    return schedule
