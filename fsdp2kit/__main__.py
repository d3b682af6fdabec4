"""``fsdp2kit COMMAND …``: one command for everything; ``fsdp2kit`` alone lists the commands.

``run --nproc N`` starts N ranks on this host. torchrun starts those of several hosts (``torchrun … -m fsdp2kit.run
TOML``), and those of a tool (``torchrun … -m fsdp2kit.tools.NAME``).
"""

from __future__ import annotations

import ast
import pkgutil
import runpy
import sys
from pathlib import Path

from fsdp2kit import __version__, stop, tools
from fsdp2kit.errors import did_you_mean

_COMMANDS = {
    "run": "train as a TOML says: fsdp2kit run TOML [--nproc N] [section.key=value ...]",
    "check": "check a TOML and plan its run, without weights and network: fsdp2kit check TOML [--world-size N]",
    "convert": "a checkpoint to a Hugging Face directory, or back: fsdp2kit convert SOURCE OUT",
    "verify": "whether a checkpoint is whole: fsdp2kit verify runs/x/checkpoints/step-000200",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; a tool ends the process itself."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    if command == "--version":
        print(__version__)
        return 0
    command = command.replace("-", "_")
    found = _tools()
    if command == "run":
        stop.listen_from_the_start()  # torch takes seconds to import
    if command in ("run", "check"):
        module, rest = "fsdp2kit.run", rest + ["--check"] * (command == "check")
    elif command == "verify":
        module, rest = "fsdp2kit.checkpoint", ["verify", *rest]
    elif command == "convert":
        from fsdp2kit.checkpoint.conversion import parse_conversion  # other commands start without pydantic

        to_hf = parse_conversion(rest, prog="fsdp2kit convert").to_hf
        module = f"fsdp2kit.tools.{'dcp_to_hf' if to_hf else 'hf_to_dcp'}"
    elif command in found:
        module = f"fsdp2kit.tools.{command}"
    else:
        return _list(command, {**_COMMANDS, **{name: _first_line(path) for name, path in found.items()}})
    sys.argv = [f"fsdp2kit {command}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _list(command: str, lines: dict[str, str]) -> int:
    """List the commands, after an error unless help was asked for."""
    is_asked = command in ("help", "__help", "_h")
    if not is_asked:
        todo = did_you_mean(command, lines, otherwise="choose one of these")
        print(f"error: fsdp2kit {command}: no such command; {todo}", file=sys.stderr)
    width = max(map(len, lines))
    print(*(f"{name:<{width}}  {line}" for name, line in lines.items()), sep="\n")
    return 0 if is_asked else 2


def _tools() -> dict[str, Path]:
    """Each tool's file by its name; imports none of them."""
    folder = Path(tools.__path__[0])
    return {module.name: folder / f"{module.name}.py" for module in pkgutil.iter_modules(tools.__path__)}


def _first_line(path: Path) -> str:
    """The first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
