"""The peak of each phase, on this machine's own memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp2kit.model.flops import ModelFlops
from fsdp2kit.train import throughput as memory
from fsdp2kit.train.throughput import PHASES, PhaseMemory, Throughput, peak_memory_bytes
from tests.support.workers import WorkerPool

CPU = torch.device("cpu")
BLOCK = 256 * 2**20
ROOM = 64 * 2**20  # what else a process may take or give back in the meantime

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's high-water mark is Linux's")


def use(blocks: int) -> None:
    """Fill so much memory for a moment."""
    torch.ones(blocks * BLOCK, dtype=torch.uint8)


@pytest.mark.full
@linux
def test_each_phase_has_its_own_peak() -> None:
    before = peak_memory_bytes(CPU)
    phases = PhaseMemory(CPU, by_phase=True)
    use(4)  # belongs to no phase, but to the whole
    phases.end(None)
    for phase, blocks in (("forward", 1), ("backward", 3), ("optimizer", 2)):
        use(blocks)
        phases.end(phase)

    found = [phases.phases[phase] for phase in PHASES]
    assert found[1] - found[0] == pytest.approx(2 * BLOCK, abs=ROOM)
    assert found[2] - found[0] == pytest.approx(BLOCK, abs=ROOM)
    # The whole is the process's, which may have held more in an earlier test.
    assert phases.highest == pytest.approx(max(before, found[1] + BLOCK), abs=ROOM)


@linux
def test_a_phases_peak_is_that_of_all_steps() -> None:
    phases = PhaseMemory(CPU, by_phase=True)
    for blocks in (2, 1):
        phases.end(None)
        use(blocks)
        phases.end("forward")
        if blocks == 2:
            first = phases.phases["forward"]
    assert phases.phases["forward"] == first


@linux
def test_the_whole_peak_survives_and_is_left_alone_without_phases() -> None:
    use(2)
    before = peak_memory_bytes(CPU)
    plain = PhaseMemory(CPU, by_phase=False)
    plain.end(None)
    plain.end("forward")
    assert plain.phases == {}
    assert peak_memory_bytes(CPU) == plain.highest >= before

    phases = PhaseMemory(CPU, by_phase=True)
    phases.end(None)
    phases.end("forward")
    assert phases.phases["forward"] < before - BLOCK
    assert phases.highest >= phases.phases["forward"]


def test_where_peaks_cannot_be_reset_there_are_no_phases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "_RESET", tmp_path / "no folder" / "clear_refs")
    phases = PhaseMemory(CPU, by_phase=True)
    phases.end(None)
    phases.end("forward")
    assert phases.phases == {}
    assert phases.highest == peak_memory_bytes(CPU)


def record_of(rank_blocks: list[int]) -> tuple[dict[str, Any], int, dict[str, int]]:
    """A record, the collectives that it took, and this rank's own peaks."""
    import torch.distributed as dist

    from tests.support.traffic import count_traffic

    throughput = Throughput(ModelFlops(1, 1), device=CPU, world_size=dist.get_world_size(), memory_by_phase=True)
    throughput.memory.end(None)
    throughput.add(1, 1, 1, 0.0)
    use(rank_blocks[dist.get_rank()])
    for phase in PHASES:
        throughput.memory.end(phase)
    peaks = dict(throughput.memory.phases)
    with count_traffic() as traffic:
        record = throughput.record()
    return record, sum(traffic.calls.values()), peaks


@linux
def test_a_record_has_the_largest_ranks_phases_in_one_collective(pool: WorkerPool) -> None:
    (record, collectives, peaks), (other, _, other_peaks) = pool.run(2, record_of, [1, 3])

    assert collectives == 1
    for phase in PHASES:
        largest = max(peaks[phase], other_peaks[phase]) / 2**30
        assert record[f"memory_gib/{phase}"] == other[f"memory_gib/{phase}"] == pytest.approx(largest)
    assert other_peaks["forward"] - other_peaks["optimizer"] == pytest.approx(3 * BLOCK, abs=ROOM)
    assert record["memory_gib"] >= record["memory_gib/forward"]
