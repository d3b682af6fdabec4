"""The report for a person: tables and what to try next for the terminal, one step as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from fsdp2kit.command_line import new_figure, write_figure
from fsdp2kit.overlap.events import BACKWARD, FORWARD, NO_UNIT, OPTIMIZER, value_at
from fsdp2kit.overlap.report import Report, StepReport
from fsdp2kit.overlap.split import MS, TIMES, Activity, Split, mean_of
from fsdp2kit.overlap.trace import RankTrace, Step

MOST_RANKS = 8
COLORS = {"compute only": "dodger_blue2", "overlapped": "green3", "exposed": "red1", "idle": "grey50"}
_BAR = 60


def renderables(report: Report, *, most_units: int) -> Iterator[RenderableType]:
    """The parts of the page, from top to bottom.

    Args:
        most_units: units that are shown, those with most exposed communication first.
    """
    devices = "CUDA" if report.device == "cuda" else "CPU (gloo)"
    ranks = f"{report.world_size} rank{'s' if report.world_size > 1 else ''}"
    yield Rule(Text(f"{report.path} · {ranks} · {devices}", style="bold"))
    if report.missing_ranks:
        missing = ", ".join(map(str, report.missing_ranks))
        yield Text(f"no trace of rank {missing}: waiting cannot be told from transfer", style="yellow")
    for step in report.steps:
        yield _step(step)
    yield from _summary(report)
    yield _collectives(report.means)
    yield _units(report.means, most_units)
    yield Text("What to try next", style="bold")
    for one in report.advice:
        yield Text(f"  {one}")


def _table(title: str, *columns: str, figures: Sequence[str], caption: str | None = None) -> Table:
    """A table of columns of text, then of figures (a line above the name says of what)."""
    table = Table(*columns, title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in figures:
        table.add_column(name, justify="right", style=COLORS.get(name.split("\n")[-1], ""))
    return table


def _step(step: StepReport) -> Table:
    title = f"step {step.number}"
    if not step.is_complete:
        title += " (no optimizer step: cut off or skipped; not in the means)"
    names = ("rank", "step", "compute only", "overlapped", "exposed", "idle", "waiting", "overlap")
    table = _table(title, figures=names, caption=_remarks(step))
    for rank in step.ranks if len(step.ranks) <= MOST_RANKS else [step.slowest_rank]:
        table.add_row(str(rank), *_figures(_values(step.ranks[rank])))
    if len(step.ranks) > 1:
        splits = list(step.ranks.values())
        table.add_section()
        table.add_row("mean", *_figures(_values(mean_of(splits))))
        columns = zip(*map(_values, splits), strict=True)
        most = [max((value for value in column if value is not None), default=None) for column in columns]
        table.add_row("max", *_figures(most))
    return table


def _values(split: Split) -> list[float | None]:
    return [getattr(split, name) for name in (*TIMES[:6], "effective_overlap")]


def _figures(values: Sequence[float | None]) -> list[str]:
    *times, overlap = values
    return [*map(_ms, times), "–" if overlap is None else f"{100 * overlap:.0f} %"]


def _remarks(step: StepReport) -> str:
    remarks = ["ms; step = compute only + overlapped + exposed + idle; waiting is part of exposed"]
    if len(step.ranks) > 1:
        waiting = mean_of(list(step.ranks.values())).waiting
        told = "" if waiting is None else f"; on average a rank waits {_ms(waiting)} ms"
        remarks.append(f"slowest: rank {step.slowest_rank}{told}")
    if step.measured is not None:
        rank, split = next(iter(step.ranks.items()))
        off = 100 * (split.duration / MS / 1e3 / step.measured - 1)
        remarks.append(f"metrics.jsonl: {step.measured * 1e3:,.1f} ms (rank {rank}'s trace: {off:+.1f} %)")
    return "\n".join(remarks)


def _summary(report: Report) -> Iterator[RenderableType]:
    """The mean step as a bar, and Σ max(compute, communication) beside what it took."""
    mean = report.means
    bar, legend = Text("  "), Text("  ")
    for name, color in COLORS.items():
        part = getattr(mean, name.replace(" ", "_")) / mean.duration if mean.duration else 0.0
        bar.append("█" * round(_BAR * part), style=color)
        legend.append(f"{name} {100 * part:.1f} %   ", style=color)
    yield Text("The mean step of a rank", style="bold")
    yield bar
    yield legend
    busy = _ms(mean.compute + mean.exposed)
    effective = "nothing to hide" if mean.effective_overlap is None else f"{100 * mean.effective_overlap:.0f} %"
    ideal = f"Σ max(compute, communication) over units: {_ms(mean.ideal)} ms"
    yield Text(f"  computes or communicates for {busy} ms; {ideal}; effective overlap {effective}")
    if mean.hidden is not None:
        yield Text(f"  of {_ms(mean.communication)} ms of communication, {100 * mean.hidden:.1f} % is overlapped")
    yield Text(f"  of compute, FSDP's own copies, casts and accumulation: {_ms(mean.copies)} ms")
    if report.device == "cuda":
        yield Text(f"  of idle, copies between host and device: {_ms(mean.host_copies)} ms")


def _collectives(mean: Split) -> Table:
    figures = ("count", "communication", "exposed", "of the step", "waiting")
    table = _table("by collective (ms a step and rank)", "collective", "phase", figures=figures)
    for key, row in mean.collectives.items():
        times = (_ms(row.communication), _ms(row.exposed), f"{100 * row.exposed / mean.duration:.1f} %")
        table.add_row(*key, f"{row.count:,.4g}", *times, _ms(row.waiting))
    return table


def _units(mean: Split, most: int) -> Table:
    exposed: dict[str, float] = {}
    for (unit, _), row in mean.units.items():
        if unit != NO_UNIT:
            exposed[unit] = exposed.get(unit, 0.0) + row.exposed
    shown = sorted(exposed, key=lambda unit: -exposed[unit])[:most]
    figures = [f"{phase}\n{name}" for phase in (FORWARD, BACKWARD) for name in ("compute", "comm", "exposed")]
    title = f"by unit (ms a step and rank), {len(shown)} of {len(exposed)}"
    table = _table(title, "unit", figures=figures)
    for unit in shown:
        rows = [mean.units.get((unit, phase)) for phase in (FORWARD, BACKWARD)]
        times = [(row.compute, row.communication, row.exposed) if row else (0.0, 0.0, 0.0) for row in rows]
        table.add_row(unit, *(_ms(time) for of_phase in times for time in of_phase))
    return table


def _ms(nanoseconds: float | None) -> str:
    return "?" if nanoseconds is None else f"{nanoseconds / MS:,.1f}"


_PHASES = {FORWARD: "#e8f1fa", BACKWARD: "#fdf0e0", OPTIMIZER: "#ececec"}
_PARTS = {
    "compute": "#1f6fb4",
    "FSDP's copies": "#8fbbe0",
    "communication, overlapped": "#3aa655",
    "communication, exposed": "#d62828",
    "waiting for a slower rank": "#f2a7a7",
}


def draw_timeline(traces: Sequence[RankTrace], *, step: int, out: Path, title: str) -> None:
    """Draw one step of up to eight ranks: compute above, communication below, phases behind.

    Ranks begin at their own start of the step, so no clocks are compared.

    Args:
        step: its number; ranks without it are left out.
        out: the PNG.

    Raises:
        UserError: matplotlib is not installed, or the file cannot be written.
    """
    found = [(trace, part) for trace in traces for part in trace.steps if part.number == step][:MOST_RANKS]
    figure = new_figure(figsize=(12, 1.6 + 1.0 * len(found)), layout="constrained")
    from matplotlib.patches import Patch

    axes = figure.subplots()
    for row, (trace, part) in enumerate(found):
        _draw_rank(axes, trace, part, top=-row)
    axes.set_yticks([-row - 0.5 for row in range(len(found))], [f"rank {trace.rank}" for trace, _ in found])
    axes.set_xlim(0, max(part.end - part.start for _, part in found) / MS)
    axes.set_ylim(-len(found), 0)
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize=10)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [Patch(color=color, label=name) for name, color in (_PARTS | _PHASES).items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8)
    write_figure(figure, out)


def _draw_rank(axes: Any, trace: RankTrace, step: Step, *, top: float) -> None:
    """One band: [top − 1, top], compute in its upper lane, communication in its lower."""
    seen = Activity(trace, step)
    upper, lower = (top - 0.47, 0.36), (top - 0.89, 0.36)
    parts = (
        (seen.computing & ~seen.copying, upper),
        (seen.copying, upper),
        (seen.communicating & seen.computing, lower),
        (seen.exposed & seen.moving, lower),
        (seen.exposed & ~seen.moving, lower),
    )
    times = [step.start, *(time for time, _ in trace.turns if step.start < time < step.end), step.end]
    phases = [(interval, value_at(trace.turns, interval[0])[0]) for interval in pairwise(times)]
    bars = [([interval], (top - 0.95, 0.9), _PHASES[phase]) for interval, phase in phases if phase in _PHASES]
    for (cells, lane), color in zip(parts, _PARTS.values(), strict=True):
        bars.append((seen.grid.stretches(cells), lane, color))
    for intervals, lane, color in bars:
        spans = [((start - step.start) / MS, (end - start) / MS) for start, end in intervals]
        axes.broken_barh(spans, lane, facecolors=color, linewidth=0)
    share = 100 * seen.grid.total(seen.exposed) / (step.end - step.start)
    axes.text(1.0, top - 0.5, f" {share:.0f} % exposed", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
