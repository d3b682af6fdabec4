"""Weights & Biases, without prompts; its first failure switches it off and never stops the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fsdp2kit.config.schema import WandbConfig
from fsdp2kit.config.wandb_login import has_login
from fsdp2kit.redaction import cleaned, without_secrets

Mode = Literal["online", "offline", "disabled"]

_INIT_SECONDS = 30.0  # every rank waits for it; wandb's default is 90
_FINISH_SECONDS = 120.0


def start_wandb(
    section: WandbConfig,
    *,
    run_dir: Path,
    config: Mapping[str, Any],
    wandb_id: str | None,
    message: Callable[[str], None],
) -> WandbRun:
    """Start a run, or continue the run ``wandb_id``. If wandb fails, it says so and logs nothing.

    Args:
        section: ``[wandb]``.
        run_dir: wandb's files are kept in it, and it names the run unless ``section.name`` does.
        config: shown with the curves; values of secret variables and user names in URLs are hidden.
        wandb_id: of the run to continue; None starts a new one.
        message: called with a line for the user.
    """
    mode = _choose_mode(section, message)
    run = None
    try:
        if mode != "disabled":
            run = _init(section, mode=mode, run_dir=run_dir, config=config, wandb_id=wandb_id)
    except Exception as error:  # an outage, a refused key, a deleted run, a broken installation
        message(f"wandb: {brief(error)}; it is off for this run, and metrics.jsonl has everything")
    return WandbRun(run, wandb_id=wandb_id, message=message)


class WandbRun:
    """A started wandb run, or one that is off. Its methods never raise an error of wandb's."""

    def __init__(self, run: Any | None, *, wandb_id: str | None, message: Callable[[str], None]) -> None:
        self._run, self._message = run, message
        self.id: str | None = wandb_id if run is None else run.id
        """Saved with the checkpoint; `start_wandb` continues the same run with it."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Log one record under its ``step``.

        Steps that a resumed run repeats are ignored by wandb, so its curves stay free of duplicates.
        """
        values = {key: value for key, value in record.items() if key != "step" and value is not None}
        self._attempt(lambda run: run.log(values, step=record["step"]))

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log samples as a table, a column for each of their keys."""

        def log_table(run: Any) -> None:
            import wandb

            columns: list[Any] = list(samples[0])
            run.log({"samples": wandb.Table(columns, [[one[name] for name in columns] for one in samples])}, step=step)

        self._attempt(log_table)

    def close(self, ok: bool) -> None:
        """Finish the run, as failed unless ``ok``; uploads end after two minutes at the latest."""
        self._attempt(lambda run: run.finish(exit_code=0 if ok else 1))
        self._run = None

    def _attempt(self, call: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:
            self._run = None
            self._message(f"wandb: {brief(error)}; it is off from here on, and metrics.jsonl has everything")


def _choose_mode(section: WandbConfig, message: Callable[[str], None]) -> Mode:
    if section.mode != "auto":
        return section.mode
    asked = os.environ.get("WANDB_MODE", "").replace("dryrun", "offline")
    if asked == "offline" or asked == "disabled":
        return asked
    if has_login():
        return "online"
    message("wandb: no login, so this run is kept offline in its directory; `wandb sync` uploads it later")
    return "offline"


def _init(section: WandbConfig, *, mode: Mode, run_dir: Path, config: Mapping[str, Any], wandb_id: str | None) -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")  # its login messages ignore the arguments of init
    import wandb

    settings: dict[str, Any] = {"silent": True, "console": "off", "init_timeout": _INIT_SECONDS}
    if "finish_timeout_raises" in getattr(wandb.Settings, "model_fields", {}):  # not in older versions, which wait
        settings.update(finish_timeout=_FINISH_SECONDS, finish_timeout_raises=True)
    return wandb.init(
        entity=section.entity,
        project=section.project,
        name=section.name or run_dir.resolve().name,
        group=section.group,
        tags=section.tags or None,
        config=cleaned(config),
        dir=str(run_dir),
        id=wandb_id,
        resume="allow",
        mode=mode,
        settings=wandb.Settings(**settings),
    )


def brief(error: Exception) -> str:
    """An error's type and first line, without secrets."""
    lines = without_secrets(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
