"""[run]: where a run is kept, how it starts and when it stops."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.path_contents import Contents, check_contents, check_exists
from fsdp2kit.config.section import LocalPath, OutputPath, Section
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import is_url

# What to do about what lies at `resume`.
_INSTEAD: dict[Contents, str] = {
    "model": "set model.path to it: a run resumes from a checkpoint of its own",
    "run": "give one of its checkpoints, in '{path}/checkpoints/', or run.dir = '{path}'",
    "weights": "a run resumes from a checkpoint of its own; set model.path or model.weights",
}


class RunConfig(Section):
    """Where the run is kept, how it starts and when it stops."""

    dir: OutputPath = "runs/default"
    """Run directory, relative to the working directory: config, metrics, checkpoints, export."""
    seed: NonNegativeInt = 0
    """Seed of the random initialisation, of the data order and of any dropout."""
    resume: Literal["auto", "never"] | LocalPath = "auto"
    """"auto" (the newest complete checkpoint in `dir`, if any), "never", or the path of a checkpoint."""
    deterministic: bool = False
    """Use deterministic kernels on CUDA, so that runs repeat bit for bit (slower). A CPU run always does."""
    max_minutes: PositiveFloat | None = None
    """Stop this many minutes after the first step began: finish the step, write a checkpoint, exit 0."""
    timeout_minutes: Annotated[float, Field(ge=0.001, le=1e6)] = 30.0
    """Minutes that a collective may take before the job fails."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        super().check(config, sizes)
        check_contents("run.resume", self.resume, _INSTEAD)
        if os.path.isfile(self.dir):  # noqa: PTH113 (pathlib's raises where a folder may not be read)
            raise UserError("run.dir", f"{self.dir} is a file", "name a directory, which need not be there yet")
        if is_url(self.dir):
            todo = "name a directory, and set checkpoint.dir and checkpoint.export_dir to the URL"
            raise UserError("run.dir", f"{self.dir} is a URL, and a run directory lies on a disk", todo)
        check_exists("run.resume", self.resume, words=("auto", "never"))
