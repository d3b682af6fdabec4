"""Where a step's time goes: the kernels of a trace by what they are for."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdp2kit.overlap.report import build_report

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
KINDS = (*(kind for kind, _ in _KINDS), OTHERS)
_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


def kind_of(name: str) -> str:
    """The kind of a kernel (or, on a CPU, operator) of that name."""
    if name.startswith(("triton_poi", "triton_red", "triton_per")):
        return OTHERS  # Inductor's names are made of all that it fused, or fused away
    for kind, pattern in _KINDS:
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return OTHERS


def shares(path: Path) -> dict[str, Any]:
    """Shares of the traced steps' time by kind of kernel, and of the time in which nothing ran.

    Kernels of several streams may run at once, and a CPU's operators in several threads: their shares and the idle
    one then add up to more than 1.

    Args:
        path: of one rank's Chrome trace.
    """
    means = build_report(path).means
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        content = json.load(file)
    events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
    steps = [event for event in events if str(event["name"]).startswith("ProfilerStep")]
    windows = [(event["ts"], event["ts"] + event["dur"]) for event in steps if event.get("cat") == "user_annotation"]
    total = sum(end - start for start, end in windows)
    busy = dict.fromkeys(KINDS, 0.0)
    for name, duration in _busy(events):
        busy[kind_of(name)] += duration
    return {
        "step_seconds": total / len(windows) / 1e6,
        "shares": {kind: duration / total for kind, duration in busy.items()},
        "idle": means.idle / means.duration,
    }


def _busy(events: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Names and microseconds of kernels; without a device, of operators without those that they call."""
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    if kernels:
        yield from ((event["name"], event["dur"]) for event in kernels)
        return
    by_thread: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread.setdefault(event["tid"], []).append(event)
    for operators in by_thread.values():
        yield from _without_inner(sorted(operators, key=lambda event: (event["ts"], -event["dur"])))


def _without_inner(operators: list[dict[str, Any]]) -> Iterator[tuple[str, float]]:
    """Each operator's own time: what it calls is counted there."""
    open_ones: list[list[Any]] = []  # name, end, own time
    for event in operators:
        while open_ones and open_ones[-1][1] <= event["ts"]:
            name, _, own = open_ones.pop()
            yield name, own
        if open_ones:
            open_ones[-1][2] -= event["dur"]
        open_ones.append([event["name"], event["ts"] + event["dur"], event["dur"]])
    yield from ((name, own) for name, _, own in open_ones)
