"""[checkpoint]: checkpoints and the Hugging Face export."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Duration, OutputPath, Section, may_be_hub_id, seconds_of
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import is_url

DType = Literal["float32", "bfloat16", "float16"]

# Default places of checkpoints and of the export, in the run directory.
CHECKPOINTS = "checkpoints"
EXPORT = "hf"


class CheckpointConfig(Section):
    """Checkpoints and the Hugging Face export."""

    dir: OutputPath | None = None
    """Where checkpoints are kept: a directory that all nodes share, relative to the working directory, or an fsspec
    URL (`s3://bucket/run`, `gs://…`) to which only one run at a time may save. Default: `checkpoints` in `run.dir`."""
    every: NonNegativeInt | Duration = "30m"
    """Save a checkpoint every n steps, or after a time ("30m", "2h", "90s"); 0: at the end only."""
    keep: PositiveInt = 2
    """How many of the newest checkpoints are kept."""
    keep_every: NonNegativeInt = 0
    """Checkpoints whose step is a multiple of this are never deleted; 0: no such rule."""
    async_save: bool = False
    """Save in the background: shards are copied to host memory during the next forward and backward pass, then written
    while training continues. A save that fails stops the run at its next step."""
    export_hf: Literal["final", "every", "never"] = "final"
    """Write a Hugging Face directory at the end, with every checkpoint, or never."""
    export: Literal["best", "last"] | None = None
    """Which checkpoint that is: the one with the lowest eval_loss so far, or the newest. Default: "best" with
    `eval.keep_best`, else "last"."""
    export_dir: OutputPath | None = None
    """Where the export goes: a directory, relative to the working directory, or an fsspec URL (`s3://bucket/model`).
    Default: `hf` in `run.dir`."""
    export_dtype: DType | None = None
    """Dtype of the export. Default: the source model's; for a model from a config, float32."""
    push_to_hub: str | None = None
    """A repository of the Hugging Face hub (`me/my-model`) to upload the final export to; a new one is private. An
    upload that fails is reported, and the run still succeeds."""

    @property
    def every_seconds(self) -> float | None:
        """Seconds between checkpoints; None where `every` counts steps."""
        return None if isinstance(self.every, int) else seconds_of(self.every)

    def most_at_once(self, steps: int | None, *, keeps_best: bool) -> int:
        """Most checkpoints at a time, with the one being written. Old ones are deleted when it is complete.

        Args:
            steps: `train.steps`.
            keeps_best: whether the best one is kept beside the newest.
        """
        most = self.keep + int(keeps_best) + 1
        if self.keep_every and steps:
            most += steps // self.keep_every
        if isinstance(self.every, int) and steps:  # and one at the end
            most = min(most, steps // (self.every or steps) + 1)
        return most

    def check(self, config: Any, sizes: MeshSizes) -> None:
        repository = self.push_to_hub
        key = "checkpoint.push_to_hub"
        if repository is None:
            return
        if not may_be_hub_id(repository):
            raise UserError(key, f"{repository!r} is no name of a repository", "write user/model, or model")
        if self.export_hf == "never":
            raise UserError(key, "nothing is exported", 'set checkpoint.export_hf = "final"')
        if self.export_dir and is_url(self.export_dir):
            raise UserError(key, f"{self.export_dir} is on no disk", "leave one of them out")
