"""Facts about TPUs as data (TOML with source and date), and typed look-ups on it."""

from tpuswarm.catalog import network
from tpuswarm.catalog.accelerators import Accelerator, Compiler, Gke, accelerators, find
from tpuswarm.catalog.figures import Figure, Source
from tpuswarm.catalog.generations import Generation, HostSize, generation_of, generations
from tpuswarm.catalog.gpus import Gpu, gpus, memory_bandwidth, peak_flops
from tpuswarm.catalog.machines import Machine, machines
from tpuswarm.catalog.preemptions import KeptSpot, kept_spot_tpus
from tpuswarm.catalog.prices import Price

__all__ = [
    "Accelerator",
    "Compiler",
    "Figure",
    "Generation",
    "Gke",
    "Gpu",
    "HostSize",
    "KeptSpot",
    "Machine",
    "Price",
    "Source",
    "accelerators",
    "find",
    "generation_of",
    "generations",
    "gpus",
    "kept_spot_tpus",
    "machines",
    "memory_bandwidth",
    "network",
    "peak_flops",
]
