"""Look up generations of TPUs: memory and speed of a chip and of a JAX device."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from tpuswarm.catalog.figures import Figure, parse_figure, read_data
from tpuswarm.config.units import GIB


@dataclass(frozen=True)
class HostSize:
    """vCPUs and memory of one TPU VM; None: unknown."""

    vcpus: int | None
    memory_gb: float | None
    figures: Mapping[str, Figure] = field(hash=False, repr=False)


@dataclass(frozen=True)
class Generation:
    """One generation, in bytes, B/s and FLOP/s per chip unless the name says otherwise; `figures` has the sources."""

    name: str
    name_counts: Literal["cores", "chips"]
    """Meaning of the number in a type's name: v3-8 has 8 cores, v5e-8 has 8 chips."""
    device_kinds: tuple[str, ...]
    """Values of `jax.Device.device_kind`; libtpu uses the first."""
    cores_per_chip: int
    devices_per_chip: int
    """v4 and v5p join the two cores of a chip to one device (megacore)."""
    hbm_bytes: int
    compiler_hbm_bytes: int
    """Memory that the compiler grants a program on one JAX device."""
    peak_bf16: float
    bandwidth: float
    """HBM, B/s."""
    matrix_unit: int
    """Side of the matrix unit: 128, or 256 since v6e."""
    interconnect: str
    interconnect_bandwidth: float | None
    """All links of a chip in both directions."""
    network_gbps: float | None
    """Data centre network per chip."""
    pod_chips: int
    chip_config: str | None
    """`chip_config_name` for the compiler: megacore for v4 and v5p."""
    runtime: str | None
    """Runtime version of the TPU API; None: not offered there."""
    image: str | None
    """PROJECT/FAMILY of its image in Compute Engine; None: not offered there."""
    apis: tuple[str, ...]
    frameworks: tuple[str, ...]
    hosts: Mapping[int, HostSize] = field(hash=False, repr=False)
    """By chips per host."""
    figures: Mapping[str, Figure] = field(hash=False, repr=False)

    @property
    def device_kind(self) -> str:
        return self.device_kinds[0]

    @property
    def hbm_bytes_per_device(self) -> int:
        return self.hbm_bytes // self.devices_per_chip

    @property
    def peak_bf16_per_device(self) -> float:
        return self.peak_bf16 / self.devices_per_chip

    @property
    def bandwidth_per_device(self) -> float:
        return self.bandwidth / self.devices_per_chip


@cache
def generations() -> tuple[Generation, ...]:
    """Return all generations, oldest first."""
    return tuple(_parse_generation(name, section) for name, section in read_data("generations").items())


def generation_of(device_kind: str) -> Generation | None:
    """Return the generation that JAX calls `device_kind`; None if it is no TPU."""
    return next((known for known in generations() if device_kind in known.device_kinds), None)


def _parse_generation(name: str, section: Mapping[str, Any]) -> Generation:
    own = section["source"]
    figures = {key: parse_figure(entry, own) for key, entry in section.items() if key not in ("source", "hosts")}

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
        image=value("image"),
        apis=value("apis"),
        frameworks=value("frameworks"),
        hosts={int(chips): _parse_host(host, own) for chips, host in section["hosts"].items()},
        figures=figures,
    )


def _parse_host(entry: Mapping[str, Any], default: str) -> HostSize:
    default = entry.get("source", default)
    figures = {key: parse_figure(entry[key], default) for key in ("vcpus", "memory_gb") if key in entry}
    values = {key: figure.value for key, figure in figures.items()}
    return HostSize(values.get("vcpus"), values.get("memory_gb"), figures)
