"""A person's folder with a swarm.toml, and commands typed there on a model of a cloud."""

import shlex
import time
from pathlib import Path

from tests.fleet.cloud_model import Cloud

TRC = """\
name = "gpt2"
project = "my-project"

[[pool]]
name = "small"
type = "v2-8"
zones = ["us-central1-f", "us-central1-b"]
count = 100

[[pool]]
name = "five"
type = "v3-8"
zones = ["europe-west4-a"]
count = 5
how = "on-demand"

[[grant]]
type = "v2-8"
zone = "us-central1-f"
how = "spot"
count = 100
expires = 2099-01-31

[[grant]]
type = "v3-8"
zone = "europe-west4-a"
how = "on-demand"
count = 5
"""
SWARM = """\
name = "gpt2"
project = "my-project"
down_when = "idle 30m"

[head]
type = "n2-highmem-8"
zone = "us-central1-f"
disk_gib = 200

[[vm]]
name = "router"
type = "e2-standard-4"
zone = "us-central1-f"
role = "router"
ip_forward = true

[[pool]]
name = "small"
type = "v2-8"
zones = ["us-central1-f"]
count = 2

[[pool]]
name = "slice"
type = "v5e-16"
zones = ["us-west4-a"]
count = 1
how = "queued"
wait = "4h"
network = "tpu"
external_ips = false
labels = { owner = "me" }
metadata = { startup-script = "echo a, b" }

[[pool]]
name = "one"
type = "v3-8"
zones = ["europe-west4-a"]
count = 1
how = "on-demand"

[budget]
total = 500.0
"""


class Here:
    """A folder with swarm.toml, and a cloud that moves on whenever a command sleeps."""

    def __init__(self, typed, folder: Path):
        self.typed, self.folder = typed, folder
        self.cloud = Cloud(time.time())

    def run(self, line: str, code: int = 0) -> str:
        """What a command prints, on both channels."""
        found, out, err = self.typed(*shlex.split(line))
        assert found == code, f"exit {found}: {out}{err}"
        return out + err

    def ready(self) -> list[str]:
        return sorted(each.name for each in self.cloud.there.values() if each.state == "ready")
