"""The reference: a frozen model with whose log-probabilities an objective compares the trained model's.

It is the model as the run began, also when the run is resumed. With new adapters that is the trained model itself with
the adapters switched off, which takes no memory; otherwise it is a copy by the same builders.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fsdp2kit.checkpoint.state import fill_weights
from fsdp2kit.config.schema import ActivationCheckpointingConfig, TrainingConfig
from fsdp2kit.job.distributed import local_part
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.model.adapters import adapter_of, without_adapter
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.torch_compat import forget_forwards


def build_reference(config: TrainingConfig, model: Any, *, plan: ParallelPlan, mesh: Mesh) -> Reference:
    """The reference of a run, with its values. Collective.

    A copy is stored in the dtypes that it computes in: the numbers are the same, since the trained model's parameters
    are cast to these dtypes for each forward, and its shards in bfloat16 take half of the trained model's. None of its
    parameters stays gathered after forward, whatever the strategy.

    Args:
        model: the model that is trained, made parallel by ``plan``.
    """
    adapter = adapter_of(model)
    if adapter is not None and adapter.directory is None:  # new adapters begin by adding nothing
        return Reference(model, is_trained=True)
    copy = build_model(config.model, lora=config.lora).eval().requires_grad_(False)
    parallelize_frozen(copy, plan, mesh=mesh, seed=config.run.seed)
    return Reference(copy, is_trained=False)


def parallelize_frozen(model: Any, plan: ParallelPlan, *, mesh: Mesh, seed: int) -> None:
    """Shard a frozen meta model so that nothing stays gathered after forward, and give it its values. Collective."""
    units = tuple(replace(unit, reshard_after_forward=True) for unit in plan.units)
    plan = replace(plan, units=units, activation_checkpointing=ActivationCheckpointingConfig())
    parallelize_model(model, plan, mesh=mesh)
    fill_weights(plan.model, model, seed=seed)


@dataclass(frozen=True)
class Reference:
    """A frozen model's log-probabilities; see `build_reference`."""

    model: Any
    is_trained: bool
    """Whether it is the trained model, whose adapters are switched off for each call."""

    @torch.no_grad()
    def token_log_probs(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        """As ``model.token_log_probs``, without gradients: log-probabilities and entropies, float32 ``[N]``.

        Call it before the trained model's forward, not between that and its backward. Collective.
        """
        with without_adapter(self.model) if self.is_trained else contextlib.nullcontext():
            found = self.model.token_log_probs(**inputs)
        # Otherwise the trained model's backward would gather a unit for this forward, and a copy would record forwards
        # without end.
        forget_forwards(self.model)
        return found

    def describe(self) -> str:
        """A line for the start of a run."""
        if self.is_trained:
            return "the model with its adapters switched off"
        parameters = list(self.model.parameters())
        size = sum(local_part(parameter).nbytes for parameter in parameters)
        dtypes = ", ".join(sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}))
        return f"a frozen copy of the model as the run began, sharded, {size / 2**30:.2f} GiB of {dtypes} on this rank"
