"""A Hugging Face directory to a distributed checkpoint of its weights, on one process and without a GPU.

python tools/hf_to_dcp.py hf_dir/ out/ [--verify]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fsdp2kit.checkpoint.compare import compare_logits
from fsdp2kit.checkpoint.from_hf import hf_to_dcp
from fsdp2kit.errors import UserError


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(prog="hf_to_dcp", description=__doc__.splitlines()[0])
    parser.add_argument(
        "source", type=Path, metavar="HF_DIR", help="config.json and safetensors, as transformers has them"
    )
    parser.add_argument("out", type=Path, help="the directory to write; for model.weights, or tools/dcp_to_hf.py")
    parser.add_argument("--verify", action="store_true", help="load both again and compare their logits")
    options = parser.parse_args(arguments)
    try:
        hf_to_dcp(options.source, options.out)
        print(f"{options.out}: written")
        if options.verify:
            print(compare_logits(options.out, options.source))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
