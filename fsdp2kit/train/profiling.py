"""A torch profiler trace of a few steps, and a CUDA memory snapshot of them."""

from __future__ import annotations

import json
import logging
import warnings
from pathlib import Path
from typing import Any

import torch

from fsdp2kit.config.schema import ProfileConfig

logger = logging.getLogger(__name__)

# Allocations and frees kept in a snapshot; a step of a large model has some ten thousand.
_MEMORY_EVENTS = 200_000


class StepProfiler:
    """The profiler of ``[profile]``, a context manager around the training loop; without ``enabled`` it does nothing.

    Steps are counted from the start of this process, so a resumed run is traced too. Every rank writes
    ``trace_dir/rank-00000.json.gz`` (Chrome trace format; it opens in https://ui.perfetto.dev) and, with ``memory`` on
    CUDA, ``trace_dir/memory-00000.pickle`` (it opens in https://docs.pytorch.org/memory_viz), replacing those of an
    earlier run. A run that ends within the traced steps writes what it has.

    Args:
        trace_dir: created when the trace is written.
        rank: of this process; it names the files.
        device_type: "cpu" or "cuda".
        steps: how many this process will take, if known; it warns if they are too few to trace any.
        first_step: the training step of the first of them, written into the trace, in which torch counts from 0.
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
    ) -> None:
        trace_dir = Path(trace_dir)
        self._trace, self._snapshot = trace_dir / f"rank-{rank:05d}.json.gz", trace_dir / f"memory-{rank:05d}.pickle"
        self._before = section.start_step - 1
        self._until = self._before + section.steps
        self._begins = max(0, self._before - 1)  # one untraced step to warm up, where there is one
        self._finished = 0
        self._section = section
        self._follows_memory = section.memory and device_type == "cuda"
        self._profiler: torch.profiler.profile | None = None
        if not section.enabled:
            return
        if rank == 0 and steps is not None and 0 < steps < section.start_step:
            what = "profile.start_step: nothing will be traced: step %d of this process is asked for, and it takes %d"
            logger.warning(what, section.start_step, steps)
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if device_type == "cuda" else []
        self._activities, self._first_step = activities, first_step + self._begins

    def __enter__(self) -> StepProfiler:
        self._advance()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._profiler is None or self._finished >= self._until:
            return
        self._profiler.__exit__(*exception)
        if self._finished >= self._before:
            self._write_snapshot()

    def step(self) -> bool:
        """Call it after every optimizer step.

        Returns:
            Whether tracing began or a trace was written, which takes time that is not training.
        """
        if not self._section.enabled:
            return False
        self._finished += 1
        self._advance()
        # It is prepared before the last untraced step, started after it, and writes after the last traced one.
        return self._finished in (self._before - 1, self._before, self._until)

    def _advance(self) -> None:
        """Tell torch's profiler of a step. It exists from one step before the first traced step to the last one.

        Not earlier: torch 2.11 has crashed on leaving a profiler that still waited for its warm-up.
        """
        if not self._section.enabled:
            return
        if self._finished == self._begins:
            self._profiler = self._start()
        elif self._profiler is not None and self._finished <= self._until:
            self._profiler.step()
            if self._finished == self._until:
                self._profiler.__exit__(None, None, None)
        self._follow_memory()

    def _start(self) -> torch.profiler.profile:
        warmup = self._before - self._begins
        with warnings.catch_warnings():
            # start_step = 1 leaves no step for the profiler's warm-up, on purpose.
            warnings.filterwarnings("ignore", message="Profiler won't be using warmup")
            schedule = torch.profiler.schedule(wait=0, warmup=warmup, active=self._section.steps, repeat=1)
        # There is one cycle to accumulate; without `acc_events` torch 2.11 warns that it keeps no other.
        profiler = torch.profiler.profile(
            activities=self._activities, schedule=schedule, on_trace_ready=self._write_trace, acc_events=True
        )
        profiler.preset_metadata_json("fsdp2kit", json.dumps({"first_step": self._first_step}))
        return profiler.__enter__()

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(self._trace))

    def _follow_memory(self) -> None:
        if self._finished == self._until:
            self._write_snapshot()
        elif self._follows_memory and self._finished == self._before:
            # There is no public name for it; torch's documentation tells users to call this one.
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)

    def _write_snapshot(self) -> None:
        if self._follows_memory:
            self._snapshot.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(str(self._snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
