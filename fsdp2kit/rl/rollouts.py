"""Rollouts as the batches that the loop asks for: prompts → responses → rewards → advantages → packed micro-batches.

Every rank generates a part of a step's responses and calls the reward functions on some groups; then all ranks have
all of them, and come to the same plan of rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from fsdp2kit.config.rl_schema import RLConfig
from fsdp2kit.data.formats import Prompt
from fsdp2kit.data.loader import Batch
from fsdp2kit.distributed import agreement, gather_objects, reduce_numbers, world_size
from fsdp2kit.job import Job
from fsdp2kit.objectives.policy import PolicyLoss, has_signal
from fsdp2kit.parallel.mesh import Mesh
from fsdp2kit.progress import Progress
from fsdp2kit.rl.engine import Engine, Request, Response
from fsdp2kit.rl.packing import Rollout, pack_rollouts
from fsdp2kit.rl.prompts import Prompts, arguments_of
from fsdp2kit.rl.rewards import Rewards
from fsdp2kit.rl.sleep import give_back_memory, sleep, wake_up
from fsdp2kit.rl.weight_sync import sync_weights
from fsdp2kit.train.metrics import Metrics

_PHASES = ("sync", "sleep", "generate", "wake_up", "wait", "reward", "evaluate")


@dataclass(frozen=True)
class Round:
    """A batch of rollouts."""

    number: int
    version: int
    """Of the weights that sampled: so many steps."""
    rollouts: list[Rollout]


@dataclass
class _Asked:
    """A round whose responses may be still under way."""

    number: int
    version: int
    responses: Future[list[Response]] = field(default_factory=Future)
    """Those that this rank asked for."""
    seconds: float | None = None
    """That generating took, where it was done while the trainer did something else."""


def build_rollouts(
    config: RLConfig,
    model: Any,
    optimizer: Optimizer,
    prompts: Prompts,
    *,
    engine: Engine,
    rewards: Rewards,
    objective: PolicyLoss,
    job: Job,
    metrics: Metrics,
    progress: Progress,
    tokenizer: PreTrainedTokenizerBase,
) -> Rollouts:
    """The rollouts of a run. Collective.

    Args:
        model: sharded, with its weights.
        optimizer: its state sleeps while responses are generated, where `rollout.sleep` says so.
        engine: waits for its first weights.
        objective: its figures become a part of the records; its reference sleeps too.
        metrics: get the rollouts' figures and samples with each record.
        progress: where the run starts.
    """
    sleepers: list[tuple[Any, Optimizer | None]] = []
    if config.rollout.sleep:
        sleepers = [(model, optimizer), *((frozen, None) for frozen in objective.frozen_models)]
    built = {"engine": engine, "rewards": rewards, "mesh": job.mesh, "metrics": metrics, "tokenizer": tokenizer}
    rollouts = Rollouts(config, model, prompts, **built, sleepers=sleepers, step=progress.step)
    if progress.data is not None:
        rollouts.resume(progress.data)
    metrics.sources += [rollouts.figures, objective.figures]
    return rollouts


class Rollouts:
    """Batches of rollouts of the model that is trained; see `fsdp2kit.train.step.Batches`."""

    source_names: tuple[str, ...] = ()

    def __init__(
        self,
        config: RLConfig,
        model: Any,
        prompts: Prompts,
        *,
        engine: Engine,
        rewards: Rewards,
        mesh: Mesh,
        metrics: Metrics,
        tokenizer: PreTrainedTokenizerBase,
        sleepers: Sequence[tuple[Any, Optimizer | None]] = (),
        step: int = 0,
    ) -> None:
        self._config, self._model, self._prompts = config, model, prompts
        self._engine, self._rewards, self._mesh, self._metrics = engine, rewards, mesh, metrics
        self._tokenizer, self._sleepers = tokenizer, sleepers
        self._step = step  # that are done, once the batch that was asked for last is learnt from
        self._round: Round | None = None
        self._asked: _Asked | None = None
        self._figures: dict[str, float] = {}
        self.held_out_samples: list[dict[str, Any]] = []
        """The responses to the first prompts of the last evaluation."""
        self._seconds: dict[str, float] = {}
        self._warned: set[str] = set()

    @property
    def steps_per_epoch(self) -> float:
        """Steps in which every prompt is asked once."""
        return self._prompts.steps_per_epoch

    def describe(self) -> list[str]:
        """What the user should know of the rollouts before training, a line each."""
        pairs = zip(self._rewards.weights, self._rewards.names, strict=True)
        rewards = ", ".join(f"{weight:g} × {name}" for weight, name in pairs)
        return [self._engine.describe(), f"reward: {rewards}"]

    def batch(self, index: int, /) -> Sequence[Batch]:
        """This data-parallel rank's micro-batches of step ``index`` (0-based). Collective.

        The engine gets the current weights and generates first, where a new batch of rollouts begins; with
        ``rollout.ahead`` it then has those responses already, and begins with the next ones.

        Raises:
            UserError: a reward function failed.
        """
        number, part = divmod(index, self._config.rollout.updates)
        self._step, self._seconds = index + 1, {}
        if self._round is None or self._round.number != number:
            self._round = self._make_round(number, version=index)
        now, size = self._round, self._config.train.global_batch_size
        oldest = (number - self._config.rollout.ahead) * self._config.rollout.updates
        assert oldest <= now.version <= index, f"step {index} would learn from rollouts of version {now.version}"
        rollouts = now.rollouts[part * size : (part + 1) * size]
        self._figures = {**self._figures_of(rollouts), "rollout/weight_version": float(now.version)}
        totals, prompts = self._totals(rollouts), self._prompts.prompts
        pad_id: Any = self._tokenizer.pad_token_id or 0
        return pack_rollouts(self._config, rollouts, totals, prompts, mesh=self._mesh, pad_id=pad_id)

    def state(self, index: int, /) -> dict[str, Any] | None:
        """What steps from ``index`` on learn from and other weights could not make again. Collective.

        It waits for the responses under way.
        """
        number, part = divmod(index, self._config.rollout.updates)
        found: dict[str, Any] = {}
        now = self._round
        if now is not None and now.number == number and (part or now.version < index):
            found |= {"round": number, "version": now.version, "rewards": self._rewards.names}
            found["rollouts"] = [asdict(rollout) for rollout in now.rollouts]
        if (asked := self._asked) is not None:
            responses = [asdict(response) for response in self._responses(asked)]
            found["ahead"] = {"round": asked.number, "version": asked.version, "responses": responses}
        return found or None

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on with what `state` returned, but for what this config would not have made."""
        section, names = self._config.rollout, self._rewards.names
        count, saved = self._prompts.per_round * section.n, state.get("rollouts", ())
        made = [Rollout(one["prompt"], Response(**one["response"]), tuple(one["rewards"])) for one in saved]
        first = state.get("round", 0) * section.updates
        version = state.get("version", first)
        is_young = version >= first - section.ahead * section.updates
        if len(made) == count and is_young and state.get("rewards", names) == names:
            self._round = Round(state["round"], version, made)
        ahead = state.get("ahead", {})
        responses = [Response(**one) for one in ahead.get("responses", ())]
        if len(responses) == count and section.ahead:
            self._asked = _Asked(ahead["round"], ahead["version"])
            self._asked.responses.set_result(responses[self._mesh.rank :: world_size()])

    def evaluate(self) -> dict[str, float]:
        """Rewards of one response to each held-out prompt, with the weights of now. Collective.

        Sampled as in training, with the same random numbers each time.

        Returns:
            ``eval_reward``, ``eval_reward/NAME`` of each function, ``eval_response_length``; and ``eval_loss``, which
            is −``eval_reward``, by which the best checkpoint is known.
        """
        prompts, start, seconds = self._prompts.held_out, time.perf_counter(), self._seconds
        if self._asked is not None:  # the engine still needs the weights that it has
            with agreement():
                self._asked.responses.result()
        seed = self._config.run.seed
        # A round's seeds have four numbers; the last one here is not 0, which would be the same as none.
        requests = [Request(prompt.ids, (seed, 0, at, 0, 1)) for at, prompt in enumerate(prompts)]
        mine = self._generate_awake_or_asleep(requests, self._step)
        responses = _in_turn(gather_objects(mine), len(prompts))
        rewards = np.array(self._rewarded(prompts, responses, n=1))
        totals = rewards @ self._rewards.weights
        first = zip(prompts[:2], responses[:2], totals[:2].tolist(), strict=True)
        self.held_out_samples = [self._sample(*one) for one in first]
        self._seconds = {**seconds, "evaluate": time.perf_counter() - start}
        by_function = zip(self._rewards.names, rewards.mean(axis=0).tolist(), strict=True)
        return {
            "eval_loss": -float(totals.mean()),
            "eval_reward": float(totals.mean()),
            **{f"eval_reward/{name}": mean for name, mean in by_function},
            "eval_response_length": float(np.mean([len(response.ids) for response in responses])),
        }

    def figures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """What a step's record has of its rollouts; a warning where they teach nothing, or where engine and trainer
        disagree. Collective."""
        if self._round is not None and "log_prob_gap" in record:
            self._look_at(record, self._round)
        mine = {f"seconds/{name}": self._seconds.get(name, 0.0) for name in _PHASES}
        memory = self._metrics.throughput.memory.phases
        mine |= {f"memory_gib/{name}": memory.get(name, 0) / 2**30 for name in _PHASES}
        largest = reduce_numbers(list(mine.values()), dist.ReduceOp.MAX)
        return {**self._figures, **{name: value for name, value in zip(mine, largest, strict=True) if value}}

    def _look_at(self, record: Mapping[str, Any], now: Round) -> None:
        """Warnings of a step, and its samples."""
        step, gap, limit = record["step"], record["log_prob_gap"], self._config.grpo.gap_warning
        what = f"trainer and engine differ by {gap:.3g} in a token's log-probability (grpo.gap_warning = {limit:g})"
        # With other weights than those that sampled, the gap has what the updates in between changed, too.
        if now.version == step - 1:
            self._warn("gap", gap > limit, step, f"{what}; is rollout.dtype fsdp.param_dtype?")
        what = "no group has a signal: the rewards within each are all the same, and teach nothing"
        todo = "look at samples.jsonl: are the prompts too hard or too easy, or the reward too coarse?"
        self._warn("signal", self._figures["rollout/without_signal"] == 1, step, f"{what}; {todo}")
        every = self._config.rollout.samples_every
        if every and step % every == 0:
            self._metrics.log_samples(step, self._best_and_worst(now))

    def _warn(self, name: str, is_so: bool, step: int, text: str) -> None:
        """A warning when something begins, not while it goes on."""
        if is_so and name not in self._warned:
            self._metrics.message(f"warning: step {step}: {text}")
        self._warned = self._warned | {name} if is_so else self._warned - {name}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """Measures the seconds and the peak memory of what it encloses."""
        memory, start = self._metrics.throughput.memory, time.perf_counter()
        memory.end(None)
        yield
        memory.end(name)
        self._seconds[name] = time.perf_counter() - start

    @contextmanager
    def _asleep(self) -> Iterator[None]:
        """Training state is on the host while this is open; at its end the engine gives memory back. Collective."""
        with self._phase("sleep"), agreement():
            for model, optimizer in self._sleepers:
                sleep(model, optimizer)
        try:
            with agreement():  # when all ranks' devices are free: a server may use several
                self._engine.wake("cache")
            yield
            with agreement():  # when no rank generates any more
                self._engine.sleep()
        except BaseException:
            with suppress(Exception):  # what went wrong first is what is reported
                self._wake_up()
            raise
        with self._phase("wake_up"), agreement():
            self._wake_up()

    def _wake_up(self) -> None:
        for model, _ in self._sleepers:
            wake_up(model)

    def _make_round(self, number: int, *, version: int) -> Round:
        """A round with its rewards, on every rank; the next one is begun. Collective."""
        asked = self._asked
        if asked is None or asked.number != number:
            asked = _Asked(number, version)
            asked.responses.set_result(self._generate_awake_or_asleep(self._requests(number), version))
        responses = self._responses(asked)
        self._asked = None
        if self._config.rollout.ahead and (number + 1) * self._config.rollout.updates < self._prompts.total_steps:
            self._asked = self._begin(number + 1, version)
        indices, n = self._prompts.of_round(number), self._config.rollout.n
        rewards = self._rewarded([self._prompts.prompts[index] for index in indices], responses, n=n)
        rollouts = [
            Rollout(indices[at // n], response, tuple(values))
            for at, (response, values) in enumerate(zip(responses, rewards, strict=True))
        ]
        return Round(number, asked.version, rollouts)

    def _requests(self, number: int) -> list[Request]:
        """Of all responses of a round, group by group."""
        seed, ids = self._config.run.seed, self._prompts.prompts
        # A prompt is known by its place in the round, since a round may reach from one epoch into the next.
        places = enumerate(self._prompts.of_round(number))
        turns = range(self._config.rollout.n)
        return [Request(ids[index].ids, (seed, number, at, turn)) for at, index in places for turn in turns]

    def _generate_awake_or_asleep(self, requests: Sequence[Request], version: int) -> list[Response]:
        """This rank's part of the responses to ``requests``, after a sync. Collective."""
        self._sync(version)
        with self._asleep() if self._sleepers else nullcontext(), self._phase("generate"), agreement():
            return self._generate(requests, version)

    def _begin(self, number: int, version: int) -> _Asked:
        """Send the weights of now, and let the engine generate a round with them while the trainer goes on."""
        asked = _Asked(number, version)
        self._sync(version)

        def work() -> list[Response]:
            start = time.perf_counter()
            found = self._generate(self._requests(number), version)
            asked.seconds = time.perf_counter() - start
            return found

        _in_background(work, asked.responses)
        return asked

    def _responses(self, asked: _Asked) -> list[Response]:
        """All responses of a round, on every rank, once they have come. Collective."""
        count = self._prompts.per_round * self._config.rollout.n
        is_foreground = asked.seconds is None and asked.responses.done()
        with nullcontext() if is_foreground else self._phase("wait"), agreement():
            mine = asked.responses.result()
        if asked.seconds is not None:
            self._seconds["generate"] = asked.seconds
        return _in_turn(gather_objects(mine), count)

    def _sync(self, version: int) -> None:
        with self._phase("sync"):
            if self._sleepers:
                with agreement():  # when the last step's memory is free on all ranks' devices
                    give_back_memory(self._mesh.device)
                with agreement():
                    self._engine.wake("weights")
            sync = {"dtype": self._engine.dtype, "bucket_mib": self._config.weight_sync.bucket_mib}
            sync_weights(self._model, self._engine, version=version, **sync)
            self._engine.flush_cache()

    def _generate(self, requests: Sequence[Request], version: int) -> list[Response]:
        """This rank's part of the responses."""
        self._engine.require(version)
        section = self._config.rollout
        mine = requests[self._mesh.rank :: world_size()]
        return self._engine.generate(mine, max_new_tokens=section.max_new_tokens, temperature=section.temperature)

    def _rewarded(self, prompts: Sequence[Prompt], responses: Sequence[Response], *, n: int) -> list[list[float]]:
        """Each response's rewards by function, on every rank. Collective.

        A rank scores whole groups of ``n``, so that a function may compare within them.
        """
        rank, size = self._mesh.rank, world_size()
        groups = [responses[start : start + n] for start in range(0, len(responses), n)]
        with self._phase("reward"), agreement():
            scored = self._score(prompts[rank::size], groups[rank::size])
        return [rewards for group in _in_turn(gather_objects(scored), len(groups)) for rewards in group]

    def _score(self, asked: Sequence[Prompt], groups: Sequence[Sequence[Response]]) -> list[list[list[float]]]:
        """The rewards ``[groups][n][functions]`` of this rank's groups, of which there may be none."""
        if not groups:
            return []
        prompts = [prompt for prompt, group in zip(asked, groups, strict=True) for _ in group]
        responses = [response for group in groups for response in group]
        texts = [self._text(response) for response in responses]
        ids, cut = [response.ids for response in responses], [not response.is_whole for response in responses]
        found = self._rewards(arguments_of(prompts, texts, ids, cut))
        return found.reshape(len(groups), -1, found.shape[1]).tolist()

    def _text(self, response: Response) -> str:
        return str(self._tokenizer.decode(response.ids, skip_special_tokens=True))

    def _totals(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """The weighted sum of each rollout's rewards, float64 ``[groups, n]``."""
        rewards = np.array([rollout.rewards for rollout in rollouts])
        return (rewards @ self._rewards.weights).reshape(-1, self._config.rollout.n)

    def _figures_of(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        totals, responses = self._totals(rollouts), [rollout.response for rollout in rollouts]
        by_function = np.mean([rollout.rewards for rollout in rollouts], axis=0)
        return {
            "reward": float(totals.mean()),
            "response_length": float(np.mean([len(response.ids) for response in responses])),
            **{f"reward/{name}": float(mean) for name, mean in zip(self._rewards.names, by_function, strict=True)},
            "reward/deviation": float(totals.std(axis=1, ddof=1).mean()),
            "rollout/truncated": float(np.mean([not response.is_whole for response in responses])),
            "rollout/without_signal": float(np.mean(~has_signal(totals))),
        }

    def _best_and_worst(self, now: Round) -> list[dict[str, Any]]:
        """The best and the worst response to the first prompt."""
        rollouts = now.rollouts[: self._config.rollout.n]
        totals, prompt = self._totals(rollouts)[0], self._prompts.prompts[rollouts[0].prompt]
        chosen = dict.fromkeys((int(totals.argmax()), int(totals.argmin())))
        return [self._sample(prompt, rollouts[at].response, float(totals[at])) for at in chosen]

    def _sample(self, prompt: Prompt, response: Response, reward: float) -> dict[str, Any]:
        asked = prompt.messages
        text = asked if isinstance(asked, str) else str(asked[-1].get("content") or "")
        return {
            "prompt": text,
            "answer": self._text(response),
            "reward": reward,
            "truncated": not response.is_whole,
        }


def _in_turn(parts: Sequence[Sequence[Any]], count: int) -> list[Any]:
    """All items in order, of which rank r of R has those with the numbers r, r + R, …"""
    return [parts[number % len(parts)][number // len(parts)] for number in range(count)]


def _in_background(work: Callable[[], Any], result: Future[Any]) -> None:
    """Do ``work`` in a thread that does not keep the process from ending."""

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()


@dataclass(frozen=True)
class HeldOutRewards:
    """The evaluation of a run; see `Rollouts.evaluate`."""

    rollouts: Rollouts

    def __call__(self) -> dict[str, float]:
        return self.rollouts.evaluate()

    def answers(self) -> list[dict[str, Any]]:
        """The responses to the first held-out prompts."""
        return self.rollouts.held_out_samples
