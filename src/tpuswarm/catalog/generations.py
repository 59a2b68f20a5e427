"""Generations of TPU: what one chip, and one of JAX's devices, holds and can do."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from tpuswarm.catalog.figures import Figure, data, figure
from tpuswarm.config.units import GIB


@dataclass(frozen=True)
class HostSize:
    """One TPU VM: vCPUs, memory in GB; None where no source says."""

    vcpus: int | None
    memory_gb: float | None
    figures: Mapping[str, Figure] = field(hash=False, repr=False)


@dataclass(frozen=True)
class Generation:
    """One generation. Bytes, B/s and FLOP/s; of a chip unless the name says otherwise. `figures` has the sources."""

    name: str
    name_counts: Literal["cores", "chips"]
    """What the number in a type's name counts: v3-8 has 8 cores, v5e-8 has 8 chips."""
    device_kinds: tuple[str, ...]
    """What `jax.Device.device_kind` says; the first is libtpu's."""
    cores_per_chip: int
    devices_per_chip: int
    """JAX devices: v4 and v5p join the two cores of a chip to one device (megacore)."""
    hbm_bytes: int
    compiler_hbm_bytes: int
    """What the compiler grants a program on one JAX device; it refuses what needs more."""
    peak_bf16: float
    bandwidth: float
    """Of the HBM."""
    matrix_unit: int
    """The side of the square that the matrix unit multiplies at once: 128, or 256 since v6e."""
    interconnect: str
    interconnect_bandwidth: float | None
    """Both directions, all links of a chip."""
    network_gbps: float | None
    """Data centre network, Gbit/s a chip."""
    pod_chips: int
    chip_config: str | None
    """`chip_config_name` that the compiler needs to see JAX's devices: megacore for v4 and v5p."""
    runtime: str | None
    """The TPU VM's image; None: machines of Compute Engine, with images of their own."""
    apis: tuple[str, ...]
    frameworks: tuple[str, ...]
    hosts: Mapping[int, HostSize] = field(hash=False, repr=False)
    """By chips a host."""
    figures: Mapping[str, Figure] = field(hash=False, repr=False)

    @property
    def device_kind(self) -> str:
        """What libtpu calls it."""
        return self.device_kinds[0]

    @property
    def hbm_bytes_per_device(self) -> int:
        """Nominal HBM of one JAX device."""
        return self.hbm_bytes // self.devices_per_chip

    @property
    def peak_bf16_per_device(self) -> float:
        """FLOP/s of one JAX device."""
        return self.peak_bf16 / self.devices_per_chip

    @property
    def bandwidth_per_device(self) -> float:
        """B/s of one JAX device."""
        return self.bandwidth / self.devices_per_chip


@cache
def generations() -> tuple[Generation, ...]:
    """All generations, oldest first."""
    return tuple(_generation(name, section) for name, section in data("generations").items())


def generation_of(device_kind: str) -> Generation | None:
    """The generation that JAX calls `device_kind`; None for anything else, a GPU or CPU too."""
    return next((each for each in generations() if device_kind in each.device_kinds), None)


def _generation(name: str, section: Mapping[str, Any]) -> Generation:
    own = section["source"]
    figures = {key: figure(entry, own) for key, entry in section.items() if key not in ("source", "hosts")}

    def value(key: str) -> Any:
        return figures[key].value if key in figures else None

    return Generation(
        name=name,
        name_counts=value("name_counts"),
        device_kinds=value("device_kinds"),
        cores_per_chip=value("cores_per_chip"),
        devices_per_chip=value("devices_per_chip"),
        hbm_bytes=int(value("hbm_gib") * GIB),
        compiler_hbm_bytes=int(value("compiler_hbm_gib_per_device") * GIB),
        peak_bf16=value("peak_bf16"),
        bandwidth=value("bandwidth"),
        matrix_unit=value("matrix_unit"),
        interconnect=value("interconnect"),
        interconnect_bandwidth=value("interconnect_bandwidth"),
        network_gbps=value("network_gbps"),
        pod_chips=value("pod_chips"),
        chip_config=value("chip_config"),
        runtime=value("runtime"),
        apis=value("apis"),
        frameworks=value("frameworks"),
        hosts={int(chips): _host(host, own) for chips, host in section["hosts"].items()},
        figures=figures,
    )


def _host(entry: Mapping[str, Any], default: str) -> HostSize:
    default = entry.get("source", default)
    figures = {key: figure(entry[key], default) for key in ("vcpus", "memory_gb") if key in entry}
    values = {key: each.value for key, each in figures.items()}
    return HostSize(values.get("vcpus"), values.get("memory_gb"), figures)
