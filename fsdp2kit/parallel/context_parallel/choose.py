"""Which way attention goes: the context-parallel method, and the kernel."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.parallel.context_parallel.layout import Method
from fsdp2kit.parallel.context_parallel.masks import layer_windows, unknown_kinds

LONG = 32_768
"""Tokens a sequence from which a ring's computation hides its exchanges, and gathered keys are worth avoiding."""

VARLEN = "varlen"
"""Our own attention over segments, in place of a transformers implementation."""


@dataclass(frozen=True)
class AttentionPath:
    """What attention a model gets; `choose_path` decides it once, and everything that must agree is given it."""

    method: Method | None
    """None without context parallelism."""
    kernel: str
    """A transformers attention implementation, or "varlen"."""
    reason: str = ""

    def __str__(self) -> str:
        words = [] if self.method is None else [f"context parallelism: {self.method} ({self.reason})"]
        return ", ".join([*words, f"attention kernel: {self.kernel}"])


def choose_path(config: TrainingConfig, hf_config: PretrainedConfig, *, cp: int, device_type: str) -> AttentionPath:
    """The path that the config asks for, or the best one where it says "auto".

    Args:
        hf_config: the model's.
        device_type: where attention will run.

    Raises:
        UserError: the method that was asked for does not suit the model, the kernel or the sequence length.
    """
    kernel = config.model.attention
    if cp == 1:
        return AttentionPath(None, _kernel(kernel, config, hf_config, device_type=device_type))
    heads, kv_heads = _heads(hf_config)
    asked = config.context_parallel.method
    obstacles: dict[Method, tuple[str, str] | None] = {
        "ulysses": _against_ulysses(heads, cp=cp),
        "ring": _against_blocks(kernel, config.data.seq_len, cp=cp),
        "allgather": _against_blocks(kernel, config.data.seq_len, cp=cp),
    }
    if asked != "auto":
        method, reason = asked, "as asked for"
    else:
        method, reason = _pick(obstacles, heads, kv_heads, cp=cp, seq_len=config.data.seq_len, pack=config.data.pack)
    if obstacles[method]:
        possible = [f"context_parallel.method = {name!r}" for name, why in obstacles.items() if not why]
        what, todo = obstacles[method] or ("", "")
        raise UserError(f"context_parallel.method {method!r}", what, " or ".join([todo, *possible]))
    if method == "ulysses":
        return AttentionPath("ulysses", _kernel(kernel, config, hf_config, device_type=device_type), reason)
    return AttentionPath(method, VARLEN, reason)


def _pick(
    obstacles: dict[Method, tuple[str, str] | None], heads: int, kv_heads: int, *, cp: int, seq_len: int, pack: bool
) -> tuple[Method, str]:
    if obstacles["ulysses"]:
        return ("allgather" if pack or seq_len < LONG else "ring"), f"auto: {obstacles['ulysses'][0]}"
    if obstacles["ring"]:
        return "ulysses", f"auto: {obstacles['ring'][0]}"
    if heads % cp == 0 and kv_heads % cp == 0:
        return "ulysses", f"auto: {heads} query and {kv_heads} key/value heads deal out evenly over {cp} ranks"
    uneven = f"auto: {heads} query and {kv_heads} key/value heads do not deal out evenly over {cp} ranks"
    if pack:
        return "allgather", f"{uneven}, and packed documents would make a ring's steps uneven"
    if seq_len < LONG:
        return "allgather", f"{uneven}, and {seq_len} tokens are few enough to gather"
    return "ring", f"{uneven}, and {seq_len} tokens are too many to gather"


def _against_ulysses(heads: int, *, cp: int) -> tuple[str, str] | None:
    if cp > heads:
        return f"mesh.cp {cp} is more than the model's {heads} attention heads", f"use mesh.cp ≤ {heads}"
    return None


def _against_blocks(kernel: str, seq_len: int, *, cp: int) -> tuple[str, str] | None:
    """Why ring and allgather cannot be: what is wrong, and what to do."""
    if kernel not in ("sdpa", VARLEN) and not kernel.startswith("flash"):
        return f"it brings a kernel of its own, not model.attention = {kernel!r}", 'use model.attention = "sdpa"'
    if seq_len % (2 * cp):
        below = seq_len // (2 * cp) * (2 * cp)
        fitting = " or ".join(str(n) for n in (below, below + 2 * cp) if n)
        return f"data.seq_len {seq_len} is not divisible by 2 × mesh.cp = {2 * cp}", f"use {fitting}"
    return None


def _kernel(kernel: str, config: TrainingConfig, hf_config: PretrainedConfig, *, device_type: str) -> str:
    windows = layer_windows(hf_config)
    masked = config.data.pack or any(window is not None for window in windows.values())
    if device_type == "cuda" and kernel == "sdpa" and masked and not unknown_kinds(hf_config):
        return VARLEN  # sdpa would need a dense mask: 16 GiB for 128k tokens
    return kernel


def _heads(hf_config: PretrainedConfig) -> tuple[int, int]:
    text = hf_config.get_text_config()
    heads = text.num_attention_heads
    return heads, getattr(text, "num_key_value_heads", None) or heads
