"""Weights & Biases, kept from ever stopping a run: it is asked nothing, and its first failure switches it off."""

from __future__ import annotations

import configparser
import netrc
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fsdp2kit.config.schema import WandbConfig
from fsdp2kit.errors import UserError
from fsdp2kit.train.rundir import without_secrets

Mode = Literal["online", "offline", "disabled"]

# W&B's own host; newer clients call it by another name and still take a netrc entry for this one.
_CLOUD_HOST = "api.wandb.ai"
_INIT_SECONDS = 30.0  # wandb's default of 90 is a long time for every rank to wait
_FINISH_SECONDS = 120.0
_ENVIRONMENT_MODES: dict[str, Mode] = {
    "online": "online",
    "offline": "offline",
    "dryrun": "offline",
    "disabled": "disabled",
}


def check_wandb(section: WandbConfig) -> None:
    """Refuse, before the run starts, a ``wandb.mode`` that cannot be had. Nothing is started, sent or asked.

    Raises:
        UserError: mode "online" without a login, or "online" / "offline" with a wandb that does not import.
    """
    if section.mode not in ("online", "offline"):
        return
    try:
        import wandb  # noqa: F401
    except Exception as error:  # a broken dependency of wandb raises anything
        todo = "install wandb, or set wandb.mode = 'auto' or 'disabled'"
        raise UserError("wandb.mode", f"{section.mode!r}, but wandb does not import ({error})", todo) from None
    if section.mode == "online" and not has_login():
        todo = "run `wandb login`, set WANDB_API_KEY, or set wandb.mode = 'auto' or 'offline'"
        raise UserError("wandb.mode", "'online', but there is no Weights & Biases login", todo)


def has_login() -> bool:
    """Whether wandb would find credentials: in the environment, its settings file, or a netrc entry for its host.

    Read here, because `wandb.login` asks the terminal or the network.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = _read_settings()
    return bool(settings.get("api_key")) or _in_netrc(settings.get("base_url"))


def start_wandb(
    section: WandbConfig,
    *,
    run_dir: Path,
    config: Mapping[str, Any],
    wandb_id: str | None,
    message: Callable[[str], None],
) -> WandbRun:
    """Start a run, or continue the run ``wandb_id``. Never raises on wandb's account: it says so and logs nothing.

    Args:
        section: ``[wandb]``.
        run_dir: wandb's files are kept in it, and it names the run unless ``section.name`` does.
        config: shown beside the curves; values of secret variables and users in URLs are blanked.
        wandb_id: of the run to continue; None starts a new one.
        message: where to say what became of it.
    """
    mode = _choose_mode(section, message)
    if mode == "disabled":
        return WandbRun(None, wandb_id=wandb_id, message=message)
    run = None
    try:
        run = _init(section, mode=mode, run_dir=run_dir, config=config, wandb_id=wandb_id)
    except Exception as error:  # an outage, a refused key, a deleted run, a broken installation
        message(f"wandb: {_brief(error)}; it is off for this run, and metrics.jsonl has everything")
    return WandbRun(run, wandb_id=wandb_id, message=message)


class WandbRun:
    """A started wandb run, or one that is off. Calls on it never raise on wandb's account."""

    def __init__(self, run: Any | None, *, wandb_id: str | None, message: Callable[[str], None]) -> None:
        self._run, self._message = run, message
        self.id: str | None = wandb_id if run is None else run.id
        """Keep it with the checkpoint: given to `start_wandb`, it continues the same curves."""

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
        """Finish the run, as failed unless ``ok``; uploading what is left is given up after two minutes."""
        self._attempt(lambda run: run.finish(exit_code=0 if ok else 1))
        self._run = None

    def _attempt(self, call: Callable[[Any], object]) -> None:
        if self._run is None:
            return
        try:
            call(self._run)
        except Exception as error:
            self._run = None
            self._message(f"wandb: {_brief(error)}; it is off from here on, and metrics.jsonl has everything")


def _choose_mode(section: WandbConfig, message: Callable[[str], None]) -> Mode:
    if section.mode != "auto":
        return section.mode
    asked = _ENVIRONMENT_MODES.get(os.environ.get("WANDB_MODE", ""))
    if asked in ("offline", "disabled"):
        return asked
    if has_login():
        return "online"
    message("wandb: no login, so this run is kept offline in its directory; `wandb sync` uploads it later")
    return "offline"


def _init(section: WandbConfig, *, mode: Mode, run_dir: Path, config: Mapping[str, Any], wandb_id: str | None) -> Any:
    os.environ.setdefault("WANDB_SILENT", "true")  # what wandb says about the login heeds no argument of init
    import wandb

    settings: dict[str, Any] = {"silent": True, "console": "off", "init_timeout": _INIT_SECONDS}
    if "finish_timeout_raises" in getattr(wandb.Settings, "model_fields", {}):  # older versions wait for an outage
        settings.update(finish_timeout=_FINISH_SECONDS, finish_timeout_raises=True)
    return wandb.init(
        project=section.project,
        name=section.name or run_dir.resolve().name,
        group=section.group,
        tags=section.tags or None,
        config=_blanked(config),
        dir=str(run_dir),
        id=wandb_id,
        resume="allow",
        mode=mode,
        settings=wandb.Settings(**settings),
    )


def _blanked(value: Any) -> Any:
    """A copy of nested mappings and lists with `without_secrets` applied to every text."""
    if isinstance(value, Mapping):
        return {key: _blanked(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_blanked(item) for item in value]
    return without_secrets(value) if isinstance(value, str) else value


def _brief(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _read_settings() -> dict[str, str]:
    """wandb's settings files, the working directory's over the user's, with the environment's server on top."""
    user = Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser()
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read([user / "settings", Path("wandb") / "settings"], encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError):
        return {}  # wandb cannot read it either
    settings = dict(parser["default"]) if parser.has_section("default") else {}
    if server := os.environ.get("WANDB_BASE_URL"):
        settings["base_url"] = server
    return settings


def _in_netrc(base_url: str | None) -> bool:
    try:
        entries = netrc.netrc(_netrc_path())
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
    hosts = {urlsplit(base_url).netloc} if base_url else _default_hosts()
    return any((entry := entries.authenticators(host)) and entry[2] for host in hosts)


def _netrc_path() -> Path:
    if path := os.environ.get("NETRC"):
        return Path(path).expanduser()
    unix, windows = Path("~/.netrc").expanduser(), Path("~/_netrc").expanduser()
    return windows if windows.exists() and not unix.exists() else unix


def _default_hosts() -> set[str]:
    try:
        import wandb

        return {_CLOUD_HOST, urlsplit(wandb.Settings().base_url).netloc}
    except Exception:  # whoever needs wandb reports that it is broken; this only asks for a name
        return {_CLOUD_HOST}
