"""What a step's memory depends on, in bytes on one rank, read from a model on meta and its plan."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from fsdp2kit.config.checks import resolve_accumulation, shard_ranks
from fsdp2kit.config.facts import Engine
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.names import ADAPTER
from fsdp2kit.model.nf4 import NF4Linear
from fsdp2kit.optim.build import state_sizes, update_bytes
from fsdp2kit.parallel.fsdp import ignored_modules, parameters_by_unit
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.planner.activations import LayerMemory, item_bytes, rank_tokens

_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Keys of models' configs (Gemma 2, RecurrentGemma, xLSTM)."""


@dataclass(frozen=True)
class UnitSize:
    """One FSDP unit, each parameter's rows padded to a multiple of the ranks it is sharded over."""

    name: str
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


def unit_sizes(model: PreTrainedModel, plan: ParallelPlan) -> list[UnitSize]:
    """The plan's units in its order, the root first."""
    shards, storage = shard_ranks(plan.fsdp, plan.sizes), item_bytes(plan.fsdp.storage_dtype)
    names, kept = [unit.name for unit in plan.units], {name: unit.name for unit in plan.units for name in unit.kept}
    inside = parameters_by_unit(model, names, ignored=ignored_modules(plan.fsdp, model), kept=kept)
    in_4_bits = {}  # bytes of parameters that are stored and gathered so
    for layer in map(model.get_submodule, plan.nf4.names if plan.nf4 is not None else ()):
        assert isinstance(layer, nn.Linear), "those are the layers that `plan_nf4` chooses"
        in_4_bits[layer.weight] = padded_elements(NF4Linear(layer, layer.weight.dtype).nf4, shards)
    sizes = []
    for unit in plan.units:
        item = item_bytes(unit.param_dtype)
        updated = item if unit.kept else storage  # parameters that stay in float32 are stored in float32
        padded = {parameter: padded_elements(parameter, shards) for parameter in inside[unit.name]}
        trained = [parameter for parameter in padded if parameter.requires_grad]
        # Parameters frozen beside adapters are stored in the dtype in which they compute (`apply_fsdp`).
        stored = {p: updated if p.requires_grad or plan.adapter is None else item for p in padded}
        sizes.append(
            UnitSize(
                name=unit.name,
                whole=sum(in_4_bits.get(p, size * item) for p, size in padded.items()),
                trained=sum(padded[parameter] for parameter in trained),
                unpadded=sum(parameter.numel() for parameter in trained),
                item=item,
                shard_sizes=tuple(in_4_bits.get(p, size * stored[p]) // shards for p, size in padded.items()),
                gradient_sizes=tuple(padded[parameter] // shards * updated for parameter in trained),
                reshard=unit.reshard_after_forward,
                gathers_in_backward=not isinstance(model.get_submodule(unit.name), nn.Embedding),
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
    blocks, head, embedding = decoder_layers(model), model.get_output_embeddings(), model.get_input_embeddings()
    compute, storage = item_bytes(plan.fsdp.param_dtype), item_bytes(plan.fsdp.storage_dtype)
    text = model.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // (getattr(text, "num_attention_heads", 0) or 1)
    units, shards = unit_sizes(model, plan), shard_ranks(plan.fsdp, plan.sizes)
    ignored = plan.ignored_parameters * compute
    needs = config.needs(config)
    beside = dict(needs.beside)
    if needs.reference and not (config.trains_adapter and config.model.adapter is None):  # stored as it computes
        offloaded = plan.fsdp.offload == "params" and plan.device_type != "cpu"
        beside["reference"] = ignored + (0 if offloaded else sum(unit.whole for unit in units) // shards)
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
        caps_logits=any(getattr(text, key, None) for key in _SOFT_CAPS),
        norm_trained=any(parameter.requires_grad for parameter in model.parameters() if parameter not in elsewhere),
        tokens=tokens,
        rotary=2 * tokens * width * compute,
        micro_batches=resolve_accumulation(
            config.train.global_batch_size, config.train.micro_batch_size, dp=plan.sizes.dp
        ),
        storage=storage,
        reduce=item_bytes(plan.fsdp.reduce_dtype),
        compute=compute,
        state_sizes=state_sizes(config.optimizer, model, shards=shards, item_bytes=storage),
        update=update_bytes(config.optimizer, model, shards=shards),
        ignored=ignored,
        log_probs=needs.log_probs,
        beside=beside,
    )


def engine_bytes(engine: Engine, model: PreTrainedModel) -> int:
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
