"""Look up facts about TPUs and GPUs: TOML files with a source and a date for each figure."""

from tpuswarm.catalog import network
from tpuswarm.catalog.accelerators import (
    APIS,
    Accelerator,
    Api,
    Compiler,
    Gke,
    accelerator_of_machine,
    accelerators,
    find,
    usual_slice,
)
from tpuswarm.catalog.figures import Figure, Source
from tpuswarm.catalog.generations import Generation, HostSize, generation_of, generations
from tpuswarm.catalog.gpus import Gpu, Hardware, find_hardware, gpus, memory_bandwidth, peak_flops
from tpuswarm.catalog.machines import Machine, machines
from tpuswarm.catalog.models import PublicModel, public_models
from tpuswarm.catalog.preemptions import SpotRecord, spot_records
from tpuswarm.catalog.prices import Price

__all__ = [
    "APIS",
    "Accelerator",
    "Api",
    "Compiler",
    "Figure",
    "Generation",
    "Gke",
    "Gpu",
    "Hardware",
    "HostSize",
    "Machine",
    "Price",
    "PublicModel",
    "Source",
    "SpotRecord",
    "accelerator_of_machine",
    "accelerators",
    "find",
    "find_hardware",
    "generation_of",
    "generations",
    "gpus",
    "machines",
    "memory_bandwidth",
    "network",
    "peak_flops",
    "public_models",
    "spot_records",
    "usual_slice",
]
