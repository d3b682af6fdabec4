"""Layers that carry a state along the sequence: short convolutions, the gated delta rule, Mamba-2.

Everything in such a layer treats tokens one by one, but for a causal convolution over a few tokens and a scan. Both
are functions that transformers' layers call by name, so these two alone are replaced
(`fsdp2kit.model.layer_functions`).

* Documents of a pack stay apart: `fsdp2kit.parallel.context_parallel.borders` lays them out for the model's own
  functions.
* Under context parallelism a convolution gets the last k − 1 tokens of every chunk in one all-gather. A scan is
  independent by head: one all-to-all there trades the split over the sequence for one over heads, as Ulysses does
  for attention, and one back.

Bytes that a rank sends for one layer, with B rows of s tokens on each rank, c chunks of a row a rank (1 with Ulysses,
2 otherwise), e bytes a number, C channels and kernel width k:

* the convolution: forward and backward (cp − 1)·B·c·(k − 1)·C·e each;
* the scan, with n_r numbers a token in its inputs for rank r's share of heads and o_r in its output: forward
  B·s·e·(Σ over other ranks r of n_r + (cp − 1)·o_own), backward B·s·e·((cp − 1)·n_own + Σ over other ranks r of o_r).
  Gates in float32 (the gated delta rule's ``g``) have their own e.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from fsdp2kit.model.layer_functions import Function, functions_of, use_functions
from fsdp2kit.parallel.context_parallel.borders import Borders
from fsdp2kit.parallel.context_parallel.exchange import HeadShare, all_to_all, share_heads
from fsdp2kit.parallel.context_parallel.layout import chunks_of, gather_chunks, in_order, take_chunks

CONVOLUTION = "causal_conv1d_fn"
FUSED = "mamba2_split_conv1d_scan_combined"
"""A whole Mamba-2 layer in one kernel; where it gives None, layers call the convolution and the scan."""


@dataclass(frozen=True)
class Scan:
    """The arguments of a scan, by how their heads are counted."""

    heads: tuple[str, ...]
    """``[B, S, H, …]``; the output is like the first of them."""
    groups: tuple[str, ...]
    """``[B, S, G, …]``, H a multiple of G."""
    vectors: tuple[str, ...]
    """``[H]``, or not given."""
    package: str
    kernel: str
    """The CUDA kernel that transformers' function calls where its package is installed."""
    borders: str
    """The kernel's argument for documents: "cu_seqlens" of one row of all tokens, or "seq_idx" of each row."""

    @functools.cached_property
    def kernel_takes_borders(self) -> bool:
        """Whether the installed kernel has that argument; transformers drops arguments that a kernel does not have."""
        with contextlib.suppress(Exception):  # whatever a package without its device raises
            kernel = getattr(importlib.import_module(self.package), self.kernel)
            return self.borders in inspect.signature(kernel).parameters
        return False


_FLA = "fla.ops.gated_delta_rule"
_MAMBA = "mamba_ssm.ops.triton.ssd_combined"
SCANS = {
    "torch_chunk_gated_delta_rule": Scan(
        ("value", "g", "beta"), ("query", "key"), (), _FLA, "chunk_gated_delta_rule", "cu_seqlens"
    ),
    "mamba2_chunk_scan": Scan(
        ("hidden_states", "dt"), ("B", "C"), ("A", "D", "dt_bias"), _MAMBA, "mamba_chunk_scan_combined", "seq_idx"
    ),
}
"""By the name of transformers' function."""


@dataclass(frozen=True)
class Exchange:
    """How a scan gets whole sequences. Without a group they are here, and ``shares`` of the heads are run in turn."""

    group: ProcessGroup | None = None
    shares: int = 1

    def run(self, scan: Callable[[list[Tensor], HeadShare], Tensor], tensors: Tensors, borders: Borders) -> Tensor:
        """``[B, s, H, D]``: what ``scan`` makes of whole sequences, called with each share of heads or this rank's."""
        group = self.group
        shares = share_heads(tensors.num_heads, tensors.num_groups, group.size() if group else self.shares)
        if group is None:
            return torch.cat([scan(tensors.of(share), share) for share in shares], dim=2)
        mine = _sequence_to_heads([tensors.of(share) for share in shares], borders, group)
        return _heads_to_sequence(scan(mine, shares[group.rank()]), shares, borders, group)


class Tensors(NamedTuple):
    """A scan's inputs along the sequence."""

    heads: list[Tensor]
    groups: list[Tensor]

    @property
    def num_heads(self) -> int:
        return self.heads[0].shape[2]

    @property
    def num_groups(self) -> int:
        return self.groups[0].shape[2] if self.groups else self.num_heads

    def of(self, share: HeadShare) -> list[Tensor]:
        """Those of a share of heads: views, heads first, then groups."""
        query, key = (slice(heads.start, heads.stop) for heads in (share.query, share.key))
        return [*(tensor[:, :, query] for tensor in self.heads), *(tensor[:, :, key] for tensor in self.groups)]


@dataclass(frozen=True)
class RecurrentShape:
    """What one recurrent layer's functions are given, and the bytes of a token."""

    kernel: int = 1
    """Width of its convolution; 1: it has none."""
    channels: int = 0
    """Bytes of a token in the convolution."""
    heads: int = 0
    """Of its scan; 0: it has none."""
    groups: int = 0
    of_head: int = 0
    """Bytes of a token in the scan's inputs, for each head."""
    of_group: int = 0
    of_output: int = 0
    """Bytes of a token in the scan's output, for each head."""

    dtypes: int = 1
    """How many the scan's inputs have; each has an all-to-all of its own."""

    def bytes_sent(self, *, rows: int, tokens: int, chunks: int, cp: int, rank: int = 0) -> tuple[int, int]:
        """Bytes that a rank sends in forward and in backward, by the formulae at the top of this file.

        Args:
            tokens: B·s, of this rank.
            chunks: of a row, a rank.
        """
        both = (cp - 1) * rows * chunks * (self.kernel - 1) * self.channels
        if not self.heads:
            return both, both
        shares = share_heads(self.heads, self.groups, cp)
        inputs = [len(share.query) * self.of_head + len(share.key) * self.of_group for share in shares]
        outputs = [len(share.query) * self.of_output for share in shares]
        forward = tokens * (sum(inputs) - inputs[rank] + (cp - 1) * outputs[rank])
        backward = tokens * (sum(outputs) - outputs[rank] + (cp - 1) * inputs[rank])
        return both + forward, both + backward


def find_recurrent(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose ``forward`` calls functions that this file knows, by name."""
    known = {CONVOLUTION, *SCANS}
    return {name: module for name, module in model.named_modules() if known & functions_of(module).keys()}


def apply_recurrent(model: PreTrainedModel, exchange: Exchange) -> None:
    """Let the recurrent layers of ``model`` keep documents apart, and see whole sequences by ``exchange``.

    From then on these layers need ``borders``, which `fsdp2kit.parallel.context_parallel.batch.slice_batch` makes,
    as a keyword argument of the model's forward.
    """
    for module in find_recurrent(model).values():
        theirs = functions_of(module)
        functions: dict[str, Function] = {
            name: partial(_scan, theirs[name], scan, exchange) for name, scan in SCANS.items() if name in theirs
        }
        if CONVOLUTION in theirs:
            functions[CONVOLUTION] = partial(_convolve, theirs[CONVOLUTION], exchange)
        if FUSED in theirs:
            functions[FUSED] = lambda *_, **__: None
        use_functions(module, functions)


def _needed(borders: Borders | None) -> Borders:
    if borders is None:
        raise ValueError("recurrent layers need `borders`; slice_batch makes them")
    return borders


def _convolve(
    original: Function,
    exchange: Exchange,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    borders: Borders | None = None,
    **_: Any,
) -> Tensor:
    """The model's causal convolution, of each document alone.

    Args:
        hidden_states: ``[B, C, s]``; weight: ``[C, k]``; bias: ``[C]``.

    Returns:
        ``[B, C, s]``.
    """
    borders = _needed(borders)
    if exchange.group is None and borders.are_rows:
        return original(hidden_states, weight, bias, activation=activation)
    batch, channels, length = hidden_states.shape
    history = weight.shape[-1] - 1
    read, written = borders.convolution(history)
    parts = [hidden_states.new_zeros((channels, 1))]
    if exchange.group is not None:
        size = length // borders.chunks
        tails = hidden_states.unflatten(2, (borders.chunks, size))[..., size - history :]
        gathered = gather_chunks(tails.permute(2, 3, 0, 1).flatten(0, 1), exchange.group)  # [cp·c·(k − 1), B, C]
        parts.append(gathered.permute(2, 1, 0).flatten(1))
    parts.append(hidden_states.transpose(0, 1).flatten(1))
    laid_out = torch.cat(parts, dim=1).index_select(1, read)
    found = original(laid_out[None], weight, bias, activation=activation)[0].index_select(1, written)
    return found.unflatten(1, (batch, length)).transpose(0, 1)


def _scan(
    original: Function, scan: Scan, exchange: Exchange, *args: Any, borders: Borders | None = None, **kwargs: Any
) -> Any:
    """The model's scan, of each document alone; arguments and result are those of ``original``."""
    borders = _needed(borders)
    names = list(inspect.signature(original).parameters)
    given = {**dict(zip(names, args, strict=False)), **{n: value for n, value in kwargs.items() if n in names}}
    is_pair = False

    def call(tensors: Sequence[Tensor], share: HeadShare) -> Tensor:
        nonlocal is_pair
        mine = dict(zip(scan.heads + scan.groups, tensors, strict=True))
        if share.groups is None:  # the border between two ranks cuts a group: each head gets its own copy
            mine |= {name: mine[name][:, :, list(share.key_of_query)] for name in scan.groups}
        heads = slice(share.query.start, share.query.stop)
        vectors = {name: given[name][heads] for name in scan.vectors if given.get(name) is not None}

        def run(of_documents: Mapping[str, Tensor]) -> Tensor:
            nonlocal is_pair
            values = {**given, **vectors, **of_documents}
            leading = [values.pop(name) for name in names[: len(args)]]
            result = original(*leading, **values)
            is_pair = isinstance(result, tuple)
            return result[0] if is_pair else result

        if tensors[0].is_cuda and scan.kernel_takes_borders and not borders.are_rows:
            return _by_kernel(run, mine, borders, scan.borders)
        return _of_documents(run, mine, borders)

    tensors = Tensors([given[name] for name in scan.heads], [given[name] for name in scan.groups])
    output = exchange.run(call, tensors, borders)
    return (output, None) if is_pair else output


def _by_kernel(
    run: Callable[[Mapping[str, Tensor]], Tensor], tensors: dict[str, Tensor], borders: Borders, argument: str
) -> Tensor:
    """The same as `_of_documents`, by a kernel that knows of borders."""
    if argument == "seq_idx":
        return run({**tensors, argument: borders.numbers})
    rows = next(iter(tensors.values())).shape[:2]
    flat = {name: tensor.flatten(0, 1)[None] for name, tensor in tensors.items()}
    return run({**flat, argument: borders.offsets})[0].unflatten(0, rows)


def _of_documents(
    run: Callable[[Mapping[str, Tensor]], Tensor], tensors: dict[str, Tensor], borders: Borders
) -> Tensor:
    """``[B, S, H, D]``: what ``run`` gives for each document alone, of ``[B, S, …]``."""
    if borders.are_rows:
        return run(tensors)
    batch, length = next(iter(tensors.values())).shape[:2]
    flat = {name: tensor.flatten(0, 1) for name, tensor in tensors.items()}
    indices, places = borders.batches
    results = [run({name: tensor[index] for name, tensor in flat.items()}).flatten(0, 1) for index in indices]
    return torch.cat(results).index_select(0, places).unflatten(0, (batch, length))


def _sequence_to_heads(outgoing: Sequence[list[Tensor]], borders: Borders, group: ProcessGroup) -> list[Tensor]:
    """From all heads of this rank's tokens to its share of heads over the whole sequence, an all-to-all a dtype.

    Args:
        outgoing: the tensors ``[B, s, …]`` for each rank.

    Returns:
        ``[B, S, …]`` each.
    """
    mine = outgoing[group.rank()]
    received: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in mine):
        numbers = [number for number, tensor in enumerate(mine) if tensor.dtype == dtype]
        sizes = [mine[number].numel() for number in numbers]
        flat = [torch.cat([tensors[number].reshape(-1) for number in numbers]) for tensors in outgoing]
        chunks = [chunk.split(sizes) for chunk in all_to_all(flat, [sum(sizes)] * len(outgoing), group)]
        for place, number in enumerate(numbers):
            whole = torch.cat([chunk[place].view(mine[number].shape) for chunk in chunks], dim=1)
            assert borders.method is not None
            received[number] = in_order(whole.movedim(1, 0), cp=borders.cp, method=borders.method).movedim(0, 1)
    return [received[number] for number in range(len(mine))]


def _heads_to_sequence(output: Tensor, shares: Sequence[HeadShare], borders: Borders, group: ProcessGroup) -> Tensor:
    """The way back: ``[B, S, H_r, D]`` to ``[B, s, H, D]``, in one all-to-all."""
    batch, length, _, width = output.shape
    cuts = [chunks_of(rank, cp=borders.cp, length=length, method=borders.method) for rank in range(borders.cp)]
    outgoing = [take_chunks(output, chunks).reshape(-1) for chunks in cuts]
    shapes = [(batch, length // borders.cp, len(share.query), width) for share in shares]
    received = all_to_all(outgoing, [torch.Size(shape).numel() for shape in shapes], group)
    return torch.cat([chunk.view(shape) for chunk, shape in zip(received, shapes, strict=True)], dim=2)
