"""The report: its figures, and what to try next, as keys of the TOML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tomli

from fsdp2kit.config.schema import FSDPConfig
from fsdp2kit.errors import UserError
from fsdp2kit.files.local import read_text
from fsdp2kit.overlap.events import BACKWARD, FORWARD
from fsdp2kit.overlap.split import MS, TIMES, Split, mean_of, split_step
from fsdp2kit.overlap.trace import RankTrace, read_traces

# The smallest shares of the step at which exposed time, waiting and idling are worth advice.
EXPOSED, WAITING, IDLE = 0.03, 0.05, 0.25
# One rank is the slow one if it waits less than this part of what the others wait.
ONE_IS_BEHIND = 0.5


@dataclass(frozen=True)
class Settings:
    """The run's settings; the defaults if its ``config.toml`` is not beside the trace."""

    fsdp: FSDPConfig = field(default_factory=FSDPConfig)
    micro_batch_size: int = 1
    micro_batches: int = 1
    """Micro-batches of a rank in a step."""


@dataclass(frozen=True)
class Advice:
    """A thing to try."""

    key: str
    """A key of the TOML; "" where no key helps."""
    value: str
    """In TOML syntax."""
    why: str

    def __str__(self) -> str:
        return f"{self.key} = {self.value}: {self.why}" if self.key else self.why


@dataclass(frozen=True)
class StepReport:
    """One step, of every rank."""

    number: int
    is_complete: bool
    ranks: dict[int, Split]

    @property
    def slowest_rank(self) -> int:
        """The rank that waits least; if waiting is unknown, the one that computes longest."""
        waits = {rank: split.waiting for rank, split in self.ranks.items() if split.waiting is not None}
        if len(waits) == len(self.ranks):
            return min(waits, key=waits.__getitem__)
        return max(self.ranks, key=lambda rank: self.ranks[rank].compute)


@dataclass(frozen=True)
class Report:
    """The report of one run's traces."""

    path: str
    device: str
    world_size: int
    missing_ranks: list[int]
    steps: list[StepReport]
    means: Split
    """Over the complete steps and all ranks; over all steps where none is complete."""
    advice: list[Advice]

    def as_json(self) -> dict[str, Any]:
        """The report as nested plain values; times in milliseconds."""
        return {
            **{name: getattr(self, name) for name in ("path", "device", "world_size", "missing_ranks")},
            "steps": [
                {
                    "step": step.number,
                    "is_complete": step.is_complete,
                    "slowest_rank": step.slowest_rank,
                    "ranks": [{"rank": rank, **_split_json(split)} for rank, split in step.ranks.items()],
                }
                for step in self.steps
            ],
            "mean": _split_json(self.means),
            "advice": [{**asdict(one), "text": str(one)} for one in self.advice],
        }


def _split_json(split: Split) -> dict[str, Any]:
    times = {name: getattr(split, name) for name in TIMES}
    return {
        **{f"{name}_ms": None if time is None else time / MS for name, time in times.items()},
        "overlap": split.overlap,
        "collectives": [
            {"kind": kind, "phase": phase, "exposed_ms": exposed / MS}
            for (kind, phase), exposed in split.collectives.items()
        ],
        "units": [{"unit": unit, "exposed_ms": exposed / MS} for unit, exposed in split.units.items()],
    }


def build_report(path: str | Path, traces: Sequence[RankTrace] | None = None) -> Report:
    """Read the traces of a run directory, a ``trace`` directory or a file, and split every step of every rank.

    Args:
        traces: the result of `read_traces`, if the caller has it already.

    Raises:
        UserError: there is no trace, or one is damaged.
    """
    path = Path(path)
    traces = read_traces(path) if traces is None else traces
    steps = []
    for number in sorted({step.number for trace in traces for step in trace.steps}):
        found = [(trace, step) for trace in traces for step in trace.steps if step.number == number]
        ranks = {trace.rank: split_step(trace, step) for trace, step in found}
        steps.append(StepReport(number, all(step.is_complete for _, step in found), ranks))
    if not steps:
        raise UserError(str(path), "holds no event of a step", "trace at least one step")
    by_rank: dict[int, list[Split]] = {}
    for step in [step for step in steps if step.is_complete] or steps:
        for rank, split in step.ranks.items():
            by_rank.setdefault(rank, []).append(split)
    means = mean_of([split for splits in by_rank.values() for split in splits])
    waiting = {rank: mean_of(splits).waiting for rank, splits in by_rank.items()}
    world_size, device = max(trace.world_size for trace in traces), traces[0].device
    settings = read_settings(path, world_size=world_size)
    return Report(
        path=str(path),
        device=device,
        world_size=world_size,
        missing_ranks=sorted(set(range(world_size)) - {trace.rank for trace in traces}),
        steps=steps,
        means=means,
        advice=advise(means, settings, device=device, waiting_by_rank=waiting),
    )


def read_settings(path: Path, *, world_size: int = 1) -> Settings:
    """The settings of the run that a trace belongs to: its ``config.toml`` lies in or above the trace's directory."""
    folder = path.resolve() if path.is_dir() else path.resolve().parent
    above = folder.parent.parent if folder.name.startswith("step-") else folder.parent
    file = next((file for at in (folder, above) if (file := at / "config.toml").is_file()), None)
    try:
        config = tomli.loads(read_text(file)) if file else {}
        train, cp = config.get("train", {}), config.get("mesh", {}).get("cp", 1)
        size = train.get("micro_batch_size", 1)
        count = train.get("global_batch_size", 1) * cp // (world_size * size)
        return Settings(FSDPConfig.model_validate(config.get("fsdp", {})), size, max(1, count))
    except (AttributeError, TypeError, ValueError):  # another version's file, or somebody else's
        return Settings()


def advise(
    mean: Split, settings: Settings, *, device: str, waiting_by_rank: Mapping[int, float | None]
) -> list[Advice]:
    """What to try, the most telling first.

    Args:
        waiting_by_rank: in nanoseconds a step; None: unknown.
    """
    advice = [*_waiting(mean, waiting_by_rank), *_settings(mean, settings, device=device)]
    return advice or [Advice("", "", "nothing stands out: little communication is exposed")]


def _waiting(mean: Split, by_rank: Mapping[int, float | None]) -> Iterator[Advice]:
    if mean.waiting is None or mean.waiting < WAITING * mean.duration:
        return
    told = f"{_share(mean.waiting, mean)} of the step is waiting for a slower rank, which no setting of FSDP mends"
    cause = "they are slow by turns; look at uneven rows (data.pack) and at the machine's load"
    waits = {rank: waiting for rank, waiting in by_rank.items() if waiting is not None}
    if 1 < len(waits) == len(by_rank):
        slowest = min(waits, key=waits.__getitem__)
        others = [waiting for rank, waiting in waits.items() if rank != slowest]
        # The slow rank waits little itself; where all wait alike, they take turns.
        if waits[slowest] < ONE_IS_BEHIND * sum(others) / len(others):
            cause = f"it is rank {slowest}; look at its device and at what else runs there"
    yield Advice("", "", f"{told}: {cause}")


def _settings(mean: Split, settings: Settings, *, device: str) -> Iterator[Advice]:
    """Settings that hide communication or reduce it, and one for a slow host."""
    fsdp, exposed = settings.fsdp, mean.collectives
    gathers = {phase: exposed.get(("all_gather", phase), 0.0) for phase in (FORWARD, BACKWARD)}
    reductions = sum(exposed.get((kind, BACKWARD), 0.0) for kind in ("reduce_scatter", "all_reduce"))
    visible = EXPOSED * mean.duration
    if device == "cpu":
        why = "gloo: FSDP2 waits for a collective where it issues it, so prefetch changes nothing on a CPU"
        yield Advice("", "", why)
    for phase, depth in ((FORWARD, fsdp.forward_prefetch), (BACKWARD, fsdp.backward_prefetch)):
        if device == "cuda" and gathers[phase] >= visible:
            why = f"{_share(gathers[phase], mean)} of the step are exposed all-gathers of {phase}"
            yield Advice(f"fsdp.{phase}_prefetch", str(depth + 1), f"{why}; one more unit is alive")
    frees = fsdp.reshard_after_forward
    if frees is None:
        frees = fsdp.strategy in ("full_shard", "hybrid_shard")
    if frees is not False and gathers[BACKWARD] >= visible:
        why = "backward then gathers nothing; every unit stays whole from forward to backward, so memory must allow it"
        yield Advice("fsdp.reshard_after_forward", "false", why)
    if reductions >= visible and fsdp.accumulates_shards and settings.micro_batches > 1:
        why = (
            f"{_share(reductions, mean)} of the step are exposed reductions; one a step is enough, where every rank "
            "has memory for whole gradients: 4 bytes a parameter in float32"
        )
        yield Advice("fsdp.reduce_every_micro_batch", "false", why)
    if mean.communication > mean.compute or reductions + sum(gathers.values()) >= 2 * visible:
        why = "more compute to each collective, and fewer of them a step; activations take twice as much"
        if settings.micro_batches % 2:
            why += ", and train.global_batch_size has to grow with it"
        yield Advice("train.micro_batch_size", str(2 * settings.micro_batch_size), why)
    if device == "cuda" and fsdp.offload == "none" and mean.idle >= IDLE * mean.duration:
        why = f"the device has nothing to do for {_share(mean.idle, mean)} of the step: the host is too slow for it"
        yield Advice("compile.enabled", "true", f"{why}; larger micro-batches help as well")


def _share(part: float, mean: Split) -> str:
    return f"{100 * part / mean.duration:.0f} %"
