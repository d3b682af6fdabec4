"""Show what the model will see: tokens, masks, packing, statistics, warnings.

python tools/preview.py toml/x.toml [section.key=value ...] [--html FILE] [--json] [--rows 3] [--tokens 80]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# Set before transformers is imported: a preview never waits for a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from fsdp2kit.config.data_checks import check_data
from fsdp2kit.errors import UserError
from fsdp2kit.run import load

STREAM_ROWS = 5000
_PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>preview</title><style>{stylesheet}
body {{ color: {foreground}; background: {background}; margin: 2em; }}
pre {{ font: 14px/1.45 "DejaVu Sans Mono", Menlo, Consolas, monospace; }}</style></head>
<body><pre>{code}</pre></body></html>"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    options = _parse(arguments)
    try:
        preview = _preview(options)
    except UserError as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(preview.as_json(), ensure_ascii=False))
        return 0
    from rich.console import Console
    from rich.terminal_theme import MONOKAI

    from fsdp2kit.data.preview import render, renderables

    if options.html is not None:
        page = render(preview, width=options.width, most_tokens=options.tokens)
        page.save_html(str(options.html), theme=MONOKAI, code_format=_PAGE)
        print(f"wrote {options.html}")
        return 0
    console = Console(width=None if sys.stdout.isatty() else options.width)
    for part in renderables(preview, most_tokens=options.tokens):
        console.print(part)
    return 0


def _preview(options: argparse.Namespace) -> Any:
    from fsdp2kit.data.build import build_data
    from fsdp2kit.data.loader import Loader
    from fsdp2kit.data.preview import build_preview
    from fsdp2kit.model.build import load_hf_config
    from fsdp2kit.model.tokenizer import build_tokenizer

    _, config = load(options.toml, options.overrides)
    check_data(config)
    if config.data.format == "synthetic":
        raise UserError("data.format", '"synthetic" has no text to show', "preview data that is read")
    tokenizer = build_tokenizer(config.model, local_files_only=True)
    try:
        vocab_size = load_hf_config(config.model, local_files_only=True).get_text_config().vocab_size
    except UserError:  # the tokenizer is here and the model is not
        vocab_size = len(tokenizer)
    title = f"{options.toml} · {config.data.format} · {config.data.path or f'{len(config.data.sources)} sources'}"
    with tempfile.TemporaryDirectory() as folder:
        if config.data.streaming:
            config, title = _beginning_of(config, Path(folder)), f"{title} · its first {STREAM_ROWS:,} rows"
        train = config.train.model_copy(update={"micro_batch_size": 1, "steps": 1, "epochs": None})
        quiet_eval = config.eval.model_copy(update={"every": 0})
        config = config.model_copy(update={"train": train, "eval": quiet_eval})
        # A vocabulary that is too small is shown as a warning here.
        loader = build_data(config, tokenizer=tokenizer, vocab_size=2**31).loader
        assert isinstance(loader, Loader), "a stream's beginning was made data that is read whole"
        return build_preview(loader, tokenizer=tokenizer, vocab_size=vocab_size, packs=options.rows, title=title)


def _beginning_of(config: Any, folder: Path) -> Any:
    """The config with a stream's first rows, copied to a file, as data that is read whole."""
    import itertools

    from fsdp2kit.data.sources import find_source
    from fsdp2kit.data.stream import open_stream

    def copied(path: str, split: str, name: str) -> str:
        file = folder / f"{name}.jsonl"
        with open_stream(find_source(path, split=split)) as rows, file.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row.value, default=str) + "\n" for row in itertools.islice(rows, STREAM_ROWS))
        return str(file)

    data = config.data
    changes: dict[str, Any] = {"streaming": False}
    if data.path is not None:
        changes |= {"path": copied(data.path, data.split, "data"), "split": "train"}
    changes["sources"] = [
        part.model_copy(update={"path": copied(part.path, part.split, str(at)), "split": "train"})
        for at, part in enumerate(data.sources)
    ]
    return config.model_copy(update={"data": data.model_copy(update=changes)})


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="preview", description=__doc__.splitlines()[0])
    parser.add_argument("toml", help="path of a TOML, or the name of one that comes with fsdp2kit")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page instead")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object instead")
    parser.add_argument("--rows", type=int, default=2, help="rows of the batch that are shown (2)")
    parser.add_argument("--tokens", type=int, default=80, help="tokens of one speaker that are shown at most (80)")
    parser.add_argument("--width", type=int, default=110, help="characters a line, where there is no terminal (110)")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
