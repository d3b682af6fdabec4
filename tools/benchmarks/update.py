"""A step of an optimizer alone: AdamW in bfloat16, compiled and not, beside torch's and torchao's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from logging.handlers import BufferingHandler
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM

from fsdp2kit.config.schema import AdamWConfig
from fsdp2kit.job.distributed import World
from fsdp2kit.model import trials
from fsdp2kit.optim import update_kernel
from fsdp2kit.optim.build import build_optimizer
from fsdp2kit.optim.rounded_adamw import RoundedAdamW
from tools.benchmarks.harness import Side, missing_packages, run_sides, task_rows
from tools.benchmarks.storage import llama_config

_WARMUP = 2


def bench_update(
    world: World, *, params: float = 1.0, dtype: Literal["float32", "bfloat16"] = "float32", rounds: int = 20
) -> dict[str, Any]:
    """Time and memory of an optimizer's step over a random Llama's parameters, in turns; the model does not run.

    The sides are "adamw_bf16" by its compiled kernel and by plain operations, "adamw" (torch's fused AdamW) and, with
    float32 parameters and torchao installed, "adamw_8bit", which torchao compiles on CUDA only. Memory is parameters,
    gradients, state and what the update takes beside them.

    Args:
        params: billions of parameters.
        dtype: of parameters and gradients.
        rounds: that are timed.
    """
    builds: dict[str, Callable[[nn.Module], Optimizer]] = {
        "adamw_bf16, compiled": partial(_rounded, compiles=True),
        "adamw_bf16": partial(_rounded, compiles=False),
        "adamw": partial(build_optimizer, AdamWConfig(name="adamw")),
    }
    if dtype == "float32" and not missing_packages("torchao"):
        builds["adamw_8bit"] = partial(build_optimizer, AdamWConfig(name="adamw_8bit"))
    sides: dict[str, Side] = {
        name: _Update(build, params * 1e9, device=world.device, dtype=getattr(torch, dtype))
        for name, build in builds.items()
    }
    warnings = BufferingHandler(capacity=1000)
    logging.getLogger("fsdp2kit").addHandler(warnings)
    try:
        found = run_sides(sides, rounds=rounds, warmup=_WARMUP, world=world)
    finally:
        logging.getLogger("fsdp2kit").removeHandler(warnings)
    rows = task_rows(found)
    for row in rows:
        row["first_step_seconds"] = found[row["name"]]["first_step_seconds"]
    notes = [f"{name} ran {figures['ran']}" for name, figures in found.items()]
    notes += [record.getMessage() for record in warnings.buffer]
    fallbacks = [record for record in warnings.buffer if record.name in (trials.__name__, update_kernel.__name__)]
    return {"rows": rows, "notes": notes, "checks": {"compiled_update_was_used": not fallbacks}}


class _Update(Side):
    """Steps with the same random gradients."""

    def __init__(
        self, build: Callable[[nn.Module], Optimizer], params: float, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        self._build = build
        self._params = params
        self._device = device
        self._dtype = dtype

    def build(self) -> None:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(llama_config(self._params), dtype=self._dtype)
        self._model: nn.Module = model.to_empty(device=self._device)
        generator = torch.Generator(self._device).manual_seed(0)
        for parameter in self._model.parameters():
            nn.init.normal_(parameter, std=0.02, generator=generator)
            parameter.grad = torch.empty_like(parameter).normal_(std=1e-3, generator=generator)
        self._optimizer = self._build(self._model)

    def step(self) -> None:
        self._optimizer.step()

    def outcome(self) -> None:
        pass

    def prepare(self) -> None:
        pass

    def describe(self) -> str:
        tensors = list(self._model.parameters())
        shapes = {tensor.shape for tensor in tensors}
        elements = sum(tensor.numel() for tensor in tensors)
        return f"{elements:,} parameters in {len(tensors)} tensors of {len(shapes)} shapes"


def _rounded(model: nn.Module, *, compiles: bool) -> Optimizer:
    """``optimizer.name = "adamw_bf16"`` with the default values, compiled or not."""
    section = AdamWConfig(name="adamw_bf16")
    return RoundedAdamW(
        model.parameters(),
        lr=section.lr,
        betas=section.betas,
        eps=section.eps,
        weight_decay=section.weight_decay,
        compiles=compiles,
    )
