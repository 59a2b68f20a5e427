"""Options of XLA that all tests share."""

from importlib.metadata import version

from packaging.version import Version

OLDER_COMPILER = "--xla_cpu_use_fusion_emitters=false" if Version(version("jaxlib")) < Version("0.12") else ""
"""The code generator for CPUs before jaxlib 0.12, which compiles twice as fast."""
