"""Write the JSON schema of a recipe's TOML, which editors use for completion.

fsdp2kit schema my_recipe.py    # my_recipe.schema.json, beside it
fsdp2kit schema [--check]       # those of the recipes that come with fsdp2kit

``toml/schema.json`` is that of the sft recipe, ``toml/schema.RECIPE.json`` those of the others. A TOML names its
schema in its ``#:schema`` line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fsdp2kit.console import in_one_line, show
from fsdp2kit.errors import UserError
from fsdp2kit.run import bundled_folder, load_recipe


def schema_files(folder: Path) -> dict[Path, str]:
    """The path in ``folder`` and the text of the schema of each recipe that comes with the package."""
    files = {}
    for recipe in sorted(bundled_folder("recipes").glob("*.py")):
        name = "schema.json" if recipe.stem == "sft" else f"schema.{recipe.stem}.json"
        files[folder / name] = schema_of(recipe)
    return files


def schema_of(recipe: Path) -> str:
    """The text of the JSON schema of a recipe's ``Config``.

    Raises:
        UserError: there is no such recipe, or it cannot be executed.
    """
    if not recipe.is_file():
        raise UserError(str(recipe), "no such file", "give the path of a recipe, a .py file")
    return json.dumps(load_recipe(recipe).Config.model_json_schema(), indent=2, ensure_ascii=False) + "\n"


def is_current(path: Path, text: str) -> bool:
    """Whether a file holds the same schema as ``text``; versions of pydantic write it differently (0 or 0.0)."""
    return _stated(json.loads(path.read_text(encoding="utf-8"))) == _stated(json.loads(text))


def _stated(schema: Any) -> Any:
    """A schema without ``additionalProperties = true``, which is the default."""
    if isinstance(schema, list):
        return [_stated(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _stated(each) for key, each in schema.items() if (key, each) != ("additionalProperties", True)}


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Write the files, or with ``--check`` only say which are out of date. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="schema", description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", type=Path, help="recipes of your own; default: those of fsdp2kit")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    options = parser.parse_args(arguments)
    files = {recipe.with_suffix(".schema.json"): schema_of(recipe) for recipe in options.recipes}
    for path in files:
        show(f"first line of a TOML beside it: #:schema ./{path.name}")
    files = files or schema_files(bundled_folder("toml"))
    stale = [path for path, text in files.items() if not (path.is_file() and is_current(path, text))]
    for path in stale:
        show(f"{path} is out of date" if options.check else f"wrote {path}")
        if not options.check:
            path.write_text(files[path], encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
