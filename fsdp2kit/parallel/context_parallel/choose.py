"""Which path attention takes (method and kernel), and a trial of it on the model's small copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fsdp2kit.config.checks import check_seq_len, multiples_near
from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.flops import attention_layers
from fsdp2kit.model.inspect import Traits, common_value, value_of
from fsdp2kit.parallel.context_parallel.attention import attend_with_share, use_attention, varlen_attention
from fsdp2kit.parallel.context_parallel.batch import (
    CHUNKED,
    attention_inputs,
    layer_kinds,
    layer_windows,
    unknown_kinds,
)
from fsdp2kit.parallel.context_parallel.exchange import share_heads
from fsdp2kit.parallel.context_parallel.flash import choose_flash, odd_widths
from fsdp2kit.parallel.context_parallel.layout import VARLEN, AttentionPath, Method
from fsdp2kit.parallel.context_parallel.recurrent import Exchange, apply_recurrent, find_recurrent
from fsdp2kit.parallel.context_parallel.recurrent_checks import plan_recurrent, try_recurrent

LONG = 32_768
"""From this many tokens per sequence, a ring's computation hides its exchanges, and gathering all keys is slow."""

_BYPASS = "its attention does not go through transformers' attention interface"

Obstacle = tuple[str, str]
"""What stands in the way of a method, and what to do about it."""


def choose_path(
    config: TrainingConfig, model: PreTrainedModel, *, traits: Traits, cp: int, device_type: str | None
) -> AttentionPath:
    """The path that the config asks for, or the best one where it says "auto".

    Args:
        device_type: where attention will run; None: not known, and the method is chosen as for a CPU.
    """
    recurrent = plan_recurrent(config, model, traits, cp=cp)
    method, reason = _choose_method(config, model, traits, cp=cp, recurrent=recurrent) if cp > 1 else (None, "")
    if method in (None, "ulysses"):
        kernel, why = _local_kernel(config, model, traits, device_type=device_type, recurrent=recurrent)
    else:
        kernel = VARLEN
        why = f"as {method} needs"
    every_row = _masks_every_row(config, model, traits, method, kernel)
    path = AttentionPath(method, kernel, reason, why, every_row, recurrent_layers=recurrent)
    if method or kernel == VARLEN:
        _check_path(path, model, traits, cp=cp, pack=config.data.pack)
    if kernel.startswith("flash") and config.data.pack:
        key = ("borders", recurrent > 0)
        if what := traits.no_small_copy or traits.once(key, lambda small: _find_lost_borders(small, path)):
            raise UserError(f"model.attention {kernel!r}", what, 'set model.attention = "auto"')
    return replace(path, flash=choose_flash(config, model, path, cp=cp, device_type=device_type))


def _choose_method(
    config: TrainingConfig, model: PreTrainedModel, traits: Traits, *, cp: int, recurrent: int
) -> tuple[Method, str]:
    """The context-parallel method, and why."""
    text = model.config.get_text_config()
    heads = common_value(text, "num_attention_heads")
    if not heads:
        what = f"{cp}, but {type(model).__name__} has no attention heads, or not as many in every layer"
        raise UserError("mesh.cp", what, "set mesh.cp = 1")
    kv_heads = value_of(text, "num_key_value_heads") or heads
    seq_len = config.data.seq_len
    method = config.context_parallel.method
    reason = "as asked for"
    check_seq_len(seq_len, cp)
    blocks = _against_blocks(config.model.attention, seq_len, cp=cp)
    obstacles: dict[Method, Obstacle | None] = {
        "ulysses": _against_ulysses(heads, cp=cp),
        "ring": blocks,
        "allgather": blocks,
    }
    if method == "auto":
        method, reason = _pick(obstacles, heads, kv_heads, cp=cp, seq_len=seq_len, pack=config.data.pack)
        suits = _suits(traits, pack=config.data.pack, recurrent=recurrent)
        if method != "ulysses" and not obstacles["ulysses"] and not suits:
            method = "ulysses"
            reason = "auto: it leaves the model its own attention, which ours is not"
    if obstacle := obstacles[method]:
        possible = [f"context_parallel.method = {name!r}" for name, why in obstacles.items() if not why]
        what, todo = obstacle
        raise UserError(f"context_parallel.method {method!r}", what, " or ".join([todo, *possible]))
    return method, reason


def _pick(
    obstacles: dict[Method, Obstacle | None], heads: int, kv_heads: int, *, cp: int, seq_len: int, pack: bool
) -> tuple[Method, str]:
    if obstacles["ulysses"]:
        return ("allgather" if pack or seq_len < LONG else "ring"), f"auto: {obstacles['ulysses'][0]}"
    if obstacles["ring"]:
        return "ulysses", f"auto: {obstacles['ring'][0]}"
    if heads % cp == 0 and kv_heads % cp == 0:
        return "ulysses", f"auto: {heads} query and {kv_heads} key/value heads divide evenly over {cp} ranks"
    uneven = f"auto: {heads} query and {kv_heads} key/value heads do not divide evenly over {cp} ranks"
    if pack:
        return "allgather", f"{uneven}, and packed documents would make a ring's steps uneven"
    if seq_len < LONG:
        return "allgather", f"{uneven}, and {seq_len} tokens are few enough to gather"
    return "ring", f"{uneven}, and {seq_len} tokens are too many to gather"


def _against_ulysses(heads: int, *, cp: int) -> Obstacle | None:
    if cp > heads:
        return f"mesh.cp {cp} is more than the model's {heads} attention heads", f"use mesh.cp ≤ {heads}"
    return None


def _against_blocks(kernel: str, seq_len: int, *, cp: int) -> Obstacle | None:
    """Why ring and allgather do not work: what is wrong, and what to do."""
    if kernel not in ("auto", "sdpa", VARLEN) and not kernel.startswith("flash"):
        return f"it brings a kernel of its own, not model.attention = {kernel!r}", 'use model.attention = "auto"'
    if seq_len % (2 * cp):
        what = f"data.seq_len {seq_len} is not divisible by 2 × mesh.cp = {2 * cp}"
        return what, f"use {multiples_near(seq_len, 2 * cp)}"
    return None


def _local_kernel(
    config: TrainingConfig, model: PreTrainedModel, traits: Traits, *, device_type: str | None, recurrent: int
) -> tuple[str, str]:
    """What computes attention over whole sequences, and why."""
    if (asked := config.model.attention) != "auto":
        unknown = [CHUNKED] * (CHUNKED in layer_kinds(model.config.get_text_config()))
        if any(isinstance(value_of(module, "sinks"), nn.Parameter) for module in model.modules()):
            unknown += ["attention sinks"] * (asked == "flash_attention_2")  # it would leave them out without a word
        if asked.startswith("flash") and unknown:
            what = f"knows no {' and no '.join(unknown)}"
            raise UserError(f"model.attention {asked!r}", what, 'set model.attention = "auto"')
        return asked, "as asked for"
    own = str(model.config._attn_implementation)  # transformers' choice: "sdpa" where the model has it, else "eager"
    needs = ["packed documents" if config.data.pack else "padded rows"]
    needs += ["sliding windows"] if any(layer_windows(model.config).values()) else []
    if device_type == "cuda" and config.fsdp.param_dtype == "float32":
        return own, "auto: varlen's kernel on CUDA takes 16 bits only"
    if device_type == "cuda" and (odd := odd_widths(model)):
        return own, f"auto: varlen's kernel on CUDA takes no heads of width {', '.join(map(str, odd))}"
    dropout = value_of(model.config.get_text_config(), "attention_dropout")
    unknown = unknown_kinds(model.config, recurrent=bool(find_recurrent(model)))
    if dropout or unknown or not _suits(traits, pack=config.data.pack, recurrent=recurrent):
        return own, "auto: the model's attention does what ours does not"
    return VARLEN, f"auto: {' and '.join(needs)} need no mask"


def _masks_every_row(
    config: TrainingConfig, model: PreTrainedModel, traits: Traits, method: Method | None, kernel: str
) -> bool:
    """Whether rows of a single document get a mask too; see `AttentionPath`."""
    # Every synthetic row is a single document without padding.
    compiled = config.compile.enabled and config.data.format != "synthetic"
    leaks = method is None and config.data.pack and traits.separates_packed is False
    if kernel not in ("sdpa", "eager") or not (compiled or leaks):
        return False
    # Our masks then replace the model's, so they must be the same.
    return not unknown_kinds(model.config) and not try_path(traits, AttentionPath("ulysses", kernel), cp=1, pack=True)


def _suits(traits: Traits, *, pack: bool, recurrent: int) -> bool:
    """Whether our kernel computes what the model's own attention does."""
    return try_path(traits, AttentionPath(None, VARLEN, recurrent_layers=recurrent), cp=1, pack=pack) is None


def _check_path(path: AttentionPath, model: PreTrainedModel, traits: Traits, *, cp: int, pack: bool) -> None:
    """Refuse our attention for a model that needs its own, and a sliced sequence for one that needs the whole."""
    config = model.config.get_text_config()
    where = "model.attention"
    todo = 'set model.attention = "eager"'
    if path.method:
        where = f"context_parallel.method {path.method!r}"
        todo = "set mesh.cp = 1"
        if unknown := unknown_kinds(config, recurrent=path.recurrent_layers > 0):
            why = f" ({reason})" if (reason := try_recurrent(model, traits, cp=cp)) else ""
            kinds = ", ".join(sorted(unknown))
            raise UserError(where, f"the sequence would be cut for layers of kind {kinds}{why}", todo)
    if path.kernel == VARLEN and value_of(config, "attention_dropout"):
        raise UserError(where, "it has no attention dropout", "set model.config.attention_dropout = 0.0")
    if what := try_path(traits, path, cp=cp, pack=pack):
        raise UserError(where, f"{type(model).__name__}: {what}", _what_works(model, traits, path, cp, pack) or todo)


def _what_works(model: PreTrainedModel, traits: Traits, path: AttentionPath, cp: int, pack: bool) -> str | None:
    """Another method that works for this model."""
    if path.method is None:
        return None
    others = [AttentionPath("allgather", VARLEN, recurrent_layers=path.recurrent_layers)]
    if cp <= model.config.get_text_config().num_attention_heads:
        own = "sdpa" if model._supports_sdpa else "eager"
        others.insert(0, AttentionPath("ulysses", own, recurrent_layers=path.recurrent_layers))
    for other in others:
        if other.method != path.method and try_path(traits, other, cp=cp, pack=pack) is None:
            kernel = ' with model.attention = "eager"' if other.kernel == "eager" else ""
            return f"set context_parallel.method = {other.method!r}{kernel}"
    return None


def try_path(traits: Traits, path: AttentionPath, *, cp: int, pack: bool) -> str | None:
    """What would be wrong with ``path`` for a model, or None; tried once on its small copy, in one process.

    A config does not say all of a model's attention: biases, soft caps and unusual masks show in the logits.

    Args:
        pack: whether rows hold several documents; else the rows tried hold one.
    """
    ranks = cp if path.method == "ulysses" else 1  # the other methods share out no heads
    key = ("attention", path.method, path.kernel, ranks, pack, path.recurrent_layers > 0)
    return traits.no_small_copy or traits.once(key, lambda small: _find_difference(small, path, cp=ranks, pack=pack))


def _find_difference(small: PreTrainedModel, path: AttentionPath, *, cp: int, pack: bool) -> str | None:
    """Compare eager attention to each document alone with that of ``path``, which the small copy is then given."""
    lengths = (11, 13, 8) if pack else (32,)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    inputs = {"input_ids": torch.arange(2, 34)[None], "position_ids": positions, "use_cache": False}
    called: list[int] = []
    try:
        with torch.no_grad():
            parts = inputs["input_ids"].split(lengths, dim=1)
            expected = torch.cat([small(input_ids=part, use_cache=False).logits for part in parts], dim=1)
            found = _logits_on(small, path, inputs, cp=cp, called=called)
    except Exception as error:  # whatever the architecture raises: it does not run with this attention
        first_line, *_ = [*str(error).splitlines(), ""]
        failure = f"{type(error).__name__}: {first_line}"
        return f"its attention does not run: {failure}" if called else f"{_BYPASS}, or fails before it: {failure}"
    if len(called) < len(attention_layers(small.config.get_text_config())):
        return _BYPASS
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    if not difference <= 1e-4:
        return f"its attention is not what the model's own is (logits of a small copy differ by {difference:.0e})"
    return None


def _find_lost_borders(small: PreTrainedModel, path: AttentionPath) -> str | None:
    """Which attention of the small copy a flash kernel's path does not give the documents' borders, or None.

    Some layers hand no keyword arguments on.
    """
    positions = torch.cat([torch.arange(16), torch.arange(16)])[None]
    lost: list[str] = []

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> Any:
        if options.get("cu_seq_lens_q") is None:
            lost.append(type(module).__name__)
        [share] = share_heads(query.shape[1], key.shape[1], 1)
        mine = share.of(query, key, value)
        return attend_with_share("eager", module, mine, attention_mask, share=share, **options), None

    if path.recurrent_layers:
        apply_recurrent(small, Exchange())
    extra = attention_inputs(positions, small.config, path=path, cp_rank=0, cp=1, device=positions.device)
    use_attention(small, attend)
    try:
        with torch.no_grad():
            small(input_ids=torch.arange(2, 34)[None], position_ids=positions, use_cache=False, **extra)
    except Exception as error:  # whatever the architecture raises
        return f"packed documents might see each other: a small copy does not run with it ({type(error).__name__})"
    return f"packed documents would see each other: {lost[0]} is not told where they begin" if lost else None


def _logits_on(
    small: PreTrainedModel, path: AttentionPath, inputs: dict[str, Any], *, cp: int, called: list[int]
) -> Tensor:
    # Kernels that need a device are assumed to compute what eager does; whether heads may be split is tried.
    kernel = VARLEN if path.kernel == VARLEN else "eager"
    # One process has whole sequences, as Ulysses' ranks have between its exchanges.
    ulysses = AttentionPath("ulysses", kernel, recurrent_layers=path.recurrent_layers)
    positions = inputs["position_ids"]
    if path.recurrent_layers:
        apply_recurrent(small, Exchange())
    extra = attention_inputs(positions, small.config, path=ulysses, cp_rank=0, cp=1, device=positions.device)

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> Any:
        called.append(1)
        if path.method != "ulysses":
            return varlen_attention(module, query, key, value, attention_mask, **options)
        outputs = []
        for share in share_heads(query.shape[1], key.shape[1], min(cp, query.shape[1])):
            mine = share.of(query, key, value)
            outputs.append(attend_with_share(kernel, module, mine, attention_mask, share=share, **options))
        return torch.cat(outputs, dim=2), None

    use_attention(small, attend)
    return small(**inputs, **extra).logits
