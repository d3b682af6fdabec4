"""A real vLLM serves and rolls out mixtures of experts, where there is one (docs/grpo.md)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.rl.helpers.vllm import (
    GREEDY,
    assert_greedy,
    free_port,
    greedy,
    path_in_environment,
    tune,
    vllm_server,
    write_run,
)
from tests.support.models import DEMO
from tests.support.runs import run_recipe
from tests.support.workers import WorkerPool
from tools import dcp_to_hf


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3-MoE, of sizes that vLLM's kernels take, with the demo's tokenizer."""
    folder = tmp_path_factory.mktemp("mixture")
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1024}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", num_hidden_layers=2, initializer_range=0.2, **sizes, **experts)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shutil.copytree(DEMO / "tokenizer", folder, dirs_exist_ok=True)
    return folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["mesh.ep=2"], id="export"),
        pytest.param(["lora.rank=4", "lora.target_modules=['experts', 'q_proj']"], id="merged"),
    ],
)
def test_vllm_answers_as_transformers_do(options: list[str], mixture: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """An export of partitioned experts, and one with its experts' adapters merged into it."""
    python = path_in_environment("FSDP2KIT_VLLM_PYTHON")
    tune(pool, tmp_path, mixture, *options, "optimizer.lr=1e-2")
    served = tmp_path / "run" / "hf"
    if options[0] != "mesh.ep=2":
        checkpoint, served = tmp_path / "run" / "checkpoints" / "step-000006", tmp_path / "merged"
        assert dcp_to_hf.main([str(checkpoint), str(served), "--merge", str(mixture), "--dtype", "float32"]) == 0

    tokenizer = AutoTokenizer.from_pretrained(mixture)
    asked = [tokenizer(text).input_ids for text in GREEDY]
    with vllm_server(
        python, served, tmp_path, dtype="float32", port=free_port(), options=["--served-model-name", "x"]
    ) as url:
        answers = [greedy(url, "x", ids) for ids in asked]
    plain: Any = AutoModelForCausalLM.from_pretrained(served, dtype=torch.float32).eval()
    before: Any = AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32).eval()
    for ids, answer in zip(asked, answers, strict=True):
        assert_greedy(plain, ids, answer, slack=1e-3)
    with pytest.raises(AssertionError):  # training changed the first answer
        assert_greedy(before, asked[0], answers[0], slack=1e-3)


@pytest.mark.timeout(1800)
def test_rollouts_of_partitioned_experts(mixture: Path, pool: WorkerPool, tmp_path: Path) -> None:
    """Engine and trainer each route; in float32 they route alike."""
    python, port = path_in_environment("FSDP2KIT_VLLM_PYTHON"), free_port()
    toml = write_run(tmp_path, mixture, port, dtype="float32")
    options = ["mesh.cp=1", "mesh.ep=2", "data.seq_len=128", "optimizer.lr=1e-3", "train.steps=3"]
    with vllm_server(python, mixture, tmp_path, dtype="float32", port=port):
        said = pool.run(2, run_recipe, str(toml), options)[0]
    assert not said.startswith("error"), said
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [record["log_prob_gap_max"] for record in records]
    assert len(gaps) == 3
    assert 0 < max(gaps) <= 1e-4
