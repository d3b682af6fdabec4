"""A Python file as a module: a recipe, a function of the user's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def import_file(path: str | Path, name: str) -> ModuleType:
    """Run a ``.py`` file as the module ``name``, also if it was imported before. Raises what the file raises."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a name that ends in .py has a loader"
    assert spec.loader is not None, "a name that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses and pickle look themselves up
    spec.loader.exec_module(module)
    return module
