"""Where a step's time goes: the kernels of a trace by what they are for."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fsdp2kit.bench.sides import Side

# The first that fits counts; names as cuBLAS, CUTLASS, FlashAttention, NCCL, Inductor and torch give them, and ATen's
# operators on a CPU.
_KINDS: tuple[tuple[str, str], ...] = (
    ("collectives", r"nccl|gloo|c10d"),
    ("attention", r"flash|fmha|attention|softmax_warp"),
    ("matmul", r"gemm|cutlass|nvjet|cublas|xmma|wgmma|aten::(?:mm|addmm|bmm|linear|matmul|_scaled_mm)|scaled_mm"),
    ("optimizer", r"multi_tensor_apply|adam|aten::_(?:fused|foreach)_"),
    ("copies", r"Memcpy|Memset|copy_|_to_copy|fsdp::|split_with_sizes|chunk_cat"),
)
OTHERS = "elementwise and others"
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def trace(side: Side, *, device: torch.device, steps: int, out: Path) -> None:
    """Write a torch profiler trace of ``steps`` steps of a side that is built, after two more that are not traced."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=steps, repeat=1)
    with torch.profiler.profile(
        activities=activities,
        schedule=schedule,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(out)),
    ) as profiler:
        for _ in range(steps + 2):
            side.prepare()
            side.step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # so that a step's kernels are in its window
            profiler.step()


def kind_of(name: str) -> str:
    """The kind of a kernel (or, on a CPU, operator) of that name."""
    if name.startswith(("triton_poi", "triton_red", "triton_per")):
        return OTHERS  # Inductor's names are made of all that it fused, or fused away
    for kind, pattern in _KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return OTHERS


def shares(path: Path) -> dict[str, Any]:
    """Seconds of a traced step, the share of each kind of kernel in it, and that of the time in which nothing ran.

    Kernels of several streams may run at once, and a CPU's operators in several threads: their shares and the idle
    one then add up to more than 1.

    Args:
        path: of one rank's Chrome trace.
    """
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        content = json.load(file)
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if str(event["name"]).startswith("ProfilerStep")]
    windows = [(event["ts"], event["ts"] + event["dur"]) for event in steps if event.get("cat") == "user_annotation"]
    total = sum(end - start for start, end in windows)
    busy = dict.fromkeys([*(kind for kind, _ in _KINDS), OTHERS], 0.0)
    on_device = [event for event in events if event.get("cat") in _ON_DEVICE]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    ran = on_device or operators
    own = ((event["name"], event["dur"]) for event in on_device) if on_device else _own_times(operators)
    for name, duration in own:
        busy[kind_of(name)] += duration
    idle = total - sum(_covered(ran, start, end) for start, end in windows)
    return {
        "step_seconds": total / len(windows) / 1e6,
        **{kind: duration / total for kind, duration in busy.items()},
        "idle": idle / total,
    }


def _covered(events: list[dict[str, Any]], start: float, end: float) -> float:
    """Microseconds between ``start`` and ``end`` in which any of these ran."""
    covered, reached = 0.0, start
    for event in sorted(events, key=lambda event: event["ts"]):
        begin, stop = max(event["ts"], reached), min(event["ts"] + event["dur"], end)
        if stop > begin:
            covered, reached = covered + stop - begin, stop
    return covered


def _own_times(operators: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Names and microseconds of operators of all threads, without those that they call."""
    open_ones: dict[Any, list[list[Any]]] = {}  # by thread: name, end, own time
    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        outer = open_ones.setdefault(event["tid"], [])
        while outer and outer[-1][1] <= event["ts"]:
            name, _, own = outer.pop()
            yield name, own
        if outer:
            outer[-1][2] -= event["dur"]
        outer.append([event["name"], event["ts"] + event["dur"], event["dur"]])
    yield from ((name, own) for outer in open_ones.values() for name, _, own in outer)
