"""The runner: find the recipe, load its config, start the process group, call ``main(config)``.

fsdp2kit run toml/llama8b_cp2.toml --nproc 8 [section.key=value ...]
torchrun --nproc-per-node 8 -m fsdp2kit.run toml/llama8b_cp2.toml [section.key=value ...]
python -m fsdp2kit.run toml/llama8b_cp2.toml --check

From Python, ``fsdp2kit.run`` is the function `run`, below: import the module's other names from it by name.
"""

from __future__ import annotations

from fsdp2kit.job import stop

if __name__ == "__main__":
    stop.listen_from_the_start()  # it takes seconds to import torch

import argparse
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist
from pydantic import PydanticUndefinedAnnotation

from fsdp2kit.config import TrainingConfig
from fsdp2kit.config import load_config as validate
from fsdp2kit.config.checks import check_config, smallest_world
from fsdp2kit.config.load import parse_override, read_toml
from fsdp2kit.console import begin_output, counted, positive, show
from fsdp2kit.errors import KnownFailure, UserError, nearest
from fsdp2kit.files.local import bundled_folder, load_json, read_regular
from fsdp2kit.files.python_file import import_file
from fsdp2kit.job import distributed, lost_ranks, process
from fsdp2kit.job.profile_request import noting_sigusr2
from fsdp2kit.job.stop import Stopped
from fsdp2kit.job.tracebacks import write_traceback


@dataclass(frozen=True)
class Finished:
    """What `run` returns, the same on every rank."""

    directory: Path
    """The run directory: ``config.toml``, ``metrics.jsonl``, ``checkpoints/`` and, unless exports are off or go
    elsewhere, the Hugging Face directory ``hf/``."""
    records: list[dict[str, Any]]
    """The objects of ``metrics.jsonl``, one for each logged step of the run, those before a resumption included."""


def load_config(toml: str | Path | Mapping[str, Any], *overrides: str) -> TrainingConfig:
    """A TOML, or the same as a dict, validated against the config class of the recipe that it names.

    Args:
        toml: the path of a TOML, the name of one that comes with fsdp2kit, or its values:
            ``{"recipe": "sft", …}``. Input paths in a file are relative to that file, those
            in a dict and in overrides to the working directory.
        overrides: ``"section.key=value"``, e.g. ``"train.steps=10"``; the value is TOML, a bare word is a string.

    Raises:
        UserError: a file or recipe that is not there, an unknown key, a wrong value; names what was probably meant.
    """
    if not isinstance(toml, (str, Path, Mapping)) or not all(isinstance(one, str) for one in overrides):
        what = "takes a TOML's path, or its values as a dict, and then texts"
        raise UserError("fsdp2kit.load_config", what, 'call e.g. load_config("x.toml", "train.steps=10")')
    return load(toml, overrides)[1]


def run(config: TrainingConfig) -> Finished:
    """Train as a config says, in this process; what ``python -m fsdp2kit.run`` does. Every rank calls it.

    It can be called again, with another ``run.dir``, or with the same one to resume. It ends the process group if it
    has started it; the group of an earlier `start` stays up. Ctrl-C and SIGTERM stop the run with a checkpoint, and it
    returns; of several ranks that have not made a step yet, they end the processes.

    Args:
        config: what `load_config` returned, or an instance of a ``Config`` class beside whose definition there is a
            function ``main(config)``.

    Raises:
        UserError: a mistake in the config, the data or the model, on every rank.
        RunFailure: the run failed. Where ranks wait for one that is lost, they end with one line instead.
    """
    if not isinstance(config, TrainingConfig):
        raise UserError("fsdp2kit.run", f"takes a config, not {config!r:.60}", "call load_config first")
    is_ours = not dist.is_initialized()
    process.count_from_now()
    try:
        several = distributed.ranks_from_environment().size > 1
        with noting_sigusr2(), stop.running(ends_process=several), contextlib.suppress(Stopped):
            recipe, config = _recipe_of(config)
            recipe.main(config)
        return _finished(config)
    except UserError:
        raise  # every rank has it
    except KnownFailure as failure:
        if failure.alone:
            lost_ranks.announce(failure)
        raise
    except Exception as failure:
        if distributed.is_lost_rank(failure):
            lost_ranks.end_lost(failure)
        write_traceback("".join(traceback.format_exception(failure)))
        lost_ranks.announce(failure)
        raise
    finally:
        if is_ours:
            distributed.stop()


# The recipes that `load` found, by the class and the name in their configs: two recipes may share a class.
_LOADED: dict[tuple[type[TrainingConfig], str], ModuleType] = {}


def _recipe_of(config: TrainingConfig) -> tuple[Any, TrainingConfig]:
    """The recipe that `load` found for a config; else the module around its class; else what its name gives."""
    loaded = _LOADED.get((type(config), config.recipe))
    if loaded is not None:
        return loaded, config
    around = sys.modules.get(type(config).__module__)
    if around is not None and vars(around).get("Config") is type(config) and hasattr(around, "main"):
        return around, config
    return load(config.model_dump(mode="json", exclude_none=True), ())


def _finished(config: TrainingConfig) -> Finished:
    """Rank 0, which wrote the records, reads them for all. Collective."""
    directory = Path(config.run.dir)
    records = []
    with distributed.agreement():
        path = directory / "metrics.jsonl"
        if distributed.rank() == 0 and path.is_file():  # a recipe of one's own may log nothing
            records = [load_json(line) for line in read_regular(path).splitlines()]
    return Finished(directory, distributed.gather_objects(records)[0])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a recipe as a TOML says, or only check the TOML. Returns the exit code."""
    begin_output()
    options = _parse(arguments)
    if options.check:
        stop.listen_no_more()  # an interrupted check is no check that passed
        return _check(options.toml, options.overrides, options.world_size)
    if options.nproc > 1:
        from fsdp2kit.job.launcher import launch  # ranks need not import it

        return launch(["-m", "fsdp2kit", "run", options.toml, *options.overrides], ranks=options.nproc)
    try:
        # SIGUSR2 asks for a profile, also while the model is loaded.
        with noting_sigusr2(), stop.running(ends_process=True):
            recipe, config, _ = load_and_start(options.toml, options.overrides)
            recipe.main(config)
            distributed.stop()
    except Stopped:
        distributed.stop()
    except UserError as problem:
        distributed.leave(problem)
    except KnownFailure as failure:
        distributed.leave(failure, code=1, alone=failure.alone)
    except KeyboardInterrupt:
        if distributed.is_main_process():
            show("interrupted", file=sys.stderr)
        lost_ranks.stop()  # no other rank has lost this one
        return 130
    except Exception as failure:
        if distributed.is_lost_rank(failure):
            lost_ranks.end_lost(failure)
        return lost_ranks.end_failed(failure)
    return 0


def load_and_start(toml: str, overrides: Sequence[str]) -> tuple[ModuleType, TrainingConfig, distributed.World]:
    """`load` on every rank, then start the process group with the config's time-out. Collective.

    The group is started even if `load` fails, and every rank raises its error: if ranks leave one by one, torchrun
    kills the others before they can report.
    """
    loaded = None
    error = None
    try:
        loaded = load(toml, overrides)
    except UserError as problem:
        error = problem
    world = distributed.start(timeout_minutes=loaded[1].run.timeout_minutes if loaded else 5.0)
    distributed.agree(error)
    assert loaded is not None, "every rank has a recipe, or an error that was raised just above"
    return *loaded, world


def load(toml: str | Path | Mapping[str, Any], overrides: Sequence[str]) -> tuple[ModuleType, TrainingConfig]:
    """The recipe module that a TOML, or its values, names, and these validated against that recipe's ``Config``.

    Raises:
        UserError: the TOML, the recipe or an override is wrong.
    """
    if isinstance(toml, Mapping):
        path = Path("config")
        values = toml
    else:
        path = find_toml(str(toml))
        values = read_toml(path)
    named = {".".join(key): value for key, value in map(parse_override, overrides)}
    name = named.get("recipe", values.get("recipe"))
    if not isinstance(name, str):
        raise UserError(f"{path}: recipe", "is required", 'add e.g. recipe = "sft" at the top of the TOML')
    recipe_path = find_recipe(name, toml=path)
    recipe = load_recipe(recipe_path)
    config = validate(recipe.Config, values, source=path, overrides=overrides, say=_say)
    if name.endswith(".py"):  # the resolved config must find it from the run directory, too
        config = config.model_copy(update={"recipe": str(recipe_path.resolve())})
    _LOADED[type(config), config.recipe] = recipe
    return recipe, config


def _say(line: str) -> None:
    """Print a line once a job; to stderr, since tools print results."""
    if distributed.is_main_process():
        show(line, file=sys.stderr)


def find_toml(name: str) -> Path:
    """``name`` as a path, or else the package's TOML of that name, with or without ``.toml``."""
    path = Path(name).expanduser()
    folder = bundled_folder("toml")
    if path.is_file():
        return path
    bundled = folder / (path.name if path.suffix == ".toml" else f"{path.name}.toml")
    if str(path.parent) in (".", "toml") and bundled.is_file():
        return bundled
    known = sorted(file.stem for file in folder.glob("*.toml"))
    near = nearest(bundled.stem, known)
    todo = f"give a TOML's path, or one that comes with fsdp2kit: {', '.join(known)}"
    raise UserError(name, "no such file", f"did you mean {near}? Or {todo}" if near else todo)


def find_recipe(name: str, *, toml: Path) -> Path:
    """The file of a recipe: a ``.py`` path, a name in the user's ``recipes/``, or one of the package's recipes."""
    if name.endswith(".py"):
        candidates = [toml.resolve().parent / Path(name).expanduser(), Path(name)]
    else:
        candidates = [Path("recipes") / f"{name}.py", bundled_folder("recipes") / f"{name}.py"]
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    known = ", ".join(sorted(file.stem for file in bundled_folder("recipes").glob("*.py")))
    raise UserError(f"{toml}: recipe", f"{name!r} was not found", f"name one of {known}, or the path of a .py file")


def load_recipe(path: str | Path) -> ModuleType:
    """Import a recipe file, which must define ``Config`` and ``main(config)``.

    Raises:
        UserError: it does not define them, is not Python, or fails when executed.
    """
    path = Path(path)
    if path.suffix != ".py":
        raise UserError(str(path), "is not a Python file", "name a .py file")
    try:
        module = import_file(path, f"fsdp2kit_recipe_{path.stem}")
    except SyntaxError as error:
        raise UserError(f"{error.filename}:{error.lineno}", f"is not Python: {error.msg}", "mend that line") from None
    except Exception as error:  # a recipe's top level may raise anything
        # Name the last line outside the import machinery and, if there is one, outside installed packages.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        frames = [frame for frame in frames if "site-packages" not in frame.filename] or frames
        todo = f"install {error.name}" if isinstance(error, ModuleNotFoundError) else "mend that line"
        if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "fsdp2kit":
            todo = (
                "mend that line; a recipe of another version of fsdp2kit is copied anew by `fsdp2kit new recipe NAME`"
            )
        what = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{frames[-1].filename}:{frames[-1].lineno}", what, todo) from None
    for name in ("Config", "main"):
        if not hasattr(module, name):
            raise UserError(str(path), f"defines no {name}", "a recipe has a class Config and a function main(config)")
    try:
        module.Config.model_rebuild()
    except PydanticUndefinedAnnotation as error:
        what = f"Config has a field of the type {error.name}, which is not defined"
        raise UserError(str(path), what, "define or import it in the recipe") from None
    return module


def _parse(arguments: Sequence[str] | None) -> Any:
    is_check = "--check" in (sys.argv[1:] if arguments is None else arguments)
    name, what = ("check", "Check a TOML and plan its run.") if is_check else ("run", "Train as a TOML says.")
    parser = argparse.ArgumentParser(prog=f"fsdp2kit {name}", description=what)
    parser.add_argument("toml", help="path of a TOML, or the name of one that comes with fsdp2kit")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="the value is TOML; a bare word is a string"
    )
    parser.add_argument("--check", action="store_true", help="validate only: no process group, no weights, no network")
    parser.add_argument(
        "--world-size",
        type=positive,
        metavar="N",
        help="with --check: ranks of the run (default: WORLD_SIZE, else the fewest that [mesh] allows)",
    )
    parser.add_argument(
        "--nproc", type=positive, default=1, metavar="N", help="start N ranks on this host (default: this process)"
    )
    options = parse_with_overrides(parser, arguments)
    if options.world_size and not options.check:
        parser.error("--world-size is for --check; --nproc N starts a run on N ranks")
    if options.nproc > 1 and options.check:
        parser.error("--nproc starts ranks, and --check needs none; --world-size N checks a run on N ranks")
    if options.nproc > 1 and "WORLD_SIZE" in os.environ:
        parser.error("--nproc starts ranks, and torchrun has started this one; leave --nproc out, or torchrun")
    return options


def parse_with_overrides(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line that ends in overrides. `load` refuses unknown options, on every rank."""
    options, unknown = parser.parse_known_intermixed_args(arguments)
    options.overrides += unknown
    return options


def world_to_plan(
    config: TrainingConfig, *, ranks: int | None = None, local_ranks: int | None = None, verb: str
) -> tuple[int, int, str]:
    """The world size that ``check`` and ``plan`` take: that of their option, else WORLD_SIZE, else the fewest ranks.

    Args:
        ranks, local_ranks: the options' values: ranks of the run, and of a node. Without the second: LOCAL_WORLD_SIZE,
            else 8.
        verb: what the command does with another ``--world-size N``, for its line.

    Returns:
        Ranks, ranks of a node, and what to say of a number that no option gave.

    Raises:
        UserError: WORLD_SIZE or LOCAL_WORLD_SIZE is no number of processes.
    """
    found = distributed.ranks_from_environment()
    size = found.size
    local = found.local_size
    note = ""
    if ranks is not None:
        size = ranks
    elif "WORLD_SIZE" in os.environ:
        note = " (WORLD_SIZE)"
    else:
        size = smallest_world(config)
        note = f" (the fewest ranks that [mesh] allows; --world-size N {verb} another number)"
    if local_ranks is not None:
        local = local_ranks
    elif "LOCAL_WORLD_SIZE" not in os.environ:
        local = 8
        if size > local:
            note += f"; nodes of {local} ranks (LOCAL_WORLD_SIZE says otherwise)"
    return size, min(local, size), note


def _check(toml: str, overrides: Sequence[str], world_size: int | None) -> int:
    """``--check`` on as many ranks as `world_to_plan` says."""
    started = time.perf_counter()
    # Before the recipe imports the hub client: a check never waits for a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        recipe, config = load(toml, overrides)
        world_size, local_world_size, note = world_to_plan(config, ranks=world_size, verb="checks")
        sizes = check_config(config, world_size=world_size, local_world_size=local_world_size)
        if hasattr(recipe, "check"):
            lines = [str(sizes)]
            unchecked = recipe.check(config)
        else:
            from fsdp2kit.planner.check import check_offline  # after the environment is set: it imports the hub client

            lines, unchecked = check_offline(config, sizes, local_world_size=local_world_size)
    except UserError as problem:
        show(f"error: {problem}", file=sys.stderr)
        return 2
    show(f"ok: {toml} on {counted(world_size, 'rank')}{note}, checked in {time.perf_counter() - started:.1f} s")
    show(*lines, *(f"{what} unchecked: not on this machine" for what in unchecked), sep="\n")
    show("weights and memory unchecked: the start reads and takes them")
    return 0


if __name__ == "__main__":
    process.end_process(main())
