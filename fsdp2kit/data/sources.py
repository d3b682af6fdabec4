"""The sets of rows that ``[data]`` and ``[eval]`` name, and where their rows are.

Rows are in files on this machine or behind an fsspec URL, in a saved dataset, or on the hub.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import fsspec
import yaml

from fsdp2kit.config.schema import DataConfig
from fsdp2kit.config.section import may_be_hub_id
from fsdp2kit.config.sections.data import DataPathConfig
from fsdp2kit.data.cache import DEFAULT, Cache
from fsdp2kit.errors import UserError, nearest
from fsdp2kit.files.remote import is_url

_KINDS = {
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_ABOUT = ("dataset_info", "dataset_infos", "config", "readme", "license", "licence")
"""Names of files that hold no rows, without their suffix."""
_SHARD = re.compile(r"-(?P<number>\d{5})-of-(?P<count>\d{5})(?=\.)")
_END = r"(-?(\d+|(\d\d?|100)%))?"  # of a slice
_SPLIT = re.compile(rf"[^\[\]+]+(\[{_END}:{_END}\])?")  # a name, perhaps with a slice


@dataclass(frozen=True)
class Location:
    """Where a set's rows are: files of one kind, a folder written by `save_to_disk`, or a hub dataset."""

    path: str
    split: str
    kind: str
    """A kind of file ("json", "csv", "text", "parquet", "arrow"), "saved" or "hub"."""
    files: tuple[str, ...] = ()
    """Paths or URLs, in the order in which they are read."""
    key: str = "data.path"
    """The TOML key that names the set, for errors."""
    limit: int | None = None
    """Only this many rows are read, the first ones."""
    name: str | None = None
    """Configuration of a hub dataset."""
    formatter: str | None = None
    """``path.py:function`` or ``module:function``, which makes what is read of each row."""
    cache: Cache = DEFAULT
    """For its tokens, and for copies of what is remote."""

    @property
    def split_name(self) -> str:
        """The split without a slice: "train" of "train[:95%]"."""
        return self.split.partition("[")[0]

    @property
    def where(self) -> str:
        """Names the set in errors."""
        return f"{self.key}: {self.path}"

    @property
    def name_key(self) -> str:
        """The TOML key of the set's configuration."""
        return _name_key(self.key)

    @property
    def is_text(self) -> bool:
        """Whether the rows are lines of text files, so that errors can name the line."""
        return self.kind in ("json", "csv", "text")

    def digest(self) -> str | None:
        """Digest of the content, but not of the files' names; None for a hub dataset, which has no files here yet.

        Files behind a URL are not read: their filesystem tells by size, time or tag whether they have changed.
        """
        if not self.files:
            return None
        part = self.split if self.kind == "saved" else self.split[len(self.split_name) :]
        chosen = ":".join(str(one) for one in (self.kind, part, self.limit) if one)
        digest = hashlib.blake2b(chosen.encode(), digest_size=16)
        for file in self.files:
            digest.update(suffix_of(file).encode())
            if is_url(file):
                filesystem, name = fsspec.core.url_to_fs(file)
                digest.update(str(filesystem.ukey(name)).encode())
                continue
            with Path(file).open("rb") as content:
                digest.update(Path(file).stat().st_size.to_bytes(8, "little"))
                while block := content.read(1 << 22):
                    digest.update(block)
        return digest.hexdigest()


class RowSet(NamedTuple):
    """A set of rows that a config names: a source, or a held-out set."""

    section: DataConfig
    """``[data]`` with the set's own path, split, format and columns."""
    key: str
    """The TOML key that names it, for errors."""
    name: str = ""
    """Name in the metrics; "" for a set without one."""


def training_sets(data: DataConfig) -> list[RowSet]:
    """The training data: ``data.path``, or each of ``data.sources``."""
    sets = [
        RowSet(_with_rows(data, part, limit=part.limit or data.limit), f"data.sources.{at}.path", name)
        for at, (part, name) in enumerate(zip(data.sources, data.source_names(), strict=True))
    ]
    return sets or [RowSet(data, "data.path")]


def held_out_sets(config: Any) -> list[RowSet]:
    """The evaluation's own sets, without rows that are held out of the training data."""
    data = config.data
    evaluation = config.eval
    sets = [
        RowSet(_with_rows(data, part, limit=part.limit), f"eval.sets.{name}.path", name)
        for name, part in evaluation.sets.items()
    ]
    has_own_split = isinstance(evaluation.split, str) and evaluation.split != data.split
    if evaluation.path is not None or evaluation.name is not None or has_own_split:
        sets.append(RowSet(_with_rows(data, evaluation), "eval.path" if evaluation.path else "eval.split"))
    return sets


def _with_rows(data: DataConfig, part: Any, *, limit: int | None = None) -> DataConfig:
    """``[data]`` with the path, split, format and columns that a source or a held-out set has of its own."""
    own = {name: getattr(part, name, None) for name in ("path", "split", "format", "columns", "formatter")}
    given = {name: value for name, value in own.items() if value is not None}
    # The configuration belongs to the path: another path has none of `[data]`'s.
    name = part.configuration if part.path is not None else part.configuration or data.name
    return data.model_copy(update={"limit": limit, "name": name, **given})


def locate(section: DataConfig | DataPathConfig, key: str = "data.path", *, cache: Cache = DEFAULT) -> Location:
    """Find out what a set's ``path`` is, without reading rows.

    The files of a folder belong to the split that their names or folders mention (``train``, ``validation``,
    ``test`` and the usual synonyms), or all to "train" when none mentions one.

    Args:
        section: its `path`, `split` (a name or a slice of it, as `datasets` writes them) and `limit` are read.
        key: the TOML key that names the path, for errors.
    """
    path = section.path
    split = section.split
    if path is None:
        raise UserError(key, f'is required by data.format = "{section.format}"', "name a file, folder, URL or hub id")
    where = f"{key}: {path}"
    split_key = key.removesuffix("path") + "split" if key.endswith("path") else key
    configuration = section.configuration
    try:
        files, folder = _list_files(path)
    except (OSError, ValueError, ImportError) as error:
        what = f"cannot be opened ({first_line(error)})"
        raise UserError(where, what, "check the path, and the credentials for a URL") from None
    name = split.partition("[")[0]
    if folder is None and not files:
        raise UserError(where, "the pattern matches no file", "check the pattern")
    if folder is None and name != "train":
        todo = f'leave {split_key} at "train" or a slice of it ("train[:95%]"), or give another path'
        raise UserError(where, f"a file has no split {split!r}", todo)
    if folder == "" and may_be_hub_id(path):  # `datasets` checks its split and its configuration
        return Location(path, split, "hub", (), key, section.limit, configuration, section.formatter, cache)
    if folder == "":
        todo = "check the path: in a TOML it is relative to the TOML, in an override to the working directory"
        raise UserError(where, "no such file or folder", todo)
    is_saved = bool({f"{folder}/state.json", f"{folder}/dataset_dict.json"} & {*files})
    if configuration is not None and (folder is None or is_saved):
        what = f"{configuration!r}, and {path} has no configurations"
        raise UserError(_name_key(key), what, "leave it out, or give a folder or a hub dataset that has them")
    if is_saved:
        path = str(folder)
        kind = "saved"
        files = [file for file in files if file.endswith(".arrow")]
    elif folder is not None:
        files = _of_folder(files, folder, configuration, name, where=where, name_key=_name_key(key), cache=cache)
        kind = _kind_of(files, where)
    else:
        kind = _kind_of(files, where)
    if not _SPLIT.fullmatch(split):
        todo = 'give a name or one slice of it: "train[:95%]", "train[1000:2000]"'
        raise UserError(split_key, f"{split!r} is no split", todo)
    return Location(path, split, kind, tuple(sorted(files)), key, section.limit, None, section.formatter, cache)


def _name_key(key: str) -> str:
    """The TOML key of a set's configuration, from that of its path. A source's `name` is for the metrics."""
    return f"{key.rpartition('.')[0]}.{'config_name' if key.startswith('data.sources.') else 'name'}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence `datasets`' progress bars and warnings, which every rank would print."""
    import datasets

    verbosity = datasets.utils.logging.get_verbosity()
    bars = datasets.are_progress_bars_disabled()
    datasets.utils.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
        if not bars:
            datasets.enable_progress_bars()


def _list_files(path: str) -> tuple[list[str], str | None]:
    """``(files, folder)``: a path's or pattern's files, with None; or those below a folder, "" if it is missing."""
    if not is_url(path):
        path = str(Path(path).expanduser())
    filesystem, root = fsspec.core.url_to_fs(path)
    full_name = filesystem.unstrip_protocol if is_url(path) else str
    if filesystem.isfile(root):
        return [path if is_url(path) else root], None
    if re.search(r"[*?\[]", path) and not filesystem.isdir(root):
        if is_url(path):
            return [full_name(match) for match in filesystem.glob(root)], None
        # `pathlib` looks into linked directories as a shell does; fsspec does not.
        anchor = Path(path).anchor
        matches = Path(anchor).glob(str(Path(path).relative_to(anchor)))
        parts = Path(path).parts
        free = next(at for at, part in enumerate(parts) if re.search(r"[*?\[]", part))
        asked = _is_hidden(parts[free:])
        return [str(one) for one in matches if one.is_file() and (asked or not _is_hidden(one.parts[free:]))], None
    below = len(root.rstrip("/"))
    found = [full_name(file) for file in filesystem.find(root) if not _is_hidden(file[below:].split("/"))]
    if not is_url(path):
        found = [file for file in found if Path(file).is_file()]  # editors leave dangling links as locks
    return found, full_name(root) if found or filesystem.isdir(root) else ""


def _is_hidden(parts: Sequence[str]) -> bool:
    """Whether one of a path's parts is hidden, like Jupyter's copies in ``.ipynb_checkpoints``."""
    return any(part.startswith(".") for part in parts)


def suffix_of(file: str) -> str:
    """The suffix of a file's kind, like ``.jsonl``, before that of a compression."""
    path = PurePosixPath(file.lower())
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def several_configurations(where: str, names: Sequence[str], *, name_key: str) -> UserError:
    """The error where a set has several configurations, and the TOML names none of them."""
    todo = f'name one: {name_key} = "{names[0]}"'
    return UserError(where, f"has several configurations ({', '.join(names)})", todo)


def no_configuration(where: str, name: str, names: Sequence[str], *, name_key: str) -> UserError:
    """The error of a set that lacks the configuration that is named."""
    near = nearest(name, names)
    todo = f'did you mean "{near}"? Its' if near else "its"
    return UserError(name_key, f"{where} has no configuration {name!r}", f"{todo} configurations: {', '.join(names)}")


def _of_folder(
    files: list[str], folder: str, name: str | None, split: str, *, where: str, name_key: str, cache: Cache
) -> list[str]:
    """The files of one configuration's split.

    A README.md with ``configs`` in its YAML says which these are, as it does for `datasets`. Otherwise folders inside
    the folder are configurations if several have files that are named for the split, or if ``name`` is one of them.

    Args:
        name: of the configuration; None: not given.
        split: its name.
    """
    if described := _described(files, folder, where):
        if not is_url(folder):
            return _as_described(folder, name, split, where=where, name_key=name_key, cache=cache)
        if len(described) > 1:
            todo = f"give a pattern of one's files, like {folder}/NAME/train*"
            raise UserError(where, f"has several configurations ({', '.join(described)}) behind a URL", todo)
    files = [file for file in files if suffix_of(file) in _KINDS]
    if not files:
        raise UserError(where, "the folder holds no data file", f"known: {', '.join(_KINDS)}")
    if name is not None:
        inside = {first for first, rest in (_below(file, folder) for file in files) if rest}
        if not inside:
            raise UserError(name_key, f"{name!r}, and {where} has no configurations", "leave it out")
        if name not in inside:
            raise no_configuration(where, name, sorted(inside), name_key=name_key)
        folder = f"{folder}/{name}"
        files = [file for file in files if file.startswith(f"{folder}/")]
    chosen = _of_split(files, folder, split, where)
    if name is None and (names := _folders_of_configurations(chosen, folder)):
        error = several_configurations(where, names, name_key=name_key)
        todo = f"{error.todo}, or give a pattern ({folder}/*/{split}*) or data.sources to mix them"
        raise UserError(where, f"{error.what}: folders with files of the same split", todo)
    return chosen


def _below(file: str, folder: str) -> tuple[str, str]:
    """The first part of a file's path below a folder, and the rest; the rest is "" for a file of the folder itself."""
    first, _, rest = file.removeprefix(folder).lstrip("/").partition("/")
    return first, rest


def _folders_of_configurations(files: Sequence[str], folder: str) -> list[str]:
    """Folders that look like configurations, not like shards: several of them have files that are named for the split.

    Args:
        files: of one split.
    """
    parts = [_below(file, folder) for file in files]
    firsts = {first for first, _ in parts}
    if len(firsts) == 1 and all(rest for _, rest in parts):  # a folder around them
        return _folders_of_configurations(files, f"{folder}/{firsts.pop()}")
    names = {first for first, rest in parts if _split_of(first) is None and _split_of(rest) is not None and rest}
    kinds = {re.sub(r"\d+", "#", name) for name in names}  # part-0, part-1: shards of one set
    return sorted(names) if len(kinds) > 1 else []


def _described(files: Sequence[str], folder: str, where: str) -> list[str]:
    """The configurations that a folder's README.md lists in the YAML at its top; empty without such a list."""
    readme = f"{folder}/README.md"
    if readme not in files:
        return []
    with fsspec.open(readme, "rb") as content:
        text = content.read().decode(errors="replace").removeprefix("\ufeff").replace("\r\n", "\n")
    header = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*(\n|$)", text, re.DOTALL)
    if header is None or not re.search(r"^configs[ \t]*:", header[1], re.MULTILINE):
        return []
    try:
        configs = yaml.safe_load(header[1])["configs"]
        known = {"config_name", "data_files", "data_dir", "default", "version", "description", "features"}
        unread = {key for config in configs for key in config} - known
        names = [str(config["config_name"]) for config in configs]
    except (yaml.YAMLError, TypeError, KeyError, AttributeError) as error:
        what = f"the configs in its README.md cannot be read ({first_line(error)})"
        raise UserError(where, what, "mend them, or give a pattern of the files") from None
    if unread:
        what = f"the configs in its README.md have {sorted(unread)[0]!r}, which is not read here"
        raise UserError(where, what, "give a pattern of the files, whose rows are then read without it")
    return names


def _as_described(folder: str, name: str | None, split: str, *, where: str, name_key: str, cache: Cache) -> list[str]:
    """The files of a configuration's split as `datasets` reads them from the README.md of a folder."""
    import datasets

    source = str(Path(folder).absolute())
    try:
        with quiet():
            names = datasets.get_dataset_config_names(source)
            chosen = name or datasets.get_dataset_default_config_name(source)
            if chosen is None:
                raise several_configurations(where, names, name_key=name_key)
            if chosen not in names:
                raise no_configuration(where, chosen, names, name_key=name_key)
            builder = datasets.load_dataset_builder(source, chosen, cache_dir=str(cache.writable()))
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        what = f"the configs in its README.md cannot be read ({first_line(error)})"
        raise UserError(where, what, "mend them, or give a pattern of the files") from None
    found = {str(one): [*map(str, files)] for one, files in (builder.config.data_files or {}).items()}
    synonyms = next((names for names in _SPLITS.values() if split in names), (split,))
    files = next((found[one] for one in (split, *synonyms) if one in found), None)
    if files is None:
        raise UserError(where, f"there is no split {split!r} in {chosen!r}", f"its README.md has: {', '.join(found)}")
    if not files:
        what = f"the patterns that its README.md gives for split {split!r} of {chosen!r} match no file"
        raise UserError(where, what, "mend them, or give a pattern of the files")
    return files


def _of_split(files: list[str], folder: str, asked: str, where: str) -> list[str]:
    """The files whose names or folders mention a split; all of them are "train" if none mentions any."""
    split_of = {file: _split_of(file.removeprefix(folder)) for file in files}
    if not any(split_of.values()):
        split_of = dict.fromkeys(files, "train")
    wanted = next((name for name, synonyms in _SPLITS.items() if asked in synonyms), asked)
    chosen = [file for file in files if split_of[file] == wanted]
    if not chosen:
        known = ", ".join(sorted({name for name in split_of.values() if name}))
        raise UserError(where, f"there is no split {asked!r}", f"the folder has: {known}")
    _check_shards(chosen, where)
    if wanted == "train":
        _check_unnamed([file for file in files if split_of[file] is None], chosen, folder, where)
    return chosen


def _check_unnamed(unnamed: Sequence[str], chosen: Sequence[str], folder: str, where: str) -> None:
    """Refuse data files that are named for no split, beside files that are: they would be left out without a word.

    Files of another kind, such as notes.txt beside JSON lines, are no data.
    """
    kinds = {_KINDS[suffix_of(file)] for file in chosen}
    for file in unnamed:
        if _KINDS[suffix_of(file)] in kinds and PurePosixPath(file.lower()).stem not in _ABOUT:
            one, other = (path.removeprefix(folder).lstrip("/") for path in (file, chosen[0]))
            what = f"{one} is named for no split, and {other} is, so {one} would be left out"
            raise UserError(where, what, "name it for a split, or give a pattern of the files to read")


def _check_shards(files: list[str], where: str) -> None:
    """Refuse ``train-00000-of-00003`` and ``…-00002-of-00003`` without the one between."""
    sets: dict[tuple[str, int], set[int]] = {}
    for file in files:
        if found := _SHARD.search(file):
            sets.setdefault((file[: found.start()], int(found["count"])), set()).add(int(found["number"]))
    for (name, count), numbers in sets.items():
        if missing := set(range(count)) - numbers:
            what = f"{PurePosixPath(name).name} has {len(numbers)} of {count} files; number {min(missing)} is missing"
            raise UserError(where, what, "fetch it again, or give a pattern that names the files to read")


def _split_of(relative: str) -> str | None:
    """The split that a file's folders mention, as `datasets` looks for it, or else its name; None without any."""
    path = PurePosixPath(relative)
    return _split_in(str(path.parent)) or _split_in(path.name)


def _split_in(text: str) -> str | None:
    words = re.split(r"[^a-z]+", text.lower())  # `datasets` takes digits for separators, too
    return next((name for name, synonyms in _SPLITS.items() if any(word in synonyms for word in words)), None)


def _kind_of(files: list[str], where: str) -> str:
    kinds = {_KINDS.get(suffix_of(file), suffix_of(file)) for file in files}
    if unknown := sorted(kinds - set(_KINDS.values())):
        raise UserError(where, f"unknown suffix {unknown[0]!r}", f"known: {', '.join(_KINDS)}")
    if len(kinds) > 1:
        raise UserError(where, f"files of several kinds ({', '.join(sorted(kinds))})", "give a glob of one kind")
    return kinds.pop()
