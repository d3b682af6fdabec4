"""Measure fsdp2kit beside alternatives: steps, memory, loading, saving, data, kernels.

python tools/bench.py [peers] --model DIR --data chat.jsonl [--peers handwritten trl equal_padding …]
torchrun --nproc-per-node 2 tools/bench.py fsdp1 toml/fsdp1_baseline.toml [section.key=value …]
torchrun --nproc-per-node 2 tools/bench.py context-parallel --model DIR [--seq-len 4096] [--rounds 10] [--layers 6]
torchrun --nproc-per-node 2 tools/bench.py load --params 0.5 --files 1 --dtype bfloat16
torchrun --nproc-per-node 2 tools/bench.py save --params 0.5
python tools/bench.py convert [--params 0.5 1.5]
python tools/bench.py data --model DIR --data chat.jsonl [--chat-template FILE]
python tools/bench.py vocabulary [--vocabulary 128256] [--tokens 16384] [--whole]
python tools/bench.py curves RUN_DIR RUN_DIR … [--reference NAME] [--figure FILE.png]
python tools/bench.py ring [--device cpu --dry-run]
python tools/bench.py gpu [--device cpu --dry-run]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

# Set before transformers is imported: a benchmark never waits for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from fsdp2kit.distributed import end_process, is_main_process
from fsdp2kit.errors import UserError

COMMANDS = {
    "peers": ("peers", "beside a hand-written loop, TRL and transformers' Trainer (the default)"),
    "fsdp1": ("fsdp1", "a TOML's training beside FSDP1"),
    "context-parallel": ("context_parallel", "training steps at cp = ranks beside data parallelism"),
    "ring": ("context_parallel", "a ring's blocks over the fused kernel, on one device"),
    "load": ("storage", "loading: memory beside the shards, and time"),
    "save": ("storage", "saving: how long training waits, in both ways"),
    "convert": ("storage", "DCP to Hugging Face: memory and time"),
    "data": ("data", "tokenise and pack, against datasets.map and trl"),
    "vocabulary": ("memory", "memory of the loss at a large vocabulary"),
    "curves": ("curves", "losses of finished runs side by side"),
    "gpu": ("gpu", "step time, MFU and memory on one device"),
}
"""Name: the module of `fsdp2kit.bench` whose ``COMMANDS`` have it, and what it measures."""


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
        print("\n".join(f"  {name:<18}{what}" for name, (_, what) in COMMANDS.items()))
        print("\nbench.py COMMAND --help lists the options of one.")
        return 0
    name = "peers" if words[0].startswith("-") else words.pop(0)
    if name not in COMMANDS:
        print(f"error: {name!r} is none of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if "cpu" in words and "--device" in words:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    module, what = COMMANDS[name]
    command = importlib.import_module(f"fsdp2kit.bench.{module}").COMMANDS[name]
    from fsdp2kit import distributed
    from fsdp2kit.bench.harness import add_options

    parser = Parser(prog=f"bench {name}", description=what)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write that object to a file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="also write the Markdown table to a file")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw a PNG (extra: plot)")
    add_options(parser, command.options)
    try:
        given = parser.parse_intermixed_args(words)
        _check_outputs(given)
        measured = command.measure(
            command.options(**{one.name: getattr(given, one.name) for one in fields(command.options)})
        )
        result: dict[str, Any] = {}
        # Written after every part: a comparison may take a quarter of an hour, and the next may be killed.
        for result in measured if isinstance(measured, Iterator) else [measured]:
            _write(result, given, command.draw)
    except UserError as problem:
        distributed.leave(problem)
    if is_main_process():
        from fsdp2kit.bench.harness import result_lines

        print(json.dumps(result) if given.json else "\n".join(result_lines(result)))
    distributed.stop()
    return 0 if all(result.get("checks", {}).values()) else 1


def _check_outputs(given: argparse.Namespace) -> None:
    """Refuse files that cannot be written before anything is measured for them."""
    for name in ("out", "table", "figure"):
        file = getattr(given, name)
        if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise UserError(f"--{name}", f"{file} cannot be written", "name a file in a folder that exists")
    if given.figure is not None:
        from fsdp2kit.bench.harness import pyplot

        pyplot("--figure")


def _write(result: dict[str, Any], given: argparse.Namespace, draw_own: Any) -> None:
    from fsdp2kit.bench.harness import draw, result_lines

    if not is_main_process():
        return
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if given.table is not None:
        given.table.write_text("\n".join(result_lines(result)) + "\n", encoding="utf-8")
    if given.figure is not None:
        (draw_own or draw)(result, given.figure)


if __name__ == "__main__":
    end_process(main())
