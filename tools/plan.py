"""Plan a run before a device is rented: memory by phase, bytes sent, time, and what to change so that it fits.

fsdp2kit plan toml/x.toml --world-size 64 [--device h100 | --device-memory 80] [section.key=value ...]
    [--fit | --sweep | --longest] [--mfu 0.4] [--inter-node-bandwidth GB_S] [--verbose] [--kv-cache ROWS LENGTH]
    [--png FILE] [--html FILE] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fsdp2kit.console import check_replaces_its_like, counted, in_one_line, rich_console, show, user_path
from fsdp2kit.errors import UserError, pip_install

_MOST = 2**20  # ranks, GiB


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 if it does not fit, or 2 after a user's mistake."""
    options = _parse(arguments)
    try:
        return _run(options)
    finally:
        # What stays frozen is not freed at the interpreter's end, and triton then prints each of its types as a leak.
        gc.unfreeze()


def _run(options: argparse.Namespace) -> int:
    """Plan, print and write what was asked for."""
    _check_numbers_and_files(options)
    os.environ["HF_HUB_OFFLINE"] = "1"  # before the hub client is imported: a plan never waits for a network
    with _without_collector():
        from fsdp2kit.planner import report
        from fsdp2kit.planner.devices import find_device
        from fsdp2kit.planner.estimate import estimate, plan_for
        from fsdp2kit.planner.search import Search
        from fsdp2kit.run import load, world_to_plan

        between_nodes = options.inter_node_bandwidth
        device = find_device(options.device, memory_gib=options.device_memory, between_nodes=between_nodes)
        _, config = load(options.toml, options.overrides)
        given = {"ranks": options.world_size, "local_ranks": options.local_world_size}
        ranks, local, note = world_to_plan(config, **given, verb="plans")
        model, plan = plan_for(config, world_size=ranks, local_world_size=local)
    mfu = options.mfu
    machine = {"device": device, "local_world_size": local}
    found = estimate(config, model, plan, **machine, mfu=mfu, prices_reduction=True, prices_crossings=True)
    share = None if mfu is None or found.speed is None else found.speed.share
    answers, tables, parts, extra = [], [], [], {}
    search = Search(config, ranks, device, local, share)
    for title, candidates in _alternatives(options, search):
        answers += report.answers(title, candidates, world_size=ranks)
        tables += [report.candidates_table(candidates, title=title)] if candidates and title != "longest" else []
        extra[title] = [report.candidate_json(one) for one in candidates]
    own = [*report.summary(found)] if answers and not options.verbose else [*report.renderables(found)]
    if options.kv_cache:
        from fsdp2kit.planner.rollouts import kv_cache_bytes

        rows, length = options.kv_cache
        extra["kv_cache"] = cache = kv_cache_bytes(model, rows=rows, length=length, tp=options.tp)
        if not cache:
            what = "this model has no attention whose keys and values are cached"
            raise UserError("--kv-cache", what, "leave it out")
        size = f"{report.gib(cache)} GiB a rank"
        parts.append(f"KV cache of {rows} rows of {length} tokens over tp {options.tp}: {size}")
    title = f"{options.toml} on {counted(ranks, 'rank')}"
    _write("--png", options.png, lambda: report.draw(found, title=title))
    _write("--html", options.html, lambda: report.page(found, title=title, extra=[*answers, *tables, *parts]).encode())
    if options.json:
        show(json.dumps({"world_size": ranks, **report.as_json(found), **extra}), is_data=True)
    else:
        console = rich_console(width=None if sys.stdout.isatty() else 140)
        for line in answers:
            console.print(line, soft_wrap=True)  # whole, to be copied
        console.print(f"{title}{note}", soft_wrap=True, markup=False)
        for part in [*(tables if options.verbose else []), *own, *parts]:
            console.print(part)
    return 1 if found.fits is False else 0


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Import and build without garbage collection, which would take a tenth of the time and find nothing.

    What is there afterwards is frozen: collections pass it over until `gc.unfreeze`.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _write(flag: str, path: Path | None, content: Callable[[], bytes]) -> None:
    """Write a file, if a path is given; refuse one that cannot be written."""
    try:
        if path is not None:
            path.write_bytes(content())
    except OSError as error:
        todo = "name a file in a folder that may be written to"
        raise UserError(flag, f"{path} cannot be written: {error.strerror}", todo) from None


def _check_numbers_and_files(options: argparse.Namespace) -> None:
    """Refuse retired options, numbers out of range, and pictures in folders that do not exist."""
    if options.trace:
        what = "is no option any more: the tests compare the plan with a trace of the real modules"
        raise UserError("--trace", what, "leave it out, or run pytest tests/planner")
    for flag in ("--world-size", "--local-world-size", "--tp"):
        ranks = getattr(options, flag[2:].replace("-", "_"))
        if ranks is not None and not 1 <= ranks <= _MOST:
            raise UserError(flag, f"{ranks} is no number of ranks", f"give 1 to {_MOST:,}")
    if options.device_memory is not None and not 0 < options.device_memory <= _MOST:
        raise UserError("--device-memory", f"{options.device_memory} is no number of GiB", f"give up to {_MOST:,}")
    between = options.inter_node_bandwidth
    if between is not None and not 0 < between <= _MOST:
        raise UserError("--inter-node-bandwidth", f"{between} is no number of GB/s", "give e.g. 50: 400 Gbit/s")
    if between is not None and options.device is options.device_memory is None:
        raise UserError("--inter-node-bandwidth", "is a device's", "give --device as well, or leave it out")
    if options.mfu is not None and not 0 < options.mfu < 1:
        raise UserError("--mfu", f"{options.mfu} is no share of a device's peak", "give one between 0 and 1, as 0.4")
    if options.kv_cache and not 1 <= min(options.kv_cache) <= max(options.kv_cache) <= 2**40:
        raise UserError("--kv-cache", f"{options.kv_cache} are no rows and length", "give two numbers from 1")
    if options.tp > 1 and not options.kv_cache:
        raise UserError("--tp", "is for the cache of rollouts", "give --kv-cache ROWS LENGTH, too, or leave it out")
    if (options.fit or options.longest) and options.device is options.device_memory is None:
        flag = "--fit" if options.fit else "--longest"
        raise UserError(flag, "needs to know what must fit into", "give --device or --device-memory")
    for flag, path in (("--png", options.png), ("--html", options.html)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError(flag, f"{path} cannot be written", "name a file in a folder that exists")
        check_replaces_its_like(flag, path)


def _alternatives(options: argparse.Namespace, search: Any) -> Iterator[tuple[str, list[Any]]]:
    """What --fit, --sweep and --longest ask for, each under its name."""
    if options.fit:
        yield "fit", search.fit()
    if options.sweep:
        yield "sweep", list(search.sweep())
    if options.longest:
        best = search.longest()
        yield "longest", [best] if best else []


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fsdp2kit plan", description=__doc__.splitlines()[0])
    parser.add_argument("toml", help="path of a TOML, or the name of one that comes with fsdp2kit")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="as for a run")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks (WORLD_SIZE, else the fewest that [mesh] allows)"
    )
    parser.add_argument("--local-world-size", type=int, metavar="N", help="ranks of a node (LOCAL_WORLD_SIZE, else 8)")
    parser.add_argument("--device", metavar="NAME", help="h100, a100, h200, b200, l40s, …")
    parser.add_argument("--device-memory", type=float, metavar="GIB", help="instead of the device's own")
    parser.add_argument(
        "--inter-node-bandwidth",
        type=float,
        metavar="GB_S",
        help="GB/s that a device sends to other nodes (by the device: 50 for an H100 with 400 Gbit/s)",
    )
    parser.add_argument("--fit", action="store_true", help="the cheapest changes that fit")
    parser.add_argument("--sweep", action="store_true", help="the fastest of cp × checkpointing × micro-batch")
    parser.add_argument("--longest", action="store_true", help="the longest sequence that fits")
    parser.add_argument(
        "--mfu", type=float, metavar="SHARE", help="the MFU that this TOML's runs reach, instead of published figures"
    )
    parser.add_argument("--verbose", action="store_true", help="all candidates and the plan's tables, too")
    parser.add_argument("--trace", action="store_true", help=argparse.SUPPRESS)  # retired
    parser.add_argument("--kv-cache", type=int, nargs=2, metavar=("ROWS", "LENGTH"), help="of rollouts of this model")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share a rollout engine (1)")
    parser.add_argument("--png", type=user_path, metavar="FILE", help=f"a picture ({pip_install('matplotlib')})")
    parser.add_argument("--html", type=user_path, metavar="FILE", help="a page with picture and tables")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
