"""Which way attention goes: the context-parallel method, and the kernel."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.twin import build_twin
from fsdp2kit.parallel.context_parallel.layout import Method
from fsdp2kit.parallel.context_parallel.masks import layer_windows, unknown_kinds
from fsdp2kit.parallel.context_parallel.path import VARLEN, AttentionPath
from fsdp2kit.parallel.context_parallel.trial import find_difference

LONG = 32_768
"""Tokens a sequence from which a ring's computation hides its exchanges, and gathered keys are worth avoiding."""

Obstacle = tuple[str, str]
"""What stands in the way of a method, and what to do about it."""


def choose_path(config: TrainingConfig, model: PreTrainedModel, *, cp: int, device_type: str) -> AttentionPath:
    """The path that the config asks for, or the best one where it says "auto".

    Args:
        model: on meta, or real; before it is made parallel.
        device_type: where attention will run.

    Raises:
        UserError: the method that was asked for does not suit the model, the kernel or the sequence length.
    """
    if cp == 1:
        kernel, why = _local_kernel(config, model, device_type=device_type)
        return AttentionPath(None, kernel, "", why, _masks_every_row(config, model, kernel))
    heads, kv_heads = _heads(model.config)
    if not heads:
        raise UserError("mesh.cp", f"{cp}, but {type(model).__name__} has no attention heads", "set mesh.cp = 1")
    seq_len, kernel, asked = config.data.seq_len, config.model.attention, config.context_parallel.method
    blocks = _against_blocks(kernel, seq_len, cp=cp)
    obstacles: dict[Method, Obstacle | None] = {
        "ulysses": _against_ulysses(heads, seq_len, cp=cp),
        "ring": blocks,
        "allgather": blocks,
    }
    method, reason = asked, "as asked for"
    if method == "auto":
        method, reason = _pick(obstacles, heads, kv_heads, cp=cp, seq_len=seq_len, pack=config.data.pack)
        if method != "ulysses" and not obstacles["ulysses"] and not _suits(model, VARLEN, pack=config.data.pack):
            method, reason = "ulysses", "auto: it leaves the model its own attention, which ours is not"
    if obstacle := obstacles[method]:
        possible = [f"context_parallel.method = {name!r}" for name, why in obstacles.items() if not why]
        what, todo = obstacle
        raise UserError(f"context_parallel.method {method!r}", what, " or ".join([todo, *possible]))
    if method == "ulysses":
        own, why = _local_kernel(config, model, device_type=device_type)
        return AttentionPath("ulysses", own, reason, why, _masks_every_row(config, model, own))
    return AttentionPath(method, VARLEN, reason, f"as {method} needs")


def _pick(
    obstacles: dict[Method, Obstacle | None], heads: int, kv_heads: int, *, cp: int, seq_len: int, pack: bool
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


def _against_ulysses(heads: int, seq_len: int, *, cp: int) -> Obstacle | None:
    if seq_len % cp:
        return f"data.seq_len {seq_len} is not divisible by mesh.cp = {cp}", _divisible(seq_len, cp)
    if cp > heads:
        return f"mesh.cp {cp} is more than the model's {heads} attention heads", f"use mesh.cp ≤ {heads}"
    return None


def _against_blocks(kernel: str, seq_len: int, *, cp: int) -> Obstacle | None:
    """Why ring and allgather cannot be: what is wrong, and what to do."""
    if kernel not in ("auto", "sdpa", VARLEN) and not kernel.startswith("flash"):
        return f"it brings a kernel of its own, not model.attention = {kernel!r}", 'use model.attention = "auto"'
    if seq_len % (2 * cp):
        return f"data.seq_len {seq_len} is not divisible by 2 × mesh.cp = {2 * cp}", _divisible(seq_len, 2 * cp)
    return None


def _divisible(seq_len: int, by: int) -> str:
    below = seq_len // by * by
    return "use " + " or ".join(str(length) for length in (below, below + by) if length)


def _local_kernel(config: TrainingConfig, model: PreTrainedModel, *, device_type: str) -> tuple[str, str]:
    """What computes attention over whole sequences, and why."""
    if config.model.attention != "auto":
        return config.model.attention, "as asked for"
    own = str(model.config._attn_implementation)  # transformers' choice: "sdpa" where the model has it, else "eager"
    needs = ["packed documents" if config.data.pack else "padded rows"]
    needs += ["sliding windows"] if any(layer_windows(model.config).values()) else []
    if device_type == "cuda" and config.fsdp.param_dtype == "float32":
        return own, "auto: varlen's kernel on CUDA takes 16 bits only"
    dropout = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
    if dropout or unknown_kinds(model.config) or not _suits(model, VARLEN, pack=config.data.pack):
        return own, "auto: the model's attention does what ours does not"
    return VARLEN, f"auto: {' and '.join(needs)} need no mask"


def _masks_every_row(config: TrainingConfig, model: PreTrainedModel, kernel: str) -> bool:
    """Whether rows without documents to separate had better have a mask all the same; see `AttentionPath`."""
    if not config.compile.enabled or kernel not in ("sdpa", "eager") or config.data.format == "synthetic":
        return False  # synthetic rows are single documents without padding, all of them
    if unknown_kinds(model.config) or (twin := build_twin(model)) is None:
        return False
    # The masks are ours to make, then, in place of the model's: they must be the same.
    return find_difference(twin, AttentionPath("ulysses", kernel), cp=1, pack=True) is None


def _suits(model: PreTrainedModel, kernel: str, *, pack: bool) -> bool:
    """Whether the kernel computes what the model's own attention does, tried on a tiny twin."""
    twin = build_twin(model)
    return twin is not None and find_difference(twin, AttentionPath(None, kernel), cp=1, pack=pack) is None


def _heads(hf_config: PretrainedConfig) -> tuple[int, int]:
    text = hf_config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    return heads, getattr(text, "num_key_value_heads", None) or heads
