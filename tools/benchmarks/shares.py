"""Where the time of a traced step goes: by kind of kernel and kernel by kernel, and tables of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

OTHERS = "elementwise and others"
COPIES = "copies"
# The first pattern that matches counts. Names are those of CUDA's libraries, Inductor and torch; on a CPU, of ATen.
_KINDS: tuple[tuple[str, str], ...] = (
    (OTHERS, r"^triton_(?:poi|red|per)"),  # Inductor names a kernel after everything it fused
    ("collectives", r"nccl|gloo|c10d"),
    ("attention", r"flash|fmha|attention|softmax_warp"),
    ("matmul", r"gemm|cutlass|nvjet|cublas|xmma|wgmma|aten::(?:mm|addmm|bmm|linear|matmul|_scaled_mm)|scaled_mm"),
    ("optimizer", r"multi_tensor_apply|adam|aten::_(?:fused|foreach)_"),
    (COPIES, r"Memcpy|Memset|copy_|_to_copy|fsdp::|split_with_sizes|chunk_cat"),
    (OTHERS, ""),
)
KINDS = tuple(kind for kind, _ in _KINDS[1:])
LISTED = (OTHERS, COPIES)
"""The kinds whose kernels are kept by name."""
_MOST_KERNELS = 10
_MOST_LETTERS = 110


def kind_of(name: str) -> str:
    """The kind of a kernel (on a CPU: of an operator) by its name."""
    return next(kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE))


def shares(events: Iterable[Any]) -> dict[str, Any]:
    """Seconds of a traced step, the share of each kind of kernel, and the share of idle time.

    Kernels of several streams may run at once, and a CPU's operators in several threads. The shares then add up to
    more than 1.

    Args:
        events: of torch's profiler.

    Returns:
        ``step_seconds``, a share by each of `KINDS`, ``idle``; and ``kernels``, those of `LISTED`, the longest first:
        ``kind``, ``name``, ``milliseconds`` and ``count`` of a step.
    """
    events = list(events)
    marks = [event for event in events if event.name.startswith("ProfilerStep") and event.device_type.name == "CPU"]
    total = sum(mark.time_range.elapsed_us() for mark in marks)
    work = [event for event in events if not event.is_user_annotation and not event.is_async]
    on_device = [event for event in work if event.device_type.name == "CUDA"]
    busy: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    covered = 0.0
    reached = 0.0
    for event in sorted(on_device or work, key=lambda event: event.time_range.start):
        start = event.time_range.start
        end = event.time_range.end
        # An operator's own time does not include the operators that it calls.
        busy[event.name] += end - start if on_device else event.self_cpu_time_total
        counts[event.name] += 1
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    of_kinds = dict.fromkeys(KINDS, 0.0)
    kernels = []
    for name, duration in busy.most_common():
        kind = kind_of(name)
        of_kinds[kind] += duration
        if kind in LISTED:
            milliseconds = duration / len(marks) / 1e3
            count = counts[name] / len(marks)
            kernels.append({"kind": kind, "name": name, "milliseconds": milliseconds, "count": count})
    return {
        "step_seconds": total / len(marks) / 1e6,
        **{kind: duration / total for kind, duration in of_kinds.items()},
        "idle": max(0.0, 1 - covered / total),
        "kernels": kernels,
    }


def share_lines(runs: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Markdown of traced variants: milliseconds of a step by kind, and the kernels that take most of the time.

    The runs of a variant stand beneath each other in the first table, and side by side in those of its kernels.

    Args:
        runs: by name, the rows of `bench_gpu` with ``profile``.
    """
    variants: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for run, rows in runs.items():
        for row in rows:
            if "kernels" in row:
                variants.setdefault((row["model"], row["variant"]), {})[run] = row
    heads = ["model", "variant", "run", "rows", "step", *KINDS, "idle"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for (model, variant), found in variants.items():
        for run, row in found.items():
            step = 1e3 * row["step_seconds"]
            parts = [f"{step * row[kind]:.3g} ms ({row[kind]:.1%})" for kind in (*KINDS, "idle")]
            lines.append(_line([model, variant, run, row.get("rows", ""), f"{step:.4g} ms", *parts]))
    for (model, variant), found in variants.items():
        for kind in LISTED:
            lines += ["", f"{model}, {variant}: {kind}", "", *_kernel_lines(found, kind)]
    return lines


def _kernel_lines(found: Mapping[str, dict[str, Any]], kind: str) -> list[str]:
    """The kernels of a kind with the most time in any run.

    Args:
        found: a variant's rows by run.
    """
    times: dict[str, dict[str, dict[str, Any]]] = {}
    for run, row in found.items():
        for kernel in row["kernels"]:
            if kernel["kind"] == kind:
                times.setdefault(kernel["name"], {})[run] = kernel
    longest = sorted(times, key=lambda name: -max(one["milliseconds"] for one in times[name].values()))
    heads = ["kernel", *(f"{run}: ms (count) a step" for run in found)]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for name in longest[:_MOST_KERNELS]:
        cells = ["—"] * len(found)
        for column, run in enumerate(found):
            if run in times[name]:
                kernel = times[name][run]
                cells[column] = f"{kernel['milliseconds']:.3g} ({kernel['count']:.4g})"
        short = name if len(name) <= _MOST_LETTERS else f"{name[:_MOST_LETTERS]}…"
        lines.append(_line([f"`{short.replace('|', '/')}`", *cells]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
