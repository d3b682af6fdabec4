"""Training runs side by side: their losses as a table and a picture, from the run directories alone."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp2kit.bench.harness import Command, option, pyplot
from fsdp2kit.config.load import read_toml
from fsdp2kit.errors import UserError

_LAST = 20
_COLORS = ("#4c8dd6", "#e0823d", "#3fa66a", "#c95fb0", "#d65353", "#9a8f2e", "#7d7be0", "#2fa3a8")
_GREY = "#808080"  # on white and on black alike
_SAME: dict[str, tuple[str, ...]] = {
    "data": (
        "path",
        "split",
        "sources",
        "temperature",
        "format",
        "train_on",
        "seq_len",
        "pack",
        "overlong",
        "shuffle",
    ),
    "eval": ("path", "split", "sets", "steps"),
    "train": ("global_batch_size",),
    "run": ("seed",),
}
"""Fields in which compared runs must not differ, by section."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Which runs are compared."""

    runs: tuple[Path, ...] = option(..., "run directories, on the same data", positional=True, nargs="+", type=Path)
    reference: str | None = option(None, "the run to divide by, by its directory's name (the first)")


@dataclass(frozen=True)
class Run:
    """What one run directory says."""

    name: str
    config: dict[str, Any]
    records: list[dict[str, Any]]

    def points(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of a metric, where there is one."""
        found = [(record["step"], record[key]) for record in self.records if record.get(key) is not None]
        return [step for step, _ in found], [value for _, value in found]


def compare_curves(options: Options) -> dict[str, Any]:
    """A row a run: losses, the ratio to the reference at the same step, seconds a step, peak GiB.

    Raises:
        UserError: a directory is no run, runs share a name or differ in data, or there is no such reference.
    """
    runs = [read_run(path) for path in options.runs]
    names = [each.name for each in runs]
    for name in names:
        if names.count(name) > 1:
            raise UserError("RUN_DIR", f"two runs are called {name!r}", "rename one directory")
    reference = options.reference or names[0]
    if reference not in names:
        raise UserError("--reference", f"no run is called {reference!r}", f"use one of {', '.join(names)}")
    _check_same_data(runs)
    compared = dict(zip(*runs[names.index(reference)].points("eval_loss"), strict=True))
    rows = []
    for each in runs:
        optimizer, (steps, losses) = each.config.get("optimizer", {}), each.points("eval_loss")
        step, loss = (steps[-1], losses[-1]) if steps else (None, None)
        theirs = None if step is None else compared.get(step)
        rows.append(
            {
                "run": each.name,
                "optimizer": optimizer.get("name"),
                "lr": optimizer.get("lr"),
                "steps": each.records[-1]["step"],
                "loss": statistics.fmean(each.points("loss")[1][-_LAST:]),
                "eval_step": step,
                "eval_loss": loss,
                "ratio": loss / theirs if loss is not None and theirs else None,
                "step_seconds": statistics.median(each.points("step_seconds")[1] or [float("nan")]),
                "memory_gib": max(each.points("memory_gib")[1], default=None),
            }
        )
    points = {each.name: {key: each.points(key) for key in ("loss", "eval_loss")} for each in runs}
    notes = [f"loss: mean of the last {_LAST} steps; ratio: eval loss over that of {reference} at the same step"]
    return {"benchmark": "curves", "reference": reference, "rows": rows, "notes": notes, "points": points}


def read_run(path: Path) -> Run:
    """A run directory's config and metrics.

    Raises:
        UserError: there is no such directory, or no metrics in it, or they cannot be read.
    """
    if not path.is_dir():
        raise UserError(str(path), "no such directory", "give a run directory")
    metrics = path / "metrics.jsonl"
    config = read_toml(path / "config.toml")
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()
        records = [record for record in map(json.loads, lines) if record.get("loss") is not None]
    except FileNotFoundError:
        raise UserError(str(path), "has no metrics.jsonl", "give the directory of a run that has trained") from None
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(str(metrics), f"cannot be read ({error})", "check the file") from None
    if not records:
        raise UserError(str(metrics), "holds no losses", "give the directory of a run that has trained")
    return Run(path.resolve().name, config, records)


def _check_same_data(runs: Sequence[Run]) -> None:
    """Check that all runs read the same batches and were evaluated on the same text: else losses say nothing."""
    first = runs[0]
    for other in runs[1:]:
        for section, keys in _SAME.items():
            ours, theirs = first.config.get(section, {}), other.config.get(section, {})
            for key in keys:
                if ours.get(key) != theirs.get(key):
                    what = f"{ours.get(key)!r} in {first.name}, {theirs.get(key)!r} in {other.name}"
                    raise UserError(f"{section}.{key}", what, "compare runs on the same data")


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw smoothed training losses as lines, and held-out losses as points, to be read on white and on black."""
    plots = pyplot("--figure")
    figure, (training, held_out) = plots.subplots(1, 2, figsize=(9, 4.2), layout="constrained", facecolor="none")
    for number, (name, points) in enumerate(result["points"].items()):
        color = _COLORS[number % len(_COLORS)]
        width = 1 + 0.7 * (
            len(result["points"]) - 1 - number
        )  # of runs that coincide, the later do not hide the earlier
        steps, losses = points["loss"]
        smoothed = [statistics.fmean(losses[max(0, end - _LAST) : end]) for end in range(1, len(losses) + 1)]
        training.plot(steps, smoothed, color=color, linewidth=width, label=name)
        held_out.plot(*points["eval_loss"], color=color, marker="o", markersize=2.5 + width, linewidth=width)
    training.set_title(f"training loss, mean of {_LAST} steps", fontsize=10, color=_GREY)
    held_out.set_title("held-out loss", fontsize=10, color=_GREY)
    for axes in (training, held_out):
        axes.set_facecolor("none")
        axes.set_xlabel("step", color=_GREY)
        axes.tick_params(colors=_GREY)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GREY)
        axes.grid(color=_GREY, alpha=0.25, linewidth=0.6)
    training.legend(frameon=False, fontsize=8, labelcolor=_GREY)
    figure.savefig(file, dpi=110, format="png")
    plots.close(figure)


COMMANDS = {"curves": Command(Options, compare_curves, draw)}
