"""Adapters in a meta model are those that peft would build; what could not be trained or exported is refused."""

from __future__ import annotations

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from fsdp2kit.config.checks import MeshSizes, check_config
from fsdp2kit.config.schema import CompileConfig, FSDPConfig, ModelConfig, TrainingConfig
from fsdp2kit.config.schema import LoraConfig as LoraSection
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.model.flops import count_model_flops
from fsdp2kit.parallel import low_bits
from fsdp2kit.parallel.plan import plan_parallel
from fsdp2kit.weights.adapters import adapter_file_name
from fsdp2kit.weights.record import weights_of
from tests.support.models import needs_integers, tiny_model, tiny_model_dir

GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32, "resid_pdrop": 0,
        "embd_pdrop": 0, "attn_pdrop": 0}  # fmt: skip
MAMBA = {"model_type": "mamba2", "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 4, "head_dim": 8,
         "state_size": 8, "n_groups": 1, "vocab_size": 32}  # fmt: skip


def section_of(model: str | dict[str, Any], folder: Path) -> ModelConfig:
    if isinstance(model, str):
        return ModelConfig(path=str(tiny_model_dir(model, folder)))
    return ModelConfig(config=model, weights="random")


@pytest.mark.parametrize("kind", ["llama3", "smollm2", "qwen3", "gemma3"])
@pytest.mark.parametrize("options", [{}, {"dora": True}, {"modules_to_save": ["norm"], "rslora": True}], ids=str)
def test_names_are_those_of_peft(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = tiny_model_dir(kind, tmp_path)
    ours = build_model(ModelConfig(path=str(path)), lora=LoraSection(rank=4, **options))
    words = {"dora": "use_dora", "rslora": "use_rslora"}
    config = LoraConfig(
        r=4,
        lora_alpha=32,
        target_modules="all-linear",
        **{words.get(key, key): value for key, value in options.items()},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = get_peft_model(tiny_model(kind), config)
        stored = get_peft_model_state_dict(theirs)
    trained = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert trained.keys() == {name for name, p in theirs.get_base_model().named_parameters() if p.requires_grad}
    shapes = {adapter_file_name(name): p.shape for name, p in trained.items()}
    assert shapes == {name: tensor.shape for name, tensor in stored.items()}
    adapter = weights_of(ours).adapter
    assert adapter is not None
    layer = adapter.layers[0]
    assert ours.get_submodule(layer).scaling == theirs.get_base_model().get_submodule(layer).scaling


@pytest.mark.parametrize(
    ("model", "adapted", "refused", "says"),
    [
        (
            "qwen3_moe",
            {"q_proj", "k_proj", "v_proj", "o_proj"},
            {"target_modules": ["gate_proj", "up_proj"]},
            r"lora.target_modules: .*experts in one tensor",
        ),
        (GPT2, {"c_attn", "c_proj", "c_fc"}, {"dora": True}, r"lora\.dora: .* is a Conv1D"),
        (MAMBA, {"in_proj"}, {"target_modules": ["out_proj"]}, "out_proj"),
    ],
    ids=["fused experts", "Conv1D", "Mamba"],
)
def test_layers_that_cannot_be_adapted_are_left_out_or_refused(
    model: Any, adapted: set[str], refused: dict[str, Any], says: str, tmp_path: Path
) -> None:
    section = section_of(model, tmp_path)
    adapter = weights_of(build_model(section, lora=LoraSection(rank=4))).adapter
    assert adapter is not None
    assert {name.rpartition(".")[2] for name in adapter.layers} == adapted
    with pytest.raises(UserError, match=says):
        build_model(section, lora=LoraSection(rank=4, **refused))


def test_the_plan_says_what_adapters_there_are(tmp_path: Path) -> None:
    section, lora = section_of("smollm2", tmp_path), LoraSection(rank=4)
    config = TrainingConfig(recipe="mine", model=section, lora=lora)
    with pytest.raises(UserError, match=r"lora.rank: .*'mine' built the model without adapters; .*lora=config.lora"):
        plan_parallel(build_model(section), config, MeshSizes(1, 1, 1))
    plan = plan_parallel(build_model(section, lora=lora), config, MeshSizes(1, 1, 1))
    assert "rank 4, alpha 32; on 2 q_proj" in " ".join(plan.describe())
    lora = LoraSection(rank=4, dora=True)
    config = TrainingConfig(recipe="sft", model=section, lora=lora, compile=CompileConfig(enabled=True))
    with pytest.raises(UserError, match=r"compile.enabled: true with DoRA"):
        plan_parallel(build_model(section, lora=lora), config, MeshSizes(1, 1, 1))


@needs_integers
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_frozen_linear_layers_of_the_decoder_are_stored_in_4_bits(dtype: str, tmp_path: Path) -> None:
    """And read in the dtype that the model computes in, by DoRA and by a merge."""
    section = section_of("llama3", tmp_path)
    lora = LoraSection(rank=4, target_modules=["q_proj"], modules_to_save=["down_proj", "lm_head"], quantize="nf4")
    fsdp = FSDPConfig.model_validate({"param_dtype": dtype})
    config, model = TrainingConfig(recipe="sft", model=section, lora=lora, fsdp=fsdp), build_model(section, lora=lora)
    plan = plan_parallel(model, config, MeshSizes(1, 1, 1)).nf4
    assert plan is not None
    kinds = [
        "self_attn.q_proj.base_layer",
        *(f"self_attn.{kind}_proj" for kind in "kvo"),
        "mlp.gate_proj",
        "mlp.up_proj",
    ]
    assert set(plan.names) == {f"model.layers.{layer}.{kind}" for layer in range(2) for kind in kinds}
    assert "4.5 bits a parameter; left out: 2 of which a copy is trained (model.layers.0.mlp.down_proj" in str(plan)
    before = {name: model.get_submodule(name).weight.shape for name in plan.names}
    low_bits.apply_nf4(plan, model)
    for name, shape in before.items():
        weight: Any = model.get_submodule(name).weight
        assert (weight.dtype, weight.shape) == (getattr(torch, dtype), shape)


def test_dropout_is_the_sections_also_of_an_adapter_that_is_trained_further(tmp_path: Path) -> None:
    path = tiny_model_dir("llama3", tmp_path)
    config = LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        get_peft_model(tiny_model("llama3"), config).save_pretrained(tmp_path / "adapter")
    for rank, adapter in ((4, None), (None, str(tmp_path / "adapter"))):
        for dropout in (0.0, 0.25):
            section = LoraSection(rank=rank, dropout=dropout)
            model = build_model(ModelConfig(path=str(path), adapter=adapter), lora=section)
            found = [m for name, m in model.named_modules() if name.endswith("q_proj.lora_dropout.default")]
            assert len(found) == 2
            assert {getattr(module, "p", 0.0) for module in found} == {dropout}


def test_other_scalings_of_some_layers_make_another_run(tmp_path: Path) -> None:
    """A run does not resume with an adapter whose ``rank_pattern`` or ``alpha_pattern`` differs."""
    path = tiny_model_dir("llama3", tmp_path)
    identities = set()
    for number, patterns in enumerate(({}, {"alpha_pattern": {"q_proj": 2}}, {"alpha_pattern": {"q_proj": 3}})):
        config = LoraConfig(r=4, target_modules=["q_proj"], **patterns)
        directory = tmp_path / f"adapter_{number}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            get_peft_model(tiny_model("llama3"), config).save_pretrained(directory)
        model = build_model(ModelConfig(path=str(path), adapter=str(directory)), lora=LoraSection())
        adapter = weights_of(model).adapter
        assert adapter is not None
        identities.add(adapter.identity()["lora.target_modules"])
    assert len(identities) == 3


@needs_integers
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (
            "llama4",
            "lora.quantize: 'nf4', but Llama4ForCausalLM has several matrices in one tensor (model.layers.1.",
        ),
        (GPT2, "lora.quantize: 'nf4', but no linear layer of GPT2LMHeadModel can be in 4 bits (none); leave it out"),
    ],
    ids=["experts of its own", "Conv1D"],
)
def test_what_cannot_be_in_4_bits_is_refused(model: Any, says: str, tmp_path: Path) -> None:
    section, lora = section_of(model, tmp_path), LoraSection(rank=4, quantize="nf4")
    config = TrainingConfig.model_validate({"recipe": "sft", "model": section, "lora": lora, "data": {"seq_len": 16}})
    with pytest.raises(UserError) as error:
        plan_parallel(build_model(section, lora=lora), config, MeshSizes(1, 1, 1))
    assert str(error.value).startswith(says)


def test_a_torch_that_shards_no_integers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_bits, "SHARDS_INTEGERS", False)
    section, lora = section_of("llama3", tmp_path), LoraSection(rank=4, quantize="nf4")
    config = TrainingConfig(recipe="sft", model=section, lora=lora)
    with pytest.raises(UserError, match=r"^lora.quantize: 'nf4', but FSDP2 of torch .* install torch 2.12 or newer"):
        plan_parallel(build_model(section, lora=lora), config, MeshSizes(1, 1, 1))


WRONG = [
    (
        {"target_modules": ["q_prj"]},
        "lora.target_modules: 'q_prj' matches no module of the model; did you mean q_proj?",
    ),
    ({"target_modules": ["q_proj", "zzz"]}, "lora.target_modules: 'zzz' matches no module of the model; it has"),
    ({"target_modules": ".*nope"}, "lora.target_modules: '.*nope' matches no whole name of a module; they are like"),
    ({"target_modules": "(.*"}, "lora.target_modules: '(.*' is not a regular expression"),
    ({"target_modules": ["lm_head"]}, "lora.target_modules: lm_head is the model's embedding or output head"),
    ({"target_modules": ["embed_tokens"]}, "lora.target_modules: model.embed_tokens is the model's embedding or"),
    ({"target_modules": ["mlp"]}, "lora: Target module"),
    ({"modules_to_save": ["lm_heat"]}, "lora.modules_to_save: 'lm_heat' matches no module of the model; did you mean"),
    ({"modules_to_save": ["lm_head"]}, "lora.modules_to_save: lm_head.weight is one parameter in two places"),
]


@pytest.mark.parametrize(("options", "says"), WRONG, ids=lambda value: str(value)[:40])
def test_what_cannot_be_adapted_is_refused(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    section = ModelConfig(path=str(tiny_model_dir("smollm2", tmp_path)))
    with pytest.raises(UserError) as error:
        build_model(section, lora=LoraSection(rank=4, **options))
    assert str(error.value).startswith(says)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (None, "is not an adapter's config"),
        ({"peft_type": "IA3"}, "is an adapter of type IA3"),
        ({"peft_type": "LORA", "bias": "all"}, "has bias = 'all', which is not supported here"),
        ({"peft_type": "LORA", "init_lora_weights": "pissa"}, "has init_lora_weights = 'pissa'"),
        ({"peft_type": "LORA", "target_parameters": ["experts"]}, "LlamaForCausalLM has no experts that"),
    ],
    ids=str,
)
def test_directories_that_hold_no_such_adapter_are_refused(values: Any, says: str, tmp_path: Path) -> None:
    path = tiny_model_dir("smollm2", tmp_path)
    if values is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(UserError) as error:
        build_model(ModelConfig(path=str(path), adapter=str(tmp_path)))
    assert str(error.value).startswith("model.adapter: ")
    assert says in str(error.value)


CHECKED = [
    ({"lora": {"alpha": 8}}, "lora.alpha: is set, but lora.rank is not"),
    ({"lora": {"quantize": "nf4"}}, "lora.quantize: is set, but lora.rank is not"),
    ({"lora": {"rank": 4}, "model": {"path": "m", "adapter": "a"}}, "lora.rank: is given beside model.adapter"),
    ({"lora": {"rank": 4}, "model": {"path": "m", "freeze": ["*"]}}, "model.freeze: is set with adapters"),
    ({"lora": {"rank": 4}, "model": {"path": "m", "weights": "/"}}, "model.weights: is a checkpoint"),
    ({"lora": {"rank": 4}, "model": {"path": "m", "weights": "random"}}, "model.weights: 'random' with adapters"),
    ({"lora": {"rank": 4}, "float8": {"recipe": "rowwise"}}, "float8.recipe: 'rowwise' with adapters"),
]


@pytest.mark.parametrize(("values", "says"), CHECKED, ids=lambda value: str(value)[:50])
def test_contradictions_are_refused(values: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as error:
        check(values)
    assert str(error.value).startswith(says)


def check(values: dict[str, Any]) -> None:
    given = {"recipe": "sft", "model": {"path": "m"}, "train": {"steps": 1}, "wandb": {"mode": "disabled"}}
    check_config(TrainingConfig.model_validate({**given, **values}), world_size=1, local_world_size=1)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "peft" else find(name))
    with pytest.raises(UserError, match=r"lora.rank: needs peft, .*; install it: pip install 'peft>=0\.20'"):
        check({"lora": {"rank": 4}})


def test_frozen_matrices_count_four_flops_and_adapters_six() -> None:
    """A tiny untied Llama: 2 layers, and a head that is trained whole, so its frozen original does not run."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 64, "tie_word_embeddings": False, **sizes}
    model = build_model(
        ModelConfig(config=config, weights="random"), lora=LoraSection(rank=2, modules_to_save=["lm_head"])
    )
    frozen = 2 * (4 * 32 * 32 + 3 * 32 * 48)
    adapters = 2 * 2 * (4 * (32 + 32) + 3 * (32 + 48))
    assert 6 * count_model_flops(model).parameters == pytest.approx(4 * frozen + 6 * (adapters + 64 * 32))
