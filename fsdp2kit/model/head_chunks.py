"""What a loss makes of a head's logits, a few hundred tokens at a time, and its gradients.

At a vocabulary of 128k, the logits of 16k tokens are 8 GiB in float32, and their gradient as much again. `over_chunks`
holds those of one chunk alone. A loss is a function from a chunk's logits to values and their slope (`OfChunk`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fsdp2kit.torch_compat import add_float32_product, float32_product

# Bytes of float32 logits alive at once. CUDA wants larger matmuls than a CPU's caches do.
_CHUNK_BYTES = {"cpu": 128 * 2**20, "cuda": 512 * 2**20}


def rows_at_once(device: torch.device, *, vocabulary: int, narrow: bool = False) -> int:
    """Tokens in a chunk: as many as the device's share of memory for float32 logits holds, one at least.

    Args:
        narrow: whether `Kernels.loss` is used. Its 16-bit logits and their gradient take 4 bytes a logit. Float32
            logits and their gradient in 16 bits take 6, so the same memory holds 3/2 as many rows.
    """
    share = _CHUNK_BYTES.get(device.type, _CHUNK_BYTES["cuda"])
    if narrow:
        share = share * 3 // 2
    return max(1, share // (4 * vocabulary))


class Kernels(NamedTuple):
    """What a device has in place of `over_chunks`' own operations; by default nothing."""

    loss: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Takes 16-bit logits ``[n, V]`` with n ≥ 2 and labels ``[n]``. Returns what `cross_entropy` returns, with the
    gradient in the logits' dtype."""
    adds_products: Callable[[Tensor, Tensor], bool] | None = None
    """Whether `float32_product` and `add_float32_product` take a chunk's gradient of the logits ``[n, V]`` and its
    hidden states ``[n, H]``."""


PLAIN = Kernels()


class OfChunk(Protocol):
    """What is computed of the logits of n tokens. It runs without a graph."""

    def __call__(
        self, logits: Tensor, labels: Tensor, rows: slice, /, *, wants_slope: bool, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Values, float32 ``[n, k]``, and the gradient of the first one with respect to the logits.

        Args:
            logits: float32 ``[n, V]``; they may be overwritten.
            labels: int64 ``[n]``.
            rows: which tokens these are.
            wants_slope: whether to return that gradient, float32 ``[n, V]``; otherwise it is None.
            factors: float32 ``[n, 1]``, what each token's gradient is to be multiplied by; None: 1.
        """
        ...


def cross_entropy(
    logits: Tensor, labels: Tensor, _rows: slice, *, wants_slope: bool, factors: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The `OfChunk` of −log softmax(logits)[label]: ``[n, 1]``."""
    target = labels[:, None]
    wanted = logits.gather(1, target)
    peak = logits.amax(dim=-1, keepdim=True)
    # Softmax and its normalizer in place, with one exponential an element: logsumexp would take another.
    probabilities = logits.sub_(peak).exp_()
    total = probabilities.sum(dim=-1, keepdim=True)
    losses = peak + total.log() - wanted
    if not wants_slope:
        return losses, None
    slope = probabilities.div_(total).scatter_add_(1, target, -torch.ones_like(target, dtype=torch.float32))
    return losses, slope if factors is None else slope.mul_(factors)


def cross_entropy_and_entropy(
    logits: Tensor,
    labels: Tensor,
    _rows: slice,
    *,
    wants_slope: bool,
    factors: Tensor | None = None,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """The `OfChunk` of −log p[label] and the entropy in nats, where p is softmax(logits ÷ temperature): ``[n, 2]``.

    For values that are not summed: backward alone asks for their slope, and then for no values.
    """
    logits = logits.div_(temperature)
    target = labels[:, None]
    if wants_slope:
        assert factors is not None, "these values are not summed, so only backward asks for a slope"
        scale = factors / temperature
        return logits.new_empty(len(logits), 0), logits.softmax(dim=-1).mul_(scale).scatter_add_(1, target, -scale)
    log_softmax = logits.log_softmax(dim=-1)
    # A token of probability 0 adds 0 · −inf.
    entropies = -log_softmax.exp().mul_(log_softmax).nansum(dim=-1)
    return torch.stack([-log_softmax.gather(1, target).squeeze(1), entropies], dim=1), None


def over_chunks(
    of_chunk: OfChunk,
    hidden: Tensor,
    labels: Tensor,
    parameters: Sequence[Tensor],
    *,
    rows: int,
    own: Callable[[Tensor], Tensor] | None = None,
    summed: bool = True,
    kernels: Kernels = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Run ``of_chunk`` on the logits of N tokens, chunk by chunk.

    Args:
        hidden: ``[N, H]``; N may be 0.
        labels: int64 ``[N]`` in ``[0, V)``; there is no ignored label.
        parameters: the head's weight ``[V, H]``, of hidden's dtype; or what ``own`` reads and what is trained.
        rows: tokens in a chunk (`rows_at_once`).
        own: from hidden states ``[n, H]`` to logits ``[n, V]``. By default logits are ``hidden @ weightᵀ``.
        summed: whether the first value is summed. Its gradients are then computed in the same pass, and backward only
            scales them. Otherwise each token has a factor that only backward knows: it computes the logits again.
        kernels: what to use where logits are ``hidden @ weightᵀ``. ``kernels.loss`` takes the place of ``of_chunk``
            wherever gradients without factors are computed.

    Returns:
        The sum of the first value, a float32 scalar, or that value of each token, float32 ``[N]``: differentiable in
        ``hidden`` and ``parameters``. Then all values, detached, float32 ``[N, k]``.
    """
    # Asked here: within an autograd function's forward it is always off.
    how = _How(of_chunk, rows, own, summed, kernels, is_grad_enabled=torch.is_grad_enabled())
    return _OverChunks.apply(how, hidden, labels, *parameters)


class _How(NamedTuple):
    """The arguments of `over_chunks` that are not tensors."""

    of_chunk: OfChunk
    rows: int
    own: Callable[[Tensor], Tensor] | None
    summed: bool
    kernels: Kernels
    is_grad_enabled: bool


class _OverChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _How, hidden: Tensor, labels: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        ctx.how = how
        _, for_hidden, _, *for_parameters = ctx.needs_input_grad
        ctx.trained = (for_hidden, *for_parameters)
        ctx.dtypes = [tensor.dtype for tensor in (hidden, *parameters)]
        wants_slope = how.summed and how.is_grad_enabled and any(ctx.trained)
        one_pass = _Pass(how, hidden, labels, parameters, ctx.trained, wants_slope=wants_slope)
        values = one_pass.run()
        ctx.save_for_backward(*(one_pass.gradients if how.summed else (hidden, labels, *parameters)))
        # Else backward is handed zeros for the output that has no gradient.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(values)
        return values[:, 0].sum() if how.summed else values[:, 0].clone(), values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.how.summed:
            # In place: a second gradient of the head's size would be gigabytes. A second backward raises.
            gradients = [one if one is None else one.mul_(grads[0]) for one in ctx.saved_tensors]
        else:
            hidden, labels, *parameters = ctx.saved_tensors
            factors = grads[0][:, None]
            again = _Pass(ctx.how, hidden, labels, parameters, ctx.trained, wants_slope=True, factors=factors)
            again.run()
            gradients = again.gradients
        cast = zip(gradients, ctx.dtypes, strict=True)
        of_hidden, *of_parameters = (one if one is None else one.to(dtype) for one, dtype in cast)
        return None, of_hidden, None, *of_parameters


class _Pass:
    """One pass over all chunks: their values, and where wanted the gradients of hidden states and parameters.

    Args:
        trained: whether hidden states, and each parameter, want a gradient.
        factors: float32 ``[N, 1]``, what each token's slope is multiplied by; None: 1.
    """

    def __init__(
        self,
        how: _How,
        hidden: Tensor,
        labels: Tensor,
        parameters: Sequence[Tensor],
        trained: Sequence[bool],
        *,
        wants_slope: bool,
        factors: Tensor | None = None,
    ) -> None:
        self.how = how
        self.hidden = hidden
        self.labels = labels
        self.parameters = parameters
        self.trained = trained
        self.wants_slope = wants_slope
        self.factors = factors
        self.gradients: list[Tensor | None] = [None] * len(trained)
        """For hidden states and each parameter; None where none is wanted, or ``own`` does not read the parameter."""
        if wants_slope and trained[0]:
            self.gradients[0] = torch.empty_like(hidden)

    def run(self) -> Tensor:
        """All values, float32 ``[N, k]``."""
        one_chunk = self._linear if self.how.own is None else partial(self._own, self.how.own)
        # Without any target there is still one chunk, of no rows: every rank's head must have a gradient, or it would
        # not take part in the reduction that the other ranks wait in.
        starts = range(0, max(len(self.hidden), 1), self.how.rows)
        return torch.cat([one_chunk(slice(start, start + self.how.rows)) for start in starts])

    def _linear(self, part: slice) -> Tensor:
        """A chunk of a head whose logits are ``hidden @ weightᵀ``."""
        chunk = self.hidden[part]
        weight = self.parameters[0]
        values, slope = self._loss_of_linear(chunk, weight, part)
        if slope is None:
            return values
        if self.gradients[0] is not None:
            torch.mm(slope, weight, out=self.gradients[0][part])
        if self.trained[1]:
            self.gradients[1] = self._with_product(self.gradients[1], slope, chunk)
        return values

    def _loss_of_linear(self, chunk: Tensor, weight: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        """A chunk's values, and the gradient of the first one with respect to the logits, of the weight's dtype."""
        kernel = self.how.kernels.loss
        # `torch.compile` makes other code for one row.
        if kernel is not None and self.wants_slope and self.factors is None and len(chunk) > 1:
            return kernel(F.linear(chunk, weight), self.labels[part])
        values, slope = self._ask(F.linear(chunk, weight).float(), part)
        return values, None if slope is None else slope.to(weight.dtype)

    def _with_product(self, total: Tensor | None, slope: Tensor, chunk: Tensor) -> Tensor:
        """``total``, the weight's gradient of the chunks before, and with it this chunk's ``slopeᵀ @ chunk``."""
        adds_products = self.how.kernels.adds_products
        if self._is_one_of_several and adds_products is not None and adds_products(slope, chunk):
            if total is None:
                return float32_product(slope.t(), chunk)
            return add_float32_product(total, slope.t(), chunk)
        if total is None:
            return self._widened(slope.t() @ chunk)
        if slope.dtype == torch.float32:
            return total.addmm_(slope.t(), chunk)
        return total.add_(slope.t() @ chunk)

    def _own(self, own: Callable[[Tensor], Tensor], part: slice) -> Tensor:
        """A chunk of a head that computes its logits itself: autograd knows how."""
        chunk = self.hidden[part].detach().requires_grad_(self.wants_slope)
        with torch.set_grad_enabled(self.wants_slope):
            logits = own(chunk)
        values, slope = self._ask(logits.detach().to(torch.float32, copy=True), part)
        if slope is None:
            return values
        found = torch.autograd.grad(logits, [chunk, *self.parameters], slope.to(logits.dtype), allow_unused=True)
        if self.gradients[0] is not None and found[0] is not None:
            self.gradients[0][part] = found[0]
        for at, gradient in enumerate(found[1:], start=1):
            if gradient is None:
                continue
            if (total := self.gradients[at]) is None:
                self.gradients[at] = self._widened(gradient.contiguous())
            else:
                total.add_(gradient)
        return values

    def _ask(self, logits: Tensor, part: slice) -> tuple[Tensor, Tensor | None]:
        factors = None if self.factors is None else self.factors[part]
        return self.how.of_chunk(logits, self.labels[part], part, wants_slope=self.wants_slope, factors=factors)

    def _widened(self, gradient: Tensor) -> Tensor:
        """Chunks add up in float32: bfloat16 would lose the small contributions of dozens of them."""
        return gradient.float() if self._is_one_of_several else gradient

    @property
    def _is_one_of_several(self) -> bool:
        """Whether there is more than one chunk."""
        return len(self.hidden) > self.how.rows
