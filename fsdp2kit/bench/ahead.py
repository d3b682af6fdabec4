"""Rollouts made ahead (`rollout.ahead`) beside rollouts that each step waits for, with a slow reward function."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fsdp2kit import run
from fsdp2kit.bench.harness import speed, spread, take_turns
from fsdp2kit.config.rl_schema import RewardConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job import distributed
from fsdp2kit.job.distributed import World, gather_objects

_SLOW = """
import time

def slow(completions, seconds, **_):
    time.sleep(seconds)
    return [None] * len(completions)
"""
_OPTIONS = ("rollout.engine=vllm", "rollout.samples_every=0", "train.log_every=1", "eval.every=0")
_OPTIONS = (*_OPTIONS, "checkpoint.every=0", "checkpoint.export_hf=never", "wandb.mode=disabled")
_CALIBRATES = 6  # steps


def bench_ahead(
    world: World,
    toml: str,
    overrides: tuple[str, ...] = (),
    *,
    ahead: int = 2,
    rounds: int = 5,
    steps: int = 24,
    reward_seconds: float | None = None,
) -> dict[str, Any]:
    """Whole runs of a TOML with rollout.ahead beside the same with 0, in turns, another seed each round. Collective.

    An embedded engine stands for the server: it samples in the trainer's process, on the trainer's cores. A further
    reward function sleeps. The first and the last steps, which start and empty the queue of rounds, do not count.

    Args:
        toml: of recipe grpo.
        overrides: section.key=value, as for a run.
        ahead: batches of rollouts that are made ahead; one at least.
        rounds: runs of each kind; two at least.
        steps: of a run.
        reward_seconds: that the slow reward function sleeps; default: as long as a step takes without it.

    Raises:
        UserError: there are too few steps or rounds to compare.
    """
    if ahead < 1 or rounds < 2 or steps < 2 * ahead + 2:
        what = f"{rounds} rounds of {steps} steps with {ahead} batches ahead"
        raise UserError("bench ahead", what, f"--ahead is 1 at least, --rounds 2, --steps {2 * max(ahead, 1) + 2}")
    records: dict[str, list[list[dict[str, Any]]]] = {f"ahead = {ahead}": [], "ahead = 0": []}
    with _folder(world) as folder:
        if reward_seconds is None:
            found = _records(toml, [*overrides, f"train.steps={_CALIBRATES}"], folder / "calibrated")
            reward_seconds = float(np.mean([one["step_seconds"] for one in found[2:]]))

        def run_once(name: str) -> None:
            number = len(records[name])
            options = [*overrides, f"train.steps={steps}", f"run.seed={number}", f"rollout.{name.replace(' ', '')}"]
            records[name].append(
                _records(toml, options, folder / f"{name.split()[-1]}-{number}", sleeps=reward_seconds)
            )

        take_turns(records, run_once, rounds)
    rows = [_row(name, of_runs, skipped=ahead) for name, of_runs in records.items()]
    rows[0]["times_as_fast"] = speed(rows[0]["step"]["all"], rows[1]["step"]["all"])
    last, waiting = (np.array([_last_reward(one) for one in of_runs]) for of_runs in records.values())
    noise = 2 * float(np.sqrt((last.var(ddof=1) + waiting.var(ddof=1)) / rounds))
    differ = float(last.mean() - waiting.mean())
    curves = {name: np.mean([[one["reward"] for one in of] for of in runs], 0) for name, runs in records.items()}
    return {
        "rows": rows,
        "reward_curves": {name: curve.tolist() for name, curve in curves.items()},
        "notes": [
            f"the slow reward function sleeps {reward_seconds:.3g} s",
            f"rewards of the last third differ by {differ:+.3g}; two standard errors over seeds: {noise:.3g}",
        ],
        "checks": {"rewards_agree": abs(differ) <= noise},
        "bars": {"seconds a step": ["step"]},
    }


def _row(name: str, of_runs: Sequence[list[dict[str, Any]]], *, skipped: int) -> dict[str, Any]:
    """A side's figures, means over the steps of all its runs; ``step`` has each run's mean.

    Args:
        skipped: steps at both ends that do not count, and one more at the start, which warms up.
    """
    counted = [one[1 + skipped : -skipped] for one in of_runs]
    every = [record for one in counted for record in one]
    step = spread([float(np.mean([record["step_seconds"] for record in one])) for one in counted])
    row = {"name": name, "step": step, "steps_per_minute": 60 / step["median"]}
    for key in ("seconds/generate", "seconds/reward", "seconds/wait", "rollout/staleness"):
        row[key] = float(np.mean([record.get(key, 0.0) for record in every]))
    row |= {key: float(np.mean([one[key] for one in every])) for key in ("importance_weight", "importance_capped")}
    return {**row, "last_reward": float(np.mean([_last_reward(one) for one in of_runs]))}


def _last_reward(records: Sequence[dict[str, Any]]) -> float:
    """Mean reward of the last third of a run."""
    return float(np.mean([one["reward"] for one in records[-(len(records) // 3) :]]))


def _records(toml: str, overrides: Sequence[str], folder: Path, *, sleeps: float = 0.0) -> list[dict[str, Any]]:
    """The steps of a run. Collective.

    Args:
        sleeps: seconds of the slow reward function; 0: there is none.
    """
    with distributed.agreement():
        recipe, config = run.load(toml, [*_OPTIONS, *overrides, f"run.dir='{folder}'"])
        assert isinstance(config, recipe.Config)
        given: Any = config
        if sleeps:
            slow = RewardConfig(function=f"{folder.parent}/slow.py:slow", options={"seconds": sleeps}, weight=0.0)
            given = config.model_copy(update={"reward": [*given.reward, slow]})
    build = recipe.build_engine

    def build_engine(config: Any, *parts: Any, **named: Any) -> Any:
        embedded = config.rollout.model_copy(update={"engine": "transformers", "ahead": 0})
        return build(config.model_copy(update={"rollout": embedded}), *parts, **named)

    recipe.__dict__["build_engine"] = build_engine  # a module of this run's own
    with contextlib.redirect_stdout(sys.stderr):
        recipe.main(given)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@contextlib.contextmanager
def _folder(world: World) -> Iterator[Path]:
    """A folder that all ranks share while the block runs, with the slow function. Collective."""
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(tempfile.TemporaryDirectory()) if world.is_main else None
        folder = Path(gather_objects(mine)[0])
        if world.is_main:
            (folder / "slow.py").write_text(_SLOW, encoding="utf-8")
        yield folder
        gather_objects(None)  # all have read what they need
