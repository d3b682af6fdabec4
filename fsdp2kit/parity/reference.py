"""The reference that a mesh's numbers are compared with: a plain single-process loop of transformers and AdamW.

It uses none of our mathematics: the loss is `F.cross_entropy` on the model's own logits, the gradients are autograd's,
the schedule is transformers'.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, get_scheduler

from fsdp2kit.data.loader import Batch, batch_of
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.hf_config import trained_config
from fsdp2kit.model.inspect import value_of
from fsdp2kit.model.loss_head import IGNORE
from fsdp2kit.parallel.context_parallel.batch import RECURRENT_KINDS
from fsdp2kit.weights.modules import cast_model
from fsdp2kit.weights.record import weights_of
from fsdp2kit.weights.stored import check_indexes


@dataclass(frozen=True)
class Rows:
    """A global batch, ``[B, S]`` each: token ids, shifted labels (−100 ignored), positions restarting at documents."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor

    @property
    def targets(self) -> int:
        """Labels that are not ignored."""
        return int((self.labels != IGNORE).sum())

    def __getitem__(self, rows: slice) -> Rows:
        return Rows(self.input_ids[rows], self.labels[rows], self.position_ids[rows])

    def split(self, size: int) -> list[Rows]:
        """Micro-batches of ``size`` rows."""
        return [self[at : at + size] for at in range(0, len(self.input_ids), size)]

    def as_batch(self) -> Batch:
        """These rows as our loader hands them out."""
        return batch_of(self.input_ids, self.labels, self.position_ids)


def document_lengths(positions: Tensor) -> list[int]:
    """Lengths of the documents of a row, from its positions, which restart at each document."""
    starts = [*(positions == 0).nonzero().squeeze(1).tolist(), len(positions)]
    return [stop - start for start, stop in itertools.pairwise(starts)]


def make_rows(seed: int, *, rows: int, length: int, vocabulary: int) -> Rows:
    """Packed rows of random documents: the first row is one document, the last is padded, the others have short ones.

    Documents are supervised from a random position on, so rows have unequal numbers of targets.
    """
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, (rows, length))
    labels = np.full((rows, length), IGNORE)
    positions = np.zeros((rows, length), dtype=np.int64)
    for row in range(rows):
        start = 0
        while start < length:
            size = length if row == 0 else int(rng.integers(2, length // 2))
            stop = min(start + size, length)
            positions[row, start:stop] = np.arange(stop - start)
            prompt = int(rng.integers(0, stop - start))
            labels[row, start + prompt : stop - 1] = ids[row, start + prompt + 1 : stop]
            start = stop
        if row == rows - 1:
            labels[row, length // 2 :] = IGNORE  # as padding is
    return Rows(*(torch.from_numpy(array.astype(np.int64)) for array in (ids, labels, positions)))


def _whole_rows(seed: int, *, rows: int, length: int, vocabulary: int) -> Rows:
    """Rows of one document each, whose first quarter is a prompt; the first row is padded from the middle on."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocabulary, (rows, length + 1))
    labels = ids[:, 1:].copy()
    labels[:, : length // 4] = IGNORE
    labels[0, length // 2 :] = IGNORE
    positions = np.tile(np.arange(length), (rows, 1))
    return Rows(*(torch.from_numpy(array.astype(np.int64)) for array in (ids[:, :-1], labels, positions)))


def make_batches(
    steps: int, *, seed: int = 0, rows: int, length: int, vocabulary: int, pack: bool = True
) -> list[Rows]:
    """A global batch for each step, of packed rows or of rows that are one document each."""
    make = make_rows if pack else _whole_rows
    return [make(seed * 1000 + step, rows=rows, length=length, vocabulary=vocabulary) for step in range(steps)]


@dataclass(frozen=True)
class Curves:
    """A run's numbers: gradients of the first step by parameter name, and one number for each step."""

    gradients: dict[str, np.ndarray]
    loss: list[float]
    grad_norm: list[float]
    lr: list[float]


def plain_loop(
    path: Path,
    batches: Sequence[Rows],
    *,
    micro_batch_size: int,
    lr: float,
    warmup_steps: int = 1,
    max_grad_norm: float = 0.5,
    weight_decay: float = 0.1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    alone: bool = False,
    prepare: Callable[[PreTrainedModel], object] = lambda model: None,
) -> Curves:
    """Train one step on each of ``batches`` with transformers and torch alone.

    Args:
        alone: as `plain_logits` takes it.
        prepare: called with the model before it trains, for example to freeze parameters.
        dtype: of the computation; parameters, gradients between micro-batches and moments are always float32.
    """
    model: Any = load_plain(path)
    model.to(device)
    prepare(model)
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=warmup_steps, num_training_steps=len(batches))
    curves = Curves({}, [], [], [])
    for batch in batches:
        loss = 0.0
        for micro in batch.split(micro_batch_size):
            part = (
                cross_entropy_sum(plain_logits(model, micro, dtype=dtype, alone=alone), micro.labels) / batch.targets
            )
            part.backward()
            loss += part.item()
        if not curves.loss:
            curves.gradients.update({name: gradient_of(p).float().cpu().numpy().copy() for name, p in named.items()})
        norm = gradient_norm(named.values())
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_grad_norm, norm)
        curves.loss.append(loss)
        curves.grad_norm.append(norm.item())
        curves.lr.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return curves


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The norm of `clip_grad_norm_`, but summed in float64.

    In float32 on a CPU, torch's norm of SmolLM2's embedding gradient (28 million numbers) is 1.4e-4 off.
    """
    return torch.stack([gradient_of(parameter).double().norm() for parameter in parameters]).norm().float()


def gradient_of(parameter: Any) -> Tensor:
    """A parameter's gradient; zeros if the loss does not depend on it."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def load_plain(path: Path) -> PreTrainedModel:
    """The model in float32, by transformers alone, with its default attention (sdpa, or eager without sdpa)."""
    check_indexes(path)
    trained_config(AutoConfig.from_pretrained(path))  # a class that fsdp2kit makes is known from then on
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).train()


def plain_logits(
    model: PreTrainedModel, rows: Rows, *, dtype: torch.dtype = torch.float32, alone: bool = False
) -> Tensor:
    """Logits ``[B, S, V]``, computed with parameters cast as ``from_pretrained(dtype=dtype)`` casts them.

    Autograd leads back to the float32 ones.

    Args:
        alone: run each document by itself: some models let packed documents see each other (gpt-oss).
    """
    if not (alone or _carries_state(model)):
        return _logits(model, rows, dtype=dtype)
    each_row = [
        torch.cat([_logits(model, one, dtype=dtype) for one in _documents(rows[at : at + 1])], dim=1)
        for at in range(len(rows.input_ids))
    ]
    return torch.cat(each_row)


def _logits(model: PreTrainedModel, rows: Rows, *, dtype: torch.dtype) -> Tensor:
    weights = weights_of(model)
    cast = {name: one.to(weights.dtype_of(name, dtype)) for name, one in model.named_parameters()}
    inputs = {
        "input_ids": rows.input_ids.to(model.device),
        "position_ids": rows.position_ids.to(model.device),
        "attention_mask": None,  # with a mask, or a cache, packed documents would see each other
        "use_cache": False,
    }
    return torch.func.functional_call(model, cast, (), inputs, tie_weights=True).logits


def _carries_state(model: PreTrainedModel) -> bool:
    """Whether a layer is more than attention: position ids alone do not keep packed documents apart in it."""
    kinds = value_of(model.config.get_text_config(), "layer_types") or ()
    return bool(RECURRENT_KINDS & set(kinds))


def _documents(row: Rows) -> list[Rows]:
    """A row's documents, each a row of its own."""
    parts = (each.split(document_lengths(row.position_ids[0]), dim=1) for each in vars(row).values())
    return [Rows(*each) for each in zip(*parts, strict=True)]


@torch.no_grad()
def plain_forward(
    path: Path, row: Rows, *, document: range, dtype: torch.dtype = torch.float32, alone: bool = False
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The reference of `Sharded.forward`.

    Returns:
        Logits of one document of a packed row, run alone, ``[n, V]``, and the row's hidden states after each decoder
        layer, ``[S, H]`` by the layer's name; float32.
    """
    model: Any = load_plain(path)
    cast_model(model, dtype)
    found: list[dict[str, np.ndarray]] = []
    for part in _documents(row) if alone else [row]:
        with hidden_states(named_layers(model)) as hidden:
            plain_logits(model, part, dtype=dtype)
        found.append({name: state[0].float().numpy() for name, state in hidden.items()})
    states = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    logits = model(input_ids=row.input_ids[:, document.start : document.stop], use_cache=False).logits
    return logits[0].float().numpy(), states


def named_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The decoder layers by their names; ask before FSDP changes their classes."""
    layers = {id(layer) for layer in decoder_layers(model)}
    return {name: module for name, module in model.named_modules() if id(module) in layers}


@contextmanager
def hidden_states(layers: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """While it is open, forward passes of one row store each layer's output here, ``[1, s, H]`` by layer name.

    Some layers hand on several of these, Gemma 3n's ``[N, 1, s, H]`` and DeepSeek-V4's ``[1, s, N, H]``: they are kept
    as ``[1, s, N·H]``.
    """
    found: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        state = (output if isinstance(output, Tensor) else output[0]).detach()
        if state.ndim == 4 and state.shape[0] > 1:
            state = state.movedim(0, -2)
        found[name] = state if state.ndim == 3 else state.flatten(-2)

    handles = [layer.register_forward_hook(partial(keep, name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over the labels that are not ignored, in float64.

    In float32 on a CPU, torch's sum of a softmax's 49,152 terms is so imprecise that SmolLM2's gradients are 5e-4 off
    those of float64, at every micro-batch size; those of the loss in chunks are 3e-5 off.
    """
    labels = labels.to(logits.device)
    return F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def gradient_distances(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """The relative L2 difference of every parameter's gradient.

    Relative to the parameter's own norm, or to a thousandth of all gradients' norm if that is larger: some gradients
    are exactly zero in theory (of a key's bias, without RoPE), and their rounding noise says nothing.
    """
    assert found.keys() == expected.keys()
    norms = {name: float(np.linalg.norm(each.astype(np.float64))) for name, each in expected.items()}
    floor = 1e-3 * float(np.linalg.norm(list(norms.values())))
    distances = {}
    for name, norm in norms.items():
        difference = float(np.linalg.norm((found[name] - expected[name]).astype(np.float64)))
        distances[name] = difference / max(norm, floor)
    return distances


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """L2 norm of the difference over that of ``expected``."""
    return float(np.linalg.norm((found - expected).astype(np.float64)) / np.linalg.norm(expected.astype(np.float64)))


def worst_relative(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of any pair."""
    return max(abs(one - other) / abs(other) for one, other in zip(found, expected, strict=True))


def errors(found: Curves, expected: Curves) -> dict[str, float]:
    """The largest relative differences of two runs, by what is compared."""
    return {
        "gradients": max(gradient_distances(found.gradients, expected.gradients).values()),
        "loss": worst_relative(found.loss, expected.loss),
        "grad_norm": worst_relative(found.grad_norm, expected.grad_norm),
    }
