"""Names that torch keeps private or has moved, each with the reason why we need it. No other file imports them.

The whole test suite ran on torch 2.11.0 (`make test-oldest`) and 2.13.0; 2.12.0 was only read.
"""

from __future__ import annotations

import importlib.util
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Tensors with shapes and lifetimes but no memory, on which the planner runs a step.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed.checkpoint.filesystem import _StorageInfo

# An operator takes only plain values, so a process group is passed by name, as torch's functional collectives do.
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

# `DTensor.from_local` moves what lies on the host to the mesh's device. FSDP2 makes its offloaded shards with this.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

# No public function says which part of the global tensor a DTensor holds; DCP uses this one.
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

# Muon's iteration; publicly it is only inside torch's optimizer, which needs whole parameters.
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _zeropower_via_newtonschulz

# To observe operators and their tensors; torch documents both, under private names.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves

# Checkpoints at any fsspec URL. Before torch 2.15 these had only a private name, at which 2.15 warns.
if TYPE_CHECKING or importlib.util.find_spec("torch.distributed.checkpoint.fsspec_filesystem") is None:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader as FsspecReader
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter as FsspecWriter
else:
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecReader as FsspecReader
    from torch.distributed.checkpoint.fsspec_filesystem import FsspecWriter as FsspecWriter

# torch 2.11 and 2.12 close a stager's copier after its first copy; a second copy raises KeyError.
STAGER_WORKS_ONCE = torch.__version__ < "2.13"

# FSDP2 of torch 2.11 needs gradients of every shard, and casts every parameter to `param_dtype`.
SHARDS_INTEGERS = torch.__version__ >= "2.12"


# What a checkpoint's metadata says of where a part of a tensor lies. Rank 0 makes it from numbers that it is sent.
StorageInfo = _StorageInfo


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """The part of the global tensor that this rank's shard of ``tensor`` holds, one slice a dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def sharded_where_it_lies(local: Tensor, like: DTensor, shape: torch.Size) -> DTensor:
    """``local``, the same memory on its device, as this rank's shard of a tensor that is sharded as ``like``."""
    stride = torch.empty(shape, device="meta").stride()
    spec = DTensorSpec(like.device_mesh, like.placements, tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)


def accumulated_gradients(unit: Any) -> list[Tensor]:
    """The unsharded gradients that an FSDP unit keeps between micro-batches; no public name shows them."""
    parameters = [parameter for group in parameter_groups(unit) for parameter in group.fsdp_params]
    found = [parameter.unsharded_accumulated_grad for parameter in parameters]
    # Where nothing is cast, autograd accumulates on the unsharded parameter itself, once that exists.
    found += [getattr(getattr(parameter, "_unsharded_param", None), "grad", None) for parameter in parameters]
    return [gradient for gradient in found if gradient is not None]


def accumulated_shards(unit: Any) -> list[tuple[nn.Parameter, Tensor]]:
    """A unit's shards and their reduced gradients between micro-batches; no public name shows them in a forward."""
    shards = [parameter.sharded_param for group in parameter_groups(unit) for parameter in group.fsdp_params]
    return [(shard, shard.grad) for shard in shards if shard.grad is not None]


def accumulated_partial_sums(unit: Any) -> list[Tensor]:
    """Gradients that a unit has reduced over its shards but not over replicas yet; no public name shows them."""
    # Every run's first step calls this. If another torch has no such name, it finds nothing and the run goes on.
    found = [getattr(group, "_partial_reduce_output", None) for group in parameter_groups(unit)]
    return [gradient for gradient in found if gradient is not None]


def inner_tensors(tensor: Any) -> list[Tensor]:
    """The plain tensors that a tensor subclass (sharded, quantised, both) is made of; a plain tensor is its own."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    values = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # a DTensor's mesh may be one
    return [part for value in values if isinstance(value, Tensor) for part in inner_tensors(value)]


def forget_forwards(model: nn.Module) -> None:
    """Drop what FSDP records in a forward for the prefetches of its backward; call it if there is no backward.

    FSDP drops these records only at the end of a backward, so without one they would pile up.
    """
    for unit in (module for module in model.modules() if isinstance(module, FSDPModule)):
        for group in parameter_groups(unit):
            group.comm_ctx.post_forward_order.clear()
            group._post_forward_indices.clear()


def parameter_groups(unit: Any) -> list[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    # Before torch 2.13 a unit had one group.
    return [group for group in [state._fsdp_param_group] if group] if groups is None else groups


def record_memory_history(events: int) -> None:
    """Record this many allocations and frees on CUDA from here on; torch's documentation tells users to call this."""
    torch.cuda.memory._record_memory_history(max_entries=events)


def dump_memory_snapshot(path: str) -> None:
    """Write what is allocated on CUDA, and what was recorded, for https://docs.pytorch.org/memory_viz."""
    torch.cuda.memory._dump_snapshot(path)


def dump_memory_history(path: str) -> None:
    """`dump_memory_snapshot`, and record no more, also where it cannot be written."""
    try:
        dump_memory_snapshot(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def compile_seconds() -> float:
    """Seconds that this process has spent in torch.compile, forward and backward; no public name tells them.

    Loading code from torch's caches counts too.
    """
    utilities = sys.modules.get("torch._dynamo.utils")  # not imported if nothing was compiled
    return float(utilities.calculate_time_spent().get("total_wall_time", 0.0)) if utilities else 0.0


def compiled_graphs() -> int:
    """How many graphs torch.compile has made in this process; no public name tells them."""
    utilities = sys.modules.get("torch._dynamo.utils")
    return int(utilities.counters["stats"]["unique_graphs"]) if utilities else 0


def orthogonalize(matrix: Tensor) -> Tensor:
    """``U Vᵀ`` of ``matrix = U S Vᵀ``, nearly, in bfloat16: torch's Newton-Schulz iteration, with its defaults."""
    return _zeropower_via_newtonschulz(matrix, (DEFAULT_A, DEFAULT_B, DEFAULT_C), DEFAULT_NS_STEPS, EPS)


def orthogonalize_each(matrices: Tensor) -> Tensor:
    """`orthogonalize` of each of ``matrices`` ``[E, m, n]``, in batched products; torch's takes one matrix."""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = (matrices.mT if is_tall else matrices).bfloat16()
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(DEFAULT_NS_STEPS):
        gram = x @ x.mT
        update = torch.baddbmm(gram, gram, gram, beta=DEFAULT_B, alpha=DEFAULT_C)
        x = torch.baddbmm(x, update, x, beta=DEFAULT_A)
    return x.mT if is_tall else x


# `a.copy_(b)` for each of two lists; on CUDA in a few kernels for all, for which there is no public name.
copy_each = torch._foreach_copy_


def float32_norms(tensors: list[Tensor]) -> list[Tensor]:
    """The L2 norm of each, float32; on CUDA in a few kernels for all. torch's public function takes no dtype."""
    return list(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def has_float32_products(tensor: Tensor) -> bool:
    """Whether `float32_product` and `add_float32_product` take this tensor: 16 bits on CUDA.

    torch has these operators from 2.11 on (`mm.dtype`, `addmm.dtype_out`), for NVIDIA's devices alone.
    """
    return tensor.is_cuda and torch.version.hip is None and tensor.dtype in (torch.bfloat16, torch.float16)


def float32_product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of 16-bit matrices, float32: the sums are never rounded to 16 bits."""
    return torch.mm(left, right, out_dtype=torch.float32)


def add_float32_product(total: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add ``left @ right`` of 16-bit matrices to ``total``, float32, in place and without another tensor."""
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def vary_in_rows(*tensors: Tensor) -> None:
    """Have torch.compile make one graph for any number of rows, two at least; no public name tells it.

    Call it with the tensors before each call of what is compiled.
    """
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)


def eager_rounding() -> dict[str, Any]:
    """Options of torch.compile with which elementwise float32 operations round as they do one by one.

    Without them Triton's kernels may fuse a product and a sum into one operation, and quotients are approximate. The
    second option came after torch 2.11. torch.compile's docstring names the list of its options.
    """
    options = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True}
    known = set(torch._inductor.list_options())
    return {name: value for name, value in options.items() if name in known}


# torch 2.13 gave these two new names and warns at the old ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def timeout_of(group: dist.ProcessGroup | None = None) -> timedelta:
    """The time-out of a group's collectives (default: all ranks). No public name tells it; new groups forget it."""
    group = group or dist.group.WORLD
    assert group is not None, "the process group has been started"
    options = group._get_backend(torch.device("cpu")).options
    return options._timeout if options is not None else timedelta(minutes=30)  # torch's fake group has none


def nccl_error() -> str | None:
    """What NCCL's watchdog has found in a group of this process: ``"COMM_ERROR"``, ``"TIMEOUT"``; None: no fault.

    No collective raises then: the main thread may wait for the device for ever, until torch ends the process a minute
    later. torch has no public list of groups.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        try:
            error = group._get_backend(torch.device("cuda")).get_error()
        except RuntimeError:  # a group of gloo alone
            continue
        if error.name != "SUCCESS":
            return error.name
    return None


def group_named(name: str) -> dist.ProcessGroup:
    """The process group with that ``group_name``."""
    return _resolve_process_group(cast(Any, name))  # some versions give names a type of their own


# Ring attention merges blocks' results by their log-sum-exp, and gives the merged one to each block's backward.
# torch's public functions may return a log-sum-exp but take none. The operators beneath them do both.


class BackwardInputs(NamedTuple):
    """Inputs of attention's backward over a block of keys, with the shapes of the forward kernel."""

    grad_out: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    """Over all keys, not just this block's."""
    lse: Tensor
    """Log-sum-exp of the scores of all keys, float32."""


class VarlenBounds(NamedTuple):
    """Sequences of different lengths, one after another in a tensor, and the keys that their queries see."""

    q_borders: Tensor
    """``[sequences + 1]`` int32: where each sequence's queries begin, and the end of the last."""
    k_borders: Tensor
    q_longest: int
    k_longest: int
    left: int
    """Query i of n sees key j of m from i + m − n − left on; −1: no bound."""
    right: int
    """… to i + m − n + right; −1: no bound."""


def cpu_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[B, H, n, D]`` and log-sum-exp ``[B, H, n]`` (float32) on the CPU; keys may have fewer heads.

    Args:
        causal: query i sees keys 0 … i.
        mask: ``[n, m]`` added to the scores, in the query's dtype.
    """
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=mask, scale=scale
    )


def cpu_flash_attention_backward(
    inputs: BackwardInputs, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *inputs, 0.0, causal, attn_mask=mask, scale=scale
    )


def cuda_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, bounds: VarlenBounds, *, scale: float
) -> tuple[Tensor, Tensor]:
    """Output ``[n, H, D]`` and log-sum-exp ``[n, H]`` (float32) over variable-length sequences on CUDA.

    Args:
        query: ``[n, H, D]``, 16-bit; key, value: ``[m, G, D]``.
    """
    *sequences, left, right = bounds
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, *sequences, 0.0, (left, right) == (-1, 0), False,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse.transpose(0, 1)


def cuda_flash_attention_backward(
    inputs: BackwardInputs, bounds: VarlenBounds, *, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value."""
    *tensors, lse = inputs
    *sequences, left, right = bounds
    no_dropout: Any = torch.zeros(2, dtype=torch.uint64, device=lse.device)
    unused = inputs.query.new_empty(0)
    return torch.ops.aten._flash_attention_backward(
        *tensors, lse.transpose(0, 1).contiguous(), *sequences, 0.0, (left, right) == (-1, 0), no_dropout, unused,
        scale=scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
