"""Write docs/api.md, the reference of ``import fsdp2kit as fk``, from the docstrings; ``--check`` only compares.

python tools/api.py [--check]

griffe reads the source: nothing is imported. What a section of a config has is in docs/keys.md and the JSON schemas,
so here a section is a name.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import fsdp2kit
from fsdp2kit.console import in_one_line, show
from fsdp2kit.errors import UserError, importing

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
_HEAD = """# Python reference

`import fsdp2kit as fk`, then `fk.NAME`; `help(fsdp2kit)` has a table and a complete script. Collective: every rank
calls it, and all return or all raise. `[B, S]`: rows, tokens; `s`: this rank's share. Written by `tools/api.py`.
"""
_SECTIONS = """
## Sections of a config

Keyword arguments or `model_validate(dict)` make one. Keys and defaults: [keys.md](keys.md), `toml/schema.json`.

"""


def page() -> str:
    """The text of docs/api.md."""
    with importing("griffe", where="tools/api.py"):
        import griffe

    module = griffe.load("fsdp2kit", search_paths=[Path(fsdp2kit.__file__).parents[1]], allow_inspection=False)
    functions, sections = [], []
    for name, home in fsdp2kit._HOMES.items():
        found = module[f"{home}.{fsdp2kit._NAMES_AT_HOME.get(name, name)}"]
        found = found.final_target if found.is_alias else found
        if home.startswith("config."):
            sections.append(name)
        else:
            functions.append("\n".join(_entry(name, found)))
    return "\n".join([_HEAD, *functions]) + _SECTIONS + textwrap.fill(", ".join(sections), 119) + "\n"


def _entry(name: str, found: Any) -> list[str]:
    """A name's heading, signature and docstring as Markdown."""
    lines = [f"## {name}", f"```py\n{_signature(name, found)}\n```"]
    for section in found.docstring.parse("google", warnings=False):
        kind, value = section.kind.value, section.value
        if kind == "text":
            lines.append(_plain(value))
            continue
        title = {"parameters": "", "raises": "Raises ", "returns": "Returns "}[kind]
        for one in value:
            what = one.annotation if kind == "raises" else getattr(one, "name", "")
            text = " ".join(_plain(one.description).split())
            lines.append(f"- {title}`{what}`: {text}" if what and kind != "returns" else f"- {title}{text}")
    if found.is_class and not found.bases:
        for field in found.attributes.values():
            if field.docstring is not None and not field.is_private and "property" not in field.labels:
                lines.append(f"- `{field.name}`: {' '.join(_plain(field.docstring.value).split())}")
    return [*lines, ""]


def _signature(name: str, found: Any) -> str:
    """``name(parameter: type = default, …) -> type``, in several lines if it is long."""
    if found.is_class:
        init = found.members.get("__init__")
        parameters = [one for one in (init or found).parameters if one.name != "self"]
        returns = ""
    else:
        parameters, returns = list(found.parameters), f" -> {found.returns}" if found.returns else ""
    texts, is_keyword = [], False
    for one in parameters:
        kind = one.kind.value if one.kind else ""
        if kind == "keyword-only" and not is_keyword:
            texts.append("*")
        is_keyword = is_keyword or kind == "keyword-only" or kind == "variadic positional"
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        annotation = f": {one.annotation}" if one.annotation else ""
        default = f" = {one.default}" if one.default is not None and not star else ""
        texts.append(f"{star}{one.name}{annotation}{default}")
    return textwrap.fill(f"{name}({', '.join(texts)}){returns}", 119, subsequent_indent="    ", break_long_words=False)


def _plain(text: str) -> str:
    """reStructuredText's double backquotes as Markdown's single ones."""
    return re.sub(r"``(.+?)``", r"`\1`", text.strip(), flags=re.DOTALL)


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Write the page, or with ``--check`` only say that it is out of date. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="api", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is out of date")
    options = parser.parse_args(arguments)
    if not PAGE.parent.is_dir():
        raise UserError(str(PAGE.parent), "no such folder", "run it in a checkout of fsdp2kit, as python tools/api.py")
    text = page()
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
        return 0
    show(f"{PAGE} is out of date: run make schema" if options.check else f"wrote {PAGE}")
    if not options.check:
        PAGE.write_text(text, encoding="utf-8")
    return 1 if options.check else 0


if __name__ == "__main__":
    sys.exit(main())
