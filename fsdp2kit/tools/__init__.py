"""The command lines: ``python -m fsdp2kit.tools.NAME``, or ``fsdp2kit NAME``. In a checkout they are in ``tools/``."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
if not (_HERE / "generate.py").is_file():  # a wheel has them here
    __path__ = [str(_HERE.parents[1] / "tools")]
