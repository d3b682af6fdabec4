"""The command line of conversions: one parser for ``fsdp2kit convert`` and both tools. No torch here."""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any, get_args

from fsdp2kit.config.path_contents import contents_of
from fsdp2kit.config.sections.checkpoint import DType
from fsdp2kit.console import add_trust_remote_code, user_path
from fsdp2kit.files.remote import is_url


def parse_conversion(arguments: list[str] | None, *, prog: str, to_hf: bool | None = None) -> Any:
    """The options of a conversion: ``source``, ``out``, ``config``, ``verify``, ``to_hf``, ``dtype``, ``merge``, ….

    Paths and flags may come in any order.

    Args:
        prog: what errors and the help call the command.
        to_hf: the direction, from a checkpoint to a Hugging Face directory or back; None: what SOURCE is decides.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog=prog,
        usage="%(prog)s SOURCE OUT [options]",
        description="A checkpoint to a Hugging Face directory, or one of those (or a state dict) to a checkpoint.",
    )
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="SOURCE OUT",
        help="what SOURCE is decides the direction; of a checkpoint, either may be a URL",
    )
    parser.add_argument(
        "--config",
        type=user_path,
        metavar="HF_DIR",
        help="config and tokenizer from here, for SOURCE without its own",
    )
    parser.add_argument("--verify", action="store_true", help="load both again and compare their logits")
    add_trust_remote_code(parser)
    parser.set_defaults(dtype=None, max_shard_gb=None, merge=None)
    if to_hf is not False:
        _add_flags_of_checkpoints(parser)
    options = parser.parse_intermixed_args(arguments)
    paths = _paths(options, arguments)
    if len(paths) != 2:
        model = f" (--merge's MODEL is {options.merge})" if isinstance(options.merge, str) else ""
        parser.error(f"give SOURCE and OUT; {len(paths)} found: {' '.join(paths)}{model}")
    options.source, options.out = paths
    if to_hf is None:
        to_hf = is_url(options.source) or contents_of(user_path(options.source)) == "checkpoint"
    options.to_hf = to_hf
    given = {"--dtype": options.dtype, "--max-shard-gb": options.max_shard_gb, "--merge": options.merge}
    if not to_hf and (flag := next((flag for flag, value in given.items() if value is not None), None)):
        parser.error(f"{flag} is for checkpoints, and {options.source} is none; leave it out")
    return options


def _size(text: str) -> float:
    """A positive, finite number of 10^9 bytes."""
    if not 0 < (size := float(text)) < math.inf:
        raise ValueError(text)
    return size


def _add_flags_of_checkpoints(parser: argparse.ArgumentParser) -> None:
    flags = parser.add_argument_group("from a checkpoint to a Hugging Face directory")
    flags.add_argument("--dtype", choices=get_args(DType), help="of the weights; default: what the run's config says")
    flags.add_argument("--max-shard-gb", type=_size, metavar="GB", help="largest file, in 10^9 bytes; default: 5")
    flags.add_argument(
        "--merge",
        nargs="?",
        const=True,
        metavar="MODEL",
        help="add the adapter to the model it was trained on (directory or hub id; default: where it was)",
    )


def _paths(options: Any, arguments: list[str]) -> list[str]:
    """SOURCE and OUT, also where --merge took one of them for its MODEL: then in the order of the command line."""
    paths = options.paths
    value = options.merge
    if len(paths) != 1 or value not in arguments or contents_of(user_path(value)) == "model":
        return paths
    options.merge = True
    return sorted([value, *paths], key=arguments.index)
