"""Training runs side by side: their losses as a table and a picture, from the run directories alone."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from fsdp2kit.config.load import read_toml
from fsdp2kit.distributed import World
from fsdp2kit.errors import UserError

_LAST = 20
# Fields in which compared runs must not differ: else their losses say nothing.
_SAME = ("data.path", "data.split", "data.sources", "data.temperature", "data.format", "data.train_on", "data.seq_len")
_SAME += ("data.pack", "data.overlong", "data.shuffle", "eval.path", "eval.split", "eval.sets", "eval.steps")
_SAME += ("train.global_batch_size", "run.seed")


def bench_curves(world: World, runs: tuple[str, ...], *, reference: str | None = None) -> dict[str, Any]:
    """Finished runs side by side: losses, the ratio to the reference at the same step, seconds a step, peak GiB.

    Args:
        runs: run directories, on the same data.
        reference: the run to divide by, by its directory's name (the first).

    Raises:
        UserError: a directory is no run, runs share a name or differ in data, or there is no such reference.
    """
    configs: dict[str, dict[str, Any]] = {}
    records: dict[str, list[dict[str, Any]]] = {}
    for path in map(Path, runs):
        name = path.resolve().name
        if name in records:
            raise UserError("RUN_DIR", f"two runs are called {name!r}", "rename one directory")
        configs[name], records[name] = read_run(path)
    first = next(iter(configs))
    for name, config in configs.items():
        for section, key in (field.split(".") for field in _SAME):
            ours, theirs = (each.get(section, {}).get(key) for each in (configs[first], config))
            if ours != theirs:
                what = f"{ours!r} in {first}, {theirs!r} in {name}"
                raise UserError(f"{section}.{key}", what, "compare runs on the same data")
    if (reference := reference or first) not in records:
        raise UserError("--reference", f"no run is called {reference!r}", f"use one of {', '.join(records)}")

    def points(name: str, key: str) -> dict[int, float]:
        return {record["step"]: record[key] for record in records[name] if record.get(key) is not None}

    rows, smoothed, held_out = [], {}, {}
    for name, config in configs.items():
        losses, evaluated = points(name, "loss"), points(name, "eval_loss")
        values, eval_step = list(losses.values()), max(evaluated, default=0)
        theirs = points(reference, "eval_loss").get(eval_step)
        means = [statistics.fmean(values[max(0, end - _LAST) : end]) for end in range(1, len(values) + 1)]
        smoothed[name], held_out[name] = (list(losses), means), (list(evaluated), list(evaluated.values()))
        optimizer = config.get("optimizer", {})
        rows.append(
            {
                "run": name,
                "optimizer": optimizer.get("name"),
                "lr": optimizer.get("lr"),
                "steps": records[name][-1]["step"],
                "loss": means[-1],
                "eval_step": eval_step or None,
                "eval_loss": evaluated.get(eval_step),
                "ratio": evaluated[eval_step] / theirs if theirs else None,
                "step_seconds": statistics.median([*points(name, "step_seconds").values()] or [float("nan")]),
                "memory_gib": max(points(name, "memory_gib").values(), default=None),
            }
        )
    lines = {f"training loss, mean of {_LAST} steps": smoothed, "held-out loss": held_out}
    notes = [f"loss: mean of the last {_LAST} steps; ratio: eval loss over that of {reference} at the same step"]
    return {"reference": reference, "rows": rows, "notes": notes, "lines": lines}


def read_run(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A run directory's config, and its metrics that have a loss.

    Raises:
        UserError: there is no such directory, or no metrics in it, or they cannot be read.
    """
    todo = "give the directory of a run that has trained"
    if not path.is_dir():
        raise UserError(str(path), "no such directory", todo)
    metrics, config = path / "metrics.jsonl", read_toml(path / "config.toml")
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()
        records = [record for record in map(json.loads, lines) if record.get("loss") is not None]
    except FileNotFoundError:
        raise UserError(str(path), "has no metrics.jsonl", todo) from None
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(str(metrics), f"cannot be read ({error})", "check the file") from None
    if not records:
        raise UserError(str(metrics), "holds no losses", todo)
    return config, records
