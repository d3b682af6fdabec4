"""Adapters on experts in one tensor: what they compute, the names of their files, and merging, against peft."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fsdp2kit.checkpoint.export_model import export_model
from fsdp2kit.config.schema import LoraConfig as LoraSection
from fsdp2kit.config.schema import ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.adapters import names_experts, without_adapter
from fsdp2kit.model.build import build_model, materialize, model_on_meta
from fsdp2kit.model.expert_adapters import replace_forward
from fsdp2kit.weights.adapter_values import fill_adapter, load_adapter
from fsdp2kit.weights.adapters import merge_experts
from fsdp2kit.weights.experts import find_experts
from fsdp2kit.weights.load import load_pretrained
from fsdp2kit.weights.record import weights_of
from tests.support.models import full, tiny_model_dir

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
DEEPSEEK = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
            "num_key_value_heads": 4}  # fmt: skip
# By model type: what differs from `SIZES`, and how a file names the up projection of expert 3 of the last layer.
FAMILIES = {
    "qwen3_moe": ({}, "mlp.experts.3.up_proj"),
    "mixtral": ({}, "block_sparse_moe.experts.3.w3"),
    "glm4_moe": ({"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, "mlp.experts.3.up_proj"),
    "deepseek_v3": (DEEPSEEK, "mlp.experts.3.up_proj"),
    "olmoe": ({}, "mlp.experts.3.up_proj"),
    # peft does not look for one expert's layers in a file for this one.
    "qwen2_moe": ({"shared_expert_intermediate_size": 16}, "mlp.experts.base_layer"),
    "gpt_oss": ({}, "mlp.experts.base_layer"),
    "granitemoe": ({}, "block_sparse_moe.experts.base_layer"),
}
KINDS = ["qwen3_moe", "gpt_oss", *(full(kind) for kind in FAMILIES if kind not in ("qwen3_moe", "gpt_oss"))]
ATTENTION = ["o_proj"]


def plain_model(kind: str, folder: Path, **sizes: Any) -> Any:
    """A tiny random model, also written to ``folder``."""
    config = AutoConfig.for_model(kind, **{**SIZES, **FAMILIES[kind][0], **sizes})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model


def our_model(folder: Path, *, adapter: Path | None = None) -> Any:
    """The model with adapters as a run begins with it; new ones are then given values."""
    section = LoraSection() if adapter else LoraSection(rank=4, alpha=6, target_modules=[*ATTENTION, "experts"])
    model = build_model(ModelConfig(path=str(folder), adapter=adapter and str(adapter)), lora=section)
    materialize(model, device=torch.device("cpu"), whole_device=torch.device("cpu"))
    load_pretrained(model, folder)
    fill_adapter(model, seed=0)
    if adapter is None:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(4)
            for parameter in (p for p in model.parameters() if p.requires_grad):
                parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def with_adapter(folder: Path, adapter: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), str(adapter)).eval()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(40)[None] * 7 % 60 + 2, use_cache=False).logits


# Rows of these sizes are no multiple of 16 bytes. transformers' grouped forward refuses them.
ODD: dict[str, Any] = {
    "hidden_size": 34,
    "moe_intermediate_size": 18,
    "intermediate_size": 18,
    "experts_implementation": "eager",
}


@pytest.mark.parametrize(
    ("kind", "rank", "sizes"),
    [("qwen3_moe", 8, {}), *((kind, 3, {}) for kind in FAMILIES), ("qwen3_moe", 3, ODD), ("gpt_oss", 3, ODD)],
)
def test_experts_compute_what_pefts_do(kind: str, rank: int, sizes: dict[str, Any], tmp_path: Path) -> None:
    """Logits and the gradients of all factors; an expert without tokens has none."""
    config = LoraConfig(
        r=rank, lora_alpha=5, target_modules=ATTENTION, target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = plain_model(kind, tmp_path, **sizes)
        names = list(find_experts(model))
        peft: Any = get_peft_model(model, config)
    for parameter in (p for p in peft.parameters() if p.requires_grad):
        parameter.data += 0.1 * torch.randn_like(parameter)

    def run() -> dict[str, Tensor]:
        peft.zero_grad()
        found = peft(input_ids=torch.tensor([[5, 9]]), use_cache=False).logits
        found.square().mean().backward()
        return {"logits": found} | {name: p.grad for name, p in peft.named_parameters() if p.requires_grad}

    expected = run()
    replace_forward(model, names)
    for name, value in run().items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-5, atol=1e-5 * expected[name].detach().abs().max().item()
        )
    assert len(expected) == 1 + 2 * 2 + 4 * len(names)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_what_peft_loads_and_merges(kind: str, tmp_path: Path) -> None:
    plain = plain_model(kind, tmp_path / "base")
    model = our_model(tmp_path / "base")
    export_model(model, tmp_path / "out")
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {f"base_model.model.model.layers.1.{FAMILIES[kind][1]}.lora_{letter}.weight" for letter in "AB"} <= {
        *stored
    }
    peft = with_adapter(tmp_path / "base", tmp_path / "out")
    torch.testing.assert_close(logits(peft), logits(model), rtol=1e-5, atol=1e-5)
    with without_adapter(model):
        torch.testing.assert_close(logits(model), logits(plain.eval()), rtol=1e-5, atol=1e-5)

    again = our_model(tmp_path / "base", adapter=tmp_path / "out")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(p, trained[name]) for name, p in again.named_parameters() if p.requires_grad)
    export_model(again, tmp_path / "more")
    assert (tmp_path / "more" / "adapter_config.json").read_text() == (
        tmp_path / "out" / "adapter_config.json"
    ).read_text()

    theirs = {name.replace(".base_layer", ""): p for name, p in peft.merge_and_unload().named_parameters()}
    adapter = weights_of(model).adapter
    assert adapter is not None
    for name in adapter.experts:
        for key, wrapper in (("gate_up_proj", f"{name}.base_layer"), ("down_proj", name)):
            one: Any = model.get_submodule(wrapper)
            factors = (one.lora_A["default"].weight, one.lora_B["default"].weight)
            ours = merge_experts(one.get_base_layer().get_parameter(key), one, *factors)
            torch.testing.assert_close(ours, theirs[f"{name}.{key}"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("start", ["experts", "mlp.experts", "every layer"])
def test_an_adapter_that_peft_wrote_loads_however_its_config_names_experts(start: str, tmp_path: Path) -> None:
    """``target_parameters`` are ends of names, or whole ones."""
    plain = plain_model("gpt_oss", tmp_path / "base")
    starts = list(find_experts(plain)) if start == "every layer" else [start]
    named = [f"{one}.{weight}" for one in starts for weight in ("gate_up_proj", "down_proj")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft: Any = get_peft_model(
            plain, LoraConfig(r=3, lora_alpha=5, target_modules=ATTENTION, target_parameters=named)
        )
        for parameter in (p for p in peft.parameters() if p.requires_grad):
            parameter.data += 0.1 * torch.randn_like(parameter)
        peft.save_pretrained(tmp_path / "adapter")
    model = our_model(tmp_path / "base", adapter=tmp_path / "adapter")
    load_adapter(model, tmp_path / "adapter")
    torch.testing.assert_close(logits(model), logits(peft.eval()), rtol=1e-5, atol=1e-5)


def test_gate_and_up_with_factors_of_their_own_are_refused(tmp_path: Path) -> None:
    plain_model("qwen3_moe", tmp_path / "base")
    model = our_model(tmp_path / "base")
    export_model(model, tmp_path / "out")
    path = tmp_path / "out" / "adapter_model.safetensors"
    stored = load_file(path)
    name = next(name for name in stored if "experts.3.up_proj.lora_A" in name)
    save_file({**stored, name: stored[name] + 1}, path)
    with pytest.raises(UserError, match=r"^model.adapter: .*gate and up of an expert have factors A of their own"):
        load_adapter(model, tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"target_modules": ["down_proj"]},
            "lora.target_modules: down_proj: experts in one tensor have adapters on all of",
        ),
        (
            {"target_modules": ["q_proj", "expert"]},
            "lora.target_modules: 'expert' matches no module of the model; did you mean experts?",
        ),
        (
            {"target_modules": ["q_proj", "experts"], "modules_to_save": ["mlp"]},
            "lora.modules_to_save: holds experts that have adapters",
        ),
        ({"target_modules": ["experts", "gate"]}, "lora.target_modules: gate.weight: peft takes a name for"),
        ({"target_modules": ["experts"], "dora": True}, "lora.dora: is not supported with adapters on experts"),
        ({"target_modules": ["experts"], "rslora": True}, "lora.rslora: is not supported"),
        ({"target_modules": ["experts"], "dropout": 0.1}, "lora.dropout: is not supported"),
    ],
    ids=str,
)
def test_what_cannot_be_adapted_is_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    sizes = {"model_type": "qwen3_moe", **SIZES, "num_hidden_layers": 1}
    for name in ("num_local_experts", "n_routed_experts"):
        del sizes[name]
    section = ModelConfig(config=sizes, weights="random")
    with pytest.raises(UserError) as error:
        build_model(section, lora=LoraSection(rank=4, **options))
    assert str(error.value).startswith(says)


def test_names_that_other_layers_have_as_well_are_refused(tmp_path: Path) -> None:
    plain_model("glm4_moe", tmp_path)
    section = ModelConfig(path=str(tmp_path))
    with pytest.raises(UserError, match=r"gate_proj.* and model\.layers\.\S+gate_proj, which would get no adapter"):
        build_model(section, lora=LoraSection(rank=4, target_modules=["gate_proj", "up_proj", "down_proj"]))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"target_modules": ["nope"]}, "'nope' matches no module"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["nope"]}, "'nope' matches no module"),
        ({"target_modules": ["q_proj", "w1"]}, "adapters on all of"),
    ],
)
def test_an_adapters_config_that_does_not_fit_is_refused_by_its_export(
    config: dict[str, Any], says: str, tmp_path: Path
) -> None:
    path = tiny_model_dir("mixtral", tmp_path)
    file = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (path / "adapter_config.json").write_text(json.dumps(file))
    model = model_on_meta(path)
    assert model is not None
    with pytest.raises(UserError, match=says):
        names_experts(model, path)
