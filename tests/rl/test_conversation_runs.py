"""Runs that learn from conversations: what no mesh changes, resuming, errors, and that the model learns to win."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from fsdp2kit.config.checks import check_config
from fsdp2kit.errors import UserError
from fsdp2kit.rl.environments.conversations import check_environment
from fsdp2kit.run import load
from tests.rl.helpers.games import MODEL, random_plays, write_game, write_tokenizer
from tests.rl.helpers.runs import numbers, run, run_recipe
from tests.rl.helpers.vllm import figures, free_port, path_in_environment, vllm_server
from tests.support.workers import WorkerPool

MESHES = {"dp": (2, ()), "cp": (2, ("mesh.cp=2",)), "tp": (2, ("rollout.tp=2",))}
# Random weights end a turn seldom; these options let them, and keep rounding out of what they sample.
REWARD = 'reward=[{function="math:sqrt"}]'
OPTIONS = (
    "train.steps=2",
    "optimizer.eps=1e-2",
    "rollout.max_new_tokens=24",
    "rollout.samples_every=1",
    "rollout.n=8",
)


@pytest.mark.full
def test_conversations_are_the_same_on_a_mesh_and_after_a_resume(pool: WorkerPool, tmp_path: Path) -> None:
    toml, options = write_game(tmp_path, "Calculator"), (*OPTIONS, "rollout.updates=2", "checkpoint.every=1")
    plain = run(pool, toml, tmp_path / "one", 1, *options)
    found = run(pool, toml, tmp_path / "cp", 2, *options, "mesh.cp=2")
    shutil.rmtree(tmp_path / "cp" / "checkpoints" / "step-000002")
    lines = (tmp_path / "cp" / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "cp" / "metrics.jsonl").write_text(lines[0])
    # The second step learns from conversations of the checkpoint.
    again = run(pool, toml, tmp_path / "cp", 2, *options, "mesh.cp=2")
    for records in (found, again):
        for mine, other in zip(numbers(records), numbers(plain), strict=True):
            assert mine == pytest.approx(other, rel=2e-3, abs=2e-5)
    assert numbers(again) == numbers(found)
    assert all(one["log_prob_gap_max"] < 2e-5 for one in found[:1])
    assert any(one["turns"] > 1 for one in found)
    assert {"reward/environment", "turns", "rollout/truncated"} <= found[0].keys()
    samples = (tmp_path / "one" / "samples.jsonl").read_text()
    assert (tmp_path / "cp" / "samples.jsonl").read_text() == samples
    assert "assistant: " in json.loads(samples.splitlines()[0])["answer"]


@pytest.mark.full
@pytest.mark.parametrize("mesh", sorted(MESHES))
def test_every_mesh_has_the_same_conversations(mesh: str, pool: WorkerPool, tmp_path: Path) -> None:
    toml = write_game(tmp_path, "Guess")
    rewards = 'reward=[{function="rewards.py:turns", weight=0.1}]'
    (tmp_path / "rewards.py").write_text(
        "def turns(completions, secret, truncated, **_):\n"
        "    return [sum(m['role'] == 'assistant' for m in one) for one in completions]\n"
    )
    rewards = rewards.replace("rewards.py", f"{tmp_path}/rewards.py")
    plain = run(pool, toml, tmp_path / "one", 1, *OPTIONS, rewards)
    size, options = MESHES[mesh]
    found = run(pool, toml, tmp_path / mesh, size, *OPTIONS, rewards, *options)
    for mine, other in zip(numbers(found), numbers(plain), strict=True):
        assert mine == pytest.approx(other, rel=2e-3, abs=2e-5)
        assert mine["reward/turns"] == mine["turns"]
        assert mine["reward"] == pytest.approx(mine["reward/environment"] + 0.1 * mine["turns"])
    assert (tmp_path / mesh / "samples.jsonl").read_text() == (tmp_path / "one" / "samples.jsonl").read_text()


@pytest.mark.parametrize("kind", ["reset", pytest.param("step", marks=pytest.mark.full)])
def test_an_environment_that_fails_on_one_rank_stops_all(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    """With engines that generate together: the other ranks must not wait for that one's next turn."""
    toml = write_game(tmp_path, "Guess")
    code = (tmp_path / "games.py").read_text()
    fails = 'if row["secret"] == 3: raise OSError("no")\n        ' if kind == "reset" else ""
    code = code.replace("self.secret, self.left", f"{fails}self.secret, self.left")
    if kind == "step":
        code = code.replace("        self.left -= 1\n", '        if self.secret == 3: raise OSError("no")\n')
    (tmp_path / "games.py").write_text(code)
    options = [f"run.dir='{tmp_path}/run'", *OPTIONS, "rollout.tp=2"]
    found = pool.run(2, run_recipe, str(toml), options, timeout=120)
    assert any(f"games.py:Guess: {kind}: OSError: no" in text for text in found), found


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.format=prompts"], "data.format: 'prompts' with rollout.environment, which makes its own prompts"),
        (["rollout.environment=none"], "reward: there is none; write [[reward]] with a function"),
        (["rollout.environment=none", "data.format=rows"], 'data.format: "rows" without rollout.environment'),
        (
            ["rollout.environment=none", "rollout.max_turns=3", REWARD],
            "rollout.max_turns: without rollout.environment",
        ),
        (["rollout.environment=nowhere.py:Guess"], "no such file"),
    ],
)
def test_what_contradicts_an_environment_is_refused(overrides: list[str], message: str, tmp_path: Path) -> None:
    toml = str(write_game(tmp_path, "Guess"))
    assert load(toml, [])[1].data.format == "rows"
    with pytest.raises(UserError, match=re.escape(message)):
        check_config(load(toml, overrides)[1], world_size=1, local_world_size=1)


def test_a_check_asks_the_environment(tmp_path: Path) -> None:
    toml, name = str(write_game(tmp_path, "Calculator")), f"environment: {tmp_path}/games.py:Calculator, imported"
    _, config = load(toml, [])
    [line] = check_environment(config, missing=()).values()
    assert line == f"{name}; it begins with 13 tokens, 1 tool"
    assert [*check_environment(config, missing=["tokenizer"]).values()] == [name]


def _imitate(pool: WorkerPool, folder: Path, *options: str) -> Path:
    """A model that imitates random plays."""
    write_tokenizer(folder / "tokenizer")
    (folder / "plays.jsonl").write_text("".join(json.dumps(row) + "\n" for row in random_plays(3000)))
    (folder / "sft.toml").write_text(f"""
    recipe = "sft"
    fsdp.param_dtype = "float32"
    data = {{ path = "plays.jsonl", seq_len = 128 }}
    train = {{ steps = 120, global_batch_size = 8, micro_batch_size = 4 }}
    optimizer.lr = 5e-3
    wandb.mode = "disabled"
    {MODEL}
""")
    assert set(pool.run(2, run_recipe, str(folder / "sft.toml"), [f"run.dir='{folder}/sft'", *options])) == {""}
    return folder / "sft" / "hf"


def _learn(pool: WorkerPool, folder: Path, game: str, model: Path, *options: str) -> list[float]:
    """Rewards by step of a model that learns from a game."""
    toml = write_game(folder, game, model=f'model.path = "{model}"')
    batch = ("train.steps=160", "train.global_batch_size=128", "rollout.n=16", "rollout.updates=4", "grpo.loss=dapo")
    overrides = [f"run.dir='{folder}/run'", *batch, "train.micro_batch_size=8", *options]
    assert set(pool.run(2, run_recipe, str(toml), overrides, timeout=1500)) == {""}
    rewards = figures(folder / "run", "reward")
    print(game, options, rewards[0], sum(rewards[-10:]) / 10, [round(one, 2) for one in rewards[::10]])
    return rewards


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mesh", ["dp", "cp"])
@pytest.mark.parametrize(("game", "chance"), [("Guess", 0.7), ("Calculator", 0.4)])
def test_a_game_is_learnt(game: str, chance: float, mesh: str, pool: WorkerPool, tmp_path: Path) -> None:
    rewards = _learn(pool, tmp_path, game, _imitate(pool, tmp_path), *MESHES[mesh][1])
    assert rewards[0] < chance
    assert sum(rewards[-10:]) / 10 > 0.8


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_game_is_learnt_with_a_real_server(pool: WorkerPool, tmp_path: Path) -> None:
    python, port = path_in_environment("FSDP2KIT_VLLM_PYTHON"), free_port()
    # vLLM's attention on a CPU has no heads of 16.
    model = _imitate(pool, tmp_path, "model.config.num_attention_heads=2", "model.config.num_key_value_heads=1")
    limits = ("--max-model-len", 128, "--max-num-seqs", 64)
    with vllm_server(python, model, tmp_path, dtype="float32", port=port, options=limits) as url:
        rewards = _learn(pool, tmp_path, "Guess", model, "rollout.engine=vllm", f"rollout.url={url}")
    assert rewards[0] < 0.7
    assert sum(rewards[-10:]) / 10 > 0.8
