"""Write a short, commented TOML for a recipe, filled from what a model and data show; it passes --check.

fsdp2kit new sft --model DIR --data chat.jsonl [--out sft.toml] [--world-size 8] [--device h100]
fsdp2kit new recipe NAME [--from dpo]    # recipes/NAME.py: a copy of a recipe, to change

RECIPE is sft, lora, qlora, dpo, distill (--teacher DIR), grpo, pretrain or fsdp1_baseline. Without --model or --data
the TOML has lines to fill in. It is written whole or not at all, and never over a file.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdp2kit.console import counted, in_one_line, positive, show, user_path
from fsdp2kit.errors import UserError, did_you_mean
from fsdp2kit.files.local import bundled_folder, replace_file


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake; then nothing is written."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["recipe"]:
        return _new_recipe(given[1:])
    options = _parse(given)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub client is imported: it never waits for a network
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from fsdp2kit.starter.draft import KINDS

    if options.recipe not in KINDS:
        todo = did_you_mean(options.recipe, KINDS, otherwise=f"name one of {', '.join(KINDS)}")
        raise UserError("RECIPE", f"there is none called {options.recipe!r}", todo)
    out = options.out or Path(f"{options.recipe}.toml")
    _refuse_existing(out)
    if options.teacher and options.recipe != "distill":
        raise UserError("--teacher", f"is not for {options.recipe}", "leave it out, or write recipe distill")
    if not out.absolute().parent.is_dir():
        raise UserError("--out", f"{out} is in no folder", "name a file in a folder that exists")
    text, lines, warning, command = _write(options, out)
    _refuse_existing(out)
    try:
        replace_file(out, text)
    except OSError as error:
        what = f"{out} cannot be written ({error.strerror})"
        raise UserError("--out", what, "name a file in a folder that may be written to") from None
    if warning:
        show(f"warning: {warning}", file=sys.stderr)
    show(*lines, command, sep="\n")
    return 0


def _new_recipe(arguments: list[str]) -> int:
    """Copy a recipe of the package to ``recipes/NAME.py`` in the working directory."""
    known = {path.stem: path for path in sorted(bundled_folder("recipes").glob("*.py"))}
    parser = argparse.ArgumentParser(
        prog="fsdp2kit new recipe", description="Write recipes/NAME.py, a copy of a recipe to change."
    )
    parser.add_argument("name", metavar="NAME", help="what TOMLs will call it: recipe = NAME")
    parser.add_argument(
        "--from", dest="source", default="sft", metavar="RECIPE", help=f"what is copied (sft): {', '.join(known)}"
    )
    options = parser.parse_args(arguments)
    name = options.name.removesuffix(".py")
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise UserError("NAME", f"{options.name!r} is no name of a Python module", "use letters, digits and _")
    if name in known:
        what = f"{name!r} comes with fsdp2kit, and recipes/{name}.py would take its place in this folder"
        raise UserError("NAME", what, "choose another name")
    if options.source not in known:
        todo = did_you_mean(options.source, known, otherwise=f"name one of {', '.join(known)}")
        raise UserError("--from", f"there is no recipe {options.source!r}", todo)
    out = Path("recipes") / f"{name}.py"
    if out.exists() or out.is_symlink():
        raise UserError("NAME", f"{out} exists, and is not overwritten", "choose another name")
    try:
        out.parent.mkdir(exist_ok=True)
        replace_file(out, known[options.source].read_bytes())
    except OSError as error:
        what = f"{out} cannot be written ({error.strerror})"
        raise UserError("NAME", what, "start this in a folder that may be written to") from None
    show(f"wrote {out}, a copy of recipe {options.source}; change the line that builds what you want different, then:")
    show(f"fsdp2kit run YOUR.toml recipe={name}")
    return 0


def _write(options: argparse.Namespace, out: Path) -> tuple[str, list[str], str | None, str]:
    """The TOML's text, lines about it, a warning, and the command that starts the run."""
    from fsdp2kit.run import load_recipe
    from fsdp2kit.starter import draft as drafting
    from fsdp2kit.starter.look import look
    from fsdp2kit.starter.machine import advise_on_cpu, bfloat16_speedup, find_fit, launch_command, nodes_of

    kind = drafting.KINDS[options.recipe]
    device, world_size = _machine(options)
    schema = load_recipe(bundled_folder("recipes") / f"{kind.recipe}.py").Config
    facts = look(schema, options.recipe, out, model=options.model, data=options.data, teacher=options.teacher)
    facts = replace(facts, world_size=world_size)
    sections, command = drafting.draft(facts), launch_command(str(out), world_size)
    name = "schema.json" if kind.recipe == "sft" else f"schema.{kind.recipe}.json"
    head = [command, f":schema {bundled_folder('toml') / name}", kind.purpose]
    if device is None:
        head.append(advise_on_cpu(bfloat16_speedup()))
    open_keys = [f"{section}.{key}" for section, keys in sections.items() for key, one in keys.items() if one.is_open]

    def text() -> str:
        return drafting.as_toml(sections, recipe=kind.recipe, head=head)

    if open_keys:
        return text(), [f"wrote {out}; fill in {', '.join(open_keys)}, then:"], None, command
    warning = None
    if device is not None and facts.is_here:
        fit = find_fit(_config(schema, text(), out), device, world_size=world_size)
        sections, warning = drafting.merged(sections, fit.values, "as planned"), fit.warning
        head.append(f"{fit.words[0].upper()}{fit.words[1:]}.")
    local = nodes_of(world_size)[1]
    said = _check(_config(schema, text(), out), world_size=world_size, local_world_size=local)
    return text(), [f"wrote {out}; it passes --check on {counted(world_size, 'rank')}", *said], warning, command


def _config(schema: Any, text: str, out: Path) -> Any:
    import tomli

    from fsdp2kit.config import load_config

    return load_config(schema, tomli.loads(text), source=out)


def _check(config: Any, *, world_size: int, local_world_size: int) -> list[str]:
    """What ``--check`` does; returns what it says of data and steps.

    Raises:
        UserError: it would refuse the TOML.
    """
    from fsdp2kit.config.checks import check_config
    from fsdp2kit.planner.check import check_offline

    sizes = check_config(config, world_size=world_size, local_world_size=local_world_size)
    lines, unchecked = check_offline(config, sizes, local_world_size=local_world_size)
    said = [line for line in lines if line.startswith(("data: ", "train: "))]
    return [*said, *(f"{what} unchecked: not on this machine" for what in unchecked)]


def _machine(options: argparse.Namespace) -> tuple[Any, int]:
    """The device that is planned for, None: no plan; and the ranks: those asked for, or all that are here."""
    import torch

    from fsdp2kit.planner.devices import find_device, this_device

    device = find_device(options.device)
    is_here = torch.accelerator.is_available()
    if device is None and is_here:
        device = this_device(torch.device(torch.accelerator.current_accelerator() or "cpu"))
    default = torch.accelerator.device_count() if is_here else 8 if options.device else 1
    return device, options.world_size or default


def _refuse_existing(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise UserError("--out", f"{out} exists, and is not overwritten", "choose another name")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fsdp2kit new", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "recipe",
        metavar="RECIPE",
        help="sft, lora, qlora, dpo, distill, grpo, pretrain, fsdp1_baseline; or recipe NAME",
    )
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face directory or hub id")
    parser.add_argument("--data", metavar="FILE", help="what `data.path` takes")
    parser.add_argument("--teacher", metavar="DIR", help="of recipe distill: the model to learn from")
    parser.add_argument("--out", type=user_path, metavar="FILE", help="the TOML (RECIPE.toml)")
    parser.add_argument(
        "--world-size", type=positive, metavar="N", help="ranks (the GPUs here, else 8 with --device, else 1)"
    )
    parser.add_argument("--device", metavar="NAME", help="plan for h100, a100, h200, b200, l40s, … (the GPU here)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
