"""Is this checkpoint whole? Answered from its files alone, without torch, a GPU or a process group."""

from __future__ import annotations

from pathlib import Path

from fsdp2kit.checkpoint.files import in_use
from fsdp2kit.checkpoint.manifest import MANIFEST, check_contents, read_manifest


def verify(checkpoint: Path) -> str:
    """Check the manifest, and the size and SHA-256 of every file; return one line that says what was found.

    Raises:
        UserError: the checkpoint is incomplete or damaged; the error names the file.
    """
    with in_use(checkpoint / MANIFEST):
        manifest = read_manifest(checkpoint)
        check_contents(checkpoint, manifest)
    size = sum(record.size for record in manifest.files.values())
    return f"{checkpoint}: whole: step {manifest.step}, {len(manifest.files)} files, {size / 2**30:.2f} GiB"
