"""Model directories as transformers 4 wrote them: config.json in its form, by hand, and small random weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers import models as tokenizer_models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from fsdp2kit.config.schema import (
    DataConfig,
    FSDPConfig,
    MeshConfig,
    ModelConfig,
    PreflightConfig,
    TrainingConfig,
)
from fsdp2kit.job import distributed
from fsdp2kit.job.mesh import build_mesh
from fsdp2kit.model.build import build_model
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import plan_parallel
from tests.support.models import tiny_model

_SIZES = {
    "transformers_version": "4.46.0",
    "torch_dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_LAYERS = ["sliding_attention", "full_attention"]
OLD: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1_000_000.0, "sliding_window": 64},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rope_theta": 1_000_000, "rope_scaling": None, "head_dim": 16},
    "gemma3_text": {
        "architectures": ["Gemma3ForCausalLM"],
        "head_dim": 16,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 20_000.0,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 64,
        "layer_types": _LAYERS,
        "tie_word_embeddings": True,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "rope_theta": 20_000.0,
        "rope_scaling": _LONG,
        "original_max_position_embeddings": 64,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "rope_theta": 1_000_000.0, "sliding_window": None},
    "mixtral": {**_EXPERTS, "architectures": ["MixtralForCausalLM"], "rope_theta": 1e6, "sliding_window": None},
    "gpt_oss": {
        **_EXPERTS,
        "architectures": ["GptOssForCausalLM"],
        "head_dim": 16,
        "rope_theta": 150_000,
        "rope_scaling": {**YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "sliding_window": 64,
        "layer_types": _LAYERS,
    },
    "gpt_neox": {"architectures": ["GPTNeoXForCausalLM"], "rotary_emb_base": 50_000, "rotary_pct": 0.5},
    "stablelm": {"architectures": ["StableLmForCausalLM"], "rope_theta": 50_000, "partial_rotary_factor": 0.5},
}


def old_python() -> str:
    """A Python that has transformers 4; without one the test is skipped (docs/dev/checks.md)."""
    name = "FSDP2KIT_TRANSFORMERS4_PYTHON"
    if name not in os.environ:
        pytest.skip(f"{name} names no Python with transformers 4 (see docs/dev/checks.md)")
    return os.environ[name]


def write_old(kind: str, path: Path, **differing: Any) -> dict[str, Any]:
    """Write a model in transformers 4's form, its weights in float32, to ``path``; return its config.json's fields."""
    fields = {"model_type": kind, **_SIZES, **OLD[kind], **differing}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(fields))
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.float32)
    model.save_pretrained(path)
    (path / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.5, "do_sample": true}')
    (path / "config.json").write_text(json.dumps(fields))
    return fields


def save_base(folder: Path, kind: str, *, padding: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A tiny base model, with rows for its own tokens and ``padding`` more; its tokenizer knows no turns."""
    words = Tokenizer(tokenizer_models.BPE())
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    words.train_from_iterator(["Is water wet? Yes, wet."], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    if kind == "phi":
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi", vocab_size=128, **sizes))
        model.lm_head.bias.data.normal_()
    else:
        model = tiny_model(kind)
    model.resize_token_embeddings(len(tokenizer) + padding, mean_resizing=False)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    path = folder / kind
    model.to(dtype).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def sharded(section: ModelConfig, shard: int) -> Any:
    world = distributed.start()
    hybrid = shard != world.size
    fsdp = FSDPConfig(strategy="hybrid_shard" if hybrid else "full_shard", param_dtype="float32")
    sizes = MeshConfig(dp_shard=shard)
    mesh = build_mesh(sizes, fsdp, world=world)
    # Values are what is looked at here, of architectures too that training would refuse.
    data, preflight = DataConfig(pack=False, seq_len=64), PreflightConfig(allow=["dropout", "router_aux_loss"])
    config = TrainingConfig(recipe="none", model=section, mesh=sizes, fsdp=fsdp, data=data, preflight=preflight)
    model = build_model(section)
    return parallelize_model(model, plan_parallel(model, config, mesh.sizes, "cpu"), mesh=mesh)


# Whose initialisation reaches beyond a module's own tensors, or which are otherwise unlike a Llama.
UNUSUAL = (
    "modernbert-decoder",  # attention, MLP and the model itself initialise their children
    "gpt2",
    "opt",
    "gpt_neox",
    "diffllama",
    "deepseek_v3",
    "qwen3_next",
    "olmo_hybrid",
    "nemotron_h",
    "minimax",
)
