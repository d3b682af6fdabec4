"""The plan: all decisions about a model on a mesh, made once, before anything is allocated or changed.

`plan_parallel` decides, `parallelize_model` carries it out, and the loop, the dtype ledger and ``--check`` read the
plan. Planning needs no device, no weights and no process group.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from fsdp2kit.config.checks import MeshSizes, shard_ranks
from fsdp2kit.config.schema import (
    ActivationCheckpointingConfig,
    CompileConfig,
    FSDPConfig,
    ModelConfig,
    TrainingConfig,
)
from fsdp2kit.distributed import agreement
from fsdp2kit.model.build import source_of
from fsdp2kit.model.flops import ModelFlops, count_model_flops
from fsdp2kit.model.inspect import inspect_model
from fsdp2kit.model.loss_head import LossChoice, choose_loss
from fsdp2kit.parallel.context_parallel.choose import AttentionPath, choose_path
from fsdp2kit.parallel.float8 import Float8Plan, plan_float8
from fsdp2kit.parallel.fsdp import Unit, ignored_modules, plan_units
from fsdp2kit.parallel.ledger import DtypeLedger, dtype_ledger
from fsdp2kit.parallel.preflight import check_model


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a model is made parallel; `dataclasses.replace` changes a decision."""

    sizes: MeshSizes
    device_type: str | None
    """"cpu" or "cuda"; None: not known, and planned as for a CPU."""
    attention: AttentionPath
    """The context-parallel method and the attention kernel."""
    loss: LossChoice
    """What computes the loss on the head."""
    units: tuple[Unit, ...]
    """The FSDP units, the root first; ``fsdp`` has the prefetch depths."""
    float8: Float8Plan | None
    """The linear layers that compute in float8; None: none do."""
    ledger: DtypeLedger
    """The dtypes of parameters, gradients, moments, …"""
    flops: ModelFlops
    """From which a step's FLOPs are computed."""
    parameters: int
    """Number of the model's parameters, tied ones counted once."""
    frozen_parameters: int
    """How many of them are not trained."""
    ignored_parameters: int
    """How many of them every rank keeps whole."""
    model: ModelConfig
    fsdp: FSDPConfig
    activation_checkpointing: ActivationCheckpointingConfig
    compile: CompileConfig

    def describe(self) -> list[str]:
        """The plan as lines for the start of a run and for ``--check``."""
        lines = [str(self.sizes), str(self.attention), str(self.loss), *self._describe_sharding()]
        return [*lines, *(self.float8.describe() if self.float8 else []), str(self.ledger)]

    def _describe_sharding(self) -> list[str]:
        section = self.fsdp
        counts = Counter("root" if unit.is_root else unit.kind for unit in self.units)
        units = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        lines = [
            f"fsdp: {section.strategy} over {shard_ranks(section, self.sizes)} ranks; units: {units}; "
            f"gathered ahead: {section.forward_prefetch} in forward, {section.backward_prefetch} in backward"
        ]
        if self.frozen_parameters:
            lines.append(f"frozen: {self.frozen_parameters:,} of {self.parameters:,} parameters")
        if self.ignored_parameters:
            kept = f"{self.ignored_parameters:,} parameters, stored in {section.param_dtype}"
            lines.append(f"kept whole on every rank: {kept}")
        if self.device_type == "cpu":
            offloaded = [f"fsdp.offload = {section.offload!r}"] if section.offload != "none" else []
            offloaded += ["activation_checkpointing.offload"] if self.activation_checkpointing.offload else []
            lines += [f"{key} has no effect on a CPU run: everything is in host memory already" for key in offloaded]
        return lines


def plan_parallel(
    model: PreTrainedModel, config: TrainingConfig, sizes: MeshSizes, device_type: str | None = None
) -> ParallelPlan:
    """Decide how ``model`` is trained on a mesh of ``sizes``; its architecture is inspected once.

    In a job every rank calls it, and all ranks return or all raise.

    Args:
        model: as `build_model` made it, on meta; it is not changed.
        config: a recipe's config.
        sizes: of the mesh.
        device_type: "cpu" or "cuda"; None: not known. It is then planned as for a CPU, without the checks that need to
            know the device.

    Raises:
        UserError: the config would silently train something else, or asks for what is not available.
    """
    with agreement():
        traits = inspect_model(model)
        device = torch.device(device_type) if device_type else None
        attention = choose_path(config, model, traits=traits, cp=sizes.cp, device_type=device_type or "cpu")
        loss = choose_loss(config, model, traits=traits, device=device)
        check_model(model, config, traits=traits, attention=attention, cp=sizes.cp, device=device)
        ignored = (model.get_submodule(name) for name in ignored_modules(config.fsdp, model))
        whole = {id(p): p.numel() for module in ignored for p in module.parameters()}
        plan = ParallelPlan(
            sizes=sizes,
            device_type=device_type,
            attention=attention,
            loss=loss,
            units=plan_units(config.fsdp, model, traits=traits),
            float8=plan_float8(config, model, traits=traits, device=device),
            ledger=dtype_ledger(config, export=config.checkpoint.export_dtype or source_of(model).dtype),
            flops=count_model_flops(model),
            parameters=sum(p.numel() for p in model.parameters()),
            frozen_parameters=sum(p.numel() for p in model.parameters() if not p.requires_grad),
            ignored_parameters=sum(whole.values()),
            model=config.model,
            fsdp=config.fsdp,
            activation_checkpointing=config.activation_checkpointing,
            compile=config.compile,
        )
    return plan
