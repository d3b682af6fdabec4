"""Traces written by hand, with times in microseconds, so that every answer is known."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from fsdp2kit.overlap.split import Split

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


def figures(split: Split) -> tuple[float, ...]:
    """Step, compute only, overlapped, exposed and idle in µs, which add up."""
    assert split.compute_only + split.overlapped + split.exposed + split.idle == split.duration
    names = ("duration", "compute_only", "overlapped", "exposed", "idle")
    return tuple(getattr(split, name) / US for name in names)


def fsdp_step(trace: Trace) -> None:
    """A step of a root and two layers. The host is ahead; backward is on autograd's thread, gathering one ahead."""
    trace.step(4, 0, 1000)
    trace.mark("FSDP::root_pre_forward", 5, 8)
    trace.mark("FSDP::pre_forward", 10, 45)
    trace.mark("FSDP::all_gather", 12, 30)
    trace.kernel(ALL_GATHER, 20, 60, launched=20, stream=20)
    trace.mark("FSDP::all_gather_copy_out", 32, 44)
    trace.kernel("split_with_sizes_copy_kernel", 60, 70, launched=35)
    trace.kernel(GEMM, 70, 80, launched=48)  # the embedding: the root's own
    for layer, (host, gather) in {"model.layers.0": (50, 60), "model.layers.1": (80, 110)}.items():
        trace.mark(f"FSDP::pre_forward ({layer})", host, host + 10)
        trace.mark(f"FSDP::all_gather ({layer})", host + 1, host + 5)
        trace.kernel(ALL_GATHER, gather, gather + 50, launched=host + 2, stream=20)
        trace.kernel(GEMM, gather + 50, gather + 140, launched=host + 12)
        trace.mark(f"FSDP::post_forward ({layer})", host + 20, host + 22)
    # layers.0 computes 110 – 200, layers.1 160 – 250 on the device (two streams would do that)
    trace.op("aten::cross_entropy_loss", 104, 108)
    trace.kernel("loss_kernel", 250, 260, launched=105)
    trace.op("autograd::engine::evaluate_function: NllLossBackward0", 110, 112, thread=AUTOGRAD)
    trace.kernel("loss_backward_kernel", 260, 270, launched=111, thread=AUTOGRAD)
    trace.mark("FSDP::pre_backward (model.layers.1)", 120, 140, thread=AUTOGRAD)
    trace.mark("FSDP::backward_prefetch for model.layers.0", 130, 139, thread=AUTOGRAD)
    trace.mark("FSDP::all_gather (model.layers.0)", 131, 138, thread=AUTOGRAD)
    trace.kernel(ALL_GATHER, 300, 350, launched=135, thread=AUTOGRAD, stream=20)
    trace.kernel(GEMM, 270, 400, launched=145, thread=AUTOGRAD)  # layers.1's backward
    trace.mark("FSDP::pre_backward (model.layers.0)", 150, 155, thread=AUTOGRAD)
    trace.mark("FSDP::post_backward_reshard (model.layers.1)", 156, 158, thread=AUTOGRAD)
    trace.mark("FSDP::post_backward_reduce (model.layers.1) [pg=8]", 160, 170, thread=AUTOGRAD)
    trace.kernel(REDUCE_SCATTER, 400, 480, launched=165, thread=AUTOGRAD, stream=21)
    trace.kernel(GEMM, 400, 460, launched=175, thread=AUTOGRAD)  # layers.0's backward
    trace.mark("FSDP::root_post_backward_callback", 180, 200, thread=AUTOGRAD)
    trace.mark("FSDP::post_backward_reshard", 181, 183, thread=AUTOGRAD)
    trace.mark("FSDP::post_backward_reduce", 184, 190, thread=AUTOGRAD)
    trace.kernel(REDUCE_SCATTER, 480, 500, launched=186, thread=AUTOGRAD, stream=21)
    trace.kernel(ALL_REDUCE, 500, 510, launched=205, stream=22)  # the loss, outside FSDP
    trace.mark("Optimizer.step#AdamW.step", 300, 400)
    trace.kernel("multi_tensor_apply_kernel", 600, 900, launched=320)


def straggling(folder: Path, *, ranks: range = range(3), world_size: int = 3) -> None:
    """Rank 1 computes 300 µs instead of 100, the others wait for it; each rank's clock begins elsewhere."""
    for rank in ranks:
        trace = Trace(rank=rank, world_size=world_size, begin=1e9 * (rank + 1))
        trace.step(0, 0, 1000)
        end = 300 if rank == 1 else 100
        trace.kernel(GEMM, 0, end)
        trace.kernel(ALL_GATHER, end, 350, launched=50, stream=20)  # all leave it together
        trace.kernel(GEMM, 400, 500 + 10 * rank)
        trace.kernel(ALL_GATHER, 480, 600, launched=90, stream=20)  # all come together
        trace.write(folder / f"rank-{rank:05d}.json.gz")
