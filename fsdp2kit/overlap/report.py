"""The report: its figures, and what to try next, as keys of the TOML."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tomli

from fsdp2kit.config.schema import FSDPConfig
from fsdp2kit.errors import UserError
from fsdp2kit.overlap.events import BACKWARD, FORWARD
from fsdp2kit.overlap.split import MS, TIMES, Split, mean_of, split_step
from fsdp2kit.overlap.trace import RankTrace, read_traces

# The keys that say how often gradients are reduced.
_REDUCTION = ("strategy", "storage_dtype", "reduce_dtype", "reduce_every_micro_batch")
# Shares of the step. Above the first, exposed time is worth a setting; below the second, hiding it is not worth its
# memory. Between them there is no advice.
VISIBLE, HIDDEN = 0.03, 0.01
# The smallest shares of the step at which waiting, idling and host copies are mentioned.
WAITING, IDLE, HOST_COPIES = 0.05, 0.25, 0.05
# One rank is the slow one if it waits less than this part of what the others wait.
ONE_IS_BEHIND = 0.5


@dataclass(frozen=True)
class Settings:
    """The run's settings; the defaults if its ``config.toml`` is not beside the trace."""

    forward_prefetch: int = 0
    backward_prefetch: int = 1
    reshard_after_forward: bool | int = True
    reduce_every_micro_batch: bool = True
    micro_batch_size: int = 1
    micro_batches: int = 1
    """Micro-batches of a rank in a step."""
    offload: str = "none"


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
    settings: Settings
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
            "settings": asdict(self.settings),
            "advice": [{**asdict(one), "text": str(one)} for one in self.advice],
        }


def _split_json(split: Split) -> dict[str, Any]:
    def ms(of: object, *names: str) -> dict[str, float | None]:
        values = {f"{name}_ms": getattr(of, name) for name in names}
        return {name: None if value is None else value / MS for name, value in values.items()}

    return {
        **ms(split, *TIMES),
        "overlap": split.overlap,
        "collectives": [
            {"kind": kind, "phase": phase, **ms(row, "communication", "exposed", "waiting"), "count": row.count}
            for (kind, phase), row in split.collectives.items()
        ],
        "units": [
            {"unit": unit, "phase": phase, **ms(row, "compute", "communication", "exposed")}
            for (unit, phase), row in split.units.items()
        ],
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
    complete = [step for step in steps if step.is_complete] or steps
    means = mean_of([split for step in complete for split in step.ranks.values()])
    world_size, device = max(trace.world_size for trace in traces), traces[0].device
    settings = read_settings(path, world_size=world_size)
    by_rank = {
        trace.rank: mean_of(splits).waiting
        for trace in traces
        if (splits := [step.ranks[trace.rank] for step in complete if trace.rank in step.ranks])
    }
    return Report(
        path=str(path),
        device=device,
        world_size=world_size,
        missing_ranks=sorted(set(range(world_size)) - {trace.rank for trace in traces}),
        steps=steps,
        means=means,
        settings=settings,
        advice=advise(means, settings, device=device, waiting_by_rank=by_rank),
    )


def read_settings(path: Path, *, world_size: int = 1) -> Settings:
    """The settings of the run that a trace belongs to: its ``config.toml`` lies in or above the trace's directory."""
    folder = path if path.is_dir() else path.parent
    beside = [file for file in (folder / "config.toml", folder.parent / "config.toml") if file.is_file()]
    try:
        config = tomli.loads(beside[0].read_text(encoding="utf-8")) if beside else {}
    except tomli.TOMLDecodeError:  # somebody else's file
        config = {}
    # It may be another version's: a key that is missing, or of another type, takes the default.
    fsdp, train = config.get("fsdp", {}), config.get("train", {})
    keeps_whole = fsdp.get("strategy") in ("shard_grad_op", "hybrid_shard_zero2", "no_shard")
    given = {"reshard_after_forward": not keeps_whole, **fsdp, "micro_batch_size": train.get("micro_batch_size")}
    with contextlib.suppress(ValueError):
        section = FSDPConfig.model_validate({name: fsdp[name] for name in _REDUCTION if name in fsdp})
        given["reduce_every_micro_batch"] = section.accumulates_shards
    known = Settings(**{k: given[k] for k, v in vars(Settings()).items() if isinstance(given.get(k), type(v))})
    rows, cp = train.get("global_batch_size"), config.get("mesh", {}).get("cp", 1)
    if not (isinstance(rows, int) and isinstance(cp, int)):
        return known
    return replace(known, micro_batches=max(1, rows * cp // (world_size * known.micro_batch_size)))


def advise(
    mean: Split, settings: Settings, *, device: str, waiting_by_rank: Mapping[int, float | None]
) -> list[Advice]:
    """What to try, the most telling first.

    Args:
        waiting_by_rank: in nanoseconds a step; None: unknown.
    """
    if device == "cpu":
        why = "gloo: FSDP2 waits for a collective where it issues it, so prefetch changes nothing on a CPU"
        prefetch = [Advice("", "", why)]
    else:
        depths = {FORWARD: settings.forward_prefetch, BACKWARD: settings.backward_prefetch}
        prefetch = [one for phase, depth in depths.items() for one in _prefetch(mean, phase, depth)]
    advice = [*_waiting(mean, waiting_by_rank), *prefetch, *_others(mean, settings, device=device)]
    return advice or [Advice("", "", "nothing stands out: communication is neither exposed nor dearly hidden")]


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


def _prefetch(mean: Split, phase: str, depth: int) -> Iterator[Advice]:
    key, exposed = f"fsdp.{phase}_prefetch", _exposed(mean, phase, "all_gather")
    if exposed >= VISIBLE * mean.duration:
        why = f"{_share(exposed, mean)} of the step are exposed all-gathers of {phase}; one more unit is alive"
        yield Advice(key, str(depth + 1), why)
    elif depth and exposed < HIDDEN * mean.duration and ("all_gather", phase) in mean.collectives:
        why = f"{phase}'s all-gathers are hidden"
        if phase == BACKWARD and depth == 1:
            why = f"only where memory is short: {why}; with 0, one unit is alive instead of two, none gathered ahead"
        else:
            why += "; saves a unit's memory"
        yield Advice(key, str(depth - 1), why)


def _others(mean: Split, settings: Settings, *, device: str) -> Iterator[Advice]:
    """Settings that reduce communication if there is more than compute can hide, and those for a slow host."""
    visible = VISIBLE * mean.duration
    gathers = _exposed(mean, BACKWARD, "all_gather")
    reductions = _exposed(mean, BACKWARD, "reduce_scatter", "all_reduce")
    if gathers >= visible and settings.reshard_after_forward is not False:
        why = "backward then gathers nothing; every unit stays whole from forward to backward, so memory must allow it"
        yield Advice("fsdp.reshard_after_forward", "false", why)
    if reductions >= visible and settings.reduce_every_micro_batch and settings.micro_batches > 1:
        why = (
            f"{_share(reductions, mean)} of the step are exposed reductions; one a step is enough, where every rank "
            "has memory for whole gradients: 4 bytes a parameter in float32"
        )
        yield Advice("fsdp.reduce_every_micro_batch", "false", why)
    why = ""
    if mean.communication > mean.compute:
        why = "communication takes longer than compute, so no prefetch can hide it all"
    elif gathers + reductions + _exposed(mean, FORWARD, "all_gather") >= 2 * visible:
        why = "more compute to each collective, and fewer of them a step"
    if why:
        larger = str(2 * settings.micro_batch_size)
        yield Advice("train.micro_batch_size", larger, f"{why}; activations take twice as much")
    if mean.host_copies >= HOST_COPIES * mean.duration and settings.offload == "params":
        why = f"{_share(mean.host_copies, mean)} of the step are copies from and to the host with nothing beside them"
        yield Advice("fsdp.offload", '"none"', why)
    if device == "cuda" and mean.idle - mean.host_copies >= IDLE * mean.duration:
        why = f"the device has nothing to do for {_share(mean.idle, mean)} of the step: the host is too slow for it"
        yield Advice("compile.enabled", "true", f"{why}; larger micro-batches help as well")


def _exposed(mean: Split, phase: str, *kinds: str) -> float:
    return sum(mean.collectives[kind, phase].exposed for kind in kinds if (kind, phase) in mean.collectives)


def _share(part: float, mean: Split) -> str:
    return f"{100 * part / mean.duration:.0f} %"
