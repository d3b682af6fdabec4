"""Weights & Biases, without prompts; its first failure switches it off and never stops the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from fsdp2kit.config.schema import WandbConfig
from fsdp2kit.config.wandb_login import has_login
from fsdp2kit.files.redaction import cleaned, without_secrets

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
        section: ``[wandb]``. Keys that it does not set are taken from wandb's environment variables.
        run_dir: wandb's files are kept in it unless WANDB_DIR is set, and it is the run's name unless one is given.
        config: shown with the curves; values of secret variables and user names in URLs are hidden.
        wandb_id: of the run to continue; None starts a new one.
        message: called with a line for the user.
    """
    mode, why = _choose_mode(section)
    run = None
    try:
        if mode != "disabled":
            run = _init(section, mode=mode, run_dir=run_dir, config=config, wandb_id=wandb_id)
            message(_where(run, mode, why))
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


def _choose_mode(section: WandbConfig) -> tuple[Mode, str]:
    """The mode, and how the line at the start begins: why, where that needs a word."""
    if section.mode != "auto":
        return section.mode, ""
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1", "yes", "on"):  # transformers' variable
        return "disabled", ""
    asked = os.environ.get("WANDB_MODE", "").replace("dryrun", "offline")
    if asked == "offline" or asked == "disabled":
        return asked, ""
    if has_login():
        return "online", ""
    return "offline", "no login, so "


def _where(run: Any, mode: Mode, why: str) -> str:
    """The line at the start: whether the run leaves this machine, where to, and how to change that."""
    if mode == "online":
        what = f"config, metrics and samples are uploaded to {run.url or 'its server'}"
        return without_secrets(
            f"wandb: {what}; wandb.mode=disabled turns that off, wandb.mode=offline keeps them here"
        )
    folder = Path(run.dir).parent  # of ``files``
    return f"wandb: {why}nothing is uploaded; `wandb sync {folder}` does so later"


def _init(section: WandbConfig, *, mode: Mode, run_dir: Path, config: Mapping[str, Any], wandb_id: str | None) -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")  # its login messages ignore the arguments of init
    import wandb

    # wandb itself reads WANDB_ENTITY, WANDB_RUN_GROUP, WANDB_TAGS and others where an argument is None.
    settings: dict[str, Any] = {"silent": True, "console": "off", "init_timeout": _INIT_SECONDS}
    if "finish_timeout_raises" in getattr(wandb.Settings, "model_fields", {}):  # not in older versions, which wait
        settings.update(finish_timeout=_FINISH_SECONDS, finish_timeout_raises=True)
    return wandb.init(
        entity=section.entity,
        project=section.project or os.environ.get("WANDB_PROJECT") or "fsdp2kit",
        name=section.name or os.environ.get("WANDB_NAME") or run_dir.resolve().name,
        group=section.group,
        tags=section.tags or None,
        config=cleaned(config),
        dir=os.environ.get("WANDB_DIR") or str(run_dir),
        id=wandb_id,
        resume="allow",
        mode=mode,
        settings=wandb.Settings(**settings),
    )


def brief(error: Exception) -> str:
    """An error's type and first line, without secrets."""
    lines = without_secrets(str(error)).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
