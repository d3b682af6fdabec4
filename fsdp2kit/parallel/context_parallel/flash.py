"""Which FlashAttention computes "varlen" on CUDA, and its trial on the device.

torch has FlashAttention-2 built in. Its registry puts FlashAttention-3 or 4, packages that the user installs, in the
place of that: under the same operators, forward and backward, for the whole process
(`torch.nn.attention.activate_flash_attention_impl`). So `kernels` calls the same operators whichever is chosen, and
torch's ``scaled_dot_product_attention`` changes with them.

Both are new, and wrong numbers would not show in a run. So before one is used, the device computes attention over
documents of several lengths, with the model's heads and windows. The results are compared with those of plain
operations in float32.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import attention as torch_attention
from transformers import PreTrainedModel

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.flops import attention_layers, head_widths
from fsdp2kit.model.inspect import value_of
from fsdp2kit.parallel.context_parallel.batch import layer_windows
from fsdp2kit.parallel.context_parallel.exchange import share_heads
from fsdp2kit.parallel.context_parallel.kernels import (
    RunningAttention,
    attend_backward,
    plain_attention,
    plain_attention_backward,
    takes_width,
    varlen_is_usable,
    zeros_for,
)
from fsdp2kit.parallel.context_parallel.layout import (
    VARLEN,
    AttentionPath,
    FlashChoice,
    HeadShape,
    Method,
    indices_of,
)
from fsdp2kit.parallel.context_parallel.segments import plan_segments, read_segments
from fsdp2kit.torch_compat import BackwardInputs

BOUND = 0.02
"""The largest relative difference from plain attention in float32 that is taken for rounding to bfloat16. That of
FlashAttention-2 is below 0.01."""

_KEY = "model.kernel"
_LEAVE_OUT = "leave model.kernel out"

_LENGTH = 512
_PACKED = ((5, 130, 1, 257, 119), (_LENGTH,))
_WHOLE = ((_LENGTH,), (_LENGTH,))
"""Lengths of the documents in each row of a trial."""
_WINDOW = 37
"""A trial's window in place of the model's, so that documents are longer than it."""
_METHODS: tuple[Method | None, ...] = (None, "ring", "allgather")
"""Complete documents; parts of them that are merged; queries with more keys than they are many."""
_RESULTS = ("output", "log-sum-exp", "gradient of queries", "gradient of keys", "gradient of values")


class _Flash(NamedTuple):
    """A FlashAttention: its name for the user, its name in torch's registry, and what it needs."""

    title: str
    impl: str | None = None
    capabilities: tuple[int, ...] = ()
    """Major compute capabilities of the devices that torch lets it run on (torch 2.13)."""
    install: str = ""


_FLASH = {
    "flash2": _Flash("FlashAttention-2"),
    "flash3": _Flash(
        "FlashAttention-3",
        "FA3",
        (9,),
        "install flash_attn_interface from the folder hopper of https://github.com/Dao-AILab/flash-attention",
    ),
    "flash4": _Flash("FlashAttention-4", "FA4", (9, 10), "install it: pip install --pre flash-attn-4"),
}
_BY_IMPL = {flash.impl: flash for flash in _FLASH.values()}


def choose_flash(
    config: TrainingConfig, model: PreTrainedModel, path: AttentionPath, *, cp: int, device_type: str | None
) -> FlashChoice | None:
    """What computes attention on CUDA; None: none of these.

    Args:
        path: what the model's attention will be, but for this.
        device_type: "cpu" or "cuda"; None: not known, and then only what the config asks for is chosen.

    Raises:
        UserError: it asks for one that cannot compute the model's attention.
    """
    asked = config.model.kernel
    if asked != "auto":
        _check_asked(config, model, path, device_type=device_type)
        flash = _FLASH[asked]
        reason = "as asked for"
    elif device_type == "cuda" and path.kernel == VARLEN and not _is_plain(config, model):
        active = torch_attention.current_flash_attention_impl()
        flash = _BY_IMPL.get(active) or _Flash(str(active), active)
        reason = "auto: active in this process" if active else "auto"
    else:
        return None
    if flash.impl is None:
        return FlashChoice(flash.title, None, reason)
    shapes = head_shapes(model, path.method, cp=cp)
    dtype = getattr(torch, config.fsdp.param_dtype)
    return FlashChoice(flash.title, flash.impl, reason, shapes, _windows(model), dtype)


def _is_plain(config: TrainingConfig, model: PreTrainedModel) -> bool:
    """Whether plain operations compute "varlen" on CUDA."""
    return config.fsdp.param_dtype == "float32" or bool(odd_widths(model))


def _windows(model: PreTrainedModel) -> tuple[int | None, ...]:
    """The windows of a trial: those of the model, each once, cut to what the trial's documents exceed."""
    given = set(layer_windows(model.config).values())
    windows = {max(2, min(window, _WINDOW)) for window in given if window is not None}
    return (*([None] if None in given else []), *sorted(windows))


def _check_asked(
    config: TrainingConfig, model: PreTrainedModel, path: AttentionPath, *, device_type: str | None
) -> None:
    """Refuse a kernel that would compute nothing of this model."""
    asked = config.model.kernel
    title = _FLASH[asked].title
    if path.kernel != VARLEN:
        what = f'{asked!r} computes attention "varlen", and here it is {path.kernel!r} ({path.kernel_reason})'
        is_asked = config.model.attention != "auto"  # else varlen does not compute what the model needs
        raise UserError(_KEY, what, f'{_LEAVE_OUT}, or set model.attention = "varlen"' if is_asked else _LEAVE_OUT)
    if device_type == "cpu":
        raise UserError(_KEY, f"{asked!r}, and {title} does not run on a CPU", f"{_LEAVE_OUT}, or use a GPU")
    if config.fsdp.param_dtype == "float32":
        what = f"{asked!r} with fsdp.param_dtype = 'float32', and {title} takes 16 bits only"
        raise UserError(_KEY, what, f"{_LEAVE_OUT}, or set fsdp.param_dtype = 'bfloat16'")
    if odd := odd_widths(model):
        what = f"{asked!r}, and {title} takes no heads of width {', '.join(map(str, odd))}"
        raise UserError(_KEY, what, _LEAVE_OUT)


def odd_widths(model: PreTrainedModel) -> list[int]:
    """Widths of heads that no kernel of CUDA takes."""
    return sorted(width for width in {_head_width(module) for module in model.modules()} if not takes_width(width))


def _head_width(module: nn.Module) -> int:
    """The width of an attention module's query heads; 0 for other modules."""
    return value_of(module, "qk_head_dim") or value_of(module, "head_dim") or 0


def head_shapes(model: PreTrainedModel, method: Method | None, *, cp: int) -> tuple[HeadShape, ...]:
    """The heads that ``model`` calls attention with on any rank, each once, sorted."""
    of_modules = {value_of(module, "head_dim") for module in model.modules() if _attends(module)} - {None}
    shapes = set()
    for layer in attention_layers(model.config.get_text_config()).values():
        heads = value_of(layer, "num_attention_heads")
        if not heads:
            continue
        kv_heads = value_of(layer, "num_key_value_heads") or heads
        widths = of_modules | {max(head_widths(layer))}
        on_ranks = {(heads, kv_heads)}
        if method == "ulysses":
            shares = share_heads(heads, kv_heads, cp)
            on_ranks = {(len(share.query), len(share.key if share.groups else share.query)) for share in shares}
        shapes |= {HeadShape(*counts, width) for counts in on_ranks for width in widths}
    return tuple(sorted(shapes))


def _attends(module: object) -> bool:
    """Whether a module is transformers' softmax attention with keys as wide as queries."""
    return value_of(module, "num_key_value_groups") is not None and value_of(module, "qk_head_dim") is None


def try_flash(choice: FlashChoice, *, device: torch.device) -> None:
    """Compare a choice with plain attention on ``device``; torch's own is not tried.

    A trial is made once in a process, and leaves torch's registry as it was.

    Raises:
        UserError: it is not installed, the device is not one of its own, or its results differ by more than rounding.
    """
    if choice.impl is None:
        return
    if device.type != "cuda":
        raise UserError(_KEY, f"{choice.title} does not run on a {device.type.upper()}", f"{_LEAVE_OUT}, or use a GPU")
    needs = _BY_IMPL.get(choice.impl)
    capability = torch.cuda.get_device_capability(device)
    if needs is not None and capability[0] not in needs.capabilities:
        known = " or ".join(f"{major}.x" for major in needs.capabilities)
        name = torch.cuda.get_device_name(device)
        what = f"{choice.title} needs compute capability {known}, and {name} has {capability[0]}.{capability[1]}"
        raise UserError(_KEY, what, _LEAVE_OUT)
    if what := _found_wrong(choice, device, torch.are_deterministic_algorithms_enabled()):
        raise UserError(_KEY, what, _LEAVE_OUT)


def apply_flash(choice: FlashChoice | None, *, device: torch.device) -> None:
    """Let the chosen FlashAttention compute attention in this process from here on.

    Raises:
        UserError: as `try_flash`, which is asked first.
    """
    if choice is None:
        return
    try_flash(choice, device=device)
    _activate(choice.title, choice.impl)


def _activate(title: str, impl: str | None) -> None:
    """Make it the one that torch's operators call; None: torch's own."""
    if impl == torch_attention.current_flash_attention_impl():
        return
    if impl is None:
        torch_attention.restore_flash_attention_impl()
        return
    todo = needs.install if (needs := _BY_IMPL.get(impl)) else _LEAVE_OUT
    if impl not in torch_attention.list_flash_attention_impls():
        raise UserError(
            _KEY, f"torch {torch.__version__} does not know {title}", f"{_LEAVE_OUT}, or use a newer torch"
        )
    try:
        torch_attention.activate_flash_attention_impl(impl)
    except ImportError as error:
        raise UserError(_KEY, f"{title} is not installed ({error})", f"{todo}, or {_LEAVE_OUT}") from None
    except Exception as error:  # whatever a package raises that is made for another torch or CUDA
        raise UserError(_KEY, f"{title} does not load: {_first_line(error)}", f"{todo}, or {_LEAVE_OUT}") from None


@contextmanager
def _active(choice: FlashChoice) -> Iterator[None]:
    before = torch_attention.current_flash_attention_impl()
    _activate(choice.title, choice.impl)
    try:
        yield
    finally:
        _activate(str(before), before)


def _first_line(error: BaseException) -> str:
    first_line, *_ = [*str(error).splitlines(), ""]
    return f"{type(error).__name__}: {first_line}"


@lru_cache(maxsize=16)
def _found_wrong(choice: FlashChoice, device: torch.device, deterministic: bool) -> str | None:
    """What a trial finds wrong with a choice."""
    if not choice.shapes:
        return f"{choice.title} cannot be tried: the model's config has no attention heads"
    with _active(choice):
        for shape in choice.shapes:
            heads = f"with {shape.heads} query and {shape.kv_heads} key heads of width {shape.width}"
            try:
                trial = Trial(shape, dtype=choice.dtype, device=device)
                differences = trial.differences(choice.windows)
                repeats = not deterministic or trial.repeats()
            except Exception as error:  # whatever a kernel raises at what it does not take
                return f"{choice.title} does not run {heads}: {_first_line(error)}"
            for what, difference in differences.items():
                if not difference <= BOUND:
                    bound = f"relative difference {difference:.2g}; rounding is at most {BOUND}"
                    return f"{choice.title} gives another {what} than plain attention {heads} ({bound})"
            if not repeats:
                return f"{choice.title} gives other bits in every call {heads}, unlike run.deterministic = true"
    return None


class Trial:
    """Attention over two rows of documents, by the kernel of CUDA and by plain operations in float32."""

    def __init__(self, shape: HeadShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self.scale = 1.5 * shape.width**-0.5  # not the kernels' default
        generator = torch.Generator().manual_seed(0)
        counts = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        sizes = [(len(_PACKED), heads, _LENGTH, shape.width) for heads in counts]
        self.query, self.key, self.value, self.grad = (
            torch.randn(size, generator=generator).to(device, dtype) for size in sizes
        )
        if not varlen_is_usable(self.query):
            raise ValueError("attention would be computed by plain operations")

    def differences(self, windows: Sequence[int | None]) -> dict[str, float]:
        """The largest relative difference of each result from that of plain operations, by its name."""
        found: dict[str, list[float]] = {}
        for window in windows:
            expected = self.by_plain_operations(_PACKED, window)
            where = "" if window is None else " under a sliding window"
            for method in _METHODS:
                for name, one, other in zip(_RESULTS, self.by_kernel(method, window), expected, strict=True):
                    found.setdefault(f"{name}{where}", []).append(_difference(one, other, _PACKED))
        out, _, *grads = self.by_plain_operations(_WHOLE, None)
        names = [name for name in _RESULTS if name != "log-sum-exp"]
        for name, one, other in zip(names, self.by_torch(), (out, *grads), strict=True):
            found[f"{name} of scaled_dot_product_attention"] = [_difference(one, other, _WHOLE)]
        return {name: torch.tensor(each).max().item() for name, each in found.items()}  # NaN is the largest

    def repeats(self) -> bool:
        """Whether the same call gives the same bits."""
        return all(map(torch.equal, self.by_kernel(None, None), self.by_kernel(None, None)))

    def by_kernel(self, method: Method | None, window: int | None) -> list[Tensor]:
        """Output ``[B, H, S, D]``, log-sum-exp ``[B, H, S]`` and gradients, by the calls that a run makes.

        Args:
            method: None: whole documents; else the blocks of two ranks, one after the other, without exchanges.
        """
        cp = 1 if method is None else 2
        starts = [[0, *itertools.accumulate(row)] for row in _PACKED]
        out = torch.empty_like(self.query)
        lse = torch.empty(self.query.shape[:3], device=self.query.device)
        grads = [zeros_for(tensor) for tensor in (self.query, self.key, self.value)]
        held = [indices_of(rank, cp=cp, length=_LENGTH, method=method) for rank in range(cp)]
        for rank, mine in enumerate(held):
            segments = read_segments(plan_segments(starts, method=method, rank=rank, cp=cp, window=window))
            attended = RunningAttention(self.query[:, :, mine], scale=self.scale)
            steps = [(list(range(_LENGTH)), segments)]
            if method == "ring":
                steps = [(held[(rank - step) % cp], [s for s in segments if s.step == step]) for step in range(cp)]
            for theirs, of_step in steps:
                attended.attend(self.key[:, :, theirs], self.value[:, :, theirs], of_step)
            out[:, :, mine] = attended.out.to(out.dtype)
            lse[:, :, mine] = attended.lse
            for theirs, of_step in steps:
                key = self.key[:, :, theirs]
                value = self.value[:, :, theirs]
                block = BackwardInputs(
                    self.grad[:, :, mine], attended.query, key, value, attended.out.to(out.dtype), attended.lse
                )
                parts = attend_backward((None, None, None), block, of_step, scale=self.scale)
                for total, part, at in zip(grads, parts, (mine, theirs, theirs), strict=True):
                    total[:, :, at] += part
        return [out, lse, *grads]

    def by_torch(self) -> list[Tensor]:
        """Output and gradients of torch's own function, each row one document: other models in the process call it."""
        leaves = [tensor.clone().requires_grad_() for tensor in (self.query, self.key, self.value)]
        grouped = self.query.shape[1] != self.key.shape[1]
        with torch.enable_grad(), torch_attention.sdpa_kernel(torch_attention.SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(
                leaves[0], leaves[1], leaves[2], is_causal=True, scale=self.scale, enable_gqa=grouped
            )
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad)]

    def by_plain_operations(self, rows: Sequence[Sequence[int]], window: int | None) -> list[Tensor]:
        """What `by_kernel` gives, float32; the mask is written out."""
        results = []
        for number, lengths in enumerate(rows):
            of_row = (each[number : number + 1] for each in (self.query, self.key, self.value, self.grad))
            query, key, value, grad = of_row
            mask = _mask(lengths, window, device=query.device)
            out, lse = plain_attention(query, key, value, causal=False, mask=mask, scale=self.scale)
            inputs = BackwardInputs(grad, query, key, value, out, lse)
            grads = plain_attention_backward(inputs, causal=False, mask=mask, scale=self.scale)
            results.append((out, lse, *grads))
        return [torch.cat(parts) for parts in zip(*results, strict=True)]


def _mask(lengths: Sequence[int], window: int | None, *, device: torch.device) -> Tensor:
    """``[S, S]`` float32: 0 where a query sees a key of its document, −inf elsewhere."""
    numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    ahead = torch.arange(_LENGTH) - torch.arange(_LENGTH)[:, None]
    hidden = (numbers != numbers[:, None]) | (ahead > 0)
    if window is not None:
        hidden |= ahead <= -window
    return torch.zeros(_LENGTH, _LENGTH).masked_fill_(hidden, float("-inf")).to(device)


def _difference(found: Tensor, expected: Tensor, rows: Sequence[Sequence[int]]) -> float:
    """The largest relative difference of any document, in the root mean square over its heads and tokens.

    It is relative to the document's values, or to those of all documents where these are larger: in a document of one
    token the query's gradient is zero, and a kernel leaves rounding of larger terms there.

    Args:
        found, expected: ``[B, H, S, …]``.
    """
    squares = [each.square().transpose(1, 2).flatten(2).mean(2) for each in (found - expected, expected)]
    lengths = [length for row in rows for length in row]
    error, value = (torch.stack([part.mean() for part in each.flatten().split(lengths)]) for each in squares)
    whole = squares[1].mean()
    return (error / value.maximum(whole)).max().sqrt().item()
