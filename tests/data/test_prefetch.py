"""Batches made ahead are the loader's own, errors come when their batch does, and states stay with their batch."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from fsdp2kit.data.build import Prefetch
from fsdp2kit.data.stream import StreamLoader
from tests.data.helpers.files import write_rows
from tests.data.helpers.streams import rows_of, stream


class Slow:
    """Batch i is [i]; number 5 cannot be made."""

    source_names = ()
    steps_per_epoch = 10

    def __init__(self) -> None:
        self.made: list[int] = []
        self.threads: set[str] = set()

    def batch(self, index: int) -> list:
        self.threads.add(threading.current_thread().name)
        if index == 5:
            raise ValueError("no fifth")
        time.sleep(0.02)
        self.made.append(index)
        return [index]

    def state(self, index: int) -> None:
        """It is no stream."""

    def wait_for(self, count: int) -> None:
        """Until so many batches were made, and long enough for one more."""
        while len(self.made) < count:
            time.sleep(0.01)
        time.sleep(0.1)


def test_the_next_batches_are_made_while_one_is_used() -> None:
    slow = Slow()
    batches = Prefetch(slow, ahead=2, stop=10)
    assert batches.batch(0) == [0]
    slow.wait_for(3)
    assert slow.made == [0, 1, 2], "two ahead and no more"
    assert [batches.batch(1), batches.batch(2)] == [[1], [2]]
    assert [batches.batch(3), batches.batch(4)] == [[3], [4]]
    with pytest.raises(ValueError, match="no fifth"):
        batches.batch(5)
    assert len(slow.threads) == 1


def test_nothing_is_made_beyond_the_end() -> None:
    slow = Slow()
    batches = Prefetch(slow, ahead=3, stop=2)
    batches.batch(0)
    batches.batch(1)
    slow.wait_for(2)
    assert slow.made == [0, 1]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_streams_state_is_that_of_the_batch_that_was_used(ahead: int, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", rows_of([3 + at % 9 for at in range(200)]))
    plain = stream(path).loader
    assert isinstance(plain, StreamLoader)
    batches = stream(path, prefetch=ahead, steps=20).batches()
    for index in range(20):
        before = plain.state(index)
        [one, *_], [other, *_] = batches.batch(index), plain.batch(index)
        assert one.input_ids.tolist() == other.input_ids.tolist()
        if index:  # a run that is asked to stop has read the batch that it does not train on
            assert batches.state(index) == before
        assert batches.state(index + 1) == plain.state(index + 1)
