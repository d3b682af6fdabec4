"""The four main curves of runs as a PNG, for a chat or a README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp2kit.console import new_figure, write_figure
from fsdp2kit.report.curves import Columns
from fsdp2kit.report.payload import labels
from fsdp2kit.report.read import RunRecord

_COLORS = ("#1f66c1", "#c4561a", "#22835a", "#8750b8", "#a8456b", "#7a6a14", "#147f8c", "#5f6670")
_LEARNT = (("reward", "reward"), ("loss", "loss"))
"""What the first curve is: the first of these that a run has, with that of held-out data, dashed."""
_OTHERS = (("grad_norm", "gradient norm"), ("lr", "learning rate"), ("tokens_per_second", "tokens per second"))


def write_picture(runs: Sequence[RunRecord], out: Path) -> None:
    """Draw loss or reward, gradient norm, learning rate and tokens per second by step.

    Raises:
        UserError: matplotlib is not installed; ``out`` cannot be written.
    """
    columns = [Columns() for _ in runs]
    for one, run in zip(columns, runs, strict=True):
        one.add(run.records)
    figure = new_figure(figsize=(9.6, 5.4), layout="constrained")
    panels = figure.subplots(2, 2).flat
    keys = {key for one in columns for key in one.values}
    first = next((pair for pair in _LEARNT if pair[0] in keys), _LEARNT[-1])
    names = labels([run.directory for run in runs])
    for panel, (key, title) in zip(panels, (first, *_OTHERS), strict=True):
        panel.set_title(title, fontsize=10, loc="left")
        panel.grid(color="#eceef0")
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_xlabel("step", fontsize=8)
        panel.tick_params(labelsize=8)
        for number, (one, run, name) in enumerate(zip(columns, runs, names, strict=True)):
            _draw(panel, one, run, key, color=_COLORS[number % len(_COLORS)], name=name)
    if len(runs) > 1 or f"eval_{first[0]}" in keys:
        figure.axes[0].legend(fontsize=8, frameon=False)
    write_figure(figure, out)


def _draw(panel: Any, columns: Columns, run: RunRecord, key: str, *, color: str, name: str) -> None:
    """A metric of a run, the same of held-out data, and its restarts."""
    for found, style, label in ((key, "-", name), (f"eval_{key}", "o--", f"{name}, held-out")):
        if found in columns.values:
            steps, values = columns.values[found]
            panel.plot(steps, values, style, color=color, linewidth=1.2, markersize=3, label=label)
    for start in run.starts[1:]:
        panel.axvline(start.step, color=color, linewidth=0.7, linestyle=":")
