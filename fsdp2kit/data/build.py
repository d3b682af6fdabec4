"""From ``[data]`` and ``[eval]`` to the batches of this data-parallel rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.console import counted
from fsdp2kit.data.chat import Tokenizer
from fsdp2kit.data.contents import Content, content_of, stream_content
from fsdp2kit.data.documents import Documents, Tokens, build_documents, read_tokens, require_tokenizer
from fsdp2kit.data.formats import (
    WRAPPED,
    chats_of,
    encode_prompts,
    encode_rows,
    hold_out_border,
    key_border,
    looks_unwrapped,
)
from fsdp2kit.data.loader import Batch, Loader, Share, build_loader
from fsdp2kit.data.packing import shares, source_epochs
from fsdp2kit.data.rows import first_rows
from fsdp2kit.data.sources import RowSet, find_source, held_out_sets, is_url, training_sets
from fsdp2kit.data.stream import State, StreamLoader, packed_rows, read_held_out
from fsdp2kit.data.tokens import cache_key, is_tokenised, start_workers
from fsdp2kit.distributed import agreement
from fsdp2kit.errors import UserError
from fsdp2kit.model.tokenizer import build_tokenizer
from fsdp2kit.progress import Progress

ROWS_CHECKED = 8
_BYTES_COUNTED = 4 << 20  # tokenised in about three seconds
_BYTES_DIGESTED = 1 << 30  # read in about as many


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
    def source_names(self) -> tuple[str, ...]:
        return self._loader.source_names

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch; 0 of a stream."""
        return self._loader.steps_per_epoch

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
    warnings: tuple[str, ...] = ()
    """What a person should look at before training."""
    endings: frozenset[int] = frozenset()
    """Special tokens that documents end in, of the first ones; empty for a stream."""
    contents: Mapping[str, Content] = field(default_factory=dict)
    """By TOML key, the rows of each set that was read whole."""

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
        seq_len = self.loader.share.seq_len
        if isinstance(self.loader, StreamLoader):
            mix = f" of {', '.join(self.loader.source_names)}" if self.loader.source_names else ""
            return [f"data: a stream{mix}, packed into rows of {seq_len:,} tokens as it is read", *self._notes()]
        lines = []
        for number, part in enumerate(self.loader.parts):
            times = self.loader.mix.counts[number] / len(part.plan)
            of_mix = f" {part.name} ({times:.2f} epochs in one of the mix)" if part.name else ""
            lines.append(f"data{of_mix}: {part.documents.report}")
        return [
            *lines,
            f"an epoch: {counted(self.loader.rows_per_epoch, 'row')} of {seq_len:,} tokens, "
            f"{self.loader.packing_efficiency:.1%} full, in {counted(self.loader.steps_per_epoch, 'step')}",
            *self._notes(),
        ]

    def _notes(self) -> list[str]:
        reports = {name: loader.parts[0].documents.report for name, loader in self.held_out.items()}
        held_out = [f"held out{f' of {name}' if name else ''}: {report}" for name, report in reports.items()]
        return [*held_out, *(f"warning: {text}" for text in self.warnings)]


def build_data(
    config: Any,
    *,
    tokenizer: Tokenizer | None,
    model: Any = None,
    mesh: Any = None,
    vocab_size: int | None = None,
) -> Data:
    """Read, tokenise and pack the training data and, where ``[eval]`` asks for it, the held-out data.

    Every rank calls this, and one on each machine fills the cache of tokens. A stream is only opened.

    Args:
        config: a recipe's config: its ``data``, ``eval``, ``train``, ``lr_schedule`` and ``run`` are read.
        model: the Hugging Face model; its vocabulary must hold every token.
        mesh: its ``dp_rank`` and ``sizes.dp`` say which rows are this rank's. None is a run of one rank.
        vocab_size: where there is no model. Default: the tokenizer's.

    Raises:
        UserError: as `build_documents` does.
    """
    section, train, seed = config.data, config.train, config.run.seed
    if model is not None:
        vocab_size = model.config.get_text_config().vocab_size
    if vocab_size is None:
        vocab_size = len(tokenizer) if tokenizer is not None else 0
    rank, size = (mesh.dp_rank, mesh.sizes.dp) if mesh is not None else (0, 1)
    # Any valid id does for padding: it is a document of its own and never a target.
    candidates = [] if tokenizer is None else [tokenizer.pad_token_id, tokenizer.eos_token_id]
    pad_id = next((candidate for candidate in candidates if isinstance(candidate, int)), 0)
    share = Share(section.seq_len, train.global_batch_size, train.micro_batch_size, rank, size, pad_id)
    read = partial(build_documents, tokenizer=tokenizer, vocab_size=vocab_size)
    build = partial(build_loader, share=share, pack=section.pack, seed=seed)
    sets = training_sets(section)
    held_out: dict[str, Documents] = {}
    documents: list[Documents] = []
    if section.streaming:
        loader, fingerprint, found = _build_stream(
            config, sets, share=share, tokenizer=tokenizer, vocab_size=vocab_size
        )
        for one, tokens in zip(sets, found, strict=False):
            held_out[one.name] = read(one.section, key="eval.split", tokens=tokens)
    else:
        if isinstance(config.eval.split, str):
            documents = [read(one.section, key=one.key, seed=seed) for one in sets]
        else:
            documents, held_out = _hold_out(sets, config.eval.split, read=read, tokenizer=tokenizer)
        loader, fingerprint = _build_mix(section, sets, documents, build=build)
    whole = list(zip(sets, documents, strict=False))
    for one in held_out_sets(config) if config.evaluates else []:
        if one.name in held_out:
            raise UserError(one.key, f"{one.name!r} is also the name of a part of data.sources", "choose another name")
        # Another seed: of synthetic tokens, a split by another name would else be the training data itself.
        held_out[one.name] = read(one.section, key=one.key, seed=seed + 1)
        whole.append((one, held_out[one.name]))
    evaluated = {name: build([one], shuffle=False) for name, one in held_out.items() if config.evaluates}
    total_steps = train.total_steps(loader.steps_per_epoch)
    if train.steps is None:
        config.lr_schedule.warmup(total_steps)  # refused before the weights are read
    warnings = () if tokenizer is None else _find_unwrapped(sets, tokenizer)
    endings = frozenset().union(*(one.endings for one in documents))
    with agreement():
        contents = {
            one.key: content_of(one.section, one.key, rows=found.report.rows, digest=found.fingerprint)
            for one, found in whole
        }
    contents |= {one.key: stream_content(one.section) for one in sets if section.streaming}
    return Data(loader, fingerprint, evaluated, total_steps, section.prefetch, warnings, endings, contents)


def _build_mix(
    section: DataConfig, sets: Sequence[RowSet], documents: Sequence[Documents], *, build: Callable[..., Loader]
) -> tuple[Loader, str]:
    """The loader of data that is read whole, and a digest of what it is."""
    epochs = source_epochs(
        [int(one.lengths.sum()) for one in documents],
        weights=[part.weight for part in section.sources] or [None],
        epochs=[part.epochs for part in section.sources] or [1.0],
        temperature=section.temperature,
    )
    names = [one.name for one in sets]
    loader = build(documents, shuffle=section.shuffle, names=names, epochs=epochs.tolist())
    fingerprint = documents[0].fingerprint
    if section.sources:
        fingerprint = _digest([one.fingerprint for one in documents], loader.mix.counts.tolist())
    return loader, fingerprint


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
    for section, key, _ in (*training_sets(config.data), *held_out_sets(config)):
        if section.path is None or key == "eval.split":
            continue
        if is_url(section.path) or find_source(section, key).kind == "hub":
            unchecked.append(key)
            continue
        rows = first_rows(section, key, ROWS_CHECKED)
        if tokenizer is None:
            for row in rows:
                row.parse()
        elif section.format == "prompts":
            encode_prompts(rows, section, tokenizer)
        else:
            encode_rows(rows, section, tokenizer)
    return unchecked


def count_steps(config: Any, *, model: Any = None) -> list[str]:
    """What the start says of the data and its steps, where all of it is on this machine and told in seconds.

    That is: synthetic, or tokenised before, or little enough to be tokenised now, which fills the cache.

    Args:
        model: as `build_data`'s.

    Raises:
        UserError: as `build_data` does.
    """
    no_text = config.data.format == "synthetic" and model is None
    if config.data.streaming or no_text or config.data.format == "prompts":
        return []
    sets, tokenizer = [], None
    if config.data.format != "synthetic":
        tokenizer = build_tokenizer(config.model, local_files_only=True)
        sets = [*training_sets(config.data), *(held_out_sets(config) if config.evaluates else [])]
    bytes_left = _BYTES_COUNTED
    for section, key, _ in sets:
        assert tokenizer is not None, "synthetic data are no sets"
        source = find_source(section, key)
        size = sum(Path(file).stat().st_size * (1 if source.is_text else 4) for file in source.files)
        if size > bytes_left and (size > _BYTES_DIGESTED or not is_tokenised(source, section, tokenizer)):
            return [f"steps of an epoch not counted: {key} is {size / 2**20:,.0f} MiB to be tokenised"]
        bytes_left -= min(size, bytes_left)
    data = build_data(config, tokenizer=tokenizer, model=model)
    return [*data.describe(), f"train: {counted(data.total_steps, 'step')}"]


def _find_unwrapped(sets: Sequence[RowSet], tokenizer: Tokenizer) -> tuple[str, ...]:
    """A warning of each set whose first row is plain text although the tokenizer has a chat template."""
    found = []
    with agreement():
        for section, key, _ in sets:
            if section.format in WRAPPED and section.path:
                [row] = first_rows(section, key, 1, download=not section.streaming)
                if looks_unwrapped(row, section, tokenizer):
                    found.append(key)
    what = "prompts are plain texts, outside the tokenizer's chat template; an instruct model expects it"
    return tuple(f'{key}: {what}: set data.wrap = "chat"' for key in found)


def find_system_twice(sets: Sequence[RowSet], tokenizer: Tokenizer, *, count: int) -> list[str]:
    """A warning of each set with two system messages in a row in one of its first ``count`` rows.

    Raises:
        UserError: one of these rows is malformed.
    """
    found = []
    for section, key, _ in sets:
        chats = chats_of(first_rows(section, key, count, download=not section.streaming), section, tokenizer)
        pairs = [(chat, pairwise(message["role"] for message in chat.messages)) for chat in chats]
        twice = [chat.where for chat, roles in pairs if ("system", "system") in roles]
        if twice:
            what = f"{len(twice):,} of {counted(len(chats), 'conversation')} have two system messages in a row"
            found.append(f"{key}: {what}, first in {twice[0]}: make them one, or drop one")
    return found


def _hold_out(
    sets: Sequence[RowSet],
    held_out: float,
    *,
    read: Callable[..., Documents],
    tokenizer: Tokenizer | None,
) -> tuple[list[Documents], dict[str, Documents]]:
    """The documents to train on, and those held out of them, by name of their set.

    Args:
        held_out: a share of the rows, or (an int) how many of them; at least one row, with all its copies.
    """
    tokens = [read_tokens(one.section, tokenizer=tokenizer, key=one.key) for one in sets]
    with agreement():
        keys = [one.table["key"].to_numpy() for one in tokens]
        border = hold_out_border(np.concatenate(keys), held_out)
        for one, key in zip(tokens, keys, strict=True):
            if key.max() < border:
                what = f"{held_out} holds out every row of {one.where}"
                raise UserError("eval.split", what, "hold fewer rows out, or give more data")
    train, evaluation = [], {}
    for one, some, key in zip(sets, tokens, keys, strict=True):
        train.append(read(one.section, key=one.key, tokens=some, rows=np.flatnonzero(key >= border)))
        if (rows := np.flatnonzero(key < border)).size:
            evaluation[one.name] = read(one.section, key="eval.split", tokens=some, rows=rows)
    return train, evaluation


def _build_stream(
    config: Any, sets: Sequence[RowSet], *, share: Share, tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[StreamLoader, str, list[Tokens]]:
    """The loader of data that is read in order, a digest of what it is, and the rows that are held out of each set."""
    section, words = config.data, require_tokenizer(tokenizer)
    below = 0 if isinstance(config.eval.split, str) else key_border(config.eval.split)
    batch_rows = (config.eval.steps or 0) * config.train.global_batch_size
    with agreement():
        found = [(find_source(one.section, one.key), one.section) for one in sets]
        held_out = [
            read_held_out(*one, words, below=below, batch_rows=batch_rows)
            for one in found
            if config.evaluates and below
        ]
    pool = start_workers(0 if section.workers == "auto" else section.workers, words)
    sources = [partial(packed_rows, *one, words, vocab_size=vocab_size, pool=pool, held_out=below) for one in found]
    weights = shares([part.weight or 1.0 for part in section.sources] or [1.0], temperature=section.temperature)
    loader = StreamLoader(sources, share=share, weights=weights.tolist(), names=[one.name for one in sets])
    identity = [cache_key(f"{one.path}{one.split}{one.limit or ''}", its, words) for one, its in found]
    return loader, _digest(identity, weights.tolist(), section.overlong, *([below] if below else [])), held_out


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
