"""The comparison with other libraries runs, agrees where batches are the same, and says what was run."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.support.models import tiny_model_dir
from tests.support.workers import WorkerPool
from tests.tools.helpers import last_result, tool
from tools.bench import result_lines
from tools.benchmarks.hf_trainer import Turns
from tools.benchmarks.peers import bench_peers
from tools.benchmarks.sides import pair_row

DEMO = Path(__file__).resolve().parents[2] / "toml" / "demo"
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


def compare(pool: WorkerPool, model: Path, peer: str, *, ranks: int = 2, **changes: Any) -> list[dict[str, Any]]:
    """Each rank's result of one comparison on a tiny workload."""
    values = {"rounds": 3, "warmup": 1, "seq_len": 64, "global_batch": 4, "dtype": "float32", **changes}
    paths = {"model": str(model), "data": str(DEMO / "chat.jsonl")}
    return pool.run(ranks, last_result, bench_peers, peers=(peer,), **paths, **values)


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


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),  # the tool's own test compares these, too
        {"cp": 2, "global_batch": 2},
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"peer": "data_parallel", "cp": 2, "set": ["context_parallel.method=ring"]},
    ],
    ids=str,
)
def test_sides_on_the_same_batches_agree(pool: WorkerPool, chat_model: Path, changes: dict[str, Any]) -> None:
    peer, is_exact = changes.get("peer", "handwritten"), changes.get("dtype") is None
    result, again = compare(pool, chat_model, **{"peer": peer, **changes})

    ours, other = result["pairs"][peer].values()
    assert len(ours["losses"]) == 4
    assert ours["losses"] == pytest.approx(other["losses"], rel=1e-5 if is_exact else 2e-2)
    assert ours["losses"][-1] != ours["losses"][0]
    assert ours["supervised_tokens"] == other["supervised_tokens"]
    assert ours["input_tokens"] == other["input_tokens"]
    assert len(ours["seconds"]) == len(other["cpu_seconds"]) == 3
    for side in (ours, other):
        assert side["peak_bytes"] > 1e5
    there = again["pairs"][peer]["fsdp2kit"]
    assert ours["peak_bytes"] == there["peak_bytes"], "the largest rank's, on every rank"
    (row,) = result["rows"]
    assert row["losses_agree"]
    assert row["memory_ratio"] == ours["peak_bytes"] / other["peak_bytes"]


SIDE: dict[str, Any] = {"ran": "x", "peak_bytes": 10, "cpu_seconds": [1.0] * 3, "losses": [1.0], "grad_norms": [1.0]}
SIDE |= {"seconds": [1.0, 1.0, 9.0], "supervised_tokens": [30] * 3}
OTHER = {**SIDE, "seconds": [2.0, 4.0, 2.0], "cpu_seconds": [3.0] * 3, "supervised_tokens": [10] * 3}
OTHER |= {"peak_bytes": 40, "losses": [2.0]}


def test_ratios() -> None:
    row = pair_row("trl", SIDE, OTHER, tolerance=None)

    fast = row["times_as_fast"]
    assert math.isclose(fast["ratio"], 2 * 30 / 10), "2, 4 and 2/9 times as fast, with three times the tokens"
    assert math.isclose(row["by_cpu_time"]["ratio"], 9)
    assert row["memory_ratio"] == 0.25
    assert fast["low"] <= 6 <= fast["high"]
    assert (row["our_tokens_per_second"], row["its_tokens_per_second"]) == (30, 5)
    assert row["losses_agree"] is None


@pytest.mark.full
def test_the_tool_compares_and_draws(chat_model: Path, tmp_path: Path) -> None:
    done = tool(
        *("--model", str(chat_model), "--data", str(DEMO / "chat.jsonl"), "--peers", "handwritten", "--rounds", "2"),
        *("--warmup", "1", "--global-batch", "1", "--seq-len", "64", "--out", str(tmp_path / "peers.json")),
        *("--table", str(tmp_path / "peers.md"), "--figure", str(tmp_path / "peers.png")),
    )

    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "peers.json").read_text(encoding="utf-8"))
    (row,) = result["rows"]
    assert result["checks"]["losses_agree"]
    assert row["losses_agree"]
    assert "fully_shard by hand" in result["pairs"]["handwritten"]["handwritten"]["ran"]
    assert "tools/bench.py --model" in result["provenance"]["command"]
    assert (tmp_path / "peers.md").read_text(encoding="utf-8").count("| handwritten |") == 1
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")


def test_a_mistake_is_one_line(chat_model: Path, tmp_path: Path) -> None:
    arguments = ("peers", "--model", str(chat_model), "--peers", "handwritten", "--data")
    data, table = str(DEMO / "chat.jsonl"), str(tmp_path / "none" / "peers.md")
    for start, rest in {
        "error: --rounds": (data, "--rounds", "0"),
        "error: --table": (data, "--table", table),
        "error: ": (str(tmp_path / "none.jsonl"),),
    }.items():
        done = tool(*arguments, *rest)
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if "error" in line]
        assert line.startswith(start)
        assert "Traceback" not in done.stderr


def test_nobody_to_compare_with_is_a_mistake(pool: WorkerPool, chat_model: Path) -> None:
    with pytest.raises(AssertionError, match="UserError: --peers: none of these can run without trl; pip install trl"):
        pool.run(1, _without, "trl", chat_model, ("trl",))
    with pytest.raises(AssertionError, match="UserError: --peers: 'x' is not known; name some of handwritten, trl"):
        compare(pool, chat_model, "x", ranks=1)


def _without(package: str, model: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """A comparison where this package is not installed."""
    values = {"rounds": 1, "warmup": 1, "seq_len": 64, "global_batch": 1, "dtype": "float32"}
    with mock.patch(
        "tools.benchmarks.peers.missing_packages", lambda *needed: [one for one in needed if one == package]
    ):
        return last_result(bench_peers, peers=names, model=str(model), data=str(DEMO / "chat.jsonl"), **values)


def test_what_is_left_out_is_named(pool: WorkerPool, chat_model: Path) -> None:
    (result,) = pool.run(1, _without, "trl", chat_model, ("handwritten", "trl"))

    lines = result_lines(result)
    assert "left out: trl needs trl" in lines
    assert any(line.startswith("handwritten ran fully_shard by hand") for line in lines)
    assert "losses agree: yes" in lines
    assert any(line.startswith("| handwritten | **") for line in lines)


def test_every_rank_needs_a_row(pool: WorkerPool, chat_model: Path) -> None:
    with pytest.raises(AssertionError, match="UserError: --global-batch: 3 is not a multiple of 2 ranks"):
        compare(pool, chat_model, "handwritten", global_batch=3, cp=2)


@pytest.mark.full
@needs_accelerate
def test_transformers_trainer_agrees_at_equal_padding(pool: WorkerPool, chat_model: Path) -> None:
    result, _ = compare(pool, chat_model, "equal_padding", set=["train.micro_batch_size=2"])

    ours, other = result["pairs"]["equal_padding"].values()
    assert ours["losses"] == pytest.approx(other["losses"], rel=1e-5)
    assert ours["supervised_tokens"] == other["supervised_tokens"]
    assert ours["input_tokens"] == other["input_tokens"]
    assert "DistributedDataParallel" in other["ran"], "accelerate drops FSDP on a CPU, and the bench says so"


@pytest.mark.full
@needs_accelerate
def test_adapters_are_trained_beside_pefts(pool: WorkerPool, chat_model: Path) -> None:
    changes = ["lora.rank=4", "train.micro_batch_size=2"]
    result, _ = compare(pool, chat_model, "equal_padding", set=changes)

    ours, other = result["pairs"]["equal_padding"].values()
    assert ours["losses"][0] == pytest.approx(other["losses"][0], rel=1e-5), "adapters begin as nothing"
    assert ours["losses"] == pytest.approx(other["losses"], rel=1e-3), "each from its own random values"
    assert other["losses"][-1] != other["losses"][0]
    assert "adapters in float32" in other["ran"]
    with pytest.raises(AssertionError, match="UserError: --peers: handwritten trains no adapters"):
        compare(pool, chat_model, "handwritten", set=changes)


@needs_trl
def test_trl_trains_adapters(pool: WorkerPool, chat_model: Path) -> None:
    changes = {"dtype": "bfloat16", "set": ["lora.rank=4", "optimizer.lr=1e-2"]}
    result, _ = compare(pool, chat_model, "trl", rounds=3, global_batch=2, **changes)

    trl = result["pairs"]["trl"]["trl"]
    assert "parameters whole on every rank in bfloat16 (adapters in float32)" in trl["ran"]
    assert trl["losses"][-1] != trl["losses"][0]


@needs_trl
def test_trl_packs(pool: WorkerPool, chat_model: Path) -> None:
    result, _ = compare(pool, chat_model, "trl", rounds=1, global_batch=2)

    trl = result["pairs"]["trl"]["trl"]
    assert "activation checkpointing on" in trl["ran"]
    assert all(32 < tokens / 2 <= 64 for tokens in trl["input_tokens"]), "rows are nearly full"
    assert all(math.isfinite(loss) for loss in trl["losses"])


@needs_trl
def test_trl_pads(pool: WorkerPool, chat_model: Path) -> None:
    result, _ = compare(pool, chat_model, "trl_padded", rounds=1, global_batch=2, conversations=2)

    trl = result["pairs"]["trl_padded"]["trl_padded"]
    assert "2 conversations a rank, padded to the longest" in trl["ran"]
    assert "position_ids" not in trl["ran"]
    assert all(math.isfinite(loss) for loss in trl["losses"])


def test_losses_that_differ_make_a_comparison_void() -> None:
    row = pair_row("equal_padding", SIDE, OTHER, tolerance=0.02)
    assert (row["losses_differ_by"], row["losses_agree"]) == (0.5, False)
    result = {"rows": [row], "checks": {"losses_agree": False}}
    assert result_lines(result)[-1] == "losses agree: NO"
