"""Metrics to the console, to metrics.jsonl and to trackers, behind one call."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.console import Line, say
from fsdp2kit.errors import StorageFailure
from fsdp2kit.files.local import load_json, open_own, read_regular, replace_file
from fsdp2kit.job.distributed import agreement
from fsdp2kit.job.events import Events
from fsdp2kit.job.progress import Progress
from fsdp2kit.job.start import Job, free_path
from fsdp2kit.job.stop import Stopped
from fsdp2kit.parallel.plan import ParallelPlan
from fsdp2kit.train.throughput import Throughput
from fsdp2kit.train.trackers import Tracker, start_trackers

FIGURES = 6
"""In a line of the console, besides the step; ``metrics.jsonl`` has all."""
_ENDLESS = 1e9
"""Seconds of a run that nobody waits for."""

RECORD_KEYS = frozenset(
    (
        *("step", "epoch", "time", "loss", "grad_norm", "lr", "tokens", "input_tokens", "tokens_total"),
        *("packing_efficiency", "tokens_per_second", "supervised_tokens_per_second", "tflops_per_device", "mfu"),
        *("memory_gib", "step_seconds", "data_seconds", "start", "seconds_to_first_step", "compile_seconds"),
        *("slowest_rank", "straggler_ratio"),
        *("eval_loss", "eval_perplexity"),
    )
)
"""Keys of a record of ``metrics.jsonl``, up to the "/" of ``loss/NAME`` and the like; docs/runs.md explains them."""


def build_metrics(
    config: TrainingConfig,
    *,
    job: Job,
    plan: ParallelPlan,
    progress: Progress | None = None,
    total_steps: int,
) -> Metrics:
    """The run's metrics, written by the main rank only and closed by `Job.closing`. Collective.

    Lines of ``metrics.jsonl`` after ``progress.step`` (all of them if that is 0) are moved to
    ``metrics.after-step-<step>.jsonl``, so that each step has one line.

    Args:
        progress: where the run starts, and the wandb run that it continues. Default: a fresh run.
        total_steps: of the whole run, for the progress line.
    """
    progress, world, start = progress or Progress(), job.world, job.environment.get("start")
    throughput = Throughput(plan.flops, device=world.device, world_size=world.size, memory_by_phase=True, start=start)
    metrics = Metrics(throughput, wandb_id=progress.wandb_id)
    if progress.step:
        job.events.record("resume", step=progress.step)
    with agreement():
        if job.is_main:
            console = Console(total_steps)
            path = job.run_dir / "metrics.jsonl"
            # The record of a step that is not evaluated yet is in the checkpoint.
            logged = progress.step if progress.unevaluated is None else progress.step - 1
            if aside := move_aside(path, resume_step=logged):
                say(f"metrics of an earlier attempt after step {logged} are kept in {aside}")
            move_aside(path.with_name("samples.jsonl"), resume_step=logged)
            if (last := _last_step(path)) + config.train.log_every <= logged:
                say(f"{path} has no steps {last + 1} to {logged}; another host may have logged them")
            os.close(open_own(path, os.O_WRONLY))  # refused here, before a tracker begins a run that must be ended
            trackers, wandb_id = start_trackers(config, run_dir=job.run_dir, progress=progress, message=say)
            metrics = Metrics(
                throughput, console=console, path=path, trackers=trackers, wandb_id=wandb_id, events=job.events
            )
    job.closing.push(lambda kind, *_: metrics.close(ok=kind in (None, Stopped)))
    return metrics


class Metrics:
    """Writes to console, ``metrics.jsonl`` and trackers; `close` it at the end."""

    def __init__(
        self,
        throughput: Throughput,
        *,
        console: Console | None = None,
        path: Path | None = None,
        trackers: Sequence[Tracker] = (),
        wandb_id: str | None = None,
        records: list[dict[str, Any]] | None = None,
        events: Events | None = None,
    ) -> None:
        """
        Args:
            path: of ``metrics.jsonl``; ``samples.jsonl`` is written beside it.
            records: every logged record is appended to this list.
            events: of the run, if they are kept.
        """
        self.throughput = throughput
        """Counts steps into speeds and peak memory, on every rank."""
        self._console, self._path, self._trackers, self._records = console, path, trackers, records
        self.events = events or Events()
        """Where the loop records what it does besides its steps."""
        self.shown: Collection[str] = ()
        """An objective's metrics that the console shows, and those of its evaluation."""
        self.sources: list[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = []
        """Each is given a record on every rank, and adds to it; the console shows what has no "/" in its name."""
        self.wandb_id = wandb_id
        """Id of the wandb run, for the checkpoint; None without one."""

    def log(self, record: Mapping[str, Any], *, is_completed: bool = False) -> None:
        """Log one step; ``step`` is required, docs/runs.md has the other keys. The file adds ``time``.

        Args:
            is_completed: whether `completed` has been asked for it already, perhaps in the start before.
        """
        completed = dict(record) if is_completed else self.completed(record)
        shown = [key for key in completed if key not in record and "/" not in key]
        record = completed
        if self._records is not None:
            self._records.append(record)
        if self._path is not None:
            now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            _append(self._path, [{**record, "time": now}])  # first: this file must be complete
        if self._console is not None:
            self._console.log(record, also=[*shown, *self.shown])
        for tracker in self._trackers:
            tracker.log(record)

    def completed(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """A record with what `sources` add, as Python's own numbers. On every rank."""
        record = {key: value.item() if hasattr(value, "item") else value for key, value in record.items()}
        return {**record, **{key: value for source in self.sources for key, value in source(record).items()}}

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the model's answers after a step to ``samples.jsonl`` and to trackers, and show them.

        A prompt is a text or a list of messages, which the console and trackers have as text.
        """
        as_text = []
        for sample in samples:
            prompt = sample["prompt"]
            if not isinstance(prompt, str):
                prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
            as_text.append({**sample, "prompt": prompt})
        for sample in as_text:
            self.message(f"> {sample['prompt']}\n{sample['answer'] or '(an empty answer)'}")
        if samples and self._path is not None:
            _append(self._path.with_name("samples.jsonl"), [{"step": step, **sample} for sample in samples])
        for tracker in self._trackers if samples else ():
            tracker.log_samples(step, as_text)

    def message(self, text: str) -> None:
        """Print a line, above the progress line if there is one; without a console, nothing."""
        if self._console is not None:
            say(text)

    def close(self, ok: bool) -> None:
        """Finish: ``ok`` is whether the run succeeded. A second call does nothing."""
        for tracker in self._trackers:
            tracker.close(ok)
        if self._console is not None:
            self._console.close()
        self._console, self._path, self._trackers = None, None, ()


def _append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Append a line of JSON for each record; a number that JSON does not have (NaN, infinity) becomes null."""
    lines = ""
    for record in records:
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        lines += json.dumps(finite, allow_nan=False) + "\n"
    try:
        with os.fdopen(open_own(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        what = f"{path}: cannot be written ({error.strerror or error}); mend that, and start again"
        raise StorageFailure(f"{what}: a run resumes from its newest checkpoint", alone=True) from error


def move_aside(path: Path, *, resume_step: int) -> Path | None:
    """Keep only the complete lines of steps ≤ ``resume_step`` in a metrics file; none if that is 0.

    The other lines, also an incomplete last one, go to ``<stem>.after-step-000120.jsonl``, with a number if that file
    exists.

    Returns:
        The file that they went to; None if there was nothing to move.
    """
    if not path.exists():
        return None
    lines = read_regular(path).splitlines(keepends=True)
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
        replace_file(aside, b"".join(moved))
    if kept != lines:
        # After the moved lines are synced: a crash in between leaves a line in both files rather than in none.
        replace_file(path, b"".join(kept))
    return aside


def format_record(
    record: Mapping[str, Any], *, total_steps: int, eta_seconds: float | None, also: Collection[str] = ()
) -> list[str]:
    """The parts of a console line: ``step  12/100``, and the first `FIGURES` of those that are looked at most.

    Args:
        also: an objective's own keys; the first that the record has stands before the gradient's norm, with its
            ``eval_KEY``, the others last.
    """
    parts = [f"step {record['step']:>{len(str(total_steps))}}/{total_steps}"]
    # A run without an end in sight has a number of steps that is never reached.
    eta = None if eta_seconds is None or eta_seconds > _ENDLESS else timedelta(seconds=round(eta_seconds))
    shown = {**record, "eta": eta}
    own = [key for key in also if record.get(key) is not None]

    def with_evaluation(keys: Sequence[str]) -> list[tuple[str, str]]:
        return [(name, f"{name} {{:.4g}}") for key in keys for name in (key, f"eval_{key}")]

    for key, form in (
        ("loss", "loss {:.4f}"),
        ("tokens_per_second", "tokens/s {:>7,.0f}"),
        ("eta", "eta {}"),
        ("eval_loss", "eval_loss {:.4f}"),
        *with_evaluation(own[:1]),
        ("grad_norm", "grad_norm {:.3f}"),
        ("lr", "lr {:.2e}"),
        ("mfu", "mfu {:.1%}"),
        ("memory_gib", "memory {:.1f} GiB"),
        *with_evaluation(own[1:]),
        ("epoch", "epoch {:.2f}"),
    ):
        if shown.get(key) is not None and len(parts) <= FIGURES:
            parts.append(form.format(shown[key]))
    return parts


class Console:
    """A line for each record, in a terminal above a bar with the newest."""

    def __init__(self, total_steps: int) -> None:
        self._total = total_steps
        self._first: tuple[int, float] | None = None
        self._line = Line()

    def log(self, record: Mapping[str, Any], *, also: Collection[str]) -> None:
        seconds_left = self._seconds_left(record)
        parts = format_record(record, total_steps=self._total, eta_seconds=seconds_left, also=also)
        self._line.paint(parts, done=record["step"], total=self._total)

    def close(self) -> None:
        self._line.close()

    def _seconds_left(self, record: Mapping[str, Any]) -> float | None:
        """Estimate for the remaining steps by wall clock, including evaluations and checkpoints."""
        step, now = record["step"], time.monotonic()
        if self._first is None:
            self._first = (step, now)  # without the first step, which compiles and warms up
        first_step, since = self._first
        pace = (now - since) / (step - first_step) if step > first_step else record.get("step_seconds")
        return None if pace is None else pace * max(0, self._total - step)


def _belongs(line: bytes, resume_step: int) -> bool:
    step = _step_of(line)
    return step is not None and step <= resume_step


def _last_step(path: Path) -> int:
    """The step of a metrics file's last line; 0 without one."""
    lines = read_regular(path).splitlines() if path.exists() else []
    return (_step_of(lines[-1]) if lines else None) or 0


def _step_of(line: bytes) -> int | None:
    try:
        record = load_json(line)
    except ValueError:  # not JSON, or not UTF-8
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
