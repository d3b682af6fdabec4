"""A step cut into cells against sets of instants."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp2kit.overlap.events import Collective, Scope
from fsdp2kit.overlap.split import Grid, split_step
from fsdp2kit.overlap.trace import RankTrace, Step

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)
WINDOW = (10, 50)


def instants(intervals: list[tuple[int, int]]) -> set[int]:
    return {at for start, end in intervals for at in range(start, end)} & set(range(*WINDOW))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(INTERVALS, INTERVALS)
def test_as_sets_of_instants(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    grid = Grid(WINDOW, [*first, *second])
    a, b = (grid.count(intervals) > 0 for intervals in (first, second))
    for found, expected in (
        (a, instants(first)),
        (a & b, instants(first) & instants(second)),
        (a & ~b, instants(first) - instants(second)),
        (~a & ~b, instants([WINDOW]) - instants(first) - instants(second)),
    ):
        stretches = grid.stretches(found)
        ends = [edge for stretch in stretches for edge in stretch]
        assert ends == sorted(set(ends)), "apart, and none is empty"
        assert instants(stretches) == expected
        assert grid.total(found) == len(expected)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(INTERVALS)
def test_counts_are_those_of_every_instant(intervals: list[tuple[int, int]]) -> None:
    grid = Grid(WINDOW, intervals)
    counts = grid.count(intervals)
    for number in range(len(intervals) + 1):
        expected = {at for at in range(*WINDOW) if sum(start <= at < end for start, end in intervals) == number}
        assert instants(grid.stretches(counts == number)) == expected


COLLECTIVES = st.lists(st.tuples(*[st.integers(0, 60)] * 4), max_size=6)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(INTERVALS, COLLECTIVES)
def test_shares_divide_every_exposed_instant(work: list[tuple[int, int]], times: list[tuple[int, ...]]) -> None:
    collectives = []
    for number, (call, issued, start, end) in enumerate(map(sorted, times)):
        scope = Scope("forward", f"unit {number // 2}")
        collectives.append(Collective(str(number), start, end, scope, issued=call, setup=(call, issued)))
    step = Step(1, *WINDOW, is_complete=True)
    trace = RankTrace(0, 1, "cpu", [step], work, collectives, turns=[(-1, ("forward", ""))])

    split = split_step(trace, step)

    sets = [instants([one.setup, (one.start, one.end)]) for one in collectives]
    exposed = set().union(*sets) - instants(work)
    assert split.exposed == len(exposed)
    assert split.duration == split.compute_only + split.overlapped + split.exposed + split.idle
    for one, own in zip(collectives, sets, strict=True):
        exact = sum((Fraction(1, sum(at in other for other in sets)) for at in own & exposed), Fraction(0))
        assert abs(split.collectives.get((one.kind, "forward"), 0) - float(exact)) < 1e-9
    assert abs(sum(split.collectives.values()) - len(exposed)) < 1e-9
    assert abs(sum(split.units.values()) - len(exposed)) < 1e-9
