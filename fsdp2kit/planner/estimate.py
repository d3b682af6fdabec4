"""Everything the planner says of a run: `estimate` combines the formulae for a config, a mesh and a device."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from fsdp2kit.config.checks import MeshSizes, check_config
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import World
from fsdp2kit.job.layout import Layout, node_names
from fsdp2kit.model.build import build_model
from fsdp2kit.model.inspect import Traits, inspect_model
from fsdp2kit.optim.build import state_sizes
from fsdp2kit.parallel.plan import ParallelPlan, plan_parallel
from fsdp2kit.planner.activations import LayerMemory, item_bytes, layers_memory, rank_tokens
from fsdp2kit.planner.communication import PlannedCollective, collectives
from fsdp2kit.planner.crossing import price_crossings
from fsdp2kit.planner.devices import ALLOWANCE, GIB, Device, this_device
from fsdp2kit.planner.dispatch import IMBALANCE, keeps_received
from fsdp2kit.planner.memory import Moment, reserved, step_moments
from fsdp2kit.planner.rollouts import rollout_moments
from fsdp2kit.planner.sizes import StepMemory, at_rest, engine_bytes, pinned, step_memory, under_load
from fsdp2kit.planner.speed import PeakShare, Speed, estimate_speed, own_share, published_share, why_untimed

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReductionPrice:
    """How often gradients are reduced, and what the other value of ``fsdp.reduce_every_micro_batch`` would cost."""

    every_micro_batch: bool
    micro_batches: int
    other_peak: int
    """Bytes that the other value adds to a step's peak; negative: it saves them."""
    other_sent: int
    """Bytes that a rank sends more in a step."""

    def __str__(self) -> str:
        now = f"after each of {self.micro_batches} micro-batches" if self.every_micro_batch else "once a step"
        value = str(not self.every_micro_batch).lower()
        peak, sent = (
            f"{abs(size) / GIB:.1f} GiB {'more' if size > 0 else 'less'}"
            for size in (self.other_peak, self.other_sent)
        )
        key = f"fsdp.reduce_every_micro_batch = {value}"
        return f"gradients are reduced {now}; {key} takes {peak} at a step's peak and sends {sent}"


@dataclass(frozen=True)
class DispatchLoad:
    """What partitioned experts receive, and what an uneven routing costs."""

    ep: int
    rows: int
    """Vectors that the rank with the most experts receives in a layer and micro-batch, where routing is even."""
    kept: int
    """Bytes of these and of their projections in all layers that keep them for backward, or else in one."""
    exchanged: int
    """Bytes that a layer's operator holds beside them at most."""
    load: float
    more: int
    """Bytes that the peak grows by, where this rank's experts of all layers receive ``load`` times as much."""

    def __str__(self) -> str:
        return (
            f"experts over ep {self.ep}: {self.rows:,} vectors a layer and micro-batch if routing is even, "
            f"{self.kept / GIB:.2f} GiB kept and {self.exchanged / GIB:.2f} in exchanges; "
            f"at {self.load:g} times that load the peak is {self.more / GIB:.2f} GiB higher"
        )


@dataclass(frozen=True)
class Estimate:
    """What a run needs; bytes are those of the rank with the most."""

    config: TrainingConfig
    sizes: MeshSizes
    device: Device | None
    moments: tuple[Moment, ...]
    """Those of a step in order, and "load", "save", "export"; with rewards also "sync" and "generate"."""
    host: dict[str, int]
    """Bytes of a rank's host memory by purpose, without the process itself."""
    disk: dict[str, int]
    """Bytes of one checkpoint, of all that are kept at once, and of the export."""
    collectives: tuple[PlannedCollective, ...]
    reduction: ReductionPrice | None
    """None if it was not asked for, if there is one micro-batch, or if nothing is sharded."""
    dispatch: DispatchLoad | None
    """None: no experts are partitioned."""
    speed: Speed | None
    untimed: str | None
    """Why there is no speed."""
    activations_from: str
    """ "formula", or "counted on one layer of each kind", with what the count leaves out."""
    layout: Layout
    attention: str
    """A line: the context-parallel method, the attention kernel, and why."""
    crossings: tuple[str, ...]
    """A line for cp and for shards, where they cross nodes; with a price if that was asked for."""

    @property
    def peak(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)

    @property
    def needed(self) -> int:
        """Bytes that the device must have: the peak, and the allowance."""
        return self.peak.total + ALLOWANCE

    @property
    def reserved(self) -> int:
        """Bytes that the allocator reserves, without the allowance."""
        return reserved(self.moments)

    @property
    def fits(self) -> bool | None:
        """Whether it fits into the device; None without a device."""
        return None if self.device is None else self.needed <= self.device.memory

    @property
    def parts(self) -> dict[str, int]:
        """`needed` by category, the largest first."""
        found = {**self.peak.bytes, "allowance": ALLOWANCE}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    @property
    def blame(self) -> str:
        """The category that takes most of what is needed."""
        return next(iter(self.parts))

    @property
    def peaks(self) -> dict[str, Moment]:
        """The largest moment of each phase, in order."""
        phases: dict[str, list[Moment]] = {}
        for moment in self.moments:
            phases.setdefault(moment.phase, []).append(moment)
        return {phase: max(moments, key=lambda moment: moment.total) for phase, moments in phases.items()}

    def line(self) -> str:
        """The plan in a line, for the start of a run."""
        parts = sorted(((size, name) for name, size in self.peak.bytes.items() if size), reverse=True)[:3]
        largest = ", ".join(f"{name} {size / GIB:.1f}" for size, name in parts)
        text = f"memory: {self.peak.total / GIB:.1f} GiB at the peak ({self.peak.where}: {largest})"
        if self.device is None:
            return text
        return f"{text}, {self.needed / GIB:.1f} with the allowance, of {self.device.memory / GIB:.1f}"

    def warning(self) -> str | None:
        """What to print before anything is loaded, if it cannot fit."""
        if self.fits is not False or self.device is None:
            return None
        return (
            f"this will probably not fit: {self.needed / GIB:.1f} GiB are needed of "
            f"{self.device.memory / GIB:.1f}, the largest part {self.blame} "
            f"({self.parts[self.blame] / GIB:.1f} GiB); fsdp2kit plan … --fit says what to change"
        )


Known = dict[str, tuple[PreTrainedModel, Traits]]
"""Models that were built and inspected, by their sections as JSON."""


def plan_for(
    config: TrainingConfig, *, world_size: int, local_world_size: int, known: Known | None = None
) -> tuple[PreTrainedModel, ParallelPlan]:
    """The model on meta and its plan, without network or weights.

    Args:
        known: models that are not built again; new ones are added.

    Raises:
        UserError: `check_config`, `build_model` or `plan_parallel` refuses the config, or its recipe is not planned.
    """
    sizes = check_config(config, world_size=world_size, local_world_size=local_world_size)
    for key in config.models():
        what = f"the memory of {key}, a model beside the trained one, is not planned"
        raise UserError("recipe", what, 'plan recipe = "sft", and add that model\'s weights ÷ ranks')
    known = {} if known is None else known
    key = f"{config.model.model_dump_json()} {config.lora.model_dump_json()}"
    if key not in known:
        built = build_model(config.model, lora=config.lora, local_files_only=True)
        known[key] = built, inspect_model(built)
    model, traits = known[key]
    return model, plan_parallel(model, config, sizes, "cuda", traits=traits)


def estimate(
    config: TrainingConfig,
    model: PreTrainedModel,
    plan: ParallelPlan,
    *,
    device: Device | None = None,
    local_world_size: int = 8,
    hosts: Sequence[str] = (),
    share: PeakShare | None = None,
    mfu: float | None = None,
    prices_reduction: bool = False,
    prices_crossings: bool = False,
) -> Estimate:
    """What a run of ``config`` needs.

    Args:
        model: on meta, before it is made parallel.
        hosts: the node of each rank; by default a node has ``local_world_size`` of them.
        share: the share of the device's peak that is reached; by default that of published runs.
        mfu: a step's measured MFU, instead of ``share``.
        prices_reduction: also plan a step with the other value of ``fsdp.reduce_every_micro_batch``.
        prices_crossings: also say what it costs that groups cross nodes.

    Raises:
        UserError: ``mfu`` would take more than the device's peak, or the model's layers take too long to count.
    """
    layers, activations_from = _layers(config, model, plan)
    counted = step_memory(config, model, plan, layers)
    step = under_load(counted)
    layout = Layout(plan.sizes, plan.fsdp, tuple(hosts) or node_names(plan.sizes.world_size, local_world_size))
    sent = () if step.log_probs else tuple(collectives(config, model, step, layout=layout))
    prices = price_crossings(config, model, step, sent, layout=layout, device=device) if prices_crossings else {}
    untimed = why_untimed(config, step, device)
    speed = None
    if device is not None and untimed is None:
        if mfu is not None:
            share = own_share(config, step, sent, device, mfu=mfu)
        speed = estimate_speed(config, step, sent, device, share or published_share(config, model, device))
    engine = config.engine_needs
    cycle = [] if engine is None else rollout_moments(engine, config, model, step)
    load = Moment("load", "weights", at_rest(step, state=False))
    saves = (("save", "checkpoint"), ("export", "from the checkpoint's files"))
    moments = (load, *step_moments(step), *cycle, *(Moment(*names, at_rest(step)) for names in saves))
    return Estimate(
        config=config,
        sizes=plan.sizes,
        device=device,
        moments=moments,
        host=_host(config, model, step),
        disk=_disk(config, model, step),
        collectives=sent,
        reduction=_reduction(config, model, step, layout=layout) if prices_reduction else None,
        dispatch=_dispatch_load(counted, peak=max(moment.total for moment in moments)),
        speed=speed,
        untimed=untimed,
        activations_from=activations_from,
        layout=layout,
        attention=str(plan.attention),
        crossings=tuple(layout.warnings(prices)),
    )


def _layers(config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan) -> tuple[list[LayerMemory], str]:
    """Each decoder layer's memory, and where it is from, as in `Estimate.activations_from`."""
    known = layers_memory(model, plan, tokens=rank_tokens(config, plan))
    if None not in known:
        return [layer for layer in known if layer is not None], "formula"
    from fsdp2kit.planner.count import count_layers  # only then: it builds what it counts

    counted = count_layers(config, model, plan)
    layers = [layer or other for layer, other in zip(known, counted, strict=True)]
    source = "counted on one layer of each kind"
    if plan.attention.recurrent_layers:
        source += ", as if each row were one document and scans had no kernel"
    return layers, source


def _dispatch_load(step: StepMemory, *, peak: int) -> DispatchLoad | None:
    """What an uneven routing adds to ``peak``.

    Args:
        step: with its layers as they were counted.
    """
    if not step.dispatch:
        return None
    layers = [(layer, step.dispatch[name]) for name, layer in step.layers if name in step.dispatch]
    kept = [dispatch.kept() for layer, dispatch in layers if keeps_received(layer, dispatch)]
    loaded = max(moment.total for moment in step_moments(under_load(step, IMBALANCE)))
    most = max((dispatch for _, dispatch in layers), key=lambda one: one.rows())
    return DispatchLoad(
        ep=step.plan.sizes.ep,
        rows=most.rows(),
        kept=sum(kept) or most.kept(),
        exchanged=max(most.forward(), most.backward()),
        load=IMBALANCE,
        more=max(0, loaded - peak),
    )


def _reduction(
    config: TrainingConfig, model: PreTrainedModel, step: StepMemory, *, layout: Layout
) -> ReductionPrice | None:
    if step.micro_batches == 1 or step.shards == 1:
        return None
    each = step.plan.fsdp.accumulates_shards
    section = step.plan.fsdp.model_copy(update={"reduce_every_micro_batch": not each})
    other = replace(step, plan=replace(step.plan, fsdp=section))
    peaks = []
    sent = []
    for one in (step, other):
        peaks.append(max(moment.total for moment in step_moments(one)))
        sent.append(sum(each.sent for each in collectives(config, model, one, layout=layout)))
    return ReductionPrice(each, step.micro_batches, peaks[1] - peaks[0], sent[1] - sent[0])


@dataclass(frozen=True)
class MemoryPlan:
    """What a run prints of its plan: a line at the start, and at the end the plan beside what was measured."""

    estimate: Estimate | None
    crossings: tuple[str, ...] = ()
    """A line for cp and for shards, where they cross nodes."""

    def describe(self) -> list[str]:
        """Lines for the start of a run."""
        return [*([] if self.estimate is None else [self.estimate.line()]), *self.crossings]

    def planned(self) -> dict[str, float]:
        """GiB at each phase's peak and at the highest, by the keys of ``metrics.jsonl``; {} if nothing is planned."""
        if self.estimate is None:
            return {}
        phases = {f"memory_gib/{phase}": peak.total / GIB for phase, peak in self.estimate.peaks.items()}
        return {"memory_gib": self.estimate.peak.total / GIB, **phases}

    def compare(self, measured: Mapping[str, int], *, device_type: str) -> list[str]:
        """Lines for the end of a run.

        Args:
            measured: peak of each phase in bytes (`PhaseMemory.phases`).
        """
        if self.estimate is None or not measured:
            return []
        peaks = self.estimate.peaks
        pairs = [
            f"{phase} {peaks[phase].total / GIB:.2f} / {size / GIB:.2f}"
            for phase, size in measured.items()
            if phase in peaks
        ]
        of = "" if device_type == "cuda" else " (of the whole process, with Python and its libraries)"
        return [f"memory, GiB planned / measured{of}: {', '.join(pairs)}"]


def plan_memory(config: TrainingConfig, model: PreTrainedModel, plan: ParallelPlan, *, world: World) -> MemoryPlan:
    """Estimate a device's memory, in bytes by phase; rank 0 warns, before anything is loaded, of what cannot fit."""
    if not world.is_main:
        return MemoryPlan(None)
    hosts = world.hosts or node_names(world.size, world.local_size)
    unpriced = MemoryPlan(None, tuple(Layout(plan.sizes, plan.fsdp, hosts).warnings()))
    if config.models():  # whose memory is not planned
        return unpriced
    try:
        device = this_device(world.device)
        found = estimate(config, model, plan, device=device, hosts=hosts, prices_crossings=True)
    except Exception:  # the layers of some architectures cannot be counted; the run does not depend on the plan
        logger.debug("memory is not planned", exc_info=True)
        return unpriced
    if warning := found.warning():
        logger.warning("%s", warning)
    return MemoryPlan(found, found.crossings)


def _host(config: TrainingConfig, model: PreTrainedModel, step: StepMemory) -> dict[str, int]:
    """Bytes of host memory of one rank, beside Python and torch themselves."""
    shards = [size for unit in step.units for size in unit.shard_sizes]
    gradients = [size for unit in step.units for size in unit.gradient_sizes]
    rows = config.train.global_batch_size // step.plan.sizes.dp * config.data.seq_len
    found = {
        # Ids, labels and positions in int64, for the batch in use and those made ahead.
        "batches": (config.data.prefetch + 1) * rows * 3 * 8,
        "reading weights": 16 * 2**20,  # in blocks, straight into the shards
    }
    if not step.on_device:
        found["offloaded parameters and gradients"] = pinned([*shards, *gradients])
    if not step.state_on_device:  # pinned if the optimizer alone is offloaded
        found["offloaded optimizer state"] = pinned(step.state_sizes) if step.on_device else step.optimizer
    if config.checkpoint.async_save:
        # A checkpoint of adapters has no frozen weights.
        weights = shards if step.plan.adapter is None else gradients
        found["staging of an asynchronous save"] = step.optimizer + sum(weights)
    if (engine := config.engine_needs) is not None and engine.sleeps:  # pinned, and kept for the next time
        state = step.state_sizes if step.state_on_device else ()
        found["asleep"] = pinned([*shards, *state]) + sum(step.beside.values()) + engine_bytes(engine, model)
    if offloaded := pinned(layer.kept_on_host for _, layer in step.layers):
        found["offloaded activations"] = offloaded
    return found


def _disk(config: TrainingConfig, model: PreTrainedModel, step: StepMemory) -> dict[str, int]:
    plan = step.plan
    section = config.checkpoint
    weights = plan.parameters - (0 if plan.adapter is None else plan.frozen_parameters)
    # With one rank's sizes: the padding of shards is not written.
    state = sum(state_sizes(config.optimizer, model, shards=1, item_bytes=step.storage))
    one = weights * step.storage + state
    most = section.most_at_once(config.train.steps, keeps_best=config.eval.keeps_best)
    return {
        "checkpoint": one,
        "checkpoints kept, and one being written": one * most,
        "export": 0 if section.export_hf == "never" else weights * item_bytes(plan.ledger.export),
    }
