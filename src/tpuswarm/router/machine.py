"""The machine: its rules by `nft`, its settings by their files, the record. Nothing else here changes anything."""

import fcntl
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.router.plan import one_line
from tpuswarm.router.record import Record, parse_record
from tpuswarm.router.ruleset import MARK, TABLE, Listing, dropping, is_ours, parse_listing
from tpuswarm.router.settings import ENABLED, KERNEL, LIMITS, OPEN_FILES, SYSCTL, UNIT
from tpuswarm.train.process.atomic import part, write_atomically

RECORD = Path("/var/lib/tpuswarm/router.json")
LOCK = Path("/run/tpuswarm-router.lock")
LISTENING = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
CONNTRACK = Path("/proc/net/nf_conntrack")
NR_OPEN = "/proc/sys/fs/nr_open"
OLDEST_NFT = "1.0.2"
"""Of those tried: Debian 11's 0.9.8 does not read a map with counters, Ubuntu 22.04's 1.0.2 does."""
SYSTEMD = Path("/run/systemd/system")
"""There while systemd runs the machine (sd_booted(3))."""


def check_interfaces(*names: str) -> None:
    """Raises InputError for an interface that is not there."""
    there = [name for _, name in socket.if_nameindex()]
    for name in names:
        if name not in there:
            raise InputError(f"this machine has no interface {name}; {did_you_mean(name, there)}")


def check_systemd() -> None:
    """Raises InputError where no systemd would start a unit at boot."""
    if not SYSTEMD.is_dir():
        raise InputError("this machine does not run systemd, so nothing would apply the rules at boot: drop --persist")


def find_nft() -> str:
    """The program. Raises InputError where there is none."""
    found = shutil.which("nft", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if not found:
        raise InputError("there is no nft on this machine; install nftables (apt-get install nftables)")
    return found


def listing() -> Listing | None:
    """Our table. Raises InputError if there is one of its name that is not ours, RunFailed where nft may not look."""
    if f"table ip {TABLE}" not in _nft("list", "tables", "ip").splitlines():
        return None
    text = _nft("list", "table", "ip", TABLE)
    if not is_ours(text):
        raise InputError(
            f'the table ip {TABLE} was not made by tpuswarm, it has no comment "{MARK}": nothing was changed; '
            f"if nobody needs it, `nft delete table ip {TABLE}` deletes it"
        )
    return parse_listing(text)


def load(ruleset: str) -> None:
    """Give a ruleset to the kernel, which takes all of it or nothing. Raises RunFailed."""
    try:
        _nft("-f", "-", text=ruleset)
    except RunFailed as error:
        raise RunFailed(f"{error}; the rules need nft {OLDEST_NFT} or newer, `nft --version` shows yours") from error


def closed() -> list[str]:
    """The chains, as `ip filter FORWARD`, that drop by their policy what is forwarded, what we translate included."""
    chains = dropping(_nft("list", "chains"))
    return [each for each in chains if not re.search(r"ct status dnat .*accept", _nft("list", "chain", *each.split()))]


def delete() -> None:
    """Delete our table. Raises RunFailed."""
    _nft("delete", "table", "ip", TABLE)


def _nft(*words: str, text: str | None = None) -> str:
    done = subprocess.run([find_nft(), *words], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        said = next((line for line in done.stderr.splitlines() if line.strip()), f"exit {done.returncode}")
        raise RunFailed(f"nft {words[0]} failed and changed nothing: {said}")
    return done.stdout


def read(path: str) -> str | None:
    """The text of a setting; of a link where it leads; None where there is no such file. Raises PermissionError."""
    file = Path(path)
    try:
        return str(file.readlink()) if file.is_symlink() else file.read_text()
    except FileNotFoundError:
        return None


def write(path: str, text: str | None) -> None:
    """Set a setting; None deletes the file. Raises RunFailed, naming it."""
    file = Path(path)
    try:
        if text is None:
            file.unlink(missing_ok=True)
        elif path.startswith(KERNEL):
            file.write_text(text)
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            if path == ENABLED:
                file.unlink(missing_ok=True)
                file.symlink_to(text)
            else:
                write_atomically(file, text if text.endswith("\n") else f"{text}\n")
    except OSError as error:
        wanted = "deleted" if text is None else f"set to {one_line(text)}" if one_line(text) else "written"
        raise RunFailed(f"{path} cannot be {wanted} on this machine: {error.strerror}") from error
    # For whoever asks systemd now; when the machine starts it reads all anyway.
    if path in (UNIT, ENABLED) and shutil.which("systemctl"):
        subprocess.run(["systemctl", "daemon-reload"], capture_output=True, check=False)


def read_record() -> Record | None:
    """What the last apply left. Raises InputError if it cannot be read."""
    try:
        return parse_record(str(RECORD), RECORD.read_text())
    except FileNotFoundError:
        return None


def write_record(record: Record | None) -> None:
    """Keep it, whole, on the disk; None leaves no trace of it. Raises RunFailed."""
    if record:
        try:
            RECORD.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(RECORD, record.model_dump_json(indent=1))
        except OSError as error:
            said = f"{RECORD} cannot be written: {error.strerror}"
            raise RunFailed(f"{said}; make {RECORD.parent} writable: what undoes an apply is kept there") from error
    else:
        for each in (part(Path(UNIT)), part(Path(LIMITS)), part(RECORD), RECORD):  # a kill leaves parts
            if each.exists():
                each.unlink()
        with suppress(OSError):  # there never was one, or others keep something there
            RECORD.parent.rmdir()


@contextmanager
def alone() -> Iterator[None]:
    """For as long as rules and record are changed: no other does. Raises InputError where another does."""
    mask = os.umask(0o022)  # everybody may read what is written: a dry run does without rights
    try:
        with LOCK.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError("another `tpuswarm router` is changing this machine: wait until it is done") from None
            yield
    finally:
        os.umask(mask)


def connections() -> str | None:
    """All connections that the kernel follows, a line each; None where it does not say."""
    try:
        return CONNTRACK.read_text()
    except OSError:
        return None


def followed() -> tuple[int, int] | None:
    """How many connections the kernel follows, and how many it can; None where it follows none."""
    count, most = (read(f"{SYSCTL}/netfilter/nf_conntrack_{each}") for each in ("count", "max"))
    return (int(count), int(most)) if count and most else None


def open_files() -> int:
    """The most that a process may have, as far as `--tune` goes."""
    return min(OPEN_FILES, int(read(NR_OPEN) or OPEN_FILES))


def listening() -> str:
    """The TCP sockets of this machine, a line each."""
    return "".join(path.read_text() for path in LISTENING if path.exists())
