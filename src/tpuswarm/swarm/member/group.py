"""Which host of a member of several hosts this machine is."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports JAX, which the machine's own process does without
    from tpuswarm.train.hosts.rendezvous import Hosts

VARIABLE = "TPUSWARM_GROUP"
"""The environment variable by which a machine that joined tells its processes."""
STEPPED = "the first step is made"
"""The line by which the process of another host than host 0 says so."""


@dataclass(frozen=True)
class Group:
    """The hosts of a member, as one of them sees them."""

    at: str
    """HOST:PORT where host 0 listens."""
    count: int
    index: int
    token: str
    """The file with the swarm's token, which is the hosts' secret as well."""

    @classmethod
    def here(cls) -> "Group | None":
        """That of this process; None for a member of one host."""
        told = os.environ.get(VARIABLE)
        return cls(**json.loads(told)) if told else None

    def environment(self) -> dict[str, str]:
        """What tells a process of it."""
        return {VARIABLE: json.dumps(asdict(self))}

    def check(self) -> None:
        """Raise InputError for a host that is not of so many, and where host 0 cannot listen."""
        from tpuswarm.train.hosts.rendezvous import listen
        from tpuswarm.train.hosts.several import host_0

        at = host_0(self.at, self.count, self.index)
        if self.index == 0:
            listen(*at).close()  # its member's process would fail where nobody sees it

    def gather(self, awaited: Callable[[], bool] = lambda: True) -> "Hosts":
        """All hosts, once they have come; raises as train/hosts/rendezvous.py says.

        Host 0 waits as long as it takes, for a machine may take long to come back, while the others are `awaited`.
        """
        from tpuswarm.train.hosts.rendezvous import PATIENCE, initialize

        secret = Path(self.token).read_text().strip().encode()
        return initialize(self.at, self.count, self.index, secret, PATIENCE if self.index else math.inf, awaited)
