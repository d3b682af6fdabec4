"""Every TOML key with type, default and doc: the sections, one section, one key, or a search by words.

fsdp2kit keys                       # the sections
fsdp2kit keys fsdp                  # a section's keys, a line each
fsdp2kit keys fsdp.strategy         # all about a key
fsdp2kit keys "held-out data"       # keys whose names or docs have these words
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from fsdp2kit.config.keys import Key, Reference, Schema, read_keys
from fsdp2kit.console import in_one_line, show
from fsdp2kit.errors import UserError, did_you_mean
from fsdp2kit.files.local import bundled_folder

_MOST = 12  # keys that a search shows
_DEEPEST = 3  # dots in the name of a key that is listed with its section: not those of eval.sets.NAME.columns


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 if nothing was found."""
    options = _parse(arguments)
    reference = read_keys(_schemas(options.recipe))
    name = options.words[0] if len(options.words) == 1 else ""
    keys = reference.find(name) if name else []
    is_search = bool(options.words) and not keys
    if is_search:
        keys = _found(reference, options.words)
    if options.json:
        show(json.dumps([key.as_json() for key in keys or reference.keys]), is_data=True)
    elif not options.words:
        _print_sections(reference)
    elif not is_search and name.strip("[]") == keys[0].name:
        for key in keys:
            if key.name == keys[0].name:
                _print_whole(key, reference)
        if inside := [key for key in keys if key.name != keys[0].name]:
            show()
            _print_lines(inside, reference)
    else:
        shallow = [key for key in keys if key.name.count(".") <= _DEEPEST]
        _print_lines(keys[:_MOST] if is_search else shallow or keys, reference)
        if is_search and len(keys) > _MOST:
            show(f"and {len(keys) - _MOST} more; give more words")
    return 0


def _found(reference: Reference, words: Sequence[str]) -> list[Key]:
    """What a search finds.

    Raises:
        UserError: it finds nothing; the error names what is spelt like it.
    """
    is_name = len(words) == 1 and "." in words[0]  # a dotted name that does not exist is misspelt
    if not is_name and (keys := reference.search(words)):
        return keys
    text = " ".join(words)
    near = reference.near(text)
    todo = f"did you mean {' or '.join(near)}?" if near else "fsdp2kit keys lists the sections; try other words"
    raise UserError("keys", f"there is no {text!r}" if is_name else f"nothing has {text!r}", todo)


def _print_sections(reference: Reference) -> None:
    names = {name: f"[{name}]" for name in reference.sections}
    width = max(map(len, names.values()))
    for key in reference.keys:
        if not key.section and key.name not in names:
            show(_cut(f"{key.name:<{width}}  {key.doc}"))
    for name, shown in names.items():
        recipes = {recipe for key in reference.find(name) for recipe in key.recipes}
        show(_cut(f"{shown:<{width}}  {reference.sections[name]}{_only(sorted(recipes), reference)}"))
    show('\nfsdp2kit keys SECTION: its keys; SECTION.KEY: all about one; "held-out data": search by words')


def _print_lines(keys: Sequence[Key], reference: Reference) -> None:
    """A line a key: name, default and the first sentence of its doc. If recipes differ, the first one's."""
    first: dict[tuple[str, str], Key] = {}
    for key in keys:
        first.setdefault((key.name, key.variant), key)
    names = max(len(name) for name, _ in first)
    defaults = min(24, max(len(key.default) for key in first.values()))
    for (name, variant), key in first.items():
        alike = [one for one in keys if (one.name, one.variant) == (name, variant)]
        note = f" ({variant})" if variant else ""
        note += " (differs by recipe)" if len(alike) > 1 else _only(key.recipes, reference)
        show(_cut(f"{name:<{names}}  {key.default:<{defaults}}  {_sentence(key.doc)}{note}"))


def _print_whole(key: Key, reference: Reference) -> None:
    show(f"{key.name}{_only(key.recipes, reference)}")
    parts = {"type": key.type, "default": key.default, "only with": key.variant and f"{key.section}.{key.variant}"}
    for name, value in parts.items():
        if value:
            show(f"  {name}: {value}")
    width = min(shutil.get_terminal_size((110, 1)).columns, 110)
    show(textwrap.fill(key.doc, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))


def _only(recipes: Sequence[str], reference: Reference) -> str:
    others = [recipe for recipe in reference.recipes if recipe not in recipes]
    if not others:
        return ""
    return f" (not recipe {others[0]})" if len(others) == 1 else f" (recipe {', '.join(recipes)})"


def _sentence(text: str) -> str:
    """The text up to the first full stop or semicolon outside brackets; a list of choices whole."""
    if text.startswith('"'):
        return text.rstrip(".")
    depth = 0
    for at, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        is_end = letter in ".;" and text[at + 1 : at + 2] in ("", " ") and not text[:at].endswith(("e.g", "i.e"))
        if is_end and not depth:
            return text[:at]
    return text


def _cut(line: str) -> str:
    """A line that fits into the terminal; whole where there is none."""
    width = shutil.get_terminal_size((0, 0)).columns if sys.stdout.isatty() else 0
    return line if not width or len(line) <= width else f"{line[: width - 1]}…"


def _schemas(recipe: str | None) -> dict[str, Schema]:
    """The schemas of the recipes that come with the package, or of one recipe; sft first.

    Raises:
        UserError: there is no such recipe, or a recipe of the user's own cannot be executed.
    """
    if recipe is not None and recipe.endswith(".py"):
        from fsdp2kit.run import load_recipe  # imports torch, as the recipe does

        return {Path(recipe).stem: load_recipe(recipe).Config.model_json_schema()}
    folder = bundled_folder("toml")
    files = {"sft": folder / "schema.json"}
    files |= {path.name.split(".")[1]: path for path in sorted(folder.glob("schema.*.json"))}
    if recipe is not None and recipe not in files:
        known = f"name one of {', '.join(files)}, or the path of a .py file"
        raise UserError("--recipe", f"there is no recipe {recipe!r}", did_you_mean(recipe, files, otherwise=known))
    asked = files if recipe is None else {recipe: files[recipe]}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in asked.items()}


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fsdp2kit keys", description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", metavar="SECTION[.KEY] | WORDS", help="default: list the sections")
    parser.add_argument("--recipe", metavar="NAME", help="only this recipe's keys; a name, or a .py file of your own")
    parser.add_argument("--json", action="store_true", help="print a JSON list of keys instead")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
