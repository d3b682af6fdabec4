"""A sharded model's tensors, read from the memory of all ranks: for each entry in turn, all ranks gather its tensors.

A rank holds no more than three tensors (or groups that transformers stores in other pieces) beside the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp2kit.job.distributed import sharded_like
from fsdp2kit.weights.transfer import Reader, WeightEntry


def gather(
    turn: Mapping[str, Sequence[WeightEntry]], tensors: Mapping[str, Tensor], mine: str | None
) -> Iterator[dict[str, Tensor]]:
    """The tensors of file ``mine``, one entry after the other: whole ones by name, on the CPU. Collective.

    Args:
        turn: the files that are written at the same time. All ranks go through the entries of all of them together.
        tensors: the model's, by name.
    """
    problem: Exception | None = None
    for number in range(max(len(entries) for entries in turn.values())):
        kept = None
        for file, entries in turn.items():
            # What is copied from files is read by the writer alone.
            if number < len(entries) and entries[number].directory is None:
                dtypes = {form.dtype for form in entries[number].forms.values()}
                # The writer casts to float16, since it looks whether that holds all values.
                dtype = dtypes.pop() if len(dtypes) == 1 and torch.float16 not in dtypes else None
                whole = {name: _whole(tensors[name], dtype) for name in entries[number].sources}
                if file == mine and problem is None:
                    try:
                        kept = {name: tensor.cpu() for name, tensor in whole.items()}
                    except Exception as error:  # no memory, say
                        problem = error
                del whole
        if kept is not None:
            yield kept
    if problem is not None:
        raise problem


def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A tensor that is sharded as a whole one, cast on its shards to ``dtype``, if there is one."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local().to(tensor.device_mesh.device_type, dtype or tensor.dtype)  # offloaded ones go there, too
    gathered = sharded_like(tensor, local)
    return gathered.full_tensor() if isinstance(gathered, DTensor) else gathered


class GatheredTensors(Reader):
    """The tensors of a file, read in the order of its entries.

    Args:
        groups: from `gather`.
    """

    def __init__(self, groups: Iterator[dict[str, Tensor]]) -> None:
        self._groups = groups
        self._held: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """A whole tensor; only once."""
        if name not in self._held:
            self._held = next(self._groups)
        return self._held.pop(name)
