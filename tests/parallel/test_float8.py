"""Float8 products equal torchao's and a computation by hand; shards and checkpoints do not know of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from fsdp2kit.config.checks import check_config
from fsdp2kit.config.schema import FSDPConfig, ModelConfig, TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model, materialize
from fsdp2kit.model.flops import count_model_flops
from fsdp2kit.model.inspect import inspect_model
from fsdp2kit.parallel.low_bits import Float8Plan, apply_float8, plan_float8
from fsdp2kit.parity import reference
from fsdp2kit.parity.reference import Curves, errors
from fsdp2kit.weights.load import load_pretrained
from tests.parallel.helpers import float8 as jobs
from tests.support.cases import Case
from tests.support.models import full, make_batches, plain_batches
from tests.support.workers import WorkerPool

torchao = pytest.importorskip("torchao.float8")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
ONE = Case(jobs.KIND)
TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    jobs.write_model(path)
    return path


def meta_model(**overrides: Any) -> Any:
    return build_model(ModelConfig(config={**TINY, **overrides}, weights="random"))


def quantised(values: Tensor, dim: int | None, *, dtype: torch.dtype = torch.float8_e4m3fn, power: bool) -> Tensor:
    """What is left of ``values`` in 8 bits: scaled so that the largest along ``dim`` (None: of all) fits, rounded."""
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(dtype).max / largest.double()).float()
    if power:
        scale = 2.0 ** scale.log2().floor()
    return (values * scale).to(dtype).float() / scale


def by_hand(recipe: str, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``x wᵀ`` and the gradients of x and w, given that of the output; rows of x are tokens."""
    if recipe == "tensorwise":
        x8, w8 = quantised(x, None, power=False), quantised(w, None, power=False)
        g8 = quantised(g, None, dtype=torch.float8_e5m2, power=False)
        return x8 @ w8.T, g8 @ w8, g8.T @ x8
    output = quantised(x, 1, power=True) @ quantised(w, 1, power=True).T
    if recipe == "rowwise":
        of_x = quantised(g, 1, power=True) @ quantised(w, 0, power=True)
        return output, of_x, quantised(g, 0, power=True).T @ quantised(x, 0, power=True)
    return output, quantised(g, 1, power=True) @ quantised(w, None, power=True), g.T @ x


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_map_is_what_its_formula_says(recipe: str, folder: Path) -> None:
    model = build_model(ModelConfig(path=str(folder / jobs.KIND)))
    plan = plan_of(model, float8={"recipe": recipe})
    assert plan is not None
    apply_float8(plan, model)
    materialize(model, device=CPU)
    load_pretrained(model, folder / jobs.KIND)
    linear = model.model.layers[1].mlp.up_proj
    generator = torch.Generator().manual_seed(0)
    x, g = torch.randn(2, 24, 64, generator=generator), torch.randn(2, 24, 96, generator=generator)
    x.requires_grad_()

    output = linear(x)
    output.backward(g)

    tokens, weight = x.detach().flatten(0, 1), linear.weight.detach()
    expected = by_hand(recipe, tokens, weight, g.flatten(0, 1))
    for found, hand in zip((output.flatten(0, 1), x.grad.flatten(0, 1), linear.weight.grad), expected, strict=True):
        torch.testing.assert_close(found, hand, rtol=1e-5, atol=1e-5)
    assert (output.flatten(0, 1) - tokens @ weight.T).abs().max() > 1e-2, "and is not the unrounded product"


def plain_curves(folder: Path, batches: list[Any], recipe: str | None, monkeypatch: pytest.MonkeyPatch) -> Curves:
    """A plain loop over a transformers model whose decoder layers torchao converted, without any code of ours."""

    def converted(path: Path) -> Any:
        model: Any = load_plain(path)
        config = torchao.Float8LinearConfig.from_recipe_name(recipe)
        torchao.convert_to_float8_training(model.model.layers, config=replace(config, emulate=True))
        return model

    load_plain = reference.load_plain
    with monkeypatch.context() as patch:
        if recipe:
            patch.setattr(reference, "load_plain", converted)
        return reference.plain_loop(folder / jobs.KIND, batches, micro_batch_size=1, lr=1e-3)


@pytest.mark.parametrize("recipe", ["tensorwise", full("rowwise"), full("rowwise_with_gw_hp")])
def test_two_ranks_train_as_torchao_does_in_a_plain_loop(
    recipe: str, folder: Path, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = plain_batches()
    case = Case(jobs.KIND, dp=2, pack=False)
    found = pool.run(2, jobs.curves, folder, case, {"recipe": recipe}, batches)[0]
    expected = plain_curves(folder, batches, recipe, monkeypatch)
    unrounded = plain_curves(folder, batches, None, monkeypatch)

    # A last bit that differs becomes a whole float8 step where it crosses a border, and few do.
    far, near = errors(unrounded, expected), errors(found, expected)
    assert far["gradients"] > 0.02
    assert near["gradients"] < far["gradients"] / 4, (near, far)
    assert near["loss"] < max(far["loss"] / 4, 1e-4), (near, far)
    assert abs(found.loss[0] - expected.loss[0]) < 1e-6 * expected.loss[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "layout", [{"cp": 2}, *(pytest.param(each, marks=pytest.mark.slow) for each in ({"dp": 2}, {"micro": 2}))], ids=str
)
def test_only_rowwise_with_gw_hp_does_not_depend_on_the_mesh(
    layout: dict[str, int], folder: Path, pool: WorkerPool
) -> None:
    batches = make_batches(1)
    case = Case(jobs.KIND, **layout)
    differences = {}
    for recipe in ("tensorwise", "rowwise_with_gw_hp"):
        one = pool.run(1, jobs.curves, folder, ONE, {"recipe": recipe}, batches)[0]
        other = pool.run(case.world, jobs.curves, folder, case, {"recipe": recipe}, batches)[0]
        differences[recipe] = errors(other, one)["gradients"]
    assert differences["rowwise_with_gw_hp"] < 1e-3
    if "dp" not in layout:  # the same micro-batches on other ranks have the same scales
        assert differences["tensorwise"] > 5e-3


def test_a_resumed_run_goes_on_bit_for_bit(folder: Path, pool: WorkerPool, tmp_path: Path) -> None:
    case = Case(jobs.KIND, dp=2, fsdp=(("param_dtype", "bfloat16"),))
    for straight, resumed in pool.run(2, jobs.interrupted, folder, tmp_path, case, {"recipe": "tensorwise"}):
        assert straight.keys() == resumed.keys()
        assert all(np.array_equal(straight[key], resumed[key]) for key in straight)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.slow), "selective"])
def test_checkpointed_activations_change_nothing(recipe: str, mode: str, folder: Path, pool: WorkerPool) -> None:
    batches = make_batches(2)
    plain, recomputed = (
        pool.run(1, jobs.curves, folder, Case(jobs.KIND, checkpointing=kept), {"recipe": recipe}, batches)[0]
        for kept in (False, mode)
    )
    assert recomputed.loss == plain.loss
    assert all(np.array_equal(recomputed.gradients[name], plain.gradients[name]) for name in plain.gradients)


def plan_of(model: Any, *, device: torch.device | None = CPU, **sections: Any) -> Float8Plan | None:
    config = config_with(**{"float8": {"recipe": "rowwise"}, **sections})
    return plan_float8(config, model, traits=inspect_model(model), device=device)


def described(model: Any, *, device: torch.device | None = CPU, **sections: Any) -> list[str]:
    plan = plan_of(model, device=device, **sections)
    return plan.describe() if plan else []


def test_layers_in_float8_keep_their_names_and_count_the_same() -> None:
    model, plain = meta_model(), meta_model()
    flops = count_model_flops(model)
    plan = plan_of(model)
    assert plan is not None
    apply_float8(plan, model)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert count_model_flops(model) == flops
    converted = {name for name, module in model.named_modules() if type(module) is not type(plain.get_submodule(name))}
    kinds = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    kinds += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert converted == {f"model.layers.{layer}.{kind}" for layer in range(2) for kind in kinds}


def test_what_is_left_out_and_why() -> None:
    def left_out(model: Any, *, fsdp: FSDPConfig | None = None, **section: Any) -> dict[str, list[str]]:
        values = {"float8": {"recipe": "rowwise", **section}, "fsdp": (fsdp or FSDPConfig()).model_dump()}
        plan = plan_of(model, **values)
        assert plan is not None
        names = [name for found in plan.left_out.values() for name in found]
        assert not set(names) & set(plan.names)
        return {reason: list(found) for reason, found in plan.left_out.items()}

    assert left_out(meta_model()) == {}
    mlp = [f"model.layers.{layer}.mlp.{name}_proj" for layer in range(2) for name in ("gate", "up", "down")]
    assert left_out(meta_model(intermediate_size=100)) == {"with a side not divisible by 16": mlp}
    assert left_out(meta_model(), exclude=["*.mlp.*"]) == {"by float8.exclude": mlp}
    exact = FSDPConfig(class_dtypes={"LlamaMLP": "float32"})
    assert left_out(meta_model(), fsdp=exact) == {"in another dtype by fsdp.class_dtypes": mlp}

    model = meta_model()
    model.model.layers[0].mlp.up_proj = _OwnForward(64, 96, bias=False)
    assert left_out(model) == {"of a class of their own": ["model.layers.0.mlp.up_proj"]}
    model = meta_model()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    assert left_out(model) == {"whose parameters are used elsewhere": [mlp[1], mlp[4]]}


class _OwnForward(nn.Linear):
    """A linear map that computes something else."""


def test_routers_and_experts_are_left_out() -> None:
    for kind in ("qwen3_moe", "jamba", "granitemoe"):
        sizes = {"num_experts": 16, "num_local_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = AutoConfig.for_model(kind).to_dict()
        model = meta_model(
            **{key: value for key, value in sizes.items() if key in config}, model_type=kind, tie_word_embeddings=False
        )
        plan = plan_of(model)
        assert plan is not None
        assert not any("router" in name or name.endswith(".gate") or "experts" in name for name in plan.names), kind
        assert "that are experts in one tensor" in plan.left_out


def config_with(*, model: Any = None, **sections: Any) -> TrainingConfig:
    values = {"recipe": "x", "model": {"path": "m"}, "train": {"steps": 1}, **sections}
    return TrainingConfig.model_validate(values)


def test_the_start_says_what_is_in_float8() -> None:
    model = meta_model(intermediate_size=100)
    lines = described(model)
    assert lines[0].startswith("float8: rowwise, 8 linear layers of the decoder layers (")
    assert "left out: 6 with a side not divisible by 16 (model.layers.0.mlp.gate_proj, …)" in lines[0]
    assert "depend, within float8's rounding, on mesh" in lines[1]
    assert lines[2] == "float8: emulated, slower than bfloat16: for checking numerics"
    assert described(model, float8={}) == []
    exact = described(model, float8={"recipe": "rowwise_with_gw_hp"})
    assert not any("depend" in line for line in exact)
    for enabled, warned in ((False, True), (True, False)):
        lines = described(model, device=CUDA, compile={"enabled": enabled})
        assert any(line.startswith("WARNING") for line in lines) == warned


def test_what_does_not_go_together_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(**sections: Any) -> str:
        with pytest.raises(UserError) as caught:
            check_config(config_with(**sections), world_size=1, local_world_size=1)
        return str(caught.value)

    assert said(float8={"exclude": ["*"]}).startswith("float8.exclude: is set, but")
    assert said(float8={"recipe": "rowwise"}, fsdp={"class_dtypes": {"Linear": "float32"}}).startswith(
        "fsdp.class_dtypes: names Linear"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'torchao>=0.18'" in said(float8={"recipe": "rowwise"})


def test_devices_and_shapes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(model: Any = None, *, device: torch.device | None = CUDA, **sections: Any) -> str | None:
        try:
            plan_of(model or meta_model(), device=device, **sections)
        except UserError as error:
            return str(error)
        return None

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "A100")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    assert (said() or "").startswith("float8.recipe: A100 has no float8 matmuls")
    assert said(float8={"recipe": "rowwise", "emulate": True}) is None
    assert said(device=CPU) is None
    assert said(device=None) is None
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    assert said() is None
    assert (said(fsdp={"param_dtype": "float32"}) or "").startswith("fsdp.param_dtype: 'float32' with float8")
    assert (said(data={"seq_len": 40}, mesh={"cp": 2}) or "").startswith("data.seq_len: 20 tokens of a micro-batch")
    assert said(data={"seq_len": 40}, mesh={"cp": 2}, float8={"recipe": "rowwise_with_gw_hp"}) is None
    none = said(meta_model(hidden_size=40, intermediate_size=40, head_dim=10))
    assert (none or "").startswith("float8.recipe: no linear layer of LlamaForCausalLM can be in float8 (14 with")
    wrong = said(float8={"recipe": "rowwise", "exclude": ["*.upproj"]})
    assert (wrong or "").startswith("float8.exclude: '*.upproj' matches no linear layer")


def test_without_torchao_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(meta_model())
    assert plan is not None
    monkeypatch.setitem(__import__("sys").modules, "torchao", None)
    with pytest.raises(UserError, match=r"float8\.recipe.*torchao>=0\.18"):
        apply_float8(plan, meta_model())
