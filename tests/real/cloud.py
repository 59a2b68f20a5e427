"""A network with a local cloud of real machines, and commands in it."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.processes import PROGRAM, ROOT
from tests.real.machines import CGROUP, FILES, SERVER, TEMPLATE
from tests.router.namespaces import Space
from tests.waiting import until
from tpuswarm.cloud.rehearsal.connect import CloudFolder, is_running
from tpuswarm.remote.setup.artifacts import PYTHON_PLATFORM
from tpuswarm.remote.setup.python import UV

PACKAGES = (
    "systemd systemd-sysv dbus libpam-systemd udev openssh-server sudo python3 python3-venv ca-certificates curl "
    "iproute2 procps unattended-upgrades zsh tmux rsync"
)
"""Debian packages of a fresh machine; the images of TPU VMs have them too."""
REPOSITORY = ("jq", "libjq1", "libonig5")
TIMEOUT_S = 600
BUILD_SLOW = r"""
mkdir -p slow/DEBIAN
cat >slow/DEBIAN/control <<END
Package: slow
Version: 1
Architecture: all
Maintainer: nobody
Description: its installation takes long where there is a file /slow
END
printf '#!/bin/sh\n[ ! -e /slow ] || sleep 1120\n' >slow/DEBIAN/postinst
chmod 755 slow/DEBIAN/postinst
dpkg-deb --build slow slow_1_all.deb >/dev/null
rm -r slow
"""
AGENT = """\
[Unit]
Before=ssh.service
[Service]
ExecStartPre=/usr/bin/ssh-keygen -A
ExecStart=/usr/local/sbin/guest-agent
Restart=always
[Install]
WantedBy=multi-user.target
"""
PREPARE = r"""
cd "$1"
rm -f etc/ssh/ssh_host_* etc/machine-id
touch etc/machine-id
rm -f etc/apt/sources.list.d/*
sed -i 's/^hosts:.*/hosts: files/' etc/nsswitch.conf
echo 'deb [trusted=yes] file:/srv/apt ./' >etc/apt/sources.list
printf 'Port 22\nPort 2222\nPasswordAuthentication no\n' >etc/ssh/sshd_config.d/ports.conf
chroot . groupadd --system google-sudoers
echo '%google-sudoers ALL=(ALL:ALL) NOPASSWD:ALL' >etc/sudoers.d/google_sudoers
chmod 440 etc/sudoers.d/google_sudoers
chroot . systemctl --quiet enable guest-agent
mkdir -p etc/uv
cat >etc/uv/uv.toml <<END
no-index = true
find-links = ["/srv/wheels"]
cache-dir = "/var/cache/uv"
link-mode = "symlink"
END
"""


def make_template(folder: Path) -> Path:
    """Make the disk of a fresh machine in a folder, or find the one of an earlier session."""
    base = folder / "base"
    if not base.exists():
        new = folder / f"new.{os.getpid()}"
        include = ",".join(PACKAGES.split())
        words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={include}", "bookworm", str(new)]
        subprocess.run([*words, "/etc/apt/sources.list.d/debian.sources"], check=True)
        agent = new / "usr/local/sbin/guest-agent"
        shutil.copy(Path(__file__).with_name("guest_agent.py"), agent)
        agent.chmod(0o755)
        (new / "etc/systemd/system/guest-agent.service").write_text(AGENT)
        subprocess.run(["sh", "-euc", PREPARE, "sh", new], check=True)
        new.rename(base)
    return base


def make_files(folder: Path, base: Path) -> Path:
    """Make a folder of Python and Debian packages for machines, which have no internet, and a Python for the laptop."""
    files = folder / "files"
    if not files.exists():
        new = folder / f"files.{os.getpid()}"
        wanted = ["google-cloud-storage", "google-cloud-tpu", f"uv=={UV}", str(ROOT)]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, "--dest", str(new / "wheels"), *wanted], check=True)
        for own in (new / "wheels").glob("tpuswarm-*"):
            own.unlink()  # no index has this computer's version
        make_repository(new / "apt")
        python = new / "python" / f"cpython-3.11.2-{PYTHON_PLATFORM}"
        (python / "bin").mkdir(parents=True)
        for name in ("python3.11", "python3", "python"):
            shutil.copy(base / "usr/bin/python3.11", python / "bin" / name)
        shutil.copytree(base / "usr/lib/python3.11", python / "lib/python3.11", symlinks=True)
        (python / "lib/python3.11/EXTERNALLY-MANAGED").unlink(missing_ok=True)
        (new / "uv-cache").mkdir()
        subprocess.run(["chown", "-R", "1000:1000", new / "uv-cache"], check=True)
        new.rename(files)
    return files


def make_repository(folder: Path) -> None:
    """Make a repository of a few Debian packages."""
    folder.mkdir()
    subprocess.run(["apt-get", "--quiet=2", "download", *REPOSITORY], cwd=folder, check=True)
    subprocess.run(["sh", "-euc", BUILD_SLOW], cwd=folder, check=True)
    entries = []
    for file in sorted(folder.iterdir()):
        control = subprocess.run(["dpkg-deb", "--field", file], capture_output=True, text=True, check=True).stdout
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        entries.append(f"{control}Filename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {digest}\n")
    (folder / "Packages").write_text("\n".join(entries))


class RealCloud(Space):
    """A laptop in a network with a local cloud; commands run on the laptop."""

    def __init__(self, folder: Path, template: Path, files: Path) -> None:
        super().__init__("--net", "--mount")
        self.home, self.project = folder / "home", folder / "home/project"
        self.cloud = CloudFolder(folder / "cloud")
        self.cloud.make()
        for path in (self.cloud.path, self.cloud.token_file):
            os.chown(path, 1000, 1000)  # the first user of each machine, who reaches the cloud from there
        self.sh(
            f"mount -t tmpfs tmpfs /run; mkdir -p /run/netns /run/systemd/nspawn; ip link set lo up\n"
            f"ip address add {SERVER}/32 dev lo; echo 1 >/proc/sys/net/ipv4/ip_forward\n"
            f"for kind in all default lo; do echo 1 >/proc/sys/net/ipv4/conf/$kind/route_localnet; done"
        )
        managed = self.home / ".local/share/uv"
        managed.mkdir(parents=True)
        self.project.mkdir()
        (managed / "python").symlink_to(files / "python")
        self.cgroup = f"tpuswarm-real-{os.getpid()}"
        self.environment = {
            **os.environ, TEMPLATE: str(template), FILES: str(files), CGROUP: self.cgroup,
            "HOME": str(self.home), "LOGNAME": "maria", "TPUSWARM_REHEARSAL": str(self.cloud.path),
            "XDG_STATE_HOME": str(folder / "state"),
            "TPUSWARM_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT),
            "PIP_NO_INDEX": "1", "UV_HTTP_RETRIES": "0", "PIP_FIND_LINKS": str(files / "wheels"),
        }  # fmt: skip
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(
                [*self.enter, sys.executable, "-m", "tests.real.server", str(self.cloud.path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, cwd=ROOT,
            )  # fmt: skip
        until(lambda: is_running(self.cloud) or self.server.poll() is not None)
        assert self.server.poll() is None, self.log.read_text()

    def start_program(self, *words: str) -> subprocess.Popen[str]:
        """Start a program on the laptop, in its project's folder."""
        return subprocess.Popen(
            [*self.enter, f"--wd={self.project}", *words], env=self.environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start tpuswarm on the laptop."""
        return self.start_program(PROGRAM, *words)

    def run(self, *words: str, rc: int = 0) -> str:
        """Run tpuswarm on the laptop, and return its output."""
        command = self.start(*words)
        try:
            shown, _ = command.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(command.pid, signal.SIGKILL)
            shown, _ = command.communicate()
            raise AssertionError(f"{' '.join(words)} did not end:\n{shown}") from None
        assert command.returncode == rc, shown
        return shown

    def change_file(self, old: str, new: str) -> None:
        """Replace text of the fleet's file."""
        file = self.project / "swarm.toml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def close(self) -> None:
        self.server.terminate()
        self.server.wait()
        network = Path(f"/proc/{self.pid}/ns/net").readlink()
        for process in Path("/proc").glob("[1-9]*"):  # such as a keeper in the background
            with suppress(OSError):
                if (process / "ns/net").readlink() == network and int(process.name) != self.pid:
                    os.kill(int(process.name), signal.SIGKILL)
        super().close()
        for tree in Path("/sys/fs/cgroup").glob(f"**/{self.cgroup}"):
            if (tree / "cgroup.kill").exists():
                (tree / "cgroup.kill").write_text("1")
                until(lambda tree=tree: "populated 0" in (tree / "cgroup.events").read_text())
            for folder, _, _ in os.walk(tree, topdown=False):
                Path(folder).rmdir()
