"""Weights & Biases: it never asks, never stops a run, and is told no secret."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.schema import WandbConfig
from fsdp2kit.config.sections.wandb import has_login
from fsdp2kit.errors import UserError
from fsdp2kit.train import wandb_run
from fsdp2kit.train.wandb_run import WandbRun, start_wandb
from tests.train.helpers import build

KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture(autouse=True)
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a login, and no WANDB_ variable at all."""
    for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")  # wandb's own telemetry
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    return home


def check(section: WandbConfig) -> None:
    section.check(None, MeshSizes(1, 1, 1))


def start(section: WandbConfig, run_dir: Path, **options: Any) -> tuple[WandbRun, list[str]]:
    messages: list[str] = []
    options = {"config": {}, "wandb_id": None, **options}
    run_dir.mkdir(exist_ok=True)
    return start_wandb(section, run_dir=run_dir, message=messages.append, **options), messages


class BrokenWandb:
    """Stands in for a wandb whose service died: every call raises."""

    id, url, dir = "abc", "https://me:pass@wandb.mine.org/t/p/runs/abc", "run/wandb/offline-run-abc/files"

    def __getattr__(self, name: str) -> Any:
        raise ConnectionError("the service is gone\nwith a long story")


@pytest.mark.parametrize("host", ["api.wandb.ai", "api.forge.coreweave.com"])
def test_login_in_netrc(no_login: Path, host: str) -> None:
    (no_login / ".netrc").write_text(f"machine elsewhere.org login user password {KEY}\n")
    assert not has_login()
    (no_login / ".netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    import wandb

    known = host in ("api.wandb.ai", wandb.Settings().base_url.removeprefix("https://"))
    assert has_login() == known


def test_login_for_a_server_of_ones_own(no_login: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (no_login / "netrc").write_text(f"machine wandb.mine.org login user password {KEY}\n")
    monkeypatch.setenv("NETRC", str(no_login / "netrc"))
    assert not has_login()
    settings = no_login / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.mine.org\n")
    assert has_login()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.other.org")
    assert not has_login()


def test_unreadable_files_are_no_login(no_login: Path) -> None:
    (no_login / ".netrc").write_text('machine "\n')
    settings = no_login / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("no section\n")
    assert not has_login()


def test_online_without_a_login_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"wandb\.mode: 'online', but there is no .* login; run `wandb login`"):
        check(WandbConfig(mode="online"))
    for mode in ("auto", "offline", "disabled"):
        check(WandbConfig(mode=mode))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    check(WandbConfig(mode="online"))


def test_wandb_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import raises
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    check(WandbConfig())
    check(WandbConfig(mode="disabled"))
    for mode in ("online", "offline"):
        with pytest.raises(UserError, match="does not import"):
            check(WandbConfig(mode=mode))
    run, messages = start(WandbConfig(), tmp_path / "run")
    run.log({"step": 1, "loss": 1.0})
    run.close(ok=True)
    assert len(messages) == 1
    assert "it is off for this run" in messages[0]


@pytest.mark.parametrize(
    ("section", "variable", "has_key", "mode", "says"),
    [
        (
            "auto",
            None,
            False,
            "offline",
            "no login, so nothing is uploaded; `wandb sync run/wandb/offline-run-abc`",
        ),
        ("auto", "online", False, "offline", "no login, so nothing is uploaded"),  # it never asks for one
        ("auto", None, True, "online", "uploaded to https://***@wandb.mine.org/t/p/runs/abc; wandb.mode=disabled"),
        ("auto", "online", True, "online", "uploaded to"),
        ("auto", "offline", True, "offline", "wandb: nothing is uploaded"),
        ("auto", "dryrun", True, "offline", "wandb: nothing is uploaded"),
        ("offline", "disabled", False, "offline", "wandb: nothing is uploaded"),
        ("online", "disabled", True, "online", "uploaded to"),
    ],
)
def test_the_mode_is_the_configs_then_the_environments_then_the_logins(
    section: Any,
    variable: str | None,
    has_key: bool,
    mode: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen = record_init(monkeypatch)
    for name, value in (("WANDB_MODE", variable), ("WANDB_API_KEY", KEY if has_key else None)):
        if value is not None:
            monkeypatch.setenv(name, value)
    _, messages = start(WandbConfig(mode=section), tmp_path / "run")
    assert seen["mode"] == mode
    [line] = messages
    assert says in line
    assert capfd.readouterr() == ("", "")


def test_disabled_starts_nothing_and_keeps_the_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_init(monkeypatch)
    run, messages = start(WandbConfig(mode="disabled"), tmp_path / "run", wandb_id="abc")
    assert (run.id, messages, seen) == ("abc", [], {})


def test_transformers_variable_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_init(monkeypatch)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_DISABLED", "true")
    _, messages = start(WandbConfig(), tmp_path / "run")
    assert (messages, seen) == ([], {})


@pytest.mark.parametrize("is_in_toml", [False, True])
def test_variables_of_wandb_hold_where_the_toml_sets_nothing(
    is_in_toml: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What wandb's own rules make of the arguments, the environment and nothing else."""
    import wandb

    seen = record_init(monkeypatch)
    variables = {"PROJECT": "p", "NAME": "n", "ENTITY": "e", "RUN_GROUP": "g", "TAGS": "a,b", "DIR": str(tmp_path)}
    for name, value in variables.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    given = WandbConfig(project="P", name="N", entity="E", group="G", tags=["A"]) if is_in_toml else WandbConfig()
    start(given, tmp_path / "run")
    settings = wandb.Settings()
    settings.update_from_env_vars(dict(os.environ))
    named = {"project": "project", "name": "run_name", "entity": "entity", "group": "run_group", "tags": "run_tags"}
    found = [seen[name] if seen[name] is not None else getattr(settings, key) for name, key in named.items()]
    assert found[:4] == (["P", "N", "E", "G"] if is_in_toml else ["p", "n", "e", "g"])
    assert list(found[4]) == (["A"] if is_in_toml else ["a", "b"])
    assert seen["dir"] == str(tmp_path)


def test_what_wandb_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = record_init(monkeypatch)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    section = WandbConfig(entity="e", project="p", group="g", tags=["t"])
    config = {"data": {"path": "https://me:pass@host/x"}, "notes": [f"key {KEY}"], "train": {"steps": 3}}
    start(section, tmp_path / "my-run", wandb_id="abc", config=config)
    assert seen["config"] == {"data": {"path": "https://***@host/x"}, "notes": ["key ***"], "train": {"steps": 3}}
    assert (seen["id"], seen["resume"], seen["dir"]) == ("abc", "allow", str(tmp_path / "my-run"))
    assert (seen["entity"], seen["project"], seen["name"]) == ("e", "p", "my-run")
    assert (seen["group"], seen["tags"]) == ("g", ["t"])


@pytest.mark.full
def test_offline_run_resumes_under_its_id(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The real client, twice; nothing reaches the console but our own lines."""
    wandb_id = None
    for step in (1, 2):
        metrics = build(tmp_path, mode="offline", resume_step=step - 1, total_steps=2, wandb_id=wandb_id)
        metrics.log({"step": step, "loss": 1.0, "mfu": None})
        metrics.close(ok=True)
        assert wandb_id in (None, metrics.wandb_id)
        wandb_id = metrics.wandb_id
    assert wandb_id
    # wandb appends "-1" to the directory of a second run that starts in the same second.
    kept = [str(path) for path in (tmp_path / "wandb").glob(f"offline-run-*-{wandb_id}*")]
    said, complained = capfd.readouterr()
    assert complained == ""
    first, step_1, second, step_2 = said.splitlines()
    assert (step_1, step_2) == ("step 1/2  loss 1.0000", "step 2/2  loss 1.0000")
    for line in (first, second):
        named = line.removeprefix("wandb: nothing is uploaded; `wandb sync ").removesuffix("` does so later")
        assert named in kept


# After the run offline: without its server, the process that wandb 0.25 keeps for all runs is busy for minutes.
def test_an_outage_at_the_start_is_reported_and_survived(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real client against a server that is not there."""
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb_run, "_INIT_SECONDS", 1.0)
    run, messages = start(WandbConfig(mode="online"), tmp_path / "run", wandb_id="abc")
    run.log({"step": 1, "loss": 1.0})
    run.close(ok=True)
    assert run.id == "abc"  # a later resume may find the server again
    assert len(messages) == 1
    assert capfd.readouterr() == ("", "")


def test_a_failure_amid_the_run_is_reported_once() -> None:
    messages: list[str] = []
    run = WandbRun(BrokenWandb(), wandb_id=None, message=messages.append)
    for step in (1, 2):
        run.log({"step": step, "loss": 1.0})
    run.close(ok=False)
    assert messages == [
        "wandb: ConnectionError: the service is gone; it is off from here on, and metrics.jsonl has everything"
    ]
    assert run.id == "abc"


def record_init(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace `wandb.init` by one that only notes its arguments."""
    import wandb

    seen: dict[str, Any] = {}

    def init(**arguments: Any) -> Any:
        seen.update(arguments)
        return BrokenWandb()

    monkeypatch.setattr(wandb, "init", init)
    return seen
