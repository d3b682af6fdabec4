"""What ``--check`` tries of the places that a run writes to, without leaving anything there."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fsdp2kit.checkpoint.export_directory import ExportDirectory
from fsdp2kit.checkpoint.identity import changed_settings, check_same_run, describe_changes, settings_identity
from fsdp2kit.checkpoint.manifest import read_manifest
from fsdp2kit.checkpoint.store import CheckpointStore
from fsdp2kit.config import TrainingConfig
from fsdp2kit.config.sections.checkpoint import CHECKPOINTS, EXPORT
from fsdp2kit.errors import UserError
from fsdp2kit.files.remote import is_url


def try_places(config: TrainingConfig) -> list[str]:
    """Try ``run.dir``, ``checkpoint.dir`` and ``checkpoint.export_dir``, those of them that are no URLs.

    Returns:
        A line about the run directory: new, or the run that it holds; with what changed since its newest checkpoint.

    Raises:
        UserError: a file cannot be made there, or the export would replace what is not its own; or the newest
            checkpoint there is another run's, as far as the TOML tells.
    """
    section = config.checkpoint
    run_dir = Path(config.run.dir)
    _try_writing(run_dir, where="run.dir")
    root = run_dir / CHECKPOINTS
    if section.dir and not is_url(section.dir):
        root = Path(section.dir).expanduser()
        _try_writing(root, where="checkpoint.dir")
    if section.export_hf != "never" and not is_url(section.export_dir or ""):
        out = Path(section.export_dir).expanduser() if section.export_dir else run_dir / EXPORT
        _try_writing(out.parent, where="checkpoint.export_dir" if section.export_dir else "run.dir")
        export = ExportDirectory(out)
        if not is_url(section.dir or ""):
            export.check_apart(root)
        export.check_replaceable(read=[Path(path) for path in (config.model.path, config.model.adapter) if path])
    if is_url(section.dir or ""):
        return ["run.dir can be written; checkpoint.dir is remote, and was not tried"]
    return [_describe_run(config, root)]


def _try_writing(directory: Path, *, where: str) -> None:
    """Make a file without a name in a directory, or in the nearest one above it that exists."""
    place = directory.expanduser().absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        raise UserError(where, f"{directory} is a file, or lies under one", f"choose another {where}")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        what = f"{directory} cannot be written to ({place}: {error.strerror or error})"
        raise UserError(where, what, f"choose another {where}") from None


def _describe_run(config: TrainingConfig, root: Path) -> str:
    """A line about the checkpoint that a start would resume from."""
    resume = config.run.resume
    if resume == "never":
        return "run.dir can be written; run.resume = 'never': a start begins with step 0"
    if resume == "auto":
        checkpoint = _newest(root)
        if checkpoint is None:
            return "run.dir can be written, and has no checkpoint: a start begins with step 0"
    elif is_url(resume):
        return "run.dir can be written; run.resume is remote, and was not tried"
    else:
        checkpoint = Path(resume)
    manifest = read_manifest(checkpoint)
    # The model, the data and the layers with adapters are compared at the start.
    digests = {"model", "model.weights", "model.adapter", "data", *config.models()}
    known = {
        key: value for key, value in manifest.identity.items() if key not in digests and not key.startswith("lora.")
    }
    changed = changed_settings(checkpoint, config)
    check_same_run(checkpoint, saved=known, current=settings_identity(config), changed=changed)
    what = ", ".join(describe_changes(changed)) or "nothing"
    return f"run.dir holds a run: a start resumes from step {manifest.step}; changed since: {what}"


def _newest(root: Path) -> Path | None:
    """The newest checkpoint that is complete and has a manifest that can be read; a start skips the others as well."""
    for _, path in reversed(CheckpointStore(root).complete()):
        try:
            read_manifest(path)
        except UserError:
            continue
        return path
    return None
