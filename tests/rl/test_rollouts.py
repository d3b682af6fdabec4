"""The real recipe on a tiny model: what no mesh changes, resuming, prompts, rollouts that teach nothing."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from fsdp2kit.config.rl_schema import PromptDataConfig
from fsdp2kit.data.formats import encode_prompts, row_format
from fsdp2kit.data.rows import Row
from fsdp2kit.errors import UserError
from fsdp2kit.rl.packing import deal_rows
from fsdp2kit.run import load
from tests.data.templates import make_tokenizer
from tests.reference import DEMO, demo_model_dir
from tests.workers import WorkerPool

REWARDS = '''
def spread(completion_ids, level, **_):
    """Depends on the tokens and on the row's own column."""
    return [len({token % 7 for token in ids}) / 7 + ids[0] % 3 * int(one) for ids, one in zip(completion_ids, level)]

def same(completions, **_):
    return [0.1] * len(completions)
'''
DP2, CP2 = ("train.micro_batch_size=1",), ("mesh.cp=2", "train.micro_batch_size=2")


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = demo_model_dir(tmp_path_factory.mktemp("rl"))
    (folder / "mine.py").write_text(REWARDS)
    rows = [{"prompt": f"Say {'it, ' * (at % 4)}{at}.", "level": str(at % 2)} for at in range(10)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.toml").write_text(f"""
        recipe = "grpo"
        run.seed = 1
        model.path = "{folder}"
        fsdp.param_dtype = "float32"
        data = {{ path = "prompts.jsonl", seq_len = 64 }}
        rollout = {{ n = 4, max_new_tokens = 8, batch_size = 5, samples_every = 2 }}
        reward = [{{ function = "mine.py:spread" }}, {{ function = "mine.py:same", weight = 2.0 }}]
        grpo = {{ kl = 0.05 }}
        train = {{ steps = 4, global_batch_size = 16 }}
        optimizer.lr = 3e-3
        checkpoint = {{ every = 1, keep = 9, export_hf = "never" }}
        wandb.mode = "disabled"
    """)
    return folder / "run.toml"


def _run_recipe(toml: str, overrides: Sequence[str]) -> str:
    try:
        recipe, config = load(toml, overrides)
        recipe.main(config)
    except UserError as error:
        return str(error)
    return ""


def run(pool: WorkerPool, toml: Path, directory: Path, size: int, *overrides: str) -> list[dict[str, Any]]:
    """The records of a run of the recipe."""
    assert set(pool.run(size, _run_recipe, str(toml), [f"run.dir='{directory}'", *overrides])) == {""}
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def numbers(records: list[dict[str, Any]]) -> list[dict[str, float]]:
    """What a run comes to: everything but speeds, memory and what depends on rounding alone."""
    timed = ("seconds", "per_second", "memory", "tflops", "mfu", "time", "packing", "gap", "epoch")
    return [{key: value for key, value in one.items() if not any(word in key for word in timed)} for one in records]


def test_neither_the_mesh_nor_its_batches_change_what_is_sampled(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    plain = run(pool, toml, tmp_path / "one", 1, "rollout.batch_size=64", "train.steps=3")
    samples = (tmp_path / "one" / "samples.jsonl").read_text()
    for name, mesh in (("dp", DP2), ("cp", CP2)):
        found = run(pool, toml, tmp_path / name, 2, *mesh, "train.steps=3")
        for mine, other in zip(numbers(found), numbers(plain), strict=True):
            assert mine == pytest.approx(other, rel=2e-3, abs=2e-5)
            assert mine["reward"] == other["reward"]
        assert (tmp_path / name / "samples.jsonl").read_text() == samples
        assert all(one["log_prob_gap_max"] < 2e-5 for one in found)
    assert len({one["reward"] for one in plain}) == 3
    assert plain[1]["kl"] > 0
    assert plain[1]["rollout/weight_version"] == 1
    best, worst = map(json.loads, samples.splitlines())
    assert best["step"] == worst["step"] == 2
    assert best["reward"] > worst["reward"]


def test_what_sleeps_meanwhile_changes_no_digit(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    awake = run(pool, toml, tmp_path / "awake", 2, *CP2)
    asleep = run(pool, toml, tmp_path / "asleep", 2, *CP2, "rollout.sleep=true")
    assert numbers(asleep) == numbers(awake)
    assert all(one["seconds/sleep"] > 0 and one["seconds/wake_up"] > 0 for one in asleep)
    assert not any("seconds/sleep" in one for one in awake)


@pytest.mark.parametrize("step", [2, 3])
def test_resumed_between_or_within_rollouts_every_digit_is_the_same(
    step: int, toml: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    options = (*DP2, "rollout.updates=2", "grpo.loss=dapo", "data.path=" + str(toml.parent / "prompts.jsonl"))
    straight = run(pool, toml, tmp_path / "straight", 2, *options)
    assert any(one["clip_fraction"] for one in straight)
    name = f"checkpoints/step-{step:06d}"
    shutil.copytree(tmp_path / "straight" / name, tmp_path / "resumed" / name)
    resumed = run(pool, toml, tmp_path / "resumed", 2, *options)
    assert [one["step"] for one in resumed] == list(range(step + 1, 5))
    assert numbers(resumed) == numbers(straight[step:])


def _lines_of_recipe(toml: str, overrides: Sequence[str]) -> str:
    with redirect_stdout(StringIO()) as said:
        assert _run_recipe(toml, overrides) == ""
    return said.getvalue()


def test_what_updates_change_is_no_gap_of_the_engine(toml: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """Rounding is beyond the smaller limit at step 1; the update is beyond the larger one at step 2."""
    for name, limit, warned in (("drift", 1e-3, []), ("rounding", 1e-12, ["1"])):
        options = [f"run.dir='{tmp_path / name}'", "rollout.updates=2", "train.steps=2", f"grpo.gap_warning={limit}"]
        [said] = pool.run(1, _lines_of_recipe, str(toml), options)
        assert re.findall(r"warning: step (\d+): trainer and engine differ", said) == warned
        records = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        assert 1e-12 < records[0]["log_prob_gap"] < 1e-3 < records[1]["log_prob_gap"]


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
        ("eval.every=1", "eval.every: recipe 'grpo' has no evaluation"),
        ("model.loss_kernel=torch", "model.loss_kernel: 'torch' gives no log-probabilities"),
        ("data.streaming=true", "data.streaming"),
        ("data.pack=false", "data.pack"),
        ("rollout.engine=sglang", "rollout.engine"),
        ("lora={rank=4, quantize='nf4'}", "lora.quantize: 'nf4' with rollouts"),
        ("reward=[]", "reward"),
        ("reward=[{function='nowhere.py:f'}]", "nowhere.py: no such file"),
        ("reward=[{function='spread'}]", "reward"),
        ("data.columns.prompt=asked", "asked"),
    ],
)
def test_mistakes_are_one_line(override: str, message: str, toml: Path, tmp_path: Path) -> None:
    said = _run_recipe(str(toml), [f"run.dir='{tmp_path}/x'", override])
    assert re.search(message, said)
    assert "\n" not in said
    assert not (tmp_path / "x").exists()


def test_prompts_of_every_kind() -> None:
    tokenizer, how = AutoTokenizer.from_pretrained(DEMO / "tokenizer"), row_format(PromptDataConfig())
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    answered = [*asked, {"role": "assistant", "content": "Hello"}]
    rows: list[dict[str, Any]] = [
        {"messages": asked},
        {"messages": answered, "level": 3},
        {"prompt": asked},
        {"conversations": [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "Hi"}]},
        {"prompt": "Hi"},
    ]
    found = encode_prompts([Row(row, f"row {at}") for at, row in enumerate(rows)], how, tokenizer)
    expected = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    for prompt in found[:4]:
        assert prompt.messages == asked
        assert tokenizer.decode(prompt.ids) == expected
    assert found[1].row["level"] == 3
    assert found[4].messages == [{"role": "user", "content": "Hi"}]
    for row, message in (
        ({"text": "Hi"}, "has no 'messages'"),
        ({"messages": answered[2:]}, "no prompt before the answer"),
        ({"prompt": 3}, "prompt is of type int"),
    ):
        with pytest.raises(UserError, match=f"row 0: .*{message}"):
            encode_prompts([Row(row, "row 0")], how, tokenizer)
    plain = make_tokenizer(None)
    [prompt] = encode_prompts([Row({"prompt": "Hi there"}, "row 0")], how, plain)
    assert prompt.messages == "Hi there"
    assert prompt.ids == plain("Hi there")["input_ids"]


def test_rows_have_nearly_equal_tokens() -> None:
    random.seed(0)
    for multiple, seq_len in ((1, 100), (2, 64), (4, 1000)):
        lengths = [random.randint(1, min(seq_len, 64)) for _ in range(57)]
        rows = deal_rows(lengths, seq_len=seq_len, multiple=multiple)
        assert sorted(at for row in rows for at in row) == list(range(57))
        sums = [sum(lengths[at] for at in row) for row in rows]
        assert max(sums) <= seq_len
        assert len(rows) % multiple == 0
        assert len(rows) <= 1.2 * sum(lengths) / seq_len + multiple
        assert max(sums) - min(sums) <= max(lengths)
    assert deal_rows([5, 5], seq_len=5, multiple=4) == [[0], [1], [], []]
