"""The plan: all decisions about a model on a mesh, made once, before anything is allocated or changed.

`plan_parallel` decides, `parallelize_model` carries it out, and the loop, the dtype ledger and ``--check`` read the
plan. Planning needs no device, no weights and no process group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from fsdp2kit.config.checks import MeshSizes, shard_ranks
from fsdp2kit.config.schema import (
    ActivationCheckpointingConfig,
    CompileConfig,
    FSDPConfig,
    ModelConfig,
    TrainingConfig,
)
from fsdp2kit.console import counted
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import agreement
from fsdp2kit.model.adapters import Adapter, adapter_of
from fsdp2kit.model.build import decoder_layers, source_of
from fsdp2kit.model.flops import ModelFlops, count_model_flops
from fsdp2kit.model.inspect import (
    Traits,
    beyond_positions,
    check_attention,
    check_positions,
    check_rope,
    check_temperature,
    inspect_model,
)
from fsdp2kit.model.liger import check_liger
from fsdp2kit.model.names import whole_of
from fsdp2kit.model.text_part import check_same_logits
from fsdp2kit.model.tokenizer import check_same_tokens
from fsdp2kit.parallel.activation_checkpointing import apply_activation_checkpointing
from fsdp2kit.parallel.context_parallel.batch import unknown_kinds
from fsdp2kit.parallel.context_parallel.choose import AttentionPath, choose_path
from fsdp2kit.parallel.context_parallel.layout import VARLEN
from fsdp2kit.parallel.context_parallel.recurrent import find_recurrent
from fsdp2kit.parallel.context_parallel.recurrent_checks import try_recurrent
from fsdp2kit.parallel.expert_parallel.deal import ExpertPlan, plan_experts
from fsdp2kit.parallel.expert_parallel.routing import check_balance
from fsdp2kit.parallel.fsdp import Unit, ignored_modules, plan_units, stays_in_float32
from fsdp2kit.parallel.ledger import DtypeLedger, dtype_ledger
from fsdp2kit.parallel.low_bits import Float8Plan, NF4Plan, plan_float8, plan_nf4
from fsdp2kit.parallel.tensor_parallel import check_tensor_parallel


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
    """The experts that are dealt out; None: none are."""
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
        config, trained = adapter.config, self.parameters - self.frozen_parameters
        # Experts have two wrappers, one inside the other.
        named = dict.fromkeys(name.removesuffix(".base_layer") for name in adapter.layers)
        kinds = Counter(name.rpartition(".")[2] for name in named)
        layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        start = f"of {adapter.directory}" if adapter.directory else "new"
        words = [*(["rslora"] * config.use_rslora), *(["dora"] * config.use_dora)]
        words += [f"{', '.join(config.modules_to_save)} trained whole"] if config.modules_to_save else []
        kind = ", ".join([start, f"rank {config.r}", f"alpha {config.lora_alpha}", *words])
        return f"lora: {kind}; on {layers}; trained: {trained:,} of {self.parameters:,} parameters"


_NOT_COMPILED = (
    "activation_checkpointing.mode 'selective' with compile.enabled",
    "decoder layers hold FSDP units (fsdp.unit, unit_classes or class_dtypes), whose hooks break the layers' graphs; "
    "torch.compile cannot choose what to keep across pieces",
    'set activation_checkpointing.mode = "full", fsdp.unit = "layer" without such classes, or compile.enabled = false',
)


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
        _check_model(model, config, traits=traits, device=device)
        _check_packing(model, config, traits=traits)
        attention = choose_path(config, model, traits=traits, cp=sizes.cp, device_type=device_type or "cpu")
        _check_packing(model, config, traits=traits, attention=attention)
        experts = _plan_experts(model, config, sizes)
        layers = set(decoder_layers(model))
        # Weights travel to an engine in rows.
        ranks = 1 if config.needs(config).engine is not None else shard_ranks(config.fsdp, sizes)
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
            part_of=None if (whole := whole_of(model)) is None else type(whole.model).__name__,
            note=beyond_positions(model.config, seq_len=config.data.seq_len),
            adapter=adapter_of(model),
            model=config.model,
            fsdp=config.fsdp,
            activation_checkpointing=config.activation_checkpointing,
            compile=config.compile,
            layers=tuple(name for name, module in model.named_modules() if module in layers),
        )
        if config.compile.enabled and config.activation_checkpointing.mode == "selective" and plan.broken_layers:
            raise UserError(*_NOT_COMPILED)
    return plan


def _ledger(config: TrainingConfig, model: PreTrainedModel, *, replicas: int) -> DtypeLedger:
    export = config.checkpoint.export_dtype or source_of(model).dtype
    exported = [export] * (adapter_of(model) is None)  # an adapter's export holds nothing of the model
    kept = [
        name for dtype in (config.fsdp.param_dtype, *exported) for name in stays_in_float32(config.fsdp, model, dtype)
    ]
    return dtype_ledger(config, export=export, replicas=replicas, kept=kept)


def _check_model(
    model: PreTrainedModel, config: TrainingConfig, *, traits: Traits, device: torch.device | None
) -> None:
    """Refuse a model or config that would silently train something else than the config says.

    Each refusal says what would go wrong and what to do. Refusals that a user may accept have a name for
    ``preflight.allow``.
    """
    hf_config, name = model.config.get_text_config(), type(model).__name__
    _check_adapter(model, config, traits)
    if (engine := config.needs(config).engine) is not None:
        check_tensor_parallel(model, engine.tp)
    if "other_tokenizer" not in config.preflight.allow:
        check_same_tokens(config.model)
    _check_dropout(model, hf_config, config.preflight.allow)
    if getattr(hf_config, "output_router_logits", False) and "router_aux_loss" not in config.preflight.allow:
        key = "model.config.output_router_logits"
        what = "is true: the router's auxiliary loss of a micro-batch depends on the mesh, and is not part of the loss"
        todo = f'set {key} = false, and moe.balance = "aux" for that loss of each row; '
        todo += 'or preflight.allow = ["router_aux_loss"] to train without it'
        raise UserError(key, what, todo)
    check_balance(config.moe, model, traits)
    check_rope(model.config, seq_len=config.data.seq_len)
    check_temperature(model.config, seq_len=config.data.seq_len, cut=config.data.pack or config.mesh.cp > 1)
    check_positions(model, traits, seq_len=config.data.seq_len)
    if (whole := whole_of(model)) is not None:
        if traits.no_twin:
            what = f"the text part of {type(whole.model).__name__} cannot be tried: {traits.no_twin}"
            raise UserError("model.path", what, "use a text model")
        traits.once("whole", lambda twin: check_same_logits(whole, twin))
        if engine is not None and not engine.embedded:
            what = f"a server would be sent the text part of {type(whole.model).__name__} alone"
            raise UserError("rollout.engine", what, 'use "transformers", or a text model')
    if config.activation_checkpointing.mode == "selective":
        _check_selective(traits.twin(), config.activation_checkpointing, name=name)
    if device is not None:
        check_attention(config.model.attention, device=device)
    check_liger(config.model, model, device=device)
    if traits.causal is False:
        what = "its tokens see later tokens, so next-token prediction would learn to copy"
        raise UserError(f"model {name}", what, "use a causal language model")


def _check_packing(
    model: PreTrainedModel, config: TrainingConfig, *, traits: Traits, attention: AttentionPath | None = None
) -> None:
    """Refuse packed rows whose documents would see each other.

    Args:
        attention: None: not chosen yet, and only what no attention of ours would change is refused.
    """
    if not config.data.pack:
        return
    name, what, recurrent = type(model).__name__, None, bool(find_recurrent(model))
    unknown = unknown_kinds(model.config, recurrent=recurrent)
    if recurrent and (why := try_recurrent(model, traits)):
        what = f"{name}: {why}"
    elif traits.separates_packed is None:
        why = traits.no_twin or "a small copy of it does not run in packed rows"
        what = f"packed documents might see each other in {name}: {why}"
    elif unknown:  # a convolution's small weights might hide a leak in the trial
        what = f"packed documents would see each other through layers of kind {', '.join(sorted(unknown))}"
    elif attention is None or traits.separates_packed or attention.recurrent_layers:
        return
    # Other paths were tried with packed rows when they were chosen.
    elif attention.method is None and attention.kernel != VARLEN and not attention.masks_every_row:
        what = f"packed documents would see each other in {name} (tried on a small copy of it)"
    if what:
        raise UserError("data.pack", what, "set data.pack = false")


def _check_adapter(model: PreTrainedModel, config: TrainingConfig, traits: Traits) -> None:
    """Refuse adapters that the recipe did not build, and those that nothing would call."""
    adapter = adapter_of(model)
    if adapter is None and config.trains_adapter:
        where = "lora.rank" if config.model.adapter is None else "model.adapter"
        what = f"is given, but recipe {config.recipe!r} built the model without adapters"
        raise UserError(
            where, what, "leave it out, or write build_model(config.model, lora=config.lora) in the recipe"
        )
    if adapter is not None and adapter.config.use_dora and config.compile.enabled:
        what = "true with DoRA: torch.compile cannot trace peft's layers for it, and would leave everything uncompiled"
        raise UserError("compile.enabled", what, "set it to false, or train without lora.dora")
    if adapter is not None and adapter.experts:
        what = "with adapters on experts in one tensor"
        if config.compile.enabled:
            raise UserError("compile.enabled", f"true {what}: torch.compile cannot trace these", "set it to false")
        if config.needs(config).engine is not None:
            raise UserError(f"recipe {config.recipe!r}", f"{what}, which no engine is sent", "leave the experts out")
    if adapter is not None and (idle := sorted(traits.uncalled_modules & set(adapter.layers))):
        what = f"{idle[0]} is never called (the module around it reads its weight), so its adapter would do nothing"
        raise UserError("lora.target_modules", what, "name other layers")


def _check_selective(twin: Any, section: ActivationCheckpointingConfig, *, name: str) -> None:
    """Refuse to keep results that the model later changes in place; tried on a tiny copy, if one can be made."""
    if twin is None:
        return
    apply_activation_checkpointing(section, decoder_layers(twin), device_type="cpu")
    try:
        twin(input_ids=torch.arange(2, 14)[None], use_cache=False).logits.sum().backward()
    except RuntimeError as error:
        if "mutated" in str(error):
            what = f"{name} changes results in place that would be kept for backward"
            todo = 'set activation_checkpointing.mode = "full"'
            raise UserError("activation_checkpointing.mode 'selective'", what, todo) from None


def _check_dropout(model: PreTrainedModel, config: PretrainedConfig, allow: Collection[str]) -> None:
    if "dropout" in allow or not any(_drops(module) for module in model.modules()):
        return
    # Configs also name dropouts of heads that this model lacks: modules decide, and the config provides the names.
    keys = [
        f"model.config.{key}"
        for key, value in config.to_dict().items()
        if _is_noise(key) and isinstance(value, float) and value > 0
    ]
    keys += ["lora.dropout"] if (adapter := adapter_of(model)) and adapter.config.lora_dropout else []
    todo = 'preflight.allow = ["dropout"]'
    if not any("jitter" in key for key in keys):  # PhiMoE routes by it in evaluation, too
        todo = f"{' and '.join(f'{key} = 0.0' for key in keys)}, or {todo}"
    raise UserError(
        "model.config" if keys[:1] != ["lora.dropout"] else "lora.dropout",
        f"has dropout ({', '.join(keys)}), which draws other masks on another mesh, so results would depend on it",
        f"set {todo}",
    )


def _plan_experts(model: PreTrainedModel, config: TrainingConfig, sizes: MeshSizes) -> ExpertPlan | None:
    """How experts are dealt out, where ``ep`` asks for it; refuses what was not tried with that."""
    adapter, has_engine = adapter_of(model), config.needs(config).engine is not None
    untried = [
        ("mesh.ep with compile.enabled", config.compile.enabled, "set compile.enabled = false"),
        ("mesh.ep with adapters on experts", adapter is not None and adapter.experts, "leave the experts out"),
        ('mesh.ep with lora.quantize = "nf4"', config.lora.quantize == "nf4", "leave lora.quantize out"),
        ("mesh.ep with adapters and rollouts", adapter is not None and has_engine, "train without adapters"),
    ]
    for where, is_wanted, todo in untried:
        if sizes.ep > 1 and is_wanted:
            raise UserError(where, "is not supported", f"{todo}, or use mesh.ep = 1")
    return plan_experts(model, sizes)


def _is_noise(name: str) -> bool:
    return "drop" in name or "jitter" in name


def _drops(module: nn.Module) -> bool:
    """Whether a module drops values in training: a dropout layer, or a rate that its forward hands to a function."""
    if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)):
        return module.p > 0
    return any(_is_noise(name) and isinstance(value, float) and value > 0 for name, value in vars(module).items())
