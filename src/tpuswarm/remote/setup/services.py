"""Steps that install tpuswarm as a service: the fleet's keeper on the head, or the rules of a router."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpuswarm.remote.paths import STATE_FOLDER
from tpuswarm.remote.setup.python import own_package
from tpuswarm.remote.setup.step import NEEDS_FILE, Step
from tpuswarm.remote.setup.system import APT

KEEPER_FOLDER, ROUTER_FOLDER = f"{STATE_FOLDER}/keeper", f"{STATE_FOLDER}/router"
TREE = f"{KEEPER_FOLDER}/tree.tar"
ROUTER_FILE = f"{ROUTER_FOLDER}/door.toml"


@dataclass(frozen=True)
class KeeperOptions:
    """The machine, fleet and files of a keeper."""

    machine: str
    user: str
    fleet: str
    state: str
    """The fleet's state folder, relative to the home."""
    files: Mapping[str, str]
    """Texts by name in the state folder, for the user only."""
    tree: str | None
    """Digest of the last synced folder, if any."""
    wheel: str
    """File name of our wheel."""
    constraints: str


def keeper(options: KeeperOptions) -> tuple[Step, ...]:
    """Return the steps of a keeper that systemd restarts after a crash or a reboot."""
    install = own_package("keeper", KEEPER_FOLDER, options.wheel, options.constraints, "[gcloud]")
    state, name = options.state, f"tpuswarm-keeper-{options.fleet}"
    files = {f"{state}/{file}": text for file, text in options.files.items()}
    program = f"{KEEPER_FOLDER}/venv/bin/python -m tpuswarm keep {options.fleet}"
    unit = f"""\
[Unit]
Description=Keeper of the fleet {options.fleet}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0
[Service]
User={options.user}
ExecStart=/bin/bash -c 'cd && exec env TPUSWARM_KEEPER_ON={options.machine} {program} >>{state}/keeper.log 2>&1'
Restart=always
RestartSec=5
[Install]
WantedBy=multi-user.target
"""
    service = Step(
        "keeper",
        f"""\
# {install[1].stamp}
sudo mkdir -p /etc/systemd/system
sudo tee /etc/systemd/system/{name}.service <{KEEPER_FOLDER}/unit >/dev/null
sudo systemctl daemon-reload
sudo systemctl enable {name}
sudo systemctl restart {name}""",
        f"systemctl is-active --quiet {name}",
        {f"{KEEPER_FOLDER}/unit": unit},
    )
    tree = Step(
        "keeper-tree",
        f"""\
# {options.tree}
[ -e {TREE} ] || exit {NEEDS_FILE}
mkdir -p {state}/tree && tar -xf {TREE} -C {state}/tree && rm {TREE}""",
        f"[ -e {state}/tree ]",
    )
    return (
        *install,
        Step("keeper-state", "true", f"[ -e {state}/fleet.json ]", files),
        *([tree] if options.tree else []),
        service,
    )


def router(file: str, wheel: str, constraints: str) -> tuple[Step, ...]:
    """Return the steps of a router. `file`: its text for `tpuswarm router`; the rest: see `own_package`."""
    return (
        *own_package("router", ROUTER_FOLDER, wheel, constraints),
        Step("router-nftables", f"{APT}apt_install nftables", "[ -e /usr/sbin/nft ]"),
        Step(
            "router",
            f"sudo ~/{ROUTER_FOLDER}/venv/bin/python -m tpuswarm router apply ~/{ROUTER_FILE} --tune --persist",
            files={ROUTER_FILE: file},
        ),
    )
