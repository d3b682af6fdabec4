"""The planner's answers as text, JSON and pictures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Column, Table

from fsdp2kit.console import new_figure
from fsdp2kit.planner.devices import ALLOWANCE, GIB
from fsdp2kit.planner.estimate import Estimate
from fsdp2kit.planner.memory import CATEGORIES
from fsdp2kit.planner.search import Candidate
from fsdp2kit.planner.speed import in_range


def gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def renderables(plan: Estimate) -> Iterator[RenderableType]:
    """Everything for a console: the summary and the tables."""
    yield from summary(plan)
    yield from tables(plan)


def summary(plan: Estimate) -> Iterator[str]:
    """Lines: the mesh, what crosses nodes, attention, and the `figures`."""
    yield str(plan.sizes)
    yield from plan.layout.draw()
    yield from plan.crossings
    yield plan.attention
    yield from figures(plan)


def figures(plan: Estimate) -> Iterator[str]:
    """Lines: the peak, whether it fits, what reductions cost, the time of a step."""
    yield plan.line()
    if warning := plan.warning():
        yield warning
    if plan.dispatch is not None:
        yield str(plan.dispatch)
    if plan.reduction is not None:
        yield str(plan.reduction)
    if plan.untimed:
        yield plan.untimed
    if plan.speed is not None:
        slow = plan.speed.low
        fast = plan.speed.high
        yield (
            f"a step: {in_range(fast.overlapped, slow.overlapped, '.2f')} s overlapped, "
            f"{in_range(fast.serial, slow.serial, '.2f')} s one after the other (compute "
            f"{in_range(fast.compute, slow.compute, '.2f')}, communication {plan.speed.communication:.2f}); "
            f"{tokens_per_second(plan)} tokens/s, MFU {in_range(slow.mfu, fast.mfu, '.0%')}"
        )
        yield "assumed: " + "; ".join(plan.speed.assumptions)


def tokens_per_second(plan: Estimate) -> str:
    """The whole job's; "?" where no time is planned."""
    if plan.speed is None:
        return "?"
    return in_range(plan.speed.low.tokens_per_second, plan.speed.high.tokens_per_second, ",.0f")


def tables(plan: Estimate) -> Iterator[RenderableType]:
    """Tables of memory by phase, of host and disk, and of communication."""
    peaks = plan.peaks
    columns = [Column(phase, justify="right") for phase in peaks]
    table = Table("GiB of a rank's device", *columns, title="peak of each phase", title_justify="left")
    for name in CATEGORIES:
        if any(moment.bytes.get(name) for moment in peaks.values()):
            table.add_row(name, *(gib(moment.bytes.get(name, 0)) for moment in peaks.values()))
    table.add_section()
    table.add_row("sum", *(gib(moment.total) for moment in peaks.values()))
    table.add_row("reached at", *(moment.where for moment in peaks.values()))
    yield table
    yield f"reserved by the allocator, which keeps what each stream freed: {gib(plan.reserved)} GiB"
    yield (
        f"activations: {plan.activations_from}; allowance for the CUDA context, libraries and fragmentation: "
        f"{gib(ALLOWANCE)} GiB; every token is taken to have a target; torch.compile keeps less than this says"
    )
    for title, rows in (("host memory of a rank, GiB", plan.host), ("disk, GiB", plan.disk)):
        table = Table(title, Column(justify="right"))
        for name, size in rows.items():
            table.add_row(name, gib(size))
        yield table
    if plan.collectives:
        yield _communication(plan)


def _communication(plan: Estimate) -> Table:
    sums: dict[tuple[str, str, str, str], list[int]] = {}
    for one in plan.collectives:
        entry = sums.setdefault((one.dim, one.link, one.phase, one.kind), [0, 0])
        entry[0] += one.calls
        entry[1] += one.sent
    table = Table("mesh dim", "link", "phase", "collective", "calls", "GiB sent", title="a step's communication")
    for (dim, link, phase, kind), (calls, sent) in sums.items():
        table.add_row(dim, link, phase, kind, f"{calls:,}", gib(sent))
    return table


def candidates_table(candidates: Iterable[Candidate], *, title: str) -> Table:
    """Alternatives, one a line."""
    table = Table("change", "ranks", "peak GiB", "needed GiB", "fits", "tokens/s", "mostly", title=title)
    for one in candidates:
        plan = one.estimate
        fits = {True: "yes", False: "no", None: "?"}[plan.fits]
        numbers = str(one.world_size), gib(plan.peak.total), gib(plan.needed)
        table.add_row(as_overrides(one), *numbers, fits, tokens_per_second(plan), plan.blame)
    return table


def answers(name: str, candidates: Sequence[Candidate], *, world_size: int) -> list[str]:
    """The answer to --fit, --sweep or --longest in a line, then at most three next-best ones, a line each.

    Args:
        world_size: the ranks that were asked about.
    """
    fitting = [one for one in candidates if one.estimate.fits is not False]
    if not fitting:
        return [f"{name}: nothing that was tried fits; use a larger device, more ranks, or shorter sequences"]
    if name == "sweep":
        is_timed = any(one.estimate.speed is not None for one in fitting)
        fitting.sort(key=_pace if is_timed else lambda one: one.estimate.peak.total)
    best, *others = fitting
    if name == "longest":
        length = best.estimate.config.data.seq_len
        return [f"longest: {length:,} tokens a row fit; {best.estimate.line()}"]
    if name == "fit" and not best.values and best.world_size == world_size:
        first = f"fit: it fits as it is; {best.estimate.line()}"
    else:
        first = f"fit: {as_overrides(best)}{_needs(best, world_size)}"
    if name == "sweep" and best.estimate.speed is not None:
        first = f"sweep: fastest of what fits, {tokens_per_second(best.estimate)} tokens/s: {as_overrides(best)}"
    elif name == "sweep":
        first = f"sweep: least memory, {gib(best.estimate.needed)} GiB: {as_overrides(best)}"
    lines = [first]
    lines += [f"  or {as_overrides(one)}{_needs(one, world_size)}" for one in others[:3]]
    return lines


def _needs(one: Candidate, world_size: int) -> str:
    """A candidate's ranks, if they are others, memory and speed."""
    plan = one.estimate
    ranks = "" if one.world_size == world_size else f" on {one.world_size} ranks"
    room = "" if plan.device is None else f" of {gib(plan.device.memory)}"
    speed = "" if plan.speed is None else f", {tokens_per_second(plan)} tokens/s"
    return f"{ranks}: {gib(plan.needed)} GiB needed{room}{speed}"


def _pace(one: Candidate) -> tuple[float, int]:
    """Sorts by tokens a second of the slow pace, the most first; then by memory, the least first."""
    speed = one.estimate.speed
    return 0.0 if speed is None else -speed.low.tokens_per_second, one.estimate.peak.total


def as_overrides(one: Candidate) -> str:
    """A candidate's changes as the command line has them."""
    values = ((key, str(value).lower() if isinstance(value, bool) else value) for key, value in one.values.items())
    return " ".join(f"{key}={value}" for key, value in values) or "as it is"


def as_json(plan: Estimate) -> dict[str, Any]:
    """The estimate as one object, in bytes and seconds."""
    peak = plan.peak
    return {
        "mesh": asdict(plan.sizes),
        "device": None if plan.device is None else asdict(plan.device),
        "peak": {"phase": peak.phase, "where": peak.where, "bytes": peak.total, "by_category": peak.bytes},
        "allowance": ALLOWANCE,
        "reserved": plan.reserved,
        "needed": plan.needed,
        "fits": plan.fits,
        "blame": plan.blame,
        "phases": {phase: asdict(moment) for phase, moment in plan.peaks.items()},
        "moments": [asdict(moment) for moment in plan.moments],
        "host": plan.host,
        "disk": plan.disk,
        "collectives": [asdict(one) for one in plan.collectives],
        "reduction": None if plan.reduction is None else asdict(plan.reduction),
        "dispatch": None if plan.dispatch is None else asdict(plan.dispatch),
        "speed": None if plan.speed is None else asdict(plan.speed),
        "activations_from": plan.activations_from,
        "attention": plan.attention,
        "crossings": list(plan.crossings),
    }


def candidate_json(one: Candidate) -> dict[str, Any]:
    """A candidate as one object, without its moments and collectives, and without the price of reductions."""
    left_out = ("moments", "collectives", "reduction")
    plan = {key: value for key, value in as_json(one.estimate).items() if key not in left_out}
    return {"values": one.values, "world_size": one.world_size, **plan}


def draw(plan: Estimate, *, title: str) -> bytes:
    """A picture (PNG): memory by category through a step's moments, and at the peak of each phase."""
    figure = new_figure(figsize=(13, 5), layout="constrained")
    through, bars = figure.subplots(1, 2, width_ratios=(3, 1))
    names = [name for name in CATEGORIES if any(moment.bytes.get(name) for moment in plan.moments)]
    step = [moment for moment in plan.moments if moment.phase in ("forward", "backward", "optimizer")]
    values = [[moment.bytes.get(name, 0) / GIB for moment in step] for name in names]
    through.stackplot(range(len(step)), *values, labels=names)
    through.set(ylabel="GiB", xlabel="moments of the last micro-batch", title=title)
    starts = {moment.phase: number for number, moment in reversed(list(enumerate(step)))}
    through.set_xticks(list(starts.values()), list(starts))
    bottoms = [0.0] * len(plan.peaks)
    for name in names:
        heights = [moment.bytes.get(name, 0) / GIB for moment in plan.peaks.values()]
        bars.bar(list(plan.peaks), heights, bottom=bottoms, label=name)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    bars.tick_params(axis="x", rotation=45)
    if plan.device is not None:
        for axis in (through, bars):
            axis.axhline(plan.device.memory / GIB, color="black", linestyle="--", linewidth=1)
    bars.legend(fontsize="x-small")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    return picture.getvalue()


def page(plan: Estimate, *, title: str, extra: Sequence[RenderableType] = ()) -> str:
    """A page of HTML that needs no other file: the picture and the tables."""
    console = Console(record=True, width=140, file=io.StringIO())
    for part in [*renderables(plan), *extra]:
        console.print(part)
    data = base64.b64encode(draw(plan, title=title)).decode()
    title = html.escape(title)
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title>"
        f'<h1>{title}</h1><img src="data:image/png;base64,{data}" style="max-width:100%">'
        f"<pre>{html.escape(console.export_text())}</pre>\n"
    )
