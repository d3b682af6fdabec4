"""The report for a person: one table of steps and what to try next for the terminal, one step as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from fsdp2kit.console import new_figure, write_figure
from fsdp2kit.overlap.events import BACKWARD, FORWARD, NO_UNIT, OPTIMIZER, value_at
from fsdp2kit.overlap.report import Report
from fsdp2kit.overlap.split import MS, Activity, Split
from fsdp2kit.overlap.trace import RankTrace, Step

MOST_RANKS = 8


def renderables(report: Report, *, most_units: int) -> Iterator[RenderableType]:
    """The parts of the page, from top to bottom.

    Args:
        most_units: units that are named, those with most exposed communication first.
    """
    device = "CUDA" if report.device == "cuda" else "CPU (gloo)"
    ranks = f"{report.world_size} rank{'s' if report.world_size > 1 else ''}"
    yield Text(f"{report.path} · {ranks} · {device}", style="bold")
    if report.missing_ranks:
        missing = ", ".join(map(str, report.missing_ranks))
        yield Text(f"no trace of rank {missing}: waiting cannot be told from transfer", style="yellow")
    yield _steps(report)
    mean = report.means
    by_collective = {f"{kind} of {phase}": exposed for (kind, phase), exposed in mean.collectives.items()}
    by_unit = {unit: exposed for unit, exposed in mean.units.items() if unit != NO_UNIT}
    yield Text(f"exposed by collective: {_exposed(by_collective, mean, len(by_collective))}")
    yield Text(f"exposed by unit: {_exposed(by_unit, mean, most_units)}")
    yield Text("What to try next", style="bold")
    for one in report.advice:
        yield Text(f"  {one}")


def _steps(report: Report) -> Table:
    """A row for every step and rank, and their mean; of many ranks, the slowest alone."""
    caption = "ms; step = compute only + overlapped + exposed + idle; waiting is part of exposed"
    table = Table(caption=caption, caption_justify="left")
    for name in ("step", "rank", "ms", "compute only", "overlapped", "exposed", "idle", "waiting", "overlap"):
        table.add_column(name, justify="right", style="red1" if name == "exposed" else "")
    for step in report.steps:
        shown = step.ranks if len(step.ranks) <= MOST_RANKS else [step.slowest_rank]
        for rank in shown:
            is_slowest = rank == step.slowest_rank and len(step.ranks) > 1
            name = f"{rank} (slowest)" if is_slowest else str(rank)
            table.add_row(f"{step.number}{'' if step.is_complete else ' *'}", name, *_figures(step.ranks[rank]))
    if not all(step.is_complete for step in report.steps):
        table.caption = f"{caption}\n* no optimizer step: cut off or skipped; not in the mean"
    table.add_section()
    table.add_row("mean", "", *_figures(report.means))
    return table


def _figures(split: Split) -> list[str]:
    names = ("duration", "compute_only", "overlapped", "exposed", "idle", "waiting")
    overlap = "–" if split.overlap is None else f"{100 * split.overlap:.0f} %"
    return [*(_ms(getattr(split, name)) for name in names), overlap]


def _exposed(parts: dict[str, float], mean: Split, most: int) -> str:
    """The ``most`` largest parts of the mean step's exposed time; ``parts`` come largest first."""
    largest = list(parts.items())[:most]
    told = [f"{name} {_ms(exposed)} ms ({100 * exposed / mean.duration:.1f} %)" for name, exposed in largest]
    more = f"; {len(parts) - most} more" if len(parts) > most else ""
    return f"{', '.join(told) or 'none'}{more}"


def _ms(nanoseconds: float | None) -> str:
    return "?" if nanoseconds is None else f"{nanoseconds / MS:,.1f}"


_PHASES = {FORWARD: "#e8f1fa", BACKWARD: "#fdf0e0", OPTIMIZER: "#ececec"}
_PARTS = {
    "compute": "#1f6fb4",
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
        (seen.computing, upper),
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
