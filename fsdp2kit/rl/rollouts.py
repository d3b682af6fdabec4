"""Rollouts as the loop's batches: prompts → responses → rewards → advantages → packed micro-batches.

Every rank generates a part of a step's responses and scores some groups; then all ranks get all of them, and make the
same plan of packs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.data.loader import Batch
from fsdp2kit.data.tokens import Prompt
from fsdp2kit.job.distributed import agreement
from fsdp2kit.job.mesh import Mesh
from fsdp2kit.job.progress import Progress
from fsdp2kit.model.experts import is_mixture
from fsdp2kit.objectives.policy import PolicyLoss, has_signal
from fsdp2kit.rl.conversations import Conversations, Question
from fsdp2kit.rl.engine import Engine, Response
from fsdp2kit.rl.generation import Generation, Phases, from_all_ranks
from fsdp2kit.rl.packing import Rollout, pack, token_values
from fsdp2kit.rl.prompts import Prompts, arguments_of
from fsdp2kit.rl.rewards import Rewards
from fsdp2kit.rl.rounds import Round, kept_rounds, round_state
from fsdp2kit.rl.rounds_ahead import RoundsAhead, my_groups
from fsdp2kit.train.metrics import Metrics

_ROUTED_ANEW = "experts: the trainer does not replay the engine's choices; log_prob_gap shows what this costs"


class Rollouts:
    """Batches of the trained model's rollouts (`fsdp2kit.train.step.Batches`); calling it evaluates.

    Args:
        model: sharded, with its weights.
        optimizer: with ``rollout.sleep``, its state sleeps during generation.
        engine: waits for its first weights.
        objective: its figures go into the records; its reference sleeps, too.
        metrics: get the rollouts' figures and samples with each record.
        progress: where the run starts.
    """

    source_names: tuple[str, ...] = ()

    def __init__(
        self,
        config: RLConfig,
        model: Any,
        optimizer: Optimizer,
        prompts: Prompts,
        *,
        engine: Engine,
        conversations: Conversations,
        rewards: Rewards,
        objective: PolicyLoss,
        mesh: Mesh,
        metrics: Metrics,
        progress: Progress,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self._config, self._prompts, self._rewards = config, prompts, rewards
        self._environment, self._reading = conversations.contents, conversations.lock
        self._mesh, self._metrics, self._tokenizer = mesh, metrics, tokenizer
        self._phase = Phases(metrics)
        sleepers = [(model, optimizer), *((frozen, None) for frozen in objective.frozen_models)]
        made_by: Any = {"engine": engine, "conversations": conversations}
        self._generation = Generation(config, model, sleepers, device=mesh.device, phases=self._phase, **made_by)
        self._step = progress.step  # done once the newest batch is learnt from
        self._round: Round | None = None
        makes: Any = {"generate": self._generation.generate, "score": self._score}
        self._ahead = RoundsAhead(**makes, n=config.rollout.n, phases=self._phase)
        self._notes = [_ROUTED_ANEW] if is_mixture(model.config) else []
        self._figures: dict[str, float] = {}
        self._held_out_samples: list[dict[str, Any]] = []
        self._warned: set[str] = set()
        if progress.data is not None:
            self.resume(progress.data)
        metrics.sources += [self.figures, objective.figures]

    maximizes = "eval_reward"
    """The metric that is −``eval_loss``, by which the best is shown."""

    @property
    def steps_per_epoch(self) -> float:
        """Steps that ask every prompt once."""
        return self._prompts.steps_per_epoch

    def describe(self) -> list[str]:
        """Lines for the start of a run."""
        rewards = ", ".join(f"{weight:g} × {name}" for name, weight in self._weights.items())
        return [self._generation.engine.describe(), f"reward: {rewards}", *self._notes]

    @cached_property
    def measured_by(self) -> dict[str, str]:
        """What held-out rewards depend on besides the weights; with equal values they are comparable."""
        return {
            "held-out prompts": self._prompts.held_out_fingerprint,
            **{name: str(value) for name, value in self._made_by.items()},
            **{f"reward.{name}.weight": str(weight) for name, weight in self._weights.items()},
        }

    @property
    def _made_by(self) -> dict[str, Any]:
        """What rollouts and rewards depend on and may change between starts, with its value or digest."""
        sampling = {f"rollout.{name}": value for name, value in self._config.rollout.sampling.items()}
        contents = {**self._environment, **self._rewards.contents}
        return sampling | {name: content.digest for name, content in contents.items()}

    @property
    def _weights(self) -> dict[str, float]:
        """The weight of each kind of reward, in the order of the columns of `_rewarded`."""
        by_function = dict(zip(self._rewards.names, self._rewards.weights.tolist(), strict=True))
        return {**({"environment": 1.0} if self._environment else {}), **by_function}

    def batch(self, index: int, /) -> Sequence[Batch]:
        """This data-parallel rank's micro-batches of step ``index`` (0-based). Collective.

        At the first step of a round, the engine gets the current weights and generates. With ``rollout.ahead`` this
        round is under way already, and a later one begins.
        """
        number, part = divmod(index, self._config.rollout.updates)
        self._step, self._phase.seconds = index + 1, {}
        if self._round is None or self._round.number != number:
            self._round = self._make_round(number, version=index)
        now, config, mesh = self._round, self._config, self._mesh
        oldest = (number - config.rollout.ahead) * config.rollout.updates
        assert oldest <= now.version <= index, f"step {index} would learn from rollouts of version {now.version}"
        size = config.train.global_batch_size
        rollouts = now.rollouts[part * size : (part + 1) * size]
        totals = self._totals(rollouts)
        self._figures = {
            **self._means(np.array([rollout.rewards for rollout in rollouts]), [one.response for one in rollouts]),
            "reward/deviation": float(totals.std(axis=1, ddof=1).mean()),
            "rollout/truncated": float(np.mean([not rollout.response.is_whole for rollout in rollouts])),
            "rollout/without_signal": float(np.mean(~has_signal(totals))),
            "rollout/weight_version": float(now.version),
            "rollout/staleness": float(index - now.version),
        }
        texts = [(self._prompt_ids(one), one.response.ids, one.response.sampled) for one in rollouts]
        values = token_values(config.grpo, rollouts, totals, config.rollout.max_new_tokens)
        rows = {"seq_len": config.data.seq_len, "micro_batch_size": config.train.micro_batch_size}
        sizes = {"dp": mesh.sizes.dp, "dp_rank": mesh.dp_rank, "cp": mesh.sizes.cp}
        pad_id: Any = self._tokenizer.pad_token_id or 0
        return pack(texts, values, **rows, **sizes, pad_id=pad_id)

    def _prompt_ids(self, rollout: Rollout) -> Sequence[int]:
        conversation = rollout.response.conversation
        return self._prompts.prompts[rollout.prompt].ids if conversation is None else conversation.prompt

    def state(self, index: int, /) -> dict[str, Any] | None:
        """Rollouts that steps from ``index`` on learn from and that later weights cannot make again. Collective.

        It waits for the rounds under way.
        """
        number, part = divmod(index, self._config.rollout.updates)
        now = self._round
        if now is not None and (now.number != number or (not part and now.version == index)):
            now = None
        found = round_state(now, self._ahead.all_rounds(self._prompts.of_round))
        return {**found, "made_by": self._made_by} if found else None

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with the rollouts of `state` that this config would have made, too."""
        section = self._config.rollout
        kept = kept_rounds(state, section, count=self._prompts.per_round * section.n, made_by=self._made_by)
        self._round = kept.now
        for one in kept.ahead:
            self._ahead.keep(one, self._questions(one.number), is_scored=kept.is_scored)
        if kept.dropped:
            self._notes.append(f"rollouts in progress are made again ({kept.dropped})")

    def __call__(self) -> dict[str, float]:
        """Rewards of one response to each held-out prompt, with the current weights. Collective.

        Sampled as in training, with the same random numbers each time.

        Returns:
            ``eval_reward``, ``eval_reward/NAME`` of each function, ``eval_response_length``; and ``eval_loss``, which
            is −``eval_reward`` and decides the best checkpoint.
        """
        prompts, start, seconds = self._prompts.held_out, time.perf_counter(), self._phase.seconds.copy()
        self._ahead.wait()  # for the engine, which still has its old weights, and for the reward functions
        seed = self._config.run.seed
        # A round's seeds have four numbers. The fifth is not 0: numpy ignores zeros at the end of a seed.
        questions = [Question(prompt, (seed, 0, at, 0, 1)) for at, prompt in enumerate(prompts)]
        responses = self._generation.respond(questions, self._step)
        rewards = self._rewarded(prompts, responses, n=1)
        totals = self._weighted(rewards)
        first = zip(prompts[:2], responses[:2], totals[:2].tolist(), strict=True)
        self._held_out_samples = [self._sample(*one) for one in first]
        self._phase.seconds = {**seconds, "evaluate": time.perf_counter() - start}
        means = self._means(rewards, responses)
        return {"eval_loss": -means["reward"], **{f"eval_{name}": mean for name, mean in means.items()}}

    def answers(self) -> list[dict[str, Any]]:
        """The responses to the first prompts of the last evaluation."""
        return self._held_out_samples

    def figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """A record's figures of its rollouts. Collective.

        It warns if they teach nothing, or if engine and trainer disagree.
        """
        if self._round is not None and "log_prob_gap" in record:
            self._look_at(record, self._round)
        return {**self._figures, **self._phase.figures()}

    def _look_at(self, record: Mapping[str, Any], now: Round) -> None:
        """A step's warnings and samples."""
        step, gap, limit = record["step"], record["log_prob_gap"], self._config.grpo.gap_warning
        what = f"trainer and engine differ by {gap:.3g} in a token's log-probability (grpo.gap_warning = {limit:g})"
        # After an update since sampling, the gap includes what the update changed.
        if now.version == step - 1:
            self._warn("gap", gap > limit, step, f"{what}; is rollout.dtype fsdp.param_dtype?")
        what = "no group has a signal: the rewards within each are all the same, and teach nothing"
        todo = "look at samples.jsonl: are the prompts too hard or too easy, or the reward too coarse?"
        self._warn("signal", self._figures["rollout/without_signal"] == 1, step, f"{what}; {todo}")
        every = self._config.rollout.samples_every
        if every and step % every == 0:
            self._metrics.log_samples(step, self._best_and_worst(now))

    def _warn(self, name: str, is_so: bool, step: int, text: str) -> None:
        """Warn when something begins, not while it goes on."""
        if is_so and name not in self._warned:
            self._metrics.message(f"warning: step {step}: {text}")
        self._warned = self._warned | {name} if is_so else self._warned - {name}

    def _make_round(self, number: int, *, version: int) -> Round:
        """A round with its rewards, on every rank. Collective."""
        section, indices = self._config.rollout, self._prompts.of_round(number)
        if not section.ahead:
            responses = self._generation.respond(self._questions(number), version)
            rewards = self._rewarded([self._prompts.prompts[index] for index in indices], responses, n=section.n)
            scored = enumerate(zip(responses, rewards.tolist(), strict=True))
            rollouts = [
                Rollout(indices[at // section.n], response, tuple(values)) for at, (response, values) in scored
            ]
            return Round(number, version, rollouts)
        due = [one for one in range(number, number + section.ahead + 1) if one not in self._ahead]
        missing = [one for one in due if one * section.updates < self._prompts.total_steps]
        if missing:
            self._ahead.wait_for_engine()  # each response is made by the weights of one version
            self._generation.sync(version)
        for one in missing:
            self._ahead.ask(one, self._questions(one), version)
        return self._ahead.take(number, indices)

    def _questions(self, number: int) -> list[Question]:
        """The questions of a round, group by group."""
        seed, prompts = self._config.run.seed, self._prompts.prompts
        # A seed has the prompt's place in the round: a round may reach from one epoch into the next.
        places = enumerate(self._prompts.of_round(number))
        turns = range(self._config.rollout.n)
        return [Question(prompts[index], (seed, number, at, turn)) for at, index in places for turn in turns]

    def _rewarded(self, prompts: Sequence[Prompt], responses: Sequence[Response], *, n: int) -> np.ndarray:
        """Each response's reward of each kind, float64 ``[responses, kinds]``, on every rank. Collective.

        A rank scores whole groups of ``n``, so that a function may compare within them.
        """
        mine = my_groups(range(len(responses)), n)
        with self._phase("reward"), agreement():
            found = self._score([prompts[at // n] for at in mine], [responses[at] for at in mine])
        return np.concatenate(from_all_ranks(found.reshape(-1, n, found.shape[1])))

    def _score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> np.ndarray:
        """The rewards of this rank's responses; there may be none."""
        found = self._rewards(arguments_of(prompts, responses, [self._text(response) for response in responses]))
        if not self._environment:
            return found
        given = [0.0 if one.conversation is None else one.conversation.reward for one in responses]
        return np.column_stack([np.array(given), found])

    def _text(self, response: Response) -> str:
        with self._reading:
            return str(self._tokenizer.decode(response.ids, skip_special_tokens=True))

    def _totals(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """The weighted sum of each rollout's rewards, float64 ``[groups, n]``."""
        rewards = np.array([rollout.rewards for rollout in rollouts])
        return self._weighted(rewards).reshape(-1, self._config.rollout.n)

    def _weighted(self, rewards: np.ndarray) -> np.ndarray:
        """The weighted sums of rewards ``[responses, kinds]``; the same for rows that are the same, unlike BLAS's."""
        return (rewards * np.array([*self._weights.values()])).sum(axis=1)

    def _means(self, rewards: np.ndarray, responses: Sequence[Response]) -> dict[str, float]:
        """Means over responses and their rewards ``[responses, kinds]``."""
        by_kind = zip(self._weights, rewards.mean(axis=0).tolist(), strict=True)
        turns = [response.conversation.turns for response in responses if response.conversation is not None]
        return {
            "reward": float(self._weighted(rewards).mean()),
            "response_length": float(np.mean([sum(response.sampled) for response in responses])),
            **({"turns": float(np.mean(turns))} if turns else {}),
            **{f"reward/{name}": mean for name, mean in by_kind},
        }

    def _best_and_worst(self, now: Round) -> list[dict[str, Any]]:
        """The best and the worst response to the first prompt."""
        rollouts = now.rollouts[: self._config.rollout.n]
        totals, prompt = self._totals(rollouts)[0], self._prompts.prompts[rollouts[0].prompt]
        chosen = dict.fromkeys((int(totals.argmax()), int(totals.argmin())))
        return [self._sample(prompt, rollouts[at].response, float(totals[at])) for at in chosen]

    def _sample(self, prompt: Prompt, response: Response, reward: float) -> dict[str, Any]:
        talk = response.conversation
        asked = prompt.messages if talk is None else talk.asked
        text = asked if isinstance(asked, str) else str(asked[-1].get("content") or "")
        answer = self._text(response)
        if talk is not None:
            answer = "\n".join(f"{message['role']}: {message.get('content') or ''}" for message in talk.said)
        return {"prompt": text, "answer": answer, "reward": reward, "truncated": not response.is_whole}
