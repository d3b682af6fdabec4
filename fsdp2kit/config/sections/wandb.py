"""[wandb]: Weights & Biases, and whether its mode can work here."""

from __future__ import annotations

import configparser
import contextlib
import netrc
import os
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section
from fsdp2kit.errors import UserError

# W&B's host; newer clients use another name for it and still accept a netrc entry for this one.
_CLOUD_HOST = "api.wandb.ai"


class WandbConfig(Section):
    """Weights & Biases. A key that is set here comes before wandb's environment variable for the same."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """"auto": WANDB_MODE; without it online if there is a login, else offline. The run says whether and where to it
    is uploaded."""
    entity: str | None = None
    """User or team. Default: WANDB_ENTITY, else that of the login."""
    project: str | None = None
    """Project name. Default: WANDB_PROJECT, else "fsdp2kit"."""
    name: str | None = None
    """Run name. Default: WANDB_NAME, else the run directory's."""
    group: str | None = None
    """Group of runs. Default: WANDB_RUN_GROUP."""
    tags: list[str] = []
    """Tags of the run. Default: those of WANDB_TAGS."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        """Refuse a mode that cannot work. Nothing is started, sent or asked."""
        super().check(config, sizes)
        if self.mode not in ("online", "offline"):
            return
        try:
            import wandb  # noqa: F401
        except Exception as error:  # a broken dependency of wandb raises anything
            todo = "install wandb, or set wandb.mode = 'auto' or 'disabled'"
            raise UserError("wandb.mode", f"{self.mode!r}, but wandb does not import ({error})", todo) from None
        if self.mode == "online" and not has_login():
            todo = "run `wandb login`, set WANDB_API_KEY, or set wandb.mode = 'auto' or 'offline'"
            raise UserError("wandb.mode", "'online', but there is no Weights & Biases login", todo)


def has_login() -> bool:
    """Whether wandb would find credentials: in the environment, its settings file, or a netrc entry for its host.

    `wandb.login` is not used, because it prompts or asks the network.
    """
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    settings = _read_settings()
    return bool(settings.get("api_key")) or _in_netrc(settings.get("base_url"))


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
        entries = netrc.netrc(Path(os.environ.get("NETRC") or "~/.netrc").expanduser())
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
        return False
    hosts = {urlsplit(base_url).netloc} if base_url else {_CLOUD_HOST}
    if not base_url:
        with contextlib.suppress(Exception):  # a broken wandb is reported where it is needed; this needs only the name
            import wandb

            hosts.add(urlsplit(wandb.Settings().base_url).netloc)
    return any((entry := entries.authenticators(host)) and entry[2] for host in hosts)
