"""The documentation, page by page: `fsdp2kit docs` lists the pages, `fsdp2kit docs grpo` prints one.

fsdp2kit docs                # the pages, with their titles
fsdp2kit docs NAME           # a page, as Markdown; `fsdp2kit docs NAME | less`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fsdp2kit.console import in_one_line, show
from fsdp2kit.errors import UserError, did_you_mean
from fsdp2kit.files.local import bundled_folder


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 if there is no such page."""
    parser = argparse.ArgumentParser(prog="fsdp2kit docs", description=__doc__.splitlines()[0])
    parser.add_argument("page", nargs="?", metavar="NAME", help="a page, as `grpo` or `docs/grpo.md`")
    options = parser.parse_args(arguments)
    pages = {path.stem: path for path in sorted(bundled_folder("docs").glob("*.md"))}
    if options.page is None:
        width = max(map(len, pages))
        for name, path in pages.items():
            show(f"{name:<{width}}  {_title(path)}")
        return 0
    name = Path(options.page).name.removesuffix(".md").replace("-", "_")  # as a page or a message names it
    if name not in pages:
        todo = did_you_mean(name, pages, otherwise="`fsdp2kit docs` lists the pages")
        raise UserError(f"docs {options.page}", "there is no such page", todo)
    show(pages[name].read_text(encoding="utf-8"), end="", is_data=True)
    return 0


def _title(page: Path) -> str:
    """A page's first heading."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), "")


if __name__ == "__main__":
    sys.exit(main())
