"""Runs of a recipe in workers: their output and their records."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fsdp2kit.errors import UserError
from fsdp2kit.run import load
from tests.workers import WorkerPool

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


def run_all(toml: str, runs: Sequence[Sequence[str]]) -> list[str]:
    return [run_recipe(toml, overrides) for overrides in runs]


def runner(pool: WorkerPool, toml: Path) -> Run:
    """A function of a directory, a number of ranks and overrides to the run's records, each with what rank 0 said."""

    def run_into(directory: Path, size: int, *overrides: str) -> list[dict[str, Any]]:
        said = pool.run(size, run_recipe, str(toml), [f"run.dir='{directory}'", *overrides])[0]
        assert not said.startswith("error"), said
        lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        return [{**line, "said": said} for line in lines]

    return run_into
