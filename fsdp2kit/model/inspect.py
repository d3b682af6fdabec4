"""What a model can do, tried on a small copy instead of read from its config; and checks of its limits."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fsdp2kit.errors import UserError
from fsdp2kit.model.layer_functions import use_no_kernels

T = TypeVar("T")

# Sizes that are reduced in a small copy. All else (ratios of head counts, norms, scalings, caps) is kept.
_SMALL = {
    "vocab_size": 128,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "max_position_embeddings": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "attention_chunk_size": 5,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
}
_LAYERS = 2
_HEAD_DIM = 16
_MAMBA_HEADS = 4
_MOST_KINDS = 3
"""What a config lists for every layer besides its kind distinguishes layers if it has so many values at most."""


@dataclass(frozen=True, eq=False)
class Traits:
    """Facts about a model's architecture, found by `inspect_model`; the small copy is kept in memory.

    Attributes:
        causal: no logit depends on a later token; None if it could not be tried.
        separates_packed: a packed document's logits are those of the document alone, given only position ids that
            restart; None if it could not be tried.
        linear_head: logits are ``hidden @ weightᵀ`` and nothing else. False if it could not be tried: that is always
            right, and only slower.
        has_position_table: it cannot run beyond ``max_position_embeddings``, because it has a table of positions.
        uncalled_modules: names of modules that are never called: the module around them reads their parameters.
            Convolutions are always among them: fast kernels (Mamba's, say) take their weights, and do not run in a
            small copy on a CPU.
        no_small_copy: why there is no small copy to try anything on; None if there is one.
    """

    causal: bool | None
    separates_packed: bool | None
    linear_head: bool
    has_position_table: bool
    uncalled_modules: frozenset[str]
    no_small_copy: str | None
    _small_copy: PreTrainedModel | None = field(repr=False)
    _outcomes: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    def once(self, key: Hashable, trial: Callable[[Any], T]) -> T:
        """The outcome of a trial on a new `small_copy` (None where there is none), remembered by ``key``."""
        if key not in self._outcomes:
            self._outcomes[key] = trial(self.small_copy())
        return self._outcomes[key]

    def small_copy(self) -> PreTrainedModel | None:
        """A new small copy to try something on (see `build_small_copy`); None where there is none."""
        return copy.deepcopy(self._small_copy)


def inspect_model(model: PreTrainedModel) -> Traits:
    """Build the small copy of ``model`` and find out its traits.

    Args:
        model: on meta or real, before it is made parallel; it is not changed.
    """
    small = None
    no_small_copy = None
    try:
        small = build_small_copy(model)
    except Exception as error:  # whatever an architecture raises
        said = str(error).strip().partition("\n")[0]
        no_small_copy = f"a small copy of it does not run ({type(error).__name__}: {said})"
    backbone_name(model)  # refuses a model that is not a decoder with a head
    # The small copy's layers stand for all layers of their kind.
    uncalled = _try(_uncalled_modules, small) or set()
    convolutions = {name for name, module in model.named_modules() if isinstance(module, nn.Conv1d)}
    return Traits(
        causal=_try(is_causal, small),
        separates_packed=_try(separates_packed_documents, small),
        linear_head=bool(_try(_has_linear_head, small)),
        has_position_table=bool(_try(_has_position_table, small)),
        uncalled_modules=frozenset(convolutions | {n for n, _ in model.named_modules() if any_layer(n) in uncalled}),
        no_small_copy=no_small_copy,
        _small_copy=small,
    )


def backbone_name(model: PreTrainedModel) -> str:
    """Name of the child that turns tokens into hidden states, beside the head."""
    children = dict(model.named_children())
    for decoder in (model.base_model, model.get_decoder()):
        for name, child in children.items():
            if child is decoder:
                return name
    # Some models' classes name their backbone wrongly: take the only child beside the head.
    others = [name for name, child in children.items() if child is not model.get_output_embeddings()]
    if len(others) == 1:
        return others[0]
    what = "is not a decoder with an output head"
    raise UserError(f"model {type(model).__name__}", what, "use a causal language model")


def check_positions(model: PreTrainedModel, traits: Traits, *, seq_len: int) -> None:
    """Refuse a seq_len beyond a model's table of positions.

    The config's ``max_position_embeddings`` may be a table's size or the length that the model was trained on;
    ``traits`` says which.
    """
    limit = value_of(model.config.get_text_config(), "max_position_embeddings")
    if isinstance(limit, int) and seq_len > limit and traits.has_position_table:
        what = f"{seq_len} is beyond the {limit} positions of {type(model).__name__}, which has a table of them"
        raise UserError("data.seq_len", what, f"use at most {limit}")


def beyond_positions(config: PretrainedConfig, *, seq_len: int) -> str | None:
    """A warning if seq_len is beyond the positions that a model was made for; None otherwise.

    Scaled RoPE counts: some configs' ``max_position_embeddings`` is the length before the scaling, others' the one
    after. If kinds of layers have a RoPE each, the shortest length counts.
    """
    config = config.get_text_config()
    positions = value_of(config, "max_position_embeddings")
    given = value_of(config, "rope_parameters") or {}
    if not isinstance(positions, int) or positions <= 0:
        return None
    kinds = [kind for kind in given.values() if isinstance(kind, dict)] or [given]
    limit = min(
        max(positions, int((kind.get("original_max_position_embeddings") or positions) * (kind.get("factor") or 1)))
        for kind in kinds
    )
    if seq_len <= limit:
        return None
    return (
        f"data.seq_len {seq_len:,} is beyond the {limit:,} positions that the model was made for, and the others are "
        "new to it; use a shorter one, or scale its RoPE (model.config.rope_parameters)"
    )


def check_rope(config: PretrainedConfig, *, seq_len: int) -> None:
    """Refuse RoPE whose frequencies depend on the longest sequence of a forward pass, if seq_len is that long.

    "dynamic" and "longrope" look at the largest position of a forward pass: that of a micro-batch's longest document,
    or of a rank's slice. The same token would be rotated differently on another mesh, and "dynamic" has a memory.
    """
    config = config.get_text_config()
    given = value_of(config, "rope_parameters") or {}
    for kind in [given, *(kind for kind in given.values() if isinstance(kind, dict))]:
        name = kind.get("rope_type")
        if name not in ("dynamic", "longrope"):
            continue
        original = (name == "longrope" and kind.get("original_max_position_embeddings")) or (
            value_of(config, "original_max_position_embeddings") or config.max_position_embeddings
        )
        if seq_len > original:
            what = (
                f"{seq_len} is beyond {original}, from where on {name!r} RoPE changes with the longest sequence a "
                "rank sees, so results would depend on the mesh and the micro-batch"
            )
            todo = f"use at most {original}, or another rope_type (such as yarn) in model.config.rope_parameters"
            raise UserError("data.seq_len", what, todo)


def check_temperature(config: PretrainedConfig, *, seq_len: int, cut: bool) -> None:
    """Refuse queries that are scaled by their place in what a rank holds of a row (Llama 4's layers without RoPE).

    The scale is log1p(⌊(index + 1) / floor_scale⌋)·attn_scale + 1, and so 1 in every row shorter than floor_scale.

    Args:
        cut: whether the index may be another one than in the document: in packed rows and under context parallelism.
    """
    config = config.get_text_config()
    floor = value_of(config, "floor_scale")
    if cut and floor and value_of(config, "attn_temperature_tuning") and seq_len >= floor:
        what = f"{seq_len} is not below {floor}, from where on the model scales queries by their index in a rank's row"
        todo = "use a shorter one, or data.pack = false and mesh.cp = 1"
        raise UserError("data.seq_len", f"{what}, not in their document", todo)


def check_attention(attention: str, *, device: torch.device) -> None:
    """Refuse an attention that cannot train on this device."""
    if device.type == "cpu" and attention == "flex_attention":
        what = "'flex_attention' has no backward on a CPU"
        raise UserError("model.attention", what, "use 'sdpa' or 'eager', or a CUDA device")


@torch.no_grad()
def _try(question: Callable[[Any], T], small: PreTrainedModel | None) -> T | None:
    """The answer on a new small copy; None if it cannot be tried."""
    try:
        return None if small is None else question(copy.deepcopy(small))
    except Exception:  # whatever an architecture raises
        return None


def is_causal(small: PreTrainedModel) -> bool:
    """Whether no logit depends on a later token."""
    tokens = _tokens()
    changed = _tokens()
    changed[:, -1] += 1
    before, after = (small(input_ids=ids, use_cache=False).logits for ids in (tokens, changed))
    return _same(before[:, :-1], after[:, :-1])


def separates_packed_documents(small: PreTrainedModel) -> bool:
    """Whether a packed document's logits are those of the document alone, given only restarting positions."""
    tokens = _tokens()
    half = tokens.shape[1] // 2
    positions = torch.cat([torch.arange(half), torch.arange(half)])[None]
    packed = small(input_ids=tokens, position_ids=positions, use_cache=False).logits
    alone = [small(input_ids=part, use_cache=False).logits for part in (tokens[:, :half], tokens[:, half:])]
    return _same(packed, torch.cat(alone, dim=1))


def _has_linear_head(small: Any) -> bool:
    head = small.get_output_embeddings()
    if not isinstance(head, nn.Linear) or head.bias is not None:
        return False
    generator = torch.Generator().manual_seed(0)
    for parameter in small.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    tokens = torch.randint(0, small.get_input_embeddings().weight.shape[0], (1, 8), generator=generator)
    hidden = getattr(small, backbone_name(small))(input_ids=tokens, use_cache=False)[0]
    logits = small(input_ids=tokens, use_cache=False).logits
    return torch.allclose(logits, F.linear(hidden, head.weight), rtol=1e-5, atol=1e-5)


def _has_position_table(small: PreTrainedModel) -> bool:
    def runs(small: Any, length: int) -> bool:
        positions = torch.arange(length)[None]
        small(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False)
        return True

    size = value_of(small.config.get_text_config(), "max_position_embeddings")
    if not isinstance(size, int) or size <= 0:  # XLNet has −1: no limit
        return False
    # Past the end of an embedding or a buffer, each architecture raises another exception.
    return bool(_try(lambda small: runs(small, size), small)) and not _try(lambda small: runs(small, size + 1), small)


def _uncalled_modules(small: nn.Module) -> set[str]:
    """Names of modules that are never called, with ``*`` for the layer's number."""
    called: set[str] = set()
    for name, module in small.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(any_layer(name)))
    small(input_ids=_tokens(), use_cache=False)
    return {any_layer(name) for name, _ in small.named_modules()} - called


def any_layer(name: str) -> str:
    """A module's or a tensor's name with ``*`` for numbers (of layers, experts, …)."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _tokens() -> Tensor:
    return torch.arange(2, 14)[None]


def _same(first: Tensor, second: Tensor) -> bool:
    return torch.allclose(first, second, rtol=1e-4, atol=1e-4)


# The small copy


def shrink_config(config: PretrainedConfig, *, narrow: bool = True, keep_heads: bool = False) -> PretrainedConfig:
    """A copy of ``config`` with few, narrow layers; heads keep their number of groups where they can.

    Args:
        config: a decoder's config.
        narrow: shrink the width as well; otherwise heads and hidden size stay.
        keep_heads: keep the number of heads, and make each narrower.
    """
    whole = copy.deepcopy(config)
    for config in {id(part): part for part in (whole, whole.get_text_config())}.values():
        for key, value in _SMALL.items():
            if isinstance(given := common_value(config, key), int) and given > value:
                setattr(config, key, value)
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            ids = value_of(config, key)
            if ids is not None and max(ids if isinstance(ids, list) else [ids]) >= _SMALL["vocab_size"]:
                try:
                    setattr(config, key, None)
                except Exception:  # ModernBERT's decoder insists on an id
                    setattr(config, key, 0)
        _choose_layers(config)
        heads = common_value(config, "num_attention_heads")
        if isinstance(heads, int) and narrow:
            given_kv_heads = common_value(config, "num_key_value_heads") or heads
            groups = max(1, heads // given_kv_heads)
            kv_heads = given_kv_heads if keep_heads else 1 if groups > 1 else 2
            config.num_attention_heads = groups * kv_heads
            if common_value(config, "num_key_value_heads") is not None:
                config.num_key_value_heads = kv_heads
            if hasattr(config, "qk_nope_head_dim"):  # latent attention: what is rotated has a width of its own
                config.head_dim = config.qk_rope_head_dim
                config.qk_head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
            elif common_value(config, "head_dim") is not None:
                with contextlib.suppress(AttributeError):  # a property: hidden size ÷ heads
                    config.head_dim = _HEAD_DIM
            config.hidden_size = config.num_attention_heads * _HEAD_DIM
            _narrow_mamba(config)
    return whole


def value_of(config: Any, key: str) -> Any:
    """A config's value; None if it has none. transformers raises a RuntimeError where layers differ in it."""
    return getattr(config, key, None)


def common_value(config: Any, key: str) -> Any:
    """A config's value; None if it has none, and where layers differ in it."""
    try:
        return value_of(config, key)
    except Exception:
        return None


def _choose_layers(config: Any) -> None:
    """Keep few layers, with one of every kind: alternating local and global layers need one of each.

    What a config lists for every layer (kinds of attention and of MLP, layers without RoPE, …), and what it says of
    single layers, is cut to those kept.
    """
    depth = config.num_hidden_layers
    is_mixed = value_of(config, "is_heterogeneous")
    own = {int(at): values for at, values in config.to_dict()["per_layer_config"].items()} if is_mixed else {}
    kinds = value_of(config, "layer_types") or value_of(config, "layers_block_type")
    lists = {key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == depth}
    counted = [key for key, value in lists.items() if value == [*range(depth)]]
    firsts = [(value == kinds, _first_of_each(value)) for value in lists.values()]
    firsts.append((False, _first_of_each([own.get(at) for at in range(depth)])))
    first = sorted({at for is_kinds, each in firsts if is_kinds or len(each) <= _MOST_KINDS for at in each})
    if kinds and not any(value == kinds for value in lists.values()):
        # Computed from the layer's number: the first layers stay as they are.
        chosen = [*range(max(min(_LAYERS, depth), *(at + 1 for at in _first_of_each(kinds))))]
    else:
        others = [at for at in range(depth) if at not in first]
        chosen = sorted([*first, *others[: max(0, _LAYERS - len(first))]])
        if value_of(config, "num_kv_shared_layers"):  # the last ones take keys of others of their kind
            shared = _first_of_each(kinds or [0])
            chosen = [*chosen, *shared]
            config.num_kv_shared_layers = len(shared)
    config.num_hidden_layers = len(chosen)
    for key, value in lists.items():
        setattr(config, key, [*range(len(chosen))] if key in counted else [value[at] for at in chosen])
        smallest = _SMALL.get(key)
        if smallest:
            setattr(config, key, [min(each, smallest) for each in getattr(config, key)])
    if is_mixed:
        config.per_layer_config = {at: own[before] for at, before in enumerate(chosen) if before in own} or None


def _first_of_each(values: list[Any]) -> list[int]:
    """The index at which each different value stands first."""
    return [at for at, value in enumerate(values) if value not in values[:at]]


def _narrow_mamba(config: Any) -> None:
    """Give Mamba-2's heads a width that suits the narrowed hidden size: heads × width = expand × hidden."""
    for heads, width in (("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim")):
        if isinstance(value_of(config, heads), int):
            inner = int(value_of(config, "mamba_expand") or getattr(config, "expand", 2)) * config.hidden_size
            setattr(config, heads, _MAMBA_HEADS)
            setattr(config, width, inner // _MAMBA_HEADS)
            if value_of(config, "mamba_d_ssm"):
                config.mamba_d_ssm = inner
            for groups in ("mamba_n_groups", "n_groups"):
                if isinstance(value_of(config, groups), int):
                    setattr(config, groups, min(getattr(config, groups), 2))


def build_small_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A small copy of ``model`` on the CPU in eval mode, which has run once.

    It has few, narrow layers; or few layers of the model's width, if the architecture's widths cannot shrink alike.

    Raises:
        Exception: whatever an architecture raises that does not shrink, or does not run.
    """
    try:
        return _build_small_copy(model, narrow=True)
    except Exception:
        return _build_small_copy(model, narrow=False)


def _build_small_copy(model: PreTrainedModel, *, narrow: bool) -> PreTrainedModel:
    with (
        warnings.catch_warnings(),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        config = shrink_config(model.config, narrow=narrow)
        small = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        use_no_kernels(small)
        # Larger weights than the usual 0.02: attention would be all but uniform, and leaks between documents would be
        # lost in rounding.
        for parameter in small.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
            elif not parameter.any():  # sinks of heads, biases: what is zero at first takes part as well
                parameter.normal_(std=0.2)
        small(input_ids=torch.zeros((1, 4), dtype=torch.int64), use_cache=False)
        return small
