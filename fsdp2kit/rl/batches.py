"""Rollouts as the loop's batches: prompts → responses → rewards → advantages → packed micro-batches.

Every rank generates a part of a step's responses and scores some groups; then all ranks get all of them, and make the
same plan of packs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fsdp2kit.data.loader import Batch
from fsdp2kit.objectives.policy import has_signal
from fsdp2kit.rl.packing import Rollout, pack, token_values
from fsdp2kit.rl.rounds import Round
from fsdp2kit.rl.sampling import Sampling
from fsdp2kit.rl.state import RolloutState


class RolloutBatches:
    """Batches of the trained model's rollouts (`fsdp2kit.train.step.Batches`)."""

    source_names: tuple[str, ...] = ()

    def __init__(self, sampling: Sampling, state: RolloutState) -> None:
        self._sampling = sampling
        self._state = state
        self.figures: dict[str, float] = {}
        """Figures of the newest batch, for the record of its step."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps that ask every prompt once."""
        return self._sampling.prompts.steps_per_epoch

    def batch(self, index: int, /) -> Sequence[Batch]:
        """This data-parallel rank's micro-batches of step ``index`` (0-based). Collective."""
        sampling = self._sampling
        config = sampling.config
        sampling.phases.begin_step()
        now = self._state.round_of(index)
        size = config.train.global_batch_size
        start = index % config.rollout.updates * size
        rollouts = now.rollouts[start : start + size]
        rewards = np.array([rollout.rewards for rollout in rollouts])
        totals = sampling.scoring.totals(rewards).reshape(-1, config.rollout.n)
        self.figures = {
            **sampling.scoring.means(rewards, [rollout.response for rollout in rollouts]),
            "reward/deviation": float(totals.std(axis=1, ddof=1).mean()),
            "rollout/truncated": float(np.mean([not rollout.response.is_whole for rollout in rollouts])),
            "rollout/without_signal": float(np.mean(~has_signal(totals))),
            "rollout/weight_version": float(now.version),
            "rollout/staleness": float(index - now.version),
        }
        return pack(
            [(self._prompt_ids(one), one.response.ids, one.response.sampled) for one in rollouts],
            token_values(config.grpo, rollouts, totals, config.rollout.max_new_tokens),
            seq_len=config.data.seq_len,
            micro_batch_size=config.train.micro_batch_size,
            dp=sampling.mesh.sizes.dp,
            dp_rank=sampling.mesh.dp_rank,
            cp=sampling.mesh.sizes.cp,
            pad_id=sampling.prompts.pad_id,
        )

    def state(self, index: int, /) -> dict[str, Any] | None:
        """What steps from ``index`` on need of a checkpoint. Collective."""
        return self._state.saved(index)

    def _prompt_ids(self, rollout: Rollout) -> Sequence[int]:
        conversation = rollout.response.conversation
        return self._sampling.prompts.prompts[rollout.prompt].ids if conversation is None else conversation.prompt


class RolloutFigures:
    """What rollouts add to each record (one of `Metrics.sources`), with warnings and samples."""

    def __init__(self, sampling: Sampling, state: RolloutState, batches: RolloutBatches) -> None:
        self._sampling = sampling
        self._state = state
        self._batches = batches
        self._warned: set[str] = set()

    def __call__(self, record: Mapping[str, Any]) -> dict[str, float]:
        """A record's figures of its rollouts. Collective.

        It warns if they teach nothing, or if engine and trainer disagree.
        """
        if self._state.now is not None and "log_prob_gap" in record:
            self._look_at(record, self._state.now)
        return {**self._batches.figures, **self._sampling.phases.figures()}

    def _look_at(self, record: Mapping[str, Any], now: Round) -> None:
        """A step's warnings and samples."""
        step = record["step"]
        gap = record["log_prob_gap"]
        limit = self._sampling.config.grpo.gap_warning
        # After an update since sampling, the gap includes what the update changed.
        if now.version == step - 1:
            what = f"trainer and engine differ by {gap:.3g} in a token's log-probability"
            todo = f"(grpo.gap_warning = {limit:g}); is rollout.dtype fsdp.param_dtype?"
            self._warn("gap", gap > limit, step, f"{what} {todo}")
        what = "no group has a signal: the rewards within each are all the same, and teach nothing"
        todo = "look at samples.jsonl: are the prompts too hard or too easy, or the reward too coarse?"
        self._warn("signal", self._batches.figures["rollout/without_signal"] == 1, step, f"{what}; {todo}")
        every = self._sampling.config.rollout.samples_every
        if every and step % every == 0:
            self._sampling.metrics.log_samples(step, self._best_and_worst(now))

    def _warn(self, name: str, is_so: bool, step: int, text: str) -> None:
        """Warn when something begins, not while it goes on."""
        if is_so and name not in self._warned:
            self._sampling.metrics.message(f"warning: step {step}: {text}")
        self._warned = self._warned | {name} if is_so else self._warned - {name}

    def _best_and_worst(self, now: Round) -> list[dict[str, Any]]:
        """The best and the worst response to the first prompt."""
        rollouts = now.rollouts[: self._sampling.config.rollout.n]
        totals = self._sampling.scoring.totals(np.array([rollout.rewards for rollout in rollouts]))
        prompt = self._sampling.prompts.prompts[rollouts[0].prompt]
        chosen = dict.fromkeys((int(totals.argmax()), int(totals.argmin())))
        return [self._sampling.scoring.sample(prompt, rollouts[at].response, float(totals[at])) for at in chosen]
