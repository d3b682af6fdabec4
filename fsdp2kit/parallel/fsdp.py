"""Choose and shard FSDP2 units: the modules whose parameters `fully_shard` gathers, frees and reduces together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from fsdp2kit.config.schema import FSDPConfig
from fsdp2kit.errors import UserError, did_you_mean
from fsdp2kit.model.build import decoder_layers
from fsdp2kit.model.inspect import Traits, backbone_name, inspect_model
from fsdp2kit.parallel.expert_parallel.partition import ExpertPlan, shard_dim
from fsdp2kit.parallel.shared_buffer import SharedBuffer
from fsdp2kit.weights.modules import base_module
from fsdp2kit.weights.record import find_ties, weights_of


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered, freed and reduced together, without those of units inside it."""

    name: str
    """The module's name; "" is the root."""
    kind: str
    """The name of its class."""
    parameters: int
    """Number of parameters that it gathers."""
    param_dtype: str
    """The dtype in which it computes."""
    output_dtype: str | None
    """Its floating-point outputs are cast to this; None: they are not cast."""
    reshard_after_forward: bool | int
    """Whether its parameters are freed after forward, or to how many ranks they are resharded."""
    kept: tuple[str, ...] = ()
    """Names of its parameters, if it is the unit of those that stay in float32 inside other units' modules."""
    experts: bool = False
    """Whether these are partitioned experts, and sharded over fewer ranks."""
    by_side: tuple[str, ...] = ()
    """Names of its parameters that are sharded over another dimension than rows: there are more ranks than experts."""


def plan_units(
    section: FSDPConfig,
    model: PreTrainedModel,
    *,
    traits: Traits | None = None,
    experts: ExpertPlan | None = None,
    ranks: int = 1,
    in_4_bits: Collection[nn.Parameter] = (),
) -> tuple[Unit, ...]:
    """The units of ``model`` in the order of their declaration, first the root, which has all other parameters.

    An untied embedding and an untied head are units of their own under ``unit = "layer"``, so that their gradients do
    not share one giant reduce-scatter. Tied, they are one parameter, which stays in the root's unit.

    A unit gathers in one dtype. Parameters that transformers keeps in float32 (biases and weights of routers, sinks,
    …) are one unit, on the model without its head, whose forward encloses all layers: they are few and small, and
    often parts of a module that otherwise computes in ``param_dtype``. A head that is kept in float32 is its own unit.

    Args:
        model: before it is sharded; it may be on meta.
        traits: what `inspect_model` found, if it was called already.
        experts: those that are partitioned; each of its modules becomes a unit.
        ranks: that a parameter is sharded over. Experts in one tensor that are fewer are sharded over a side of their
            matrices that ``ranks`` divides, if there is one; by rows, some ranks would hold nothing but padding.
        in_4_bits: weights that will be stored so: always sharded by rows, of which they have many.
    """
    traits = traits or inspect_model(model)
    ignored = set(ignored_modules(section, model))
    head = model.get_output_embeddings()
    named, chosen = _choose(section, model, traits)
    partitioned = set(experts.modules if experts else ())
    chosen = (chosen | partitioned) - ignored
    kept, of_head = _split_kept(section, model, chosen, ignored)
    if (backbone := next(iter(kept.values()), None)) in named:
        kind = type(model.get_submodule(backbone)).__name__
        what = f"{kind} already is the unit of the parameters that stay in float32"
        raise UserError("fsdp.unit_classes and fsdp.class_dtypes", what, "name classes of modules inside it")
    chosen -= {backbone}
    _check_shared(model, chosen)
    owned = _names_by_unit(model, chosen, ignored=ignored, kept=kept)
    inside = {name: sum(model.get_parameter(key).numel() for key in keys) for name, keys in owned.items()}
    reshard = reshards_after_forward(section)
    units = []
    for name, module in model.named_modules():
        if name == backbone:
            units.append(Unit(name, type(module).__name__, inside[name], "float32", None, False, tuple(kept)))
        if name not in chosen:
            continue
        dtype = section.class_dtypes.get(type(module).__name__, section.param_dtype)
        # The next matmul needs inputs in the compute dtype.
        output = section.output_dtype or (None if dtype == section.param_dtype else section.param_dtype)
        if name == "" or module is head:
            # Both return the loss, which is not cast. Neither is freed after forward: the head's backward comes next,
            # and the root would only be gathered again.
            dtype = "float32" if of_head and module is head else section.param_dtype
            units.append(Unit(name, type(module).__name__, inside[name], dtype, None, False))
        else:
            count = inside[name] // experts.ranks if experts and name in partitioned else inside[name]
            units.append(Unit(name, type(module).__name__, count, dtype, output, reshard, experts=name in partitioned))
    return tuple(_with_sides(unit, owned[unit.name], model, ranks=ranks, by_rows=in_4_bits) for unit in units)


def _with_sides(
    unit: Unit, owned: Sequence[str], model: nn.Module, *, ranks: int, by_rows: Collection[nn.Parameter]
) -> Unit:
    """``unit``, which owns these parameters, with those of them that are not sharded by rows."""
    if unit.experts:
        return unit
    parameters = {name: model.get_parameter(name) for name in owned}
    sides = [name for name, one in parameters.items() if _has_more_ranks_than_experts(one, ranks)]
    return replace(unit, by_side=tuple(name for name in sides if parameters[name] not in by_rows))


def _has_more_ranks_than_experts(parameter: nn.Parameter, ranks: int) -> bool:
    return parameter.ndim == 3 and len(parameter) < ranks and shard_dim(parameter.shape, ranks=ranks) is not None


def _choose(section: FSDPConfig, model: PreTrainedModel, traits: Traits) -> tuple[set[str], set[str]]:
    """Names of the modules whose classes the config lists, and of all that become units, these among them."""
    names = {id(module): name for name, module in model.named_modules()}
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    uncalled = traits.uncalled_modules | set(_read_from_outside(model))
    exceptions = _of_classes(model, section.class_dtypes, uncalled, where="fsdp.class_dtypes")
    named = {*exceptions, *_of_classes(model, section.unit_classes, uncalled, where="fsdp.unit_classes")}
    chosen: set[str] = {"", *named}
    if section.unit == "layer":
        untied = head is not None and head.weight is not embedding.weight
        modules = [*decoder_layers(model), *((embedding, head) if untied else ())]
        chosen |= {names[id(module)] for module in modules}
    elif section.unit == "size":
        chosen |= set(_by_size(model, section.min_params, uncalled))
    return named, chosen | set(_frozen_outside(model, chosen, uncalled))


def _read_from_outside(model: PreTrainedModel) -> Iterator[str]:
    """Names of the modules in which peft keeps parameters that are read without a call, which alone gathers them.

    The loss reads the head's weight, DoRA the weights of a layer and its adapter, for their norm, and an adapter on
    experts theirs.
    """
    adapter = weights_of(model).adapter
    head = model.get_output_embeddings()
    read = [head] if head is not None else []
    read += [model.get_submodule(name) for name in (adapter.experts if adapter is not None else ())]
    if adapter is not None and adapter.config.use_dora:
        read += [model.get_submodule(name) for name in adapter.layers]
    inside = {id(module) for one in read for module in one.modules() if module is not one}
    yield from (name for name, module in model.named_modules() if id(module) in inside)


def _split_kept(
    section: FSDPConfig, model: PreTrainedModel, units: set[str], ignored: Collection[str]
) -> tuple[dict[str, str], set[str]]:
    """The parameters that stay in float32: those of their own unit, with its name, and those of a head in its unit."""
    stays = stays_in_float32(section, model, section.param_dtype)
    parameters = dict(model.named_parameters())
    head = model.get_output_embeddings()
    owners = {name: name.rpartition(".")[0] for name in stays if name in parameters}
    of_head = {name for name, owner in owners.items() if owner in units and model.get_submodule(owner) is head}
    kept = {name: backbone_name(model) for name in owners if name not in of_head and owners[name] not in ignored}
    return kept, of_head


def stays_in_float32(section: FSDPConfig, model: PreTrainedModel, dtype: str) -> list[str]:
    """Names of the parameters and persistent buffers that stay in float32 where the model is ``dtype``.

    Those of modules whose class ``class_dtypes`` names are not among them.
    """
    kept = weights_of(model).kept_in_float32(getattr(torch, dtype), model.state_dict())
    decided = tuple(
        f"{name}." for name, module in model.named_modules() if type(module).__name__ in section.class_dtypes
    )
    return [name for name in model.state_dict() if name in kept and not name.startswith(decided)]


def layers_by_dtype(section: FSDPConfig, model: PreTrainedModel) -> tuple[set[str], set[str]]:
    """Names of the modules that compute in another dtype than the others.

    Returns:
        Those to which ``class_dtypes`` gives another dtype, itself or by the innermost listed module around them; and
        those whose ``weight`` stays in float32.
    """
    modules = dict(model.named_modules())
    by_class = {name for name in modules if _class_dtype(name, modules, section) != section.param_dtype}
    kept = stays_in_float32(section, model, section.param_dtype)
    return by_class, {name.removesuffix(".weight") for name in kept if name.endswith(".weight")}


def _class_dtype(name: str, modules: Mapping[str, nn.Module], section: FSDPConfig) -> str:
    """The dtype that ``class_dtypes`` gives a module, or the innermost listed module around it."""
    parts = name.split(".")
    around = (type(modules[".".join(parts[:size])]).__name__ for size in range(len(parts), -1, -1))
    return next((section.class_dtypes[kind] for kind in around if kind in section.class_dtypes), section.param_dtype)


def ignored_modules(section: FSDPConfig, model: PreTrainedModel) -> tuple[str, ...]:
    """Names of the modules that ``fsdp.ignored_modules`` keeps whole, and of all modules inside them."""
    found: dict[str, nn.Module] = {}
    modules = dict(model.named_modules())
    for pattern in section.ignored_modules:
        matches = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not matches:
            raise UserError("fsdp.ignored_modules", f"{pattern!r} matches no module", _suggest(pattern, modules))
        for name in matches:
            found |= {inner: module for inner, module in modules.items() if f"{inner}.".startswith(f"{name}.")}
    for name, module in found.items():
        for key, parameter in module.named_parameters(prefix=name):
            if parameter.requires_grad:
                raise UserError(
                    "fsdp.ignored_modules",
                    f"{key} is trained, but its gradient would not be reduced: every rank would learn its own",
                    f'freeze it (model.freeze = ["{name}.*"]), or leave it to FSDP',
                )
    return tuple(found)


def parameters_by_unit(
    model: nn.Module, units: Iterable[str], *, ignored: Iterable[str] = (), kept: Mapping[str, str] | None = None
) -> dict[str, list[nn.Parameter]]:
    """The parameters that each unit gathers, by its name; a tied one once.

    Args:
        model: before it is sharded.
        units: names of the units, "" for the root.
        ignored: names of modules whose parameters no unit gathers (`ignored_modules`).
        kept: parameters that are gathered by another unit than the innermost → that unit, which gathers no others.
    """
    names = _names_by_unit(model, units, ignored=ignored, kept=kept or {})
    parameters = dict(model.named_parameters())
    return {unit: [parameters[name] for name in inside] for unit, inside in names.items()}


def _names_by_unit(
    model: nn.Module, units: Iterable[str], *, ignored: Iterable[str], kept: Mapping[str, str]
) -> dict[str, list[str]]:
    """The names of what `parameters_by_unit` returns, which stay when sharding replaces the parameters."""
    kept_whole = set(ignored)
    inside: dict[str, list[str]] = {name: [] for name in [*units, *kept.values()]}
    innermost = inside.keys() - set(kept.values())
    for key, _ in model.named_parameters():
        if key.rpartition(".")[0] not in kept_whole:
            inside[kept[key] if key in kept else _unit_of(key, innermost)].append(key)
    return inside


def apply_fsdp(
    section: FSDPConfig,
    model: PreTrainedModel,
    *,
    mesh: DeviceMesh,
    experts: DeviceMesh | None = None,
    units: Sequence[Unit] | None = None,
) -> None:
    """Shard ``model`` over ``mesh``, in place.

    Args:
        experts: `Mesh.expert_shard`, for the units of partitioned experts.
        units: what `plan_units` returned, if it was called already.
    """
    units = plan_units(section, model, ranks=mesh.size(-1)) if units is None else units
    ignored = ignored_modules(section, model)
    whole = {p for name in ignored for p in model.get_submodule(name).parameters(recurse=False)}
    computes = {unit.name: unit.param_dtype for unit in units if not unit.kept}
    stays = set(stays_in_float32(section, model, section.param_dtype))
    is_frozen = weights_of(model).adapter is not None or not any(p.requires_grad for p in model.parameters())
    for name, parameter in model.named_parameters():
        # Shards keep the dtype of the parameter, and ignored parameters are never cast later.
        if not parameter.is_floating_point():  # in 4 bits, two in a byte
            continue
        dtype = section.param_dtype if parameter in whole else section.storage_dtype
        if name in stays:
            dtype = "float32"
        elif is_frozen and not parameter.requires_grad and parameter not in whole:
            # Neither an optimizer nor a checkpoint needs it in storage_dtype: it is cast once, not in every gather.
            dtype = computes[_unit_of(name, computes)]
        parameter.data = parameter.data.to(getattr(torch, dtype))
    # On a CPU mesh shards are on the host already, and torch refuses to offload them.
    on_host = section.offload == "params" and mesh.device_type != "cpu"
    offload = CPUOffloadPolicy() if on_host else OffloadPolicy()
    kept = {name: unit.name for unit in units for name in unit.kept}
    names = _names_by_unit(model, [unit.name for unit in units], ignored=ignored, kept=kept)
    buffer: Any = SharedBuffer()
    # Outer units first, not bottom-up as torch documents. torch's `_get_managed_modules` skips modules that are units
    # already, but the unit of what stays in float32 has parameters of modules inside inner units. Parameters of other
    # units, sharded or not, are ignored, so `_get_managed_states` leaves them out of a unit.
    for unit in units:
        module = model.get_submodule(unit.name)
        own = {model.get_parameter(name) for name in names[unit.name]}
        over = experts if unit.experts and experts is not None else mesh
        sides = own if unit.experts else {model.get_parameter(name) for name in unit.by_side}
        fully_shard(
            module,
            mesh=over,
            shard_placement_fn=partial(_side_of_expert, of=sides, ranks=over.size(-1)) if sides else None,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=_precision(section, unit),
            offload_policy=offload,
            ignored_params=set(module.parameters()) - own,
        )
        if over.size() > 1:
            _sum_gradients(module, mesh=over)
        if isinstance(module, FSDPModule) and over.size(-1) == 1 and not on_host:
            module.set_custom_reduce_scatter(buffer)  # `on_host`, the backward would wait for copies to the host
        if isinstance(module, FSDPModule) and isinstance(base_module(module), nn.Embedding):
            module.set_unshard_in_backward(False)  # an embedding's gradient does not need its weight
    apply_prefetch(section, [model.get_submodule(unit.name) for unit in units])


def _sum_gradients(unit: Any, *, mesh: DeviceMesh) -> None:
    """Let a unit's gradients add up over its ranks; FSDP2 averages them by default.

    Each rank's loss is a part of the whole batch's, so the sum is the gradient, for any mesh and any objective. An
    average would depend on the unit's mesh, which is smaller for experts. The divide factor alone would select
    PREMUL_SUM, which gloo refuses and NCCL rounds to zero in bfloat16 up to torch 2.13 (pytorch#190747).
    """
    if mesh.size(-1) == 1:
        # Replicas that shard nothing: with a divide factor torch would hold each gradient once more.
        unit.set_all_reduce_hook(partial(_multiply, by=mesh.size()))
        return
    unit.set_force_sum_reduction_for_comms(True)
    unit.set_gradient_divide_factor(1.0)


def _multiply(gradient: torch.Tensor, *, by: int) -> None:
    gradient.mul_(by)


def _precision(section: FSDPConfig, unit: Unit) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(
        param_dtype=getattr(torch, unit.param_dtype),
        reduce_dtype=getattr(torch, section.reduce_dtype),
        output_dtype=getattr(torch, unit.output_dtype) if unit.output_dtype else None,
        cast_forward_inputs=not unit.kept,  # the module around them computes in param_dtype
    )


def _side_of_expert(parameter: nn.Parameter, *, of: Collection[nn.Parameter], ranks: int) -> Shard | None:
    """Over which dimension a parameter among ``of`` is sharded, whose first is that of experts; None: over rows."""
    if parameter not in of:
        return None
    dim = shard_dim(parameter.shape, ranks=ranks)
    assert dim is not None, "the plan refuses such experts"
    return Shard(dim)


def apply_prefetch(section: FSDPConfig, units: Sequence[nn.Module]) -> None:
    """Set how many units are gathered ahead of the one that runs; FSDP2 has no other limit.

    By default FSDP2 gathers none ahead in forward, where the host runs ahead of the device anyway, and one in
    backward, in reverse order of forward. An empty list of modules would not change that.
    """
    modules: list[FSDPModule] = [module for module in units if isinstance(module, FSDPModule)]
    ahead = section.forward_prefetch
    if ahead:
        for number, module in enumerate(modules):
            module.set_modules_to_forward_prefetch(modules[number + 1 : number + 1 + ahead])
    ahead = section.backward_prefetch
    if ahead != 1:
        # Backward begins with the root, and the units follow it last to first.
        for number, module in enumerate(modules):
            last = number if number else len(modules)
            following = modules[max(1, last - ahead) : last][::-1]
            # A unit that prefetches itself, which is gathered already, prefetches nothing.
            module.set_modules_to_backward_prefetch(following or [module])


def reshards_after_forward(section: FSDPConfig) -> bool | int:
    """Whether a unit's parameters are freed after forward, or to how many ranks they are resharded."""
    if section.reshard_after_forward is None:
        return section.strategy in ("full_shard", "hybrid_shard")
    return section.reshard_after_forward


def reshard_all(model: nn.Module) -> None:
    """Free every unit's unsharded parameters.

    After a forward without backward (evaluation), units that keep their parameters for backward stay unsharded,
    and an optimizer or a checkpoint would then see plain tensors. FSDP's own ``reshard`` is not recursive.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _of_classes(
    model: nn.Module, classes: Mapping[str, object] | list[str], uncalled: Collection[str], *, where: str
) -> Iterator[str]:
    """Names of the modules whose class is named."""
    known = {type(module).__name__ for module in model.modules()}
    for name in classes:
        if name not in known:
            raise UserError(where, f"the model has no module of class {name!r}", _suggest(name, known))
    for name, module in model.named_modules():
        if type(module).__name__ in classes:
            if not _can_gather(module):
                what = f"{type(module).__name__} has no forward to gather parameters for"
                raise UserError(where, what, "name the classes of the modules inside it")
            if name in uncalled:
                what = f"{name} ({type(module).__name__}) is never called: the module around it reads its parameters"
                raise UserError(where, what, "name the class of the module around it")
            yield name


def _by_size(model: nn.Module, min_params: int, uncalled: Collection[str]) -> Iterator[str]:
    """From the leaves up, the modules with at least ``min_params`` parameters that are in no unit inside them.

    Not a unit: a list or dict of modules, which has no forward to gather parameters for; a module that is never
    called; and one that shares a parameter with a module outside of it. The module around them has their parameters.
    """
    shared = set(find_ties(model)) | set(find_ties(model).values())

    def visit(name: str, module: nn.Module) -> Iterator[tuple[str, int]]:
        """Units inside ``module``, itself among them, each with its parameters."""
        inside = [unit for child, sub in module.named_children() for unit in visit(f"{name}.{child}", sub)]
        yield from inside
        left = sum(parameter.numel() for parameter in module.parameters()) - sum(count for _, count in inside)
        own = {key for key, _ in module.named_parameters(prefix=name, remove_duplicate=False)}
        can_gather = _can_gather(module) and name not in uncalled
        if left >= min_params and can_gather and (shared <= own or not shared & own):
            yield name, left

    for child, module in model.named_children():
        yield from (name for name, _ in visit(child, module))


def _frozen_outside(model: nn.Module, units: set[str], uncalled: Collection[str]) -> Iterator[str]:
    """The largest frozen modules that would be in the root's unit with trained ones, and are called.

    Frozen modules inside a layer stay in the layer's unit: FSDP2 shards parameter by parameter and reduces only
    gradients that exist, and several small units per layer would cost more messages than they save.
    """
    if all(parameter.requires_grad for parameter in model.parameters()):
        return

    tied = {name.rpartition(".")[0] for pair in find_ties(model).items() for name in pair}

    def visit(name: str, module: nn.Module) -> Iterator[str]:
        parameters = list(module.parameters())
        holds_units = any(unit == name or unit.startswith(f"{name}.") for unit in units if unit)
        frozen = parameters and not any(parameter.requires_grad for parameter in parameters)
        if name in units:
            return
        shares = any(owner == name or owner.startswith(f"{name}.") for owner in tied)
        if frozen and name not in uncalled and _can_gather(module) and not holds_units and not shares:
            yield name
            return
        for child, inner in module.named_children():
            yield from visit(f"{name}.{child}", inner)

    for child, module in model.named_children():
        yield from visit(child, module)


def _check_shared(model: nn.Module, units: set[str]) -> None:
    """Refuse a parameter in two units, which would fail in the first forward."""
    for alias, name in find_ties(model).items():
        if _unit_of(alias, units) != _unit_of(name, units):
            raise UserError(
                f"model {type(model).__name__}",
                f"{name} and {alias} are one parameter in two places that FSDP shards apart",
                'leave them out of fsdp.unit_classes and fsdp.class_dtypes, or use fsdp.unit = "root"',
            )


def _unit_of(parameter: str, units: Collection[str]) -> str:
    """The innermost unit that a parameter is in."""
    owner = parameter.rpartition(".")[0]
    while owner not in units:
        owner = owner.rpartition(".")[0]
    return owner


def _can_gather(module: nn.Module) -> bool:
    """Whether it has a forward for which its parameters can be gathered; a list of modules has none."""
    return type(module).forward is not nn.Module.forward


def _suggest(name: str, known: Mapping[str, object] | set[str]) -> str:
    return did_you_mean(name, known, otherwise=f"it has {', '.join(sorted(set(known))[:8])}, …")
