"""Rows of a table of options in which every two values meet: a covering array, and rows drawn at random."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[str, Any, str, Any]


class Table:
    """Options with their values, and which of them go together."""

    def __init__(self, options: Mapping[str, Sequence[Any]], fits: Callable[[Row], bool]) -> None:
        """
        Args:
            options: each option's values, which are hashable.
            fits: whether the values of a row, of which some may be missing, go together.
        """
        self.options, self.fits = options, fits

    def pairs(self) -> set[Pair]:
        """Every two values that some row can hold."""
        return {
            (first, a, second, b)
            for first, second in itertools.combinations(self.options, 2)
            for a, b in itertools.product(self.options[first], self.options[second])
            if self._complete({first: a, second: b}) is not None
        }

    def pairs_in(self, row: Row) -> set[Pair]:
        """Every two values of a row."""
        return {(first, row[first], second, row[second]) for first, second in itertools.combinations(self.options, 2)}

    def covering(self, *, candidates: int = 20) -> list[Row]:
        """Rows with all of `pairs`, the same every time: each is the best of ``candidates`` that begin with a pair
        which no earlier row holds."""
        rows, missing, chance = [], self.pairs(), random.Random(0)
        while missing:
            starts = chance.choices(sorted(missing, key=str), k=candidates)
            found = [self._grow({a: value, b: other}, missing, chance) for a, value, b, other in starts]
            rows.append(max(found, key=lambda row: len(self.pairs_in(row) & missing)))
            missing -= self.pairs_in(rows[-1])
        return rows

    def sample(self, count: int, *, seed: int) -> Iterator[Row]:
        """Rows at random."""
        chance = random.Random(seed)
        for _ in range(count):
            yield self._grow({}, set(), chance)

    def _grow(self, start: Row, missing: set[Pair], chance: random.Random) -> Row:
        """``start`` with a value for every other option, in a random order: of those that fit, one that brings most
        missing pairs."""
        row = dict(start)
        for name in chance.sample(sorted(self.options.keys() - start.keys()), len(self.options) - len(start)):
            values = chance.sample(list(self.options[name]), len(self.options[name]))
            values.sort(key=lambda value: -_gain(row, name, value, missing))
            row[name] = next(value for value in values if self._complete({**row, name: value}) is not None)
        return {name: row[name] for name in self.options}

    def _complete(self, row: Row) -> Row | None:
        """A row that holds these values, or None if there is none."""
        if not self.fits(row):
            return None
        free = next((name for name in self.options if name not in row), None)
        if free is None:
            return row
        return next(filter(None, (self._complete({**row, free: value}) for value in self.options[free])), None)


def _gain(row: Row, name: str, value: Any, missing: set[Pair]) -> int:
    """How many missing pairs a value brings to a row."""
    return sum(
        (name, value, other, known) in missing or (other, known, name, value) in missing
        for other, known in row.items()
    )


def each_value(rows: Iterable[Row], *, but: str = "") -> list[Row]:
    """A few of ``rows`` in which every value stands that stands in any of them, of all options ``but`` one."""
    rows, chosen = list(rows), []
    missing = {(name, value) for row in rows for name, value in row.items() if name != but}
    while missing:
        chosen.append(max(rows, key=lambda row: len(row.items() & missing)))
        missing -= chosen[-1].items()
    return chosen
