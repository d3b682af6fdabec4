"""The FSDP1 baseline: both sides train alike under every strategy; what FSDP1 cannot do is refused; the recipe."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import ShardingStrategy
from transformers import AutoModelForCausalLM, AutoTokenizer

from fsdp2kit.config.checks import resolve_mesh
from fsdp2kit.config.schema import FSDPConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.run import load
from fsdp2kit.run import main as run_main
from tests.support.models import full, tiny_model, tiny_model_dir
from tests.support.workers import WorkerPool
from tests.tools.helpers import last_result
from tools.bench import result_lines
from tools.benchmarks.fsdp1 import check_fsdp1, sharding_strategy
from tools.benchmarks.peers import bench_fsdp1

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "toml" / "demo"


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Accumulation, clipping, a schedule and weight decay that spares the norms: all of it must match."""
    folder = tmp_path_factory.mktemp("baseline")
    model = tiny_model_dir("smollm2", folder)
    path = folder / "baseline.toml"
    path.write_text(
        f"""
        recipe = "fsdp1_baseline"
        model.path = "{model}"
        fsdp.param_dtype = "float32"
        data.seq_len = 48
        train = {{ steps = 6, global_batch_size = 8, max_grad_norm = 0.5 }}
        optimizer = {{ lr = 2e-3, weight_decay = 0.5 }}
        lr_schedule.warmup_steps = 2
        wandb.mode = "disabled"
        """
    )
    return path


def compare(pool: WorkerPool, size: int, toml: Path, *overrides: str) -> dict[str, Any]:
    return pool.run(size, _compare, [str(toml), *overrides])[0]


def _compare(arguments: Sequence[str]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return last_result(bench_fsdp1, toml=arguments[0], overrides=arguments[1:], rounds=4, warmup=2)


def _run(arguments: Sequence[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_main(arguments) == 0


LAYERS = "(LlamaDecoderLayer, LlamaForCausalLM)"
# ranks, overrides, what FSDP1 must have been told
VARIANTS: dict[str, tuple[int, list[str], dict[str, str]]] = {
    "full_shard": (
        2,
        [],
        {
            "sharding_strategy": "FULL_SHARD",
            "units": f"3 {LAYERS}",
            "backward_prefetch": "BACKWARD_PRE",
            "forward_prefetch": "False",
            "mixed_precision": "MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32",
        },
    ),
    "untied": (2, [], {"units": f"3 {LAYERS}"}),  # of another model
    "prefetch": (
        2,
        ["fsdp.backward_prefetch=0", "fsdp.forward_prefetch=1"],
        {"backward_prefetch": "None", "forward_prefetch": "True"},
    ),
    "shard_grad_op": (
        2,
        ["fsdp.strategy=shard_grad_op", "activation_checkpointing.mode=full", "activation_checkpointing.every=2"],
        {"sharding_strategy": "SHARD_GRAD_OP"},
    ),
    "no_shard": (2, ["fsdp.strategy=no_shard", "fsdp.offload=params"], {"sharding_strategy": "NO_SHARD"}),
    "one_rank": (1, ["train.max_grad_norm=0"], {"sharding_strategy": "NO_SHARD"}),
    "hybrid": (4, ["fsdp.strategy=hybrid_shard", "mesh.dp_replicate=2"], {"sharding_strategy": "HYBRID_SHARD"}),
    "hybrid_zero2": (
        4,
        ["fsdp.strategy=hybrid_shard_zero2", "mesh.dp_replicate=2", "train.micro_batch_size=2"],
        {"sharding_strategy": "_HYBRID_SHARD_ZERO2"},
    ),
    "size": (
        2,
        ["fsdp.unit=size", "fsdp.min_params=13000", "activation_checkpointing.mode=selective"],
        {"units": "5 (LlamaAttention, LlamaForCausalLM, LlamaMLP)"},
    ),
    "root": (
        2,
        ["fsdp.unit=root", "fsdp.unit_classes=['LlamaMLP']", "fsdp.reduce_every_micro_batch=true"],
        {"units": "3 (LlamaForCausalLM, LlamaMLP)"},
    ),
    "frozen": (
        2,
        ["model.freeze=['model.layers.0.*', 'model.layers.1.mlp.*']", "fsdp.ignored_modules=['model.layers.1.mlp']"],
        {"units": f"3 {LAYERS}"},
    ),
}


# Those that differ from another in one setting only.
THOROUGH = ("full_shard", "shard_grad_op", "prefetch", "untied", "no_shard", "root", "size", "hybrid_zero2")
NAMES = [
    "one_rank",
    *map(full, ("frozen", "hybrid")),
    *(pytest.param(name, marks=pytest.mark.slow) for name in THOROUGH),
]


@pytest.mark.parametrize("name", NAMES)
def test_losses_agree_in_float32(name: str, pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    size, overrides, expected = VARIANTS[name]
    if name == "untied":
        overrides = [f"model.path='{tiny_model_dir('llama3', tmp_path)}'"]

    result = compare(pool, size, toml, *overrides)

    sides, (row,) = result["pairs"]["fsdp1"], result["rows"]
    for key, value in expected.items():
        assert f" {key} {value}, " in sides["fsdp1"]["ran"]
    assert result["checks"]["losses_agree"]
    assert row["losses_differ_by"] < 1e-5
    assert row["grad_norms_differ_by"] < 1e-5
    for side in sides.values():
        assert len(side["seconds"]) == 4
        assert side["peak_bytes"] > 0
        assert side["losses"][-1] != side["losses"][0]
    assert result["provenance"]["world_size"] == size
    assert "; fsdp: " in sides["fsdp2kit"]["ran"]
    assert any(line.startswith("| fsdp1 | **") for line in result_lines(result))


@pytest.mark.full
def test_in_bfloat16_they_agree_as_far_as_bfloat16_goes(pool: WorkerPool, toml: Path) -> None:
    overrides = ["fsdp.param_dtype=bfloat16", "fsdp.storage_dtype=bfloat16", "fsdp.reduce_dtype=bfloat16"]

    result = compare(pool, 2, toml, *overrides)

    bfloat16 = "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16"
    assert f"mixed_precision {bfloat16}, " in result["pairs"]["fsdp1"]["fsdp1"]["ran"]
    assert 1e-6 < result["rows"][0]["losses_differ_by"] < 2e-2


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("mesh.cp", "mesh.cp=2"),
        ("fsdp.class_dtypes", "fsdp.class_dtypes={LlamaRMSNorm='float32'}"),
        ("fsdp.output_dtype", "fsdp.output_dtype=float32"),
        ("fsdp.offload", "fsdp.offload=optimizer"),
        ("fsdp.forward_prefetch", "fsdp.forward_prefetch=2"),
        ("fsdp.backward_prefetch", "fsdp.backward_prefetch=2"),
        ("fsdp.reshard_after_forward", "fsdp.reshard_after_forward=2"),
        ("fsdp.unit_classes", "fsdp={unit='size', unit_classes=['LlamaMLP']}"),
        ("data.streaming", "data={format='text', path='x.jsonl', streaming=true}"),
        ("model.weights", "model.weights=somewhere"),
        # Replicas on nodes of one rank shard nothing, and FSDP1 would not reduce between them.
        ("mesh.dp_shard", "fsdp.strategy=hybrid_shard"),
    ],
)
def test_what_cannot_be_compared_is_refused(key: str, override: str, toml: Path) -> None:
    _, config = load(str(toml), [override])
    sizes = resolve_mesh(config.mesh, config.fsdp, world_size=2, local_world_size=1)
    with pytest.raises(UserError, match=rf"^{key}: "):
        check_fsdp1(config, sizes=sizes)


@pytest.mark.parametrize(
    ("strategy", "reshard", "replicas", "expected"),
    [
        ("hybrid_shard", None, 1, ShardingStrategy.FULL_SHARD),
        ("full_shard", False, 1, ShardingStrategy.SHARD_GRAD_OP),
        ("hybrid_shard_zero2", True, 2, ShardingStrategy.HYBRID_SHARD),
        ("no_shard", None, 4, ShardingStrategy.NO_SHARD),
    ],
)
def test_strategies(strategy: Any, reshard: bool | None, replicas: int, expected: ShardingStrategy) -> None:
    section = FSDPConfig(strategy=strategy, reshard_after_forward=reshard)
    mesh = TrainingConfig(recipe="x").mesh.model_copy(update={"dp_replicate": replicas})
    sizes = resolve_mesh(mesh, section, world_size=4, local_world_size=4)
    assert sharding_strategy(section, sizes=sizes) is expected


@pytest.mark.full
def test_the_recipe_trains_evaluates_and_keeps_weights_and_tokenizer(
    pool: WorkerPool, toml: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    plain = tiny_model("smollm2")
    plain.resize_token_embeddings(1024, mean_resizing=False)
    plain.save_pretrained(model)
    shutil.copytree(DEMO / "tokenizer", model, dirs_exist_ok=True)
    directory = tmp_path / "run"
    overrides = [
        "train.steps=2",
        "lr_schedule.warmup_steps=1",
        "eval.every=2",
        "eval.split=held_out",
        "eval.steps=1",
        "optimizer.lr=0",
    ]

    pool.run(2, _run, [str(toml), f"model.path='{model}'", f"run.dir='{directory}'", *overrides])

    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["loss"] > 0
        assert record["tokens_per_second"] > 0
        assert record["tflops_per_device"] > 0
    # The weights stand still, so a held-out batch that is no training batch is all that makes a difference.
    assert records[1]["eval_loss"] not in [record["loss"] for record in records]
    _, config = load(str(directory / "config.toml"), [])
    assert config.train.steps == 2
    assert config.data.format == "synthetic"
    exported = AutoModelForCausalLM.from_pretrained(directory / "hf")
    for name, value in plain.state_dict().items():
        assert torch.equal(exported.state_dict()[name], value), name
    text = "What is the opposite of wet?"
    assert AutoTokenizer.from_pretrained(directory / "hf")(text) == AutoTokenizer.from_pretrained(model)(text)


def test_held_out_synthetic_tokens_are_others(pool: WorkerPool, toml: Path, tmp_path: Path) -> None:
    batches = pool.run(1, _first_batches, str(toml))[0]
    assert batches[0] != batches[1]


def _first_batches(toml: str) -> list[Any]:
    from fsdp2kit.data.build import build_data

    _, config = load(toml, ["eval.every=1", "eval.split=held_out", "data.shuffle=false"])
    data = build_data(config, tokenizer=None, vocab_size=128)
    return [loader.batch(0)[0].input_ids.tolist() for loader in (data.loader, data.held_out[""])]


def test_ligers_kernels_are_refused_on_a_cpu(toml: Path, tmp_path: Path, pool: WorkerPool) -> None:
    overrides = ["model.liger=true", f"run.dir='{tmp_path / 'run'}'"]
    overrides += ["checkpoint.export_hf=never"]  # else the tokenizer is looked for first
    for function in (_main, _compare):
        with pytest.raises(AssertionError, match=r"UserError: model\.liger: Liger's kernels do not run on a CPU"):
            pool.run(1, function, [str(toml), *overrides])


def _main(arguments: Sequence[str]) -> None:
    recipe, config = load(arguments[0], arguments[1:])
    recipe.main(config)
