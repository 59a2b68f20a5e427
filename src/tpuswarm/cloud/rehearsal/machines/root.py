"""A machine's folder: what is where, and the environment of what runs there."""

import json
import re
import shutil
import sys
from pathlib import Path

from tpuswarm.cloud.rehearsal.common.hosts import RehearsedHost
from tpuswarm.cloud.rehearsal.machines import ports
from tpuswarm.cloud.rehearsal.machines.processes import MACHINE
from tpuswarm.cloud.rehearsal.place import VARIABLE, Place

SSH_PORT, METADATA_PORT = 2222, 2223
ROOT = "TPUSWARM_ROOT"
"""The variable with the folder that stands for `/`."""
PYTHON = "TPUSWARM_PYTHON"
"""The variable with what an environment that set-up makes runs as Python."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
TCMALLOC = "usr/lib/x86_64-linux-gnu/libtcmalloc.so.4"
QUICK = "--xla_backend_optimization_level=0"
"""The way is rehearsed, not the speed: a program compiles in 0.6 of the time, a step takes 1.3 times as long."""
UNITS = "run/units"
"""A file for each service that runs."""


class Root:
    """The folder that stands for a machine's `/`."""

    def __init__(self, place: Place, host: RehearsedHost):
        self._place = place
        self._host = host
        self.path = place.machines / host.id
        self._booted = self.path / "run" / "boot"
        self._ports = self.path / "run" / "ports"
        self.host_key = self.path / "etc" / "ssh" / "ssh_host_ed25519_key"
        self.log = self.path / "var" / "log" / "startup-script.log"
        self.lock = self.path / "tmp" / "libtpu_lockfile"
        self.told = self.path / "run" / "told.json"
        self.profile = self.path / "etc" / "environment"

    @property
    def devices(self) -> list[Path]:
        """The chips' files, as they should be there."""
        folder, name = (self.path / "dev" / "vfio", "") if self._host.vfio else (self.path / "dev", "accel")
        return [folder / f"{name}{chip}" for chip in range(self._host.chips)]

    @property
    def booted(self) -> bool:
        """Whether it has started for the time that the cloud has in mind."""
        return self._booted.exists() and self._booted.read_text() == str(self._host.boot)

    def boot(self) -> None:
        """As the machine is after it has started: what lies in /tmp and /run is gone."""
        for name in ("tmp", "run", "dev"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in ("tmp", "run", UNITS, "dev", "etc/ssh", "var/log", "home", "root"):
            (self.path / name).mkdir(parents=True, exist_ok=True)
        for device in self.devices:
            device.parent.mkdir(exist_ok=True)
            device.touch()
        if self._host.chips:
            library = self.path / TCMALLOC
            library.parent.mkdir(parents=True, exist_ok=True)
            library.touch()
            if not self.profile.exists():
                self.profile.write_text(f'PATH="{PATH}"\nLD_PRELOAD=/{TCMALLOC}\n')
            (self.path / UNITS / "tpu-runtime").touch()
        self._booted.write_text(str(self._host.boot))

    def planted(self) -> dict[str, str]:
        """What a fault lets the metadata say, by name."""
        try:
            found: dict[str, str] = json.loads(self.told.read_text())
        except OSError:
            return {}
        return found

    def unplug(self) -> None:
        """It will have to boot when the cloud is there again."""
        self._booted.unlink(missing_ok=True)

    def give_ports(self, first: int | None) -> None:
        """Those that are its own from now on; None: it has none."""
        self._ports.unlink(missing_ok=True)
        if first is not None:
            self._ports.write_text(str(first))

    def delete(self) -> None:
        """All of it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def home(self, user: str) -> Path:
        """A user's, made at the first log-in."""
        if not re.fullmatch(r"[a-zA-Z0-9_][-.\w]*", user):
            raise ValueError(f"{user!r} is no user's name")
        home = self.path / "root" if user == "root" else self.path / "home" / user
        home.mkdir(parents=True, exist_ok=True)
        return home

    def environment(self, user: str, storage: str) -> dict[str, str]:
        """What a process of `user` starts with. `storage`: the address of the cloud's buckets."""
        host = self._host
        metadata = f"{host.internal}:{METADATA_PORT}"
        found = {
            "PATH": f"{self._place.stand_ins}:{PATH}",
            "HOME": str(self.home(user)),
            "USER": user,
            "LOGNAME": user,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            "TMPDIR": str(self.path / "tmp"),
            "TMUX_TMPDIR": str(self.path / "tmp"),
            MACHINE: host.id,
            ROOT: str(self.path),
            PYTHON: sys.executable,
            VARIABLE: str(self._place.folder),
            "GCE_METADATA_HOST": metadata,
            "GCE_METADATA_IP": metadata,
            "STORAGE_EMULATOR_HOST": storage,
            "JAX_PLATFORMS": "cpu",
        }
        if self.profile.exists():  # as PAM does; what it preloads is no library here
            found |= dict(re.findall(r"^(TPU_\w+)=(.*)$", self.profile.read_text(), re.MULTILINE))
        if self._ports.exists():
            found |= ports.variables(int(self._ports.read_text()))
        if host.devices:
            found["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={host.devices} {QUICK}"
        return found
