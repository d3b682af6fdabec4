"""Which method "auto" picks, and what is refused with a word on what would work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MambaConfig, MistralConfig, PretrainedConfig

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.inspect import inspect_model
from fsdp2kit.parallel.context_parallel.choose import choose_path
from fsdp2kit.parallel.context_parallel.layout import AttentionPath


def choose(
    *,
    cp: int,
    heads: int = 32,
    kv_heads: int = 8,
    method: str = "auto",
    kernel: str = "auto",
    seq_len: int = 4096,
    pack: bool = False,
    device: str = "cpu",
    hf_config: PretrainedConfig | None = None,
    compiled: bool = False,
    data: dict[str, Any] | None = None,
) -> AttentionPath:
    values: dict[str, Any] = {
        "recipe": "none",
        "model": {"attention": kernel},
        "data": {"seq_len": seq_len, "pack": pack, **(data or {})},
        "compile": {"enabled": compiled},
        "context_parallel": {"method": method},
        "mesh": {"cp": cp},
    }
    hf_config = hf_config or LlamaConfig(
        hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    config = TrainingConfig.model_validate(values)
    return choose_path(config, model, traits=inspect_model(model), cp=cp, device_type=device)


@pytest.mark.parametrize(
    ("options", "method", "says"),
    [
        ({"cp": 4}, "ulysses", "32 query and 8 key/value heads divide evenly over 4 ranks"),
        ({"cp": 4, "heads": 9, "kv_heads": 3}, "allgather", "4096 tokens are few enough"),
        ({"cp": 16, "seq_len": 131072}, "ring", "131072 tokens are too many"),
        ({"cp": 16, "seq_len": 131072, "pack": True}, "allgather", "packed documents"),
        ({"cp": 10, "heads": 9, "kv_heads": 3, "seq_len": 4000}, "allgather", "more than the model's 9"),
        ({"cp": 4, "kernel": "flex_attention", "heads": 9, "kv_heads": 3}, "ulysses", "kernel of its own"),
        ({"cp": 2, "heads": 9, "kv_heads": 3, "seq_len": 4094}, "ulysses", "not divisible by 2 × mesh.cp = 4"),
        ({"cp": 2, "method": "ring"}, "ring", "as asked for"),
    ],
)
def test_auto_says_why(options: dict[str, Any], method: str, says: str) -> None:
    path = choose(**options)
    assert path.method == method
    assert says in str(path)


@pytest.mark.parametrize("kernel", ["sdpa", "eager", "flex_attention", "varlen"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_kernel_that_was_asked_for_is_taken(kernel: str, device: str) -> None:
    path = choose(cp=1, pack=True, kernel=kernel, device=device)
    assert (path.method, path.kernel) == (None, kernel)
    flash = ", computed by FlashAttention-2 (auto)" if (kernel, device) == ("varlen", "cuda") else ""
    assert str(path) == f"attention: {kernel} (as asked for){flash}"


def test_compiled_layers_get_a_mask_with_every_row_or_with_none() -> None:
    def masked(kernel: str, *, cp: int = 1, compiled: bool = True, **data: Any) -> bool:
        return choose(cp=cp, kernel=kernel, pack=True, compiled=compiled, data=data).masks_every_row

    assert masked("sdpa")
    assert masked("eager")
    assert masked("sdpa", cp=2)
    assert not masked("sdpa", compiled=False)
    assert not masked("varlen")
    assert not masked("sdpa", format="synthetic"), "all of its rows are single documents"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_needs_no_mask(device: str) -> None:
    windowed = MistralConfig(sliding_window=128)
    flash = ", computed by FlashAttention-2 (auto)" if device == "cuda" else ""
    says = "attention: varlen (auto: packed documents need no mask)"
    assert str(choose(cp=1, pack=True, device=device)) == says + flash
    assert "sliding windows need no mask" in str(choose(cp=1, hf_config=windowed, device=device))
    ulysses = choose(cp=2, pack=True, device=device)
    assert (ulysses.method, ulysses.kernel) == ("ulysses", "varlen")
    assert str(choose(cp=1, device=device)) == "attention: varlen (auto: padded rows need no mask)" + flash


@pytest.mark.parametrize(("width", "kernel"), [(256, "varlen"), (320, "sdpa"), (20, "sdpa")])
def test_heads_that_cudas_kernel_does_not_take_keep_the_models_attention(width: int, kernel: str) -> None:
    """Ours would compute them by plain operations, which form the scores."""
    wide = LlamaConfig(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, head_dim=width)
    path = choose(cp=1, pack=True, device="cuda", hf_config=wide)
    assert path.kernel == kernel
    assert (f"no heads of width {width}" in str(path)) == (kernel == "sdpa")
    assert choose(cp=1, pack=True, device="cpu", hf_config=wide).kernel == "varlen"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"method": "ulysses", "cp": 10, "heads": 9, "kv_heads": 3, "seq_len": 4000},
            "than the model's 9.*'ring'",
        ),
        ({"method": "ring", "cp": 2, "kernel": "eager"}, "kernel of its own.*auto.*'ulysses'"),
        ({"method": "allgather", "cp": 2, "seq_len": 4094}, "use 4092 or 4096 or .*'ulysses'"),
        ({"cp": 10, "heads": 9, "kv_heads": 3, "seq_len": 4010}, "not divisible by 2 × mesh.cp = 20"),
        (
            {"cp": 4, "method": "ulysses", "seq_len": 4098},
            "data.seq_len: 4098 is not divisible by mesh.cp 4; use 4096 or 4100",
        ),
        (
            {"cp": 2, "hf_config": MambaConfig(num_hidden_layers=1)},
            "has no attention heads, or not as many in ev.*; set mesh.cp",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        choose(**options)


@pytest.mark.usefixtures("biased_llama")
def test_a_model_whose_attention_is_not_ours_keeps_its_own() -> None:
    """Where "auto" would take our kernels, on a mesh or for packed rows on CUDA."""
    plain = choose(cp=1, pack=True)
    assert plain.kernel == "sdpa"
    assert "does what ours does not" in str(plain)
    path = choose(cp=2, heads=9, kv_heads=3)
    assert (path.method, path.kernel) == ("ulysses", "sdpa")
    assert "its own attention" in path.reason
