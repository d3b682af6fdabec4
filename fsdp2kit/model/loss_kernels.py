"""A CUDA device's faster ways to compute the loss in chunks. Each is compared with the plain way before it is used."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fsdp2kit.model.head_chunks import cross_entropy, rows_at_once
from fsdp2kit.model.trials import succeeds
from fsdp2kit.torch_compat import (
    add_float32_product,
    float32_product,
    has_float32_products,
    vary_in_rows,
)

Loss = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# A comparison takes little memory beside a chunk: it has this share of its rows, or this many words.
_PARTS = 64
_WORDS = 1024


def loss_and_slope(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """−log softmax(logits)[label], float32 ``[n, 1]``, and its gradient with respect to the logits, of their dtype.

    It is written to be compiled: the kernels read the logits as the matmul left them and write the gradient once.

    Args:
        logits: 16-bit ``[n, V]``; computed with in float32.
        labels: int64 ``[n]``.
    """
    target = labels[:, None]
    wide = logits.float()
    wanted = wide.gather(1, target)
    peak = wide.amax(dim=-1, keepdim=True)
    scale = (wide - peak).exp().sum(dim=-1, keepdim=True).log()
    losses = peak + scale - wanted
    words = torch.arange(logits.shape[1], device=logits.device)
    # If this used the exponentials above, the compiler might keep them, in float32.
    slope = (wide - peak - scale).exp() - (words == target).float()
    return losses, slope.to(logits.dtype)


class LossKernels:
    """The ways of one head.

    Each is tried on the first chunk that it could take. If it raises an error, or computes other numbers than the
    plain way, a warning says so and the head keeps the plain way. Ranks may decide differently: no collective depends
    on it.

    Args:
        compiles: whether the run compiles.
    """

    def __init__(self, *, compiles: bool = False) -> None:
        self.compiles = compiles
        self._compiled: Loss | None = None
        self._works: dict[tuple[str, torch.dtype], bool] = {}

    def compiled_loss(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> Loss | None:
        """`loss_and_slope`, compiled, for 16-bit logits on CUDA in a run that compiles; None: keep the plain way.

        Args:
            hidden: ``[N, H]``; weight: ``[V, H]``; labels: int64 ``[N]``.
        """
        if not self.compiles or not is_16_bits_on_cuda(hidden) or len(hidden) < 2:
            return None
        rows = rows_at_once(hidden.device, vocabulary=len(weight), narrow=True)
        trial = partial(self._losses_agree, hidden[:rows], weight, labels[:rows])
        return self._run if self._try("the compiled loss", hidden.dtype, trial) else None

    def adds_products(self, slope: Tensor, chunk: Tensor) -> bool:
        """Whether the head's gradient, ``slopeᵀ @ chunk`` of each chunk, is added up by the product itself.

        Args:
            slope: ``[n, V]``, the gradient of a chunk's logits; chunk: ``[n, H]``, its hidden states.
        """
        if not has_float32_products(slope):
            return False
        trial = partial(_products_agree, slope[:, :_WORDS], chunk)
        return self._try("the product that adds up the head's gradient", slope.dtype, trial)

    def _run(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self._compiled is None:
            # A reduction that is split over blocks reads the logits twice more.
            self._compiled = torch.compile(loss_and_slope, fullgraph=True, options={"split_reductions": False})
        # torch.compile makes other code for a view that begins elsewhere in its memory.
        labels = labels.clone()
        vary_in_rows(logits, labels)
        return self._compiled(logits, labels)

    @torch.no_grad()
    def _losses_agree(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> bool:
        """Whether the compiled loss and its gradient are those of `cross_entropy` on the same logits."""
        logits = F.linear(hidden, weight)
        losses, slope = self._run(logits, labels)
        rows = max(1, len(logits) // _PARTS)
        for start in range(0, len(logits), rows):
            part = slice(start, start + rows)
            expected, wide_slope = cross_entropy(logits[part].float(), labels[part], part, wants_slope=True)
            assert wide_slope is not None
            if not torch.allclose(losses[part], expected, rtol=1e-4, atol=1e-3, equal_nan=True):
                return False
            # bfloat16 has eight bits, so rounding changes a number by 2⁻⁹ of it at most.
            if not torch.allclose(slope[part].float(), wide_slope, rtol=2**-8, atol=1e-6, equal_nan=True):
                return False
        return True

    def _try(self, what: str, dtype: torch.dtype, trial: Callable[[], bool]) -> bool:
        """Whether ``trial`` returned True, the first time that this was asked."""
        key = what, dtype
        if key not in self._works:
            self._works[key] = succeeds(what, trial)
        return self._works[key]


def is_16_bits_on_cuda(tensor: Tensor) -> bool:
    """Whether logits of this tensor have 16 bits and are computed on CUDA."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16)


@torch.no_grad()
def _products_agree(slope: Tensor, chunk: Tensor) -> bool:
    """Whether a float32 product of 16-bit matrices, and one added to it, are what float32 matrices give."""
    expected = slope.t().float() @ chunk.float()
    total = float32_product(slope.t(), chunk)
    is_right = _is_near(total, expected)
    added = add_float32_product(total, slope.t(), chunk)
    return is_right and _is_near(added, 2 * expected)


def _is_near(found: Tensor, expected: Tensor) -> bool:
    """Whether no element is further off than sums in another order are."""
    largest = expected.nan_to_num().abs().amax().item()
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * largest, equal_nan=True)
