"""A network with a local cloud of real machines, and commands in it."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks.report import Skipped

from tests.processes import PROGRAM, ROOT, Forked
from tests.real.machines import CONTAINER, CONTAINER_VARIABLES, FILES, GROUP, IN_GROUP, SERVER, TEMPLATE, TREES
from tests.router.namespaces import Space
from tests.waiting import until
from tpuswarm.cloud.rehearsal.connect import CloudFolder, is_running
from tpuswarm.remote.setup.artifacts import PYTHON_PLATFORM
from tpuswarm.remote.setup.python import UV

TOOLS = ("mmdebstrap", "systemd-nspawn", "nft", "ip", "nsenter", "setpriv", "apt-get")
PACKAGES = (
    "systemd systemd-sysv dbus libpam-systemd udev openssh-server sudo python3 python3-venv ca-certificates curl "
    "iproute2 procps unattended-upgrades zsh tmux rsync"
)
"""Debian packages of a fresh machine; the images of TPU VMs have them too."""
REPOSITORY = ("jq", "libjq1", "libonig5")
DEBIAN_SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
"""Where this computer gets Debian's packages; without it, Debian's own servers."""
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


def why_not() -> str:
    """Return why this computer cannot run real machines; empty if it can. Boots a container with its own systemd."""
    if os.getuid() != 0:
        return "they need root"
    if tools := [name for name in TOOLS if shutil.which(name) is None]:
        return f"they need {', '.join(tools)}"
    try:
        computer = Computer()
        computer.sh("ip netns add m0; ip link add m0 type veth peer name host0 netns m0; nft add table ip cloud")
    except (Skipped, RuntimeError) as error:
        return str(error).splitlines()[-1]
    directory = ("--directory=/", "--volatile=yes", "--network-namespace-path=/run/netns/m0")
    words = [*computer.enter, *CONTAINER, *directory, "--", "--unit=poweroff.target"]
    environment = {**os.environ, **CONTAINER_VARIABLES}
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=environment)
    computer.close()
    return "" if done.returncode == 0 else f"systemd-nspawn fails: {(done.stderr.splitlines() or ['no message'])[-1]}"


def make_template(folder: Path) -> tuple[Path, Path]:
    """Make the disk of a fresh machine and its packages in a folder, or find those of an earlier session."""
    base, files = folder / "base", folder / "files"
    if not files.exists():
        for part in folder.glob("*.part"):
            shutil.rmtree(part)
        new, files_part = base.with_suffix(".part"), files.with_suffix(".part")
        shutil.rmtree(base, ignore_errors=True)
        wanted = ["google-cloud-storage", "google-cloud-tpu", f"uv=={UV}", str(ROOT)]
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
        pip = ["setpriv", "--pdeathsig", "KILL", *pip, "--dest", str(files_part / "wheels"), *wanted]
        with subprocess.Popen(pip) as download:
            make_base(new, files_part / "apt")
        assert download.returncode == 0
        for own in (files_part / "wheels").glob("tpuswarm-*"):
            own.unlink()  # no index has this computer's version
        make_python(new, files_part / "python" / f"cpython-3.11.2-{PYTHON_PLATFORM}")
        (files_part / "uv-cache").mkdir()
        os.chown(files_part / "uv-cache", 1000, 1000)
        new.rename(base)
        files_part.rename(files)
    return base, files


def make_base(new: Path, repository: Path) -> None:
    """Make the disk of a fresh machine, and a repository of a few Debian packages for it."""
    repository.mkdir(parents=True)
    download = f'cd {repository}; APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get --quiet=2 download {" ".join(REPOSITORY)}'
    subprocess.run(
        [  # in namespaces that end with this process: mmdebstrap mounts /proc and /sys
            *("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--mount-proc", "--kill-child"),
            *("mmdebstrap", "--quiet", "--variant=minbase", "--dpkgopt=force-unsafe-io"),
            *(f"--include={','.join(PACKAGES.split())}", f"--customize-hook={download}", "bookworm", str(new)),
            *([str(DEBIAN_SOURCES)] if DEBIAN_SOURCES.exists() else []),
        ],
        check=True,
    )  # fmt: skip
    agent = new / "usr/local/sbin/guest-agent"
    shutil.copy(Path(__file__).with_name("guest_agent.py"), agent)
    agent.chmod(0o755)
    (new / "etc/systemd/system/guest-agent.service").write_text(AGENT)
    subprocess.run(["sh", "-euc", PREPARE, "sh", new], check=True)
    subprocess.run(["sh", "-euc", BUILD_SLOW], cwd=repository, check=True)
    entries = []
    for file in sorted(repository.iterdir()):
        control = subprocess.run(["dpkg-deb", "--field", file], capture_output=True, text=True, check=True).stdout
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        entries.append(f"{control}Filename: ./{file.name}\nSize: {file.stat().st_size}\nSHA256: {digest}\n")
    (repository / "Packages").write_text("\n".join(entries))


def make_python(base: Path, folder: Path) -> None:
    """Make a Python as uv installs one, from a machine's own, for the laptop."""
    (folder / "bin").mkdir(parents=True)
    for name in ("python3.11", "python3", "python"):
        shutil.copy(base / "usr/bin/python3.11", folder / "bin" / name)
    shutil.copytree(base / "usr/lib/python3.11", folder / "lib/python3.11", symlinks=True)
    (folder / "lib/python3.11/EXTERNALLY-MANAGED").unlink(missing_ok=True)


END = """
for tree in /sys/fs/cgroup /sys/fs/cgroup/unified /sys/fs/cgroup/systemd; do
  if [ -e $tree/$group/cgroup.kill ]; then
    echo 1 >$tree/$group/cgroup.kill
    until grep -q "populated 0" $tree/$group/cgroup.events; do sleep 0.1; done
  fi
  [ ! -d $tree/$group ] || find $tree/$group -depth -type d -exec rmdir {} +
done
"""


class Computer(Space):
    """A computer in a network of its own. Its processes, also machines, end with this one."""

    def __init__(self) -> None:
        self.group = f"tpuswarm-real-{os.getpid()}"
        super().__init__("--net", "--mount", at_end=f"group={self.group}{END}")
        self.enter += [*IN_GROUP, f"{self.group}/laptop"]
        self.sh(
            f"mount -t tmpfs tmpfs /run; mkdir -p /run/netns /run/systemd/nspawn; ip link set lo up\n"
            f"ip address add {SERVER}/32 dev lo; echo 1 >/proc/sys/net/ipv4/ip_forward\n"
            f"for kind in all default lo; do echo 1 >/proc/sys/net/ipv4/conf/$kind/route_localnet; done"
        )
        if not any((tree / self.group / "cgroup.kill").exists() for tree in TREES):
            raise Skipped("they need control groups of version 2, and Linux 5.14")


class RealCloud(Computer):
    """A laptop in a network with a local cloud; commands run on the laptop."""

    def __init__(self, folder: Path, template: Path, files: Path) -> None:
        super().__init__()
        self.home, self.project = folder / "home", folder / "home/project"
        self.cloud = CloudFolder(folder / "cloud")
        self.cloud.make()
        for path in (self.cloud.path, self.cloud.token_file):
            os.chown(path, 1000, 1000)  # the first user of each machine, who reaches the cloud from there
        disks = folder / "disks"
        disks.mkdir()
        self.sh(f"mount -t tmpfs tmpfs {disks}")
        managed = self.home / ".local/share/uv"
        managed.mkdir(parents=True)
        self.project.mkdir()
        (managed / "python").symlink_to(files / "python")
        self.environment = {
            **os.environ, TEMPLATE: str(template), FILES: str(files), GROUP: self.group,
            "HOME": str(self.home), "LOGNAME": "maria", "TPUSWARM_REHEARSAL": str(self.cloud.path),
            "XDG_STATE_HOME": str(folder / "state"),
            "TPUSWARM_CACHE": str(folder / "cache"), "PYTHONPATH": str(ROOT),
            "PIP_NO_INDEX": "1", "UV_HTTP_RETRIES": "0", "PIP_FIND_LINKS": str(files / "wheels"),
        }  # fmt: skip
        self.log = folder / "server.log"
        with self.log.open("wb") as log:
            self.server = subprocess.Popen(
                [*self.enter, sys.executable, "-m", "tests.real.server", str(self.cloud.path)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment,
            )  # fmt: skip
        until(lambda: is_running(self.cloud) or self.server.poll() is not None)
        assert self.server.poll() is None, self.log.read_text()

    def start(self, *words: str, program: str = PROGRAM) -> subprocess.Popen[str]:
        """Start tpuswarm, or a Python file, on the laptop, in its project's folder."""
        return Forked(
            [program, *words], enter=self.enter, cwd=self.project, env=self.environment, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

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

    def machines_with(self, command: str) -> set[str]:
        """Return the machines with a process of this command line, whoever started it."""
        line, found = command.replace(" ", "\0").encode() + b"\0", set()
        for tree in TREES:
            for folder, _, _ in os.walk(tree / self.group):  # which passes over folders that vanish
                pids: list[str] = []
                with suppress(OSError):
                    pids = Path(folder, "cgroup.procs").read_text().split()
                for pid in pids:
                    with suppress(OSError):
                        if Path("/proc", pid, "cmdline").read_bytes() == line:
                            found.add(Path(folder).relative_to(tree / self.group).parts[0])
        return found

    def change_file(self, old: str, new: str) -> None:
        """Replace text of the fleet's file."""
        file = self.project / "swarm.toml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    def close(self) -> None:
        super().close()
        self.server.wait()
