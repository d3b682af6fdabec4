"""`model.kernel`: which FlashAttention is taken, what is refused, and that the trial finds every wrong kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as torch_attention
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MistralConfig, PretrainedConfig

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.load import load_config
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.build import build_model
from fsdp2kit.model.inspect import inspect_model
from fsdp2kit.parallel.context_parallel import flash, kernels
from fsdp2kit.parallel.context_parallel.choose import choose_path
from fsdp2kit.parallel.context_parallel.flash import BOUND, Trial, apply_flash, head_shapes, try_flash
from fsdp2kit.parallel.context_parallel.layout import FlashChoice, HeadShape
from fsdp2kit.parallel.parallelize import parallelize_model
from fsdp2kit.parallel.plan import plan_parallel
from tests.parallel.helpers.emulated import bottom_right, emulated_backward, emulated_forward
from tests.support.models import full

SHAPE = HeadShape(2, 1, 16)
FA3 = FlashChoice("FlashAttention-3", "FA3", "as asked for", (SHAPE,), (None, 37))
LLAMA = LlamaConfig(hidden_size=256, num_attention_heads=4, num_key_value_heads=2)
CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def choose(
    kernel: str, *, device: str | None = "cuda", hf_config: PretrainedConfig = LLAMA, **sections: Any
) -> FlashChoice | None:
    sections["model"] = {"kernel": kernel, **sections.get("model", {})}
    config = TrainingConfig.model_validate({"recipe": "none", **sections})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    path = choose_path(config, model, traits=inspect_model(model), cp=config.mesh.cp, device_type=device)
    assert str(path).endswith(f", computed by {path.flash}" if path.flash else ")")
    return path.flash


class Kernel:
    """What `Trial` calls in place of CUDA's operators."""

    def __init__(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        self.forward = forward
        self.backward = backward

    def put(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (kernels, flash):
            monkeypatch.setattr(module, "varlen_is_usable", lambda query: True)
        monkeypatch.setattr(kernels, "cuda_flash_attention", self.forward)
        monkeypatch.setattr(kernels, "cuda_flash_attention_backward", self.backward)


RIGHT = Kernel(emulated_forward, emulated_backward)


def top_left(n: int, m: int, left: int, right: int) -> Tensor:
    """Masks that count from the corner where queries and keys begin."""
    seen = bottom_right(n, m, left, right) if n == m else bottom_right(max(n, m), max(n, m), left, right)[:n, :m]
    seen[:, 0] |= ~seen.any(1)
    return seen


def no_window(n: int, m: int, left: int, right: int) -> Tensor:
    return bottom_right(n, m, -1, right)


def masked_by(mask_of: Any) -> Kernel:
    return Kernel(
        lambda *inputs, **options: emulated_forward(*inputs, **options, mask_of=mask_of),
        lambda *inputs, **options: emulated_backward(*inputs, **options, mask_of=mask_of),
    )


def of_default_scale() -> Kernel:
    return Kernel(
        lambda query, *rest, scale: emulated_forward(query, *rest, scale=query.shape[-1] ** -0.5),
        lambda inputs, bounds, scale: emulated_backward(inputs, bounds, scale=inputs.query.shape[-1] ** -0.5),
    )


def of_base_two() -> Kernel:
    """Both directions agree with each other on a log-sum-exp that is not ours."""

    def forward(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = emulated_forward(*inputs, **options)
        return out, lse / math.log(2)

    return Kernel(
        forward,
        lambda inputs, *rest, **options: emulated_backward(
            inputs._replace(lse=inputs.lse * math.log(2)), *rest, **options
        ),
    )


def of_one_group() -> Kernel:
    """The gradients of keys and values miss all but one of the query heads that share them."""

    def backward(inputs: Any, *rest: Any, **options: Any) -> tuple[Tensor, ...]:
        query, *_ = emulated_backward(inputs, *rest, **options)
        alone = inputs.grad_out.clone()
        alone[:, 1::2] = 0
        _, key, value = emulated_backward(
            inputs._replace(grad_out=alone, out=inputs.out * (alone != 0)), *rest, **options
        )
        return query, key, value

    return Kernel(emulated_forward, backward)


def of_no_last_document() -> Kernel:
    def forward(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = emulated_forward(*inputs, **options)
        out[int(inputs[3].q_borders[-2]) :] = 0
        return out, lse

    return Kernel(forward, emulated_backward)


def of_nothing_in_packs() -> Kernel:
    """NaN where rows are packed, and right in the blocks of a ring."""

    def forward(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = emulated_forward(*inputs, **options)
        return out * (float("nan") if len(out) == 2 * 512 else 1), lse

    return Kernel(forward, emulated_backward)


WRONG = {
    "scale": (of_default_scale(), "output"),
    "causal offset": (masked_by(top_left), "output"),
    "ignored window": (masked_by(no_window), "output under a sliding window"),
    "log-sum-exp of base 2": (of_base_two(), "log-sum-exp"),
    "grouped heads": (of_one_group(), "gradient of keys"),
    "a document": (of_no_last_document(), "output"),
}


def test_a_right_kernel_differs_by_rounding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    RIGHT.put(monkeypatch)
    with torch.no_grad():
        found = Trial(SHAPE, dtype=torch.bfloat16, device=CPU).differences((None, 37))
    assert len(found) == 5 * 2 + 4
    assert max(found.values()) < BOUND / 2
    exact = Trial(SHAPE, dtype=torch.float32, device=CPU).differences((None, 37))
    assert max(exact.values()) < 1e-5


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_differs_by_more(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, result = WRONG[name]
    kernel.put(monkeypatch)
    found = Trial(SHAPE, dtype=torch.bfloat16, device=CPU).differences((None, 37))
    assert found[result] > 5 * BOUND


def test_not_a_number_is_not_taken_for_a_small_difference(package: Package) -> None:
    package.kernel = of_nothing_in_packs()
    with pytest.raises(UserError, match=r"another output .*relative difference nan"):
        try_flash(FA3, device=CUDA)


def test_torchs_own_function_is_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls the same operators, and so may any model of the process."""
    RIGHT.put(monkeypatch)
    real = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *qkv, scale, **options: real(*qkv, **options))
    found = Trial(SHAPE, dtype=torch.bfloat16, device=CPU).differences((None,))
    assert {name for name, difference in found.items() if difference > BOUND} == {
        f"{name} of scaled_dot_product_attention"
        for name in ("output", "gradient of queries", "gradient of keys", "gradient of values")
    }


def test_a_trial_that_no_kernel_would_compute_is_an_error() -> None:
    with pytest.raises(ValueError, match="plain operations"):
        Trial(SHAPE, dtype=torch.bfloat16, device=CPU)


class Package:
    """A FlashAttention-3 in torch's registry, which is emulated; ``kernel`` is computed while it is active."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel = RIGHT
        self.error: Exception | None = None
        self.capability = (9, 0)
        self.monkeypatch = monkeypatch
        trial = Trial
        monkeypatch.setattr(flash, "Trial", lambda shape, *, dtype, device: trial(shape, dtype=dtype, device=CPU))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: self.capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA X")
        torch_attention.register_flash_attention_impl("FA3", register_fn=self.register)

    def register(self) -> Any:
        if self.error:
            raise self.error
        self.kernel.put(self.monkeypatch)
        return self

    def remove(self) -> None:
        """On this machine's CPU nothing is left that it could compute."""
        self.monkeypatch.setattr(kernels, "varlen_is_usable", lambda query: False)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    registered = torch_attention._registry._FLASH_ATTENTION_IMPLS["FA3"]
    flash._found_wrong.cache_clear()
    yield Package(monkeypatch)
    flash._found_wrong.cache_clear()
    if torch_attention.current_flash_attention_impl():
        torch_attention.restore_flash_attention_impl()
    torch_attention.register_flash_attention_impl("FA3", register_fn=registered)


def test_a_trial_is_made_once_and_leaves_torch_as_it_was(package: Package) -> None:
    try_flash(FA3, device=CUDA)
    assert torch_attention.current_flash_attention_impl() is None
    package.kernel = of_default_scale()
    try_flash(FA3, device=CUDA)
    apply_flash(FA3, device=CUDA)
    assert torch_attention.current_flash_attention_impl() == "FA3"
    apply_flash(FlashChoice("FlashAttention-2", None, "auto"), device=CUDA)
    assert torch_attention.current_flash_attention_impl() is None


@pytest.mark.parametrize("name", ["scale", *(full(name) for name in WRONG if name != "scale")])
def test_a_wrong_kernel_is_refused_by_name_with_the_figure(name: str, package: Package) -> None:
    package.kernel, _ = WRONG[name]
    says = (
        r"model\.kernel: FlashAttention-3 gives another .* query and 1 key heads of width 16 \(relative difference \d"
    )
    with pytest.raises(UserError, match=says):
        apply_flash(FA3, device=CUDA)
    assert torch_attention.current_flash_attention_impl() is None


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ImportError("No module named 'flash_attn_interface'"), "is not installed.*folder hopper.*leave model.kernel"),
        (RuntimeError("undefined symbol\nmore"), "does not load: RuntimeError: undefined symbol;"),
    ],
)
def test_a_package_that_does_not_load_is_refused(error: Exception, says: str, package: Package) -> None:
    package.error = error
    with pytest.raises(UserError, match=says):
        try_flash(FA3, device=CUDA)


def test_a_trial_of_nothing_is_a_refusal(package: Package) -> None:
    with pytest.raises(UserError, match="cannot be tried"):
        try_flash(replace(FA3, shapes=()), device=CUDA)


def test_what_a_kernel_raises_is_a_refusal(package: Package) -> None:
    def fails(*_: Any, **options: Any) -> Any:
        raise AssertionError("head_dim 16")

    package.kernel = Kernel(fails, fails)
    with pytest.raises(UserError, match=r"does not run with 2 query.*AssertionError: head_dim 16"):
        try_flash(FA3, device=CUDA)


def test_a_kernel_of_other_bits_each_time_is_refused_in_deterministic_runs(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    def backward(*inputs: Any, **options: Any) -> tuple[Tensor, ...]:
        return tuple(grad + torch.randn_like(grad) * 1e-4 for grad in emulated_backward(*inputs, **options))

    package.kernel = Kernel(emulated_forward, backward)
    try_flash(FA3, device=CUDA)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with pytest.raises(UserError, match="other bits in every call"):
        try_flash(FA3, device=CUDA)


def test_devices_that_it_does_not_run_on(package: Package) -> None:
    package.capability = (8, 0)
    with pytest.raises(UserError, match=r"needs compute capability 9\.x, and NVIDIA X has 8\.0"):
        try_flash(FA3, device=CUDA)
    with pytest.raises(UserError, match="does not run on a CPU"):
        apply_flash(FA3, device=CPU)


def test_the_choice_and_its_reason() -> None:
    assert str(choose("auto")) == "FlashAttention-2 (auto)"
    assert str(choose("flash2")) == "FlashAttention-2 (as asked for)"
    assert str(choose("flash3", device=None)) == "FlashAttention-3 (as asked for)"
    assert str(choose("flash4")) == "FlashAttention-4 (as asked for)"
    assert choose("auto", device="cpu") is None
    assert choose("auto", device=None) is None
    assert choose("auto", model={"attention": "sdpa"}) is None
    assert choose("auto", fsdp={"param_dtype": "float32"}) is None


def test_auto_tries_what_is_active_in_the_process(package: Package) -> None:
    torch_attention.activate_flash_attention_impl("FA3")
    choice = choose("auto")
    assert choice is not None
    assert str(choice) == "FlashAttention-3 (auto: active in this process)"
    assert choice.impl == "FA3"


def test_a_run_tries_what_its_plan_chose(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    section = {"weights": "random", "config": {**fields, "vocab_size": 64, "num_hidden_layers": 1}, "kernel": "flash3"}
    config = TrainingConfig.model_validate({"recipe": "none", "model": section})
    model = build_model(config.model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    package.kernel = of_default_scale()
    # A plan is also made for other machines, so this device is not asked.
    plan = plan_parallel(model, config, MeshSizes(1, 1, 1), "cuda")
    assert "computed by FlashAttention-3 (as asked for)" in "".join(plan.describe())
    with pytest.raises(UserError, match="FlashAttention-3 does not run on a CPU"):
        parallelize_model(model, plan, mesh=cast(Any, SimpleNamespace(device=CPU)))
    with pytest.raises(UserError, match="gives another output"):
        apply_flash(plan.attention.flash, device=CUDA)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"device": "cpu"}, "'flash3', and FlashAttention-3 does not run on a CPU; leave model.kernel out"),
        (
            {"model": {"attention": "sdpa"}},
            "here it is 'sdpa' \\(as asked for\\).*or set model.attention = \"varlen\"",
        ),
        ({"model": {"attention": "varlen"}, "fsdp": {"param_dtype": "float32"}}, "takes 16 bits only"),
        (
            {"model": {"attention": "varlen"}, "hf_config": LlamaConfig(hidden_size=80, num_attention_heads=4)},
            "takes no heads of width 20",
        ),
    ],
)
def test_a_kernel_that_would_compute_nothing_is_refused(sections: Any, says: str) -> None:
    with pytest.raises(UserError, match=f"model.kernel: .*{says}"):
        choose("flash3", **sections)


def test_the_heads_that_a_model_calls_attention_with() -> None:
    def shapes(config: PretrainedConfig, method: Any = None, cp: int = 1) -> tuple[HeadShape, ...]:
        with torch.device("meta"):
            return head_shapes(AutoModelForCausalLM.from_config(config), method, cp=cp)

    assert shapes(LLAMA) == ((4, 2, 64),)
    assert shapes(LLAMA, "ring", 2) == ((4, 2, 64),)
    assert shapes(LLAMA, "ulysses", 2) == ((2, 1, 64),)
    assert shapes(LLAMA, "ulysses", 3) == ((1, 1, 64), (2, 1, 64))
    latent = DeepseekV3Config(hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
    assert shapes(latent) == ((4, 4, 192),)


def test_a_window_is_tried_at_a_length_that_documents_exceed() -> None:
    choice = choose("flash3", hf_config=MistralConfig(hidden_size=64, num_attention_heads=4, sliding_window=4096))
    assert choice is not None
    assert choice.windows == (37,)


def test_cudnn_is_refused_with_the_reason() -> None:
    values = {"recipe": "none", "model": {"path": "/x", "kernel": "cudnn"}}
    with pytest.raises(UserError, match=r"model\.kernel: 'cudnn' is not accepted: torch 2\.13 .*cuDNN.*wrong results"):
        load_config(TrainingConfig, values, source="x.toml")
