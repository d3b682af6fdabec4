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
from fsdp2kit.console import counted
from fsdp2kit.job.distributed import agreement
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.flops import ModelFlops, count_model_flops
from fsdp2kit.model.inspect import (
    Traits,
    beyond_positions,
    inspect_model,
)
from fsdp2kit.parallel.context_parallel.choose import AttentionPath, choose_path
from fsdp2kit.parallel.expert_parallel.partition import ExpertPlan, plan_experts
from fsdp2kit.parallel.fsdp import Unit, ignored_modules, plan_units, stays_in_float32
from fsdp2kit.parallel.ledger import DtypeLedger, dtype_ledger
from fsdp2kit.parallel.low_bits import Float8Plan, NF4Plan, plan_float8, plan_nf4
from fsdp2kit.parallel.refusals import (
    refuse_model,
    refuse_packs_that_leak,
    refuse_selective_in_pieces,
    refuse_untried_expert_parallelism,
)
from fsdp2kit.weights.adapters import Adapter
from fsdp2kit.weights.record import source_of, weights_of


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a model is made parallel; `dataclasses.replace` changes a decision."""

    sizes: MeshSizes
    device_type: str | None
    """"cpu" or "cuda"; None: not known, planned as for a CPU."""
    attention: AttentionPath
    """The context-parallel method and the attention kernel."""
    own_head: bool
    """Whether logits are more than ``hidden @ weightᵀ``, and so come from the model's own forward (`attach_loss`)."""
    experts: ExpertPlan | None
    """The partitioned experts; None: none are."""
    units: tuple[Unit, ...]
    """The FSDP units, the root first; ``fsdp`` has the prefetch depths."""
    float8: Float8Plan | None
    """The linear layers that compute in float8; None: none do."""
    nf4: NF4Plan | None
    """The linear layers whose frozen weights are in 4 bits; None: none are."""
    ledger: DtypeLedger
    """The dtypes of parameters, gradients, moments, …"""
    flops: ModelFlops
    """A step's FLOPs are computed from these."""
    parameters: int
    """Number of the model's parameters, tied ones counted once."""
    frozen_parameters: int
    """How many of them are not trained."""
    ignored_parameters: int
    """How many of them every rank keeps whole."""
    part_of: str | None
    """The class of several parts (text, images, …) whose text part is trained; None: the model is whole."""
    note: str | None
    """A note for the user about rows longer than the model's positions, if they are."""
    adapter: Adapter | None
    """The adapters that are trained; None: parameters of the model itself are."""
    model: ModelConfig
    fsdp: FSDPConfig
    activation_checkpointing: ActivationCheckpointingConfig
    compile: CompileConfig
    layers: tuple[str, ...]
    """Names of the decoder layers."""

    @property
    def broken_layers(self) -> list[str]:
        """Names of the decoder layers that hold units, whose hooks break the graph of a compiled layer."""
        inner = [unit.name for unit in self.units]
        return [layer for layer in self.layers if any(name.startswith(f"{layer}.") for name in inner)]

    def describe(self) -> list[str]:
        """The plan as lines for the start of a run and for ``--check``."""
        logits = "of the model's own head, whose logits are more than" if self.own_head else "of"
        loss = f"loss: in chunks {logits} hidden @ weightᵀ; an objective may ask for all logits instead"
        lines = [str(self.sizes), str(self.attention), loss, *self._describe_sharding()]
        lines += self.float8.describe() if self.float8 else []
        lines += [str(self.nf4)] if self.nf4 else []
        lines += [str(self.experts)] if self.experts else []
        return [*lines, str(self.ledger), *([self.note] if self.note else [])]

    def _describe_sharding(self) -> list[str]:
        section = self.fsdp
        counts = Counter(unit.kind if unit.name else "root" for unit in self.units)
        units = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        lines = [
            f"parameters: {self.parameters:,}",
            f"fsdp: {section.strategy} over {counted(shard_ranks(section, self.sizes), 'rank')}; units: {units}; "
            f"gathered ahead: {section.forward_prefetch} in forward, {section.backward_prefetch} in backward; "
            f"gradients are reduced {'after every micro-batch' if section.accumulates_shards else 'once a step'}",
        ]
        if self.part_of is not None:
            kept = "its other parts are on no device, and exports carry them over as they are"
            lines.append(f"model: the text part of {self.part_of}; {kept}")
        if self.adapter is not None:
            lines.append(self._describe_adapter(self.adapter))
        elif self.frozen_parameters:
            lines.append(f"frozen: {self.frozen_parameters:,} of {self.parameters:,} parameters")
        if self.ignored_parameters:
            kept = f"{self.ignored_parameters:,} parameters, stored in {section.param_dtype}"
            lines.append(f"kept whole on every rank: {kept}")
        checkpointed = self.activation_checkpointing
        if checkpointed.mode != "none":
            layers = "each decoder layer" if checkpointed.every == 1 else f"one decoder layer in {checkpointed.every}"
            lines.append(f"activation checkpointing: {checkpointed.mode}, {layers}")
        if self.compile.enabled:
            pieces = " (in pieces: units inside break its graph)" if self.broken_layers else ""
            lines.append(f"torch.compile: each decoder layer{pieces}")
        if self.device_type == "cpu":
            offloaded = [f"fsdp.offload = {section.offload!r}"] if section.offload != "none" else []
            offloaded += ["activation_checkpointing.offload"] if self.activation_checkpointing.offload else []
            lines += [f"{key} has no effect on a CPU run: everything is in host memory already" for key in offloaded]
        return lines

    def _describe_adapter(self, adapter: Adapter) -> str:
        config = adapter.config
        trained = self.parameters - self.frozen_parameters
        # Experts have two wrappers, one inside the other.
        named = dict.fromkeys(name.removesuffix(".base_layer") for name in adapter.layers)
        kinds = Counter(name.rpartition(".")[2] for name in named)
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        start = f"of {adapter.directory}" if adapter.directory else "new"
        words = [*(["rslora"] * config.use_rslora), *(["dora"] * config.use_dora)]
        words += [f"{', '.join(config.modules_to_save)} trained whole"] if config.modules_to_save else []
        kind = ", ".join([start, f"rank {config.r}", f"alpha {config.lora_alpha}", *words])
        return f"lora: {kind}; on {layers}; trained: {trained:,} of {self.parameters:,} parameters"


def plan_parallel(
    model: PreTrainedModel,
    config: TrainingConfig,
    sizes: MeshSizes,
    device_type: str | None = None,
    *,
    traits: Traits | None = None,
) -> ParallelPlan:
    """Decide how ``model`` is trained on a mesh of ``sizes``; its architecture is inspected once. Collective.

    Args:
        model: as `build_model` made it, on meta; it is not changed.
        device_type: "cpu" or "cuda"; None: not known. The plan is then that for a CPU, without the checks that need a
            device.
        traits: what `inspect_model` found, if it was called already.

    Raises:
        UserError: the config would silently train something else, or asks for what is not available.
    """
    with agreement():
        traits = traits or inspect_model(model)
        device = torch.device(device_type) if device_type else None
        refuse_model(model, config, traits=traits, device=device)
        refuse_packs_that_leak(model, config, traits=traits, attention=None)
        attention = choose_path(config, model, traits=traits, cp=sizes.cp, device_type=device_type)
        refuse_packs_that_leak(model, config, traits=traits, attention=attention)
        refuse_untried_expert_parallelism(model, config, sizes)
        experts = plan_experts(model, sizes)
        layers = set(decoder_layers(model))
        # Weights travel to an engine in rows.
        ranks = 1 if config.engine_needs is not None else shard_ranks(config.fsdp, sizes)
        nf4 = plan_nf4(config, model, traits=traits)
        in_4_bits = nf4.layouts(model) if nf4 else {}
        ignored = {p for name in ignored_modules(config.fsdp, model) for p in model.get_submodule(name).parameters()}
        plan = ParallelPlan(
            sizes=sizes,
            device_type=device_type,
            attention=attention,
            own_head=not traits.linear_head,
            experts=experts,
            units=plan_units(config.fsdp, model, traits=traits, experts=experts, ranks=ranks, in_4_bits=in_4_bits),
            float8=plan_float8(config, model, traits=traits, device=device),
            nf4=nf4,
            ledger=_ledger(config, model, replicas=sizes.world_size // shard_ranks(config.fsdp, sizes)),
            flops=count_model_flops(model),
            parameters=sum(p.numel() for p in model.parameters()),
            frozen_parameters=sum(p.numel() for p in model.parameters() if not p.requires_grad),
            ignored_parameters=sum(p.numel() for p in ignored),
            part_of=None if (whole := weights_of(model).names.whole) is None else type(whole.model).__name__,
            note=beyond_positions(model.config, seq_len=config.data.seq_len),
            adapter=weights_of(model).adapter,
            model=config.model,
            fsdp=config.fsdp,
            activation_checkpointing=config.activation_checkpointing,
            compile=config.compile,
            layers=tuple(name for name, module in model.named_modules() if module in layers),
        )
        refuse_selective_in_pieces(config, plan.broken_layers)
    return plan


def _ledger(config: TrainingConfig, model: PreTrainedModel, *, replicas: int) -> DtypeLedger:
    export = config.checkpoint.export_dtype or source_of(model).dtype
    exported = [export] * (weights_of(model).adapter is None)  # an adapter's export holds nothing of the model
    kept = [
        name for dtype in (config.fsdp.param_dtype, *exported) for name in stays_in_float32(config.fsdp, model, dtype)
    ]
    return dtype_ledger(config, export=export, replicas=replicas, kept=kept)
