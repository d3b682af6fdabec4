"""Several sides in turns in one process group, and each of them alone: durations, losses, memory.

In every round each side makes one step; the order is turned round from one to the next, so that whatever else the
machine is doing hits all alike.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdp2kit import distributed
from fsdp2kit.bench.figures import Cost, barrier, provenance, slowest_rank
from fsdp2kit.bench.memory import PrivateMemory
from fsdp2kit.bench.sides import Side, Work, Workload, build_side
from fsdp2kit.distributed import World, max_over_ranks
from fsdp2kit.environment import end_process
from fsdp2kit.errors import UserError


@dataclass
class Course:
    """What one side did on this rank, step by step."""

    costs: list[Cost] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)

    def take_step(self, side: Side, *, device: torch.device) -> None:
        """One step, from a barrier until the device is idle. Every rank calls this."""
        side.prepare()
        barrier(device)
        started, cpu_started = time.perf_counter(), time.process_time()
        side.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.costs.append(Cost(time.perf_counter() - started, time.process_time() - cpu_started))
        self.work.append(side.outcome())

    def figures(self, *, skip: int) -> dict[str, list[Any]]:
        """Of the steps after the first ``skip``: seconds and CPU seconds of the slowest rank, and tokens.

        And losses and norms of all steps. Collective.
        """
        counted = self.work[skip:]
        return {
            "seconds": slowest_rank([cost.seconds for cost in self.costs])[skip:],
            "cpu_seconds": slowest_rank([cost.cpu_seconds for cost in self.costs])[skip:],
            "supervised_tokens": [work.supervised_tokens for work in counted],
            "input_tokens": [work.input_tokens for work in counted],
            "losses": [work.loss for work in self.work],
            "grad_norms": [work.grad_norm for work in self.work],
        }


def take_turns(sides: Mapping[str, Side], courses: Mapping[str, Course], rounds: int, *, world: World) -> None:
    """A step of each side in every round, in an order that is turned round from one to the next. Collective."""
    for number in range(rounds):
        order = list(sides)[:: 1 if number % 2 == 0 else -1]
        for name in order:
            courses[name].take_step(sides[name], device=world.device)
        if world.is_main and ((number + 1) % 10 == 0 or number + 1 == rounds):
            print(f"{number + 1} of {rounds} rounds", file=sys.stderr, flush=True)


def run_contest(names: list[str], workload: Workload, *, warmup: int) -> dict[str, Any]:
    """Train ``workload.steps`` steps on each of these sides, in turns. Every rank calls this.

    Args:
        warmup: steps at the start that do not count.

    Returns:
        For each side: what it ran, seconds and CPU seconds of each step that counts (of the slowest rank), its tokens
        and all its losses; of a side that is alone also its peak memory. And provenance.

    Raises:
        UserError: the model or the data cannot be read, or the sizes do not fit the ranks.
    """
    world = distributed.start()
    source = provenance(world)
    with tempfile.TemporaryDirectory() as folder:
        metrics_path = Path(folder) / "metrics.jsonl"
        sides = {name: build_side(name, workload, world=world, metrics_path=metrics_path) for name in names}
        courses = {name: Course() for name in names}
        with _Memory(world) as memory:
            take_turns(sides, courses, workload.steps, world=world)
        described = {name: side.describe() for name, side in sides.items()}
        for side in sides.values():
            side.stop()
    results = {name: {"ran": described[name], **courses[name].figures(skip=warmup)} for name in names}
    peak = max_over_ranks([float(memory.peak)])[0]
    if len(names) == 1:
        results[names[0]]["peak_bytes"] = peak
    return {"sides": results, "workload": asdict(workload), "warmup": warmup, "provenance": source}


class _Memory:
    """Peak memory during the steps: the allocator's on CUDA, all private memory of the process on a CPU."""

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._private = PrivateMemory()

    def __enter__(self) -> _Memory:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._private.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._device.type == "cuda":
            self.peak = torch.cuda.max_memory_allocated(self._device)
        else:
            self._private.__exit__()
            self.peak = self._private.highest


def main(file: Path) -> int:
    """One of the processes that `fsdp2kit.bench.peers` starts: an order is read, its result put in its place."""
    order = json.loads(file.read_text(encoding="utf-8"))
    try:
        result = run_contest(order["names"], Workload(**order["workload"]), warmup=order["warmup"])
    except UserError as problem:
        distributed.leave(problem)
    if os.environ["RANK"] == "0":
        file.write_text(json.dumps(result), encoding="utf-8")
    distributed.stop()
    return 0


if __name__ == "__main__":
    end_process(main(Path(sys.argv[1])))
