"""The model of several parts (text, images, …) whose text part is trained: names of the one and of the other."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, eq=False)
class Whole:
    """The model of several parts that a model is the text part of; see `fsdp2kit.weights.record.Weights.whole`."""

    model: PreTrainedModel
    """On meta, without adapters; its text part has the config that is trained."""
    pairs: tuple[tuple[str, str], ...]
    """The decoder and the head: names in the text part's model, and in the whole."""
    config: PretrainedConfig
    """As the checkpoint has it."""

    def outer(self, name: str) -> str | None:
        """A tensor's or a module's name in the whole, by its name in the text part; None where it has none."""
        return next((there + name[len(own) :] for own, there in self.pairs if f"{name}.".startswith(f"{own}.")), None)

    def inner(self, name: str) -> str | None:
        """The inverse of `outer`; None for another part's tensor."""
        return next(
            (own + name[len(there) :] for own, there in self.pairs if f"{name}.".startswith(f"{there}.")), None
        )
