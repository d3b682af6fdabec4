"""[eval]: held-out loss, and what the model answers after each evaluation."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import InputPath, Section
from fsdp2kit.config.sections.data import DataPathConfig, check_rows

Message = Annotated[dict[Literal["role", "content"], str], Field(min_length=2)]
"""A message of a conversation: whose it is, as the chat template calls them, and its text."""


class EvalConfig(Section):
    """Held-out loss and perplexity, over all sets and of each."""

    every: NonNegativeInt = 0
    """Evaluate every n steps and at the end; 0: never."""
    path: InputPath | None = None
    """Held-out data in the training data's format. Default: `data.path`, with another `split`."""
    name: str | None = None
    """Configuration of `path`, like `data.name`. Default: without `path`, that of the training data."""
    split: Annotated[float, Field(gt=0, lt=1)] | PositiveInt | str = "train"
    """A split like `data.split`; or a share (`0.02`) or number (`500`) of rows that are held out of the training data.
    Which ones, their content decides: copies of a row stay together, on any mesh and in any order."""
    sets: dict[str, DataPathConfig] = {}
    """Named held-out sets, instead of or besides `path`: `[eval.sets.code]`, with `path`, `split`, `format`."""
    steps: PositiveInt | None = None
    """Global batches per evaluation and set. Default: the whole set."""
    patience: PositiveInt | None = None
    """Stop after this many evaluations in a row without a lower eval_loss. Default: train to the end."""
    min_delta: NonNegativeFloat = 0.0
    """How much lower than the best so far eval_loss must be to count as lower."""
    keep_best: bool | None = None
    """Write a checkpoint whenever eval_loss is the lowest so far, and keep it besides the newest ones; the end exports
    it (`checkpoint.export`). Default: with `patience`."""
    prompts: list[str | Annotated[list[Message], Field(min_length=1)]] = []
    """What the model answers after each evaluation, on the console, into `samples.jsonl` and wandb: a user's message,
    or a list of messages like `[{ role = "system", content = "Be brief." }, { role = "user", content = "Hello" }]`."""
    max_new_tokens: PositiveInt = 64
    """Most tokens of such an answer. Each takes a forward pass without a cache."""

    @property
    def configuration(self) -> str | None:
        """The configuration of the set that `path` names."""
        return self.name

    @property
    def keeps_best(self) -> bool:
        """`keep_best`, or its default."""
        return self.patience is not None if self.keep_best is None else self.keep_best

    def check(self, config: Any, sizes: MeshSizes) -> None:
        super().check(config, sizes)
        check_rows("eval.path", self.path)
        for name, part in self.sets.items():
            check_rows(f"eval.sets.{name}.path", part.path)
