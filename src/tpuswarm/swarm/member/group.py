"""The position of this machine among the hosts of a member."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports JAX, which the supervisor's process does without
    from tpuswarm.train.hosts.rendezvous import Hosts

VARIABLE = "TPUSWARM_GROUP"
"""Environment variable in which a machine that joined passes the group to its processes."""
FIRST_STEP_LINE = "the first step is made"
"""Line that another host than host 0 writes on stderr."""


@dataclass(frozen=True)
class Group:
    """The hosts of a member, as one host sees them."""

    at: str
    """HOST:PORT where host 0 listens."""
    count: int
    index: int
    token: str
    """File with the swarm's token, which also authenticates the hosts to each other."""

    @classmethod
    def from_environment(cls) -> "Group | None":
        """Return the group of this process; None for a member of one host."""
        value = os.environ.get(VARIABLE)
        return cls(**json.loads(value)) if value else None

    def environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    def check(self) -> None:
        """Raise InputError if the index is not below the count, or if host 0 cannot listen."""
        from tpuswarm.train.hosts.host_group import parse_host_0
        from tpuswarm.train.hosts.rendezvous import listen

        at = parse_host_0(self.at, self.count, self.index)
        if self.index == 0:
            listen(*at).close()  # a failure in the member's process would be invisible

    def gather(self, awaited: Callable[[], bool] = lambda: True) -> "Hosts":
        """Connect all hosts; raise as train/hosts/rendezvous.py says.

        Host 0 waits without limit, as a machine may take long to come back, while `awaited` returns True. The token is
        read at each connection: a new head sends another one, also to hosts that wait already.
        """
        from tpuswarm.train.hosts.rendezvous import JOIN_TIMEOUT_S, initialize

        def secret() -> bytes:
            return Path(self.token).read_text().strip().encode()

        return initialize(self.at, self.count, self.index, secret, JOIN_TIMEOUT_S if self.index else math.inf, awaited)
