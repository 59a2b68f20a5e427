"""Run the local cloud's server with real machines: `python -m tests.real.server FOLDER`."""

import sys

from tests.real.machines import NETWORK, RealMachines
from tpuswarm.cloud.rehearsal.server import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1], RealMachines, NETWORK))
