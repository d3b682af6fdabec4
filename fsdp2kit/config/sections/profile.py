"""[profile]: traces of a few steps."""

from __future__ import annotations

from pydantic import PositiveInt

from fsdp2kit.config.section import Section


class ProfileConfig(Section):
    """A torch profiler trace of a few steps, one file per rank, in `trace/` of the run directory.

    SIGUSR2, or a file `profile-now` in the run directory, asks for one at any time, in `trace/step-N/`.
    """

    enabled: bool = False
    """Write a trace of steps planned in advance."""
    start_step: PositiveInt = 3
    """First step that is traced, if planned."""
    steps: PositiveInt = 2
    """How many steps are traced, planned or asked for."""
    memory: bool = False
    """Also write a CUDA memory snapshot of the planned steps; those asked for have one anyway."""
