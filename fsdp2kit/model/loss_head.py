"""Losses on a model's own output head, without ever holding all logits.

`attach_loss` makes the head a `LossHead`, whose forward computes a loss from hidden states in chunks (`over_chunks`),
and the model a `LossModel`, which runs its base model and then the head. Tokens without a target are left out.

Where logits are more than ``hidden @ weight.T`` (scaling, soft-capping, a bias; see `Traits`), the chunks' logits come
from the model's own forward.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from fsdp2kit.model.head_chunks import (
    Kernels,
    OfChunk,
    cross_entropy,
    cross_entropy_and_entropy,
    over_chunks,
    rows_at_once,
)
from fsdp2kit.model.inspect import backbone_name, inspect_model
from fsdp2kit.model.loss_kernels import LossKernels

IGNORE = -100
"""Label of a token without a target, as everywhere in torch and transformers."""

FORWARDS = ("on_head", "target_states")
"""Methods of a `LossModel` for ``register_fsdp_forward_method``: they read parameters of the root's unit."""


def attach_loss(model: PreTrainedModel, *, own_head: bool | None = None, compiles: bool = False) -> None:
    """Make ``model`` a `LossModel` and its output head a `LossHead`, in place, once; parameters keep their names.

    Their classes get these as a base, as `fully_shard` makes a module an `FSDPModule`.

    Args:
        model: a transformers causal language model, before `fully_shard`.
        own_head: whether logits are more than ``hidden @ weightᵀ``; by default a small copy is asked.
        compiles: whether a cross-entropy on CUDA may be compiled.
    """
    if isinstance(model, LossModel):
        return
    if own_head is None:
        own_head = not inspect_model(model).linear_head
    head: Any = model.get_output_embeddings()
    own = _own_head(model, head) if own_head else None
    for module, base in ((model, LossModel), (head, LossHead)):
        kind = type(module)
        module.__class__ = type(kind.__name__, (base, kind), {"__module__": kind.__module__})
    head.own = own
    head.kernels = LossKernels(compiles=compiles)
    head.read = [head]
    if own_head:  # some models have layers between their base and the head
        backbone = backbone_name(model)
        head.read += [module for name, module in model.named_children() if name != backbone and module is not head]


def select_supervised(labels: Tensor) -> Tensor:
    """Flat indices ``[N]`` of the tokens of ``labels`` ``[B, S]`` that have a target.

    Call it while the labels are still on the host: on a CUDA tensor it would synchronise the device.
    """
    return (labels.flatten() != IGNORE).nonzero().squeeze(1)


class LossHead(nn.Module):
    """A model's output head. Given labels, it returns values of its logits instead of the logits.

    An untied head is an FSDP unit of its own, so its parameters are gathered around exactly this call. A tied one's
    are in the root's unit.
    """

    weight: Tensor
    own: Callable[[Tensor], Tensor] | None
    """From hidden states ``[n, H]`` to logits ``[n, V]``; None: they are ``hidden @ weightᵀ``."""
    kernels = LossKernels()
    """The device's faster ways; `attach_loss` gives each head its own."""
    read: list[nn.Module]
    """The modules whose parameters make logits."""

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        of_chunk: OfChunk = cross_entropy,
        *,
        summed: bool = True,
        beside: int = 0,
    ) -> Any:
        """As `over_chunks`; without ``labels`` the head's own forward.

        Args:
            hidden: ``[N, H]``, the base model's last hidden states of the tokens that have a target.
            labels: int64 ``[N]``, these targets.
            beside: how many logits of each token ``of_chunk`` holds beside this head's.
        """
        if labels is None:
            return super().forward(hidden)
        parameters = [self.weight]
        if self.own is not None:
            read = dict.fromkeys(p for module in self.read for p in module.parameters())
            parameters = [parameter for parameter in read if parameter.requires_grad]
        # Units may return another dtype than they compute in.
        hidden = hidden.to(self.weight.dtype)
        learns = torch.is_grad_enabled() and (hidden.requires_grad or self.weight.requires_grad)
        is_plain = of_chunk is cross_entropy and summed and self.own is None and learns
        loss = self.kernels.compiled_loss(hidden, self.weight, labels) if is_plain else None
        rows = rows_at_once(hidden.device, vocabulary=len(self.weight) + beside, narrow=loss is not None)
        kernels = Kernels(loss, self.kernels.adds_products)
        return over_chunks(
            of_chunk, hidden, labels, parameters, rows=rows, own=self.own, summed=summed, kernels=kernels
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """The model's logits ``[n, V]`` of hidden states ``[n, H]``, while the head's parameters are gathered."""
        hidden = hidden.to(self.weight.dtype)
        return F.linear(hidden, self.weight) if self.own is None else self.own(hidden)


class LossModel(nn.Module):
    """A causal language model with losses on its own head.

    ``labels`` ``[B, S]`` are already shifted; ``index`` is `select_supervised`'s; ``inputs`` are the base model's.
    """

    get_output_embeddings: Callable[[], Any]

    def loss_sum(
        self,
        input_ids: Tensor,
        labels: Tensor,
        index: Tensor | None = None,
        groups: Tensor | None = None,
        num_groups: int = 0,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The summed cross-entropy, a float32 scalar.

        With ``groups``, int64 ``[N]`` in ``[0, num_groups)`` for each target of ``index``, also the detached sum of
        each group, float64 ``[num_groups]``.
        """
        loss, values = self.on_head(cross_entropy, input_ids, labels, index, **inputs)
        return loss if groups is None else (loss, sum_by_group(values[:, 0], groups, num_groups))

    def token_log_probs(
        self, input_ids: Tensor, labels: Tensor, index: Tensor | None = None, temperature: float = 1.0, **inputs: Any
    ) -> tuple[Tensor, Tensor]:
        """Each target's log-probability, differentiable, and the detached entropy of its distribution in nats.

        Both are float32 ``[N]``.
        """
        of_chunk = partial(cross_entropy_and_entropy, temperature=temperature)
        losses, values = self.on_head(of_chunk, input_ids, labels, index, summed=False, **inputs)
        return -losses, values[:, 1]

    def on_head(
        self,
        of_chunk: OfChunk,
        input_ids: Tensor,
        labels: Tensor,
        index: Tensor | None = None,
        *,
        summed: bool = True,
        beside: int = 0,
        **inputs: Any,
    ) -> tuple[Tensor, Tensor]:
        """What `over_chunks` returns for ``of_chunk`` and the tokens that have a target.

        Args:
            summed: as of `over_chunks`.
            beside: as of `LossHead.forward`.
        """
        hidden, targets = _run_base(self, input_ids, labels, index, inputs)
        # The states of tokens without a target are freed here.
        return self.get_output_embeddings()(hidden, targets, of_chunk, summed=summed, beside=beside)

    def target_states(
        self, input_ids: Tensor, labels: Tensor, index: Tensor | None = None, **inputs: Any
    ) -> tuple[Tensor, Tensor]:
        """The base model's last hidden states ``[N, H]`` of the tokens that have a target, and the targets ``[N]``."""
        return _run_base(self, input_ids, labels, index, inputs)


def _run_base(
    model: Any, input_ids: Tensor, labels: Tensor, index: Tensor | None, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    base = getattr(model, backbone_name(model))
    # A cache would be built by default, and with it packed documents would see each other.
    hidden = base(input_ids=input_ids, use_cache=False, **inputs)[0]
    index = select_supervised(labels) if index is None else index
    return hidden.flatten(0, 1).index_select(0, index), labels.flatten().index_select(0, index)


def sum_by_group(losses: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """The sum of each group's ``losses``, float64 ``[num_groups]``."""
    # In float64, since `index_add` adds thousands of tokens one after the other.
    sums = torch.zeros(num_groups, dtype=torch.float64, device=losses.device)
    return sums.index_add(0, groups, losses.double())


@contextlib.contextmanager
def gathered_head(model: Any) -> Iterator[LossHead]:
    """The head of a `LossModel`, whose `LossHead.logits` can be asked while this is open. Collective."""
    head = model.get_output_embeddings()
    units = [module for module in (model, head) if isinstance(module, FSDPModule)]
    for unit in units:
        unit.unshard()
    try:
        yield head
    finally:
        for unit in units:
            unit.reshard()


class _HiddenOnly(BaseModelOutputWithPast):
    """A base model's output with nothing but the last hidden state; every other attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Passthrough(nn.Module):
    """Stands in for the base model: returns its input embeddings as the last hidden state."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._base = [base]  # in a list, so that it is not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base[0], name)  # a head may read numbers that its base model keeps

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:  # some heads give input_ids by position
        return _HiddenOnly(last_hidden_state=inputs_embeds)


class _Projection(nn.Module):
    """The head's matmul without the head's FSDP hooks, which have run already."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self._head = [head]  # in a list, so that it is not a submodule a second time

    def forward(self, hidden: Tensor) -> Tensor:
        # Read at call time: FSDP swaps the sharded parameter for the gathered one.
        head = self._head[0]
        return F.linear(hidden, head.weight, getattr(head, "bias", None))


def _own_head(model: PreTrainedModel, head: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model's own forward from hidden states ``[N, H]`` to logits ``[N, V]``, base model left out."""
    forward = type(model).forward
    view = copy.copy(model)
    view._modules = dict(model._modules)
    name = backbone_name(model)
    view._modules[name] = _Passthrough(getattr(model, name))
    view._modules |= {name: _Projection(head) for name, module in model._modules.items() if module is head}

    def logits(hidden: Tensor) -> Tensor:
        return forward(view, inputs_embeds=hidden[None], use_cache=False).logits[0]

    return logits
