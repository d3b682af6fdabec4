"""Where documents begin in a micro-batch, for layers that carry a state along the sequence.

A convolution needs the k − 1 tokens before each token, a scan everything before it, of the same document alone. Both
come here as indices, made on the host once for a micro-batch: documents are laid out so that no function of the model
needs to know of borders.

* A convolution: all documents one after the other, k − 1 places before each. There stand zeros, as at the beginning
  of a sequence, or, where a document goes on from another rank's chunk, the tokens before it.
* A scan: documents of about the same length as the rows of a batch, filled up at the end. A scan is causal, so what
  stands after a document changes nothing in it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fsdp2kit.job.distributed import to_device
from fsdp2kit.parallel.context_parallel.layout import Method, chunks_of

_STEP = 64
"""Documents whose lengths round up to the same multiple share a batch: scans work in chunks of so many tokens."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Borders:
    """The documents of a micro-batch's whole rows, and the chunks of these that this rank holds.

    An object, not a bare dict: FSDP hands it through the model as it is.
    """

    starts: Sequence[Sequence[int]]
    """Per row, where documents begin and the row's length (`segments.document_starts`)."""
    device: torch.device
    method: Method | None = None
    rank: int = 0
    cp: int = 1
    _convolutions: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def are_rows(self) -> bool:
        """Whether every row is one document."""
        return all(len(row) == 2 for row in self.starts)

    @property
    def chunks(self) -> int:
        """How many chunks of a row each rank holds."""
        return len(self._chunks(self.rank))

    def _chunks(self, rank: int) -> list[range]:
        return chunks_of(rank, cp=self.cp, length=self.starts[0][-1], method=self.method)

    def convolution(self, history: int) -> tuple[Tensor, Tensor]:
        """Indices for a convolution that sees ``history`` tokens before its own.

        Returns:
            ``[L]`` and ``[B·s]``, int64. The first says where each place of the laid-out documents is read from: 0 is
            a zero, then for each row come the last ``history`` tokens of every chunk, rank after rank (with context
            parallelism), then the rank's own tokens, row after row. The second says where each token's result lies.
        """
        if history not in self._convolutions:
            found = self._lay_out(history)
            self._convolutions[history] = (to_device(found[0], self.device), to_device(found[1], self.device))
        return self._convolutions[history]

    def _lay_out(self, history: int) -> tuple[Tensor, Tensor]:
        chunks = self._chunks(self.rank)
        held = sum(map(len, chunks))
        size = len(chunks[0])
        tails = self.cp * len(chunks) * history if self.cp > 1 else 0  # of one row
        own = 1 + len(self.starts) * tails
        places: dict[int, int] = {}  # of a chunk's tail among those of its row
        if tails:
            for number, chunk in enumerate(chunk for rank in range(self.cp) for chunk in self._chunks(rank)):
                places[chunk.start // size] = number * history
        read = []
        written = []
        at = 0
        for row, borders in enumerate(self.starts):
            offset = own + row * held
            for chunk in chunks:
                for start, stop in itertools.pairwise(borders):
                    first = max(start, chunk.start)
                    last = min(stop, chunk.stop)
                    if first >= last:
                        continue
                    before = [0] * history
                    for back in range(1, min(history, first - start) + 1):  # in the chunk before this one
                        number, within = divmod(first - back, size)
                        before[-back] = 1 + row * tails + places[number] + within - (size - history)
                    own_index = torch.arange(offset + first - chunk.start, offset + last - chunk.start)
                    read += [torch.tensor(before, dtype=torch.int64), own_index]
                    written.append(torch.arange(at + history, at + history + last - first))
                    at += history + last - first
                offset += len(chunk)
        return torch.cat(read), torch.cat(written)

    @functools.cached_property
    def batches(self) -> tuple[list[Tensor], Tensor]:
        """Documents of whole rows in batches, for a scan.

        Returns:
            For each batch ``[n, L]``, the indices of its documents' tokens in the flattened rows; a shorter document
            ends with its last token repeated. And ``[B·S]``: where each token's result lies in the flattened batches,
            one after the other. int64.
        """
        by_length: dict[int, list[range]] = {}
        for row, borders in enumerate(self.starts):
            for start, stop in itertools.pairwise(borders):
                document = range(row * borders[-1] + start, row * borders[-1] + stop)
                by_length.setdefault(-(-len(document) // _STEP), []).append(document)
        places = torch.empty(sum(borders[-1] for borders in self.starts), dtype=torch.int64)
        indices = []
        at = 0
        for _, documents in sorted(by_length.items()):
            longest = max(map(len, documents))
            steps = torch.arange(longest)
            index = torch.empty((len(documents), longest), dtype=torch.int64)
            for number, document in enumerate(documents):
                index[number] = document.start + steps.clamp(max=len(document) - 1)
                places[document.start : document.stop] = at + steps[: len(document)]
                at += longest
            indices.append(to_device(index, self.device))
        return indices, to_device(places, self.device)

    @functools.cached_property
    def offsets(self) -> Tensor:
        """Where documents begin in the flattened rows, and the number of tokens: ``[N + 1]`` int64."""
        length = self.starts[0][-1]
        found = [row * length + start for row, borders in enumerate(self.starts) for start in borders[:-1]]
        return to_device(torch.tensor([*found, len(self.starts) * length]), self.device)

    @functools.cached_property
    def numbers(self) -> Tensor:
        """Each token's document, counted from 0 in every row: ``[B, S]`` int32."""
        lengths = [torch.tensor(borders).diff() for borders in self.starts]
        rows = [torch.repeat_interleave(torch.arange(len(each)), each) for each in lengths]
        return to_device(torch.stack(rows).to(torch.int32), self.device)
