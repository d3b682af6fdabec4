"""Rounds made ahead (`rollout.ahead`): a server samples them, and they are scored, while the trainer trains.

Each rank asks for whole groups and scores them, without a collective, so that no rank waits for another meanwhile.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist

from fsdp2kit.data.tokens import Prompt
from fsdp2kit.job.distributed import agreement, reduce_numbers
from fsdp2kit.job.stop import Stopped
from fsdp2kit.rl.conversations import Question
from fsdp2kit.rl.engine import Response
from fsdp2kit.rl.generation import Phases, from_all_ranks, my_part
from fsdp2kit.rl.packing import Rollout
from fsdp2kit.rl.rounds import Round


@dataclass
class _Asked:
    """A round that is under way, or done and not yet learnt from; of its responses, those to this rank's groups."""

    number: int
    version: int
    responses: Future[list[Response]] = field(default_factory=Future)
    rewards: Future[np.ndarray] = field(default_factory=Future)
    """Float64 ``[responses, kinds]``."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of ``generate`` and ``reward``, each once it is done; none for what a checkpoint had."""


class RoundsAhead:
    """Rounds under way, by number. Each has a thread of its own; they are sampled in order, and scored in order.

    An error in a thread is raised on all ranks by the next call that waits.

    Args:
        generate: this rank's responses to its questions, with the weights of a version.
        score: their rewards, float64 ``[responses, kinds]``.
        n: responses of a group.
        phases: measures how long the trainer waits.
    """

    def __init__(
        self,
        generate: Callable[[Sequence[Question], int], list[Response]],
        score: Callable[[Sequence[Prompt], Sequence[Response]], np.ndarray],
        *,
        n: int,
        phases: Phases,
    ) -> None:
        self._generate, self._score, self._n, self._phase = generate, score, n, phases
        self._rounds: dict[int, _Asked] = {}
        self._last: _Asked | None = None

    def __contains__(self, number: int) -> bool:
        return number in self._rounds

    def ask(self, number: int, questions: Sequence[Question], version: int) -> None:
        """Have a round made after those asked before it.

        Args:
            questions: of all ranks, group by group.
            version: of the weights that the engine has.
        """
        self._begin(_Asked(number, version), questions)

    def keep(self, made: Round, questions: Sequence[Question], *, is_scored: bool) -> None:
        """Go on with a round of a checkpoint; unless ``is_scored``, find its rewards again."""
        asked = _Asked(made.number, made.version)
        mine = my_groups(made.rollouts, self._n)
        asked.responses.set_result([one.response for one in mine])
        if is_scored:
            kinds = len(made.rollouts[0].rewards)
            asked.rewards.set_result(np.array([one.rewards for one in mine]).reshape(len(mine), kinds))
        self._begin(asked, questions)

    def wait_for_engine(self) -> None:
        """Wait until the engine has answered all it was asked; its weights may change then. Collective."""
        with self._phase("wait"), agreement():
            for asked in self._rounds.values():
                asked.responses.result()
                if asked.rewards.done():
                    asked.rewards.result()  # raises what went wrong, if anything did

    def wait(self) -> None:
        """Wait until all rounds are sampled and scored. Collective."""
        if not self._rounds:
            return
        with self._phase("wait"), agreement():
            for asked in self._rounds.values():
                asked.rewards.result()

    def take(self, number: int, prompts: Sequence[int]) -> Round:
        """Wait for a round, which is no longer under way then; on every rank. Collective.

        Args:
            prompts: the index of each group's prompt.
        """
        asked = self._rounds[number]
        with self._phase("wait"), agreement():
            asked.rewards.result()
        self._phase.seconds |= asked.seconds
        del self._rounds[number]
        return self._whole(asked, prompts)

    def all_rounds(self, prompts: Callable[[int], Sequence[int]]) -> list[Round]:
        """Wait for all rounds under way; on every rank, and still under way. Collective.

        A round that any rank has left, because the run is asked to stop, is not among them, nor are those after it.

        Args:
            prompts: the indices of the prompts of a round, by its number.
        """
        if not self._rounds:
            return []
        rounds = sorted(self._rounds.items())
        with self._phase("wait"), agreement():
            made = sum(1 for _ in itertools.takewhile(_is_made, (asked for _, asked in rounds)))
        made = int(reduce_numbers([float(made)], dist.ReduceOp.MIN)[0])
        return [self._whole(asked, prompts(number)) for number, asked in rounds[:made]]

    def _whole(self, asked: _Asked, prompts: Sequence[int]) -> Round:
        """A round that is done, with the responses and rewards of all ranks. Collective."""
        pairs = list(zip(asked.responses.result(), asked.rewards.result().tolist(), strict=True))
        groups = from_all_ranks([pairs[at : at + self._n] for at in range(0, len(pairs), self._n)])
        rollouts = [
            Rollout(prompt, response, tuple(rewards))
            for prompt, group in zip(prompts, groups, strict=True)
            for response, rewards in group
        ]
        return Round(asked.number, asked.version, rollouts)

    def _begin(self, asked: _Asked, questions: Sequence[Question]) -> None:
        mine, before = my_groups(questions, self._n), self._last
        prompts = [one.prompt for one in mine]
        self._rounds[asked.number] = self._last = asked

        def fill(name: str, future: Future[Any], earlier: Future[Any] | None, work: Callable[[], Any]) -> None:
            if future.done():
                return
            try:
                if earlier is not None:
                    earlier.result()
                start = time.perf_counter()
                found = work()
                asked.seconds[name] = time.perf_counter() - start
                future.set_result(found)
            except (Exception, Stopped) as error:
                future.set_exception(error)

        def work() -> None:
            earlier = (None, None) if before is None else (before.responses, before.rewards)
            fill("generate", asked.responses, earlier[0], lambda: self._generate(mine, asked.version))
            fill("reward", asked.rewards, earlier[1], lambda: self._score(prompts, asked.responses.result()))

        threading.Thread(target=work, daemon=True).start()  # a pool's thread would keep the process from ending


def _is_made(asked: _Asked) -> bool:
    """Wait for a round; False if it was left."""
    try:
        asked.rewards.result()
    except Stopped:
        return False
    return True


def my_groups(items: Sequence[Any], n: int) -> list[Any]:
    """The items of this rank's groups of ``n``, of the items of all groups."""
    return [items[group * n + turn] for group in my_part(range(len(items) // n)) for turn in range(n)]
