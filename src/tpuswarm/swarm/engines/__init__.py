"""Engines that run the processes: `inproc` all under a virtual clock, `threads` one node, `ray` actors on machines."""

import os

from tpuswarm.swarm.engines.variables import ENVIRONMENT

os.environ |= ENVIRONMENT  # before any module here imports Ray, which reads these at once
