"""Memory of a rank through one step: moment by moment, in bytes by category.

FSDP2's allocations follow from the units, the ranks that they are sharded over, and the prefetch depths. They stand
here in the order in which FSDP2 makes them; the peak is the largest sum. docs/dev/memory.md derives every term.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fsdp2kit.optim.host_state import ELEMENTS_AT_ONCE
from fsdp2kit.parallel.fsdp import reshards_after_forward
from fsdp2kit.planner.activations import LayerMemory, norm_backward
from fsdp2kit.planner.loss import chunk_of_logits, head_activations, loss_saved, slope_bytes
from fsdp2kit.planner.sizes import StepMemory, UnitSize, at_rest

CATEGORIES = (
    "parameters",
    "optimizer",
    "reference",
    "engine",
    "KV cache",
    "weight buckets",
    "gradients",
    "unsharded parameters",
    "all-gather buffers",
    "unsharded gradients",
    "reduction buffers",
    "activations",
    "loss",
    "attention and exchange",
)
"""In the order in which they are shown. "activations" are those kept or recomputed, and their gradients."""

ON_OTHER_STREAMS = ("all-gather buffers", "gradients")
"""Categories that FSDP2 allocates on streams of its own: what gathers and reductions write to."""


@dataclass(frozen=True)
class Moment:
    """What is allocated at one moment of a step."""

    phase: str
    """ "forward", "backward", "optimizer", …"""
    where: str
    """The module, and what it is doing."""
    bytes: dict[str, int]
    """By category; 0 where a category is missing."""

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


def step_moments(step: StepMemory) -> list[Moment]:
    """The moments at which memory may be highest: in the last micro-batch, and in the optimizer's step.

    It is not the first step: optimizer state is there. The last micro-batch has the most: also the gradients of the
    others.
    """
    return [*_forward(step), *_backward(step), _optimizer(step)]


def reserved(moments: Iterable[Moment]) -> int:
    """Bytes that torch's allocator reserves in the end (`max_memory_reserved`); nvidia-smi adds the context to them.

    Memory freed on one stream cannot be used by another, so the streams' peaks add up. Fragments inside a stream's
    memory are not counted. Before it runs out of memory the allocator gives back what it does not use, so a run may
    fit although it would reserve more than the device has.
    """
    moments = list(moments)
    others = {name: max(moment.bytes.get(name, 0) for moment in moments) for name in ON_OTHER_STREAMS}
    default = max(moment.total - sum(moment.bytes.get(name, 0) for name in others) for moment in moments)
    return default + sum(others.values())


def _base(step: StepMemory) -> dict[str, int]:
    """What is there throughout the last micro-batch, without its own gradients."""
    if step.micro_batches == 1:
        return at_rest(step)
    if not step.plan.fsdp.accumulates_shards:
        return {**at_rest(step), "unsharded gradients": sum(unit.unpadded for unit in step.units) * step.reduce}
    base = at_rest(step, gradients=step.replicas == 1)
    if step.replicas > 1:
        base["gradients"] = sum(_before_replicas(step, unit) for unit in step.units)
    # The last reduction's buffer lives until the first reduction of this micro-batch.
    last = _reduced_last(step)
    is_first = step.micro_batches == 2 and (step.reduce == step.storage or step.replicas > 1)
    base["reduction buffers"] = 0 if is_first and _shares_buffer(step, last) else last.trained * step.reduce
    return base


def _shares_buffer(step: StepMemory, unit: UnitSize) -> bool:
    """Whether a unit's reduction copies gradients into the buffer in which they stay (`SharedBuffer`)."""
    return unit.shards == 1 and step.on_device


def _kept_buffer(step: StepMemory, unit: UnitSize, *, sums_up: bool) -> int:
    """Bytes of the reduction's buffer that are kept until the next reduction, beside the gradients."""
    is_gradient = _shares_buffer(step, unit) and step.reduce == step.storage and not sums_up
    return 0 if is_gradient else unit.trained * step.reduce


def _reduced_last(step: StepMemory) -> UnitSize:
    """The unit whose gradients are reduced last in a backward.

    It is the first trained unit in the order of forward; if the root has a trained embedding, it is the root. Units
    whose inputs have no gradient are reduced when backward is over, the root first.
    """
    units = [step.by_name[name] for name, _ in _stops(step) if name in step.by_name]
    trained = [unit for unit in units if unit.trained]
    return step.by_name[""] if not trained or (not step.head and step.head_trained) else trained[0]


def _before_replicas(step: StepMemory, unit: UnitSize) -> int:
    """Bytes of a unit's gradient shards, which add up until the last micro-batch, when replicas are reduced.

    They are on the device, whatever is offloaded.
    """
    adds_up = step.micro_batches > 1 and step.replicas > 1 and step.plan.fsdp.accumulates_shards
    return unit.trained // unit.shards * step.reduce if adds_up else 0


def _stops(step: StepMemory) -> list[tuple[str, LayerMemory | None]]:
    """The modules of a forward pass, in order, with the memory of those that are decoder layers.

    Units beside the layers (an embedding, a frozen final norm) come before or after them, as declared.
    """
    layers = [name for name, _ in step.layers]
    others = [
        unit.name
        for unit in step.units
        if unit.name not in ("", step.head)
        and not any(f"{unit.name}.".startswith(f"{name}.") or name.startswith(f"{unit.name}.") for name in layers)
    ]
    order = [unit.name for unit in step.units]
    last = max((number for number, name in enumerate(order) if name in layers), default=len(order))
    before, after = ([(name, None) for name in others if (order.index(name) > last) is late] for late in (False, True))
    return [*before, *step.layers, *after, (step.head, None)]


def _experts_of(step: StepMemory, name: str) -> UnitSize | None:
    """The unit of a layer's partitioned experts, which is gathered when most of the layer has run."""
    return next((unit for unit in step.units if unit.experts and unit.name.startswith(f"{name}.") and name), None)


def _gathered(step: StepMemory, name: str) -> tuple[int, int]:
    """Bytes of the units that are whole while the module ``name`` runs, and of the largest that is gathered then.

    Without partitioned experts.
    """
    around = [unit for unit in step.units if unit.name == "" or f"{name}.".startswith(f"{unit.name}.")]
    inside = [unit for unit in step.units if unit.name.startswith(f"{name}.") and name and not unit.experts]
    largest = max((unit.whole for unit in inside), default=0)
    kept = 0 if not inside or inside[0].reshard else sum(unit.whole for unit in inside)
    held = sum(unit.whole for unit in around) + (kept or largest)
    own = step.by_name.get(name) if name else None  # a tied head is in the root, which was gathered before
    return held, max(largest, own.whole if own is not None else 0)


def _forward(step: StepMemory) -> Iterator[Moment]:
    base = _base(step)
    # Under ZeRO-2 all units stay whole from the first micro-batch on.
    stays = reshards_after_forward(step.plan.fsdp) is False and step.micro_batches > 1
    whole = sum(unit.whole for unit in step.units)
    stops = _stops(step)
    kept = step.rotary
    seen = 0
    last = step.by_name[""].whole
    for number, (name, layer) in enumerate(stops):
        held, own = _gathered(step, name)
        unit = step.by_name.get(name)
        before = last
        last = own or last
        ahead = stops[number + 1 : number + 1 + step.plan.fsdp.forward_prefetch]
        # A gather's flat buffer is kept until the next gather's parameters are copied out of theirs.
        buffers = last + sum(_gathered(step, next_name)[1] for next_name, _ in ahead)
        now = {**base, "unsharded parameters": whole if stays else held + seen}
        now["all-gather buffers"] = buffers if step.shards > 1 and not stays else 0
        is_last = number == len(stops) - 1
        if own and not stays:
            there = {**now, "activations": kept + (head_activations(step) if is_last else step.hidden_states)}
            if step.shards > 1 and before and not ahead:
                # Its parameters are copied out of its buffer; then the buffer of the gather before is freed.
                copied = {"all-gather buffers": before + own, "unsharded parameters": held + seen + _reordered(unit)}
                yield Moment("forward", f"{name} (gather)", {**there, **copied})
            if step.shards == 1 and unit is not None and unit.item != step.storage:
                # One parameter after the other is cast, and the result is copied.
                largest = max(unit.shard_sizes, default=0) // step.storage * unit.item
                yield Moment("forward", f"{name} (cast)", {**there, "unsharded parameters": held + seen + largest})
        experts = _experts_of(step, name)
        if layer is not None and experts is not None and not stays:
            yield _experts_forward(step, name, layer, now, kept, experts)
            last = experts.whole if experts.shards > 1 else 0
            now["unsharded parameters"] += experts.whole
            now["all-gather buffers"] += last - own
        if layer is not None:
            kept += layer.kept
            now |= {"activations": kept + layer.forward, "attention and exchange": layer.attention_forward}
            yield Moment("forward", name, now)
        elif is_last:
            yield from _loss_forward(step, now, kept)
        if name and unit is not None:
            seen += unit.kept_after_forward + (experts.kept_after_forward if experts is not None else 0)


def _reordered(unit: UnitSize | None) -> int:
    return 0 if unit is None else unit.reordered


def _experts_forward(
    step: StepMemory, name: str, layer: LayerMemory, now: dict[str, int], kept: int, experts: UnitSize
) -> Moment:
    """A layer's experts are gathered. All before them has run, and its part of the layer's activations is there.

    Args:
        now: while the layer runs, without its experts.
        kept: bytes of activations of the layers before.
    """
    before = layer.kept + (layer.forward if layer.recomputed else 0) - step.dispatch[name].kept()
    return Moment(
        "forward",
        f"{experts.name} (gather)",
        {
            **now,
            "unsharded parameters": now["unsharded parameters"] + experts.whole + experts.reordered,
            "all-gather buffers": now["all-gather buffers"] + (experts.whole if experts.shards > 1 else 0),
            "activations": kept + max(step.hidden_states, before),
        },
    )


def _loss_forward(step: StepMemory, now: dict[str, int], kept: int) -> Iterator[Moment]:
    hidden, weight = loss_saved(step)
    loss = max(slope_bytes(step, weight))
    if step.log_probs:  # logits, their log-softmax, and p log p of the entropy; no gradients yet
        rows, logits, _ = chunk_of_logits(step)
        loss = 3 * logits + (rows * step.vocabulary * step.compute if step.plan.own_head else 0)
    end = kept + head_activations(step) + hidden
    selected = end + step.hidden_states
    yield Moment("forward", "loss", {**now, "activations": selected, "loss": loss})
    yield Moment("forward", "end", {**now, "activations": selected if step.log_probs else end, "loss": weight})


def _backward(step: StepMemory) -> Iterator[Moment]:
    base = _base(step)
    accumulated = base.pop("unsharded gradients", 0)
    gradients = base.pop("gradients", 0)
    sums_up = gradients > 0 and step.replicas == 1  # into shards of gradients that are there already
    stops = _stops(step)[::-1]
    kept = step.rotary + sum(layer.kept for _, layer in step.layers)
    waiting = 0
    reduced = base.pop("reduction buffers", 0)
    # Where nothing is cast, autograd adds to the gradients of earlier micro-batches in place.
    adds_in_place = accumulated > 0 and step.reduce == step.compute
    for number, ((name, layer), gathered) in enumerate(zip(stops, _gathered_in_backward(step, stops), strict=True)):
        unit = step.by_name.get(name)
        now = {**base, "gradients": gradients, "unsharded gradients": accumulated, "loss": waiting}
        now |= {"reduction buffers": reduced, **gathered}  # a buffer is kept until the next unit's reduction
        new = 0 if adds_in_place else _own_gradients(step, name)
        rest = kept
        if number == 0:
            rest += head_activations(step)
            waiting, moments = _loss_backward(step, now, rest)
            yield from moments
        if number == 1:
            yield _final_norm_backward(step, now, kept, name if layer is not None else None)
        experts = _experts_of(step, name)
        if layer is not None and experts is not None:
            yield from _experts_backward(step, name, layer, now, kept, experts, sums_up=sums_up)
            if experts.trained:
                reduced = now["reduction buffers"] = _kept_buffer(step, experts, sums_up=sums_up)
                accumulated -= experts.unpadded * step.reduce if accumulated else 0
                now["unsharded gradients"] = accumulated
                gradients += 0 if sums_up or not step.on_device else experts.trained // experts.shards * step.storage
                gradients -= _before_replicas(step, experts)
                now["gradients"] = gradients
                new = 0 if adds_in_place else new - experts.unpadded * experts.item
        if layer is not None:
            yield from _layer_backward(step, name, layer, now, kept, new)
            kept -= layer.kept
            rest = kept
        if unit is None or not name or not unit.trained:
            continue
        now |= {
            "activations": rest + step.hidden_states,
            "unsharded gradients": accumulated or new or _own_gradients(step, name),
        }
        if layer is None and number:
            yield Moment("backward", name, dict(now))
        now["unsharded parameters"] -= unit.whole
        # A layer's gradients are freed before its reduction; those of head and embedding are still held then.
        freed = layer is not None or (accumulated > 0 and step.shards == 1)
        yield from _reduction(step, now, unit, sums_up=sums_up, freed=freed)
        reduced = _kept_buffer(step, unit, sums_up=sums_up)
        accumulated -= unit.unpadded * step.reduce if accumulated else 0
        gradients += 0 if sums_up or not step.on_device else unit.trained // unit.shards * step.storage
        gradients -= _before_replicas(step, unit)
    root = step.by_name[""]
    now = {**base, "gradients": gradients, "loss": waiting, "unsharded parameters": root.whole}
    now["unsharded gradients"] = accumulated or root.unpadded * root.item
    # The embedding's part of a tied table's gradient, before it is added to the head's.
    yield Moment("backward", "embedding", {**now, "reduction buffers": reduced})
    now |= {"loss": 0, "unsharded parameters": 0}
    yield from _reduction(step, now, root, sums_up=sums_up, freed=True)


def _gathered_in_backward(step: StepMemory, stops: list[tuple[str, LayerMemory | None]]) -> Iterator[dict[str, int]]:
    """What is whole, or gathered ahead, while the backward of each module runs; the last module comes first.

    Without the module's own partitioned experts.
    """
    kept_whole = {unit.name: unit.kept_after_forward for unit in step.units if unit.name}
    to_come = [unit for unit in step.units[::-1] if unit.gathered_again or not unit.gathers_in_backward]
    to_come = [unit for unit in to_come if not unit.experts]  # they come after their layer
    for name, _ in stops:
        kept_whole.pop(name, None)
        if (experts := _experts_of(step, name)) is not None:
            kept_whole.pop(experts.name, None)
        # A unit around this module is counted by `_gathered`.
        others = [size for other, size in kept_whole.items() if not f"{name}.".startswith(f"{other}.")]
        to_come = [unit for unit in to_come if unit.name and not f"{unit.name}.".startswith(f"{name}.")]
        ahead = [unit.whole for unit in to_come[: step.plan.fsdp.backward_prefetch] if unit.gathers_in_backward]
        yield {
            "unsharded parameters": _gathered(step, name)[0] + sum(others),
            "all-gather buffers": sum(ahead) if step.shards > 1 else 0,
        }


def _final_norm_backward(step: StepMemory, now: dict[str, int], kept: int, name: str | None) -> Moment:
    """The final norm's backward.

    Args:
        now: as the last layer's backward begins. That layer is gathered only after this moment.
        name: of the last layer; None: the head is followed by another module.
    """
    freed = step.compute if step.norm_trained else 0  # the tensor that its weight multiplied
    norm = kept + head_activations(step) + norm_backward(freed) * step.tokens * step.hidden
    whole = now["unsharded parameters"]
    if name is not None and (unit := step.by_name.get(name)) is not None and unit.gathered_again:
        whole -= _gathered(step, name)[0] - step.by_name[""].whole
    return Moment("backward", "final norm", {**now, "activations": norm, "unsharded parameters": whole})


def _reduction(
    step: StepMemory, now: dict[str, int], unit: UnitSize, *, sums_up: bool, freed: bool
) -> Iterator[Moment]:
    """A unit's gradients are copied into one buffer in the dtype of the reduction, and reduced to this rank's shard.

    Over one rank the buffer holds what is reduced, too.

    Args:
        sums_up: whether that shard is added to one that is there.
        freed: whether the gradients are freed before the reduction begins.
    """
    where = unit.name or "root"
    buffer = unit.trained * step.reduce
    shard = unit.trained // unit.shards
    becomes_gradient = step.reduce == step.storage and not sums_up and step.on_device
    shares = _shares_buffer(step, unit)
    copied = {**now, "reduction buffers": buffer}
    if shares and becomes_gradient:
        copied |= {"reduction buffers": 0, "gradients": copied.get("gradients", 0) + buffer}
    if freed or shares:
        yield Moment("backward", f"{where} (copied)", dict(copied))
        copied["unsharded gradients"] -= min(copied["unsharded gradients"], unit.unpadded * step.reduce)
    if shares:
        copied["reduction buffers"] += 0 if step.reduce == step.storage else shard * step.storage  # cast
    elif becomes_gradient:
        copied["gradients"] = copied.get("gradients", 0) + shard * step.storage
    else:
        copied["reduction buffers"] += shard * step.reduce
    yield Moment("backward", f"{where} (reduced)", copied)


def _loss_backward(step: StepMemory, now: dict[str, int], kept: int) -> tuple[int, list[Moment]]:
    """Bytes of a tied table's gradient, which waits for the embedding's; and the moments of the loss's backward."""
    hidden, weight = loss_saved(step)
    gradient = step.vocabulary * step.hidden * step.compute if step.head_trained else 0
    becomes = weight == gradient and not step.log_probs  # not cast: what was kept is the gradient
    waits = gradient if not step.head else 0
    before = now["unsharded gradients"]
    after = before + gradient - waits
    loss = (0 if becomes else weight) + waits
    moments = []
    if step.log_probs:  # what goes into the head is kept, and its gradient is made
        item = 4 if chunk_of_logits(step)[0] < step.tokens else step.compute
        total = step.vocabulary * step.hidden * item if step.head_trained else 0
        # Where nothing is cast or added to, what chunks add up to is the gradient.
        own = gradient if step.head and step.compute == 4 and not before else 0
        softmax, slope = slope_bytes(step, total)
        hidden = step.hidden_states
        after = before + own
        loss = slope - own
        moments = [Moment("backward", "loss (softmax)", {**now, "loss": softmax, "activations": kept + 2 * hidden})]
    first = {
        **now,
        "activations": kept + hidden,
        "all-gather buffers": now["all-gather buffers"] + now["all-gather buffers"] // step.shards,
        "loss": weight if waits or not becomes else 0,
        "unsharded gradients": before + (gradient if becomes and not waits else 0),
    }
    then = {"loss": loss, "activations": kept + 2 * hidden, "unsharded gradients": after}
    return waits, [Moment("backward", "loss (gather)", first), *moments, Moment("backward", "loss", {**now, **then})]


def _own_gradients(step: StepMemory, name: str) -> int:
    """Bytes of the gradients that the backward of a module leaves, before they are reduced."""
    units = [unit for unit in step.units if unit.name == name or (name and unit.name.startswith(f"{name}."))]
    return sum(unit.unpadded * unit.item for unit in units)


def _experts_backward(
    step: StepMemory,
    name: str,
    layer: LayerMemory,
    now: dict[str, int],
    kept: int,
    experts: UnitSize,
    *,
    sums_up: bool,
) -> Iterator[Moment]:
    """The backward of a layer's experts, which is its first part, and the reduction of their gradients."""
    earlier = now["unsharded gradients"]
    whole = now["unsharded parameters"] + experts.whole
    held = kept + layer.recomputed  # recomputation begins with the experts' backward
    if experts.shards > 1 and experts.gathered_again:
        gathered = {"unsharded parameters": whole + experts.reordered, "all-gather buffers": experts.whole}
        there = {"activations": kept + 2 * step.hidden_states}
        yield Moment("backward", f"{experts.name} (gather)", {**now, **gathered, **there})
    dispatch = step.dispatch[name]
    inside = max((moment.inside for moment in layer.backward), default=0)
    during = {"unsharded parameters": whole, "activations": held + 2 * step.hidden_states}
    yield Moment("backward", experts.name, {**now, **during, "attention and exchange": inside})
    if not experts.trained:
        return
    new = experts.unpadded * experts.item
    # In place where nothing is cast.
    added = 0 if earlier and step.reduce == step.compute else new
    there = {"activations": held + 2 * step.hidden_states, "unsharded gradients": earlier + added}
    yield Moment("backward", f"{experts.name} (gradients)", {**now, **during, **there})
    rest = held + 2 * step.hidden_states - dispatch.kept()
    there = {"activations": rest, "unsharded gradients": earlier or new}
    yield from _reduction(step, {**now, **there}, experts, sums_up=sums_up, freed=True)


def _layer_backward(
    step: StepMemory,
    name: str,
    layer: LayerMemory,
    now: dict[str, int],
    kept: int,
    gradients: int,
) -> Iterator[Moment]:
    unit = step.by_name.get(name)
    earlier = now["unsharded gradients"]
    of_others = kept - layer.kept
    if step.shards > 1 and unit is not None and unit.gathered_again:
        # Copied out of its buffer, before the next one is gathered ahead.
        gathered = {"all-gather buffers": unit.whole, "activations": kept + step.hidden_states}
        gathered["unsharded parameters"] = now["unsharded parameters"] + unit.reordered
        yield Moment("backward", f"{name} (gather)", {**now, **gathered})
    for where, held, there, inside in layer.backward:
        if inside:
            continue  # it came before
        sizes = {"unsharded gradients": earlier + min(gradients, there), "activations": of_others + held}
        yield Moment("backward", f"{name} ({where})", {**now, **sizes})
    end = {"unsharded gradients": earlier + gradients, "activations": of_others + 2 * step.hidden_states}
    yield Moment("backward", f"{name} (end)", {**now, **end})


def _optimizer(step: StepMemory) -> Moment:
    now = at_rest(step, gradients=True)
    if not step.state_on_device and step.on_device:  # moments are brought in parts
        sizes = [size // step.storage for unit in step.units for size in unit.gradient_sizes]
        at_once = min(sum(sizes), max([ELEMENTS_AT_ONCE, *sizes]))  # no parameter is cut
        now["optimizer"] = step.optimizer * at_once // max(1, sum(sizes))
    if step.on_device:
        now["optimizer"] = now.get("optimizer", 0) + step.update
    return Moment("optimizer", "step", now)
