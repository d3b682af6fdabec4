"""The loss on the model's own output head, without ever holding all logits.

At a vocabulary of 128k, the logits of 16k tokens are 8 GiB in float32, and their gradient as much again. The
linear head and the cross-entropy are therefore computed together (`linear_cross_entropy`). Tokens without a target are
left out altogether.

Where logits are more than ``hidden @ weight.T`` (scaling, soft-capping, a bias; see `Traits`), the model's own forward
is run on the hidden states, in chunks, under checkpointing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from fsdp2kit.config.schema import TrainingConfig
from fsdp2kit.errors import UserError
from fsdp2kit.model.inspect import Traits, backbone_name, inspect_model
from fsdp2kit.model.liger import check_liger
from fsdp2kit.model.linear_cross_entropy import linear_log_probs, linear_loss, pick_log_probs, rows_at_once

IGNORE = -100
"""Label of a token without a target, as everywhere in torch and transformers."""

LossKernel = Literal["chunked", "torch", "liger", "own_head"]
"""What computes the loss; "own_head" is the model's own forward, in chunks."""

_KEY = "model.loss_kernel"


@dataclass(frozen=True)
class LossChoice:
    """What computes a model's loss; `choose_loss` decides it once."""

    kernel: LossKernel
    reason: str

    def __str__(self) -> str:
        name = "the model's own head, in chunks" if self.kernel == "own_head" else self.kernel
        return f"loss: {name} ({self.reason})"


def choose_loss(
    config: TrainingConfig, model: PreTrainedModel, *, device: torch.device | None, traits: Traits
) -> LossChoice:
    """What ``model.loss_kernel`` says. "auto" is our chunks: nothing else was faster where it was measured.

    Args:
        device: where it will train; None: not known here.

    Raises:
        UserError: an explicit "torch" or "liger" that cannot be had here, for this model, dtype or data.
    """
    wanted, is_linear = config.model.loss_kernel, traits.linear_head
    if wanted in ("torch", "liger"):
        _check_kernel(config, model, device=device, is_linear=is_linear)
        rounds = wanted == "torch" and config.fsdp.param_dtype == "bfloat16"
        return LossChoice(wanted, f"{_KEY}; it adds up the loss in bfloat16" if rounds else _KEY)
    if not is_linear:
        return LossChoice("own_head", "its logits are more than hidden @ weightᵀ")
    if wanted == "chunked":
        return LossChoice("chunked", _KEY)
    on_cpu = device is None or device.type == "cpu"
    why = "none faster was found on a CPU" if on_cpu else f"the others are not measured on a GPU; {_KEY} picks one"
    return LossChoice("chunked", f"auto: {why}")


def _check_kernel(
    config: TrainingConfig, model: PreTrainedModel, *, device: torch.device | None, is_linear: bool
) -> None:
    """Refuse torch's or Liger's kernel where it cannot be had, or computes something else."""
    wanted, todo = config.model.loss_kernel, "use 'chunked'"
    if wanted == "liger" and device is not None:
        check_liger(device, key=_KEY)
    what = None
    if wanted == "torch" and not hasattr(F, "linear_cross_entropy"):
        what = f"'torch' with torch {torch.__version__}, which has no linear_cross_entropy"
        todo = "use torch 2.13 or later, or 'chunked'"
    elif config.data.sources:
        what = f"{wanted!r} with data.sources, each of whose losses it cannot tell"
    elif not is_linear:
        what = f"{wanted!r} with {type(model).__name__}, whose logits are more than hidden @ weightᵀ"
        todo = "use 'auto', which runs the model's own head in chunks"
    if what is not None:
        raise UserError(_KEY, what, todo)


def select_supervised(labels: Tensor) -> Tensor:
    """Flat indices ``[N]`` of the tokens of ``labels`` ``[B, S]`` that have a target.

    Call it while the labels are still on the host: on a CUDA tensor it would synchronise the device.
    """
    return (labels.flatten() != IGNORE).nonzero().squeeze(1)


class HeadInputs(NamedTuple):
    """What ``on_head`` calls a function with, while the parameters that ``logits`` reads are gathered."""

    hidden: Tensor
    """``[N, H]``: the base model's last hidden states of the tokens that have a target."""
    labels: Tensor
    """int64 ``[N]``: these targets."""
    logits: Callable[[Tensor], Tensor]
    """From hidden states ``[n, H]`` to the model's own logits ``[n, V]``; for a few rows at a time."""
    parameters: tuple[Tensor, ...]
    """Those of the parameters that ``logits`` may read which are trained."""
    weight: Tensor
    """``[V, H]``: the head's."""


def attach_loss(model: PreTrainedModel, *, kernel: LossKernel | None = None) -> nn.Module:
    """Give ``model`` three methods, and return the module whose ``on_head`` reads the head's parameters.

    ``model.loss_sum(input_ids, labels, index=None, groups=None, num_groups=0, **inputs)`` runs the base model and
    returns the summed cross-entropy (float32 scalar). ``labels`` ``[B, S]`` are already shifted; ``index`` is
    `select_supervised`'s. With ``groups``, int64 ``[N]`` in ``[0, num_groups)`` for each target of ``index``, it
    returns that scalar and the detached sum of each group, float64 ``[num_groups]``.

    ``model.token_log_probs(input_ids, labels, index=None, temperature=1.0, **inputs)`` returns each target's
    log-probability, differentiable, and the entropy of its distribution (detached, in nats), float32 ``[N]``.

    ``model.on_head(function, input_ids, labels, index=None, **inputs)`` returns ``function(HeadInputs)``, for what
    needs the distributions themselves. The other two are made of it.

    An untied head gets an ``on_head`` of its own, so that as an FSDP unit its parameters are gathered around exactly
    that call. Register both with ``register_fsdp_forward_method``.

    Args:
        model: a transformers causal language model.
        kernel: what computes it, as `choose_loss` says; all but "own_head" take logits to be ``hidden @ weightᵀ``. By
            default "chunked", or "own_head" where a tiny twin's logits are more than that.
    """
    head: Any = model.get_output_embeddings()
    kernel = kernel or ("chunked" if inspect_model(model).linear_head else "own_head")
    backbone, tied = backbone_name(model), head.weight is model.get_input_embeddings().weight
    own, read = None, [head]
    if kernel == "own_head":  # some models have layers between their base and the head
        own = _own_head(model, head)
        read = [*(module for name, module in model.named_children() if name != backbone), head]
    methods = _Methods(head, tied, backbone, kernel, own, read)
    for name in ("loss_sum", "token_log_probs", "on_head"):
        setattr(model, name, MethodType(getattr(methods, name), model))
    if not tied:
        head.on_head = MethodType(methods.call, head)
    return model if tied else head


@dataclass(frozen=True, eq=False)
class _Methods:
    """What `attach_loss` adds: methods of the model, and ``call``, which is an untied head's ``on_head``."""

    head: Any
    tied: bool
    backbone: str
    kernel: LossKernel
    own: Callable[[Tensor], Tensor] | None
    """The model's own head, where its logits are more than ``hidden @ weightᵀ``."""
    read: list[nn.Module]
    """Whose parameters logits are made with."""

    def loss_sum(
        self, model: Any, *batch: Tensor, groups: Tensor | None = None, num_groups: int = 0, **inputs: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        def compute(head: HeadInputs) -> tuple[Tensor, Tensor | None]:
            if self.kernel != "own_head":
                return linear_loss(self.kernel, head.hidden, head.weight, head.labels)
            [each] = _in_chunks(head, lambda logits, labels: [F.cross_entropy(logits, labels, reduction="none")])
            return each.sum(), each.detach()

        loss, losses = model.on_head(compute, *batch, **inputs)
        if groups is None:
            return loss
        if losses is None:
            raise ValueError(f"the loss kernel {self.kernel!r} gives no losses by group; use 'chunked'")
        # In float64, since `index_add` adds thousands of tokens one after the other.
        by_group = torch.zeros(num_groups, dtype=torch.float64, device=loss.device)
        return loss, by_group.index_add(0, groups, losses.double())

    def token_log_probs(
        self, model: Any, *batch: Tensor, temperature: float = 1.0, **inputs: Any
    ) -> tuple[Tensor, Tensor]:
        def compute(head: HeadInputs) -> tuple[Tensor, ...]:
            if self.kernel != "own_head":
                return linear_log_probs(head.hidden, head.weight, head.labels, temperature)
            return _in_chunks(head, lambda logits, labels: pick_log_probs(logits / temperature, labels))

        return model.on_head(compute, *batch, **inputs)

    def on_head(
        self,
        model: Any,
        function: Callable[[HeadInputs], Any],
        input_ids: Tensor,
        labels: Tensor,
        index: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        selected = _run_base(getattr(model, self.backbone), input_ids, labels, index, inputs)
        if self.tied:
            return self.call(self.head, function, *selected)
        return self.head.on_head(function, *selected)  # FSDP gathers its parameters around that

    def call(self, head: Any, function: Callable[[HeadInputs], Any], hidden: Tensor, labels: Tensor) -> Any:
        weight = head.weight
        logits = self.own or partial(F.linear, weight=weight)
        parameters = dict.fromkeys(p for module in self.read for p in module.parameters() if p.requires_grad)
        # Units may return another dtype than they compute in.
        return function(HeadInputs(hidden.to(weight.dtype), labels, logits, tuple(parameters), weight))


def _run_base(
    base: Any, input_ids: Tensor, labels: Tensor, index: Tensor | None, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The base model's last hidden states ``[N, H]`` of the tokens that have a target, and these targets ``[N]``.

    All tokens' states end with this call: the head need not hold them too.
    """
    # A cache would be built by default, and with it packed documents would see each other.
    hidden = base(input_ids=input_ids, use_cache=False, **inputs)[0]
    index = select_supervised(labels) if index is None else index
    return hidden.flatten(0, 1).index_select(0, index), labels.flatten().index_select(0, index)


def _in_chunks(head: HeadInputs, compute: Callable[[Tensor, Tensor], Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """What ``compute`` makes of logits ``[n, V]``, float32, and labels ``[n]``, for all tokens: ``[N]`` each."""

    def one_chunk(hidden: Tensor, labels: Tensor) -> Sequence[Tensor]:
        return compute(head.logits(hidden).float(), labels)

    rows = rows_at_once(head.hidden.device, vocabulary=len(head.weight))
    # Without any target there is still one chunk, of no rows: every rank's head must have a gradient, or it would
    # not take part in the reduction that the other ranks wait in.
    chunks = zip(head.hidden.split(rows), head.labels.split(rows), strict=True)
    parts = [checkpoint(one_chunk, *chunk, use_reentrant=False) for chunk in chunks]
    return tuple(map(torch.cat, zip(*parts, strict=True)))


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

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:  # some heads give input_ids by position
        return _HiddenOnly(last_hidden_state=inputs_embeds)


class _Projection(nn.Module):
    """The head's matmul without the head's FSDP hooks: we are inside its unit already."""

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
