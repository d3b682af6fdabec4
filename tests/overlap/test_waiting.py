"""Waiting is told from transfer where the same collective can be found on every rank."""

from __future__ import annotations

from pathlib import Path

from fsdp2kit.overlap.report import build_report
from fsdp2kit.overlap.trace import read_traces
from tests.overlap.helpers import ALL_GATHER, ALL_REDUCE, US, Trace, straggling


def transfers(folder: Path) -> list[list[int | None]]:
    return [[collective.transfer for collective in trace.collectives] for trace in read_traces(folder)]


def test_a_straggler_is_named_and_waiting_is_apart(tmp_path: Path) -> None:
    straggling(tmp_path)
    report = build_report(tmp_path)
    assert report.missing_ranks == []
    (step,) = report.steps
    assert step.slowest_rank == 1
    # Rank 0's first all-gather takes 250 µs, of which 50 are the transfer. The second takes 120 everywhere.
    splits = list(step.ranks.values())
    assert [split.waiting for split in splits] == [200 * US, 0, 200 * US]
    assert [split.exposed for split in splits] == [(250 + 100) * US, (50 + 90) * US, (250 + 80) * US]
    assert "it is rank 1" in str(report.advice[0])


def test_without_every_rank_waiting_is_unknown(tmp_path: Path) -> None:
    straggling(tmp_path, ranks=range(0, 3, 2))
    report = build_report(tmp_path)
    assert report.missing_ranks == [1]
    (step,) = report.steps
    assert list(step.ranks) == [0, 2]
    assert [split.waiting for split in step.ranks.values()] == [None, None]
    assert step.slowest_rank == 2  # it computes longest
    assert [split.exposed for split in step.ranks.values()] == [(250 + 100) * US, (250 + 80) * US]


def test_groups_are_matched_within_themselves(tmp_path: Path) -> None:
    # Shards over [0, 1] and [2, 3], replicas over [0, 2] and [1, 3].
    lengths = {0: (40, 30), 1: (90, 35), 2: (70, 80), 3: (20, 10)}
    for rank, (gather, reduction) in lengths.items():
        trace = Trace(rank=rank, world_size=4)
        trace.step(0, 0, 1000)
        shard, replica = "[0, 1]" if rank < 2 else "[2, 3]", "[0, 2]" if rank % 2 == 0 else "[1, 3]"
        trace.kernel(ALL_GATHER, 100, 100 + gather, **{"Process Group Ranks": shard})
        trace.kernel(ALL_REDUCE, 300, 300 + reduction, **{"Process Group Ranks": replica})
        trace.write(tmp_path / f"rank-{rank:05d}.json.gz")
    assert transfers(tmp_path) == [
        [40 * US, 30 * US],
        [40 * US, 10 * US],
        [20 * US, 30 * US],
        [20 * US, 10 * US],
    ]


def test_what_cannot_be_matched_is_unknown(tmp_path: Path) -> None:
    for rank in range(2):
        trace = Trace(rank=rank, world_size=2)
        trace.step(0, 0, 1000)
        trace.kernel(ALL_GATHER, 0, 50)
        if rank == 0:
            trace.kernel(ALL_GATHER, 100, 150)  # one more than on rank 1
        trace.kernel("ncclDevKernel_Broadcast_RING_LL", 200, 250 + rank)  # its root leaves first
        trace.kernel(ALL_REDUCE, 300, 340 + rank)
        trace.kernel(ALL_REDUCE, 2000, 2100)  # outside the step
        trace.write(tmp_path / f"rank-{rank:05d}.json")
    assert transfers(tmp_path) == [
        [None, None, None, 40 * US, None],
        [None, None, 40 * US, None],
    ]


def test_steps_are_matched_by_number(tmp_path: Path) -> None:
    for rank in range(2):
        trace = Trace(rank=rank, world_size=2)
        for number in range(2):
            trace.step(number, 1000 * number, 1000 * (number + 1))
            trace.kernel(ALL_GATHER, 1000 * number + 10, 1000 * number + 20 + 10 * rank + 100 * number)
        trace.write(tmp_path / f"rank-{rank:05d}.json")
    assert transfers(tmp_path) == [[10 * US, 110 * US]] * 2
