"""A checkpoint that an export is made from, opened once: `open_source`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fsdp2kit.checkpoint.adapter import holds_adapter
from fsdp2kit.checkpoint.manifest import Manifest, check_sizes, no_manifest, open_manifest
from fsdp2kit.checkpoint.reader import SafeReader
from fsdp2kit.checkpoint.store import is_complete
from fsdp2kit.files.remote import on_disk
from fsdp2kit.model.build import model_on_meta


@dataclass(frozen=True, eq=False)
class CheckpointSource:
    """What is known of a checkpoint before a tensor is read."""

    checkpoint: Path
    manifest: Manifest | None
    """None for a checkpoint that is not ours."""
    config_dir: Path
    """Config, tokenizer, …, on a disk."""
    is_adapter: bool
    """Whether it holds adapters instead of a model."""
    model: PreTrainedModel | None
    """The model of the config, on meta; None for one that transformers does not know itself."""
    reader: SafeReader
    trusts_code: bool = False
    """Whether the model's own Python code is run."""

    @property
    def environment(self) -> dict[str, Any]:
        """The manifest's; empty without one."""
        return self.manifest.environment if self.manifest else {}


@contextlib.contextmanager
def open_source(
    checkpoint: Path, config_dir: Path | None, *, trust_remote_code: bool = False
) -> Iterator[CheckpointSource]:
    """Open a checkpoint for an export; while this lasts, no process deletes it. No collective.

    Args:
        config_dir: None: the checkpoint's own.
        trust_remote_code: run the Python code that the config names.

    Raises:
        UserError: the checkpoint is incomplete, a file has another size than its manifest states, or no config can be
            read.
    """
    with contextlib.ExitStack() as opened:
        manifest: Manifest | None = None
        if is_complete(checkpoint) or not checkpoint.is_dir():
            manifest = opened.enter_context(open_manifest(checkpoint))
            check_sizes(checkpoint, manifest)
        elif config_dir is None:
            todo = "give a complete checkpoint, or for one written by torch alone --config HF_DIR"
            raise no_manifest(checkpoint, todo)
        config_dir = config_dir or opened.enter_context(on_disk(checkpoint / "hf"))
        is_adapter = holds_adapter(config_dir)
        model = model_on_meta(config_dir, trust_remote_code=trust_remote_code)
        reader = SafeReader(checkpoint)
        yield CheckpointSource(checkpoint, manifest, config_dir, is_adapter, model, reader, trust_remote_code)
