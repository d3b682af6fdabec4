"""What a step's memory depends on, in bytes on one rank, read from a model on meta and its plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from fsdp2kit.config.checks import resolve_accumulation, shard_ranks
from fsdp2kit.config.facts import EngineNeeds
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.inspect import value_of
from fsdp2kit.optim.build import state_sizes, update_bytes
from fsdp2kit.parallel.expert_parallel.exchange import shares
from fsdp2kit.parallel.fsdp import Unit, ignored_modules, parameters_by_unit
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.planner.activations import LayerMemory, item_bytes, rank_tokens
from fsdp2kit.planner.dispatch import Dispatch, dispatches, with_load
from fsdp2kit.weights.adapters import ADAPTER

_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Keys of models' configs (Gemma 2, RecurrentGemma, xLSTM)."""


@dataclass(frozen=True)
class UnitSize:
    """One FSDP unit, each parameter's rows padded to a multiple of the ranks it is sharded over.

    Partitioned experts count on the rank with the most of them.
    """

    name: str
    shards: int
    """Ranks that it is sharded over."""
    experts: bool
    """Whether these are partitioned experts."""
    whole: int
    """Bytes of the gathered parameters; those in 4 bits stay in 4 bits."""
    trained: int
    """Elements of parameters that are trained."""
    unpadded: int
    """The same without padding: a gradient is not padded before its reduction."""
    item: int
    """Bytes of a gathered element that is not in 4 bits."""
    shard_sizes: tuple[int, ...]
    """Bytes of a rank's shard of each parameter."""
    gradient_sizes: tuple[int, ...]
    """Bytes of a rank's shard of each gradient."""
    reshard: bool | int
    gathers_in_backward: bool
    reordered: int
    """Bytes of ``whole`` in parameters that are sharded over another dimension than rows.

    A gather copies them once more, into the order of the whole parameter.
    """

    @property
    def gathered_again(self) -> bool:
        """Whether it is gathered once more for its backward."""
        return self.reshard is not False and self.gathers_in_backward

    @property
    def kept_after_forward(self) -> int:
        """Bytes of it that stay gathered between its forward and its backward."""
        if self.reshard is False:
            return self.whole
        return self.whole // self.reshard if type(self.reshard) is int else 0


def padded_elements(parameter: nn.Parameter, shards: int) -> int:
    """Elements of a parameter with its rows padded to a multiple of ``shards``, as FSDP2 stores and sends it."""
    rows = len(parameter) if parameter.ndim else 1
    return parameter.numel() // max(1, rows) * math.ceil(rows / shards) * shards


@dataclass(frozen=True)
class _Held:
    """Elements of one parameter on a rank, where it is gathered."""

    whole: int
    """With padding."""
    unpadded: int
    is_reordered: bool
    """Whether it is sharded over another dimension than rows."""


def _held(name: str, parameter: nn.Parameter, unit: Unit, plan: ParallelPlan, shards: int) -> _Held:
    """What a rank gathers of a parameter of ``unit``, which is sharded over ``shards`` ranks."""
    if unit.experts:
        own = parameter.numel() // len(parameter) * shares(len(parameter), plan.sizes.ep)[0]
        return _Held(own, own, shards > 1)
    if name in unit.by_side:
        return _Held(parameter.numel(), parameter.numel(), True)
    return _Held(padded_elements(parameter, shards), parameter.numel(), False)


def held_by_parameter(model: PreTrainedModel, plan: ParallelPlan) -> dict[nn.Parameter, int]:
    """Elements of a rank's shard of each parameter that is not sharded by rows, or over fewer ranks."""
    found = {}
    names = {parameter: name for name, parameter in model.named_parameters()}
    ranks = shard_ranks(plan.fsdp, plan.sizes)
    for unit in plan.units:
        inside = (
            model.get_submodule(unit.name).parameters() if unit.experts else map(model.get_parameter, unit.by_side)
        )
        shards = ranks // plan.sizes.ep if unit.experts else ranks
        found |= {one: _held(names[one], one, unit, plan, shards).whole // shards for one in inside}
    return found


def unit_sizes(model: PreTrainedModel, plan: ParallelPlan) -> list[UnitSize]:
    """The plan's units in its order, the root first."""
    ranks = shard_ranks(plan.fsdp, plan.sizes)
    storage = item_bytes(plan.fsdp.storage_dtype)
    units = [unit.name for unit in plan.units]
    kept = {name: unit.name for unit in plan.units for name in unit.kept}
    inside = parameters_by_unit(model, units, ignored=ignored_modules(plan.fsdp, model), kept=kept)
    names = {parameter: name for name, parameter in model.named_parameters()}
    layouts = {} if plan.nf4 is None else plan.nf4.layouts(model)
    # Bytes of parameters that are stored and gathered so.
    in_4_bits = {one: padded_elements(layout.parameter(one.device), ranks) for one, layout in layouts.items()}
    sizes = []
    for unit in plan.units:
        item = item_bytes(unit.param_dtype)
        shards = ranks // plan.sizes.ep if unit.experts else ranks
        updated = item if unit.kept else storage  # parameters that stay in float32 are stored in float32
        held = {one: _held(names[one], one, unit, plan, shards) for one in inside[unit.name]}
        trained = {parameter: size for parameter, size in held.items() if parameter.requires_grad}
        # Parameters frozen beside adapters are stored in the dtype in which they compute (`apply_fsdp`).
        stored = {p: updated if p.requires_grad or plan.adapter is None else item for p in held}
        sizes.append(
            UnitSize(
                name=unit.name,
                shards=shards,
                experts=unit.experts,
                whole=sum(in_4_bits.get(p, size.whole * item) for p, size in held.items()),
                trained=sum(size.whole for size in trained.values()),
                unpadded=sum(size.unpadded for size in trained.values()),
                item=item,
                shard_sizes=tuple(in_4_bits.get(p, size.whole * stored[p]) // shards for p, size in held.items()),
                gradient_sizes=tuple(size.whole // shards * updated for size in trained.values()),
                reshard=unit.reshard_after_forward,
                gathers_in_backward=not isinstance(model.get_submodule(unit.name), nn.Embedding),
                reordered=sum(size.whole * item for size in held.values() if size.is_reordered),
            )
        )
    return sizes


@dataclass(frozen=True)
class StepMemory:
    """What `step_moments` needs to know of a run, in bytes on one rank."""

    plan: ParallelPlan
    units: Sequence[UnitSize]
    layers: Sequence[tuple[str, LayerMemory]]
    """Decoder layers by name, in order."""
    head: str
    """Name of the module whose unit computes the loss; "" for a tied head, which is in the root's unit."""
    hidden: int
    """Elements of the hidden state."""
    vocabulary: int
    head_trained: bool
    caps_logits: bool
    """Whether logits go through a tanh, which keeps its output."""
    norm_trained: bool
    """Whether the final norm learns: it then keeps the tensor that its weight multiplies."""
    tokens: int
    """Tokens of a micro-batch on this rank; each is taken to have a target."""
    rotary: int
    """Bytes of the positions' cosines and sines, which all layers share."""
    micro_batches: int
    storage: int
    """Bytes of an element of a shard."""
    reduce: int
    """Bytes of an element of a gradient while it is reduced."""
    compute: int
    state_sizes: Sequence[int]
    """Bytes of each tensor of optimizer state."""
    update: int
    """Bytes that an update takes beside the optimizer state."""
    ignored: int
    """Bytes of parameters that every rank keeps whole."""
    log_probs: bool
    """Whether the objective is made of tokens' log-probabilities (preferences, rewards) and not a cross-entropy.

    Its backward computes the logits again.
    """
    beside: dict[str, int]
    """Bytes that stay beside the model throughout, by category: a frozen reference, an embedded engine."""
    dispatch: dict[str, Dispatch]
    """Partitioned experts, by the name of their decoder layer."""

    @functools.cached_property
    def by_name(self) -> dict[str, UnitSize]:
        return {unit.name: unit for unit in self.units}

    @property
    def hidden_states(self) -> int:
        """Bytes of a layer's input."""
        return self.tokens * self.hidden * self.compute

    @property
    def optimizer(self) -> int:
        """Bytes of optimizer state."""
        return sum(self.state_sizes)

    @property
    def shards(self) -> int:
        """Ranks that all is sharded over but partitioned experts."""
        return shard_ranks(self.plan.fsdp, self.plan.sizes)

    @property
    def replicas(self) -> int:
        """Ranks that hold the same shard."""
        return self.plan.sizes.world_size // self.shards

    @property
    def on_device(self) -> bool:
        """Whether shards and gradients are on the device."""
        return self.plan.fsdp.offload != "params" or self.plan.device_type == "cpu"

    @property
    def state_on_device(self) -> bool:
        return self.plan.fsdp.offload == "none" or self.plan.device_type == "cpu"


def step_memory(
    config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan, layers: Sequence[LayerMemory]
) -> StepMemory:
    """Read from a model on meta and its plan what a step allocates.

    Args:
        layers: memory of each decoder layer (`layers_memory`).
    """
    names = {module: name for name, module in model.named_modules()}
    tokens = rank_tokens(config, plan)
    blocks = decoder_layers(model)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    compute = item_bytes(plan.fsdp.param_dtype)
    storage = item_bytes(plan.fsdp.storage_dtype)
    text = model.config.get_text_config()
    width = value_of(text, "head_dim") or text.hidden_size // (value_of(text, "num_attention_heads") or 1)
    units = unit_sizes(model, plan)
    shards = shard_ranks(plan.fsdp, plan.sizes)
    ignored = plan.ignored_parameters * compute
    needs = config.needs(config)
    beside = dict(needs.beside)
    if needs.reference and not (config.trains_adapter and config.model.adapter is None):  # stored as it computes
        offloaded = plan.fsdp.offload == "params" and plan.device_type != "cpu"
        beside["reference"] = ignored + (0 if offloaded else sum(unit.whole // unit.shards for unit in units))
    if needs.engine is not None and not needs.engine.sleeps:
        beside["engine"] = engine_bytes(needs.engine, model)
    elsewhere = {parameter for module in (*blocks, embedding, head) for parameter in module.parameters()}
    return StepMemory(
        plan=plan,
        units=units,
        layers=list(zip((names[layer] for layer in blocks), layers, strict=True)),
        head="" if head.weight is embedding.weight else names[head],
        hidden=head.weight.shape[1],
        vocabulary=head.weight.shape[0],
        head_trained=head.weight.requires_grad,
        caps_logits=any(value_of(text, key) for key in _SOFT_CAPS),
        norm_trained=any(parameter.requires_grad for parameter in model.parameters() if parameter not in elsewhere),
        tokens=tokens,
        rotary=2 * tokens * width * compute,
        micro_batches=resolve_accumulation(
            config.train.global_batch_size, config.train.micro_batch_size, dp=plan.sizes.dp
        ),
        storage=storage,
        reduce=item_bytes(plan.fsdp.reduce_dtype),
        compute=compute,
        state_sizes=state_sizes(
            config.optimizer, model, shards=shards, item_bytes=storage, held=held_by_parameter(model, plan)
        ),
        update=update_bytes(config.optimizer, model, shards=shards),
        ignored=ignored,
        log_probs=needs.log_probs,
        beside=beside,
        dispatch=dispatches(model, plan, tokens=tokens),
    )


def under_load(step: StepMemory, load: float = 1) -> StepMemory:
    """``step`` with what exchanges of experts' tokens hold, where this rank's experts receive ``load`` times as many.

    Args:
        step: with its layers as they were counted.
    """
    layers = [
        (name, with_load(layer, step.dispatch[name], load) if name in step.dispatch else layer)
        for name, layer in step.layers
    ]
    return replace(step, layers=layers)


def engine_bytes(engine: EngineNeeds, model: PreTrainedModel) -> int:
    """Bytes of an embedded engine's weights on a rank; 0 of a server, whose memory is its own."""
    if not engine.embedded:
        return 0
    elements = sum(p.numel() for name, p in model.named_parameters() if f".{ADAPTER}." not in name)
    return elements * item_bytes(engine.dtype) // engine.tp


def pinned(sizes: Iterable[int]) -> int:
    """Bytes of host memory that pinned tensors of these sizes take: torch rounds each up to a power of two."""
    return sum(1 << (size - 1).bit_length() for size in sizes if size)


def at_rest(step: StepMemory, *, gradients: bool = False, state: bool = True) -> dict[str, int]:
    """What is on the device between two steps, or with ``gradients`` while the optimizer runs."""
    shards = sum(sum(unit.shard_sizes) for unit in step.units) if step.on_device else 0
    found = {"parameters": shards + step.ignored, **step.beside}
    if state and step.state_on_device:
        found["optimizer"] = step.optimizer
    if gradients and step.on_device:
        found["gradients"] = sum(sum(unit.gradient_sizes) for unit in step.units)
    return found
