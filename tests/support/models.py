"""Tiny models and batches; what their numbers are compared with is `fsdp2kit.parity.reference`, plain transformers."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp2kit.parity import reference as synthetic
from fsdp2kit.parity.reference import Rows
from fsdp2kit.torch_compat import SHARDS_INTEGERS
from tests.support.runs import DEMO

VOCABULARY, LENGTH, ROWS, STEPS = 128, 48, 4, 5
DEMO_VOCABULARY = 1024

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 72,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
# By the name that tests use: transformers' model type, and what differs from `_SIZES`.
TINY = {
    "smollm2": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "llama3": ("llama", {"tie_word_embeddings": False, "rope_parameters": _LLAMA3_ROPE}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "gemma3": ("gemma3_text", {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen3_windowed": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "tie_word_embeddings": False},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite": ("granite", {"logits_scaling": 4.0, "attention_multiplier": 0.25, "residual_multiplier": 0.5}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
}
# The same with heads that two ranks can share.
EVEN = {
    f"{name}_even": (TINY[name][0], {**TINY[name][1], "num_attention_heads": 4, "num_key_value_heads": 2})
    for name in ("smollm2", "llama3", "gemma3", "qwen3_moe")
}
# Mixtures of experts, whose experts four ranks share unevenly; the routers of the first two choose groups of them.
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPS = {"n_routed_experts": 10, "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MIXTURES = {
    "glm4_moe": ("glm4_moe", {**_MOE, **_GROUPS, "use_qk_norm": True}),
    "deepseek_v3": ("deepseek_v3", {**_MOE, **_GROUPS, **_LATENT, "num_key_value_heads": 9}),
    "gpt_oss": ("gpt_oss", {**_MOE, "num_local_experts": 7, "sliding_window": 16, "rope_parameters": _PLAIN_ROPE}),
    "granitemoe": ("granitemoe", {**_MOE, "num_local_experts": 7, "logits_scaling": 4.0, "residual_multiplier": 0.5}),
    "olmoe": ("olmoe", {**_MOE, "num_experts": 7, "num_experts_per_tok": 3}),
}
# Attention that sees chunks of a document, and layers without RoPE; sinks in every layer of a dense model.
_CHUNKS = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "attention_chunk_size": 7}
_LLAMA4 = {**_CHUNKS, "num_local_experts": 4, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2}
EVEN["llama4"] = ("llama4_text", _LLAMA4)
EVEN["glm4"] = ("glm4", {"partial_rotary_factor": 0.5})
EVEN["gemma3n"] = (
    "gemma3n_text",
    {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 16,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
    },
)
EVEN["granite_swa"] = ("granite_swa", {"sliding_window": 16, "rope_parameters": _PLAIN_ROPE})
# Every token visits every expert: matrices keep their sizes whatever the tokens are.
EVEN["gpt_oss_whole"] = ("gpt_oss", {**MIXTURES["gpt_oss"][1], "num_local_experts": 2})
# Fewer experts than four ranks.
EVEN["mixtral_few"] = ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2})

# Layers that carry a state along the sequence, beside attention.
_LINEAR = {
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {
    "mamba_n_heads": 6,
    "mamba_d_head": 24,
    "mamba_n_groups": 3,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {**_EXPERTS, "shared_expert_intermediate_size": 24}
RECURRENT = {
    "qwen3_next": ("qwen3_next", {**_LINEAR, **_SHARED}),
    "qwen3_5": ("qwen3_5_text", _LINEAR),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**_LINEAR, **_SHARED}),
    "olmo_hybrid": ("olmo_hybrid", {**_LINEAR, "linear_num_key_heads": 6, "rope_parameters": _PLAIN_ROPE}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {**_MAMBA, **_LAYERS, "num_local_experts": 4, "shared_intermediate_size": 32, "logits_scaling": 4.0},
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
            "mamba_num_heads": 6,
            "mamba_head_dim": 24,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "falcon_h1": ("falcon_h1", {**_MAMBA, "mamba_d_ssm": 144, "mamba_rms_norm": True}),
    "bamba": ("bamba", {**_MAMBA, "attn_layer_indices": [1]}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
}

# Adapters by the name that tests use: what differs from plain LoRA.
ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True, "use_rslora": True},
    "saved": {},  # and what `_TRAINED_WHOLE` names
    "layer": {"modules_to_save": ["layers.1"]},
}
# Head and embedding where they are not tied, a router, norms.
_TRAINED_WHOLE = {
    "llama3": ["lm_head", "embed_tokens"],
    "qwen3_moe": ["lm_head", "gate"],
    "qwen3": ["norm"],
    "smollm2": ["norm"],
}


def tiny_model_dir(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, **differing: Any) -> Path:
    """Write a tiny random model, as `tiny_model` makes it, to ``folder / kind`` and return that path."""
    path = folder / kind
    tiny_model(kind, **differing).to(dtype).save_pretrained(path)
    return path


def demo_model_dir(folder: Path, *, kind: str = "smollm2", dtype: torch.dtype = torch.float32) -> Path:
    """Write a tiny random model, tied if its kind is, and the demo's tokenizer, to ``folder``; return that path."""
    model = tiny_model(kind)
    with torch.random.fork_rng():
        torch.manual_seed(8)
        model.resize_token_embeddings(DEMO_VOCABULARY, mean_resizing=False)
    model.to(dtype).save_pretrained(folder)
    shutil.copytree(DEMO / "tokenizer", folder, dirs_exist_ok=True)
    return folder


def tiny_model(kind: str, **differing: Any) -> PreTrainedModel:
    """A tiny random model of `TINY`, `EVEN`, `MIXTURES` or `RECURRENT` in float32.

    Its norms are away from one, and routers' biases from zero, so that a lost or swapped one shows.

    Args:
        differing: values of its config.
    """
    config = tiny_config(kind, **differing)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.2 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.2 * torch.randn_like(buffer)
                buffer[-1] = -10.0  # no token visits the last expert
    return model


def tiny_config(kind: str, **differing: Any) -> Any:
    """The config of `tiny_model`, with ``differing`` on top."""
    model_type, of_kind = {**TINY, **EVEN, **MIXTURES, **RECURRENT}[kind]
    return AutoConfig.for_model(model_type, **{**_SIZES, **of_kind, **differing})


def write_adapter(folder: Path, kind: str, name: str) -> None:
    """Write an adapter of the tiny model in ``folder / kind``, saved by peft, to ``folder / kind-name``.

    Its B is not zero, so that A has gradients.
    """
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(5)
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]  # of experts, peft would adapt the fused tensors as well
        options = {"modules_to_save": _TRAINED_WHOLE[kind]} if name == "saved" else ADAPTERS[name]
        layers = attention if kind == "qwen3_moe" else "all-linear"
        config = LoraConfig(r=4, lora_alpha=6, target_modules=layers, **options)
        model = get_peft_model(synthetic.load_plain(folder / kind), config)
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(folder / f"{kind}-{name}")


def add_adapter(model: Any, adapter: Path, *, quantize: str = "none") -> None:
    """Make a plain model one that peft trains, in place.

    If asked for, its linear layers, and experts in one tensor, each alone, are rounded to NF4 before; routers are not.
    """
    layers = model.model.layers if quantize == "nf4" else ()
    for name, parameter in (pair for layer in layers for pair in layer.named_parameters()):
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            parameter.data = torch.stack([nf4_rounded(matrix) for matrix in parameter])
        elif parameter.ndim == 2 and not name.endswith(".gate.weight"):
            parameter.data = nf4_rounded(parameter)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        PeftModel.from_pretrained(model, adapter, is_trainable=True)


def full(*values: Any, marks: Sequence[pytest.MarkDecorator] = ()) -> Any:
    """A test's parameters that only `make test-all` takes: another case of what the default ones cover."""
    return pytest.param(*values, marks=[pytest.mark.full, *marks])


def slow(*values: Any) -> Any:
    """A test's parameters that only ``pytest -m slow`` takes."""
    return pytest.param(*values, marks=pytest.mark.slow)


IS_5_17 = transformers.__version__.startswith("5.17.")
# transformers 5.17 hands the layers of LFM2 nothing of a batch: packs and cp are refused there.
PACKED_RECURRENT = tuple(kind for kind in RECURRENT if not (IS_5_17 and kind.startswith("lfm2")))
needs_integers = pytest.mark.skipif(not SHARDS_INTEGERS, reason="torch 2.11 shards no weights in 4 bits")
needs_torchao = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao, of the extra lowbit")
ADAMW_8BIT = pytest.param("adamw_8bit", marks=needs_torchao)


def nf4_rounded(weight: torch.Tensor) -> torch.Tensor:
    """What QLoRA's NF4 (arXiv:2305.14314, appendix E; bitsandbytes) leaves of a weight, in float32, by its definition.

    Blocks of 64 along the flattened weight, scaled by their largest magnitude, to the nearest of 16 levels: quantiles
    of a normal distribution from 1 − 0.9677083 to 0.9677083, 8 of them above 0 and 7 below, scaled to 1.
    """
    quantile, far = NormalDist().inv_cdf, 0.9677083
    above = [quantile(p) for p in np.linspace(far, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(far, 0.5, 8)[:-1]]
    levels = np.array(sorted([*below, 0.0, *above])) / max(above)
    flat = weight.detach().double().numpy().ravel()
    blocks = np.pad(flat, (0, -flat.size % 64)).reshape(-1, 64)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.abs(blocks[..., None] / np.where(scales == 0, 1, scales)[..., None] - levels).argmin(-1)
    return torch.from_numpy((levels[nearest] * scales).ravel()[: flat.size].reshape(weight.shape)).float()


def make_rows(seed: int, *, rows: int = ROWS, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Rows:
    """A global batch of the size that tests use."""
    return synthetic.make_rows(seed, rows=rows, length=length, vocabulary=vocabulary)


def plain_batches(steps: int = STEPS, *, rows: int = ROWS) -> list[Rows]:
    """One global batch a step, of rows that are one document each."""
    return synthetic.make_batches(steps, rows=rows, length=LENGTH, vocabulary=VOCABULARY, pack=False)


def make_batches(steps: int = STEPS, *, seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> list[Rows]:
    """One global batch a step."""
    return synthetic.make_batches(steps, seed=seed, rows=rows, length=length, vocabulary=VOCABULARY)


def beyond(found: dict[str, float], control: dict[str, float], *, floor: float = 1e-5) -> dict[str, str]:
    """What is further off than ``max(floor, 3 × control)``, as text; empty where all is well."""
    limits = {name: max(floor, 3 * control[name]) for name in found}
    return {name: f"{found[name]:.1e} > {limits[name]:.1e}" for name in found if not found[name] <= limits[name]}


def assert_as_exact_as_plain_bfloat16(found: dict[str, float], expected: dict[str, float]) -> None:
    """Two roundings of the same numbers are as far from each other as each is from the truth, which is known here.

    The plain loop with another micro-batch size rounds most things alike, which makes that spread too strict a
    control: our head adds gradients up in float32, for one, and is no less exact for it.
    """
    assert found["gradients"] > 1e-3, "the computation was not in bfloat16 at all"
    assert found["gradients"] < 1.5 * expected["gradients"]
    assert not beyond(found, expected)
