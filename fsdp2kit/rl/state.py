"""The rounds that a run has sampled and not learnt from yet: how they are made, kept in a checkpoint, and taken up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp2kit.job.progress import Progress
from fsdp2kit.rl.packing import Rollout
from fsdp2kit.rl.prompts import Question
from fsdp2kit.rl.rounds import Round, kept_rounds, round_state
from fsdp2kit.rl.rounds_ahead import RoundsAhead
from fsdp2kit.rl.sampling import Sampling


class RolloutState:
    """The round that training learns from, and with ``rollout.ahead`` the later ones, which are under way.

    Args:
        progress: where the run starts; of a resumed one with the rounds that it had.
    """

    def __init__(self, sampling: Sampling, progress: Progress) -> None:
        self._section = sampling.config.rollout
        self._seed = sampling.config.run.seed
        self._prompts = sampling.prompts
        self._generation = sampling.generation
        self._scoring = sampling.scoring
        self._ahead = RoundsAhead(
            sampling.generation.generate, sampling.scoring.score, n=self._section.n, phases=sampling.phases
        )
        self.now: Round | None = None
        """The round that training learns from; None before the first one."""
        self.steps_done = progress.step
        """Training steps done once the newest batch is learnt from: the version of the weights after it."""
        self.notes: list[str] = []
        """What became of the rounds of a checkpoint, for the start of a run."""
        if progress.data is not None:
            self.resume(progress.data)

    def describe(self) -> list[str]:
        """Lines for the start of a run: what makes rollouts, what rewards them, and what became of a checkpoint's."""
        return [self._generation.describe(), self._scoring.describe(), *self._generation.notes(), *self.notes]

    @property
    def made_by(self) -> dict[str, Any]:
        """What rollouts and rewards depend on and may change between starts, with its value or digest."""
        found = {f"rollout.{name}": value for name, value in self._section.sampling.items()}
        return found | {name: content.digest for name, content in self._scoring.contents.items()}

    def round_of(self, index: int) -> Round:
        """The round that step ``index`` (0-based) learns from, on every rank. Collective.

        At the first step of a round, the engine gets the current weights and generates. With ``rollout.ahead`` this
        round is under way already, and a later one begins.
        """
        number = index // self._section.updates
        self.steps_done = index + 1
        if self.now is None or self.now.number != number:
            make = self._take if self._section.ahead else self._make
            self.now = make(number, version=index)
        oldest = (number - self._section.ahead) * self._section.updates
        version = self.now.version
        assert oldest <= version <= index, f"step {index} would learn from rollouts of version {version}"
        return self.now

    def wait(self) -> None:
        """Wait until no round is sampled or scored any more. Collective."""
        self._ahead.wait()

    def saved(self, index: int) -> dict[str, Any] | None:
        """For a checkpoint: rounds that steps from ``index`` on learn from and that later weights cannot make again.

        It waits for the rounds under way. Collective.
        """
        number, part = divmod(index, self._section.updates)
        now = self.now
        if now is not None and (now.number != number or (not part and now.version == index)):
            now = None
        found = round_state(now, self._ahead.all_rounds(self._prompts.of_round))
        return {**found, "made_by": self.made_by} if found else None

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on with the rounds of `saved` that this run would have made, too."""
        count = self._prompts.per_round * self._section.n
        kept = kept_rounds(saved, self._section, count=count, made_by=self.made_by)
        self.now = kept.now
        for one in kept.ahead:
            self._ahead.keep(one, self._questions(one.number), is_scored=kept.is_scored)
        if kept.dropped:
            self.notes.append(f"rollouts in progress are made again ({kept.dropped})")

    def _make(self, number: int, *, version: int) -> Round:
        """Sample and score a round, while the trainer waits. Collective."""
        n = self._section.n
        indices = self._prompts.of_round(number)
        responses = self._generation.respond(self._questions(number), version)
        rewards = self._scoring.score_all([self._prompts.prompts[index] for index in indices], responses, n=n)
        rollouts = [
            Rollout(indices[at // n], response, tuple(values))
            for at, (response, values) in enumerate(zip(responses, rewards.tolist(), strict=True))
        ]
        return Round(number, version, rollouts)

    def _take(self, number: int, *, version: int) -> Round:
        """Wait for a round that was asked for ahead, once the later ones that are due are asked for. Collective."""
        due = [one for one in range(number, number + self._section.ahead + 1) if one not in self._ahead]
        missing = [one for one in due if one * self._section.updates < self._prompts.total_steps]
        if missing:
            self._ahead.wait_for_engine()  # each response is made by the weights of one version
            self._generation.sync(version)
        for one in missing:
            self._ahead.ask(one, self._questions(one), version)
        return self._ahead.take(number, self._prompts.of_round(number))

    def _questions(self, number: int) -> list[Question]:
        """The questions of a round, group by group."""
        prompts = self._prompts.prompts
        # A seed has the prompt's place in the round: a round may reach from one epoch into the next.
        places = enumerate(self._prompts.of_round(number))
        turns = range(self._section.n)
        return [Question(prompts[index], (self._seed, number, at, turn)) for at, index in places for turn in turns]
