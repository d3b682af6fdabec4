"""``[data]`` and ``[eval]`` → the batches of this data-parallel rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.console import counted
from fsdp2kit.data.cache import DEFAULT, Cache
from fsdp2kit.data.contents import Content, content_of, stream_content
from fsdp2kit.data.documents import Documents, build_documents, cut_rows, find_document_warnings
from fsdp2kit.data.held_out import hold_out, key_border, read_held_out
from fsdp2kit.data.loader import Batch, Loader, Share, build_loader
from fsdp2kit.data.packing import shares, source_epochs
from fsdp2kit.data.rows import first_rows
from fsdp2kit.data.sources import Location, RowSet, held_out_sets, locate, training_sets
from fsdp2kit.data.stream import State, StreamLoader, iterate_packs
from fsdp2kit.data.tables import (
    cache_key,
    encode_table,
    findings_of,
    names_of_lines,
    read_tokens,
    require_tokenizer,
    start_workers,
)
from fsdp2kit.data.template import Tokenizer, settle_day
from fsdp2kit.errors import UserError
from fsdp2kit.job import status
from fsdp2kit.job.distributed import agreement
from fsdp2kit.job.progress import Progress

_BEGINNING = 256  # rows of a stream that are looked at before training
RANDOM = 'data.format = "synthetic"'
"""Why tokens are random."""


class Prefetch:
    """A loader's batches, made ahead by one thread while the current one is trained on.

    Tokenisers, file reads and numpy release the interpreter most of the time, so the step is hardly slower.
    """

    def __init__(self, loader: Loader | StreamLoader, *, ahead: int, stop: int) -> None:
        """
        Args:
            ahead: batches made beyond the one that is asked for; 0 makes each when it is asked for.
            stop: the index after the last batch.
        """
        self._loader = loader
        self._ahead = ahead
        self._stop = stop
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._made: dict[int, Future[tuple[list[Batch], State | None]]] = {}
        self._states: dict[int, State | None] = {}

    @property
    def source_names(self) -> tuple[str, ...]:
        return self._loader.source_names

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch; 0 for a stream."""
        return self._loader.steps_per_epoch

    def batch(self, index: int) -> Sequence[Any]:
        """The loader's batch ``index``, or the error that making it raised. The thread then makes the next ones."""
        for at in range(index, max(index, min(index + self._ahead, self._stop - 1)) + 1):
            if at not in self._made:
                self._made[at] = self._thread.submit(self._make, at)
        batches, self._states[index + 1] = self._made.pop(index).result()
        self._states.pop(index - 1, None)
        return batches

    def state(self, index: int) -> State | None:
        """What a stream needs to continue with batch ``index``, the last one or the next; None for data read whole."""
        return self._states.get(index)

    def _make(self, index: int) -> tuple[list[Batch], State | None]:
        batches = self._loader.batch(index)
        # Only this thread moves the stream, so the state belongs to this batch.
        return batches, self._loader.state(index + 1)


@dataclass(frozen=True)
class Data:
    """What a run reads."""

    loader: Loader | StreamLoader
    fingerprint: str
    """Digest of all training data; for a stream, of where it is and how it is read."""
    held_out: Mapping[str, Loader]
    """By name of the set, "" for `eval.path`; empty unless ``[eval]`` asks for an evaluation."""
    total_steps: int
    """Steps of the whole run: `train.steps`, or those of `train.epochs`."""
    prefetch: int = 2
    warnings: tuple[str, ...] = ()
    """What a person should look at before training."""
    notes: tuple[str, ...] = ()
    """What was done with the rows: columns that are not read, …"""
    endings: frozenset[int] = frozenset()
    """Special tokens at the end of the first documents; empty for a stream."""
    contents: Mapping[str, Content] = field(default_factory=dict)
    """What identifies each set of rows, by its TOML key."""

    def batches(self, progress: Progress | None = None) -> Prefetch:
        """Global batches from ``progress.step`` (default: the first) to the last, made ahead. Collective for a stream.

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
        """What the user should know about the data before training, line by line."""
        seq_len = self.loader.share.seq_len
        reports = {name: loader.parts[0].documents.report for name, loader in self.held_out.items()}
        notes = [f"held out{f' of {name}' if name else ''}: {report}" for name, report in reports.items()]
        notes += [*self.notes, *(f"warning: {text}" for text in self.warnings)]
        if isinstance(self.loader, StreamLoader):
            mix = f" of {', '.join(self.loader.source_names)}" if self.loader.source_names else ""
            return [f"data: a stream{mix}, packed into sequences of {seq_len:,} tokens as it is read", *notes]
        lines = []
        for number, part in enumerate(self.loader.parts):
            times = self.loader.mix.counts[number] / len(part.plan)
            of_mix = f" {part.name} ({times:.2f} epochs in one of the mix)" if part.name else ""
            made = f"random tokens ({RANDOM}), " if part.documents.row_digests is None else ""
            lines.append(f"data{of_mix}: {made}{part.documents.report}")
        return [
            *lines,
            f"an epoch: {counted(self.loader.packs_per_epoch, 'pack')} of {seq_len:,} tokens, "
            f"{self.loader.packing_efficiency:.1%} full, in {counted(self.loader.steps_per_epoch, 'step')}",
            *notes,
        ]

    def statistics(self) -> dict[str, Any]:
        """What was read, as plain values: in all, by source, and held out; of a stream, only where it comes from."""
        found: dict[str, Any] = {"seq_len": self.loader.share.seq_len}
        held_out = {name: asdict(loader.parts[0].documents.report) for name, loader in self.held_out.items()}
        if isinstance(self.loader, StreamLoader):
            return {**found, "stream": True, "sources": [{"name": name} for name in self.loader.source_names]}
        sources = [
            {"name": part.name, "epochs": float(count) / len(part.plan), **asdict(part.documents.report)}
            for part, count in zip(self.loader.parts, self.loader.mix.counts, strict=True)
        ]
        counts = [name for name in sources[0] if name not in ("name", "epochs")]
        return {
            **found,
            **{name: sum(source[name] for source in sources) for name in counts},
            "packs": self.loader.packs_per_epoch,
            "packing_efficiency": self.loader.packing_efficiency,
            "steps_per_epoch": self.loader.steps_per_epoch,
            "sources": sources if self.loader.source_names else [],
            "held_out": held_out,
        }


def build_data(
    config: Any,
    *,
    tokenizer: Tokenizer | None,
    model: Any = None,
    mesh: Any = None,
    vocab_size: int | None = None,
) -> Data:
    """Read, tokenise and pack the training data and, if ``[eval]`` asks for it, the held-out data. Collective.

    One rank on each machine fills the cache of tokens. A stream is only opened.

    Args:
        config: a recipe's config: its ``data``, ``eval``, ``train``, ``lr_schedule`` and ``run`` are read.
        model: the Hugging Face model; its vocabulary must hold every token.
        mesh: its ``dp_rank`` and ``sizes.dp`` give this rank's packs. None is a run of one rank.
        vocab_size: used if there is no model. Default: the tokenizer's.

    Raises:
        UserError: rows that cannot be read, have the wrong columns, or give nothing to train on.
    """
    status.begin("reading the data")
    settle_day(tokenizer, Path(config.run.dir))
    section = config.data
    train = config.train
    seed = config.run.seed
    if model is not None:
        vocab_size = model.config.get_text_config().vocab_size
    if vocab_size is None:
        vocab_size = len(tokenizer) if tokenizer is not None else 0
    share = _share(config, tokenizer, mesh)
    cache = Cache(Path(config.run.dir))
    read = partial(build_documents, tokenizer=tokenizer, vocab_size=vocab_size, cache=cache)
    build = partial(build_loader, share=share, pack=section.pack, seed=seed)
    sets = training_sets(section)
    documents: list[Documents] = []
    if section.streaming:
        loader, fingerprint, held_out = _build_stream(
            config, sets, share=share, tokenizer=tokenizer, vocab_size=vocab_size, read=read, cache=cache
        )
    else:
        documents, held_out = _read_whole(sets, config, read=read, tokenizer=tokenizer, cache=cache)
        loader, fingerprint = _build_mix(section, sets, documents, build=build)
    whole = list(zip(sets, documents, strict=False))
    for one in held_out_sets(config) if config.evaluates else []:
        if one.name in held_out:
            raise UserError(one.key, f"{one.name!r} is also the name of a part of data.sources", "choose another name")
        # Another seed, or a synthetic held-out set would be the training data.
        held_out[one.name] = read(one.section, key=one.key, seed=seed + 1)
        whole.append((one, held_out[one.name]))
    evaluated = {name: build([one], shuffle=False) for name, one in held_out.items() if config.evaluates}
    total_steps = train.total_steps(loader.steps_per_epoch)
    if train.steps is None:
        config.lr_schedule.warmup(total_steps)  # refused before the weights are read
    warnings: list[str] = []
    notes: list[str] = []
    with agreement():
        beginnings = _read_beginnings(sets, tokenizer, cache) if section.streaming else []
        for one, found in [*whole, *zip(sets, beginnings, strict=False)]:
            warnings += found.warnings
            notes += found.notes
            if tokenizer is not None and found.row_digests is not None:
                name = one.name or ("" if one.key == "data.path" else one.key)
                texts = find_document_warnings(found, tokenizer)
                warnings += [f"{name}: {text}" if name else text for text in texts]
    endings = frozenset().union(*(one.endings for one in documents))
    contents = {one.key: stream_content(one.section) for one in sets if section.streaming}
    with agreement():
        for one, found in whole:
            contents[one.key] = content_of(one.section, one.key, rows=found.report.rows, digest=found.fingerprint)
    return Data(
        loader, fingerprint, evaluated, total_steps, section.prefetch, (*warnings,), (*notes,), endings, contents
    )


def _share(config: Any, tokenizer: Tokenizer | None, mesh: Any) -> Share:
    rank, size = (mesh.dp_rank, mesh.sizes.dp) if mesh is not None else (0, 1)
    # Any valid token id can pad: padding is documents of its own, and never a target.
    candidates = [] if tokenizer is None else [tokenizer.pad_token_id, tokenizer.eos_token_id]
    pad_id = next((candidate for candidate in candidates if isinstance(candidate, int)), 0)
    train = config.train
    return Share(config.data.seq_len, train.global_batch_size, train.micro_batch_size, rank, size, pad_id)


def _read_whole(
    sets: Sequence[RowSet],
    config: Any,
    *,
    read: Callable[..., Documents],
    tokenizer: Tokenizer | None,
    cache: Cache,
) -> tuple[list[Documents], dict[str, Documents]]:
    """The documents of each set to train on, and those held out of them, by name of the set."""
    if isinstance(config.eval.split, str):
        return [read(one.section, key=one.key, seed=config.run.seed) for one in sets], {}
    tables = [read_tokens(one.section, tokenizer=tokenizer, key=one.key, cache=cache) for one in sets]
    with agreement():
        keys = [one.table["key"].to_numpy() for one in tables]
        lines = hold_out(keys, config.eval.split, names=[one.where for one in tables])
    train = []
    held_out = {}
    for one, tokens, (kept, out) in zip(sets, tables, lines, strict=True):
        train.append(read(one.section, key=one.key, tokens=tokens, lines=kept))
        if out.size:
            held_out[one.name] = read(one.section, key="eval.split", tokens=tokens, lines=out)
    return train, held_out


def _build_mix(
    section: DataConfig, sets: Sequence[RowSet], documents: Sequence[Documents], *, build: Callable[..., Loader]
) -> tuple[Loader, str]:
    """The loader of data that is read whole, and a digest of its data."""
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


def _read_beginnings(sets: Sequence[RowSet], tokenizer: Tokenizer | None, cache: Cache) -> list[Documents]:
    """The documents of each stream's first rows, for what a person should know of them."""
    return [read_beginning(one, require_tokenizer(tokenizer), count=_BEGINNING, cache=cache) for one in sets]


def read_beginning(one: RowSet, tokenizer: Tokenizer, *, count: int, cache: Cache = DEFAULT) -> Documents:
    """The documents of a set's first rows, which are tokenised without the cache of tokens."""
    section, key, _ = one
    rows = first_rows(section, key, count, download=not section.streaming, cache=cache)
    table = encode_table(rows, section, tokenizer)
    names = [row.where for row in rows]
    documents = cut_rows(table, section, name=names_of_lines(table, names).__getitem__)
    findings = findings_of(table)
    warnings = findings.warnings(key, names.__getitem__)
    return replace(documents, warnings=tuple(warnings), notes=tuple(findings.notes(key)))


def _build_stream(
    config: Any,
    sets: Sequence[RowSet],
    *,
    share: Share,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    read: Callable[..., Documents],
    cache: Cache,
) -> tuple[StreamLoader, str, dict[str, Documents]]:
    """The loader of a stream, a digest of its data, and the documents held out of each set, by the set's name."""
    section = config.data
    words = require_tokenizer(tokenizer)
    border = 0 if isinstance(config.eval.split, str) else key_border(config.eval.split)
    packs = (config.eval.steps or 0) * config.train.global_batch_size
    with agreement():
        found = [(locate(one.section, one.key, cache=cache), one.section) for one in sets]
        tables = [
            read_held_out(*one, words, border=border, packs=packs) for one in found if config.evaluates and border
        ]
    pool = start_workers(0 if section.workers == "auto" else section.workers, words)
    iterate = partial(iterate_packs, tokenizer=words, vocab_size=vocab_size, pool=pool, held_out=border)
    sources = [partial(iterate, *one) for one in found]
    weights = shares([part.weight or 1.0 for part in section.sources] or [1.0], temperature=section.temperature)
    loader = StreamLoader(sources, share=share, weights=weights.tolist(), names=[one.name for one in sets])
    identity = [cache_key(_place(one), its, words) for one, its in found]
    fingerprint = _digest(identity, weights.tolist(), section.overlong, *([border] if border else []))
    pairs = zip(sets, tables, strict=False)
    held_out = {one.name: read(one.section, key="eval.split", tokens=table) for one, table in pairs}
    return loader, fingerprint, held_out


def _place(location: Location) -> str:
    """What identifies where a stream's rows are."""
    name = f" {location.name}" if location.name else ""
    return f"{location.path}{location.split}{location.limit or ''}{name}"


def _digest(*parts: Any) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
