"""Steps that make a machine the home of its fleet's keeper: tpuswarm as it runs here, and a unit of systemd."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpuswarm.remote.places import OURS
from tpuswarm.remote.setup.package import package
from tpuswarm.remote.setup.step import SEND, Step

FOLDER = f"{OURS}/keeper"
VENV, TREE = f"{FOLDER}/venv", f"{FOLDER}/tree.tar"


@dataclass(frozen=True)
class Home:
    """What a machine needs to be one."""

    machine: str
    """What the machine is called."""
    user: str
    fleet: str
    """The fleet's name."""
    state: str
    """The folder below the home with what its keeper knows of the fleet."""
    files: Mapping[str, str]
    """Of that folder: their texts by name. For the keeper alone."""
    tree: str | None
    """Digest of the folder that was synced last; None: none was."""
    wheel: str
    """File name of our wheel."""
    versions: str
    """Constraints."""

    @property
    def unit(self) -> str:
        """What systemd calls it."""
        return f"tpuswarm-keeper-{self.fleet}"

    @property
    def log(self) -> str:
        """What the keeper there says, from the home."""
        return f"{self.state}/keeper.log"


def keeper(home: Home) -> tuple[Step, ...]:
    """All of them. A machine that starts anew starts its keeper again, and so does systemd when that is killed."""
    python, install = package("keeper", FOLDER, home.wheel, home.versions, "[gcloud]")
    state = Step(
        "keeper-state",
        "true",
        f"[ -e {home.state}/fleet.json ]",
        {f"{home.state}/{name}": text for name, text in home.files.items()},
    )
    run = f"exec env TPUSWARM_KEEPER_ON={home.machine} {VENV}/bin/python -m tpuswarm keep {home.fleet}"
    unit = f"""\
[Unit]
Description=Keeper of the fleet {home.fleet}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0
[Service]
User={home.user}
ExecStart=/bin/bash -c 'cd && {run} >>{home.log} 2>&1'
Restart=always
RestartSec=5
[Install]
WantedBy=multi-user.target
"""
    service = Step(
        "keeper",
        f"""\
# {install.stamp}
sudo mkdir -p /etc/systemd/system
sudo tee /etc/systemd/system/{home.unit}.service <{FOLDER}/unit >/dev/null
sudo systemctl daemon-reload
sudo systemctl enable {home.unit}
sudo systemctl restart {home.unit}""",
        f"systemctl is-active --quiet {home.unit}",
        {f"{FOLDER}/unit": unit},
    )
    return python, install, state, *_tree(home), service


def _tree(home: Home) -> tuple[Step, ...]:
    if home.tree is None:
        return ()
    folder = f"{home.state}/tree"
    return (
        Step(
            "keeper-tree",
            f"""\
# {home.tree}
[ -e {TREE} ] || exit {SEND}
mkdir -p {folder} && tar -xf {TREE} -C {folder} && rm {TREE}""",
            f"[ -e {folder} ]",
        ),
    )
