"""Measure fsdp2kit beside what users would do instead: steps, memory, loading, saving, data, kernels.

python tools/bench.py [peers] --model DIR --data chat.jsonl [--peers handwritten trl equal_padding …]
torchrun --nproc-per-node 2 tools/bench.py load --params 0.5 --files 1 --dtype bfloat16
torchrun --nproc-per-node 2 tools/bench.py context-parallel --model DIR [--seq-len 4096] [--pairs 10] [--layers 6]
torchrun --nproc-per-node 2 tools/bench.py traffic
torchrun --nproc-per-node 2 tools/bench.py save --params 0.5
python tools/bench.py convert [--params 0.5 1.5]
python tools/bench.py checkpointing [--seq-len 2048] [--layers 4]
python tools/bench.py vocabulary [--vocabulary 128256] [--tokens 16384] [--whole]
python tools/bench.py curves RUN_DIR RUN_DIR … [--reference NAME] [--picture FILE.png]
python tools/bench.py ring [--device cpu --dry-run]
python tools/bench.py data --model DIR --data chat.jsonl [--chat-template FILE]
python tools/bench.py gpu [--device cpu --dry-run]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

# Set before transformers is imported: a benchmark never waits for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

from fsdp2kit.environment import end_process
from fsdp2kit.errors import UserError

COMMANDS = {
    "peers": "beside a hand-written loop, TRL and transformers' Trainer (the default)",
    "traffic": "a step's collectives beside their formulae, and the host's waits for the device",
    "load": "loading: memory beside the shards, and time",
    "save": "saving: how long training waits, in both ways",
    "convert": "DCP to Hugging Face: memory and time",
    "context-parallel": "its memory, its traffic, its time",
    "checkpointing": "activation checkpointing: what it saves, and costs",
    "vocabulary": "memory of the loss at a large vocabulary",
    "curves": "losses of finished runs side by side",
    "ring": "a ring's blocks over the fused kernel, on one device",
    "data": "tokenise and pack, against datasets.map and trl",
    "gpu": "step time, MFU and memory on one device",
}
"""Each is the module of that name in `fsdp2kit.bench`, with ``add_arguments`` and ``run``."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 where a comparison is void, 2 after a user's mistake."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in ([], ["-h"], ["--help"]):
        return _help()
    command = "peers" if words[0].startswith("-") else words.pop(0)
    if command not in COMMANDS:
        print(f"bench: {command!r} is none of {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    if "cpu" in words and "--device" in words:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    module = importlib.import_module(f"fsdp2kit.bench.{command.replace('-', '_')}")
    parser = argparse.ArgumentParser(prog=f"bench {command}", description=COMMANDS[command])
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write that object to a file")
    module.add_arguments(parser)
    options = parser.parse_args(words)
    from fsdp2kit import distributed

    try:
        _check_outputs(options)
        result, lines = module.run(options)
    except UserError as problem:
        distributed.leave(problem)
    if int(os.environ.get("RANK", "0")) == 0:
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(result) if options.json else "\n".join(lines))
    distributed.stop()
    return 0 if result.get("losses_agree", True) and result.get("values_equal", True) else 1


def _check_outputs(options: argparse.Namespace) -> None:
    """Refuse files that cannot be written before anything is measured for them."""
    for name in ("out", "table", "figure"):
        file = getattr(options, name, None)
        if file is not None and not os.access(file if Path(file).exists() else Path(file).absolute().parent, os.W_OK):
            raise UserError(f"--{name}", f"{file} cannot be written", "name a file in a folder that exists")


def _help() -> int:
    print(__doc__)
    for name, what in COMMANDS.items():
        print(f"  {name:<18}{what}")
    print("\nbench.py COMMAND --help lists the options of one.")
    return 0


if __name__ == "__main__":
    end_process(main())
