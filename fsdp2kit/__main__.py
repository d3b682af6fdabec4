"""``fsdp2kit COMMAND …``: one command for all that fsdp2kit can do; ``fsdp2kit`` alone lists it.

It is world size 1. On several processes: ``torchrun --nproc-per-node N -m fsdp2kit.run TOML``, and
``torchrun … -m fsdp2kit.tools.NAME`` for tools that take more than one.
"""

from __future__ import annotations

import argparse
import ast
import pkgutil
import runpy
import sys
from pathlib import Path

from fsdp2kit import tools
from fsdp2kit.config.paths import kind_of

_COMMANDS = {
    "run": "train as a TOML says: fsdp2kit run TOML [section.key=value ...]",
    "check": "check a TOML and plan its run, without weights and network: fsdp2kit check TOML [--world-size N]",
    "convert": "a checkpoint to a Hugging Face directory, or back: fsdp2kit convert SOURCE OUT",
    "verify": "whether a checkpoint is whole: fsdp2kit verify runs/x/checkpoints/step-000200",
}


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return its exit code; a tool ends the process itself."""
    command, *rest = (sys.argv[1:] if arguments is None else arguments) or ["help"]
    command = command.replace("-", "_")
    found = _tools()
    if command in ("run", "check"):
        module, rest = "fsdp2kit.run", rest + ["--check"] * (command == "check")
    elif command == "verify":
        module, rest = "fsdp2kit.checkpoint", ["verify", *rest]
    elif command == "convert":
        tool, rest = _parse_conversion(rest)
        module = f"fsdp2kit.tools.{tool}"
    elif command in found:
        module = f"fsdp2kit.tools.{command}"
    else:
        return _list(command, {**_COMMANDS, **found})
    sys.argv = [f"fsdp2kit {command}", *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _parse_conversion(arguments: list[str]) -> tuple[str, list[str]]:
    """The tool that converts what is named, and its arguments, paths first."""
    parser = argparse.ArgumentParser(
        prog="fsdp2kit convert",
        usage="%(prog)s SOURCE OUT [options]",
        description="A checkpoint to a Hugging Face directory, or one of those (or a state dict) to a checkpoint.",
    )
    parser.add_argument("paths", nargs="+", metavar="SOURCE OUT", help="what SOURCE is decides the direction")
    parser.add_argument(
        "--config", metavar="HF_DIR", help="config and tokenizer from here, for SOURCE without its own"
    )
    parser.add_argument("--verify", action="store_true", help="load both again and compare their logits")
    to_hf = parser.add_argument_group("from a checkpoint to a Hugging Face directory")
    to_hf.add_argument("--dtype", metavar="DTYPE", help="float32, bfloat16 or float16; default: what the run says")
    to_hf.add_argument("--max-shard-gb", metavar="GB", help="largest file, in 10^9 bytes")
    to_hf.add_argument(
        "--merge", nargs="?", const=True, metavar="MODEL", help="add the adapter to its model (default: where it was)"
    )
    options = parser.parse_intermixed_args(arguments)
    if len(options.paths) == 1 and isinstance(options.merge, str):  # --merge SOURCE OUT: a model is not named
        options.paths, options.merge = [options.merge, *options.paths], True
    if len(options.paths) != 2:
        parser.error(f"give SOURCE and OUT; {len(options.paths)} found: {' '.join(options.paths)}")
    source = options.paths[0]
    is_checkpoint = "://" in source or kind_of(Path(source).expanduser()) == "checkpoint"
    of_checkpoints = {"--dtype": options.dtype, "--max-shard-gb": options.max_shard_gb, "--merge": options.merge}
    if not is_checkpoint and (given := [flag for flag, value in of_checkpoints.items() if value is not None]):
        parser.error(f"{given[0]} is for checkpoints, and {source} is none; leave it out")
    flags = {**of_checkpoints, "--config": options.config, "--verify": options.verify or None}
    rest = [text for flag, value in flags.items() if value is not None for text in (flag, value) if text is not True]
    return "dcp_to_hf" if is_checkpoint else "hf_to_dcp", [*options.paths, *rest]


def _list(command: str, lines: dict[str, str]) -> int:
    """Print what there is, after a complaint unless that was asked for."""
    is_asked = command in ("help", "__help", "_h")
    if not is_asked:
        print(f"error: fsdp2kit {command}: no such command; choose one of these", file=sys.stderr)
    width = max(map(len, lines))
    print(*(f"{name:<{width}}  {line}" for name, line in lines.items()), sep="\n")
    return 0 if is_asked else 2


def _tools() -> dict[str, str]:
    """Each tool with the first line of its documentation; none is imported."""
    found = {}
    for module in pkgutil.iter_modules(tools.__path__):
        path = Path(tools.__path__[0]) / f"{module.name}.py"
        documentation = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[module.name] = documentation.partition("\n")[0]
    return found


if __name__ == "__main__":
    sys.exit(main())
