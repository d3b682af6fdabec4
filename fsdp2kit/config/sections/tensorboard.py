"""[tensorboard]: TensorBoard's event files."""

from __future__ import annotations

from typing import Any

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section
from fsdp2kit.errors import check_installed


class TensorBoardConfig(Section):
    """TensorBoard's event files, in `tensorboard/` of the run directory."""

    enabled: bool = False
    """Write them. Needs the extra `tensorboard`."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        if self.enabled:
            check_installed("tensorboard", where="tensorboard.enabled")
