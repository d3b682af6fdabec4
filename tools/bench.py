"""Measure fsdp2kit beside alternatives: steps, memory, loading, saving, data, kernels.

torchrun --nproc-per-node 2 tools/bench.py [peers] --model DIR --data chat.jsonl [--peers handwritten trl …]
torchrun --nproc-per-node 2 tools/bench.py fsdp1 toml/fsdp1_baseline.toml [section.key=value …]
torchrun --nproc-per-node 2 tools/bench.py load --params 0.5 --files 1 --dtype bfloat16
torchrun --nproc-per-node 2 tools/bench.py save --params 0.5
python tools/bench.py convert [--params 0.5 1.5]
python tools/bench.py data --model DIR --data chat.jsonl [--chat-template FILE]
python tools/bench.py vocabulary [--vocabulary 128256] [--tokens 16384] [--whole]
python tools/bench.py curves RUN_DIR RUN_DIR … [--reference NAME] [--figure FILE.png]
python tools/bench.py ring [--device cpu --dry-run]
python tools/bench.py gpu [--device cpu --dry-run]

bench.py COMMAND --help lists the options of one.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints

# Set before transformers is imported: a benchmark never waits for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from fsdp2kit.distributed import end_process, is_main_process, leave, stop
from fsdp2kit.errors import UserError

COMMANDS = {"peers": "peers", "fsdp1": "peers", "load": "storage", "save": "storage", "convert": "storage"}
COMMANDS |= {"data": "data", "vocabulary": "kernels", "ring": "kernels", "curves": "curves", "gpu": "gpu"}
"""Name: the module of `fsdp2kit.bench` that has a function ``bench_NAME``, whose parameters are its options."""


class Parser(argparse.ArgumentParser):
    """Says a mistake in one line, as every other tool does."""

    def error(self, message: str) -> NoReturn:
        where, _, what = message.removeprefix("argument ").partition(": ")
        raise UserError(where, what, f"see bench.py {self.prog.split()[-1]} --help")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 where a comparison is void, 2 after a user's mistake."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in ([], ["-h"], ["--help"]):
        print(__doc__)
        return 0
    name = "peers" if words[0].startswith("-") else words.pop(0)
    if name not in COMMANDS:
        print(f"error: {name!r} is none of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if "cpu" in words and "--device" in words:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    from fsdp2kit.bench.harness import measure, result_lines

    bench = getattr(importlib.import_module(f"fsdp2kit.bench.{COMMANDS[name]}"), f"bench_{name}")
    parser = Parser(prog=f"bench {name}", description=(bench.__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write that object to a file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="also write the Markdown table to a file")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw a PNG (extra: plot)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu: use no CUDA device")
    add_options(parser, bench)
    result: dict[str, Any] = {}
    try:
        options = vars(parser.parse_intermixed_args(words))
        given = {key: options.pop(key) for key in ("json", "out", "table", "figure", "device")}
        _check_outputs(given)
        # Written after every part: a comparison may take a quarter of an hour, and the next may be killed.
        for result in measure(bench, **options):
            _write(result, given)
    except UserError as problem:
        leave(problem)
    if is_main_process():
        print(json.dumps(result) if given["json"] else "\n".join(result_lines(result)))
    stop()
    return 0 if all(result.get("checks", {}).values()) else 1


def add_options(parser: argparse.ArgumentParser, bench: Callable[..., Any]) -> None:
    """Add a bench's parameters after its world: kind and default as they are declared, help from the docstring.

    Those that may be passed without their name are arguments without a flag. Whole numbers must be positive.
    """
    helps = dict(re.findall(r"^ +(\w+): (.+)$", inspect.getdoc(bench) or "", re.MULTILINE))
    kinds = get_type_hints(bench)
    for name, parameter in list(inspect.signature(bench).parameters.items())[1:]:
        kind, default = kinds[name], parameter.default
        is_required = default is parameter.empty
        named: dict[str, Any] = {"help": helps[name], "default": None if is_required else default}
        if parameter.kind is parameter.KEYWORD_ONLY:
            named |= {"dest": name} | ({"required": True} if is_required else {})
        if default is False:
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", **named)
            continue
        if get_origin(kind) is tuple:
            named["nargs"] = "+" if is_required or default else "*"
            kind = get_args(kind)[0]
        kind = next((each for each in get_args(kind) if NoneType in get_args(kind) and each is not NoneType), kind)
        if get_origin(kind) is Literal:
            named["choices"] = get_args(kind)
        else:
            named["type"] = _positive if kind is int else kind
        if default not in (None, parameter.empty, ()):
            named["help"] += f" ({default if isinstance(default, (str, int, float)) else ' '.join(map(str, default))})"
        flag = f"--{name.replace('_', '-')}" if parameter.kind is parameter.KEYWORD_ONLY else name
        parser.add_argument(flag, **named)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _check_outputs(given: dict[str, Any]) -> None:
    """Refuse files that cannot be written before anything is measured for them."""
    for name in ("out", "table", "figure"):
        file = given[name]
        if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise UserError(f"--{name}", f"{file} cannot be written", "name a file in a folder that exists")
    if given["figure"] is not None:
        from fsdp2kit.bench.harness import pyplot

        pyplot("--figure")


def _write(result: dict[str, Any], given: dict[str, Any]) -> None:
    from fsdp2kit.bench.harness import draw, result_lines

    if not is_main_process():
        return
    if given["out"] is not None:
        given["out"].write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if given["table"] is not None:
        given["table"].write_text("\n".join(result_lines(result)) + "\n", encoding="utf-8")
    if given["figure"] is not None:
        draw(result, given["figure"])


if __name__ == "__main__":
    end_process(main())
