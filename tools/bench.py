"""Measure fsdp2kit beside alternatives: steps, memory, loading, saving. For a checkout: a wheel has no benchmarks.

torchrun --nproc-per-node 2 tools/bench.py [peers] --model DIR --data chat.jsonl [--peers handwritten trl …]
torchrun --nproc-per-node 2 tools/bench.py fsdp1 toml/fsdp1_baseline.toml [section.key=value …]
torchrun --nproc-per-node 2 tools/bench.py load --params 0.5 --files 1 --dtype bfloat16
torchrun --nproc-per-node 2 tools/bench.py save --params 0.5
python tools/bench.py convert [--params 0.5 1.5]
python tools/bench.py vocabulary [--vocabulary 128256] [--tokens 16384] [--whole]
[torchrun --nproc-per-node 4] tools/bench.py experts [--experts 32] [--rounds 20]
python tools/bench.py graphs [--models llama qwen3 gemma3 qwen3_moe]
python tools/bench.py copies
python tools/bench.py update [--params 1.0] [--dtype bfloat16]
torchrun --nproc-per-node 2 tools/bench.py sync [--params 0.5] [--bucket-mib 16]
python tools/bench.py gpu [--device cpu --dry-run]
python tools/bench.py report FOLDER [FOLDER …]     # several, e.g. before and after: side by side

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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NoReturn, get_args, get_origin, get_type_hints
from xml.etree import ElementTree

import numpy as np

from fsdp2kit.console import begin_output, new_figure, positive, show, user_path, write_figure
from fsdp2kit.errors import UserError
from fsdp2kit.job.distributed import is_main_process, leave, stop
from fsdp2kit.job.process import end_process

COMMANDS = {
    "peers": "peers",
    "fsdp1": "peers",
    "load": "storage",
    "save": "storage",
    "convert": "storage",
    "vocabulary": "vocabulary",
    "gpu": "gpu",
    "experts": "experts",
    "graphs": "graphs",
    "copies": "copies",
    "update": "update",
    "sync": "sync",
}
"""By command: the module of `tools.benchmarks` that has ``bench_COMMAND``, whose parameters are the options."""


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, as every tool does."""

    def error(self, message: str) -> NoReturn:
        where, _, what = message.removeprefix("argument ").partition(": ")
        raise UserError(where, what, f"see bench.py {self.prog.split()[-1]} --help")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, 1 where a comparison is void, 2 after a user's mistake."""
    begin_output()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words in ([], ["-h"], ["--help"]):
        show(__doc__)
        return 0
    name = "peers" if words[0].startswith("-") else words.pop(0)
    sys.path.insert(0, str(Path(__file__).parents[1]))  # `tools` is no installed package
    if name == "report" and words:
        folders = [user_path(word) for word in words]
        for folder in folders:
            if not folder.is_dir():
                show(f"error: report: {folder} is no folder; name one that `make gpu` has filled", file=sys.stderr)
                return 2
        show("\n".join(report_lines(*folders)))
        return 0
    if name not in COMMANDS:
        show(f"error: {name!r} is none of {', '.join(COMMANDS)}, report FOLDER", file=sys.stderr)
        return 2
    # Set before transformers is imported: a benchmark never waits for a hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "cpu" in words and "--device" in words:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    from tools.benchmarks.harness import measure

    bench = getattr(importlib.import_module(f"tools.benchmarks.{COMMANDS[name]}"), f"bench_{name}")
    parser = Parser(prog=f"bench {name}", description=(bench.__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--out", type=user_path, metavar="FILE", help="also write that object to a file")
    parser.add_argument("--table", type=user_path, metavar="FILE", help="also write the Markdown table to a file")
    parser.add_argument("--figure", type=user_path, metavar="FILE", help="draw a PNG (extra: plot)")
    parser.add_argument(
        "--max-minutes", type=float, default=float("inf"), help="start no further part after this long"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cpu: use no CUDA device")
    add_options(parser, bench)
    result: dict[str, Any] = {}
    try:
        options = vars(parser.parse_intermixed_args(words))
        given = {key: options.pop(key) for key in ("json", "out", "table", "figure", "device", "max_minutes")}
        _check_outputs(given)
        # Written after every part: a comparison may take a quarter of an hour, and the next may be killed.
        for result in measure(bench, max_minutes=given["max_minutes"], **options):
            _write(result, given)
    except UserError as problem:
        leave(problem)
    if is_main_process():
        show(json.dumps(result) if given["json"] else "\n".join(result_lines(result)))
    stop()
    return 0 if all(result.get("checks", {}).values()) else 1


def add_options(parser: argparse.ArgumentParser, bench: Callable[..., Any]) -> None:
    """Add a bench's parameters, without its world: type and default from the signature, help from the docstring.

    Parameters that are not keyword-only become arguments without a flag. Integers must be positive.
    """
    helps = dict(re.findall(r"^ +(\w+): (.+)$", inspect.getdoc(bench) or "", re.MULTILINE))
    kinds = get_type_hints(bench)
    for name, parameter in list(inspect.signature(bench).parameters.items())[1:]:
        kind = kinds[name]
        default = parameter.default
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
            named["type"] = {int: positive, Path: user_path}.get(kind, kind)
        if not is_required and default not in (None, ()):
            named["help"] += f" ({' '.join(map(str, default)) if isinstance(default, tuple) else default})"
        flag = f"--{name.replace('_', '-')}" if parameter.kind is parameter.KEYWORD_ONLY else name
        parser.add_argument(flag, **named)


def _check_outputs(given: dict[str, Any]) -> None:
    """Refuse files that cannot be written before anything is measured for them."""
    for name in ("out", "table", "figure"):
        file = given[name]
        if file is not None and not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
            raise UserError(f"--{name}", f"{file} cannot be written", "name a file in a folder that exists")
    if given["figure"] is not None:
        new_figure("--figure")


def _write(result: dict[str, Any], given: dict[str, Any]) -> None:
    if not is_main_process():
        return
    if given["out"] is not None:
        given["out"].write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if given["table"] is not None:
        given["table"].write_text("\n".join(result_lines(result)) + "\n", encoding="utf-8")
    if given["figure"] is not None:
        draw(result, given["figure"])


def result_lines(result: dict[str, Any]) -> list[str]:
    """A result as Markdown: its table, notes, checks and provenance."""
    return [*_table(result["rows"]), *_about(result)]


def _table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Rows as Markdown, without their lists."""
    columns = list(dict.fromkeys(key for row in rows for key in row if not isinstance(row[key], list)))
    lines = ["| " + " | ".join(_header(key) for key in columns) + " |", "| --- " * len(columns) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(_cell(key, row[key]) if key in row else "" for key in columns) + " |")
    return lines


def _about(result: dict[str, Any]) -> list[str]:
    """What stands below a table: notes, checks and provenance."""
    checks = [f"{_header(name)}: {_cell(name, holds)}" for name, holds in result.get("checks", {}).items()]
    lines = ["", *result.get("notes", []), *checks]
    if source := result.get("provenance"):
        git = source["git"]
        ranks = f"{source['world_size']} ranks; load average {source['load_average']}"
        versions = ", ".join(f"{name} {version}" for name, version in source["versions"].items() if version)
        commit = f"; commit {git['commit'][:10]}{' (modified)' if git['modified'] else ''}" if git else ""
        lines += ["", f"command: {source['command']}", f"device: {', '.join(source['devices'])}; {ranks}"]
        lines.append(f"versions: {versions}{commit}")
    return lines


def report_lines(*folders: Path) -> list[str]:
    """What `make gpu` left in folders as Markdown: a table of every result, and of every test that was run.

    Of several folders the rows of the same name stand beneath each other, in the order of the folders.
    """
    names = [folder.name for folder in folders]
    runs = dict(zip(names if len(set(names)) == len(names) else map(str, folders), folders, strict=True))
    lines: list[str] = []
    for run, folder in runs.items():
        for file in sorted(folder.glob("*.xml")):
            lines += [f"## {file.stem}{f' ({run})' if len(runs) > 1 else ''}", "", *_test_lines(file), ""]
    for stem in sorted({file.stem for folder in folders for file in folder.glob("*.json")}):
        files = {run: folder / f"{stem}.json" for run, folder in runs.items()}
        results = {run: json.loads(file.read_text(encoding="utf-8")) for run, file in files.items() if file.is_file()}
        lines += [f"## {stem}", "", *_result_lines_of(results, named=len(runs) > 1), ""]
    return lines


def _test_lines(file: Path) -> list[str]:
    """The tests of a JUnit file as Markdown."""
    lines = ["| test | outcome | seconds | |", "| --- | --- | --- | --- |"]
    for case in ElementTree.parse(file).iter("testcase"):
        if case.get("name") is None:  # pytest-xdist leaves it of a test that was running when time was up
            continue
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        problem = next((found for found in case if found.tag in ("failure", "error", "skipped")), None)
        outcome, why = ("ok", "") if problem is None else (problem.tag, problem.get("message", ""))
        why = why.partition("\n")[0] or ", ".join(f"{p.get('name')} {p.get('value')}" for p in case.iter("property"))
        lines.append(f"| {name} | {outcome} | {float(case.get('time', 0)):.1f} | {why.replace('|', '/')} |")
    return lines


def _result_lines_of(results: dict[str, dict[str, Any]], *, named: bool) -> list[str]:
    """A benchmark's results by run as Markdown.

    Args:
        named: whether to say which run a row is of.
    """
    from tools.benchmarks.shares import share_lines

    alike: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run, result in results.items():
        for row in result["rows"]:
            key = (row["model"], row["variant"]) if "variant" in row else (next(iter(row.values())),)
            alike.setdefault(key, []).append({"run": run, **row} if named else row)
    rows = [row for same in alike.values() for row in same]
    others = [row for row in rows if "kernels" not in row]
    lines = _table(others) if others else []
    if len(others) < len(rows):
        lines += [*([""] if others else []), *share_lines({run: result["rows"] for run, result in results.items()})]
    for run, result in results.items():
        lines += [*(["", f"{run}:"] if named else []), *_about(result)]
    return lines


def _header(key: str) -> str:
    return key.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ").strip()


def _cell(key: str, value: Any) -> str:
    if isinstance(value, dict):
        if "ratio" in value:
            return f"**{value['ratio']:.3g}** ({value['low']:.3g} – {value['high']:.3g})"
        return f"{value['median']:.3g} s ({value['p25']:.3g} – {value['p75']:.3g})"
    if value is None:
        return "—"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if key.endswith("_bytes"):
        return f"{value / 2**20:,.0f} MiB"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw the result's ``bars`` into a PNG: a panel each by its title, columns of its rows side by side."""
    rows = result["rows"]
    panels = result.get("bars", {"seconds": ["seconds"]})
    names = [next(iter(row.values())) for row in rows]
    positions = np.arange(len(rows))
    figure = new_figure("--figure", figsize=(4.5 * len(panels), 4.2), layout="tight")
    every = figure.subplots(1, len(panels), squeeze=False)
    for axes, (title, panel) in zip(every[0], panels.items(), strict=True):
        for number, column in enumerate(panel):
            values = [row.get(column) for row in rows]
            values = [value["median"] if isinstance(value, dict) else value or 0 for value in values]
            offset = (number - (len(panel) - 1) / 2) * 0.76 / len(panel)
            axes.barh(positions + offset, values, height=0.76 / len(panel), label=_header(column))
        axes.set_yticks(positions, names)
        axes.yaxis.set_inverted(True)
        axes.set_title(title)
        axes.legend()
    write_figure(figure, file)


if __name__ == "__main__":
    end_process(main())
