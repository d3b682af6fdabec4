"""The devices that the planner knows: memory, and speed of memory and links. Peaks are those that MFU uses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fsdp2kit.errors import UserError, did_you_mean
from fsdp2kit.model.flops import peak_flops_of

GIB = 2**30
ALLOWANCE = 3 * GIB
"""Bytes for the CUDA context, buffers of NCCL and cuBLAS, compiled code, and fragmentation."""


@dataclass(frozen=True)
class Device:
    """One accelerator, as its vendor describes it."""

    name: str
    memory: int
    """Bytes that torch sees: a little less than the name says, since the driver keeps some."""
    peak_flops: float | None
    """Dense bf16 FLOP/s; None: not known, and then no time is estimated."""
    memory_bandwidth: float
    """Bytes a second."""
    node_bandwidth: float
    """Bytes a second that a device sends to others of its node, in one direction."""
    network_bandwidth: float
    """Bytes a second that a device sends to other nodes. Each device has an adapter of its own, as in a DGX."""
    host_bandwidth: float
    """Bytes a second between a device and its host's memory, in one direction."""


def _device(
    name: str, *, memory_gib: float, tb_s: float, node_gb_s: float, network_gbit_s: float, pcie_gb_s: float = 64
) -> Device:
    peak = peak_flops_of(name)
    network = network_gbit_s / 8 * 1e9
    return Device(name, int(memory_gib * GIB), peak, tb_s * 1e12, node_gb_s * 1e9, network, pcie_gb_s * 1e9)


# Memory as `torch.cuda.get_device_properties` reports it; bandwidths from NVIDIA's and AMD's data sheets. NVLink is
# given there for both directions together: half of it is what one device sends. PCIe × 16 sends 32 GB/s (4.0) or 64.
DEVICES = {
    "a100": _device("A100", memory_gib=79.2, tb_s=2.039, node_gb_s=300, network_gbit_s=200, pcie_gb_s=32),
    "a100-40gb": _device("A100", memory_gib=39.4, tb_s=1.555, node_gb_s=300, network_gbit_s=200, pcie_gb_s=32),
    "h100": _device("H100", memory_gib=79.1, tb_s=3.35, node_gb_s=450, network_gbit_s=400),
    "h200": _device("H200", memory_gib=139.8, tb_s=4.8, node_gb_s=450, network_gbit_s=400),
    "h20": _device("H20", memory_gib=95.2, tb_s=4.0, node_gb_s=450, network_gbit_s=400),
    "b200": _device("B200", memory_gib=178.4, tb_s=8.0, node_gb_s=900, network_gbit_s=400),
    "l40s": _device("L40S", memory_gib=44.4, tb_s=0.864, node_gb_s=32, network_gbit_s=200, pcie_gb_s=32),
    "a10g": _device("A10G", memory_gib=22.0, tb_s=0.6, node_gb_s=32, network_gbit_s=100, pcie_gb_s=32),
    "l4": _device("L4", memory_gib=22.0, tb_s=0.3, node_gb_s=32, network_gbit_s=100, pcie_gb_s=32),
    "rtx4090": _device("RTX 4090", memory_gib=23.6, tb_s=1.008, node_gb_s=32, network_gbit_s=100, pcie_gb_s=32),
    "mi300x": _device("MI300X", memory_gib=191.5, tb_s=5.3, node_gb_s=448, network_gbit_s=400),
}


def find_device(
    name: str | None, *, memory_gib: float | None = None, between_nodes: float | None = None
) -> Device | None:
    """The device of that name; None if neither a name nor a memory is given.

    Args:
        memory_gib: its memory, instead of that in the table.
        between_nodes: GB/s that it sends to other nodes, instead of those in the table.

    Raises:
        UserError: the table has no device of that name.
    """
    if name is None and memory_gib is None:
        return None
    key = ("h100" if name is None else name).lower().replace("_", "-").removesuffix("-80gb")
    if key not in DEVICES:
        todo = did_you_mean(key, DEVICES, otherwise=f"name one of {', '.join(DEVICES)}, or give --device-memory")
        raise UserError("--device", f"{name!r} is not a device that the planner knows", todo)
    device = DEVICES[key]
    if between_nodes is not None:
        device = replace(device, network_bandwidth=between_nodes * 1e9)
    if memory_gib is None:
        return device
    known = {"name": f"{memory_gib:g} GiB", "peak_flops": None} if name is None else {}
    return replace(device, memory=int(memory_gib * GIB), **known)


def this_device(device: torch.device) -> Device | None:
    """The CUDA device of this process; None for a CPU.

    Its memory is what torch reports; links are those of the kind in the table, or of an H100 if it is not there.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    memory = torch.cuda.get_device_properties(device).total_memory
    words = set(name.replace("-", " ").split())
    known = next((known for known in DEVICES.values() if words.issuperset(known.name.split())), DEVICES["h100"])
    return replace(known, name=name, memory=memory, peak_flops=peak_flops_of(name))
