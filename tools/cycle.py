"""Draw the mean cycle of a run of recipe grpo: seconds and memory of each phase; and the reward over the run.

fsdp2kit cycle RUN_DIR --png cycle.png
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from fsdp2kit.console import in_one_line, new_figure, show, user_path, write_figure
from fsdp2kit.errors import UserError, pip_install

COLORS = {
    "sync": "tab:orange",
    "sleep": "tab:gray",
    "generate": "tab:blue",
    "wake_up": "tab:olive",
    "wait": "lightgray",
    "reward": "tab:purple",
    "train": "tab:green",
}
"""Colours of the phases, which follow each other in this order."""
_TRAIN = ("forward", "backward", "optimizer")


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(prog="cycle", description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=user_path, help="directory of a run of recipe grpo")
    parser.add_argument("--png", type=user_path, required=True, metavar="FILE", help=f"({pip_install('matplotlib')})")
    options = parser.parse_args(arguments)
    records = read_records(options.run_dir)
    seconds, memory = cycle_of(records)
    for name, value in seconds.items():
        show(f"{name:<10}{value:8.3f} s{memory.get(name, 0.0):10.2f} GiB")
    write_png(records, seconds, memory, options.png)
    return 0


def read_records(run_dir: Path) -> list[dict[str, Any]]:
    """The steps with rollouts of a run, from its metrics.jsonl."""
    todo, metrics = "name the directory of a run of recipe grpo", run_dir / "metrics.jsonl"
    if not run_dir.is_dir():
        raise UserError(str(run_dir), "no such directory", todo)
    try:
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        records = [record for record in records if "seconds/sync" in record and "step_seconds" in record]
    except FileNotFoundError:
        raise UserError(str(run_dir), "has no metrics.jsonl", todo) from None
    except (OSError, ValueError, TypeError) as error:
        raise UserError(str(metrics), f"cannot be read ({error})", "check the file") from None
    if not records:
        raise UserError(str(run_dir), "has no step with rollouts", todo)
    return records


def cycle_of(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Mean seconds and peak GiB of each phase, by its name in `COLORS`.

    The first step, which warms up, is left out where there are others; so are steps that began no rollouts.
    """
    steps = records[1:] or records
    seconds = {name: fmean([record.get(f"seconds/{name}", 0.0) for record in steps]) for name in COLORS}
    seconds["train"] = fmean([record["step_seconds"] - record["data_seconds"] for record in steps])
    peaks = {name: max(record.get(f"memory_gib/{name}", 0.0) for record in steps) for name in (*COLORS, *_TRAIN)}
    peaks["train"] = max(peaks[name] for name in _TRAIN)
    found = {name: value for name, value in seconds.items() if value}
    return found, {name: peaks[name] for name in found}


def write_png(
    records: Sequence[Mapping[str, Any]], seconds: Mapping[str, float], memory: Mapping[str, float], out: Path
) -> None:
    """Draw each phase as a bar, as wide as its seconds and as high as its memory, and below it the reward by step."""
    figure = new_figure(figsize=(9, 5.5), layout="constrained")
    above, below = figure.subplots(2)
    at = background = 0.0
    for name, width in seconds.items():
        meanwhile = name in ("generate", "reward") and "wait" in seconds  # while the trainer trains
        label = f"{name} {width:.2f} s" + (" (meanwhile)" if meanwhile else "")
        start = background if meanwhile else at
        above.bar(start, memory.get(name, 0.0), width, align="edge", color=COLORS[name], label=label)
        at, background = (at, background + width) if meanwhile else (at + width, background)
    above.set(xlabel="seconds of a cycle (mean)", ylabel="peak memory of a rank, GiB")
    above.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    for key, label, style in (("reward", "of training", "-"), ("eval_reward", "held-out prompts", "o--")):
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            below.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    below.set(xlabel="step", ylabel="mean reward")
    below.legend(fontsize=8, frameon=False)
    write_figure(figure, out)


if __name__ == "__main__":
    sys.exit(main())
