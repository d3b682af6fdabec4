"""From ``[data]`` and ``[eval]`` to the loaders of this data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp2kit.data.documents import Documents, build_documents, check_vocabulary
from fsdp2kit.data.loader import Loader, build_loader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Data:
    """What a run reads."""

    documents: Documents
    loader: Loader
    held_out: Loader | None
    """None unless ``[eval]`` asks for it."""

    def describe(self) -> list[str]:
        """What the user should know of the data before training on it, a line each."""
        report = self.documents.report
        lost = [("truncated", report.truncated), ("dropped", report.dropped), ("split", report.split)]
        lost.append(("without a target", report.unsupervised))
        notes = "".join(f", {count:,} {what}" for what, count in lost if count)
        return [
            f"data: {report.documents:,} documents of {report.rows:,} rows{notes}; {report.tokens:,} tokens, "
            f"{report.supervised_tokens / report.tokens:.0%} supervised",
            f"an epoch: {self.loader.rows_per_epoch:,} rows of {self.loader.seq_len:,} tokens, "
            f"{self.loader.packing_efficiency:.1%} full, in {self.loader.steps_per_epoch:,} steps",
        ]


def build_data(
    config: Any,
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
) -> Data:
    """Read, tokenise and pack the training data and, where ``[eval]`` asks for it, the held-out data.

    Every rank calls this, and one on each machine fills the cache of tokens.

    Args:
        config: a recipe's config: its ``data``, ``eval``, ``train`` and ``run`` are read.
        vocab_size: rows of the model's embedding.

    Raises:
        UserError: as `build_documents` and `check_vocabulary` do.
    """

    def read(path: str | None, split: str) -> Documents:
        documents = build_documents(
            config.data, path=path, split=split, tokenizer=tokenizer, seed=config.run.seed, vocab_size=vocab_size
        )
        check_vocabulary(documents, vocab_size)
        return documents

    def deal(documents: Documents, *, shuffle: bool) -> Loader:
        return build_loader(
            documents,
            seq_len=config.data.seq_len,
            pack=config.data.pack,
            shuffle=shuffle,
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=config.train.micro_batch_size,
            dp_rank=dp_rank,
            dp_size=dp_size,
            seed=config.run.seed,
            pad_id=_padding_id(tokenizer),
        )

    documents = read(config.data.path, config.data.split)
    held_out = None
    if config.eval.every > 0 or config.train.steps == 0:
        held_out = deal(read(config.eval.path or config.data.path, config.eval.split), shuffle=False)
    return Data(documents, deal(documents, shuffle=config.data.shuffle), held_out)


def _padding_id(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Any valid id does: padding is a document of its own and never a target."""
    candidates = [] if tokenizer is None else [tokenizer.pad_token_id, tokenizer.eos_token_id]
    return next((int(candidate) for candidate in candidates if isinstance(candidate, int)), 0)
