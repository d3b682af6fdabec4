"""From a Hugging Face directory to a checkpoint of its weights, a tensor at a time; and whether two give the same.

`write_weights` is the sink: a distributed checkpoint.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.planner import WriteItem
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from fsdp2kit.checkpoint.keys import MODEL_PREFIX
from fsdp2kit.checkpoint.manifest import Manifest, write_manifest
from fsdp2kit.checkpoint.reader import first_failure
from fsdp2kit.checkpoint.staging import PARTIAL, RECORD, clear_beside, make_beside, mark
from fsdp2kit.checkpoint.state import load_weights, save_tensors
from fsdp2kit.console import TRUST_CODE, progress_bar
from fsdp2kit.errors import RunFailure, UserError
from fsdp2kit.files.local import sync
from fsdp2kit.files.remote import on_disk, to_path
from fsdp2kit.job.progress import Progress
from fsdp2kit.model.assets import copy_assets
from fsdp2kit.model.build import load_whole, model_on_meta
from fsdp2kit.model.hf_config import trained_config
from fsdp2kit.weights import parts
from fsdp2kit.weights.load import open_pretrained
from fsdp2kit.weights.modules import cast_model
from fsdp2kit.weights.record import find_ties, weights_of
from fsdp2kit.weights.recorded_parts import RECORD as RECORD_OF_PARTS
from fsdp2kit.weights.transfer import Reader, transfer


class _ReadingPlanner(dcp.DefaultSavePlanner):
    """The default save planner, for tensors that are read when it is their turn to be written."""

    def __init__(self, reader: Reader, advance: Callable[[int], object]) -> None:
        super().__init__()
        self._reader = reader
        self._advance = advance

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        tensor = self._reader.read(write_item.index.fqn.removeprefix(MODEL_PREFIX))[...]
        self._advance(tensor.nbytes)
        return tensor


def hf_to_dcp(source: str | Path, out: str | Path, *, trust_remote_code: bool = False) -> str:
    """Write the weights of a Hugging Face directory as a checkpoint for ``model.weights``; a tensor in memory at once.

    It has a manifest with checksums, and config and tokenizer in ``hf/``, so `verify` checks it and `dcp_to_hf`
    converts it back. It holds no optimizer, so no run resumes from it.

    Args:
        trust_remote_code: run the Python code that the directory's config names.

    Returns:
        Which dtype was written, and why.

    Raises:
        UserError: the directory holds no model, or its files are damaged or of another model; `out` is taken.
        RunFailure: `out` cannot be written.
    """
    model = model_of(source, trust_remote_code=trust_remote_code)
    with open_pretrained(model, source) as (entries, reader):
        return transfer(entries, reader, partial(write_weights, out=out, model=model, config_dir=source))


def model_of(config_dir: str | Path, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model of a Hugging Face directory without storage; refused if it has code of its own that is not trusted."""
    model = model_on_meta(config_dir, trust_remote_code=trust_remote_code)
    if model is None:
        todo = f"start from it with model.path, or {TRUST_CODE}"
        raise UserError(str(config_dir), "is a model with code of its own", todo)
    return model


def write_weights(
    forms: Mapping[str, Tensor], reader: Reader, *, out: str | Path, model: PreTrainedModel, config_dir: str | Path
) -> str:
    """Write tensors as a checkpoint, whole or not at all; a tensor in memory at once. Returns what `hf_to_dcp` does.

    Args:
        forms: meta tensors by name, every tensor of the model, a tied one once.
        reader: of these.
        config_dir: config, tokenizer, … are copied from here.
    """
    out = Path(out).absolute()
    config_dir = Path(config_dir)
    if out.exists():
        raise UserError(str(out), "exists", "choose another directory, or move that away")
    beside = {RECORD_OF_PARTS: parts.parts_record(config_dir)} if weights_of(model).names.whole is not None else {}
    try:
        clear_beside(out, PARTIAL)  # of conversions that were cut short
        staging = make_beside(out, PARTIAL)
    except OSError as error:
        raise RunFailure(f"{out}: was not written: {first_failure(error)}") from error
    # Tensors that always stay in float32 do not tell the model's dtype.
    follows = weights_of(model).dtypes(torch.bfloat16)
    dtypes = [one.dtype for name, one in forms.items() if follows.get(name) == torch.bfloat16]
    try:
        mark(staging)
        with progress_bar("converting", total=sum(one.nbytes for one in forms.values())) as bar:
            planner = _ReadingPlanner(reader, bar.advance)
            save_tensors({"model": dict(forms)}, staging, planner=planner, alone=True)
        (staging / "hf").mkdir()
        copy_assets(config_dir, staging / "hf")
        export_dtype = str(max(dtypes, key=dtypes.count)).removeprefix("torch.")
        (staging / RECORD).unlink()  # from here on it is nearly a checkpoint
        progress = asdict(Progress())
        tied = find_ties(model)
        manifest = Manifest(
            0, progress, identity={}, tied=tied, export_dtype=export_dtype, files={}, environment=beside
        )
        write_manifest(staging, manifest)
        staging.rename(out)
        sync(out.parent)
    except (OSError, dcp.CheckpointException) as error:
        cause = next((failure for failure, _ in getattr(error, "failures", {}).values()), error)
        if isinstance(cause, UserError):
            raise cause from error
        raise RunFailure(f"{out}: was not written: {first_failure(error)}") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    others = Counter(str(one.dtype).removeprefix("torch.") for one in forms.values() if one.is_floating_point())
    del others[export_dtype]
    kept = "".join(f"; {count} tensors in {dtype}" for dtype, count in sorted(others.items()))
    return f"{export_dtype}, as its source has it{kept}"


def compare_logits(checkpoint: str | Path, hf_dir: str | Path, *, trust_remote_code: bool = False) -> str:
    """Load the directory with `from_pretrained`, the checkpoint into a model of its own, and compare their logits.

    Both are whole in memory, in the directory's dtype. What is behind a URL is first fetched to a temporary folder.

    Args:
        trust_remote_code: run the Python code that the directory's config names.

    Returns:
        One line that says that they agree.

    Raises:
        RunFailure: they do not.
        UserError: the directory's code is needed, and not trusted.
    """
    tokens = 32
    hf_dir = to_path(hf_dir)
    with on_disk(hf_dir) as folder:
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            what = "is written, and not verified: the model runs code of its own"
            raise UserError(str(hf_dir), what, TRUST_CODE) from None
        theirs = load_whole(folder, dtype="auto", trust_remote_code=trust_remote_code).eval()
        config = trained_config(config)
        ours = AutoModelForCausalLM.from_config(config, dtype=theirs.dtype, trust_remote_code=trust_remote_code).eval()
        cast_model(ours, theirs.dtype)  # some stay in float32
        load_weights(checkpoint, ours)
        ids = torch.arange(tokens)[None] * 7 % config.get_text_config().vocab_size
        with torch.no_grad():
            logits = [model(input_ids=ids, use_cache=False).logits.float() for model in (ours, theirs)]
    if not torch.equal(logits[0], logits[1]):
        difference = (logits[0] - logits[1]).abs().max().item()
        raise RunFailure(f"{hf_dir}: its logits differ from those of {checkpoint} by up to {difference}")
    return f"{hf_dir}: gives the same logits as {checkpoint}, on {tokens} tokens, bit for bit"
