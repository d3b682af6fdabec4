"""Speeds and peak memory over the steps since the last record."""

from __future__ import annotations

import time
from typing import Any

import torch

from fsdp2kit.distributed import max_over_ranks
from fsdp2kit.environment import seconds_alive
from fsdp2kit.torch_compat import compile_seconds
from fsdp2kit.train.flops import ModelFlops, device_peak_flops, flops_per_batch
from fsdp2kit.train.memory import PHASES, PhaseMemory


class Throughput:
    """Adds up steps and turns them into the speeds of a metrics record.

    Args:
        counts: what `count_model_flops` returns for the model.
        device: this rank's device.
        world_size: ranks in the job, to divide the whole job's work by.
        memory_by_phase: whether records have the peak memory of each phase, for which the device's own peak is reset.
    """

    def __init__(
        self, counts: ModelFlops, *, device: torch.device, world_size: int, memory_by_phase: bool = False
    ) -> None:
        self._counts, self._world_size = counts, world_size
        self.memory = PhaseMemory(device, by_phase=memory_by_phase)
        self._peak = device_peak_flops(device)
        self._start: dict[str, float] = {}
        self.restart()

    def restart(self) -> None:
        """Forget what was added; call it after something that is not training (an evaluation, a checkpoint)."""
        self._started = time.perf_counter()
        self._steps = self._input = self._supervised = 0
        self._flops = self._data_seconds = 0.0

    def add(self, input_tokens: int, supervised_tokens: int, attention_pairs: int, data_seconds: float) -> None:
        """Count one step's global batch."""
        self._steps += 1
        self._input += input_tokens
        self._supervised += supervised_tokens
        self._flops += flops_per_batch(self._counts, tokens=input_tokens, attention_pairs=attention_pairs)
        self._data_seconds += data_seconds

    def first_step(self) -> str:
        """The first step is over: how long that took, which the next record has as well.

        ``seconds_to_first_step`` counts from the start of this rank's process: imports, reading the data and loading
        the weights are in it, and where layers are compiled ``compile_seconds``.
        """
        seconds, compiling = seconds_alive(), compile_seconds()
        self._start = {"seconds_to_first_step": seconds}
        if not compiling:
            return f"first step done {seconds:.1f} s after the start"
        self._start["compile_seconds"] = compiling
        return f"first step done {seconds:.1f} s after the start, {compiling:.1f} s of which compiled layers"

    def record(self) -> dict[str, Any]:
        """The speeds since the last record, averaged over its steps; starts the next interval.

        Every rank calls it: peak memory and data waits are the maximum over ranks.
        """
        seconds = time.perf_counter() - self._started
        phases = [float(self.memory.phases.get(phase, 0)) for phase in PHASES]
        memory, waited, *phases = max_over_ranks([float(self.memory.highest), self._data_seconds, *phases])
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
            **self._start,
        }
        self._start = {}
        self.restart()
        return record
