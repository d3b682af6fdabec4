"""What would silently change the mathematics is refused, and what only looks like it is not."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from transformers import AutoConfig

from fsdp2kit.config.checks import MeshSizes
from fsdp2kit.config.schema import (
    ActivationCheckpointingConfig,
    CompileConfig,
    FSDPConfig,
    ModelConfig,
    TrainingConfig,
)
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.model.inspect import backbone_name, shrink_config
from fsdp2kit.model.loss_head import attach_loss
from fsdp2kit.parallel.plan import ParallelPlan, plan_parallel
from tests.parallel.helpers.check import check
from tests.support.models import full

_LLAMA4 = {"num_hidden_layers": 2, "num_local_experts": 2, "intermediate_size": 64, "intermediate_size_mlp": 64}


@pytest.mark.parametrize("model_type", ["llama", full("qwen3"), full("mixtral"), "gpt_neox"])
def test_ordinary_models_pass(model_type: str) -> None:
    check(model_type, cp=2)  # gpt_neox: its config has a dropout for a head that this model does not have


@pytest.mark.parametrize(
    ("model_type", "overrides", "says"),
    [
        ("llama", {"attention_dropout": 0.1}, "attention_dropout"),
        ("phi", {"resid_pdrop": 0.1}, "dropout"),
        ("qwen3_moe", {"output_router_logits": True}, "router_aux_loss"),
        ("bloom", {}, "data.pack"),
        ("llama4_text", {**_LLAMA4, "floor_scale": 512}, "data.seq_len.*512"),
        ("jamba", {}, "data.pack"),
        ("recurrent_gemma", {}, "data.pack"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise.*; set preflight\.allow"),
    ],
)
def test_what_would_train_something_else_is_refused(model_type: str, overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check(model_type, **overrides)


def _plan_compiled(mode: str, *, every: int = 1, **fsdp: Any) -> ParallelPlan:
    section = ModelConfig(config={"vocab_size": 128, "model_type": "llama", "num_hidden_layers": 2}, weights="random")
    checkpointing = ActivationCheckpointingConfig.model_validate({"mode": mode, "every": every})
    compiled, sharding = CompileConfig(enabled=True), FSDPConfig.model_validate(fsdp)
    config = TrainingConfig(
        recipe="x", model=section, fsdp=sharding, activation_checkpointing=checkpointing, compile=compiled
    )
    return plan_parallel(build_model(section), config, MeshSizes(1, 1, 1))


def test_the_plan_says_what_is_recomputed_and_compiled() -> None:
    lines = _plan_compiled("full", every=2).describe()
    assert {"activation checkpointing: full, one decoder layer in 2", "torch.compile: each decoder layer"} <= {*lines}


def test_units_inside_layers_are_compiled_around_and_refused_with_selective_recomputation() -> None:
    for inner in ({"unit_classes": ["LlamaMLP"]}, {"class_dtypes": {"LlamaRMSNorm": "float32"}}):
        plan = _plan_compiled("full", **inner)
        assert plan.broken_layers == ["model.layers.0", "model.layers.1"]
        assert "torch.compile: each decoder layer (in pieces: units inside break its graph)" in plan.describe()
        with pytest.raises(UserError, match=r"selective.*compile\.enabled.*break.*mode = \"full\""):
            _plan_compiled("selective", **inner)
    for unit in ("layer", "root"):
        assert _plan_compiled("selective", unit=unit).broken_layers == []


def test_results_that_are_changed_in_place_cannot_be_kept() -> None:
    small = {"num_hidden_layers": 2, "num_local_experts": 4}
    check("gpt_oss", pack=False, checkpointing="full", allow=["router_aux_loss"], **small)
    with pytest.raises(UserError, match=r"selective.*in place.*\"full\""):
        check("gpt_oss", pack=False, checkpointing="selective", allow=["router_aux_loss"], **small)
    check("qwen3_moe", checkpointing="selective")


def test_refusals_can_be_waived() -> None:
    check("llama", attention_dropout=0.1, allow=["dropout"])
    check("qwen3_moe", output_router_logits=True, allow=["router_aux_loss"])
    check("bloom", pack=False, allow=["dropout"])


@pytest.mark.parametrize(
    ("model_type", "says"),
    [
        ("jamba", "linear_attention"),
        ("recurrent_gemma", "linear_attention|attention interface"),
    ],
)
def test_what_context_parallelism_cannot_do_is_refused(model_type: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check(model_type, cp=2, pack=False, allow=["dropout"])


@pytest.mark.parametrize("model_type", ["llama4_text", "mamba", "gpt2", "gpt_neox"])
def test_the_backbone_is_found_whatever_it_is_called(model_type: str) -> None:
    model = build_model(ModelConfig(config={"model_type": model_type}, weights="random", attention="eager"))
    assert model.get_submodule(backbone_name(model)).get_parameter is not None
    assert backbone_name(model) in {"model", "backbone", "transformer", "gpt_neox"}


def test_a_mixture_of_experts_keeps_its_own_head() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = shrink_config(AutoConfig.for_model("mixtral"))
    model: Any = AutoModelForCausalLM.from_config(config)
    tokens = torch.arange(12)[None]
    logits = model(tokens, use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits[0], tokens[0], reduction="sum")
    attach_loss(model, own_head=True)
    torch.testing.assert_close(model.loss_sum(tokens, tokens), expected)


@pytest.mark.parametrize("cp", [full(1), 2])
@pytest.mark.parametrize("attention", ["auto", full("eager")])
def test_sinks_and_chunks_are_packed_and_cut(attention: str, cp: int) -> None:
    """gpt-oss and OPT make masks without positions, so that packed documents see each other: they are given ours."""
    check("opt", attention=attention, dropout=0.0)
    check("gpt_oss", cp=cp, attention=attention, num_hidden_layers=2, num_local_experts=4)
    check("llama4_text", cp=cp, attention=attention, **_LLAMA4)


@pytest.mark.parametrize(
    ("model_type", "is_told"),
    [("llama", True), ("qwen3_next", True), ("stablelm", False), ("nemotron", False)],
)
def test_flash_attention_is_told_where_packed_documents_begin(model_type: str, is_told: bool) -> None:
    """Some layers hand no keyword arguments on to attention."""
    sizes = {"vocab_size": 128, "num_hidden_layers": 2, "num_key_value_heads": 4, "num_attention_heads": 4}
    section = ModelConfig(config={"model_type": model_type, "hidden_size": 64, **sizes}, weights="random")
    config = TrainingConfig(recipe="x", model=ModelConfig(attention="flash_attention_2"))
    expected = pytest.raises(UserError, match=r"flash_attention_2.*: packed documents would see each other")
    with nullcontext() if is_told else expected:
        plan_parallel(build_model(section), config, MeshSizes(1, 1, 1))


def test_kernels_that_leave_sinks_or_chunks_out_are_refused() -> None:
    for model_type, overrides in (("gpt_oss", {"num_hidden_layers": 2}), ("llama4_text", _LLAMA4)):
        model = build_model(ModelConfig(config={"model_type": model_type, **overrides}, weights="random"))
        config = TrainingConfig(recipe="x", model=ModelConfig(attention="flash_attention_2"))
        with pytest.raises(UserError, match=r"flash_attention_2.*knows no (attention sinks|chunked_attention)"):
            plan_parallel(model, config, MeshSizes(1, 1, 1))


@pytest.mark.parametrize("method", ["ulysses", "ring", "allgather"])
@pytest.mark.parametrize(
    "model_type", ["llama", *map(full, ("qwen3", "mistral", "gemma3_text", "mixtral", "qwen3_moe", "cohere2"))]
)
def test_every_method_passes_for_ordinary_models(model_type: str, method: str) -> None:
    check(model_type, cp=2, method=method, attention="sdpa")


@pytest.mark.parametrize(
    ("model_type", "method", "attention", "says"),
    [
        (
            "gemma2",
            "ring",
            "sdpa",
            "cannot be built|does not know softcap.*'ulysses'",  # whose attention has another name in each version
        ),
        ("bloom", "ulysses", "eager", "interface"),
        ("jamba", "ring", "sdpa", "linear_attention"),
    ],
)
def test_what_a_method_cannot_do_is_refused(model_type: str, method: str, attention: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check(model_type, cp=2, pack=False, method=method, attention=attention, allow=["dropout"])


@pytest.mark.usefixtures("biased_llama")
def test_an_ordinary_attention_with_something_of_its_own_is_found_out() -> None:
    with pytest.raises(UserError, match=r"not what the model's own is.*set context_parallel.method = 'ulysses'"):
        check("llama", cp=2, method="ring", attention="sdpa")
