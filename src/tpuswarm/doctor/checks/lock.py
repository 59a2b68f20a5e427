"""libtpu's lock, left behind by a program of another user."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

FILE = "/tmp/libtpu_lockfile"  # libtpu's own place
MEND = "remove it where no process has it: `sudo rm /tmp/libtpu_lockfile`; --fix does"
REMOVE = (
    'F="${TPUSWARM_ROOT:-}' + FILE + '"; N=$(stat -c %i "$F" 2>/dev/null) || exit 0; '
    'if grep -q ":$N " /proc/locks; then echo "a process has locked it now" >&2; exit 1; fi; '
)


def probe(host: Subject) -> Iterator[Wrong]:
    """A file that this user cannot open, and that nobody has locked; libtpu takes one that it can open."""
    lock = host.facts["lock"]
    if lock and not lock["writable"] and not host.facts["locker"] and not host.facts["holders"]:
        fix = REMOVE + ("" if lock["mine"] else "sudo ") + 'rm -f "$F"'
        owner = "your own" if lock["mine"] else f"{lock['user']}'s"
        what = f"{FILE} is {owner}, of mode {lock['mode']}, so a program of {host.facts['user']} cannot open it"
        yield Wrong(f"{what}, and no process has it", f"`{'' if lock['mine'] else 'sudo '}rm {FILE}`", fix)


CHECK = Check("lock", FILE, 'the next program stops with "TPU already in use"', MEND, probe)
