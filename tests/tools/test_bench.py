"""Every benchmark runs on tiny settings and says what it promises to say; nothing here looks at speed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.model.flops import count_model_flops
from fsdp2kit.planner.devices import find_device
from tests.support.models import full, needs_integers, slow
from tests.support.workers import WorkerPool
from tests.tools.helpers import last_result, tool
from tools.bench import report_lines, result_lines
from tools.benchmarks.experts import bench_experts
from tools.benchmarks.gpu import (
    GROUPS,
    SETTINGS,
    SHAPES,
    Group,
    bench_gpu,
    config_of,
    fitting_rows,
    halved_until_it_fits,
    obstacle,
)
from tools.benchmarks.harness import PeakMemory, speed, spread
from tools.benchmarks.shares import kind_of, shares
from tools.benchmarks.sides import OurSide
from tools.benchmarks.storage import bench_convert, bench_load, bench_save, llama_config
from tools.benchmarks.vocabulary import bench_vocabulary

DEMO = Path(__file__).resolve().parents[2] / "toml" / "demo"


def assert_has_provenance(result: dict[str, Any], *, ranks: int) -> None:
    source = result["provenance"]
    assert source["world_size"] == ranks
    assert source["command"]
    assert source["devices"]
    assert {"torch", "transformers", "fsdp2kit"} <= {name for name, version in source["versions"].items() if version}
    json.dumps(result, allow_nan=False)


@pytest.mark.full
@pytest.mark.parametrize(("files", "dtype"), [pytest.param(1, "bfloat16", marks=pytest.mark.slow), (3, "float32")])
def test_load_measures_memory_and_time(pool: WorkerPool, files: int, dtype: str) -> None:
    result, _ = pool.run(2, last_result, bench_load, params=1e-3, files=files, dtype=dtype, rounds=2)

    assert_has_provenance(result, ranks=2)
    assert result["checks"] == {"values_equal": True}
    rows = {row["name"]: row for row in result["rows"]}
    ours, shards = rows["fsdp2kit"], math.ceil(result["parameters"] * 4 / 2)
    assert shards <= ours["shard_bytes"] < 1.1 * shards
    assert ours["shards_and_two_tensors_bytes"] > ours["shard_bytes"]
    assert ours["peak_bytes"] > 0
    others = {f"from_pretrained_{how}" for how in ("float32", "own_dtype", "fully_shard")}
    assert {name: len(row["seconds"]["all"]) for name, row in rows.items()} == dict.fromkeys(["fsdp2kit", *others], 2)
    assert {name for name, row in rows.items() if "fsdp2kit_is_faster" in row} == others
    assert "values equal: yes" in result_lines(result)


@pytest.mark.full
def test_save_measures_both_ways(pool: WorkerPool) -> None:
    result, _ = pool.run(2, last_result, bench_save, params=1e-3, rounds=2, tokens=16)

    assert_has_provenance(result, ranks=2)
    seconds = {row["training waits for a save"]: row["seconds"]["all"] for row in result["rows"]}
    assert set(seconds) == {"synchronous", "asynchronous"}
    assert all(len(each) == 2 and min(each) > 0 for each in seconds.values())
    assert result["rows"][1]["shorter_by"]["ratio"] > 0


@pytest.mark.full
def test_convert_measures_every_way(pool: WorkerPool) -> None:
    (result,) = pool.run(1, last_result, bench_convert, params=1e-3, rounds=1)

    assert_has_provenance(result, ranks=1)
    assert {"dcp_to_hf", "copy", "dcp_to_torch_save"} <= {row["name"] for row in result["rows"]}
    assert all(row["seconds"]["median"] > 0 for row in result["rows"])
    # The kernel copies, so a copy takes no memory of the process.
    assert all(row["peak_bytes"] > 0 for row in result["rows"] if row["name"] != "copy")


@pytest.mark.full
def test_experts_are_measured_alone_and_in_training(pool: WorkerPool) -> None:
    tiny: Any = {"experts": 4, "visited": 2, "hidden": 32, "width": 32, "layers": 1, "tokens": 32, "rounds": 2}
    (alone,) = pool.run(1, last_result, bench_experts, **tiny)
    assert [row["name"] for row in alone["rows"]] == ["fsdp2kit", "transformers, grouped_mm", "transformers, eager"]
    assert max(row["gradients_differ_by"] for row in alone["rows"]) < 1e-5
    together, _ = pool.run(2, last_result, bench_experts, **tiny)
    assert_has_provenance(together, ranks=2)
    assert together["checks"] == {"losses_agree": True}
    assert together["rows"][0]["times_as_fast"]["ratio"] > 0


# Others have the same settings on other shapes, or compiled.
SOME_GROUPS = ("small", "1b", "8b", "moe", "lora_16k")


@pytest.mark.parametrize("groups", [full(SOME_GROUPS), slow(tuple(GROUPS))], ids=len)
def test_gpu_dry_run_prints_json(groups: tuple[str, ...], tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"

    done = tool("gpu", "--device", "cpu", "--dry-run", "--groups", *groups, "--json", "--out", str(out))

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert_has_provenance(result, ranks=1)
    assert result["options"]["dry_run"]
    rows = dict(
        zip([(group, name) for group in groups for name in GROUPS[group].variants], result["rows"], strict=True)
    )
    for (group, name), row in rows.items():
        assert (row["model"], row["variant"]) == (GROUPS[group].shape, name)
        if "compiled" in name or "error" in row:
            assert row["error"] == obstacle(name, device=torch.device("cpu")) is not None
            continue
        tokens = 64 * (2 if GROUPS[group].rows else int(row["rows"].removesuffix(" × 64")))
        assert 3.2 * tokens < row["tokens_per_second"] * sum(row["step"]["all"]) <= 4 * tokens, "rows are nearly full"
        assert row["step"]["p25"] <= row["step"]["median"] <= row["step"]["p75"]
        assert row["mfu"] is None
        assert row["allocated_bytes"] is None
        assert len(row["losses"]) == 7
    plain, recomputed, trainer = (
        rows["small", name] for name in ("bfloat16", "full recomputation", "Trainer, bfloat16")
    )
    assert rows["1b", "bfloat16"]["rows"] < rows["1b", "full recomputation"]["rows"], "it leaves room for more"
    assert plain["losses"] == recomputed["losses"], "recomputation changes no number"
    if "step" in trainer:  # accelerate is installed
        assert trainer["fsdp2kit_is_faster"] == speed(plain["step"]["all"], trainer["step"]["all"])
        assert plain["losses"] == pytest.approx(trainer["losses"], rel=2e-2)


@needs_integers
def test_a_model_in_4_bits_gets_random_values_without_a_checkpoint(pool: WorkerPool) -> None:
    (result,) = pool.run(1, _qlora)
    (row,) = result["rows"]
    assert len(set(row["losses"])) == 7
    assert all(math.isfinite(loss) for loss in row["losses"])


def _qlora() -> dict[str, Any]:
    """The variant that is compiled on a device, eager."""
    with mock.patch.dict(GROUPS, lora_4k=Group("Llama-3.1-8B", 2, 4096, ["QLoRA"])):
        return last_result(bench_gpu, groups=("lora_4k",), dry_run=True)


@pytest.mark.full
def test_gpu_profile_dry_run() -> None:
    profile = tool("gpu", "--device", "cpu", "--dry-run", "--profile", "--groups", "small", "--json")

    assert profile.returncode == 0, profile.stderr
    for one in json.loads(profile.stdout)["rows"]:
        assert one["matmul"] > 0
        assert one["optimizer"] > 0
        assert 0 <= one["idle"] < 1
        milliseconds = sum(each["milliseconds"] for each in one["kernels"] if each["kind"] == "copies")
        assert milliseconds == pytest.approx(1e3 * one["copies"] * one["step_seconds"]) != 0


def test_no_part_is_begun_after_the_minutes_that_were_given(pool: WorkerPool) -> None:
    (result,) = pool.run(1, _stopped_at_once)
    assert len(result["rows"]) == 1
    assert result["notes"][-1] == "stopped after 0 minutes: what is missing was not begun"


def bench_parts(world: Any) -> Iterator[dict[str, Any]]:
    for number in (1, 2):
        yield {"rows": [{"part": each} for each in range(number)]}


def _stopped_at_once() -> dict[str, Any]:
    return last_result(bench_parts, max_minutes=0)


def test_a_loans_results_become_tables(tmp_path: Path) -> None:
    provenance = {"git": None, "world_size": 1, "load_average": 0.5, "versions": {"torch": "2.11"}}
    provenance |= {"devices": ["NVIDIA H200"], "command": "tools/bench.py gpu --groups 3b"}
    rows = [
        {"model": "Llama", "variant": "compiled", "mfu": 0.5},
        {"model": "Llama", "variant": "eager", "error": "no"},
    ]
    (tmp_path / "gpu-3b.json").write_text(json.dumps({"rows": rows, "provenance": provenance}), encoding="utf-8")
    cases = """<testcase classname="tests.gpu.test_first" name="test_runs[Muon]" time="1.25">
        <properties><property name="loss" value="8.3"/></properties></testcase>
        <testcase classname="tests.gpu.test_first" name="test_runs[float8]" time="0">
        <skipped message="torchao is not | there"/></testcase>
        <testcase classname="tests.gpu.test_start" name="test_a" time="2">
        <failure message="boom&#10;more"/></testcase><testcase time="0"/>"""
    suite = f"<testsuites><testsuite>{cases}</testsuite></testsuites>"
    (tmp_path / "gpu-first.xml").write_text(suite, encoding="utf-8")

    lines = report_lines(tmp_path)

    assert "| test_first::test_runs[Muon] | ok | 1.2 | loss 8.3 |" in lines
    assert "| test_first::test_runs[float8] | skipped | 0.0 | torchao is not / there |" in lines
    assert "| test_start::test_a | failure | 2.0 | boom |" in lines
    assert not any("None" in line for line in lines)
    assert "| Llama | compiled | 0.5 |  |" in lines
    assert any(line.startswith("device: NVIDIA H200") for line in lines)


def test_variants_ask_for_what_they_are_called() -> None:
    assert {group.shape for group in GROUPS.values()} == set(SHAPES)
    for group, (_, _, seq_len, names, steps) in GROUPS.items():
        for name in names:
            config = config_of(group, name, dry_run=False, rows=2)
            assert config.compile.enabled == ("compiled" in name)
            assert config.float8.recipe == next((each for each in ("tensorwise", "rowwise") if each in name), "none")
            assert (config.fsdp.offload == "optimizer") == ("host" in name)
            assert config.activation_checkpointing.mode == next(
                (mode for mode in ("selective", "full") if mode in name), "none"
            )
            assert config.data.seq_len * config.train.global_batch_size == 2 * seq_len
            assert config.train.steps == steps + max(3, steps // 4)


def test_the_planner_chooses_rows_that_fit() -> None:
    """3B on an H200: its published plan of one row, 68,966 MiB, and 28.3 GiB for each further row."""
    h200 = find_device("h200")
    assert h200 is not None
    rows, peak = fitting_rows("3b", "bfloat16, compiled", memory=h200.memory, dry_run=False)
    assert rows == 3
    assert 0.8 * h200.memory < peak <= 0.9 * h200.memory
    assert fitting_rows("3b", "bfloat16", memory=int(peak / 0.9) - 2, dry_run=False)[0] == 2
    with pytest.raises(UserError, match=r"3b.* one row needs 67\.\d GiB, .* 90% of 60\.0"):
        fitting_rows("3b", "bfloat16", memory=60 * 2**30, dry_run=False)


@pytest.mark.full
def test_every_group_whose_rows_are_chosen_fits_an_h200() -> None:
    h200 = find_device("h200")
    assert h200 is not None
    for group in (name for name, group in GROUPS.items() if group.rows is None):
        for name in GROUPS[group].variants:
            assert 1 < fitting_rows(group, name, memory=h200.memory, dry_run=False)[0] <= 8


def test_what_runs_out_of_memory_is_measured_with_half_the_rows() -> None:
    tried = []

    def measure(rows: int) -> dict[str, Any]:
        tried.append(rows)
        if rows > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {"rows": rows}

    most = 2
    assert halved_until_it_fits(measure, 7) == ({"rows": 1}, [7, 3])
    most = 0
    with pytest.raises(torch.OutOfMemoryError):
        halved_until_it_fits(measure, 2)
    assert tried == [7, 3, 1, 2, 1]


def test_a_variant_that_fails_does_not_end_the_others(pool: WorkerPool) -> None:
    (result,) = pool.run(1, _one_fails)
    failed, unknown_memory, ran = result["rows"]
    assert failed["error"] == "RuntimeError: boom"
    assert unknown_memory["out_of_memory_with_rows"] == "2"
    assert ran["rows"] == "2 × 64"
    assert result["checks"] == {"no variant failed": False}


def _one_fails() -> dict[str, Any]:
    """The first variant raises, the second runs out of memory with two rows."""
    outcomes = iter([RuntimeError("boom"), torch.OutOfMemoryError("CUDA out of memory"), None, None])

    def build(self: OurSide) -> None:
        if (problem := next(outcomes)) is not None:
            raise problem
        own_build(self)

    own_build = OurSide.build
    names = ["bfloat16", "selective recomputation", "full recomputation"]
    with (
        mock.patch.dict(GROUPS, small=Group("SmolLM2-135M", 2, 64, names)),
        mock.patch.object(OurSide, "build", build),
    ):
        return last_result(bench_gpu, groups=("small",), dry_run=True)


def test_only_the_variants_that_are_named_run() -> None:
    done = tool("gpu", "--device", "cpu", "--dry-run", "--groups", "3b", "--variants", "fp8")
    assert done.returncode == 2
    assert "--variants: 'fp8' is no variant of 3b; choose from: bfloat16, compiled; " in done.stderr


def test_flops_of_the_mixture_are_those_of_the_experts_that_a_token_visits() -> None:
    """By hand: four projections of attention, the router, eight of 128 experts with three matrices each; the head."""
    counts = count_model_flops(build_model(config_of("moe", "bfloat16", dry_run=False).model))

    attention = 2 * 2048 * 32 * 128 + 2 * 2048 * 4 * 128
    layer = attention + 2048 * 128 + 8 * 3 * 2048 * 768
    assert counts.parameters == 8 * layer + 151936 * 2048 == 766_246_912
    assert counts.attention_per_pair == 8 * 32 * 2 * (128 + 128)
    assert counts.states_per_token == 0


def test_flops_of_the_hybrid_are_those_of_its_states_and_of_its_attention() -> None:
    """By hand: six layers with a state of 32 heads of 128 × 128, two with attention of 16 heads, and a gate."""
    counts = count_model_flops(build_model(config_of("hybrid", "bfloat16", dry_run=False).model))

    convolved = (2 * 16 + 32) * 128
    state = 4096 * (convolved + 32 * 128 + 2 * 32) + convolved * 4 + 32 * 128 * 4096
    attention = 4096 * (2 * 16 + 2 * 4) * 256 + 16 * 256 * 4096
    assert counts.parameters == 6 * state + 2 * attention + 8 * 3 * 4096 * 12288 + 248320 * 4096
    assert counts.attention_per_pair == 2 * 16 * 2 * (256 + 256)
    assert counts.states_per_token == 6 * 32 * 6 * 128 * 128


def test_what_a_variant_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "bfloat16", ([], ["no_such_package"]))
    cpu = torch.device("cpu")
    assert obstacle("bfloat16, compiled", device=cpu) == "no_such_package is not installed"
    assert obstacle("compiled", device=cpu) == "compiled variants are for a device"
    assert obstacle("full recomputation", device=cpu) is None


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


def event(name: str, start: float, end: float, *, device: str = "CUDA", own: float = 0.0) -> Any:
    """As torch's profiler gives them; times in microseconds."""
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
        is_user_annotation=name.startswith(("ProfilerStep", "Optimizer.")),
        is_async=False,
        self_cpu_time_total=own,
    )


def test_shares_are_of_the_steps_time() -> None:
    events = []
    for start in (0.0, 1000.0):
        events += [event("ProfilerStep#1", start, start + 1000, device=device) for device in ("CPU", "CUDA")]
        events += [event("Optimizer.step#AdamW.step", start + 900, start + 950)]
        events += [event("aten::mm", start + 50, start + 100, device="CPU", own=50)]
        events += [event("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_nn", start + 100, start + 500)]
        events += [event("flash_fwd_kernel", start + 500, start + 600)]
        events += [event("triton_poi_fused_mul_0", start + 550, start + 750)]  # on another stream
        events += [event("multi_tensor_apply_kernel", start + 900, start + 950)]

    found = shares(events)

    assert found["step_seconds"] == pytest.approx(1e-3)
    kernels = found.pop("kernels")
    busy = {kind: share for kind, share in found.items() if share and kind not in ("step_seconds", "idle")}
    assert busy == pytest.approx({"matmul": 0.4, "attention": 0.1, "elementwise and others": 0.2, "optimizer": 0.05})
    assert found["idle"] == pytest.approx(0.3)
    assert kernels == [
        {"kind": "elementwise and others", "name": "triton_poi_fused_mul_0", "milliseconds": 0.2, "count": 1}
    ]

    on_cpu = [event("ProfilerStep#1", 0, 100, device="CPU"), event("aten::linear", 0, 50, device="CPU", own=10)]
    found = shares([*on_cpu, event("aten::mm", 10, 50, device="CPU", own=40)])
    assert (found["matmul"], found["idle"]) == (0.5, 0.5)


def traced(**milliseconds: float) -> dict[str, Any]:
    """A row of a profile of steps of 100 ms: half of products, the rest copies of these names, five of each a step."""
    kernels = [
        {"kind": "copies", "name": name, "milliseconds": each, "count": 5} for name, each in milliseconds.items()
    ]
    copies = sum(milliseconds.values()) / 100
    found = {"step_seconds": 0.1, "matmul": 0.5, "copies": copies, "idle": 0.5 - copies, "kernels": kernels}
    none = dict.fromkeys(("attention", "optimizer", "collectives", "elementwise and others"), 0.0)
    return {"model": "Llama", "variant": "compiled", "rows": "2 × 64", **none, **found}


def test_traces_before_and_after_stand_side_by_side(tmp_path: Path) -> None:
    many = {f"small_{number}": 1e-3 for number in range(12)}
    for run, row in (("before", traced(chunk_cat=20, copy_=4, **many)), ("after", traced(copy_=5))):
        (tmp_path / run).mkdir()
        (tmp_path / run / "gpu-profile.json").write_text(json.dumps({"rows": [row]}), encoding="utf-8")

    lines = report_lines(tmp_path / "before", tmp_path / "after")

    by_run = [line for line in lines if line.startswith("| Llama | compiled")]
    assert ["before" in line for line in by_run] == [True, False]
    assert "| matmul |" in lines[2]
    assert "| 50 ms (50.0%) |" in by_run[1]
    assert "| 5 ms (5.0%) |" in by_run[1]
    kernels = lines[lines.index("Llama, compiled: copies") + 4 :]
    assert kernels[:2] == ["| `chunk_cat` | 20 (5) | — |", "| `copy_` | 4 (5) | 5 (5) |"]
    assert sum("small_" in line for line in lines) == 8, "ten kernels of each kind"


def test_steps_before_and_after_stand_beneath_each_other(tmp_path: Path) -> None:
    for run, seconds in (("before", 0.5), ("after", 0.4)):
        (tmp_path / run).mkdir()
        rows = [{"model": "Llama", "variant": name, "seconds": seconds} for name in ("eager", "compiled")]
        (tmp_path / run / "gpu-3b.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")

    lines = report_lines(tmp_path / "before", tmp_path / "after")

    assert lines[2:8] == [
        "| run | model | variant | seconds |",
        "| --- | --- | --- | --- |",
        *(f"| {run} | Llama | eager | {seconds} |" for run, seconds in (("before", 0.5), ("after", 0.4))),
        *(f"| {run} | Llama | compiled | {seconds} |" for run, seconds in (("before", 0.5), ("after", 0.4))),
    ]


def peak_of_a_build() -> int | None:
    with PeakMemory(torch.device("cpu")) as memory:
        torch.ones(1600 * 2**20, dtype=torch.uint8)
        kept = torch.ones(400 * 2**20, dtype=torch.uint8)
        memory.forget()
        torch.cat([kept, kept])
    return memory.peak


@pytest.mark.full
def test_peak_memory_leaves_out_what_building_needs_for_a_moment() -> None:
    """In a process of its own: what earlier tests left may go meanwhile. The system may drop pages of code, too."""
    pool = WorkerPool()
    [peak] = pool.run(1, peak_of_a_build)
    pool.close()

    assert peak is not None
    assert 4 * 295 * 2**20 < peak < 4 * 320 * 2**20


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


def test_speed_takes_the_ratio_of_each_round() -> None:
    ours, theirs = [1.0, 1.0, 9.0, 9.0, 9.0], [2.0, 2.0, 18.0, 18.0, 2.0]  # the last was measured amid a change
    found = speed(ours, theirs)
    assert found["ratio"] == 2.0, "the medians' ratio would be 2/9"
    assert found["high"] == 2.0
    assert 2 / 9 <= found["low"] <= 2.0

    by_work = speed([1.0, 1.0, 1.0], [2.0, 3.0, 4.0], work=([10, 10, 10], [30, 10, 20]))
    assert by_work["ratio"] == pytest.approx(3 * 10 / 20)
    assert by_work["low"] < by_work["ratio"] < by_work["high"]


def test_speed_brackets_a_constant_factor() -> None:
    theirs = [1.0, 1.1, 0.9, 1.2, 0.8] * 12
    found = speed([seconds / 1.5 for seconds in theirs], theirs)

    # Resampled as rounds, a constant factor has no spread at all, however noisy the machine.
    assert found == pytest.approx({"ratio": 1.5, "low": 1.5, "high": 1.5})
    assert spread(theirs)["median"] == pytest.approx(1.0)


@pytest.mark.parametrize("params", [1e6, 5e8, 1e9, 7e9])
def test_random_models_have_about_the_size_asked_for(params: float) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(llama_config(params))

    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(params, rel=0.25)


@pytest.mark.full
def test_the_loss_at_a_large_vocabulary_is_that_of_whole_logits_in_less_memory(pool: WorkerPool) -> None:
    options = {"vocabulary": 40_000, "tokens": 2_000, "hidden": 16, "whole": True, "rounds": 1}
    (result,) = pool.run(1, last_result, bench_vocabulary, **options)

    rows, logits = {row["name"]: row for row in result["rows"]}, 2_000 * 40_000 * 4
    assert rows.keys() == {"fsdp2kit", "whole logits"}
    for name, row in rows.items():
        assert row["loss"] == pytest.approx(rows["whole logits"]["loss"], rel=1e-6)
        assert len(row["seconds"]["all"]) == 1
        assert row["seconds"]["median"] > 0
        assert row["peak_bytes"] < logits or name == "whole logits"
    assert rows["whole logits"]["peak_bytes"] > 1.5 * logits
