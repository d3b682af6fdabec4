"""Liger's kernels in ordinary training: the plumbing around a stand-in that patches as liger-kernel 0.8.5 does."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from fsdp2kit.config.checks import MeshSizes, check_config
from fsdp2kit.config.schema import ModelConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import World
from fsdp2kit.model.build import build_model
from fsdp2kit.model.inspect import inspect_model
from fsdp2kit.model.liger import apply_liger, give_back
from fsdp2kit.parallel.plan import plan_parallel
from tests.support.models import tiny_model
from tools.benchmarks.fsdp1 import FSDP1Loop

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SECTION = ModelConfig(
    config={"model_type": "llama", "vocab_size": 128, "hidden_size": 32, "num_attention_heads": 4}, liger=True
)
ONE_RANK = MeshSizes(1, 1, 1)
# Every kind of change that Liger's patches make: classes and a function in the architecture's module, a class of
# `torch.nn`, an activation, and the forward of the model's own modules.
STAND_IN = """
import torch
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

ASKED = []


def liger_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    return "Liger's", q


class LigerRMSNorm(torch.nn.Module):
    def forward(self, hidden_states):
        return "Liger's"


class LigerSwiGLUMLP(torch.nn.Module):
    pass


def _apply_liger_kernel_to_instance(model, **arguments):
    ASKED.append((model, arguments))
    modeling_llama.apply_rotary_pos_emb = liger_rotary_pos_emb
    modeling_llama.LlamaRMSNorm = LigerRMSNorm
    modeling_llama.LlamaMLP = LigerSwiGLUMLP
    modeling_llama.nn.LayerNorm = LigerRMSNorm
    ACT2FN["relu2"] = LigerSwiGLUMLP
    for layer in model.model.layers:
        layer.input_layernorm.forward = LigerRMSNorm.forward.__get__(layer.input_layernorm)
"""


def shared_names() -> list[object]:
    """What the stand-in changes outside of the model."""
    of_llama = [getattr(modeling_llama, name) for name in ("apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP")]
    return [*of_llama, nn.LayerNorm, dict.__getitem__(ACT2FN, "relu2")]


@pytest.fixture
def liger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The stand-in, importable; what it did to RoPE is undone afterwards."""
    folder = tmp_path / "liger_kernel" / "transformers"
    folder.mkdir(parents=True)
    (folder.parent / "__init__.py").touch()
    (folder / "__init__.py").write_text(STAND_IN)
    (folder / "monkey_patch.py").write_text('MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": None}\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", modeling_llama.apply_rotary_pos_emb)
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    import liger_kernel.transformers  # pyright: ignore[reportMissingImports]

    yield liger_kernel.transformers
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def test_the_model_is_changed_once_and_nothing_else_stays_changed(liger: ModuleType) -> None:
    rope, *before = shared_names()
    model = tiny_model("smollm2")
    parameters = dict(model.named_parameters())

    apply_liger(SECTION.model_copy(update={"liger": False}), model, device=CPU)
    apply_liger(SECTION, model, device=CUDA)

    ((asked, arguments),) = liger.ASKED
    assert asked is model
    assert arguments == {"cross_entropy": False, "fused_linear_cross_entropy": False}
    assert dict(model.named_parameters()).keys() == parameters.keys()
    changed = [name for name, module in model.named_modules() if "forward" in vars(module)]
    assert changed == [name.removesuffix(".weight") for name in parameters if "input_layernorm" in name]
    now, *others = shared_names()
    assert all(one is other for one, other in zip(before, others, strict=True))
    assert now is not rope


def test_rope_is_given_back(liger: ModuleType) -> None:
    plain = modeling_llama.apply_rotary_pos_emb
    for _ in range(2):
        apply_liger(SECTION, tiny_model("smollm2"), device=CUDA)
    assert modeling_llama.apply_rotary_pos_emb is not plain

    give_back()

    assert modeling_llama.apply_rotary_pos_emb is plain


def test_rope_is_ligers_on_a_device_and_transformers_on_the_cpu(liger: ModuleType) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(2))
    cos, sin = (torch.randn(1, 6, 8, generator=generator) for _ in range(2))
    plain = modeling_llama.apply_rotary_pos_emb
    expected = plain(query, key, cos, sin, unsqueeze_dim=1)

    apply_liger(SECTION, tiny_model("smollm2"), device=CUDA)
    apply_liger(SECTION, tiny_model("smollm2"), device=CUDA)  # as where two models are compared

    found = modeling_llama.apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=1)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    on_device = modeling_llama.apply_rotary_pos_emb(query.to("meta"), key.to("meta"), cos, sin)
    assert on_device[0] == "Liger's"
    assert modeling_llama.apply_rotary_pos_emb.__name__ == "apply_rotary_pos_emb"
    assert modeling_llama.apply_rotary_pos_emb is not plain


def test_models_on_the_cpu_run_as_before(liger: ModuleType) -> None:
    model, tokens = tiny_model("smollm2"), torch.arange(8)[None]
    plain = copy.deepcopy(model)
    logits = plain(tokens, use_cache=False).logits

    apply_liger(SECTION, model, device=CUDA)

    traits = inspect_model(model)
    assert (traits.causal, traits.separates_packed, traits.linear_head) == (True, True, True)
    for other in (plain, tiny_model("smollm2")):  # one that was there before, and a new one
        assert torch.equal(other(tokens, use_cache=False).logits, logits)


def config_of(**sections: object) -> TrainingConfig:
    model = {**SECTION.model_dump(exclude_unset=True), "weights": "random"}
    return TrainingConfig.model_validate({"recipe": "none", "model": model, "train": {"steps": 1}, **sections})


def test_an_architecture_that_liger_does_not_know_is_refused(liger: ModuleType) -> None:
    with pytest.raises(UserError, match=r"^model\.liger: Liger has no kernels for the architecture 'qwen3'; leave it"):
        plan_parallel(tiny_model("qwen3"), config_of(), ONE_RANK, "cuda")
    assert not liger.ASKED


def test_patches_that_do_not_fit_this_transformers_are_refused(
    liger: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(model: object, **arguments: object) -> None:
        raise ImportError("cannot import name 'LlamaThing'")

    monkeypatch.setattr(liger, "_apply_liger_kernel_to_instance", apply)
    with pytest.raises(UserError, match=r"^model\.liger: .*LlamaForCausalLM .*'LlamaThing'.*another version of liger"):
        apply_liger(SECTION, tiny_model("smollm2"), device=CUDA)


@pytest.mark.full
def test_a_cpu_is_refused_by_the_plan_and_on_fsdp1s_side() -> None:
    config = config_of()
    says = r"^model\.liger: Liger's kernels do not run on a CPU; leave it out, or use a GPU$"
    with pytest.raises(UserError, match=says):
        plan_parallel(build_model(config.model), config, ONE_RANK, "cpu")
    with pytest.raises(UserError, match=says):
        FSDP1Loop(config, world=World(0, 1, 0, 1, CPU))


def test_the_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UserError, match=r"^model\.liger: .*install it: pip install liger-kernel$"):
        apply_liger(SECTION, tiny_model("smollm2"), device=CUDA)


def test_the_extra_is_named_by_a_check_without_a_device() -> None:
    """As `--check` makes it; liger-kernel is not installed where tests run without a GPU."""
    config = config_of()
    if importlib.util.find_spec("liger_kernel") is not None:
        pytest.skip("liger-kernel is installed")
    with pytest.raises(UserError, match=r"^model\.liger: needs liger_kernel.*pip install liger-kernel$"):
        plan_parallel(build_model(config.model), config, ONE_RANK)


def test_selective_checkpointing_is_refused() -> None:
    config = config_of(activation_checkpointing={"mode": "selective"})
    with pytest.raises(UserError, match=r"^model\.liger: .*in place.*activation_checkpointing\.mode = \"full\"$"):
        check_config(config, world_size=1, local_world_size=1)
    check_config(config_of(activation_checkpointing={"mode": "full"}), world_size=1, local_world_size=1)
