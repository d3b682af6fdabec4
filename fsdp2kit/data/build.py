"""From ``[data]`` and ``[eval]`` to the batches of this data-parallel rank."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2kit.config.schema import DataConfig, SourceConfig
from fsdp2kit.data.documents import build_documents, check_vocabulary, require_tokenizer
from fsdp2kit.data.formats import RowFormat, encode_preferences, encode_rows, row_format
from fsdp2kit.data.loader import Batch, Loader, Part, Share, build_mixed_loader, build_part
from fsdp2kit.data.packing import shares, source_epochs
from fsdp2kit.data.rows import RowReader
from fsdp2kit.data.sources import find_source, is_url
from fsdp2kit.data.stream import PackedStream, State, StreamLoader
from fsdp2kit.data.tokens import cache_key, iterate_blocks, start_workers
from fsdp2kit.distributed import agreement
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_CHECKED = 8


class Prefetch:
    """A loader whose next batches are made by one thread while the current one is trained on.

    Tokenisers, file reads and numpy leave the interpreter free most of the time, so the step hardly notices.
    """

    def __init__(self, loader: Loader | StreamLoader, *, ahead: int, stop: int) -> None:
        """
        Args:
            ahead: batches made beyond the one that was asked for; 0 makes each when it is asked for.
            stop: index of the first batch that nobody will ask for.
        """
        self._loader, self._ahead, self._stop = loader, ahead, stop
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._made: dict[int, Future[tuple[list[Batch], State | None]]] = {}
        self._states: dict[int, State | None] = {}

    @property
    def steps_per_epoch(self) -> int:
        return self._loader.steps_per_epoch

    @property
    def source_names(self) -> tuple[str, ...]:
        return self._loader.source_names

    def batch(self, index: int) -> Sequence[Any]:
        """The loader's batch ``index``; asks for the ones after it.

        Raises:
            Exception: what making that batch raised, when that batch is asked for.
        """
        for at in range(index, max(index, min(index + self._ahead, self._stop - 1)) + 1):
            if at not in self._made:
                self._made[at] = self._thread.submit(self._make, at)
        batches, self._states[index + 1] = self._made.pop(index).result()
        self._states.pop(index - 1, None)
        return batches

    def state(self, index: int) -> State | None:
        """What a stream needs to make batch ``index``, just asked for or next, again; None for data read whole."""
        return self._states.get(index)

    def close(self) -> None:
        """Forget what was made ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _make(self, index: int) -> tuple[list[Batch], State | None]:
        batches = self._loader.batch(index)
        # Taken here, by the only thread that moves the stream.
        return batches, self._loader.state(index + 1)


@dataclass(frozen=True)
class Data:
    """What a run reads."""

    loader: Loader | StreamLoader
    fingerprint: str
    """Digest of all that training sees; of a stream, of where it comes from and how it is read."""
    held_out: Mapping[str, Loader]
    """By name of the set, "" for `eval.path`; empty unless ``[eval]`` asks for an evaluation."""
    total_steps: int
    """Steps of the whole run: `train.steps`, or those of `train.epochs`."""
    prefetch: int = 2

    @property
    def source_names(self) -> tuple[str, ...]:
        """Names of the sources of a mix; empty without a mix."""
        return self.loader.source_names

    def batches(self, progress: Progress | None = None) -> Prefetch:
        """Global batches from ``progress.step`` (default: the first) to the last, made ahead in the background.

        Raises:
            UserError: a stream is resumed without its state, ``progress.data``.
        """
        progress = progress or Progress()
        if isinstance(self.loader, StreamLoader) and progress.step < self.total_steps:
            with agreement():
                if progress.step and progress.data is None:
                    todo = "resume with the data.streaming that the run was started with, or choose another run.dir"
                    raise UserError("data.streaming", "the checkpoint does not say where the stream stood", todo)
                self.loader.seek(progress.step, progress.data)
        return Prefetch(self.loader, ahead=self.prefetch, stop=self.total_steps)

    def describe(self) -> list[str]:
        """What the user should know of the data before training on it, a line each."""
        if isinstance(self.loader, StreamLoader):
            mix = f" of {', '.join(self.loader.source_names)}" if self.loader.source_names else ""
            return [f"data: a stream{mix}, packed into rows of {self.loader.seq_len:,} tokens as it is read"]
        lines = []
        for number, part in enumerate(self.loader.parts):
            times = self.loader.mix.counts[number] / len(part.plan)
            of_mix = f" {part.name} ({times:.2f} epochs in one of the mix)" if part.name else ""
            lines.append(f"data{of_mix}: {part.documents.report}")
        return [
            *lines,
            f"an epoch: {self.loader.rows_per_epoch:,} rows of {self.loader.seq_len:,} tokens, "
            f"{self.loader.packing_efficiency:.1%} full, in {self.loader.steps_per_epoch:,} steps",
        ]


@dataclass(frozen=True)
class RowSet:
    """A set of rows that a config names."""

    key: str
    """The TOML key that names it, for errors."""
    path: str | None
    split: str
    how: RowFormat
    name: str = ""


def build_data(
    config: Any,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    model: Any = None,
    mesh: Any = None,
    vocab_size: int | None = None,
) -> Data:
    """Read, tokenise and pack the training data and, where ``[eval]`` asks for it, the held-out data.

    Every rank calls this, and one on each machine fills the cache of tokens. A stream is only opened.

    Args:
        config: a recipe's config: its ``data``, ``eval``, ``train`` and ``run`` are read.
        model: the Hugging Face model; its vocabulary must hold every token.
        mesh: its ``dp_rank`` and ``sizes.dp`` say which rows are this rank's. None is a run of one rank.
        vocab_size: where there is no model. Default: the tokenizer's.

    Raises:
        UserError: as `build_documents` and `check_vocabulary` do.
    """
    section: DataConfig = config.data
    if vocab_size is None:
        vocab_size = len(tokenizer) if tokenizer is not None else 0
    size: int = model.config.get_text_config().vocab_size if model is not None else vocab_size
    share = Share(
        section.seq_len,
        config.train.global_batch_size,
        config.train.micro_batch_size,
        mesh.dp_rank if mesh is not None else 0,
        mesh.sizes.dp if mesh is not None else 1,
        padding_id(tokenizer),
        max(1, len(section.sources)),
    )
    sets = _training_sets(section)
    build = partial(_build_part, section, tokenizer=tokenizer, vocab_size=size)
    if section.streaming:
        loader, fingerprint = _build_stream(section, sets, share=share, tokenizer=tokenizer, vocab_size=size)
    else:
        parts = [build(one, shuffle=section.shuffle, seed=config.run.seed, source=at) for at, one in enumerate(sets)]
        loader, fingerprint = _build_mix(section, parts, share=share, seed=config.run.seed)
    evaluates = config.eval.every > 0 or config.train.steps == 0
    held_out = {}
    for one in _held_out_sets(config) if evaluates else []:
        # Another seed: of synthetic tokens, a split by another name would else be the training data itself.
        part = build(one, shuffle=False, seed=config.run.seed + 1)
        held_out[one.name] = build_mixed_loader([part], [1.0], share=share, shuffle=False, seed=config.run.seed)
    total_steps = config.train.total_steps(loader.steps_per_epoch)
    return Data(loader, fingerprint, held_out, total_steps, section.prefetch)


def check_first_rows(config: Any) -> list[str]:
    """Read and, where the tokenizer is on this machine, encode the first rows of every set that is.

    Neither the cache nor the hub nor a process group is needed.

    Returns:
        What is not here: the tokenizer, and the TOML keys of hub datasets and URLs.

    Raises:
        UserError: a set is missing or empty, or one of its first rows is malformed.
    """
    if config.data.format == "synthetic":
        return []
    unchecked, tokenizer = [], None
    try:
        tokenizer = build_tokenizer(config.model, local_files_only=True)
    except UserError:
        source = config.model.tokenizer or config.model.path
        if source is None or Path(source).is_absolute():
            raise
        unchecked.append("tokenizer")
    for one in (*_training_sets(config.data), *_held_out_sets(config)):
        if one.path is None or one.key == "eval.split":
            continue
        found = None if is_url(one.path) else find_source(one.path, split=one.split, key=one.key)
        if found is None or found.kind == "hub":
            unchecked.append(one.key)
            continue
        with contextlib.closing(iter(RowReader(found))) as reader:
            rows = list(itertools.islice(reader, _ROWS_CHECKED))
        columns = [row.parse() for row in rows]
        if tokenizer is not None:
            encode = encode_preferences if one.how.format == "preference" else encode_rows
            encode(columns, [row.where for row in rows], one.how, tokenizer)
    return unchecked


def padding_id(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Any valid id does: padding is a document of its own and never a target."""
    candidates = [] if tokenizer is None else [tokenizer.pad_token_id, tokenizer.eos_token_id]
    return next((int(candidate) for candidate in candidates if isinstance(candidate, int)), 0)


def _training_sets(data: DataConfig) -> list[RowSet]:
    if not data.sources:
        return [RowSet("data.path", data.path, data.split, row_format(data))]
    return [
        RowSet(f"data.sources.{at}.path", part.path, part.split, _format_of(data, part), _source_name(part, at))
        for at, part in enumerate(data.sources)
    ]


def _held_out_sets(config: Any) -> list[RowSet]:
    data, evaluation = config.data, config.eval
    sets = [
        RowSet(f"eval.sets.{name}.path", part.path, part.split, _format_of(data, part), name)
        for name, part in evaluation.sets.items()
    ]
    if evaluation.path is not None or evaluation.split != data.split:
        key = "eval.path" if evaluation.path else "eval.split"
        sets.append(RowSet(key, evaluation.path or data.path, evaluation.split, row_format(data)))
    return sets


def _format_of(data: DataConfig, part: Any) -> RowFormat:
    return row_format(data, format=part.format, columns=part.columns)


def _source_name(part: SourceConfig, number: int) -> str:
    """What the metrics call a source of a mix."""
    return part.name or Path(part.path).name.partition(".")[0] or str(number)


def _build_part(
    section: DataConfig,
    rows: RowSet,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    shuffle: bool,
    seed: int,
    source: int = 0,
) -> Part:
    documents = build_documents(
        section,
        path=rows.path,
        split=rows.split,
        tokenizer=tokenizer,
        seed=seed,
        vocab_size=vocab_size,
        how=rows.how,
        key=rows.key,
    )
    check_vocabulary(documents.largest_id, vocab_size)
    options = {"seq_len": section.seq_len, "pack": section.pack, "shuffle": shuffle, "seed": seed}
    return build_part(documents, **options, name=rows.name, source=source)


def _build_mix(section: DataConfig, parts: list[Part], *, share: Share, seed: int) -> tuple[Loader, str]:
    """The loader of data that is read whole, and the data's digest."""
    build = partial(build_mixed_loader, parts, share=share, shuffle=section.shuffle, seed=seed)
    if not section.sources:
        return build([1.0]), parts[0].documents.fingerprint
    epochs = source_epochs(
        [int(part.documents.lengths.sum()) for part in parts],
        weights=[part.weight for part in section.sources],
        epochs=[part.epochs for part in section.sources],
        temperature=section.temperature,
    )
    loader = build(epochs.tolist())
    return loader, _digest([part.documents.fingerprint for part in parts], loader.mix.counts.tolist())


def _build_stream(
    section: DataConfig,
    sets: list[RowSet],
    *,
    share: Share,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
) -> tuple[StreamLoader, str]:
    """The loader of data that is read in order, and a digest of what it is."""
    words = require_tokenizer(tokenizer)
    with agreement():
        found = [find_source(one.path or "", split=one.split, key=one.key) for one in sets]
    pool = start_workers(0 if section.workers == "auto" else section.workers, words)

    def open_source(number: int, state: State | None) -> PackedStream:
        source = found[number]
        return PackedStream(
            partial(iterate_blocks, source, sets[number].how, words, pool=pool),
            seq_len=section.seq_len,
            pack=section.pack,
            overlong=section.overlong,
            vocab_size=vocab_size,
            where=source.where,
            state=state,
        )

    weights = shares([part.weight or 1.0 for part in section.sources] or [1.0], temperature=section.temperature)
    loader = StreamLoader(
        lambda states: [open_source(number, state) for number, state in enumerate(states)],
        share=share,
        weights=weights.tolist(),
        names=[one.name for one in sets],
    )
    contents = [source.path + source.split for source in found]
    identity = [cache_key(content, one.how, words) for content, one in zip(contents, sets, strict=True)]
    return loader, _digest(identity, weights.tolist(), section.overlong)


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
