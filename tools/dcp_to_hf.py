"""Convert a distributed checkpoint to a Hugging Face directory, in one process and without a GPU.

python tools/dcp_to_hf.py runs/x/checkpoints/step-000200 out/ --dtype bfloat16
python tools/dcp_to_hf.py runs/lora/checkpoints/step-000200 out/ --merge   # an adapter, merged into its model
"""

from __future__ import annotations

import argparse
import sys

from fsdp2kit.checkpoint.from_hf import compare_logits
from fsdp2kit.checkpoint.hf import DTYPES, MAX_SHARD_BYTES, dcp_to_hf
from fsdp2kit.checkpoint.store import check_writable, is_remote, to_path
from fsdp2kit.errors import UserError, in_one_line
from fsdp2kit.files import user_path
from fsdp2kit.model.adapters import CONFIG_NAME


@in_one_line
def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code: 0, or 2 after a user's mistake."""
    parser = argparse.ArgumentParser(prog="dcp_to_hf", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="a checkpoint of fsdp2kit (path or URL), or of plain torch with --config")
    parser.add_argument(
        "out", nargs="?", help="the directory (path or URL) to write; only an earlier export is ever replaced"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; default: what the run's config says")
    parser.add_argument(
        "--max-shard-gb", type=float, default=MAX_SHARD_BYTES / 1e9, help="largest file, in 10^9 bytes"
    )
    parser.add_argument(
        "--config",
        type=user_path,
        metavar="HF_DIR",
        help="config and tokenizer from here; default: the checkpoint's own",
    )
    parser.add_argument(
        "--merge",
        nargs="?",
        const=True,
        default=False,
        metavar="MODEL",
        help="add the checkpoint's adapter to the model it was trained on (directory or hub id; default: as it was)",
    )
    parser.add_argument("--verify", action="store_true", help="load both again and compare their logits")
    options = parser.parse_intermixed_args(arguments)
    if options.out is None and isinstance(options.merge, str):  # --merge CHECKPOINT OUT: a model is not named
        options.checkpoint, options.out, options.merge = options.merge, options.checkpoint, True
    if options.out is None:
        parser.error("the following arguments are required: out")
    checkpoint, out = to_path(options.checkpoint), to_path(options.out)
    if options.verify and (options.merge or (checkpoint / "hf" / CONFIG_NAME).is_file()):
        what = "compares a whole model's checkpoint with its export, and this one holds an adapter"
        raise UserError("--verify", what, "leave it out; every byte of the checkpoint is checked in any case")
    if not is_remote(out):
        check_writable(out.parent, where="out")
    dcp_to_hf(
        checkpoint,
        out,
        dtype=options.dtype,
        max_shard_bytes=int(options.max_shard_gb * 1e9),
        config_dir=options.config,
        merge=options.merge,
    )
    print(f"{out}: written")
    if options.verify:
        print(compare_logits(checkpoint, out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
