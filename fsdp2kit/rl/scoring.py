"""What responses are worth: their rewards of each kind, the weighted sums of these, and means for the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fsdp2kit.data.contents import Content
from fsdp2kit.data.tokens import Prompt
from fsdp2kit.job.distributed import agreement
from fsdp2kit.rl.engines.engine import Response
from fsdp2kit.rl.environments.conversations import Conversations
from fsdp2kit.rl.parts import from_all_ranks, my_groups
from fsdp2kit.rl.phases import Phases
from fsdp2kit.rl.rewards.rewards import Rewards, arguments_of


class Scoring:
    """Scores responses: each reward function is a kind of reward, and before them the environment, if there is one.

    Args:
        conversations: rewards responses that took turns with an environment, and reads all of them.
        phases: measures how long the functions take.
    """

    def __init__(self, rewards: Rewards, conversations: Conversations, phases: Phases) -> None:
        self._rewards = rewards
        self._conversations = conversations
        self._phases = phases
        self.weights: dict[str, float] = {"environment": 1.0} if conversations.has_environment else {}
        """The weight of each kind, in the order of all rewards ``[responses, kinds]``."""
        self.weights |= dict(zip(rewards.names, rewards.weights.tolist(), strict=True))
        self.contents: dict[str, Content] = {**conversations.contents, **rewards.contents}
        """The code that rewards depend on, by its key."""

    def describe(self) -> str:
        """A line for the start of a run."""
        rewards = ", ".join(f"{weight:g} × {name}" for name, weight in self.weights.items())
        return f"reward: {rewards}"

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> np.ndarray:
        """The rewards of this rank's responses, float64 ``[responses, kinds]``; there may be none.

        Args:
            prompts: the prompt of each response.
        """
        texts = [self._conversations.text(response) for response in responses]
        found = self._rewards(arguments_of(prompts, responses, texts))
        if not self._conversations.has_environment:
            return found
        given = [0.0 if one.conversation is None else one.conversation.reward for one in responses]
        return np.column_stack([np.array(given), found])

    def score_all(self, prompts: Sequence[Prompt], responses: Sequence[Response], *, n: int) -> np.ndarray:
        """The rewards of the responses of all ranks, float64 ``[responses, kinds]``, on every rank. Collective.

        A rank scores whole groups, so that a function may compare within them.

        Args:
            prompts: the prompt of each group.
            n: responses of a group.
        """
        mine = my_groups(range(len(responses)), n)
        with self._phases("reward"), agreement():
            found = self.score([prompts[at // n] for at in mine], [responses[at] for at in mine])
        return np.concatenate(from_all_ranks(found.reshape(-1, n, found.shape[1])))

    def totals(self, rewards: np.ndarray) -> np.ndarray:
        """The weighted sums of rewards ``[responses, kinds]``; the same for rows that are the same, unlike BLAS's."""
        return (rewards * np.array([*self.weights.values()])).sum(axis=1)

    def means(self, rewards: np.ndarray, responses: Sequence[Response]) -> dict[str, float]:
        """Means over responses and their rewards ``[responses, kinds]``."""
        by_kind = zip(self.weights, rewards.mean(axis=0).tolist(), strict=True)
        turns = [response.conversation.turns for response in responses if response.conversation is not None]
        return {
            "reward": float(self.totals(rewards).mean()),
            "response_length": float(np.mean([sum(response.sampled) for response in responses])),
            **({"turns": float(np.mean(turns))} if turns else {}),
            **{f"reward/{name}": mean for name, mean in by_kind},
        }

    def sample(self, prompt: Prompt, response: Response, total: float) -> dict[str, Any]:
        """A line of ``samples.jsonl``: what was asked and said.

        Args:
            total: the response's weighted sum of rewards.
        """
        talk = response.conversation
        if talk is None:
            asked = prompt.messages
            answer = self._conversations.text(response)
        else:
            asked = talk.asked
            answer = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in talk.said)
        text = asked if isinstance(asked, str) else str(asked[-1].get("content") or "")
        return {"prompt": text, "answer": answer, "reward": total, "truncated": not response.is_whole}
