"""`python -m tpuswarm` is the command `tpuswarm`."""

from tpuswarm.cli import main

main()
