"""Which host of a member of several hosts this machine is."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports JAX, which the machine's own process does without
    from tpuswarm.train.hosts import Hosts

LEFT, LOST, WRONG, ABSENT = 0, 1, 2, 3
"""How a host's process ends: by host 0's farewell, without another host, by wrong input, and where hosts did not come.
"""
VARIABLE = "TPUSWARM_GROUP"
"""The environment variable by which a machine that joined tells its processes."""


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
        from tpuswarm.train.hosts import host_0, listen

        at = host_0(self.at, self.count, self.index)
        if self.index == 0:
            listen(*at).close()  # its member's process would fail where nobody sees it

    def gather(self, seconds: float | None = None) -> "Hosts":
        """All hosts, once they have come, within `seconds` or what is usual; raises as train/hosts.py says."""
        from tpuswarm.train.hosts import PATIENCE, initialize

        secret = Path(self.token).read_text().strip().encode()
        return initialize(self.at, self.count, self.index, secret, PATIENCE if seconds is None else seconds)
