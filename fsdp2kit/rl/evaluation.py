"""Held-out rewards: of one response to each held-out prompt, with the weights of now."""

from __future__ import annotations

from typing import Any

from fsdp2kit.rl.prompts import Question
from fsdp2kit.rl.sampling import Sampling
from fsdp2kit.rl.state import RolloutState


def build_reward_evaluation(sampling: Sampling, state: RolloutState) -> RewardEvaluation | None:
    """The evaluation of ``[eval]``, or None if there are no held-out prompts."""
    return RewardEvaluation(sampling, state) if sampling.prompts.held_out else None


class RewardEvaluation:
    """Evaluates the trained model by its rewards (`fsdp2kit.train.loop.Evaluates`)."""

    maximizes = "eval_reward"
    """The metric that is −``eval_loss``, by which the best is shown."""

    def __init__(self, sampling: Sampling, state: RolloutState) -> None:
        self._seed = sampling.config.run.seed
        self._prompts = sampling.prompts.held_out
        self._state = state
        self._generation = sampling.generation
        self._scoring = sampling.scoring
        self._phases = sampling.phases
        self._answers: list[dict[str, Any]] = []
        self.measured_by: dict[str, str] = {
            "held-out prompts": sampling.prompts.held_out_fingerprint,
            **{name: str(value) for name, value in state.made_by.items()},
            **{f"reward.{name}.weight": str(weight) for name, weight in sampling.scoring.weights.items()},
        }
        """What held-out rewards depend on besides the weights; with equal values they are comparable."""

    def __call__(self) -> dict[str, float]:
        """Rewards of one response to each held-out prompt, with the current weights. Collective.

        Sampled as in training, with the same random numbers each time.

        Returns:
            ``eval_reward``, ``eval_reward/NAME`` of each function, ``eval_response_length``; and ``eval_loss``, which
            is −``eval_reward`` and decides the best checkpoint.
        """
        with self._phases.as_one("evaluate"):
            self._state.wait()  # for the engine, which still has its old weights, and for the reward functions
            # A round's seeds have four numbers. The fifth is not 0: numpy ignores zeros at the end of a seed.
            questions = [Question(prompt, (self._seed, 0, at, 0, 1)) for at, prompt in enumerate(self._prompts)]
            responses = self._generation.respond(questions, self._state.steps_done)
            rewards = self._scoring.score_all(self._prompts, responses, n=1)
            totals = self._scoring.totals(rewards).tolist()
            first = zip(self._prompts[:2], responses[:2], totals[:2], strict=True)
            self._answers = [self._scoring.sample(*one) for one in first]
        means = self._scoring.means(rewards, responses)
        return {"eval_loss": -means["reward"], **{f"eval_{name}": mean for name, mean in means.items()}}

    def answers(self) -> list[dict[str, Any]]:
        """The responses to the first prompts of the last evaluation."""
        return self._answers
