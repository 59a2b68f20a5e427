"""Read and change the machine: rules through `nft`, kernel settings, files."""

import fcntl
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.router.ruleset import TABLE, Listing, dropping_chains, is_ours, parse_listing, replace_table
from tpuswarm.router.settings import Setting
from tpuswarm.train.process.atomic import partial_path, write_atomically

RULES = Path("/etc/tpuswarm-router.nft")
SYSCTL = Path("/etc/sysctl.d/60-tpuswarm-router.conf")
UNIT = Path("/etc/systemd/system/tpuswarm-router.service")
ENABLED = Path("/etc/systemd/system/multi-user.target.wants/tpuswarm-router.service")
"""The link that `systemctl enable` makes."""
CLIENT_SYSCTL = Path("/etc/sysctl.d/60-tpuswarm-client.conf")
CLIENT_LIMITS = Path("/etc/security/limits.d/60-tpuswarm-client.conf")
FILES = (RULES, SYSCTL, UNIT, ENABLED, CLIENT_SYSCTL, CLIENT_LIMITS)

LOCK = Path("/run/tpuswarm-router.lock")
SYSTEMD = Path("/run/systemd/system")
"""Exists while systemd runs the machine (sd_booted(3))."""
OLDEST_NFT = "1.0.2"
"""Ubuntu 22.04's; Debian 11's 0.9.8 cannot read a map with counters."""
LISTENING_STATE = "0A"
LOOPBACK = re.compile(r"[0-9A-F]{6}7F:|0{24}01000000:")
"""127.0.0.0/8 and ::1 in /proc/net/tcp, on little-endian machines."""


def require_interfaces(*names: str) -> None:
    """Raise InputError for an interface that does not exist."""
    known = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in known:
            raise InputError(f"this machine has no interface {name}; {did_you_mean(name, known)}")


def require_systemd() -> None:
    """Raise InputError unless systemd runs this machine."""
    if not SYSTEMD.is_dir():
        raise InputError("this machine does not run systemd, which --persist needs to load the rules at boot")


def find_nft() -> str:
    """Return the path of nft."""
    found = shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if not found:
        raise InputError("there is no nft on this machine; install nftables (apt-get install nftables)")
    return found


def list_table() -> Listing | None:
    """Return our table; raise InputError if someone else made a table of that name."""
    if f"table ip {TABLE}" not in _nft("list", "tables", "ip").splitlines():
        return None
    text = _nft("list", "table", "ip", TABLE)
    if not is_ours(text):
        raise InputError(
            f"the table ip {TABLE} was not made by tpuswarm; nothing was changed. "
            f"If it is unused, delete it: nft delete table ip {TABLE}"
        )
    return parse_listing(text)


def load_rules(ruleset: str) -> None:
    """Load a ruleset in one transaction."""
    try:
        _nft("-f", "-", text=ruleset)
    except RunFailed as error:
        raise RunFailed(f"{error}; the rules need nft {OLDEST_NFT} or newer, `nft --version` shows yours") from error


def delete_table() -> None:
    """Delete our table if it exists."""
    _nft("-f", "-", text=replace_table())


def blocking_chains() -> list[str]:
    """Return the chains that would drop the connections we forward."""
    chains = dropping_chains(_nft("list", "chains"))
    accept = re.compile(r"ct status dnat .*accept")
    return [chain for chain in chains if not accept.search(_nft("list", "chain", *chain.split()))]


def _nft(*words: str, text: str | None = None) -> str:
    done = subprocess.run([find_nft(), *words], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if line.strip()), f"exit {done.returncode}")
        raise RunFailed(f"nft {words[0]} failed and changed nothing: {reason}")
    return done.stdout


def read_file(path: Path | str) -> str | None:
    """Return a file's text, or the target of a link; None if there is no file."""
    try:
        return str(Path(path).readlink()) if Path(path).is_symlink() else Path(path).read_text()
    except FileNotFoundError:
        return None


def write_file(path: Path, text: str) -> None:
    """Write one of FILES."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path == ENABLED:
            path.unlink(missing_ok=True)
            path.symlink_to(text)
        else:
            write_atomically(path, text)
    except OSError as error:
        raise RunFailed(f"{path} cannot be written: {error.strerror}") from error


def delete_files() -> None:
    """Delete FILES."""
    for path in FILES:
        path.unlink(missing_ok=True)
        partial_path(path).unlink(missing_ok=True)  # an apply that was killed leaves it


def reload_systemd() -> None:
    """Make systemd read its units again."""
    if shutil.which("systemctl"):
        subprocess.run(["systemctl", "daemon-reload"], capture_output=True, check=False)


def has_value(setting: Setting) -> bool:
    """Return whether a setting has its value; the kernel separates numbers by tabs."""
    return (read_file(setting.path) or "").split() == setting.value.split()


def set_value(setting: Setting) -> None:
    """Set a kernel setting."""
    try:
        Path(setting.path).write_text(setting.value)
    except OSError as error:
        raise RunFailed(f"{setting.path} cannot be set to {setting.value}: {error.strerror}") from error


def require_settings(settings: Iterable[Setting]) -> None:
    """Raise InputError if the kernel lacks one."""
    for setting in settings:
        if not Path(setting.path).exists():
            raise InputError(f"this kernel or container has no {setting.path}")


@contextmanager
def exclusive() -> Iterator[None]:
    """Keep other `tpuswarm router` commands from changing this machine."""
    mask = os.umask(0o022)  # a dry run without root reads the files
    try:
        with LOCK.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError("another `tpuswarm router` is changing this machine; try again later") from None
            yield
    finally:
        os.umask(mask)


def read_connections() -> str | None:
    """Return the kernel's list of tracked connections; None if it has none to show."""
    try:
        return Path("/proc/net/nf_conntrack").read_text()
    except OSError:
        return None


def tracked_connections() -> tuple[int, int] | None:
    """Return how many connections the kernel tracks, and its limit; None without connection tracking."""
    count, limit = (read_file(f"/proc/sys/net/netfilter/nf_conntrack_{name}") for name in ("count", "max"))
    return (int(count), int(limit)) if count and limit else None


def listening_ports() -> set[int]:
    """Return the ports on which this machine accepts connections from others."""
    texts = [read_file(f"/proc/net/{name}") or "" for name in ("tcp", "tcp6")]
    return parse_listening_ports("\n".join(texts))


def parse_listening_ports(text: str) -> set[int]:
    """Parse /proc/net/tcp and tcp6."""
    found = set()
    for fields in map(str.split, text.splitlines()):
        if len(fields) > 3 and fields[3] == LISTENING_STATE and not LOOPBACK.match(fields[1]):
            found.add(int(fields[1].rpartition(":")[2], 16))
    return found
