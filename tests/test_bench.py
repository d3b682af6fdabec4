"""Every benchmark runs on tiny settings and says what it promises to say; nothing here looks at speed."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.bench.figures import compare, summary
from fsdp2kit.bench.gpu import SyntheticBatches, Workload
from fsdp2kit.bench.load import bench_load, llama_config, load_lines
from fsdp2kit.bench.step import StepOptions, bench_step, step_lines
from fsdp2kit.data.formats import IGNORED
from tests.reference import tiny_model_dir
from tests.workers import WorkerPool

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "bench.py"
DEMO = ROOT / "toml" / "demo"


def tool(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        check=False,
    )


def assert_has_provenance(result: dict[str, Any], *, ranks: int) -> None:
    source = result["provenance"]
    assert source["world_size"] == ranks
    assert source["command"]
    assert source["devices"]
    assert {"torch", "transformers", "fsdp2kit"} <= {name for name, version in source["versions"].items() if version}
    json.dumps(result, allow_nan=False)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the demo's tokenizer, whose ids its vocabulary covers."""
    import shutil

    from transformers import AutoConfig, AutoModelForCausalLM

    path = tiny_model_dir("smollm2", tmp_path_factory.mktemp("models"))
    config = AutoConfig.from_pretrained(path)
    config.vocab_size = 1024
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    for file in (DEMO / "tokenizer").iterdir():
        shutil.copy(file, path)
    return path


def step_options(model: Path, **changes: Any) -> StepOptions:
    options: dict[str, Any] = {"pairs": 3, "warmup": 1, "seq_len": 64, "global_batch": 4}
    return StepOptions(model=str(model), data=str(DEMO / "chat.jsonl"), **{**options, **changes})


@pytest.mark.parametrize(
    "changes", [{}, {"cp": 2, "global_batch": 2}, {"dtype": "bfloat16"}], ids=["dp2", "cp2", "bfloat16"]
)
def test_step_trains_both_loops_alike(pool: WorkerPool, chat_model: Path, changes: dict[str, Any]) -> None:
    options = step_options(chat_model, **changes)

    result, other = pool.run(2, bench_step, options)

    assert_has_provenance(result, ranks=2)
    assert result["losses_agree"]
    assert result["loss_max_relative_difference"] < (1e-5 if options.dtype == "float32" else 2e-2)
    assert result["loss_last"] != result["loss_first"]
    for name in ("fsdp2kit", "handwritten"):
        assert len(result[name]["seconds"]) == options.pairs
        assert result[name]["tokens_per_second"] > 0
        assert result[name]["seconds"] == other[name]["seconds"], "the slowest rank's, on every rank"
    assert result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
    assert 0 < result["tokens_per_step"] <= options.global_batch * options.seq_len
    assert any("fsdp2kit ÷ handwritten" in line for line in step_lines(result))


def test_step_wants_a_batch_for_every_rank(pool: WorkerPool, chat_model: Path) -> None:
    with pytest.raises(AssertionError, match="UserError: --global-batch: 3 is not a multiple of 2 ranks"):
        pool.run(2, bench_step, step_options(chat_model, global_batch=3, cp=2))


@pytest.mark.parametrize(("files", "dtype"), [(1, "bfloat16"), (3, "float32")])
def test_load_measures_memory_and_time(pool: WorkerPool, files: int, dtype: str) -> None:
    result, _ = pool.run(2, bench_load, params=1e6, files=files, dtype=dtype, repeats=2)

    assert_has_provenance(result, ranks=2)
    assert result["values_equal"]
    memory = result["memory"]
    shards = math.ceil(result["parameters"] * 4 / 2)
    assert shards <= memory["shard_bytes"] < 1.1 * shards
    assert memory["bound_bytes"] == memory["shard_bytes"] + sum(memory["largest_tensor_bytes"])
    assert memory["peak_private_bytes"]["fsdp2kit"] > 0
    others = {f"from_pretrained_{how}" for how in ("float32", "own_dtype", "fully_shard")}
    assert {name: len(figures["seconds"]) for name, figures in result["time"].items()} == dict.fromkeys(
        ["fsdp2kit", *others], 2
    )
    assert result["compared_with"].keys() == others
    assert any("values equal" in line for line in load_lines(result))


def test_gpu_dry_run_prints_json(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"

    done = tool("gpu", "--device", "cpu", "--dry-run", "--json", "--out", str(out))

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert_has_provenance(result, ranks=1)
    assert result["dry_run"]
    assert result["left_out"] == []
    assert [(variant["model"], variant["activation_checkpointing"]) for variant in result["variants"]] == [
        (f"tiny {name}", mode) for name in ("SmolLM2-135M", "Llama-3.2-1B") for mode in ("none", "full")
    ]
    for variant in result["variants"]:
        assert variant["dtype"] == "bfloat16"
        assert variant["tokens_per_second"] == pytest.approx(128 / variant["step_seconds"])
        assert variant["mfu"] is None
        assert variant["peak_memory_gib"] is None
    plain, recomputed = result["variants"][:2]
    assert plain["loss_last"] == recomputed["loss_last"], "recomputation changes no number"


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_traffic_counts_what_the_formulae_say_and_one_wait(pool: WorkerPool, strategy: str, tied: bool) -> None:
    from fsdp2kit.bench.step_traffic import SMALL, Options, bench_traffic, traffic_lines

    result, other = pool.run(2, bench_traffic, Options(strategy=strategy, tied=tied))

    assert_has_provenance(result, ranks=2)
    assert result["values_equal"], (result["counted"], result["formula"])
    assert result["counted"] == other["counted"]
    assert result["host_syncs"]["count"] == 1, result["host_syncs"]["places"]
    table = SMALL["vocab_size"] * SMALL["hidden_size"]
    norm = SMALL["hidden_size"] if tied else 0
    # Half of a table's float32 gradient goes to the other rank: never those of two tables at once.
    expected = 0 if strategy == "no_shard" else (table + norm) * 4 // 2
    assert result["largest_reduce_scatter"] == expected
    assert any("host synchronisations in the step: 1" in line for line in traffic_lines(result))


def test_users_mistakes_end_in_one_line(tmp_path: Path) -> None:
    cases = {
        "bench gpu: finds no CUDA device": ("gpu", "--device", "cpu"),
        "no-such-model": ("step", "--model", str(tmp_path / "no-such-model"), "--data", str(DEMO / "chat.jsonl")),
    }
    for message, arguments in cases.items():
        done = tool(*arguments, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 2
        assert done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        assert message in line


def test_compare_brackets_the_ratio_of_medians() -> None:
    theirs = [1.0, 1.1, 0.9, 1.2, 0.8] * 12
    figures = compare([1.5 * seconds for seconds in theirs], theirs)

    # Resampled as pairs, a constant factor has no spread at all, however noisy the machine.
    assert figures["ratio"] == pytest.approx(1.5)
    assert figures["ratio_low"] == pytest.approx(1.5)
    assert figures["ratio_high"] == pytest.approx(1.5)
    assert summary(theirs)["median_seconds"] == pytest.approx(1.0)


@pytest.mark.parametrize("params", [1e6, 5e8, 1e9, 7e9])
def test_random_models_have_about_the_size_asked_for(params: float) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_config(params))

    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(params, rel=0.25)


def test_synthetic_batches_are_packed_without_padding() -> None:
    workload = Workload(seq_len=128, rows=3)
    (batch,) = SyntheticBatches(1000, workload).batch(5)
    (again,) = SyntheticBatches(1000, workload).batch(5)

    assert batch.input_ids.equal(again.input_ids)
    assert batch.input_ids.shape == (3, 128)
    assert batch.input_tokens == 3 * 128
    starts = int((batch.position_ids == 0).sum())
    assert starts > 3, "several documents a row"
    assert batch.supervised_tokens == 3 * 128 - starts, "a document's first token is never a target"
    assert int((batch.labels != IGNORED).sum()) == batch.supervised_tokens
    lengths = (batch.position_ids.flatten()[1:] == 0).nonzero().flatten().tolist()
    borders = [0, *(place + 1 for place in lengths), 3 * 128]
    assert batch.attention_pairs == sum((b - a) ** 2 for a, b in itertools.pairwise(borders))


def vocabulary_bench() -> dict[str, Any]:
    from fsdp2kit.bench.vocabulary import Options, bench_vocabulary

    return bench_vocabulary(Options(vocabulary=40_000, tokens=2_000, hidden=16, whole=True))


def test_the_loss_at_a_large_vocabulary_is_that_of_whole_logits_in_less_memory(pool: WorkerPool) -> None:
    result = pool.run(1, vocabulary_bench)[0]

    assert result["loss"]["fsdp2kit"] == pytest.approx(result["loss"]["whole logits"], rel=1e-6)
    logits = 2_000 * 40_000 * 4
    assert result["peak_bytes"]["whole logits"] > 1.5 * logits
    assert result["peak_bytes"]["fsdp2kit"] < logits
