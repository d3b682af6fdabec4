"""`fsdp2kit new`: what it guesses of rows, what it writes, and that what it writes trains."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli
import torch

from fsdp2kit.planner.devices import ALLOWANCE, DEVICES
from fsdp2kit.planner.search import Search
from fsdp2kit.run import load
from fsdp2kit.run import main as run_main
from fsdp2kit.starter.draft import KINDS
from fsdp2kit.starter.machine import bfloat16_speedup, launch_command, nodes_of
from fsdp2kit.starter.rewards import is_finished, words_in_common
from fsdp2kit.starter.rows import choose_length, guess_format
from recipes import sft
from tests.support.models import demo_model_dir, needs_integers
from tests.support.runs import run_recipe
from tests.support.workers import WorkerPool
from tools import new

MARKS = {"qlora": (needs_integers,)}
CHAT = [
    {
        "messages": [
            {"role": "user", "content": f"Is {at} odd?"},
            {"role": "assistant", "content": "yes" * (1 + at % 3)},
        ]
    }
    for at in range(40)
]
PAIRS = [{"question": f"Is {at} odd?", "chosen": f"{at} may be", "rejected": "I will not say"} for at in range(40)]
PROMPTS = [{"prompt": f"What is after {at}?", "answer": str(at + 1)} for at in range(40)]
TEXTS = [{"content": f"A text about the number {at}. " * (1 + at % 5)} for at in range(40)]
ROWS = {"dpo": PAIRS, "grpo": PROMPTS, "pretrain": TEXTS, "fsdp1_baseline": TEXTS}
QUICK = ("sft",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo_model_dir(tmp_path_factory.mktemp("model"), kind="smollm2_even")


def write_rows(folder: Path, kind: str) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS.get(kind, CHAT)), encoding="utf-8")
    return path


def write_new(kind: str, model: Path, folder: Path, *arguments: str) -> Path:
    """The TOML that `new` writes for a tiny model and forty rows."""
    out = folder / f"{kind}.toml"
    teacher = ["--teacher", str(model)] if kind == "distill" else []
    given = ["--model", str(model), "--data", str(write_rows(folder, kind)), "--out", str(out)]
    assert new.main([kind, *given, *teacher, *arguments]) == 0
    return out


def check(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--check`` for the launch command in the TOML's first line."""
    command = toml.read_text(encoding="utf-8").splitlines()[0]
    nodes, local = (
        int(found[1]) if (found := re.search(rf"{flag} (\d+)", command)) else 1
        for flag in ("--nnodes", "--nproc(?:-per-node)?")
    )
    monkeypatch.setenv("WORLD_SIZE", str(nodes * local))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    assert run_main([str(toml), "--check"]) == 0


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else (pytest.mark.full, *MARKS.get(kind, ()))) for kind in KINDS],
)
def test_what_is_written_passes_the_check_and_trains(
    kind: str, model: Path, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = write_new(kind, model, tmp_path, "--world-size", "2")
    text = toml.read_text(encoding="utf-8")
    assert 20 <= len(text.splitlines()) <= 45
    check(toml, monkeypatch)
    assert load(str(toml), [])[1].recipe == KINDS[kind].recipe
    if kind in QUICK:  # other tests train with it
        return
    overrides = [f"run.dir='{tmp_path / 'run'}'", "train.steps=2", "fsdp.param_dtype=float32", "wandb.mode=disabled"]
    overrides += ["rollout.max_new_tokens=4"] if kind == "grpo" else []
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    said = pool.run(2, run_recipe, str(toml), overrides)[0]
    assert not said.startswith("error"), said
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in records] == [1, 2]
    assert all(np.isfinite(one["loss"]) for one in records)


def test_columns_and_length_come_from_the_data(model: Path, tmp_path: Path) -> None:
    values = tomli.loads(write_new("dpo", model, tmp_path).read_text(encoding="utf-8"))
    assert values["data"]["columns"] == {"prompt": "question"}
    assert values["data"]["wrap"] == "chat"  # the demo's tokenizer has a chat template
    assert values["data"]["path"] == "./rows.jsonl"
    assert values["data"]["seq_len"] == 128


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x"}]}, ("chat", {})),
        ("chat", {"dialog": [{"from": "human", "value": "x"}]}, ("chat", {"messages": "dialog"})),
        ("chat", {"prompt": "x", "completion": "y"}, ("prompt_completion", {})),
        ("chat", {"input": "x", "answer": "y"}, ("prompt_completion", {"prompt": "input", "completion": "answer"})),
        ("chat", {"instruction": "x", "input": "z", "output": "y"}, ("alpaca", {})),
        ("chat", {"text": "x"}, ("text", {})),
        ("chat", {"input_ids": [1, 2]}, ("tokens", {})),
        ("text", {"id": 1, "content": "x"}, ("text", {"text": "content"})),
        ("preference", {"prompt": "x", "chosen": "y", "rejected": "z"}, ("preference", {})),
        ("preference", {"chosen": "y", "worse": "z"}, ("preference", {"rejected": "worse"})),
        ("preference", {"query": "x", "chosen": "y", "rejected": "z"}, ("preference", {"prompt": "query"})),
        ("prompts", {"question": "x", "answer": "y"}, ("prompts", {"prompt": "question"})),
        ("prompts", {"messages": [{"role": "user", "content": "x"}]}, ("prompts", {})),
    ],
)  # fmt: skip
def test_the_format_is_guessed(kind: str, row: dict[str, Any], expected: tuple[str, dict[str, str]]) -> None:
    guess = guess_format([row, row], kind, where="data")
    assert (guess.format, guess.columns) == expected


def test_lengths_hold_99_rows_in_a_hundred_and_stay_in_the_context() -> None:
    lengths = np.array([*[300] * 99, 5000])
    assert choose_length(lengths, context=None) == 384
    assert choose_length(lengths, context=None, more=256) == 768
    assert choose_length(lengths, context=256) == 256
    assert choose_length(np.array([9000]), context=None, is_text=True) == 4096
    assert choose_length(np.array([3]), context=None) == 128


@pytest.mark.parametrize(
    ("ranks", "expected"), [(1, (1, 1)), (6, (1, 6)), (8, (1, 8)), (12, (2, 6)), (18, (3, 6)), (13, (13, 1))],
)  # fmt: skip
def test_ranks_are_divided_over_equal_nodes(ranks: int, expected: tuple[int, int]) -> None:
    assert nodes_of(ranks) == expected
    command = launch_command("a b.toml", ranks)
    nodes, local = expected
    if nodes == 1:
        assert command == "fsdp2kit run 'a b.toml'" + f" --nproc {local}" * (local > 1)
    else:
        assert command.startswith(f"torchrun --nnodes {nodes} --nproc-per-node {local} ")
        assert command.endswith("-m fsdp2kit.run 'a b.toml'")


@pytest.mark.parametrize(("speedup", "advice"), [(0.3, 'add fsdp.param_dtype = "float32"'), (1.6, "may stay")])
def test_a_cpu_is_measured_before_advice_is_given(
    speedup: float, advice: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("fsdp2kit.starter.machine.bfloat16_speedup", lambda: speedup)
    monkeypatch.setattr(new, "_machine", lambda options: (None, 1))
    assert new.main(["sft", "--out", str(tmp_path / "sft.toml")]) == 0
    (line,) = [one for one in (tmp_path / "sft.toml").read_text().splitlines() if one.startswith("# On a CPU")]
    assert advice in line
    assert f"{speedup} times as fast in bfloat16 as in float32" in line


def test_a_slow_bfloat16_is_measured_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that counts matmuls: three ticks each in float32, and one in bfloat16."""
    ticks = 0.0
    own = torch.Tensor.__matmul__

    def counted(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        nonlocal ticks
        ticks += 3 if left.dtype == torch.float32 else 1
        return own(left, right)

    monkeypatch.setattr(torch.Tensor, "__matmul__", counted)
    monkeypatch.setattr("fsdp2kit.starter.machine.time.perf_counter", lambda: ticks)
    assert bfloat16_speedup() == 3


def test_a_plan_for_ranks_of_two_nodes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toml = write_new("sft", model, tmp_path, "--world-size", "12", "--device", "h100")
    text = toml.read_text(encoding="utf-8")
    assert text.startswith("# torchrun --nnodes 2 --nproc-per-node 6 ")
    assert "# Planned for 12 × H100" in text
    assert "as planned" in text
    check(toml, monkeypatch)


def test_what_does_not_fit_is_a_warning_with_what_would(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device with hardly more memory than the planner's allowance for libraries; the search finds nothing."""
    monkeypatch.setattr(Search, "fit", lambda self: [])
    small = replace(DEVICES["l4"], memory=ALLOWANCE + 2**20)
    monkeypatch.setitem(DEVICES, "l4", small)
    toml = write_new("sft", model, tmp_path, "--world-size", "1", "--device", "l4")
    err = capsys.readouterr().err
    assert re.fullmatch(r"warning: this does not fit on 1 rank of 3\.0 GiB: 3\.\d GiB are needed; .+\n", err)
    check(toml, monkeypatch)


def test_without_model_and_data_the_check_names_what_to_fill_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for kind, missing in (("sft", "model"), ("distill", "model"), ("grpo", "model")):
        out = tmp_path / f"{kind}.toml"
        assert new.main([kind, "--out", str(out)]) == 0
        assert "fill in model.path, " in capsys.readouterr().out
        assert run_main([str(out), "--check"]) == 2
        assert f"error: {missing}: neither model.path nor model.config" in capsys.readouterr().err


def test_a_file_is_not_overwritten_and_a_mistake_writes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "x.toml"
    rows = write_rows(tmp_path, "sft")
    mistakes = {
        ("sfd",): "did you mean sft?",
        ("sft", "--teacher", "x"): "--teacher: is not for sft",
        ("sft", "--data", "missing.jsonl"): "no such file or folder",
        ("dpo", "--model", str(model), "--data", str(rows)): "no preference data; use recipe sft",
        ("sft", "--device", "h1000"): "--device",
    }
    for arguments, says in mistakes.items():
        assert new.main([*arguments, "--out", str(out)]) == 2
        assert says in capsys.readouterr().err
        assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]
    out.write_text("mine", encoding="utf-8")
    assert new.main(["sft", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"error: --out: {out} exists, and is not overwritten; choose another name\n"
    assert out.read_text(encoding="utf-8") == "mine"


def test_the_rewards_to_begin_with() -> None:
    said = [[{"role": "assistant", "content": "The answer is 42."}], [{"role": "assistant", "content": "no"}]]
    [right, wrong] = words_in_common(said, answer=["answer 42", "42"])
    assert right == pytest.approx(2 * 2 / (4 + 2))
    assert wrong == 0.0
    chats = [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "no"}]] * 2
    assert words_in_common(said, messages=chats)[1] == 1.0
    assert words_in_common(["no"], level=[3]) == [None]
    assert is_finished(said, [True, False]) == [0.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=MARKS.get(kind, ())) for kind in KINDS])
def test_smollm2_on_real_data(kind: str, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2KIT_SMOLLM2 and FSDP2KIT_CHAT name the model and conversations; the other rows are made."""
    given = os.environ.get("FSDP2KIT_SMOLLM2"), os.environ.get("FSDP2KIT_CHAT")
    if not given[0] or not given[1]:
        pytest.skip("set FSDP2KIT_SMOLLM2 and FSDP2KIT_CHAT")
    data = write_rows(tmp_path, kind) if kind in ROWS else Path(given[1])
    out, teacher = tmp_path / "x.toml", ["--teacher", given[0]] if kind == "distill" else []
    assert (
        new.main([kind, "--model", given[0], "--data", str(data), "--out", str(out), "--world-size", "2", *teacher])
        == 0
    )
    print(out.read_text(encoding="utf-8"))
    check(out, monkeypatch)
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    overrides = [f"run.dir='{tmp_path / 'run'}'", "train.steps=2", "train.global_batch_size=8", "wandb.mode=disabled"]
    overrides += ["eval.every=0", "checkpoint.export_hf=never", "fsdp.param_dtype=float32"]
    overrides += ["rollout.max_new_tokens=8", "rollout.n=4"] if kind == "grpo" else []
    said = pool.run(2, run_recipe, str(out), overrides)[0]
    assert not said.startswith("error"), said
    records = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    print(*((one["step"], one["loss"]) for one in records))
    assert len(records) == 2


@pytest.mark.parametrize("source", ["sft", "dpo"])
def test_a_recipe_to_change_is_a_copy_that_runs_by_name_and_by_path(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert new.main(["recipe", "mine", *(["--from", source] if source != "sft" else [])]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "fsdp2kit run YOUR.toml recipe=mine"
    own = (Path(sft.__file__).parent / f"{source}.py").read_bytes()
    assert (tmp_path / "recipes" / "mine.py").read_bytes() == own
    toml = "demo_cp2" if source == "sft" else "dpo_smollm2"
    for name in ("mine", "recipes/mine.py"):
        recipe, config = load(toml, [f"recipe={name}"])
        assert Path(str(recipe.__file__)).resolve() == tmp_path / "recipes" / "mine.py"
        assert type(config) is recipe.Config
    if source == "sft":
        assert run_main([toml, "--check", "recipe=mine"]) == 0


def test_a_recipe_is_not_overwritten_nor_put_in_the_place_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mistakes = {
        ("sft",): "NAME: 'sft' comes with fsdp2kit, and recipes/sft.py would take its place in this folder",
        ("a b",): "NAME: 'a b' is no name of a Python module; use letters, digits and _",
        ("mine", "--from", "dpp"): "--from: there is no recipe 'dpp'; did you mean dpo?",
    }
    for arguments, says in mistakes.items():
        assert new.main(["recipe", *arguments]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "recipes").exists()
    assert new.main(["recipe", "mine.py"]) == 0
    (tmp_path / "recipes" / "mine.py").write_text("# changed\n")
    assert new.main(["recipe", "mine"]) == 2
    assert "recipes/mine.py exists, and is not overwritten" in capsys.readouterr().err
    assert (tmp_path / "recipes" / "mine.py").read_text() == "# changed\n"
