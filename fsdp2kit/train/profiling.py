"""Torch profiler traces of a few steps, planned or asked for, and CUDA memory snapshots of them."""

from __future__ import annotations

import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdp2kit.config.schema import ProfileConfig
from fsdp2kit.job.events import Events
from fsdp2kit.torch_compat import dump_memory_history, record_memory_history

logger = logging.getLogger(__name__)

# Allocations and frees kept in a snapshot; a step of a large model has some ten thousand.
_MEMORY_EVENTS = 200_000


@dataclass(frozen=True)
class Window:
    """Steps that are traced together, counted from the start of this process."""

    begins: int
    """Steps that are finished when the profiler starts: one untraced step to warm up, where there is one."""
    before: int
    """Steps that are finished when the first traced one begins."""
    steps: int
    folder: Path
    with_memory: bool

    @property
    def until(self) -> int:
        """Steps that are finished when the trace is written."""
        return self.before + self.steps


class StepProfiler:
    """Traces windows of steps, a context manager around the training loop: the one planned by ``[profile]``, if
    ``enabled``, and those that `step` is asked for.

    Steps are counted from the start of this process, so a resumed run is traced too. Every rank writes
    ``trace_dir/rank-00000.json.gz`` (Chrome trace format; it opens in https://ui.perfetto.dev) and, with ``memory`` on
    CUDA, ``trace_dir/memory-00000.pickle`` (it opens in https://docs.pytorch.org/memory_viz), replacing those of an
    earlier run. A window that was asked for has both, in ``trace_dir/step-000012``, named by its first step. A run
    that ends within the traced steps writes what it has. A trace that cannot be written is a warning.

    Args:
        trace_dir: created when the trace is written.
        rank: of this process; it names the files.
        device_type: "cpu" or "cuda".
        steps: how many this process will take, if known; it warns if they are too few to trace any.
        first_step: the training step of the first of them, written into the trace, in which torch counts from 0.
        events: of the run, where each window is recorded.
    """

    def __init__(
        self,
        section: ProfileConfig,
        *,
        trace_dir: str | Path,
        rank: int,
        device_type: str,
        steps: int | None = None,
        first_step: int = 1,
        events: Events | None = None,
    ) -> None:
        self._section, self._trace_dir, self._rank = section, Path(trace_dir), rank
        self._steps, self._first_step, self._finished = steps, first_step, 0
        self._is_cuda, self._events = device_type == "cuda", events or Events()
        self._windows: list[Window] = []
        self._profiler: torch.profiler.profile | None = None
        if section.enabled:
            before = section.start_step - 1
            self._windows = [Window(max(0, before - 1), before, section.steps, self._trace_dir, section.memory)]
        if section.enabled and rank == 0 and steps is not None and 0 < steps < section.start_step:
            what = "profile.start_step: nothing will be traced: step %d of this process is asked for, and it takes %d"
            logger.warning(what, section.start_step, steps)

    def __enter__(self) -> StepProfiler:
        self._begin()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._profiler is not None:
            self._end(*exception)

    def next_window(self) -> Window | None:
        """The window that `step` begins if it is asked for one after the step to come, the same on all ranks.

        None while another one is traced, where the planned one would be cut, and at the end of the run.
        """
        finished = self._finished + 1
        if self._steps is not None and finished >= self._steps:
            return None
        # Without a step for the profiler's warm-up, where only one is left.
        before = finished if finished + 1 == self._steps else finished + 1
        folder = self._trace_dir / f"step-{self._first_step + before:06d}"
        window = Window(finished, before, self._section.steps, folder, with_memory=True)
        return window if not self._windows or window.until <= self._windows[0].begins else None

    def step(self, asked: Window | None = None) -> bool:
        """Call it after every optimizer step.

        Args:
            asked: what `next_window` was before the step, to trace it.

        Returns:
            Whether tracing began or a trace was written, which takes time that is not training.
        """
        self._finished += 1
        self._windows[:0] = [asked] if asked is not None else []
        took_time = False
        if self._profiler is not None:
            window = self._windows[0]
            self._profiler.step()
            # It starts after the last untraced step, and writes after the last traced one.
            took_time = self._finished in (window.before, window.until)
            if self._finished == window.before:
                self._follow_memory(window)
            if self._finished == window.until:
                self._end(None, None, None)
        return self._begin() or took_time

    def _begin(self) -> bool:
        """Start the profiler if the next window begins here; whether it does.

        Not earlier: torch 2.11 has crashed on leaving a profiler that still waited for its warm-up.
        """
        if not self._windows or self._profiler is not None or self._finished != self._windows[0].begins:
            return False
        window = self._windows[0]
        with warnings.catch_warnings():
            # A window from the first step on leaves no step for the profiler's warm-up, on purpose.
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")
            warmup = window.before - window.begins
            schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=window.steps, repeat=1)
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if self._is_cuda else []
        # There is one cycle to accumulate; without `acc_events` torch 2.11 warns that it keeps no other.
        profiler = torch.profiler.profile(
            activities=activities, schedule=schedule, on_trace_ready=self._write_trace, acc_events=True
        )
        profiler.preset_metadata_json("fsdp2kit", json.dumps({"first_step": self._first_step + self._finished}))
        self._profiler = profiler.__enter__()
        if not warmup:
            self._follow_memory(window)
        return True

    def _end(self, *exception: Any) -> None:
        """Stop the profiler, which writes what it has."""
        assert self._profiler is not None, "there is a window"
        self._profiler.__exit__(*exception)
        self._profiler, window = None, self._windows.pop(0)
        if self._finished >= window.before and window.with_memory and self._is_cuda:
            self._write(window.folder / f"memory-{self._rank:05d}.pickle", dump_memory_history)

    def _follow_memory(self, window: Window) -> None:
        if window.with_memory and self._is_cuda:
            record_memory_history(_MEMORY_EVENTS)

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        window = self._windows[0]
        if self._write(window.folder / f"rank-{self._rank:05d}.json.gz", profiler.export_chrome_trace):
            self._events.record("profile", step=self._first_step + window.before, path=str(window.folder))

    def _write(self, path: Path, write: Any) -> bool:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(str(path))
        except OSError as error:  # a trace is not worth a run
            logger.warning("%s: cannot be written (%s), and the run goes on", path, error.strerror or error)
            return False
        return True
