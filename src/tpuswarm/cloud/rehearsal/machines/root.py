"""A machine's folder, its TCP ports, and the environment of its processes."""

import json
import re
import shutil
import socket
import sys
from contextlib import suppress
from pathlib import Path

from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost
from tpuswarm.cloud.rehearsal.connect import FOLDER_VARIABLE, CloudFolder
from tpuswarm.cloud.rehearsal.machines.processes import MACHINE_VARIABLE

SSH_PORT, METADATA_PORT = 2222, 2223
ROOT_VARIABLE = "TPUSWARM_ROOT"
"""Has the folder that stands for `/`."""
PYTHON_VARIABLE = "TPUSWARM_PYTHON"
"""Has the interpreter of environments that set-up makes."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TCMALLOC = "usr/lib/x86_64-linux-gnu/libtcmalloc.so.4"
FAST_COMPILATION = "--xla_backend_optimization_level=0"
"""A program compiles in 0.6 of the time; a step takes 1.3 times as long."""
PYTHON_FOLDER = Path(__file__).parent / "python"
"""On the path of a machine's Python programs."""
UNITS = "run/units"
"""Has a file for each running service."""
CHATTY_SHELL = "etc/chatty-shell"
SKELETON = {
    ".bashrc": f"""\
[ ! -e "${ROOT_VARIABLE}/{CHATTY_SHELL}" ] || echo "Welcome to $HOSTNAME"
# As on Debian, the rest is for shells with a terminal.
case $- in *i*) ;; *) return ;; esac
""",
    ".profile": '[ -z "$BASH_VERSION" ] || [ ! -e ~/.bashrc ] || . ~/.bashrc\n',
}
"""The files of a new home."""
FIRST_PORT, PORTS_PER_MACHINE, PORT_RANGES = 24_000, 100, 87
"""Above the ports of a fleet's router and below Linux's ephemeral ports, which begin at 32768."""


def reserve_ports() -> tuple[int, socket.socket] | None:
    """Reserve a range of ports, because Ray listens on all addresses of this computer; return its first port.

    The socket holds the range among all local clouds until it is closed. None: all ranges are taken.
    """
    for number in range(PORT_RANGES):
        first = FIRST_PORT + number * PORTS_PER_MACHINE
        listener = socket.socket()
        try:
            listener.bind(("127.0.0.1", first))
            listener.listen()
        except OSError:
            listener.close()
            continue
        return first, listener
    return None


def metrics_port(first: int) -> int:
    return first + 1


class Root:
    """The folder that stands for a machine's `/`."""

    def __init__(self, folder: CloudFolder, host: RehearsedHost):
        self._folder = folder
        self._host = host
        self.path = folder.machines / host.id
        self._boot_number = self.path / "run" / "boot"
        self._ports = self.path / "run" / "ports"
        self.host_key = self.path / "etc" / "ssh" / "ssh_host_ed25519_key"
        self.log = self.path / "var" / "log" / "startup-script.log"
        self.lock = self.path / "tmp" / "libtpu_lockfile"
        self.faulty_metadata = self.path / "run" / "told.json"
        self.profile = self.path / "etc" / "environment"

    @property
    def devices(self) -> list[Path]:
        """The files of all chips, including missing ones."""
        folder, name = (self.path / "dev" / "vfio", "") if self._host.vfio else (self.path / "dev", "accel")
        return [folder / f"{name}{chip}" for chip in range(self._host.chips)]

    @property
    def has_booted(self) -> bool:
        """Whether the cloud's newest boot has happened here."""
        return self._boot_number.exists() and self._boot_number.read_text() == str(self._host.boot)

    def boot(self) -> None:
        """Make the files of a fresh boot; /tmp, /run and /dev lose theirs."""
        for name in ("tmp", "run", "dev"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in ("tmp", "run", UNITS, "dev", "etc/ssh", "var/log", "home", "root"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        for device in self.devices:
            device.parent.mkdir(exist_ok=True)
            device.touch()
        if self._host.chips:
            self.make_preloaded_library()
            if not self.profile.exists():
                self.profile.write_text(f'PATH="{PATH}"\nLD_PRELOAD=/{TCMALLOC}\n')
            (self.path / UNITS / "tpu-runtime").touch()
        self._boot_number.write_text(str(self._host.boot))

    def make_preloaded_library(self) -> None:
        """Make the library of /etc/environment: one that this program has loaded, so that it breaks none."""
        library = self.path / TCMALLOC
        library.parent.mkdir(parents=True, exist_ok=True)
        library.unlink(missing_ok=True)
        loaded = re.search(r"/\S*/libc[.-]\S+$", Path("/proc/self/maps").read_text(), re.MULTILINE)
        library.symlink_to(loaded[0]) if loaded else library.touch()

    def shut_down(self) -> None:
        """Make the machine boot when the cloud runs again."""
        self._boot_number.unlink(missing_ok=True)

    def read_faulty_metadata(self) -> dict[str, str]:
        """Return the metadata that a fault has planted, by name."""
        try:
            values: dict[str, str] = json.loads(self.faulty_metadata.read_text())
        except OSError:
            return {}
        return values

    def write_ports(self, first: int | None) -> None:
        """Note the first of the machine's ports; None: it has none."""
        self._ports.unlink(missing_ok=True)
        if first is not None:
            self._ports.write_text(str(first))

    def home(self, user: str) -> Path:
        if not re.fullmatch(r"[a-zA-Z0-9_][-.\w]*", user):
            raise ValueError(f"{user!r} is no user's name")
        home = self.path / "root" if user == "root" else self.path / "home" / user
        home.mkdir(parents=True, exist_ok=True)
        for name, text in SKELETON.items():
            with suppress(FileExistsError), (home / name).open("x") as file:
                file.write(text)
        return home

    def environment(self, user: str, storage: str) -> dict[str, str]:
        """Return the environment of a user's processes. `storage`: the URL of the cloud's buckets."""
        host = self._host
        metadata = f"{host.internal}:{METADATA_PORT}"
        environment = {
            "PATH": f"{self._folder.stand_ins}:{PATH}",
            "HOME": str(self.home(user)),
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TMPDIR": str(self.path / "tmp"),
            "TMUX_TMPDIR": str(self.path / "tmp"),
            MACHINE_VARIABLE: host.id,
            ROOT_VARIABLE: str(self.path),
            PYTHON_VARIABLE: sys.executable,
            FOLDER_VARIABLE: str(self._folder.path),
            "GCE_METADATA_HOST": metadata,
            "GCE_METADATA_IP": metadata,
            "STORAGE_EMULATOR_HOST": storage,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(PYTHON_FOLDER),
        }
        if self.profile.exists():  # like PAM, but without the preloaded library
            environment |= dict(re.findall(r"^(TPU_\w+)=(.*)$", self.profile.read_text(), re.MULTILINE))
        if self._ports.exists():
            first = int(self._ports.read_text())
            half = first + PORTS_PER_MACHINE // 2
            environment |= {
                "TPU_RUNTIME_METRICS_PORTS": str(metrics_port(first)),
                "TPUSWARM_HEAD_PORTS": f"{metrics_port(first) + 1}-{half - 1}",
                "TPUSWARM_MEMBER_PORTS": f"{half}-{first + PORTS_PER_MACHINE - 1}",
                "TPUSWARM_LISTEN": f"{host.external or host.internal}:8443",  # not the port of every machine
            }
        if host.devices:
            environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={host.devices} {FAST_COMPILATION}"
        return environment
