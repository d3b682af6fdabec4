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
import torch

from fsdp2kit.bench.figures import compare, summary
from fsdp2kit.bench.gpu import Options, bench_gpu, gpu_lines
from fsdp2kit.bench.kinds import kind_of, shares
from fsdp2kit.bench.load import bench_load, llama_config, load_lines
from fsdp2kit.bench.synthetic import SyntheticBatches, Workload
from fsdp2kit.bench.variants import GROUPS, Variant, config_of, obstacle
from fsdp2kit.data.formats import IGNORED
from tests.overlap import synthetic
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
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            **environment,
        },
        check=False,
    )


def assert_has_provenance(result: dict[str, Any], *, ranks: int) -> None:
    source = result["provenance"]
    assert source["world_size"] == ranks
    assert source["command"]
    assert source["devices"]
    assert {"torch", "transformers", "fsdp2kit"} <= {name for name, version in source["versions"].items() if version}
    json.dumps(result, allow_nan=False)


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

    groups = ("--groups", "small", "1b", "3b", "8b")
    done = tool("gpu", "--device", "cpu", "--dry-run", *groups, "--json", "--out", str(out))

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert_has_provenance(result, ranks=1)
    assert result["dry_run"]
    ran = [f"{one['model']}, {one['variant']}".removeprefix("tiny ") for one in result["variants"]]
    left = {one["variant"]: one["reason"] for one in result["left_out"]}
    assert sorted([*ran, *left]) == sorted(str(one) for group in GROUPS.values() for one in group)
    compiled = [reason for variant, reason in left.items() if variant.endswith("B, bfloat16, compiled")]
    assert compiled == ["compiled variants are for a device"] * 2
    for one in result["variants"]:
        assert "error" not in one
        assert one["tokens_per_second"] == pytest.approx(128 * 2 / sum(one["seconds"]))
        assert one["step"]["p25_seconds"] <= one["step"]["median_seconds"] <= one["step"]["p75_seconds"]
        assert one["mfu"] is None
        assert one["memory"] is None
        assert len(one["losses"]) == 3
    small = {one["variant"]: one for one in result["variants"] if one["model"] == "tiny SmolLM2-135M"}
    plain, recomputed = small["bfloat16"], small["bfloat16, full recomputation"]
    assert plain["losses"] == recomputed["losses"], "recomputation changes no number"
    if "Trainer, bfloat16" in small:  # accelerate is installed
        ratio = plain["tokens_per_second"] / small["Trainer, bfloat16"]["tokens_per_second"]
        line = f"tiny SmolLM2-135M, bfloat16: fsdp2kit ÷ Trainer: tokens/s {ratio:.2f}"
        assert line in gpu_lines(result)


def test_gpu_profile_and_ring_dry_runs() -> None:
    profile = tool("gpu", "--device", "cpu", "--dry-run", "--profile", "--groups", "small", "--json")
    ring = tool("ring", "--device", "cpu", "--dry-run", "--max-minutes", "0", "--json")

    assert profile.returncode == ring.returncode == 0, profile.stderr + ring.stderr
    for one in json.loads(profile.stdout)["variants"]:
        assert one["shares"]["matmul"] > 0
        assert one["shares"]["optimizer"] > 0
        assert 0 <= one["idle"] < 1
    assert json.loads(ring.stdout)["left_out"] == [64, 128]


def test_no_variant_starts_after_its_time(pool: WorkerPool) -> None:
    result = pool.run(1, bench_gpu, Options(groups=("small",), dry_run=True, max_minutes=-1))[0]

    assert result["variants"] == []
    reasons = [one["reason"] for one in result["left_out"] if "Trainer" not in one["variant"]]
    assert reasons == ["-1 minutes were over"] * 2
    assert any("minutes were over" in line for line in gpu_lines(result))


def test_variants_ask_for_what_they_are_called() -> None:
    """Those that this version knows; and what it does not know is named."""
    for variant in (one for group in GROUPS.values() for one in group):
        reason = obstacle(variant, device=torch.device("cuda")) if "float8" not in variant.name else None
        if reason is None and "float8" not in variant.name:
            config = config_of(variant, attention="varlen", dry_run=False)
            assert config.compile.enabled == ("compiled" in variant.name)
            assert config.model.attention == "varlen"
            assert (variant.loop == "hf_trainer") == ("Trainer" in variant.name)
            assert (config.fsdp.offload == "optimizer") == ("host" in variant.name)
            assert config.data.seq_len * config.train.global_batch_size >= 8192
    unknown = Variant("Llama-3.2-1B", "x", ({"no_such_section": {"key": 1}},))
    assert obstacle(unknown, device=torch.device("cpu")) == "this version does not know no_such_section as asked for"
    missing = Variant("Llama-3.2-1B", "x", packages=("no_such_package",))
    assert obstacle(missing, device=torch.device("cpu")) == "no_such_package is not installed"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "matmul"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90>>", "attention"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel", "attention"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "collectives"),
        ("void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor>", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("triton_poi_fused_mul_silu_3", "elementwise and others"),
        ("triton_red_fused__flash_attention_forward_mm_mean_4", "elementwise and others"),
        ("aten::mm", "matmul"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "attention"),
        ("aten::_fused_adamw_", "optimizer"),
        ("aten::mul", "elementwise and others"),
    ],
)
def test_kernels_are_sorted_by_what_they_are_for(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_shares_are_of_the_steps_time(tmp_path: Path) -> None:
    trace = synthetic.Trace()
    for number in range(2):
        start = 1000 * number
        trace.step(number, start, start + 1000)
        trace.mark("Optimizer.step#AdamW.step", start + 900, start + 950)
        trace.kernel(synthetic.GEMM, start + 100, start + 500)
        trace.kernel("flash_fwd_kernel", start + 500, start + 600)
        trace.kernel("triton_poi_fused_mul_0", start + 600, start + 750)
        trace.kernel("multi_tensor_apply_kernel", start + 900, start + 950)

    found = shares(trace.write(tmp_path / "rank-00000.json.gz"))

    busy = {kind: share for kind, share in found["shares"].items() if share}
    assert busy == pytest.approx({"matmul": 0.4, "attention": 0.1, "elementwise and others": 0.15, "optimizer": 0.05})
    assert found["idle"] == pytest.approx(0.3)
    assert found["step_seconds"] == pytest.approx(1e-3)


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
        "no-such-model": ("peers", "--model", str(tmp_path / "no-such-model"), "--data", str(DEMO / "chat.jsonl")),
    }
    for message, arguments in cases.items():
        done = tool(*arguments, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 2
        assert done.stdout == ""
        (line,) = done.stderr.strip().splitlines()
        assert line.startswith("error: ")
        assert message in line


def test_compare_takes_the_ratio_of_each_pair() -> None:
    ours, theirs = [1.0, 1.0, 9.0, 9.0, 9.0], [2.0, 2.0, 18.0, 18.0, 2.0]  # the last was measured amid a change
    figures = compare(ours, theirs)
    assert figures["ratio"] == 0.5, "the medians' ratio would be 4.5"
    assert figures["ratio_low"] == 0.5
    assert 0.5 <= figures["ratio_high"] <= 4.5

    by_work = compare([2.0, 3.0, 4.0], [1.0, 1.0, 1.0], work=([30, 10, 20], [10, 10, 10]))
    assert by_work["ratio"] == pytest.approx(3 * 10 / 20)
    assert by_work["ratio_low"] < by_work["ratio"] < by_work["ratio_high"]


def test_compare_brackets_a_constant_factor() -> None:
    theirs = [1.0, 1.1, 0.9, 1.2, 0.8] * 12
    figures = compare([1.5 * seconds for seconds in theirs], theirs)

    # Resampled as pairs, a constant factor has no spread at all, however noisy the machine.
    assert figures["ratio"] == pytest.approx(1.5)
    assert figures["ratio_low"] == pytest.approx(1.5)
    assert figures["ratio_high"] == pytest.approx(1.5)
    assert summary(theirs)["median_seconds"] == pytest.approx(1.0)


@pytest.mark.parametrize("params", [1e6, 5e8, 1e9, 7e9])
def test_random_models_have_about_the_size_asked_for(params: float) -> None:
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

    kernels = ("torch",) if hasattr(torch.nn.functional, "linear_cross_entropy") else ()
    return bench_vocabulary(Options(40_000, tokens=2_000, hidden=16, whole=True, kernels=kernels, repeats=1))


def test_the_loss_at_a_large_vocabulary_is_that_of_whole_logits_in_less_memory(pool: WorkerPool) -> None:
    result = pool.run(1, vocabulary_bench)[0]

    assert result["loss"]["fsdp2kit"] == pytest.approx(result["loss"]["whole logits"], rel=1e-6)
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in result["seconds"].values())
    if "torch" in result["loss"]:
        assert result["loss"]["torch"] == pytest.approx(result["loss"]["whole logits"], rel=1e-6)
        assert result["peak_bytes"]["torch"] < 2_000 * 40_000 * 4
    logits = 2_000 * 40_000 * 4
    assert result["peak_bytes"]["whole logits"] > 1.5 * logits
    assert result["peak_bytes"]["fsdp2kit"] < logits
