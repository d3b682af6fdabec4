"""Traces written by hand, with times in microseconds, so that every answer is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

US = 1000
"""Nanoseconds in a microsecond."""
MAIN, AUTOGRAD = 1, 2
"""Host threads."""


class Trace:
    """One rank's trace; the clock begins far from 0, as real ones do."""

    def __init__(self, *, rank: int = 0, world_size: int = 1, begin: float = 4396422700000.125) -> None:
        self.content: dict[str, Any] = {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": world_size},
            "traceEvents": [{"ph": "M", "name": "process_name", "ts": begin, "pid": 1, "tid": 0, "args": {}}],
        }
        self._begin, self._launches = begin, 0

    def event(self, name: str, start: float, end: float, *, category: str, thread: Any, **args: Any) -> None:
        self.content["traceEvents"].append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": 1,
                "tid": thread,
                "ts": self._begin + start,
                "dur": end - start,
                "args": args,
            }
        )

    def step(self, number: int, start: float, end: float) -> None:
        """A step as torch marks it; the profiler's own numbers begin at 0."""
        self.event(f"ProfilerStep#{number}", start, end, category="user_annotation", thread=MAIN)

    def mark(self, name: str, start: float, end: float, *, thread: int = MAIN) -> None:
        self.event(name, start, end, category="user_annotation", thread=thread)

    def op(self, name: str, start: float, end: float, *, thread: int = MAIN) -> None:
        self.event(name, start, end, category="cpu_op", thread=thread)

    def kernel(
        self,
        name: str,
        start: float,
        end: float,
        *,
        launched: float | None = None,
        thread: int = MAIN,
        stream: int = 7,
        category: str = "kernel",
        **args: Any,
    ) -> None:
        """A kernel, and its launch on the host (at its own start where it is not said)."""
        self._launches += 1
        at = start if launched is None else launched
        self.event("cudaLaunchKernel", at, at + 1, category="cuda_runtime", thread=thread, correlation=self._launches)
        args |= {"correlation": self._launches, "stream": stream}
        self.event(name, start, end, category=category, thread=stream, **args)

    def write(self, path: Path) -> Path:
        text = json.dumps(self.content)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8")
        return path


GEMM = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn"
NCCL_ARGS = "ncclDevKernelArgsStorage<4096ul>"
ALL_GATHER = f"ncclDevKernel_AllGather_RING_LL({NCCL_ARGS})"
REDUCE_SCATTER = f"ncclDevKernel_ReduceScatter_Sum_f32_RING_LL({NCCL_ARGS})"
ALL_REDUCE = f"ncclDevKernel_AllReduce_Sum_f32_RING_LL({NCCL_ARGS})"
