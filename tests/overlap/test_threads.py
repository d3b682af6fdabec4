"""CPU traces with known answers, exact to the nanosecond."""

from __future__ import annotations

from pathlib import Path

from fsdp2kit.overlap.split import Split, split_step
from fsdp2kit.overlap.trace import read_trace
from tests.overlap.helpers import MAIN, US, Trace, figures

GLOO_1, GLOO_2, READER = 11, 12, 13


def one_split(trace: Trace, folder: Path) -> Split:
    found = read_trace(trace.write(folder / "rank-00000.json.gz"))
    assert found.device == "cpu"
    return split_step(found, found.steps[0])


def collective(
    trace: Trace, call: str, run: str, called: tuple[float, float], ran: tuple[float, float], *, thread: int = GLOO_1
) -> None:
    trace.op(f"c10d::{call}", *called)
    trace.mark(f"gloo:{run}", *ran, thread=thread)


def test_operators_compute_and_collectives_communicate(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.op("aten::linear", 0, 100)
    trace.op("aten::addmm", 10, 90)  # within: not counted twice
    trace.op("aten::copy_", 20, 30)
    collective(trace, "_allgather_base_", "all_gather", (200, 210), (220, 400))
    trace.op("aten::clone", 202, 208)  # copies gloo's buffers, within the call: communication
    trace.op("aten::copy_", 380, 399, thread=GLOO_1)  # on gloo's thread: the collective's own
    trace.op("aten::mm", 300, 350)  # beside it
    trace.op("aten::add", 600, 700)
    trace.op("aten::to", 0, 1000, thread=READER)  # another thread's reading is not the step's
    trace.mark("Torch-Compiled Region: 0/0", 700, 900)
    trace.mark("## Call CompiledFxGraph fabc ##", 720, 880)  # generated code records no operators
    split = one_split(trace, tmp_path)
    assert figures(split) == (1000, 100 + 100 + 160, 50, 10 + 80 + 50, 450)


def test_python_operators_and_nodes_are_not_at_work_themselves(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 0, 500)
    trace.op("MmBackward0", 10, 480)
    trace.op("aten::mm", 100, 200)
    trace.mark("FSDP::pre_backward (model.layers.0)", 250, 450)  # waits for the all-gather in here
    collective(trace, "_allgather_base_", "all_gather", (260, 270), (280, 440))
    trace.op("fsdp2kit::ring_forward", 500, 900)  # a Python operator: Python and waiting beside what it calls
    trace.op("aten::_scaled_dot_product_flash_attention_for_cpu", 600, 700)
    trace.op("c10d::send", 520, 530)
    trace.mark("gloo:send", 525, 650, thread=MAIN)  # on the same thread, and not nested in anything
    trace.op("fsdp::chunk_cat", 900, 950)  # one without others in it is at work
    split = one_split(trace, tmp_path)
    # Communicating: 260–270, 280–440, 520–650, of which 600–650 beside attention.
    assert figures(split) == (1000, 100 + 50 + 50, 50, 10 + 160 + 80, 1000 - 200 - 50 - 250)
    assert {kind for kind, _ in split.collectives} == {"all_gather", "send"}


def test_autograd_on_a_thread_of_its_own(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.op("aten::mm", 0, 20)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 20, 60, thread=5)
    trace.op("aten::mm", 25, 55, thread=5)
    assert figures(one_split(trace, tmp_path)) == (100, 50, 0, 0, 50)


def test_calls_meet_their_runs_in_order(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 100, 1000)
    trace.mark("gloo:all_gather", 50, 150, thread=GLOO_1)  # of a call before the trace
    trace.mark("FSDP::all_gather (model.layers.0)", 200, 220)
    trace.mark("FSDP::all_gather (model.layers.1)", 230, 250)
    trace.mark("FSDP::post_backward_reduce (model.norm, lm_head)", 260, 300)
    # Two threads of gloo's take them in turn; its reduce-scatter is an all-reduce.
    collective(trace, "_allgather_base_", "all_gather", (205, 206), (210, 400), thread=GLOO_1)
    collective(trace, "_allgather_base_", "all_gather", (235, 236), (240, 300), thread=GLOO_2)
    collective(trace, "_reduce_scatter_base_", "all_reduce", (265, 266), (300, 500), thread=GLOO_2)
    collective(trace, "allreduce_", "all_reduce", (510, 511), (520, 540), thread=GLOO_1)
    trace.op("c10d::barrier", 900, 910)  # its run is not in the trace any more
    found = read_trace(trace.write(tmp_path / "rank-00000.json")).collectives
    begin = found[0].issued - 205 * US
    described = [(one.kind, one.scope.unit, (one.start - begin) // US, (one.end - begin) // US) for one in found]
    assert described == [
        ("all_gather", "model.layers.0", 210, 400),
        ("all_gather", "model.layers.1", 240, 300),
        ("reduce_scatter", "model.norm, lm_head", 300, 500),
        ("all_reduce", "", 520, 540),
        ("barrier", "", 910, 910),
    ]


def test_a_trace_of_one_process_has_no_communication(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.op("aten::mm", 0, 60)
    split = one_split(trace, tmp_path)
    assert figures(split) == (100, 60, 0, 0, 40)
    assert (split.waiting, split.overlap) == (None, None)
