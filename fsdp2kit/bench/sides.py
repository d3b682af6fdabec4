"""The sides of a comparison of training: one protocol, and how several of them are run beside each other.

Each side trains the same model with the same optimizer on the same data, and is driven a step at a time. In every
round each makes one step, and the order is turned round from one round to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from fsdp2kit.bench.handwritten import PlainLoop
from fsdp2kit.bench.harness import Cost, slowest_rank, speed, spread, take_turns, timed
from fsdp2kit.bench.memory import peak_of
from fsdp2kit.bench.ours import Ours, build_ours
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.schema import DataConfig
from fsdp2kit.distributed import World, gather_objects
from fsdp2kit.train.step import Batches


@dataclass(frozen=True)
class Work:
    """What a step did, over the whole job."""

    loss: float
    """Mean over the supervised tokens of all ranks."""
    supervised_tokens: int
    input_tokens: int
    """Without padding."""
    grad_norm: float | None = None
    """Before clipping; None where the side does not tell."""


class Side(Protocol):
    """One of the loops that are compared. Every rank calls each method."""

    def build(self) -> None:
        """Model and optimizer, on the device. Libraries that only this side needs are imported before."""

    def prepare(self) -> None:
        """What of the next step does not count, before the clock starts."""

    def step(self) -> None:
        """One optimizer step."""

    def outcome(self) -> Work:
        """What that step did, when the clock has stopped."""
        ...

    def describe(self) -> str:
        """What was really run, in words."""
        ...

    def stop(self) -> None:
        """End it."""


class OurSide(Side):
    """fsdp2kit's own loop: reading the batch, the collective of that, the step, the speeds, a record in a file.

    Args:
        batches: None: the data that ``config`` names.
        metrics_path: where the main rank writes its records.
    """

    _ours: Ours | None = None
    _record: Mapping[str, Any] = {}

    def __init__(
        self, config: TrainingConfig, *, world: World, batches: Batches | None = None, metrics_path: Path | None = None
    ) -> None:
        self._rows = (
            f"{'packed rows' if config.data.pack else 'one conversation a row, padded'} of {config.data.seq_len}"
        )
        path = metrics_path if world.is_main else None
        self._build = partial(build_ours, config, world=world, batches=batches, metrics_path=path)

    def build(self) -> None:
        self._ours = self._build()

    def step(self) -> None:
        assert self._ours is not None, "build it first"
        (self._record,) = self._ours.run(1)

    def outcome(self) -> Work:
        record = self._record
        return Work(record["loss"], record["tokens"], record["input_tokens"], record["grad_norm"])

    def describe(self) -> str:
        assert self._ours is not None, "build it first"
        mesh, attention, loss, *sharding, _ = self._ours.plan.describe()
        return "; ".join([*sharding, attention, loss, mesh, self._rows])

    def stop(self) -> None:
        if self._ours is not None:
            self._ours.metrics.close(ok=True)


class Synthetic(TrainingConfig):
    """fsdp2kit's config of random tokens in packed documents of random lengths, from ``seq_len`` / 8 tokens on."""

    data: DataConfig = DataConfig(format="synthetic")


class LoopSide(Side):
    """A plain loop on our batches, which are read outside the clock, as if workers had hidden that."""

    _loop: PlainLoop | None = None

    def __init__(self, build: Callable[[], PlainLoop], batches: Batches) -> None:
        self._build, self._batches = build, batches
        self._index, self._micro_batches, self._outcome = 0, [], (0.0, 0.0)

    def build(self) -> None:
        self._loop = self._build()

    def prepare(self) -> None:
        self._micro_batches = self._batches.batch(self._index)
        self._index += 1

    def step(self) -> None:
        assert self._loop is not None, "build it first"
        self._outcome = self._loop.step(
            [(micro.input_ids, micro.labels, micro.position_ids) for micro in self._micro_batches]
        )

    def outcome(self) -> Work:
        mine = [(micro.supervised_tokens, micro.input_tokens) for micro in self._micro_batches]
        counts = [count for rank in gather_objects(mine) for count in rank]
        loss, norm = self._outcome
        return Work(loss, sum(count[0] for count in counts), sum(count[1] for count in counts), norm)

    def describe(self) -> str:
        assert self._loop is not None, "build it first"
        return self._loop.describe()


@dataclass
class Course:
    """What one side did on this rank, step by step."""

    side: Side
    device: torch.device
    costs: list[Cost] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    peak_bytes: int | None = None

    def warm_up(self, steps: int) -> None:
        """Build the side, and take its peak memory in its first steps. Collective."""

        def take_steps(built: None) -> None:
            for _ in range(steps):
                self.take_step()

        self.peak_bytes = peak_of(self.side.build, take_steps, device=self.device)[1]

    def take_step(self) -> None:
        """One step, from a barrier until the device is idle. Collective."""
        self.side.prepare()
        self.costs.append(timed(self.side.step, device=self.device)[0])
        self.work.append(self.side.outcome())

    def figures(self, *, skip: int) -> dict[str, Any]:
        """What was run; durations and tokens of the steps after the first ``skip``; losses and norms of all steps.

        Durations and peak memory are of the slowest and the largest rank. Collective.
        """
        counted, peaks = self.work[skip:], gather_objects(self.peak_bytes)
        return {
            "ran": self.side.describe(),
            "seconds": slowest_rank([cost.seconds for cost in self.costs])[skip:],
            "cpu_seconds": slowest_rank([cost.cpu_seconds for cost in self.costs])[skip:],
            "supervised_tokens": [work.supervised_tokens for work in counted],
            "input_tokens": [work.input_tokens for work in counted],
            "losses": [work.loss for work in self.work],
            "grad_norms": [work.grad_norm for work in self.work],
            "first_step_seconds": self.costs[0].seconds,
            "peak_bytes": None if None in peaks else max(peaks),
        }


def run_sides(sides: Mapping[str, Side], *, rounds: int, warmup: int, world: World) -> dict[str, dict[str, Any]]:
    """Build each side and make ``warmup`` steps with it, while the others are idle; then ``rounds`` steps in turns.

    Peak memory is taken in the first steps, above what the process had before the side was built. The first side is
    charged with what a process needs once (buffers of the backend, say). Every rank calls this.

    Returns:
        `Course.figures` of each side, without the first ``warmup`` steps.
    """
    courses = {name: Course(side, world.device) for name, side in sides.items()}
    try:
        for course in courses.values():
            course.warm_up(warmup)
        take_turns({name: course.take_step for name, course in courses.items()}, rounds, say=world.is_main)
        return {name: course.figures(skip=warmup) for name, course in courses.items()}
    finally:
        for side in sides.values():
            side.stop()


def pair_row(name: str, ours: dict[str, Any], other: dict[str, Any], *, tolerance: float | None) -> dict[str, Any]:
    """One row of a comparison: speeds in supervised tokens a second, steps, peak memory, and whether losses agree.

    Args:
        name: of the comparison.
        ours: our side's figures, as `run_sides` returns them.
        other: the other side's.
        tolerance: the largest relative difference of losses, at any step, that is called agreement; None where the
            batches are not the same.
    """
    work = ours["supervised_tokens"], other["supervised_tokens"]
    steps, peaks = [spread(side["seconds"]) for side in (ours, other)], [ours["peak_bytes"], other["peak_bytes"]]
    rates = [sum(done) / len(done) / step["median"] for done, step in zip(work, steps, strict=True)]
    difference = None if tolerance is None else worst_difference(ours["losses"], other["losses"])
    return {
        "beside": name,
        "times_as_fast": speed(ours["seconds"], other["seconds"], work=work),
        "by_cpu_time": speed(ours["cpu_seconds"], other["cpu_seconds"], work=work),
        "our_tokens_per_second": rates[0],
        "its_tokens_per_second": rates[1],
        "our_step": steps[0],
        "its_step": steps[1],
        "our_peak_bytes": peaks[0],
        "its_peak_bytes": peaks[1],
        "memory_ratio": None if None in peaks else peaks[0] / peaks[1],
        "losses_differ_by": difference,
        "losses_agree": None if difference is None or tolerance is None else difference <= tolerance,
    }


def worst_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


PAIR_BARS = {
    "supervised tokens/s": ["our_tokens_per_second", "its_tokens_per_second"],
    "peak memory a rank (bytes)": ["our_peak_bytes", "its_peak_bytes"],
}
"""What a figure of such rows shows."""
