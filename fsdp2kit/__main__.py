"""``fsdp2kit COMMAND …``: one command for everything; ``fsdp2kit`` alone lists the commands by task.

``run --nproc N`` starts N ranks on this host. torchrun starts those of several hosts (``torchrun … -m fsdp2kit.run
TOML``), and those of a tool (``torchrun … -m fsdp2kit.tools.NAME``).
"""

from __future__ import annotations

import ast
import pkgutil
import runpy
import sys
from pathlib import Path

from fsdp2kit import __version__, tools
from fsdp2kit.console import begin_output, show
from fsdp2kit.errors import nearest
from fsdp2kit.job import stop

_COMMANDS = {
    "run": "train as a TOML says: fsdp2kit run TOML [--nproc N] [section.key=value ...]",
    "check": "check a TOML and plan its run, without weights and network: fsdp2kit check TOML [--world-size N]",
    "convert": "a checkpoint to a Hugging Face directory, or back: fsdp2kit convert SOURCE OUT (or: export)",
    "verify": "whether a checkpoint is whole: fsdp2kit verify runs/x/checkpoints/step-000200",
}
_ALIASES = {"export": "convert"}
_OTHER_WORDS = {
    "train": "run",
    "eval": "run (with train.steps=0 it only evaluates)",
    "evaluate": "run (with train.steps=0 it only evaluates)",
    "merge": "convert --merge",
    "chat": "generate",
    "inference": "generate",
    "bench": "the benchmarks, which a clone has (fsdp2kit docs benchmarks)",
}
"""What other tools call what a command does."""
_TASKS = {
    "begin": ("new", "check", "preview", "plan", "parity", "migrate_fsdp1"),
    "train": ("run", "launch"),
    "look at runs": ("runs", "report", "overlap_report", "cycle"),
    "use what was trained": ("convert", "verify", "generate"),
    "look up": ("docs", "keys", "models", "schema"),
}
"""Commands by what a user wants to do. Those in no list are for maintainers: ``--help-all`` has them."""


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; a tool ends the process itself."""
    begin_output()
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    if command == "--version":
        show(__version__)
        return 0
    command = command.replace("-", "_")
    if command == "help" and rest:  # of one command
        command = rest[0].replace("-", "_")
        rest = ["--help"]
    command = _ALIASES.get(command, command)
    found = _tools()
    if command == "run":
        stop.listen_from_the_start()  # torch takes seconds to import
    if command in ("run", "check"):
        module = "fsdp2kit.run"
        rest = rest + ["--check"] * (command == "check")
    elif command == "verify":
        module = "fsdp2kit.checkpoint"
        rest = ["verify", *rest]
    elif command == "convert":
        from fsdp2kit.checkpoint.conversion import parse_conversion  # other commands start without pydantic

        to_hf = parse_conversion(rest, prog="fsdp2kit convert").to_hf
        module = f"fsdp2kit.tools.{'dcp_to_hf' if to_hf else 'hf_to_dcp'}"
    elif command in found:
        module = f"fsdp2kit.tools.{command}"
    elif command in ("help", "__help", "_h", "__help_all"):
        _list({**_COMMANDS, **{name: _first_line(path) for name, path in found.items()}}, all=command == "__help_all")
        return 0
    else:
        typed = _shown(command)
        names = [_shown(name) for name in (*_COMMANDS, *_ALIASES, *found)]
        near = nearest(typed, [*names, *_OTHER_WORDS])
        todo = f"did you mean {_OTHER_WORDS.get(near, near)}?" if near else "`fsdp2kit --help` lists them"
        show(f"error: fsdp2kit {typed}: no such command; {todo}", file=sys.stderr)
        return 2
    sys.argv = [f"fsdp2kit {command}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _list(lines: dict[str, str], *, all: bool) -> None:
    """List the commands with a line each, by task."""
    tasks = dict(_TASKS)
    if all:
        listed = {name for names in _TASKS.values() for name in names}
        tasks["maintain fsdp2kit"] = tuple(name for name in lines if name not in listed)
    width = max(len(name) for names in tasks.values() for name in names)
    for task, names in tasks.items():
        show(f"{task}:")
        for name in names:
            show(f"  {_shown(name):<{width}}  {lines[name]}")
    show(
        "\nfsdp2kit COMMAND --help says more."
        + ("" if all else " fsdp2kit --help-all also lists maintainers' commands.")
    )


def _shown(name: str) -> str:
    return name.replace("_", "-")


def _tools() -> dict[str, Path]:
    """Each tool's file by its name; imports none of them."""
    folder = Path(tools.__path__[0])
    found = pkgutil.iter_modules(tools.__path__)
    return {module.name: folder / f"{module.name}.py" for module in found if not module.ispkg}


def _first_line(path: Path) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
