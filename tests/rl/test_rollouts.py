"""The real recipe on a tiny model: what no mesh changes, resuming, prompts, rollouts that teach nothing."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
from transformers import AutoConfig

from fsdp2kit.checkpoint.manifest import read_manifest
from fsdp2kit.data.contents import Content
from fsdp2kit.data.tokens import Prompt
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import local_part
from fsdp2kit.job.progress import Progress
from fsdp2kit.objectives.policy import PolicyLoss, has_signal
from fsdp2kit.rl.batches import RolloutBatches, RolloutFigures
from fsdp2kit.rl.engines.engine import Response
from fsdp2kit.rl.engines.transformers_engine import TransformersEngine
from fsdp2kit.rl.environments.conversations import Conversations
from fsdp2kit.rl.evaluation import RewardEvaluation
from fsdp2kit.rl.generation import Generation
from fsdp2kit.rl.packing import Rollout, balanced_packs
from fsdp2kit.rl.phases import Phases
from fsdp2kit.rl.rounds import Round, round_state
from fsdp2kit.rl.sampling import Sampling
from fsdp2kit.rl.scoring import Scoring
from fsdp2kit.rl.state import RolloutState
from fsdp2kit.run import load
from tests.rl.helpers.runs import numbers, prompts_of, run, run_recipe, write_toml
from tests.support.chaos import Doom, Harness
from tests.support.models import full
from tests.support.workers import WorkerPool

SAVES = ("checkpoint.every=1",)
DP2, CP2 = ("train.micro_batch_size=1",), ("mesh.cp=2", "train.micro_batch_size=2")


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toml(tmp_path_factory.mktemp("rl"))


@pytest.mark.full
def test_neither_the_mesh_nor_its_batches_change_what_is_sampled(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    # With AdamW's own eps a gradient that is nearly 0 moves a weight by its rounding, and a token may change by that.
    options = ("train.steps=3", "optimizer.eps=1e-2", "optimizer.lr=3e-2", "rollout.temperature=0.7")
    plain = run(pool, toml, tmp_path / "one", 1, "rollout.batch_size=64", *options)
    samples = (tmp_path / "one" / "samples.jsonl").read_text()
    for name, mesh in (("dp", DP2), ("cp", CP2), ("tp", (*DP2, "rollout.tp=2"))):
        found = run(pool, toml, tmp_path / name, 2, *mesh, *options)
        for mine, other in zip(numbers(found), numbers(plain), strict=True):
            assert mine == pytest.approx(other, rel=2e-3, abs=2e-5)
            assert mine["reward"] == other["reward"]
        assert (tmp_path / name / "samples.jsonl").read_text() == samples
        assert all(one["log_prob_gap_max"] < 2e-5 for one in found)
    assert len({one["reward"] for one in plain}) == 3
    for one in plain:
        assert one["reward"] == pytest.approx(one["reward/spread"] + 2.0 * one["reward/same"])
    assert plain[1]["kl"] > 0
    assert plain[1]["rollout/weight_version"] == 1
    best, worst = map(json.loads, samples.splitlines())
    assert best["step"] == worst["step"] == 2
    assert best["reward"] > worst["reward"]


@pytest.mark.full
def test_partitioned_experts_change_nothing(pool: WorkerPool, tmp_path: Path) -> None:
    """Sampled by engines that hold all experts; with a reference model, whose experts are partitioned as well."""
    toml = write_toml(tmp_path, kind="qwen3_moe_even")
    options = ("train.steps=2", "optimizer.eps=1e-2", *DP2)
    one, partitioned = (run(pool, toml, tmp_path / f"ep{ep}", 2, f"mesh.ep={ep}", *options) for ep in (1, 2))
    for mine, other in zip(numbers(partitioned), numbers(one), strict=True):
        assert mine == pytest.approx(other, rel=1e-5, abs=1e-6)
    assert one[1]["kl"] > 0
    assert all(record["log_prob_gap_max"] < 1e-4 for record in partitioned)


@pytest.mark.full
def test_what_sleeps_meanwhile_changes_no_digit(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    awake = run(pool, toml, tmp_path / "awake", 2, *CP2, "train.steps=2")
    asleep = run(pool, toml, tmp_path / "asleep", 2, *CP2, "train.steps=2", "rollout.sleep=true")
    assert numbers(asleep) == numbers(awake)
    assert all(one["seconds/sleep"] > 0 and one["seconds/wake_up"] > 0 for one in asleep)
    assert not any("seconds/sleep" in one for one in awake)


def _turns(toml: str, overrides: Sequence[str]) -> list[str]:
    """The calls of a run's engine that concern memory, in order."""
    calls: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        original = getattr(TransformersEngine, name)

        def note(engine: TransformersEngine, *given: Any, **named: Any) -> Any:
            calls.append(" ".join([name, *(one for one in given if isinstance(one, str))]))
            return original(engine, *given, **named)

        return note

    names = ("sleep", "wake", "finish_update", "generate")
    with mock.patch.multiple(TransformersEngine, **{name: noted(name) for name in names}):
        assert run_recipe(toml, overrides) == ""
    return calls


def test_engine_and_trainer_take_turns(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    options = [f"run.dir='{tmp_path / 'run'}'", *CP2, "train.steps=2", "rollout.sleep=true"]
    cycle = ["wake weights", "finish_update", "wake cache", "generate", "sleep"]
    assert pool.run(2, _turns, str(toml), options) == [["sleep", *cycle, *cycle]] * 2


def _awake_while_generating(toml: str, overrides: Sequence[str]) -> list[list[int]]:
    """Bytes of model, frozen reference and optimizer state each time that an engine generates."""
    recipe, config = load(toml, overrides)
    build_loss, build_optimizer, generate = (
        recipe.build_policy_loss,
        recipe.build_optimizer,
        TransformersEngine.generate,
    )
    built: dict[str, Any] = {}
    found: list[list[int]] = []

    def note_loss(config: Any, model: Any, **named: Any) -> PolicyLoss:
        built["models"] = [model, *(objective := build_loss(config, model, **named)).frozen_models]
        return objective

    def note_optimizer(*given: Any, **named: Any) -> Any:
        built["optimizer"] = build_optimizer(*given, **named)
        return built["optimizer"]

    def look(engine: TransformersEngine, *given: Any, **named: Any) -> Any:
        states = (value for state in built["optimizer"].state.values() for value in state.values() if value.ndim)
        tensors = [*(one.parameters() for one in built["models"]), states]
        found.append([sum(local_part(one).untyped_storage().nbytes() for one in some) for some in tensors])
        return generate(engine, *given, **named)

    with mock.patch.object(TransformersEngine, "generate", look):
        recipe.build_policy_loss, recipe.build_optimizer = note_loss, note_optimizer
        recipe.main(config)
    return found


@pytest.mark.full
def test_model_reference_and_optimizer_sleep_while_responses_are_generated(
    toml: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    for sleeps in (True, False):
        overrides = [f"run.dir='{tmp_path / str(sleeps)}'", f"rollout.sleep={str(sleeps).lower()}", *DP2]
        for found in pool.run(2, _awake_while_generating, str(toml), [*overrides, "train.steps=2"]):
            # The optimizer has no state before the first step.
            assert [[bool(size) for size in one] for one in found] == (
                [[False] * 3] * 2 if sleeps else [[True, True, False], [True] * 3]
            )


@pytest.mark.parametrize("step", [full(2), 3])
def test_resumed_between_or_within_rollouts_every_digit_is_the_same(
    step: int, toml: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    options = (*DP2, *SAVES, "rollout.updates=2", "grpo.loss=dapo", "data.path=" + str(toml.parent / "prompts.jsonl"))
    straight = run(pool, toml, tmp_path / "straight", 2, *options)
    assert any(one["clip_fraction"] for one in straight)
    name = f"checkpoints/step-{step:06d}"
    shutil.copytree(tmp_path / "straight" / name, tmp_path / "resumed" / name)
    resumed = run(pool, toml, tmp_path / "resumed", 2, *options)
    assert [one["step"] for one in resumed] == list(range(step + 1, 5))
    assert numbers(resumed) == numbers(straight[step:])


@pytest.mark.full
def test_killed_anywhere_in_a_cycle_every_digit_is_the_same(toml: Path, tmp_path: Path) -> None:
    """Each start gets a little further than the one before, and is killed in another phase."""
    harness = Harness(tmp_path / "starts", toml=toml, size=2)
    options = (*DP2, *SAVES, "train.steps=10", "rollout.updates=2", "rollout.sleep=true")
    assert harness.start([f"run.dir='{tmp_path / 'straight'}'", *options]) == -1
    moments = [("bucket", 2), ("reward", 2), ("generate", 2), ("step", 2), ("completing", 1)]
    dooms = [Doom(at % 2, at > 2, phase, occurrence, delay=0.0) for at, (phase, occurrence) in enumerate(moments)]
    kills = harness.kill_and_resume(tmp_path / "killed", options, dooms)
    assert [kill.phase for kill in kills] == [phase for phase, _ in moments]
    straight, killed = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("straight", "killed")
    )
    assert len(straight) == 10
    assert numbers(killed) == numbers(straight)


def _lines_of_recipe(toml: str, overrides: Sequence[str]) -> str:
    with redirect_stdout(StringIO()) as said:
        assert run_recipe(toml, overrides) == ""
    return said.getvalue()


@pytest.mark.full
def test_what_updates_change_is_no_gap_of_the_engine(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """Rounding is beyond the smaller limit at step 1; the update is beyond the larger one at step 2."""
    for name, limit, warned in (("drift", 1e-3, []), ("rounding", 1e-12, ["1"])):
        options = [f"run.dir='{tmp_path / name}'", "rollout.updates=2", "train.steps=2", f"grpo.gap_warning={limit}"]
        [said] = pool.run(1, _lines_of_recipe, str(toml), options)
        assert re.findall(r"warning: step (\d+): trainer and engine differ", said) == warned
        assert said.count("\nmemory: ") == 1, "the plan, before anything is loaded"
        assert re.search(r"memory, GiB planned / measured .*sync [\d.]+ / [\d.]+, .*generate [\d.]+ / ", said)
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert 1e-12 < records[0]["log_prob_gap"] < 1e-3 < records[1]["log_prob_gap"]


@pytest.mark.full
def test_held_out_rewards_are_those_of_the_weights_of_now(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"Tell {at}.", "level": "7"}) + "\n" for at in range(5)))
    rewards = f"reward=[{{function='{toml.parent}/mine.py:spread'}}, {{function='{toml.parent}/mine.py:level'}}]"
    options = ("grpo.kl=0.0", "train.steps=3", rewards)
    evaluation = f"eval={{every=2, path='{held_out}', keep_best=true}}"
    plain = run(pool, toml, tmp_path / "plain", 1, *options)
    found = run(pool, toml, tmp_path / "found", 1, *options, evaluation)
    assert [one["step"] for one in found if "eval_reward" in one] == [2, 3]
    kept = [{key: one[key] for key in plain[0] if key in one} for one in found]
    assert numbers(kept) == numbers(plain), "to evaluate changes nothing"
    for one in found[1:]:
        assert one["eval_reward/level"] == 7
        assert one["reward/level"] < 1
        assert one["eval_reward"] == -one["eval_loss"] == pytest.approx(7 + one["eval_reward/spread"])
        assert one["seconds/evaluate"] > 0
    answers = [json.loads(line) for line in (tmp_path / "found" / "samples.jsonl").read_text().splitlines()]
    assert [one["prompt"] for one in answers if one["prompt"].startswith("Tell")] == ["Tell 0.", "Tell 1."] * 2
    best = max(found[1:], key=lambda one: one["eval_reward"])["step"]
    weights = f"model.weights='{tmp_path}/found/checkpoints/step-{best:06d}'"
    [alone] = run(pool, toml, tmp_path / "alone", 2, *options, evaluation, "train.steps=0", weights, *CP2)
    assert alone["eval_reward"] == pytest.approx(found[best - 1]["eval_reward"], abs=1e-12)
    assert "log_prob_gap_max" not in alone


class _Server:
    """An embedded engine as a server elsewhere that is as late as it may be, beside reward functions that are, too.

    A batch of rollouts is sampled once the step has begun after which it is needed, and scored once the one before its
    own has begun: a trainer that waits for either any earlier waits forever. Only a checkpoint and an evaluation may.
    No weights may come while it samples.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead, self._busy, self._begun = ahead, 0, -1.0
        self._changed, self._numbers = threading.Condition(), dict[int, int]()

    def begin(self, step: float) -> None:
        """A step begins; `math.inf`: a checkpoint or an evaluation."""
        with self._changed:
            self._begun = step
            self._changed.notify_all()

    def wait_for(self, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._begun >= step, 60), "the trainer waits for what is not needed"

    def hold(self, engine: Any) -> Any:
        generate, begin_update = engine.generate, engine.begin_update

        def generate_late(requests: Any, **named: Any) -> Any:
            number = requests[0].seed[1] if requests else 0
            if number:
                self.wait_for(max(0, number - self._ahead))
            self._busy += 1
            found = generate(requests, **named)
            self._busy -= 1
            self._numbers |= {id(one): number for one in found}
            return found

        def begin_alone(version: int) -> None:
            assert not self._busy, "weights come while the engine generates"
            begin_update(version)

        engine.generate, engine.begin_update = generate_late, begin_alone
        return engine

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Inside, batches, checkpoints, evaluations and scores are late, or let it go on."""
        server = self
        batch = RolloutBatches.batch
        saved = RolloutState.saved
        evaluate = RewardEvaluation.__call__
        score = Scoring.score

        def batch_late(batches: RolloutBatches, index: int, /) -> Any:
            found = batch(batches, index)
            server.begin(index)
            return found

        def saved_at_once(state: RolloutState, index: int) -> Any:
            server.begin(math.inf)
            return saved(state, index)

        def evaluate_at_once(evaluation: RewardEvaluation) -> dict[str, float]:
            server.begin(math.inf)
            return evaluate(evaluation)

        def score_late(scoring: Scoring, prompts: Any, responses: Any) -> Any:
            if responses and (number := server._numbers.get(id(responses[0]), 0)):
                server.wait_for(number - 1)
            return score(scoring, prompts, responses)

        with (
            mock.patch.object(RolloutBatches, "batch", batch_late),
            mock.patch.object(RolloutState, "saved", saved_at_once),
            mock.patch.object(RewardEvaluation, "__call__", evaluate_at_once),
            mock.patch.object(Scoring, "score", score_late),
        ):
            yield


def _run_with_a_server(toml: str, overrides: Sequence[str]) -> str:
    """A run with `_Server`; what refuses it."""
    recipe, config = load(toml, ["rollout.engine=vllm", *overrides])
    server, build = _Server(config.rollout.ahead), recipe.build_engine

    def build_engine(config: Any, *given: Any, **named: Any) -> Any:
        embedded = config.rollout.model_copy(update={"engine": "transformers"})
        return server.hold(build(config.model_copy(update={"rollout": embedded}), *given, **named))

    recipe.build_engine = build_engine
    with server.beside():
        try:
            recipe.main(config)
        except UserError as error:
            return str(error)
    return ""


@pytest.mark.full
@pytest.mark.parametrize(("ahead", "size"), [(1, 2), (2, 1), (3, 2)])
def test_rollouts_ahead_are_so_many_batches_old(
    ahead: int, size: int, toml: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    def run_ahead(name: str) -> list[dict[str, Any]]:
        directory = tmp_path / name
        options = [f"run.dir='{directory}'", "grpo.kl=0.0", *DP2, "checkpoint.every=2", f"rollout.ahead={ahead}"]
        assert set(pool.run(size, _run_with_a_server, str(toml), [*options, "train.steps=5"])) == {""}
        return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]

    straight = run_ahead("straight")
    versions = [max(0, index - ahead) for index in range(5)]
    assert [one["rollout/weight_version"] for one in straight] == versions
    assert [one["rollout/staleness"] for one in straight] == [at - version for at, version in enumerate(versions)]
    assert straight[0]["log_prob_gap"] < 2e-5 < 1e-3 < straight[1]["log_prob_gap"]
    assert straight[0]["importance_weight"] == pytest.approx(1, abs=1e-4)
    assert straight[0]["importance_capped"] == 0
    for one in straight:
        assert min(one["seconds/generate"], one["seconds/reward"], one["seconds/wait"]) > 0
    # The first batches of a run whose weights stay as they are: the same prompts, asked with the first weights.
    still = run(
        pool, toml, tmp_path / "still", size, "grpo.kl=0.0", *DP2, "optimizer.lr=1e-12", f"train.steps={ahead + 1}"
    )
    for key in ("reward", "reward/spread", "response_length", "tokens"):
        assert [one[key] for one in straight[: ahead + 1]] == [one[key] for one in still]
    name = "checkpoints/step-000002"
    shutil.copytree(tmp_path / "straight" / name, tmp_path / "resumed" / name)
    resumed = run_ahead("resumed")
    assert numbers(resumed) == numbers(straight[2:])
    assert [one["loss"] for one in resumed] == [one["loss"] for one in straight[2:]]


@pytest.mark.full
@pytest.mark.parametrize("option", ["rollout.n=16", "rollout.updates=2"])
def test_ahead_with_a_rank_without_a_group_and_with_several_updates(
    option: str, toml: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    def run_ahead(name: str) -> list[dict[str, Any]]:
        options = [f"run.dir='{tmp_path / name}'", "grpo.kl=0.0", "checkpoint.every=3", "rollout.ahead=2", option]
        assert set(pool.run(2, _run_with_a_server, str(toml), [*options, *DP2, "train.steps=6"])) == {""}
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    straight, updates = run_ahead("straight"), 1 + ("updates" in option)
    versions = [max(0, index // updates - 2) * updates for index in range(6)]
    assert [one["rollout/weight_version"] for one in straight] == versions
    shutil.copytree(tmp_path / "straight/checkpoints/step-000003", tmp_path / "resumed/checkpoints/step-000003")
    assert numbers(run_ahead("resumed")) == numbers(straight[3:])


FAILS_ONCE = """
import os

calls = 0

def third(completions, **_):
    global calls
    calls += 1
    if calls == 3 and not os.path.exists("FOLDER"):
        os.mkdir("FOLDER")
        raise OSError("enough")
    return [0.0] * len(completions)
"""


@pytest.mark.full
def test_an_evaluation_between_rollouts_ahead_changes_nothing(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """It sends the weights of its own step, in the middle of what others sample."""
    options = ["rollout.ahead=2", "grpo.kl=0.0", "train.steps=4", *DP2]
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("".join(json.dumps({"prompt": f"Tell {at}.", "level": "7"}) + "\n" for at in range(5)))
    records = []
    for name, evaluation in (("plain", []), ("found", [f"eval={{every=1, path='{held_out}'}}"])):
        given = [f"run.dir='{tmp_path / name}'", *options, *evaluation]
        assert set(pool.run(2, _run_with_a_server, str(toml), given)) == {""}
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        records.append([json.loads(line) for line in lines])
    plain, found = records
    assert numbers([{key: one[key] for key in plain[0] if key in one} for one in found]) == numbers(plain)
    assert len({one["eval_reward"] for one in found}) == 4
    alone = ("train.steps=0", f"model.weights='{tmp_path}/found/checkpoints/step-000004'", "grpo.kl=0.0", *DP2)
    [last] = run(pool, toml, tmp_path / "alone", 2, *alone, f"eval={{every=1, path='{held_out}'}}")
    assert last["eval_reward"] == pytest.approx(found[-1]["eval_reward"], abs=1e-12)


@pytest.mark.full
def test_a_reward_that_fails_in_the_background_stops_all_ranks(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """On one rank, at the third batch of rollouts."""
    (tmp_path / "third.py").write_text(FAILS_ONCE.replace("FOLDER", str(tmp_path / "taken")))
    options = [f"run.dir='{tmp_path / 'run'}'", "rollout.ahead=2", *DP2, "train.steps=6"]
    said = pool.run(2, _run_with_a_server, str(toml), [*options, f"reward=[{{function='{tmp_path}/third.py:third'}}]"])
    assert len(set(said)) == 1
    assert re.match(r"reward\.0\.function: .*third\.py:third: OSError: enough", said[0])
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


class _Engine:
    """None that is asked anything."""

    def describe(self) -> str:
        return ""


class _Rewards:
    def __init__(self, *names: str) -> None:
        self.names = [name.partition(" ")[0] for name in names]
        self.weights = np.ones(len(names))
        self.contents = {f"reward.{own}": Content(name) for own, name in zip(self.names, names, strict=True)}

    def __call__(self, arguments: Any) -> np.ndarray:
        return np.full((len(arguments["completions"]), len(self.names)), 7.0)


@dataclass
class _Rollouts:
    """What the recipe builds, around an engine that is asked nothing."""

    sampling: Sampling
    state: RolloutState
    batches: RolloutBatches

    def evaluation(self, held_out: Sequence[Any]) -> RewardEvaluation:
        prompts: Any = SimpleNamespace(held_out=held_out, held_out_fingerprint="")
        return RewardEvaluation(replace(self.sampling, prompts=prompts), self.state)

    def figures(self) -> RolloutFigures:
        return RolloutFigures(self.sampling, self.state, self.batches)


def _rollouts(
    toml: Path,
    *overrides: str,
    rewards: Sequence[str] = ("spread", "same"),
    per_round: int = 4,
    kind: str = "llama",
    prompts: Any = None,
) -> _Rollouts:
    """
    Args:
        kind: the model's type.
        rewards: of each function its name, and anything that stands for its code.
        prompts: None: four that are all alike.
    """
    _, loaded = load(str(toml), list(overrides))
    config: Any = loaded
    if prompts is None:
        asked = [Prompt({"prompt": "Hi"}, "Hi", [1])] * 4
        prompts = SimpleNamespace(
            per_round=per_round, total_steps=8, prompts=asked, of_round=lambda number: [0, 1, 2, 3]
        )
    none: Any = None
    model: Any = SimpleNamespace(config=AutoConfig.for_model(kind))
    metrics: Any = SimpleNamespace(sources=[], throughput=SimpleNamespace(memory=none))
    phases = Phases(metrics)
    tokenizer: Any = SimpleNamespace(decode=lambda *_, **__: "", pad_token_id=None)
    conversations = Conversations(config, tokenizer)
    engine: Any = _Engine()
    functions: Any = _Rewards(*rewards)
    generation = Generation(config, model, engine, conversations, phases, sleepers=none)
    scoring = Scoring(functions, conversations, phases)
    sampling = Sampling(config, none, prompts, generation, scoring, phases, metrics)
    state = RolloutState(sampling, Progress())
    return _Rollouts(sampling, state, RolloutBatches(sampling, state))


@pytest.mark.parametrize(("kind", "is_mixture"), [("llama", False), ("qwen3_moe", True)])
def test_a_mixtures_run_says_that_routing_is_not_replayed(toml: Path, kind: str, is_mixture: bool) -> None:
    said = _rollouts(toml, kind=kind).state.describe()
    assert said[1] == "reward: 1 × spread, 1 × same"
    assert sum("does not replay the engine's choices; log_prob_gap" in line for line in said) == is_mixture


def test_only_the_first_update_after_sampling_shows_the_engines_gap(toml: Path) -> None:
    """Later ones also see what the updates between have changed."""
    for version, is_warned in ((2, True), (1, False)):
        running = _rollouts(toml, "rollout.samples_every=0")
        said: list[str] = []
        running.sampling.metrics.message = said.append
        running.batches.figures = {"rollout/without_signal": 0.0}
        running.state.now = Round(2, version, [])
        running.sampling.phases.figures = dict  # pyright: ignore[reportAttributeAccessIssue]
        running.figures()({"step": 3, "log_prob_gap": 1.0})
        assert [text.partition(":")[0] for text in said] == ["warning"] * is_warned, version


def test_the_best_evaluation_is_the_one_with_the_highest_reward(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = _rollouts(toml)
    running.sampling.scoring.weights = {"spread": 1.0, "same": 0.5}
    responses = [Response([1], [-1.0], is_whole=True)] * 3
    monkeypatch.setattr(running.sampling.generation, "respond", lambda *_: responses)
    monkeypatch.setattr(running.sampling.scoring, "score_all", lambda *_, n: np.array([[1.0, 2.0]] * 3))
    monkeypatch.setattr(running.sampling.scoring, "sample", lambda *_: {})
    found = running.evaluation([Prompt({}, "", [1])] * 3)()
    assert (found["eval_reward"], found["eval_loss"]) == (2.0, -2.0)


def test_a_batch_that_is_begun_and_not_learnt_from_is_kept(toml: Path) -> None:
    """A stop, or a save by the clock, comes between a batch of rollouts and its step; other weights would sample
    another one where it was made ahead."""
    responses = [Response([1], [-1.0], is_whole=True)] * 16
    made = [Rollout(at // 4, response, (1.0, 2.0)) for at, response in enumerate(responses)]
    running = _rollouts(toml, "rollout.updates=2").state
    for index, version, is_kept in ((4, 4, False), (4, 2, True), (5, 4, True), (6, 4, False)):
        running.now = Round(2, version, made)
        state = running.saved(index)
        assert (state is not None) is is_kept, (index, version)
    running.now = Round(2, 2, made)
    state = running.saved(4)
    assert state is not None
    ahead = ["rollout.updates=2", "rollout.ahead=1", "rollout.engine='vllm'"]
    state = json.loads(json.dumps(state))
    made_again = "rollouts in progress are made again"
    for overrides, rewards, why in (
        (ahead, ["spread", "same"], ""),
        ([*ahead, "rollout.batch_size=1", "rollout.dtype=bfloat16"], ["spread", "same"], ""),
        (ahead[:1], ["spread", "same"], "changed since: rollout.ahead"),  # too old where none is made ahead
        (ahead, ["spread"], "changed since: reward.same"),
        (ahead, ["same", "spread"], "changed since: order of the rewards"),
        (ahead, ["spread", "same mended"], "changed since: reward.same"),
        ([*ahead, "rollout.temperature=0.5"], ["spread", "same"], "changed since: rollout.temperature"),
        ([*ahead, "rollout.max_new_tokens=9"], ["spread", "same"], "changed since: rollout.max_new_tokens"),
    ):
        resumed = _rollouts(toml, *overrides, rewards=rewards).state
        resumed.resume(state)
        assert (resumed.now is None) is bool(why), (overrides, rewards)
        assert resumed.notes == ([f"{made_again} ({why})"] if why else [])
    # The step learns from round 2. Its rewards were found, but nothing was learnt from those of the rounds after it.
    later = [Round(3, 4, made), Round(4, 4, made)]
    state = json.loads(json.dumps({**round_state(None, later), "made_by": running.made_by}))
    two = [*ahead, "rollout.ahead=2"]
    other_size = [*two, "train.global_batch_size=8"]
    for overrides, rewards, reward, kept, why in (
        (two, ["spread", "same"], 2.0, [3, 4], ""),
        (two, ["spread", "same mended"], 7.0, [3, 4], ""),
        (ahead, ["spread", "same"], 2.0, [3], "changed since: rollout.ahead"),
        (ahead[:1], ["spread", "same"], None, [], "changed since: rollout.ahead"),
        ([*two, "rollout.temperature=0.5"], ["spread", "same"], None, [], "changed since: rollout.temperature"),
        (other_size, ["spread", "same"], None, [], "changed since: train.global_batch_size"),
    ):
        resumed = _rollouts(toml, *overrides, rewards=rewards, per_round=2 if overrides is other_size else 4).state
        resumed._ahead._phases = lambda _: nullcontext()  # pyright: ignore[reportAttributeAccessIssue]
        resumed.resume(state)
        found = resumed._ahead.all_rounds(resumed._prompts.of_round)
        assert [one.number for one in found] == kept, overrides
        assert {rollout.rewards[1] for one in found for rollout in one.rollouts} == ({reward} if kept else set())
        assert [rollout.response for one in found for rollout in one.rollouts] == responses * len(kept)
        assert resumed.notes == ([f"{made_again} ({why})"] if why else [])
    untold = "the checkpoint does not say how they were made", "the checkpoint has them in another form"
    older = {"ahead": {"round": 3, "version": 4, "responses": []}, "made_by": running.made_by}
    for foreign, why in zip(({**state, "made_by": {}}, older), untold, strict=True):
        resumed = _rollouts(toml, *two).state
        resumed.resume(foreign)
        assert resumed.notes == [f"{made_again} ({why})"]
        assert 3 not in resumed._ahead


@pytest.mark.full
def test_another_temperature_samples_anew(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """In the middle of a batch of rollouts; the trainer's own log-probabilities are the reference."""
    options = (
        *DP2,
        "rollout.updates=2",
        "optimizer.lr=1e-6",
        "grpo.kl=0.0",
        "train.steps=2",
        "rollout.samples_every=0",
    )
    directory = tmp_path / "run"
    first = run(pool, toml, directory, 2, *options, "train.steps=1", "lr_schedule.name=constant")
    [said, _] = pool.run(
        2, _lines_of_recipe, str(toml), [f"run.dir='{directory}'", *options, "rollout.temperature=0.5"]
    )
    assert "\nrollouts in progress are made again (changed since: rollout.temperature)\n" in said
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records] == [1, 2]
    assert max(one["log_prob_gap"] for one in (*first, *records)) < 1e-3, "each step's are of its own temperature"
    assert records[1]["rollout/weight_version"] == 1


@pytest.mark.full
def test_rewards_by_another_function_are_not_compared(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """A function that is rewritten between two starts, and gives less: its best is its own."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from scale import factor\n\ndef f(level, **_):\n    return [factor * float(one) for one in level]\n"
    )
    (tmp_path / "scale.py").write_text("factor = 4.0\n")
    rows = tmp_path / "held_out.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Tell {at}.", "level": str(at)}) + "\n" for at in range(3)))
    options = (f"reward=[{{function='{mine}:f'}}]", "grpo.kl=0.0", "rollout.samples_every=0", "optimizer.lr=1e-6")
    options = (*options, f"eval={{every=1, path='{rows}', keep_best=true}}", "checkpoint.export_hf=every")
    options = (*options, "lr_schedule.name=constant", f"run.dir='{tmp_path / 'run'}'", "checkpoint.keep=1")

    def start(steps: int) -> tuple[str, dict[str, Any]]:
        [said] = pool.run(1, _lines_of_recipe, str(toml), [*options, f"train.steps={steps}"])
        newest = read_manifest(tmp_path / "run" / "checkpoints" / f"step-{steps:06d}")
        return said, {"exported": json.loads((tmp_path / "run/hf/.fsdp2kit-export.json").read_text())["step"]} | {
            name: newest.progress[name] for name in ("best_step", "best_eval_loss")
        }

    _, found = start(2)
    assert found == {"best_step": 1, "best_eval_loss": -4.0, "exported": 1}, "later ones are not better"
    (tmp_path / "scale.py").write_text("factor = 1.0\n")
    said, found = start(4)
    assert "changed since: train.steps 2 → 4, reward.f (scale.py changed)\n" in said
    assert "\nevaluations are compared anew from step 2 on: reward.f changed since step 1 was the best\n" in said
    assert found == {"best_step": 3, "best_eval_loss": -1.0, "exported": 3}
    rows.write_text(rows.read_text() + json.dumps({"prompt": "Tell more.", "level": "5"}) + "\n")
    said, found = start(5)
    assert "changed since: train.steps 4 → 5, eval.path (held_out.jsonl changed, 3 → 4 rows)\n" in said
    assert "on: held-out prompts changed since step 3 was the best" in said
    assert found == {"best_step": 5, "best_eval_loss": -2.0, "exported": 5}
    said, found = start(6)
    assert "compared anew" not in said
    assert found == {"best_step": 5, "best_eval_loss": -2.0, "exported": 5}


@pytest.mark.full
def test_ranks_may_have_no_group(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """One group of four, on one rank and on two: the same rewards."""
    few = ["train.global_batch_size=4", "train.steps=2", "grpo.kl=0.0"]
    alone = run(pool, toml, tmp_path / "alone", 1, *few)
    found = run(pool, toml, tmp_path / "found", 2, *few, *DP2)
    for key in ("reward", "reward/spread", "response_length", "tokens"):
        assert [one[key] for one in found] == [one[key] for one in alone]


class _Refuses(BaseHTTPRequestHandler):
    """A server that is none: it answers with 501."""

    def log_message(self, *_: Any) -> None: ...


def test_what_is_not_there_is_refused_before_a_directory_is_made(toml: Path, tmp_path: Path) -> None:
    mine = toml.parent / "mine.py"
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refuses) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for options, message in (
            (["rollout.engine=vllm", f"rollout.url='http://127.0.0.1:{server.server_port}'"], "^rollout.url: .*501"),
            ([f"reward=[{{function='{mine}:needs'}}]"], "missing a required argument: 'no_such_column'"),
            ([f"reward=[{{function='{mine}:absent'}}]"], "^reward.0.function: .*AttributeError"),
        ):
            assert re.search(message, run_recipe(str(toml), [f"run.dir='{tmp_path}/x'", *options]))
            assert not (tmp_path / "x").exists()
        server.shutdown()


@pytest.mark.full
def test_a_run_that_learns_nothing_is_warned_of_once(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    options = [f"run.dir='{tmp_path}/x'", f"reward=[{{function='{toml.parent}/mine.py:same'}}]", "train.steps=2"]
    [said] = pool.run(1, _lines_of_recipe, str(toml), options)
    assert re.findall(r"warning: step (\d+): no group has a signal", said) == ["1"]


def test_rewards_that_are_the_same_have_the_same_sum() -> None:
    """Or a group of them would have a signal; BLAS adds up some rows in another order."""
    rng = np.random.default_rng(0)
    for groups in range(1, 60):
        rewards = rng.random((groups, 8)).round(3).repeat(3, axis=0)
        weights = {str(at): weight for at, weight in enumerate(rng.random(8))}
        sums = Scoring.totals(cast(Any, SimpleNamespace(weights=weights)), rewards).reshape(-1, 3)
        assert not has_signal(sums).any()
        np.testing.assert_allclose(sums.flatten(), rewards @ [*weights.values()], rtol=1e-14)


@pytest.mark.full
def test_groups_without_signal_and_masked_responses_change_nothing(
    toml: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    for name, option in (("signal", "reward=[{function='mine.py:same'}]"), ("masked", "grpo.truncated=mask")):
        path = toml.parent / f"{name}.toml"
        text = toml.read_text()
        if name == "signal":
            text = "\n".join(line for line in text.splitlines() if "mine.py" not in line) + f"\n{option}"
            options = []
        else:
            options = [option, "rollout.max_new_tokens=1"]
        path.write_text(text)
        [record] = run(pool, path, tmp_path / name, 1, "train.steps=1", "grpo.kl=0.0", *options)
        assert record["loss"] == record["grad_norm"] == 0.0
        if name == "signal":
            assert record["rollout/without_signal"] == 1.0
            assert record["reward"] == pytest.approx(0.1)
        else:
            assert record["rollout/without_signal"] < 1.0
            assert record["rollout/truncated"] == 1.0
        assert record["tokens"] == 16 * record["response_length"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.n=5", "train.global_batch_size: 16 responses are not whole groups of rollout.n = 5; use 15 or 20"),
        ("rollout.max_new_tokens=50", r"prompts\.jsonl:\d+: the prompt has .* leaves 14 \(\d+ such rows of 10"),
        ("rollout.max_new_tokens=64", "rollout.max_new_tokens: 64 leaves no room for a prompt in data.seq_len = 64"),
        ("eval.every=1", "eval: evaluation would run on the training data itself"),
        ("eval={every=1, split=3, prompts=['Hi']}", "eval.prompts: held-out rewards have answers"),
        ("eval={every=1, sets={a={path='prompts.jsonl'}}}", "eval.sets: prompts are held out as one set"),
        ("eval.split=10", "eval.split: 10 holds out every row of data.path: "),
        ("rollout.ahead=-1", "rollout.ahead"),
        ("rollout.ahead=2", "rollout.ahead: 2 with rollout.engine = 'transformers'.*; leave it out, or use a server"),
        ("rollout={engine='vllm', ahead=1, n=4, sleep=true, max_new_tokens=8}", "rollout.sleep: with rollout.ahead"),
        (
            "rollout={n=4, max_new_tokens=8, sleep=true}\ncheckpoint.async_save=true",
            "^checkpoint.async_save: true with rollout.sleep, which takes away what is still being copied",
        ),
        ("data.streaming=true", "data.streaming"),
        ("data.pack=false", "data.pack"),
        ("rollout.tp=2", r"rollout.tp: 2 does not divide the job's ranks \(1\); use a divisor of them"),
        (
            "rollout={tp=2, engine='vllm', n=4, max_new_tokens=8}",
            "rollout.tp: 2 with rollout.engine = 'vllm', which is split as it was started",
        ),
        (
            "rollout={engine='vllm', n=4, max_new_tokens=8, url='http://127.0.0.1:80a0'}",
            "rollout.url: .* is no address",
        ),
        ("lora={rank=4, quantize='nf4'}", "lora.quantize: 'nf4' with rollouts"),
        ("reward=[]", "reward"),
        ("reward=[{function='nowhere.py:f'}]", "nowhere.py: no such file"),
        ("reward=[{function='spread'}]", "reward"),
        ("data.columns.prompt=asked", "asked"),
        ("data.columns={prompt='a', messages='b'}", "data.columns: prompt 'a' and messages 'b', .*; name one"),
    ],
)
def test_mistakes_are_one_line(override: str, message: str, toml: Path, tmp_path: Path) -> None:
    said = run_recipe(str(toml), [f"run.dir='{tmp_path}/x'", *override.splitlines()])
    assert re.search(message, said)
    assert "\n" not in said
    assert not (tmp_path / "x").exists()


@pytest.mark.full
def test_a_model_that_cannot_be_split_is_refused_on_every_rank(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    options = (*CP2, "rollout.tp=4", f"run.dir='{tmp_path}/x'", "data.path=" + str(toml.parent / "prompts.jsonl"))
    said = pool.run(4, run_recipe, str(toml), options)
    assert set(said) == {"rollout.tp: 4 does not divide the model's num_key_value_heads 2; use a divisor of it"}
    assert not (tmp_path / "x").exists()


class _EnoughError(Exception):
    """What is to be seen was seen."""


def test_no_two_responses_are_drawn_alike(toml: Path) -> None:
    """Also where a prompt is asked again: in its group, in later rounds, and where it is held out."""
    prompts = prompts_of(toml, "train.steps=9")
    rollouts = _rollouts(toml, prompts=prompts)
    questions = [question for number in range(9) for question in rollouts.state._questions(number)]
    asked: list[Any] = []

    def note(held_out: Sequence[Any], _: int) -> None:
        asked.extend(held_out)
        raise _EnoughError

    rollouts.sampling.generation.respond = note  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(_EnoughError):
        rollouts.evaluation(prompts.prompts)()
    assert (len(questions), len(asked)) == (9 * 16, 10)
    # As torch and numpy have it, a seed with zeros behind it is the same one.
    assert len({tuple(np.trim_zeros(question.seed, "b")) for question in (*questions, *asked)}) == 9 * 16 + 10


def test_an_evaluation_leaves_the_seconds_of_its_step(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = _rollouts(toml)
    monkeypatch.setattr(rollouts.sampling.scoring, "score_all", lambda *_, **__: np.ones((2, 2)))
    rollouts.sampling.phases.seconds = {"generate": 5.0}

    def respond(*_: Any) -> list[Response]:
        rollouts.sampling.phases.seconds["generate"] = 0.1
        return [Response([1], [-1.0], is_whole=True)] * 2

    monkeypatch.setattr(rollouts.sampling.generation, "respond", respond)
    assert rollouts.evaluation(prompts_of(toml).prompts[:2])()["eval_reward"] == 2.0
    assert rollouts.sampling.phases.seconds.keys() == {"generate", "evaluate"}
    assert rollouts.sampling.phases.seconds["generate"] == 5.0


def test_packs_have_nearly_equal_tokens() -> None:
    random.seed(0)
    for multiple, seq_len in ((1, 100), (2, 64), (4, 1000)):
        lengths = [random.randint(1, min(seq_len, 64)) for _ in range(57)]
        rows = balanced_packs(lengths, seq_len=seq_len, multiple=multiple)
        assert sorted(at for row in rows for at in row) == list(range(57))
        sums = [sum(lengths[at] for at in row) for row in rows]
        assert max(sums) <= seq_len
        assert len(rows) % multiple == 0
        assert len(rows) <= 1.2 * sum(lengths) / seq_len + multiple
        assert max(sums) - min(sums) <= max(lengths)
    assert balanced_packs([5, 5], seq_len=5, multiple=4) == [[0], [1], [], []]
