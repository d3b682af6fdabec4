"""The comparison with other libraries runs, agrees where batches are the same, and says what was run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.bench.contest import run_contest
from fsdp2kit.bench.peers import add_arguments, against, draw, peers_lines, run
from fsdp2kit.bench.sides import Workload
from fsdp2kit.bench.turns import Turns
from fsdp2kit.errors import UserError
from tests.reference import tiny_model_dir
from tests.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "toml" / "demo"
needs_accelerate = pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
needs_trl = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl")


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the demo's tokenizer, whose ids its vocabulary covers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = tiny_model_dir("smollm2", tmp_path_factory.mktemp("models"))
    config = AutoConfig.from_pretrained(path)
    config.vocab_size = 1024
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for file in (DEMO / "tokenizer").iterdir():
        shutil.copy(file, path)
    return path


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )


def workload(model: Path, **changes: Any) -> Workload:
    options: dict[str, Any] = {"steps": 4, "seq_len": 64, "global_batch": 4, "micro_batch": 1}
    options["dtype"] = "float32"
    return Workload(model=str(model), data=str(DEMO / "chat.jsonl"), **{**options, **changes})


def test_a_loop_stands_still_between_its_steps() -> None:
    done: list[int] = []

    def loop() -> None:
        while True:
            done.append(len(done))
            if not turns.wait():
                return

    turns = Turns(loop)
    assert done == []
    for number in range(3):
        turns.advance()
        assert done == list(range(number + 1))
    turns.stop()
    assert done == [0, 1, 2]


def test_what_a_loop_raises_reaches_its_driver() -> None:
    def loop() -> None:
        turns.wait()
        raise ValueError("in the loop")

    turns = Turns(loop)
    turns.advance()
    with pytest.raises(ValueError, match="in the loop"):
        turns.advance()


def test_a_loop_that_ends_early_is_told() -> None:
    with pytest.raises(RuntimeError, match="came to its end"):
        Turns(lambda: None).advance()


@pytest.mark.parametrize("changes", [{}, {"cp": 2, "global_batch": 2}, {"dtype": "bfloat16"}], ids=str)
def test_sides_on_the_same_batches_agree(pool: WorkerPool, chat_model: Path, changes: dict[str, Any]) -> None:
    options = workload(chat_model, **changes)
    result, _ = pool.run(2, run_contest, ["fsdp2kit", "handwritten"], options, warmup=1)

    ours, other = result["sides"]["fsdp2kit"], result["sides"]["handwritten"]
    assert len(ours["losses"]) == 4
    assert ours["losses"] == pytest.approx(other["losses"], rel=1e-5 if options.dtype == "float32" else 2e-2)
    assert ours["losses"][-1] != ours["losses"][0]
    assert ours["supervised_tokens"] == other["supervised_tokens"]
    assert ours["input_tokens"] == other["input_tokens"]
    assert len(ours["seconds"]) == len(other["cpu_seconds"]) == 3
    assert "peak_bytes" not in ours, "it was not alone"


def test_a_side_alone_is_weighed(pool: WorkerPool, chat_model: Path) -> None:
    result, other = pool.run(2, run_contest, ["fsdp2kit"], workload(chat_model, steps=2), warmup=1)

    assert result["sides"]["fsdp2kit"]["peak_bytes"] > 1e7
    assert result["sides"]["fsdp2kit"]["peak_bytes"] == other["sides"]["fsdp2kit"]["peak_bytes"]


def test_ratios() -> None:
    ours = {"seconds": [1.0, 1.0, 9.0], "cpu_seconds": [1.0] * 3, "supervised_tokens": [30] * 3, "peak_bytes": 10}
    other = {"seconds": [2.0, 4.0, 2.0], "cpu_seconds": [3.0] * 3, "supervised_tokens": [10] * 3, "peak_bytes": 40}

    ratios = against(ours, other)

    assert math.isclose(ratios["speed_ratio"], 2 * 30 / 10), "2, 4 and 2/9 times as fast, with three times the tokens"
    assert math.isclose(ratios["cpu_speed_ratio"], 9)
    assert ratios["memory_ratio"] == 0.25
    assert ratios["speed_ratio_low"] <= 6 <= ratios["speed_ratio_high"]


def test_the_tool_compares_and_draws(chat_model: Path, tmp_path: Path) -> None:
    done = tool(
        *("--model", str(chat_model), "--data", str(DEMO / "chat.jsonl"), "--peers", "handwritten", "--rounds", "2"),
        *("--warmup", "1", "--seq-len", "64", "--out", str(tmp_path / "peers.json")),
        *("--table", str(tmp_path / "peers.md"), "--figure", str(tmp_path / "peers.png")),
    )

    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "peers.json").read_text(encoding="utf-8"))
    (pair,) = result["pairs"]
    assert result["losses_agree"]
    assert pair["losses_agree"]
    assert (pair["ours"]["name"], pair["other"]["name"]) == ("fsdp2kit", "handwritten")
    assert pair["memory_ratio"] == pair["ours"]["peak_bytes"] / pair["other"]["peak_bytes"]
    assert "fully_shard by hand" in pair["other"]["ran"]
    assert "tools/bench.py --model" in pair["provenance"]["command"]
    assert (tmp_path / "peers.md").read_text(encoding="utf-8").count("| handwritten |") == 1
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_a_mistake_is_one_line(chat_model: Path, tmp_path: Path) -> None:
    arguments = ("peers", "--model", str(chat_model), "--peers", "handwritten")
    done = tool(*arguments, "--data", str(tmp_path / "none.jsonl"))
    assert done.returncode == 2
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    done = tool(*arguments, "--data", str(DEMO / "chat.jsonl"), "--rounds", "0")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --rounds")
    done = tool(*arguments, "--data", str(DEMO / "chat.jsonl"), "--table", str(tmp_path / "none" / "peers.md"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: --table")


def test_nobody_to_compare_with_is_a_mistake(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdp2kit.bench.peers.missing_packages", lambda name: ["accelerate", name])
    arguments = ["--model", str(chat_model), "--data", str(DEMO / "chat.jsonl"), "--peers", "trl"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(UserError, match="none of these can run without accelerate, trl"):
        run(parser.parse_args(arguments))


def test_every_rank_needs_a_row(pool: WorkerPool, chat_model: Path) -> None:
    with pytest.raises(AssertionError, match="UserError: --global-batch: 3 is not a multiple of 2 ranks"):
        pool.run(2, run_contest, ["fsdp2kit"], workload(chat_model, global_batch=3, cp=2), warmup=1)


@needs_accelerate
def test_transformers_trainer_agrees_at_equal_padding(pool: WorkerPool, chat_model: Path) -> None:
    names = ["fsdp2kit_padded", "hf_trainer_padded"]
    result, _ = pool.run(2, run_contest, names, workload(chat_model, global_batch=4, micro_batch=2), warmup=1)

    ours, other = (result["sides"][name] for name in names)
    assert ours["losses"] == pytest.approx(other["losses"], rel=1e-5)
    assert ours["supervised_tokens"] == other["supervised_tokens"]
    assert ours["input_tokens"] == other["input_tokens"]
    assert "DistributedDataParallel" in other["ran"], "accelerate drops FSDP on a CPU, and the bench says so"


@needs_trl
def test_trl_packs(pool: WorkerPool, chat_model: Path) -> None:
    result, _ = pool.run(2, run_contest, ["trl"], workload(chat_model, steps=2, global_batch=2), warmup=1)

    trl = result["sides"]["trl"]
    assert "activation checkpointing on" in trl["ran"]
    assert all(32 < tokens / 2 <= 64 for tokens in trl["input_tokens"]), "rows are nearly full"
    assert all(math.isfinite(loss) for loss in trl["losses"])


@needs_trl
def test_trl_pads(pool: WorkerPool, chat_model: Path) -> None:
    options = workload(chat_model, steps=2, global_batch=2, conversations=2)
    result, _ = pool.run(2, run_contest, ["trl_padded"], options, warmup=1)

    trl = result["sides"]["trl_padded"]
    assert "2 conversations a rank, padded to the longest" in trl["ran"]
    assert "position_ids" not in trl["ran"]
    assert all(math.isfinite(loss) for loss in trl["losses"])


def pair() -> dict[str, Any]:
    side = {"ran": "x", "peak_bytes": 2**30, "supervised_tokens_per_second": 1.0}
    side |= {"median_seconds": 1.0, "p25_seconds": 1.0, "p75_seconds": 1.0}
    ratios = ("speed_ratio", "speed_ratio_low", "speed_ratio_high", "cpu_speed_ratio", "memory_ratio")
    source = {"command": "c", "devices": ["d"], "world_size": 2, "load_average": 1, "versions": {}, "git": None}
    sides = {"ours": {**side, "name": "fsdp2kit"}, "other": {**side, "name": "handwritten"}}
    numbers = dict.fromkeys(ratios, 1.0)
    return {"name": "handwritten", **sides, **numbers, "losses_agree": None, "provenance": source}


def test_what_is_left_out_is_named() -> None:
    result = {"workload": {"dtype": "float32", "seq_len": 8, "global_batch": 2}, "nproc": 2, "pairs": [pair()]}
    result["left_out"] = {"trl": ["accelerate", "trl"]}

    assert "- left out: trl needs accelerate, trl" in peers_lines(result)
    assert any(
        line.startswith("| handwritten | **1.00** (1.00 – 1.00) | 1.00 | 1, 1 |") for line in peers_lines(result)
    )


def test_a_comparison_names_its_sides() -> None:
    padded = {**pair(), "name": "equal_padding", "losses_agree": False, "loss_difference": 0.5}
    result = {"workload": {"dtype": "float32", "seq_len": 8, "global_batch": 2}, "nproc": 2, "left_out": {}}
    (row,) = [line for line in peers_lines({**result, "pairs": [padded]}) if "equal" in line]
    assert row.startswith("| equal_padding (fsdp2kit, handwritten) |")
    assert row.endswith("| NO, void: differ by 5.0e-01 at most |")


def test_drawing_writes_a_file(tmp_path: Path) -> None:
    draw({"pairs": [pair()]}, tmp_path / "one.png")
    assert (tmp_path / "one.png").stat().st_size > 1000
