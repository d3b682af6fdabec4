"""The sides of a comparison of training: ours, a plain loop's, and how pairs of them run beside each other.

Each side trains the same model with the same optimizer on the same data, one step at a time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from fsdp2kit.bench.handwritten import PlainLoop
from fsdp2kit.bench.harness import Side, run_sides, speed, spread
from fsdp2kit.checkpoint.state import fill_weights
from fsdp2kit.config import TrainingConfig, load_config
from fsdp2kit.config.schema import ProfileConfig
from fsdp2kit.data.build import build_data
from fsdp2kit.job.distributed import World, gather_objects
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.model.build import build_model
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.parity.engine import Sharded

PAIR_BARS = {
    "supervised tokens/s": ["our_tokens_per_second", "its_tokens_per_second"],
    "peak memory a rank (bytes)": ["our_peak_bytes", "its_peak_bytes"],
}


@dataclass(frozen=True)
class Work:
    """What a step did, over the whole job."""

    loss: float
    """Mean over the supervised tokens of all ranks."""
    supervised_tokens: int
    input_tokens: int
    """Without padding."""
    grad_norm: float | None = None
    """Before clipping; None if the side does not tell."""


class OurSide(Side):
    """fsdp2kit's own loop: reading the batch, agreeing on it, the step, the speeds, a record in a file."""

    def __init__(self, config: TrainingConfig, *, world: World, fill: Any = fill_weights) -> None:
        self._config, self._world, self._fill = config.model_copy(update={"profile": ProfileConfig()}), world, fill
        self._mesh = build_mesh(config.mesh, config.fsdp, world=world)
        self._batches, _ = read_data(config, dp_rank=self._mesh.dp_rank, dp_size=self._mesh.sizes.dp)
        self._folder = tempfile.TemporaryDirectory()

    def build(self) -> None:
        self._run = Sharded(self._config, world=self._world, mesh=self._mesh, fill=self._fill)
        metrics = Path(self._folder.name, "metrics.jsonl") if self._world.is_main else None
        self._run.start(self._config.train.total_steps(self._batches.steps_per_epoch), metrics=metrics)

    def step(self) -> None:
        """All of `train` for one step: the batch and its collective, the step, throughput, and a record."""
        self._run.train(self._batches, steps=1)

    def outcome(self) -> Work:
        record = self._run.records[-1]
        return Work(record["loss"], record["tokens"], record["input_tokens"], record["grad_norm"])

    def describe(self) -> str:
        mesh, attention, loss, *sharding, _ = self._run.plan.describe()
        rows = "packed rows" if self._config.data.pack else "one conversation a row, padded"
        return "; ".join([*sharding, attention, loss, mesh, f"{rows} of {self._config.data.seq_len}"])

    def stop(self) -> None:
        self._folder.cleanup()


class LoopSide(Side):
    """A plain data-parallel loop on our batches. Reading them is not timed, as if workers had hidden it."""

    def __init__(self, build: Callable[[], PlainLoop], config: TrainingConfig, *, world: World) -> None:
        self._build, self._index = build, 0
        self._batches, _ = read_data(config, dp_rank=world.rank, dp_size=world.size)

    def build(self) -> None:
        self._loop = self._build()

    def prepare(self) -> None:
        self._micro_batches = self._batches.batch(self._index)
        self._index += 1

    def step(self) -> None:
        batches = [(micro.input_ids, micro.labels, micro.position_ids) for micro in self._micro_batches]
        self._loss, self._norm = self._loop.step(batches)

    def outcome(self) -> Work:
        mine = [(micro.supervised_tokens, micro.input_tokens) for micro in self._micro_batches]
        supervised, tokens = zip(*(count for rank in gather_objects(mine) for count in rank), strict=True)
        return Work(self._loss, sum(supervised), sum(tokens), self._norm)

    def describe(self) -> str:
        return self._loop.describe()


def bench_config(values: Mapping[str, Any], *, overrides: Sequence[str] = ()) -> TrainingConfig:
    """The config of a comparison: ``values`` as a user would write them into a TOML, at a constant learning rate."""
    ours = {"recipe": "bench", "lr_schedule": {"name": "constant"}, "wandb": {"mode": "disabled"}}
    return load_config(TrainingConfig, {**ours, **values}, source=Path.cwd() / "bench.toml", overrides=overrides)


def read_data(config: TrainingConfig, *, dp_rank: int, dp_size: int) -> tuple[Any, Any]:
    """This data-parallel rank's loader of the config's data, and the tokenizer. Collective."""
    tokenizer = None if config.data.format == "synthetic" else build_tokenizer(config.model)
    share = SimpleNamespace(dp_rank=dp_rank, sizes=SimpleNamespace(dp=dp_size))
    return build_data(config, tokenizer=tokenizer, model=build_model(config.model), mesh=share).loader, tokenizer


def compare(
    pairs: Mapping[str, tuple[str, str, float | None]],
    build: Callable[[str], Side],
    *,
    rounds: int,
    warmup: int,
    world: World,
) -> Iterator[dict[str, Any]]:
    """Run one pair of sides after the other, and give the result so far after each. Collective.

    Args:
        pairs: by the comparison's name: our side, the other, and the largest relative difference of a step's losses
            that passes as agreement; None if the batches are not the same.
        build: builds the side of a name.
    """
    rows: list[dict[str, Any]] = []
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for name, (ours, other, tolerance) in pairs.items():
        # A trainer of transformers sets variables that must not change how the next pair is built.
        with mock.patch.dict(os.environ):
            sides = {ours: build(ours), other: build(other)}
            found[name] = train_sides(sides, rounds=rounds, warmup=warmup, world=world)
        rows.append(pair_row(name, found[name][ours], found[name][other], tolerance=tolerance))
        notes = dict.fromkeys(f"{side} ran {one['ran']}" for pair in found.values() for side, one in pair.items())
        agree = all(row["losses_agree"] is not False for row in rows)
        checks = {"losses_agree": agree}
        yield {"rows": rows, "pairs": found, "notes": [*notes], "checks": checks, "bars": PAIR_BARS}


def train_sides(sides: Mapping[str, Side], *, rounds: int, warmup: int, world: World) -> dict[str, dict[str, Any]]:
    """`run_sides` of loops; instead of outcomes it has the tokens of each round, and losses and norms of all steps."""
    found = run_sides(sides, rounds=rounds, warmup=warmup, world=world)
    for figures in found.values():
        work: list[Work] = figures.pop("outcomes")
        figures["supervised_tokens"] = [one.supervised_tokens for one in work[warmup:]]
        figures["input_tokens"] = [one.input_tokens for one in work[warmup:]]
        figures |= {"losses": [one.loss for one in work], "grad_norms": [one.grad_norm for one in work]}
    return found


def pair_row(name: str, ours: dict[str, Any], other: dict[str, Any], *, tolerance: float | None) -> dict[str, Any]:
    """One row of a comparison: speeds in supervised tokens a second, steps, peak memory, and whether losses agree.

    Args:
        name: of the comparison.
        ours: our side's figures, of `train_sides`; other: the other side's.
        tolerance: of the losses, as in `compare`.
    """
    work = ours["supervised_tokens"], other["supervised_tokens"]
    row: dict[str, Any] = {
        "beside": name,
        "times_as_fast": speed(ours["seconds"], other["seconds"], work=work),
        "by_cpu_time": speed(ours["cpu_seconds"], other["cpu_seconds"], work=work),
    }
    for whose, side in (("our", ours), ("its", other)):
        step, tokens = spread(side["seconds"]), side["supervised_tokens"]
        row[f"{whose}_tokens_per_second"] = sum(tokens) / len(tokens) / step["median"]
        row |= {f"{whose}_step": step, f"{whose}_peak_bytes": side["peak_bytes"]}
    peaks = ours["peak_bytes"], other["peak_bytes"]
    row["memory_ratio"] = None if None in peaks else peaks[0] / peaks[1]
    row |= {"losses_differ_by": None, "losses_agree": None}
    if tolerance is not None:
        row["losses_differ_by"] = _worst_difference(ours["losses"], other["losses"])
        row["losses_agree"] = row["losses_differ_by"] <= tolerance
        if None not in (*ours["grad_norms"], *other["grad_norms"]):
            row["grad_norms_differ_by"] = _worst_difference(ours["grad_norms"], other["grad_norms"])
    return row


def _worst_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
