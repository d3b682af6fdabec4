"""The loss on the model's own output head, without ever holding all logits.

At a vocabulary of 128k, the logits of 16k tokens are 8 GiB in float32, and their gradient as much again. The
linear head and the cross-entropy are therefore computed together, a few hundred tokens at a time, and the
gradients with respect to hidden states and head are computed in the same pass (softmax − one-hot needs nothing
that backward would bring), so that backward only scales them. Tokens without a target are left out altogether.

A head that is more than ``hidden @ weight.T`` (logit scaling, soft-capping, a bias) is recognised on a tiny twin
of the model, and then the model's own forward is run on the hidden states, in chunks, under checkpointing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from fsdp2kit.errors import UserError
from fsdp2kit.model.linear_cross_entropy import Groups, rows_at_once
from fsdp2kit.model.loss_kernels import HeadLoss, LossKernel, linear_loss
from fsdp2kit.model.twin import build_twin

IGNORE = -100
"""Label of a token without a target, as everywhere in torch and transformers."""


def select_supervised(labels: Tensor) -> Tensor:
    """Flat indices ``[N]`` of the tokens of ``labels`` ``[B, S]`` that have a target.

    Call it while the labels are still on the host: on a CUDA tensor it would synchronise the device.
    """
    return (labels.flatten() != IGNORE).nonzero().squeeze(1)


def attach_loss(model: PreTrainedModel, *, kernel: LossKernel | None = None) -> nn.Module:
    """Give ``model`` a method ``loss_sum`` and return the module whose method reads the head's parameters.

    ``model.loss_sum(input_ids, labels, index=None, groups=None, num_groups=0, **inputs)`` runs the base model and
    returns the summed cross-entropy (float32 scalar). ``labels`` ``[B, S]`` are already shifted; ``index`` is
    `select_supervised`'s. With ``groups``, int64 ``[N]`` in ``[0, num_groups)`` for each target of ``index``, it
    returns that scalar and the detached sum of each group, float64 ``[num_groups]``.
    With an untied head, the head gets a ``loss_sum`` of its own, so that as an FSDP unit its
    parameters are gathered around exactly that call. Register both with ``register_fsdp_forward_method``.

    Args:
        model: a transformers causal language model.
        kernel: what computes it, as `choose_loss` says; all but "own_head" take logits to be ``hidden @ weightᵀ``. By
            default "chunked", or "own_head" where a tiny twin's logits are more than that.
    """
    head: Any = model.get_output_embeddings()
    backbone = backbone_name(model)
    kernel = kernel or ("chunked" if has_linear_head(model) else "own_head")
    tied = head.weight is model.get_input_embeddings().weight
    compute: HeadLoss = partial(_chunked_loss, _own_head(model, head)) if kernel == "own_head" else linear_loss(kernel)

    def head_loss(
        head: Any, hidden: Tensor, labels: Tensor, groups: Groups | None
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        hidden = hidden.to(head.weight.dtype)  # units may return another dtype than they compute in
        loss, sums = compute(hidden, head.weight, labels, groups)
        return loss if groups is None else (loss, sums)

    def loss_sum(
        model: Any,
        input_ids: Tensor,
        labels: Tensor,
        index: Tensor | None = None,
        groups: Tensor | None = None,
        num_groups: int = 0,
        **inputs: Any,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        # A cache would be built by default, and with it packed documents would see each other.
        hidden = getattr(model, backbone)(input_ids=input_ids, use_cache=False, **inputs)[0]
        index = select_supervised(labels) if index is None else index
        hidden, targets = hidden.flatten(0, 1).index_select(0, index), labels.flatten().index_select(0, index)
        known = None if groups is None else Groups(groups, num_groups)
        return head_loss(head, hidden, targets, known) if tied else head.loss_sum(hidden, targets, known)

    _add_method(model, "loss_sum", loss_sum)
    if not tied:
        _add_method(head, "loss_sum", head_loss)
    return model if tied else head


def _add_method(module: Any, name: str, function: Callable[..., Any]) -> None:
    setattr(module, name, MethodType(function, module))


def backbone_name(model: PreTrainedModel) -> str:
    """Name of the child that turns tokens into hidden states, beside the head.

    Raises:
        UserError: the model is not a decoder with a head on it.
    """
    children = dict(model.named_children())
    for decoder in (model.base_model, model.get_decoder()):
        for name, child in children.items():
            if child is decoder:
                return name
    # Some models name their backbone otherwise than their class says; beside the head it is the only one.
    others = [name for name, child in children.items() if child is not model.get_output_embeddings()]
    if len(others) == 1:
        return others[0]
    raise UserError(
        f"model {type(model).__name__}", "is not a decoder with an output head", "use a causal language model"
    )


def has_linear_head(model: PreTrainedModel) -> bool:
    """Whether the model's logits are ``hidden @ weightᵀ`` and nothing else, tried on a tiny twin.

    Where no twin can be built or run the answer is no, which is always right and only slower.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return False
    twin: Any = build_twin(model)
    if twin is None:
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        tokens = torch.randint(0, twin.get_input_embeddings().weight.shape[0], (1, 8), generator=generator)
        hidden = getattr(twin, backbone_name(twin))(input_ids=tokens, use_cache=False)[0]
        logits = twin(input_ids=tokens, use_cache=False).logits
        expected = F.linear(hidden, twin.get_output_embeddings().weight)
    return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-5, atol=1e-5)


class _HiddenOnly(BaseModelOutputWithPast):
    """A base model's output with nothing but the last hidden state; whatever else is asked for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Passthrough(nn.Module):
    """Stands in for the base model: what comes in as embeddings goes out as the last hidden state."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self._base = [base]  # in a list, so that it is not a submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base[0], name)  # a head may read numbers that its base model keeps

    def forward(self, inputs_embeds: Tensor, **_: Any) -> Any:
        return _HiddenOnly(last_hidden_state=inputs_embeds)


class _Projection(nn.Module):
    """The head's matrix product without the head's FSDP hooks: we are inside its unit already."""

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
    projection = _Projection(head)
    for name, module in model._modules.items():
        if module is head:
            view._modules[name] = projection

    def logits(hidden: Tensor) -> Tensor:
        return forward(view, inputs_embeds=hidden[None], use_cache=False).logits[0]

    return logits


def _chunked_loss(
    head: Callable[[Tensor], Tensor], hidden: Tensor, weight: Tensor, labels: Tensor, groups: Groups | None
) -> tuple[Tensor, Tensor | None]:
    """`HeadLoss` of the model's own ``head``, which reads its weight itself."""

    def one_chunk(hidden: Tensor, labels: Tensor, start: int) -> tuple[Tensor, Tensor | None]:
        logits = head(hidden).float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        if groups is None:
            return loss, None
        return loss, groups.sums(F.cross_entropy(logits.detach(), labels, reduction="none"), start=start)

    rows = rows_at_once(hidden.device, vocabulary=weight.shape[0])
    # Without any target there is still one chunk, of no rows: every rank's head must have a gradient, or it would
    # not take part in the reduction that the other ranks wait in.
    chunks = zip(hidden.split(rows), labels.split(rows), range(0, len(hidden) + 1, rows), strict=False)
    pairs = [checkpoint(one_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    sums = None if groups is None else torch.stack([sums for _, sums in pairs]).sum(0)
    return torch.stack([loss for loss, _ in pairs]).sum(), sums
