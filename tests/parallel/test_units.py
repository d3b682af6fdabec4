"""Units: which modules, found by role, size, class and what is frozen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaMLP

from fsdp2kit.config.schema import FSDPConfig, LoraConfig, ModelConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model, freeze
from fsdp2kit.model.inspect import inspect_model
from fsdp2kit.parallel.fsdp import plan_units
from tests.support.kept_dtypes import kept_model
from tests.support.models import tiny_model, tiny_model_dir


def units(kind: str, *, frozen: tuple[str, ...] = (), **section: Any) -> list[str]:
    model = tiny_model(kind)
    freeze(model, frozen)
    return [unit.name for unit in plan_units(FSDPConfig(**section), model)]


LAYERS = ["model.layers.0", "model.layers.1"]


def test_layers_and_untied_ends() -> None:
    assert units("smollm2") == ["", *LAYERS]
    assert units("llama3") == ["", "model.embed_tokens", *LAYERS, "lm_head"]
    assert units("llama3", unit="root") == [""]


def test_units_by_size_are_the_smallest_that_are_large_enough() -> None:
    model = tiny_model("llama3")
    sizes = {name: sum(p.numel() for p in module.parameters()) for name, module in model.named_modules()}
    for least in (1, sizes["model.layers.0.mlp.gate_proj"], sizes["model.layers.0.self_attn"], sizes["model"], 10**9):
        found = units("llama3", unit="size", min_params=least)
        for name in found[1:]:
            inside = sum(
                sizes[other] - _within(other, found, sizes) for other in found if other.startswith(f"{name}.")
            )
            assert sizes[name] - inside >= least, name
        held = {name for name in sizes if name in found}
        for name in sizes:
            # what is not a unit, and could be one, has too little that no unit inside it has
            if name not in held and not name.endswith("layers") and sizes[name]:
                assert sizes[name] - _within(name, found, sizes) < least, name
    assert units("llama3", unit="size", min_params=10**9) == [""]


def _within(name: str, found: list[str], sizes: dict[str, int]) -> int:
    """Parameters of the units inside a module, each counted once: the outermost hold the others'."""
    inside = [other for other in found if other.startswith(f"{name}.")]
    return sum(sizes[o] for o in inside if not any(o.startswith(f"{p}.") for p in inside))


def test_a_tied_parameter_is_counted_where_both_of_its_users_are() -> None:
    found = units("smollm2", unit="size", min_params=1)
    assert "model.layers.0.mlp.gate_proj" in found
    assert not {"lm_head", "model.embed_tokens"} & set(found)


def test_classes_become_units_inside_the_layers() -> None:
    found = units("llama3", unit_classes=["LlamaMLP"])
    assert [name for name in found if name.endswith("mlp")] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    found = {unit.name: unit.param_dtype for unit in plan_units(
        FSDPConfig(class_dtypes={"LlamaRMSNorm": "float32"}), tiny_model("llama3"))}  # fmt: skip
    assert {name for name, dtype in found.items() if dtype == "float32"} == {
        "model.norm",
        *(f"{layer}.{norm}" for layer in LAYERS for norm in ("input_layernorm", "post_attention_layernorm")),
    }


def test_what_is_frozen_beside_trained_parameters_of_the_root_is_a_unit() -> None:
    assert units("llama3", frozen=("model.norm.*",)) == ["", "model.embed_tokens", *LAYERS, "model.norm", "lm_head"]
    assert units("llama3", unit="root", frozen=("model.*",)) == ["", "model"]
    assert units("smollm2", frozen=("*.mlp.*",)) == ["", *LAYERS], "inside a layer it stays in the layer's"
    assert units("smollm2", frozen=("lm_head.*",)) == ["", *LAYERS], "tied parameters stay together"


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ({"unit_classes": ["LlamaMPL"]}, r"fsdp\.unit_classes: .*'LlamaMPL'; did you mean LlamaMLP"),
        ({"unit_classes": ["ModuleList"]}, "ModuleList has no forward"),
        ({"class_dtypes": {"RMSNorm": "float32"}}, r"fsdp\.class_dtypes: .*LlamaRMSNorm"),
        ({"ignored_modules": ["model.layer.0"]}, "matches no module; did you mean model.layers.0"),
        ({"ignored_modules": ["*.0.mlp"]}, r"mlp.* is trained.*model\.freeze"),
    ],
)
def test_what_cannot_be_is_refused(section: dict[str, Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        units("llama3", **section)


@pytest.mark.full
def test_parameters_shared_between_units_are_refused() -> None:
    section = ModelConfig(config={"model_type": "zamba2"}, weights="random", attention="eager")
    with pytest.raises(UserError, match=r"Zamba2ForCausalLM: .*shared_transformer.* are one parameter in two places"):
        plan_units(FSDPConfig(), build_model(section))


def test_ignored_modules_are_no_units() -> None:
    found = units("llama3", ignored_modules=["model.layers.0"], frozen=("*.layers.0.*",))
    assert found == ["", "model.embed_tokens", "model.layers.1", "lm_head"]


def test_what_is_never_called_is_no_unit() -> None:
    """Mamba reads the weight of its convolution itself, so that nothing would gather it."""
    config = {
        "model_type": "falcon_h1",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
    }
    model = build_model(ModelConfig(config=config, weights="random", attention="eager"))
    found = [unit.name for unit in plan_units(FSDPConfig(unit="size", min_params=1), model)]
    assert "model.layers.0.mamba.in_proj" in found
    assert "model.layers.0.mamba.conv1d" not in found
    with pytest.raises(UserError, match=r"conv1d \(Conv1d\) is never called"):
        plan_units(FSDPConfig(unit_classes=["Conv1d"]), model)


@pytest.mark.parametrize(("dora", "is_unit"), [(False, True), (True, False)])
def test_what_is_read_inside_a_layer_with_an_adapter_is_no_unit(dora: bool, is_unit: bool, tmp_path: Path) -> None:
    """DoRA reads the weights of a layer and its adapter, and the loss that of the head."""
    section = LoraConfig(rank=4, dora=dora, modules_to_save=["lm_head"])
    model = build_model(ModelConfig(path=str(tiny_model_dir("llama3", tmp_path))), lora=section)
    found = {unit.name for unit in plan_units(FSDPConfig(unit="size", min_params=1_000), model)}
    assert "lm_head" in found
    assert not any(name.startswith("lm_head.") for name in found)
    assert ("model.layers.0.mlp.up_proj.base_layer" in found) == is_unit
    assert ("model.layers.0.mlp.up_proj" in found) == (not is_unit)
    found = {unit.name for unit in plan_units(FSDPConfig(unit="root"), model)}
    assert "model.embed_tokens" in found, "frozen modules outside the layers are units of their own"
    assert ("model.layers.0.mlp.up_proj.base_layer" in found) == is_unit


def test_modules_that_the_model_does_not_call_are_found_on_its_small_copy() -> None:
    assert inspect_model(tiny_model("llama3")).uncalled_modules == {"model.layers"}

    class Reader(LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate, up = (torch.nn.functional.linear(x, each.weight) for each in (self.gate_proj, self.up_proj))
            return self.down_proj(self.act_fn(gate) * up)

    original = modeling_llama.LlamaMLP
    modeling_llama.LlamaMLP = Reader
    try:
        found = inspect_model(tiny_model("llama3")).uncalled_modules
    finally:
        modeling_llama.LlamaMLP = original
    projections = {f"{layer}.mlp.{name}_proj" for layer in LAYERS for name in ("gate", "up")}
    assert found == {"model.layers", *projections}


def test_what_stays_in_float32_is_one_unit_around_the_layers() -> None:
    model = kept_model("ernie4_5_moe")
    found = {unit.name: unit for unit in plan_units(FSDPConfig(), model)}
    plain = {unit.name: unit for unit in plan_units(FSDPConfig(param_dtype="float32"), model)}
    exact = found.pop("model")
    assert exact.param_dtype == "float32"
    assert exact.kept
    assert all(name.split(".mlp.")[1].startswith("gate.") for name in exact.kept)
    assert exact.parameters == sum(model.get_parameter(name).numel() for name in exact.kept)
    assert found.keys() == plain.keys()
    assert {unit.param_dtype for unit in found.values()} == {"bfloat16"}
    assert exact.parameters + sum(unit.parameters for unit in found.values()) == sum(
        p.numel() for p in model.parameters()
    )
    decided = plan_units(FSDPConfig(class_dtypes={"Ernie4_5_MoeTopKRouter": "bfloat16"}), model)
    assert "model" not in {unit.name for unit in decided}
    with pytest.raises(
        UserError, match=r"Ernie4_5_MoeModel already is the unit of the parameters that stay in float32"
    ):
        plan_units(FSDPConfig(unit_classes=["Ernie4_5_MoeModel"]), model)
