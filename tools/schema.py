"""Write the JSON schema of each recipe's TOML, which editors use for completion: python tools/schema.py [--check]

``toml/schema.json`` is that of the sft recipe, ``toml/schema.RECIPE.json`` those of the others. A TOML names its
schema in its ``#:schema`` line.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fsdp2kit.run import bundled_folder, load_recipe


def schema_files(folder: Path) -> dict[Path, str]:
    """For each recipe that comes with the package, the path and the text of its schema in ``folder``."""
    files = {}
    for recipe in sorted(bundled_folder("recipes").glob("*.py")):
        name = "schema.json" if recipe.stem == "sft" else f"schema.{recipe.stem}.json"
        schema = load_recipe(recipe).Config.model_json_schema()
        files[folder / name] = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    return files


def main() -> int:
    """Write the files, or with ``--check`` only say which are out of date. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Write the JSON schema of each recipe's TOML.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is out of date")
    options = parser.parse_args()
    files = schema_files(bundled_folder("toml"))
    stale = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        print(f"{path} is out of date" if options.check else f"wrote {path}")
        if not options.check:
            path.write_text(files[path], encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
