"""How everything here is measured and told: ways in turns, one statistic, one kind of result, one kind of table.

A command's result is a dictionary ready for JSON: ``benchmark``, ``options``, ``rows`` (one dictionary each, printed
as one table), and as needed ``notes`` (lines below it), ``checks`` (name: whether it holds; a check that fails makes
the comparison void) and ``bars`` (what `draw` draws), with its ``provenance``.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from fsdp2kit.distributed import World, gather_objects
from fsdp2kit.errors import UserError
from fsdp2kit.job import describe_environment, without_secrets

T = TypeVar("T")
RESAMPLES = 10_000


@dataclass(frozen=True)
class Command:
    """A command of `tools/bench.py`."""

    options: type[Any]
    """A dataclass, each field of which is an option of the command line."""
    measure: Callable[[Any], dict[str, Any] | Iterator[dict[str, Any]]]
    """From the options to the result; an iterator gives the result so far, again and again."""
    draw: Callable[[dict[str, Any], Path], None] | None = None
    """Draws the result into a PNG; None: `draw` of this file."""


def option(default: Any, text: str, **named: Any) -> Any:
    """A dataclass field that is an option of the command line.

    Args:
        default: ``...`` where there is none, which makes the option required.
        text: of the help.
        named: for `argparse.ArgumentParser.add_argument`; ``positional=True`` makes it an argument without a flag.
    """
    metadata = {"help": text, **named}
    return (
        dataclasses.field(metadata=metadata)
        if default is ...
        else dataclasses.field(default=default, metadata=metadata)
    )


def add_options(parser: argparse.ArgumentParser, options: type[Any]) -> None:
    """Add the fields of a dataclass of options to a parser; whole numbers must be positive."""
    for each in dataclasses.fields(options):
        named = dict(each.metadata)
        flag = each.name if named.pop("positional", False) else f"--{each.name.replace('_', '-')}"
        if each.default is False:
            named["action"] = "store_true"
        elif each.default is not dataclasses.MISSING:
            named["default"] = each.default
            if isinstance(each.default, (int, float)):
                named.setdefault("type", positive if isinstance(each.default, int) else float)
                named["help"] += f" ({each.default:g})"
        elif flag.startswith("--"):
            named["required"] = True
        parser.add_argument(flag, **named)


def positive(text: str) -> int:
    """An argument that counts something, for argparse."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


@dataclass(frozen=True)
class Cost:
    """What a piece of work took on this rank."""

    seconds: float
    """By the wall clock."""
    cpu_seconds: float
    """Of this process, all threads: hardly touched by what else runs, and blind to waiting."""


def timed(work: Callable[[], T], *, device: torch.device) -> tuple[Cost, T]:
    """Cost and result of ``work``, from a barrier until the device is idle. Collective."""
    barrier(device)
    started, cpu_started = time.perf_counter(), time.process_time()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return Cost(time.perf_counter() - started, time.process_time() - cpu_started), result


def take_turns(steps: Mapping[str, Callable[[], object]], rounds: int, *, say: bool = False) -> None:
    """Call each of these in every round, in an order that is turned round from one round to the next.

    So whatever else the machine is doing hits all alike.

    Args:
        say: write to stderr how many rounds are done, now and then.
    """
    for number in range(rounds):
        for name in list(steps)[:: 1 if number % 2 == 0 else -1]:
            steps[name]()
        if say and ((number + 1) % 10 == 0 or number + 1 == rounds):
            print(f"{number + 1} of {rounds} rounds", file=sys.stderr, flush=True)


def time_in_turns(
    ways: Mapping[str, Callable[[], T]], rounds: int, *, device: torch.device, before: Callable[[], object] = list
) -> dict[str, list[Cost]]:
    """Costs of each way, in turns. Collective.

    Args:
        before: called before each way, outside the clock.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in ways}

    def step(name: str) -> None:
        before()
        costs[name].append(timed(ways[name], device=device)[0])

    take_turns({name: lambda name=name: step(name) for name in ways}, rounds)
    return costs


def cost_rows(costs: Mapping[str, Sequence[Cost]]) -> list[dict[str, Any]]:
    """A row of each way: seconds of the slowest rank, and how often the first way fits into it. Collective."""
    seconds = {name: slowest_rank([cost.seconds for cost in each]) for name, each in costs.items()}
    cpu = {name: slowest_rank([cost.cpu_seconds for cost in each]) for name, each in costs.items()}
    rows = []
    for name in costs:
        row: dict[str, Any] = {"name": name, "seconds": spread(seconds[name]), "cpu_seconds": spread(cpu[name])}
        if rows:
            first = rows[0]["name"]
            row[f"{first}_is_faster"] = speed(seconds[first], seconds[name])
            row["by_cpu_time"] = speed(cpu[first], cpu[name])
        rows.append(row)
    return rows


def speed(
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    work: tuple[Sequence[float], Sequence[float]] | None = None,
    seed: int = 0,
) -> dict[str, float]:
    """How many times as fast as theirs ours is: the median over rounds of the durations' ratio, with a 95 % interval.

    The two of a round were measured one right after the other, so whatever slowed the machine slowed both. Were each
    side's median taken first, a machine that is busy for half the time could turn the ratio round. The interval is a
    percentile bootstrap over rounds.

    Args:
        ours: durations, the i-th measured beside the i-th of ``theirs``.
        theirs: the durations of the other side.
        work: what each did in that time, ours first: the ratio is then of work per time, by the mean work.
    """
    ratios = np.asarray(theirs) / np.asarray(ours)
    done, theirs_done = (np.asarray(side) for side in work or ((1.0,) * len(ratios),) * 2)
    draws = np.random.default_rng(seed).integers(0, len(ratios), size=(RESAMPLES, len(ratios)))

    def figure(chosen: Any) -> Any:
        return np.median(ratios[chosen], axis=-1) * done[chosen].mean(axis=-1) / theirs_done[chosen].mean(axis=-1)

    low, high = np.percentile(figure(draws), [2.5, 97.5])
    return {"ratio": float(figure(np.arange(len(ratios)))), "low": float(low), "high": float(high)}


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and all of some durations."""
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return {"median": float(middle), "p25": float(low), "p75": float(high), "all": list(seconds)}


def slowest_rank(seconds: Sequence[float]) -> list[float]:
    """Element-wise maximum over ranks: a collective step lasts as long as its slowest rank. Collective."""
    return [max(values) for values in zip(*gather_objects(list(seconds)), strict=True)]


def barrier(device: torch.device) -> None:
    """Line all ranks up, with the device idle: the start of a measurement."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


@contextmanager
def shared_folder(world: World, parent: Path | None = None) -> Iterator[Path]:
    """A temporary folder of the main rank that all ranks of this machine know; gone afterwards. Collective."""
    owned = tempfile.TemporaryDirectory(prefix="fsdp2kit-bench-", dir=parent) if world.is_main else None
    try:
        yield Path(gather_objects(owned.name if owned else "")[0])
        barrier(world.device)
    finally:
        if owned:
            owned.cleanup()


def provenance(world: World) -> dict[str, Any]:
    """Command, versions, device, git state and the machine's load: what a figure must be quoted with. Collective."""
    environment = describe_environment(world_size=world.size, mesh={})
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    device = f"{_cpu_name()}, {cores} cores, {torch.get_num_threads()} threads a rank"
    if world.device.type == "cuda":
        device = torch.cuda.get_device_name(world.device)
    start = "torchrun --nproc-per-node " + str(world.local_size) if "TORCHELASTIC_RUN_ID" in os.environ else "python"
    return {
        "command": f"{start} {shlex.join(map(without_secrets, sys.argv))}",
        "versions": environment["versions"],
        "devices": sorted(set(gather_objects(device))),
        "world_size": world.size,
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "load_average": round(os.getloadavg()[0], 2),
        "git": environment["git"],
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "CPU"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")


def result_lines(result: dict[str, Any]) -> list[str]:
    """A result as Markdown: its table, notes, checks, and where it comes from."""
    columns = list(dict.fromkeys(key for row in result["rows"] for key in row if not isinstance(row[key], list)))
    lines = ["| " + " | ".join(_header(key) for key in columns) + " |", "| --- " * len(columns) + "|"]
    lines += ["| " + " | ".join(_cell(key, row.get(key, "")) for key in columns) + " |" for row in result["rows"]]
    source, notes = result.get("provenance"), result.get("notes", [])
    checks = [
        f"{name.replace('_', ' ')}: {'yes' if holds else 'NO'}" for name, holds in result.get("checks", {}).items()
    ]
    lines += ["", *notes, *checks] if notes or checks else []
    if source is None:
        return lines
    versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items() if version)
    git = source["git"]
    commit = f"; commit {git['commit'][:10]}{' (modified)' if git['modified'] else ''}" if git else ""
    return [
        *lines,
        "",
        f"command: {source['command']}",
        f"device: {', '.join(source['devices'])}; {source['world_size']} ranks; load average {source['load_average']}",
        f"versions: {versions}{commit}",
    ]


def _header(key: str) -> str:
    return key.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ").strip()


def _cell(key: str, value: Any) -> str:
    if isinstance(value, dict):
        if "ratio" in value:
            return f"**{value['ratio']:.3g}** ({value['low']:.3g} – {value['high']:.3g})"
        return f"{value['median']:.3g} s ({value['p25']:.3g} – {value['p75']:.3g})"
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if key.endswith("_bytes"):
        return f"{value / 2**20:,.0f} MiB"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw bars of the columns that the result names (``bars``: by title, columns side by side), as a PNG."""
    rows, bars = result["rows"], result.get("bars", {"seconds": ["seconds"]})
    names, places = [next(iter(row.values())) for row in rows], np.arange(len(rows))
    plots = pyplot("--figure")
    figure, every = plots.subplots(
        1, len(bars), figsize=(4.5 * len(bars), 1 + 0.7 * len(rows)), sharey=True, squeeze=False
    )
    for axes, (title, columns) in zip(every[0], bars.items(), strict=True):
        height = 0.76 / len(columns)
        for number, column in enumerate(columns):
            values = [row.get(column) for row in rows]
            values = [value["median"] if isinstance(value, dict) else value or 0 for value in values]
            axes.barh(
                places + height * (number - (len(columns) - 1) / 2), values, height=height, label=_header(column)
            )
        axes.set_xlabel(title)
        axes.legend(loc="lower right")
    every[0][0].set_yticks(places, names)
    every[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plots.close(figure)


def pyplot(flag: str) -> Any:
    """matplotlib's pyplot, drawing into files.

    Raises:
        UserError: matplotlib is not installed, which ``flag`` needs.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise UserError(flag, "needs matplotlib", "install it: pip install 'fsdp2kit[plot]'") from None
    return pyplot
