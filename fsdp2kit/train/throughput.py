"""Speeds since the last record, and peak memory of the process and of each phase of a step."""

from __future__ import annotations

import contextlib
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fsdp2kit.job import status
from fsdp2kit.job.distributed import gather_numbers, seconds_alive
from fsdp2kit.model.flops import ModelFlops, device_peak_flops, flops_per_batch
from fsdp2kit.torch_compat import compile_seconds

PHASES = ("forward", "backward", "optimizer")
"""Forward includes moving the micro-batch to the device; optimizer the gradient norm and clipping."""

_LEAST_LOOKS = 80  # with 20, a true ratio of 3.3 was measured as 1.5 to 11
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Throughput:
    """Sums up steps and computes the speeds of a metrics record.

    Args:
        counts: what `count_model_flops` returns for the model.
        device: this rank's device.
        world_size: ranks in the job.
        memory_by_phase: whether records have the peak memory of each phase; this resets the device's own peak.
        start: the number of this start of the run, for its first record.
    """

    def __init__(
        self,
        counts: ModelFlops,
        *,
        device: torch.device,
        world_size: int,
        memory_by_phase: bool = False,
        start: int | None = None,
    ) -> None:
        self._counts, self._world_size, self._number = counts, world_size, start
        # Since the last `find_straggler` with enough of them: seconds, those for data, looks, and how many saw a wait.
        self._spent = [0.0, 0.0, 0.0, 0.0]
        self.memory = PhaseMemory(device, by_phase=memory_by_phase)
        self._peak = device_peak_flops(device)
        self._start: dict[str, float] = {}
        self.has_begun = False
        """Whether a first step was made."""
        self.restart()

    def restart(self) -> None:
        """Start a new interval; call it after anything that is not training (an evaluation, a checkpoint)."""
        self._started = time.perf_counter()
        self._steps = self._input = self._supervised = 0
        self._flops = self._data_seconds = 0.0
        status.take_looks()

    def add(self, input_tokens: int, supervised_tokens: int, attention_pairs: int, data_seconds: float) -> None:
        """Count one step's global batch."""
        self._steps += 1
        self._input += input_tokens
        self._supervised += supervised_tokens
        self._flops += flops_per_batch(self._counts, tokens=input_tokens, attention_pairs=attention_pairs)
        self._data_seconds += data_seconds

    def first_step(self) -> str:
        """Call it after the first step: says how long it took; the next record has it too.

        ``seconds_to_first_step`` counts from the start of this rank's process, including imports, reading the data,
        loading the weights and, for compiled layers, ``compile_seconds``.
        """
        self.has_begun, seconds, compiling = True, seconds_alive(), compile_seconds()
        self._start = {"seconds_to_first_step": seconds}
        if self._number is not None:
            self._start["start"] = self._number
        if not compiling:
            return f"first step done {seconds:.1f} s after the start"
        self._start["compile_seconds"] = compiling
        return f"first step done {seconds:.1f} s after the start, {compiling:.1f} s of which compiled layers"

    def record(self) -> dict[str, Any]:
        """The average speeds since the last record, and the slowest rank; starts the next interval. Collective.

        Peak memory and waiting for data are the maximum over ranks.
        """
        seconds = time.perf_counter() - self._started
        spent = seconds, self._data_seconds, *status.take_looks()
        self._spent = [one + other for one, other in zip(self._spent, spent, strict=True)]
        phases = [float(self.memory.phases.get(phase, 0)) for phase in PHASES]
        mine = [float(self.memory.highest), self._data_seconds, *phases, *self._spent]
        ranks = gather_numbers(mine)
        memory, waited, *phases = (max(column) for column in list(zip(*ranks, strict=True))[:-4])
        slowest = find_straggler([rank[-4:] for rank in ranks])
        if slowest:
            self._spent = [0.0] * 4
        flops = self._flops / seconds / self._world_size
        record = {
            "tokens_per_second": self._input / seconds,
            "supervised_tokens_per_second": self._supervised / seconds,
            "tflops_per_device": flops / 1e12,
            "mfu": None if self._peak is None else flops / self._peak,
            "memory_gib": memory / 2**30,
            **{f"memory_gib/{name}": peak / 2**30 for name, peak in zip(PHASES, phases, strict=True) if peak},
            "step_seconds": seconds / self._steps,
            "data_seconds": waited / self._steps,
            **slowest,
            **self._start,
        }
        self._start = {}
        self.restart()
        return record


def find_straggler(ranks: Sequence[Sequence[float]]) -> dict[str, float]:
    """The rank that waits least for others, and its time over the median of the other ranks' own time.

    Args:
        ranks: each rank's seconds, its seconds of reading data, how often its main thread was looked at, and how often
            that was waiting.

    Returns:
        Keys of a record; nothing for a single rank, or if there were too few looks.
    """
    if len(ranks) == 1 or min(looks for _, _, looks, _ in ranks) < _LEAST_LOOKS:
        return {}
    own = [seconds * max(1.0, looks - waits) / looks for seconds, _, looks, waits in ranks]
    slowest = max(range(len(own)), key=own.__getitem__)
    seconds, data, *_ = ranks[slowest]
    data = min(data, own[slowest])
    return {
        "slowest_rank": slowest,
        "straggler_ratio": own[slowest] / statistics.median(own[:slowest] + own[slowest + 1 :]),
        "slowest_rank/data": data / seconds,
        "slowest_rank/compute": (own[slowest] - data) / seconds,
        "slowest_rank/waiting": 1 - own[slowest] / seconds,
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory since the last reset: the allocator's on CUDA, the process's resident set on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, StopIteration), _STATUS.open(encoding="ascii", errors="replace") as status:
        line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes everywhere but on macOS


class PhaseMemory:
    """Reads and resets the peak memory at the end of each phase.

    Neither waits for the device: on CUDA it reads the allocator's counters, on a Linux CPU the kernel's high-water
    mark of the resident set (``/proc/self/clear_refs``, some ten microseconds). Elsewhere only the overall peak is
    known.

    Args:
        by_phase: False: never reset, so that a caller can measure the peak.
    """

    def __init__(self, device: torch.device, *, by_phase: bool) -> None:
        self._device = device
        # Read before the first reset, which would forget what loading took.
        self._highest = peak_memory_bytes(device) if by_phase else 0
        self._resets = by_phase and _reset_peak(device)
        self.phases: dict[str, int] = {}
        """Highest peak of each phase so far, in bytes; empty if phases are not measured."""

    def end(self, phase: str | None) -> None:
        """Call it at the end of a phase, which began where the last one ended; None: it counts for no phase."""
        if self._resets:
            peak = peak_memory_bytes(self._device)
            self._highest = max(self._highest, peak)
            if phase is not None:
                self.phases[phase] = max(self.phases.get(phase, 0), peak)
            _reset_peak(self._device)

    @property
    def highest(self) -> int:
        """Peak of the process so far, in bytes."""
        return max(self._highest, peak_memory_bytes(self._device))


def _reset_peak(device: torch.device) -> bool:
    """Set the peak to the memory used now; False if there is no way to."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        _RESET.write_text("5", encoding="ascii")  # 5: the high-water mark, and no page is touched (proc(5))
    except OSError:
        return False
    return True
