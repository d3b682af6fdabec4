"""Metrics to the console, to metrics.jsonl and to Weights & Biases, behind one call."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from fsdp2kit.config.schema import WandbConfig
from fsdp2kit.train.rundir import free_path
from fsdp2kit.train.wandb_run import WandbRun, start_wandb


def build_metrics(
    wandb_section: WandbConfig,
    *,
    run_dir: Path,
    is_main: bool,
    config: Mapping[str, Any],
    total_steps: int,
    resume_step: int,
    wandb_id: str | None,
) -> Metrics:
    """The run's metrics; on ranks other than the main one, an object that does nothing.

    ``run_dir`` must exist. Lines that its ``metrics.jsonl`` has after ``resume_step`` (all of them when that is 0) are
    moved to ``metrics.after-step-<resume_step>.jsonl``, so that each step has one line.

    Args:
        wandb_section: ``[wandb]``.
        run_dir: the run directory.
        is_main: whether this rank logs.
        config: the resolved config, for wandb.
        total_steps: of the whole run, for the progress line.
        resume_step: the last step that is already done; 0 at the start.
        wandb_id: the wandb run to continue; None starts a new one.
    """
    if not is_main:
        return Metrics(console=None, lines=None, wandb=None, wandb_id=wandb_id)
    console = _build_console(total_steps, resume_step)
    path = run_dir / "metrics.jsonl"
    if aside := move_aside(path, resume_step=resume_step):
        console.message(f"metrics of an earlier attempt after step {resume_step} are kept in {aside}")
    samples = run_dir / "samples.jsonl"
    move_aside(samples, resume_step=resume_step)
    lines = JsonLines(path)
    wandb = start_wandb(wandb_section, run_dir=run_dir, config=config, wandb_id=wandb_id, message=console.message)
    return Metrics(console=console, lines=lines, wandb=wandb, wandb_id=wandb.id, samples=samples)


class Metrics:
    """One call, three places. Use it in a ``with``, which closes it, or `close` it in a ``finally``."""

    def __init__(
        self,
        *,
        console: Console | None,
        lines: JsonLines | None,
        wandb: WandbRun | None,
        wandb_id: str | None,
        samples: Path | None = None,
    ) -> None:
        self._console, self._lines, self._wandb, self._samples = console, lines, wandb, samples
        self.wandb_id = wandb_id
        """Id of the wandb run, to be kept in the checkpoint; None without one."""

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close(ok=kind is None)

    def log(self, record: Mapping[str, Any]) -> None:
        """Log one step. The keys are those of DESIGN's "metrics.jsonl keys"; ``step`` is required."""
        record = {key: _plain(value) for key, value in record.items()}
        if self._lines is not None:
            self._lines.write(record)  # first: it is the record that counts
        if self._console is not None:
            self._console.log(record)
        if self._wandb is not None:
            self._wandb.log(record)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Keep what the model answered after a step, in ``samples.jsonl`` and as a table in wandb."""
        if self._samples is not None:
            with contextlib.closing(JsonLines(self._samples)) as lines:
                for sample in samples:
                    lines.write({"step": step, **sample})
        if self._wandb is not None:
            self._wandb.log_samples(step, samples)

    def message(self, text: str) -> None:
        """Print a line, above the progress line where there is one."""
        if self._console is not None:
            self._console.message(text)

    def close(self, ok: bool) -> None:
        """Finish: ``ok`` is whether the run succeeded. A second call does nothing."""
        if self._wandb is not None:
            self._wandb.close(ok)
        if self._console is not None:
            self._console.close()
        if self._lines is not None:
            self._lines.close()
        self._console = self._lines = self._wandb = None


class JsonLines:
    """A file of one JSON object a line, appended to and flushed at every line."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; a number that JSON does not have (NaN, infinity) becomes null."""
        finite = {key: None if _is_nonfinite(value) else value for key, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def move_aside(path: Path, *, resume_step: int) -> Path | None:
    """Leave in a metrics file only the whole lines of steps ≤ ``resume_step``; at 0, none.

    The other lines, a torn last one among them, go to ``<stem>.after-step-000120.jsonl``, with a number where that
    is taken.

    Returns:
        The file that took them; None when there was nothing to move.
    """
    if not path.exists():
        return None
    lines = path.read_bytes().splitlines(keepends=True)
    stays = [resume_step > 0 and _belongs(line, resume_step) for line in lines]
    kept = [line for line, stay in zip(lines, stays, strict=True) if stay]
    moved = [line for line, stay in zip(lines, stays, strict=True) if not stay]
    if kept and not kept[-1].endswith(b"\n"):
        kept[-1] += b"\n"
    aside = None
    if moved:
        stem = f"{path.stem}.after-step-{resume_step:06d}"
        aside = path.with_name(f"{stem}.jsonl")
        if aside.exists():
            aside = free_path(path.parent, stem, ".jsonl", first=2)
        _write_durably(aside, moved, mode="xb")
    if kept != lines:
        # Only once the moved lines are safe; killed in between, a line is in both files rather than in none.
        beside = path.with_name(f".{path.name}.partial")
        _write_durably(beside, kept, mode="wb")
        beside.replace(path)
    return aside


def format_record(record: Mapping[str, Any], *, total_steps: int, eta_seconds: float | None) -> str:
    """One console line: ``step  12/100  loss 2.3456  grad_norm 1.234  lr 1.00e-05  tokens/s   1,234  …``."""
    parts = [f"step {record['step']:>{len(str(total_steps))}}/{total_steps}"]
    for key, name, form in (
        ("loss", "loss", ".4f"),
        ("eval_loss", "eval_loss", ".4f"),
        ("grad_norm", "grad_norm", ".3f"),
        ("lr", "lr", ".2e"),
        ("tokens_per_second", "tokens/s", ">7,.0f"),
        ("mfu", "mfu", ".1%"),
    ):
        if record.get(key) is not None:
            parts.append(f"{name} {record[key]:{form}}")
    if record.get("memory_gib") is not None:
        parts.append(f"memory {record['memory_gib']:.1f} GiB")
    if eta_seconds is not None:
        parts.append(f"eta {format_seconds(eta_seconds)}")
    return "  ".join(parts)


def format_seconds(seconds: float) -> str:
    """``45s``, ``1m20s``, ``3h05m``, ``2d04h``."""
    total = round(seconds)
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if days:
        return f"{days}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{minutes % 60:02d}m"
    return f"{minutes}m{total % 60:02d}s" if minutes else f"{total}s"


class Console(Protocol):
    """Where a person looks."""

    def log(self, record: Mapping[str, Any]) -> None: ...

    def message(self, text: str) -> None: ...

    def close(self) -> None: ...


class _Eta:
    """Seconds that the remaining steps will take, by the wall clock: evaluations and checkpoints count as well."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._first: tuple[int, float] | None = None

    def after(self, record: Mapping[str, Any]) -> float | None:
        step, now = record["step"], time.monotonic()
        if self._first is None:
            self._first = (step, now)  # the first step compiles and warms up: the clock starts after it
        first_step, since = self._first
        pace = (now - since) / (step - first_step) if step > first_step else record.get("step_seconds")
        return None if pace is None else pace * max(0, self._total - step)


# The reader of the console has left, its disk is full, or it is closed: training goes on, and its record is in a file.
_LOST = OSError, ValueError


class _PlainConsole:
    def __init__(self, total_steps: int) -> None:
        self._total, self._eta = total_steps, _Eta(total_steps)

    def log(self, record: Mapping[str, Any]) -> None:
        self.message(format_record(record, total_steps=self._total, eta_seconds=self._eta.after(record)))

    def message(self, text: str) -> None:
        with contextlib.suppress(*_LOST):
            print(text, flush=True)

    def close(self) -> None:
        pass


class _ProgressConsole:
    """A rich progress line. It appears with the first record: until then, and after `close`, lines are plain."""

    def __init__(self, total_steps: int, resume_step: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._total, self._eta = total_steps, _Eta(total_steps)
        columns = BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)
        self._progress = Progress(*columns, auto_refresh=False)
        self._task = self._progress.add_task("", total=total_steps, completed=resume_step)

    def log(self, record: Mapping[str, Any]) -> None:
        with contextlib.suppress(*_LOST):
            self._progress.start()
        line = format_record(record, total_steps=self._total, eta_seconds=self._eta.after(record))
        if record.get("eval_loss") is not None:
            self.message(line)  # rare, and wanted after the progress line has moved on
        with contextlib.suppress(*_LOST):
            self._progress.update(self._task, completed=record["step"], description=line, refresh=True)

    def message(self, text: str) -> None:
        with contextlib.suppress(*_LOST):
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        with contextlib.suppress(*_LOST):
            self._progress.stop()


def _build_console(total_steps: int, resume_step: int) -> Console:
    if sys.stdout is not None and sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb"):
        return _ProgressConsole(total_steps, resume_step)
    return _PlainConsole(total_steps)


def _belongs(line: bytes, resume_step: int) -> bool:
    try:
        record = json.loads(line)
    except ValueError:  # not JSON, or not UTF-8
        return False
    if not isinstance(record, dict):
        return False
    step = record.get("step")
    return isinstance(step, int) and step <= resume_step


def _write_durably(path: Path, lines: list[bytes], *, mode: str) -> None:
    with path.open(mode) as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def _plain(value: Any) -> Any:
    """Tensors and numpy scalars as Python's own numbers."""
    return value.item() if hasattr(value, "item") else value


def _is_nonfinite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
