"""Steps that make a machine the router of its fleet: tpuswarm as it runs here, nftables, and the rules."""

from collections.abc import Iterable

from tpuswarm.remote.places import OURS
from tpuswarm.remote.setup.package import package
from tpuswarm.remote.setup.step import Step
from tpuswarm.remote.setup.system import APT

FOLDER = f"{OURS}/router"
DOOR = f"{FOLDER}/door.toml"
SYSCTL = "/etc/sysctl.d/60-tpuswarm.conf"


def router(door: str, wheel: str, versions: str) -> tuple[Step, ...]:
    """All of them; `door`: the text of the router's file, `wheel` and `versions` as `package` has them."""
    return (
        *package("router", FOLDER, wheel, versions),
        Step("router-nftables", f"{APT}apt update; apt install -y nftables", "[ -e /usr/sbin/nft ]"),
        Step(
            "router",
            f"sudo ~/{FOLDER}/venv/bin/python -m tpuswarm router apply ~/{DOOR} --tune --persist",
            files={DOOR: door},
        ),
    )


def client(settings: Iterable[tuple[str, str]]) -> Step:
    """Kernel settings (their names in /proc/sys and values) of a machine that is talked to through a router."""
    lines = "".join(f"{name} = {value}\n" for name, value in settings)
    return Step(
        "network",
        f"""\
sudo mkdir -p /etc/sysctl.d
sudo tee {SYSCTL} <{FOLDER}/sysctl >/dev/null
sudo sysctl --quiet -p {SYSCTL}""",
        f"sudo test -e {SYSCTL}",
        {f"{FOLDER}/sysctl": lines},
    )
