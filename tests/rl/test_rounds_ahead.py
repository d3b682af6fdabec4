"""Rounds under way: in which order they are sampled and scored, what waits for what, and where errors come out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from fsdp2kit.data.tokens import Prompt
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.rl import parts
from fsdp2kit.rl.engines.engine import Response
from fsdp2kit.rl.parts import my_groups
from fsdp2kit.rl.prompts import Question
from fsdp2kit.rl.rounds_ahead import RoundsAhead


class _Phases:
    """Of no interest here."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, _: str) -> Any:
        return nullcontext()


class _Work:
    """An engine and a reward function that wait until they are let go, and fail where a test says so."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.gates = {name: threading.Semaphore(0) for name in ("sample", "score")}
        self.faults: dict[str, Exception] = {}
        self.phases: Any = _Phases()
        self.ahead = RoundsAhead(self.generate, self.score, n=2, phases=self.phases)

    def _do(self, kind: str, number: int) -> None:
        assert self.gates[kind].acquire(timeout=30)
        if error := self.faults.get(f"{kind} {number}"):
            raise error
        self.done.append(f"{kind} {number}")

    def generate(self, questions: Sequence[Question], version: int) -> list[Response]:
        self._do("sample", questions[0].seed[0])
        return [Response([*one.seed, version], [], is_whole=True) for one in questions]

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> np.ndarray:
        self._do("score", responses[0].ids[0])
        pairs = zip(prompts, responses, strict=True)
        return np.array([[prompt.ids[0], response.ids[1]] for prompt, response in pairs], dtype=float)

    def ask(self, number: int, *, version: int) -> None:
        """Two groups of two responses."""
        questions = [Question(Prompt({}, "", [10 + at // 2]), (number, at)) for at in range(4)]
        self.ahead.ask(number, questions, version)

    def let(self, kind: str, count: int) -> None:
        self.gates[kind].release(count)


def test_rounds_are_sampled_in_order_and_their_rewards_may_come_later() -> None:
    work = _Work()
    for number, version in ((3, 5), (4, 5), (5, 6)):
        work.ask(number, version=version)
    work.let("sample", 3)
    work.ahead.wait_for_engine()
    assert work.done == ["sample 3", "sample 4", "sample 5"]
    work.let("score", 1)
    found = work.ahead.take(3, [7, 8])
    assert (found.number, found.version, work.done[3:]) == (3, 5, ["score 3"])
    assert [one.prompt for one in found.rollouts] == [7, 7, 8, 8]
    assert [one.response.ids for one in found.rollouts] == [[3, at, 5] for at in range(4)]
    assert [one.rewards for one in found.rollouts] == [(10.0, 0.0), (10.0, 1.0), (11.0, 2.0), (11.0, 3.0)]
    assert work.phases.seconds.keys() == {"generate", "reward"}
    assert [number in work.ahead for number in (3, 4, 5)] == [False, True, True]
    work.let("score", 2)
    assert [one.number for one in work.ahead.all_rounds(lambda _: [0, 1])] == [4, 5]
    assert work.done[4:] == ["score 4", "score 5"]
    assert 4 in work.ahead, "a checkpoint leaves it to be taken"


def test_a_checkpoints_rounds_are_sampled_no_more() -> None:
    first, second = _Work(), _Work()
    first.ask(3, version=5)
    first.let("sample", 1)
    first.let("score", 1)
    made = first.ahead.take(3, [7, 8])
    questions = [Question(Prompt({}, "", [30]), ())] * 4
    second.ahead.keep(made, questions, is_scored=True)
    assert second.ahead.take(3, [7, 8]) == made
    second.ahead.keep(made, questions, is_scored=False)
    second.let("score", 1)
    assert [one.rewards[0] for one in second.ahead.take(3, [7, 8]).rollouts] == [30.0] * 4
    assert second.done == ["score 3"]


@pytest.mark.parametrize(
    ("fault", "error", "done"),
    [
        ("score 3", UserError("reward.0", "raises", "mend it"), ["sample 3", "sample 4"]),
        ("sample 3", RunFailure("server: does not answer"), []),
    ],
)
def test_what_goes_wrong_is_raised_by_the_next_wait(fault: str, error: Exception, done: list[str]) -> None:
    """A round after one that could not be sampled is not asked for; one after one without rewards is not scored."""
    work = _Work()
    work.faults[fault] = error
    for number in (3, 4):
        work.ask(number, version=5)
    for kind in work.gates:
        work.let(kind, 2)
    for wait in (work.ahead.wait, lambda: work.ahead.take(4, [7, 8]), work.ahead.wait_for_engine):
        with pytest.raises(type(error), match=str(error)):
            wait()
    assert work.done == done


@pytest.mark.parametrize(("ranks", "expected"), [(2, [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7]]), (6, [[0, 1], [2, 3]])])
def test_groups_stay_whole(ranks: int, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "world_size", lambda: ranks)
    for rank, mine in enumerate(expected):
        monkeypatch.setattr(parts, "rank", lambda rank=rank: rank)
        assert my_groups(range(10), 2) == mine
    monkeypatch.setattr(parts, "rank", lambda: 5)
    assert my_groups(range(10), 2) == []
