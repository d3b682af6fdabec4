"""Runs of a recipe in workers: their output and their records."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fsdp2kit.errors import UserError
from fsdp2kit.run import load
from tests.support.workers import WorkerPool

DEMO = Path(__file__).parents[2] / "toml" / "demo"

Run = Callable[..., list[dict[str, Any]]]


def run_recipe(toml: str, overrides: Sequence[str]) -> str:
    """The recipe's output, or the line with which it refuses."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            recipe, config = load(toml, overrides)
            recipe.main(config)
        except UserError as error:
            return f"error: {error}"
    return said.getvalue()


def _run_all(toml: str, runs: Sequence[Sequence[str]]) -> list[str]:
    return [run_recipe(toml, overrides) for overrides in runs]


def assert_refused(
    pool: WorkerPool, toml: Path, mistakes: Mapping[tuple[str, ...], str], folder: Path, *, size: int = 2
) -> None:
    """A run with each of these overrides ends in one line, which says this."""
    runs = [[*overrides, f"run.dir='{folder / str(number)}'"] for number, overrides in enumerate(mistakes)]
    lines = pool.run(size, _run_all, str(toml), runs)[0]
    for (overrides, says), said in zip(mistakes.items(), lines, strict=True):
        assert said.startswith("error: "), overrides
        assert says in said, (overrides, said)
        assert "\n" not in said
        assert said.count("; ") >= 1, "where: what; what to do"


def runner(pool: WorkerPool, toml: Path) -> Run:
    """A function of a directory, a number of ranks and overrides to the run's records, each with what rank 0 said."""

    def run_into(directory: Path, size: int, *overrides: str) -> list[dict[str, Any]]:
        said = pool.run(size, run_recipe, str(toml), [f"run.dir='{directory}'", *overrides])[0]
        assert not said.startswith("error"), said
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return [{**line, "said": said} for line in lines]

    return run_into


def resume(run: Run, checkpoint: Path, folder: Path, size: int, *overrides: str) -> list[dict[str, Any]]:
    """The records of a run in ``folder`` that goes on from a copy of a checkpoint."""
    shutil.copytree(checkpoint, folder / "checkpoints" / checkpoint.name)
    return run(folder, size, *overrides)


def losses(directory: Path) -> list[float]:
    """The loss of each step of a run."""
    return [json.loads(line)["loss"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def write_run(
    folder: Path,
    *,
    model: Path | None = None,
    data: Path = DEMO / "chat.jsonl",
    recipe: str = "sft",
    seq_len: int = 64,
    steps: int = 6,
    lr: float = 2e-4,
    checkpoint: str = "every = 3, keep = 9",
    more: str = "",
) -> Path:
    """Write ``folder / run.toml``: steps in float32 on the demo's conversations, with checkpoints.

    Args:
        model: its directory, ``folder`` itself unless it is given.
        checkpoint: keys of that section.
        more: lines of TOML.
    """
    path = folder / "run.toml"
    path.write_text(
        f"""
        recipe = "{recipe}"
        model.path = "{model or folder}"
        fsdp.param_dtype = "float32"
        data = {{ path = "{data}", seq_len = {seq_len} }}
        train = {{ steps = {steps}, global_batch_size = 4 }}
        optimizer.lr = {lr}
        checkpoint = {{ {checkpoint} }}
        wandb.mode = "disabled"
        {more}
        """,
        encoding="utf-8",
    )
    return path
