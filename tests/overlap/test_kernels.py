"""CUDA traces with known answers, exact to the nanosecond."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.overlap.split import Split, mean_of, split_step
from fsdp2kit.overlap.trace import read_traces
from tests.overlap.helpers import (
    ALL_GATHER,
    GEMM,
    NCCL_ARGS,
    REDUCE_SCATTER,
    US,
    Trace,
    figures,
    fsdp_step,
)


def splits(trace: Trace, folder: Path) -> list[Split]:
    (found,) = read_traces(trace.write(folder / "rank-00000.json.gz"))
    assert found.device == "cuda"
    return [split_step(found, step) for step in found.steps]


@pytest.mark.parametrize(
    ("gather", "expected"),
    [
        ((300, 500), (1000, 200, 200, 0, 600)),  # all hidden
        ((600, 900), (1000, 400, 0, 300, 300)),  # nothing hidden
        ((400, 700), (1000, 200, 200, 100, 500)),  # in part
        ((200, 600), (1000, 0, 400, 0, 600)),  # to the microsecond
    ],
)
def test_overlap(gather: tuple[int, int], expected: tuple[int, ...], tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.kernel(GEMM, 200, 600)
    trace.kernel(ALL_GATHER, *gather, stream=20)
    (split,) = splits(trace, tmp_path)
    assert figures(split) == expected


def test_two_streams_of_each(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.kernel(GEMM, 0, 300)
    trace.kernel(GEMM, 200, 400, stream=8)  # beside it: 400 of compute, not 500
    trace.kernel(ALL_GATHER, 350, 600, stream=20)
    trace.kernel(REDUCE_SCATTER, 500, 800, stream=21)
    (split,) = splits(trace, tmp_path)
    assert figures(split) == (1000, 350, 50, 400, 200)
    # From 500 to 600 both are exposed, and each takes half of it: the rows add up.
    assert split.collectives == {("all_gather", "other"): 150 * US, ("reduce_scatter", "other"): 250 * US}


def test_fractions_of_a_microsecond_and_copies(tmp_path: Path) -> None:
    trace = Trace(begin=1000.0)
    trace.step(0, 0, 10)
    trace.kernel(GEMM, 0.001, 0.502)
    trace.kernel("Memcpy DtoD (Device -> Device)", 1, 1.25, category="gpu_memcpy")  # work of the device
    trace.kernel("Memset (Device)", 2, 2.5, category="gpu_memset")
    trace.kernel("Memcpy HtoD (Pinned -> Device)", 2.25, 4, category="gpu_memcpy")  # neither
    trace.kernel("Memcpy PtoP (Device -> Device)", 5, 5.75, category="gpu_memcpy")
    (split,) = splits(trace, tmp_path)
    assert (split.compute_only, split.exposed) == (501 + 250 + 500, 750)
    assert {kind for kind, _ in split.collectives} == {"peer_copy"}


@pytest.mark.parametrize(
    ("name", "args", "kind"),
    [
        (f"ncclDevKernel_Generic_4({NCCL_ARGS})", {"Collective name": "_allgather_base"}, "all_gather"),
        (f"ncclDevKernel_Generic_4({NCCL_ARGS})", {"Collective name": "all_gather_single"}, "all_gather"),
        (f"ncclDevKernel_SendRecv({NCCL_ARGS})", {"Collective name": "all_to_allv"}, "all_to_all"),
        (f"ncclDevKernel_SendRecv({NCCL_ARGS})", {}, "send_recv"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long)", {}, "all_reduce"),
        (f"ncclDevKernel_Generic_1({NCCL_ARGS})", {}, "collective"),
        (f"rcclGenericKernel<1, false>({NCCL_ARGS})", {"Collective name": "reduce_scatter_tensor"}, "reduce_scatter"),
        ("ncclSymkDevKernel_AllGather_STMC(ncclSymkDevWorkArgs)", {}, "all_gather"),
    ],
)
def test_kinds_of_collectives(name: str, args: dict[str, Any], kind: str, tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 10)
    # These compute, whatever their names and arguments say.
    trace.kernel("void at::native::reduce_kernel<512, 1>", 0, 0.5)
    trace.kernel("void scale(ncclWindow_vidmem*, float)", 0.5, 1)
    trace.kernel(name, 2, 5, **args)
    (split,) = splits(trace, tmp_path)
    assert [found for found, _ in split.collectives] == [kind]
    assert figures(split) == (10, 1, 0, 3, 6)


def test_units_and_phases_are_those_of_the_launch(tmp_path: Path) -> None:
    trace = Trace()
    trace.content["fsdp2kit"] = {"first_step": 101}
    fsdp_step(trace)
    (found,) = read_traces(trace.write(tmp_path / "rank-00000.json.gz"))
    assert [(step.number, step.is_complete) for step in found.steps] == [(105, True)]
    split = split_step(found, found.steps[0])
    # Computing: 60–80, 110–460, 600–900. Communicating: 20–160, 300–350, 400–510.
    assert figures(split) == (1000, 20 + 140 + 300 + 50 - 20, 20 + 50 + 50 + 60, 40 + 30 + 50, 1000 - 670 - 120)
    # The root's gather and its reduction; layers.0's gather at 60 – 110, computing until 80; layers.1's reduction.
    assert {unit: exposed / US for unit, exposed in split.units.items()} == {
        "(root)": 40 + 20,
        "model.layers.0": 30,
        "model.layers.1": 20,
        "": 10,
    }
    assert {key: exposed / US for key, exposed in split.collectives.items()} == {
        ("all_gather", "forward"): 70,
        ("all_gather", "backward"): 0,
        ("reduce_scatter", "backward"): 40,
        ("all_reduce", "other"): 10,
    }
    # Phases end where FSDP2's marks, autograd's first node and the optimizer say.
    turns = {unit for _, (phase, unit) in found.turns if phase == "backward"}
    assert turns == {"(root)", "model.layers.0", "model.layers.1"}
    assert found.turns[-2][1][0] == "optimizer"


def test_what_crosses_the_end_of_a_step_is_cut_there(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.step(1, 100, 200)
    trace.step(2, 200, 230)
    for start in (0, 100):
        trace.mark("Optimizer.step#AdamW.step", start + 80, start + 90)
    trace.kernel(GEMM, 50, 120, launched=40)
    trace.kernel(ALL_GATHER, 110, 150, launched=95, stream=20)
    trace.kernel(GEMM, 210, 400, launched=205)  # the trace goes on, the last step does not
    (found,) = read_traces(trace.write(tmp_path / "rank-00000.json.gz"))
    first, second, last = (split_step(found, step) for step in found.steps)
    assert figures(first) == (100, 50, 0, 0, 50)
    assert figures(second) == (100, 10, 10, 30, 50)
    assert figures(last) == (30, 20, 0, 0, 10)
    assert [step.is_complete for step in found.steps] == [True, True, False]
    mean = mean_of([first, second])
    assert (mean.duration, mean.compute_only, mean.exposed) == (100 * US, 30 * US, 15 * US)


def test_a_trace_without_steps_is_one(tmp_path: Path) -> None:
    trace = Trace()
    trace.kernel(GEMM, 10, 60)
    trace.kernel(ALL_GATHER, 50, 110, stream=20)
    (split,) = splits(trace, tmp_path)
    assert figures(split) == (100, 40, 10, 50, 0)


def test_a_range_may_end_a_nanosecond_after_the_one_around_it(tmp_path: Path) -> None:
    trace = Trace(begin=1000.0)
    trace.step(0, 0, 100)
    trace.mark("FSDP::pre_forward (model.layers.0)", 5, 6)
    trace.mark("FSDP::all_gather (model.layers.1)", 10, 20)
    trace.mark("FSDP::all_gather_copy_out (model.layers.1)", 12, 20.001)  # times are rounded
    trace.kernel(ALL_GATHER, 50, 60, launched=40)
    (split,) = splits(trace, tmp_path)
    assert list(split.units) == ["model.layers.0"], "launched after both ranges, in the turn of layers.0"
