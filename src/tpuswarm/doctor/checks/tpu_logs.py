"""The folder in which libtpu writes its logs."""

from collections.abc import Iterator

from tpuswarm.doctor.check import Check, Subject, Wrong

FILE = "/tmp/tpu_logs"  # libtpu's own place
MEND = "let everybody write there: `chmod 1777 /tmp/tpu_logs`, with sudo where it is another user's; --fix does"


def probe(host: Subject) -> Iterator[Wrong]:
    """Whose it is, and whether we may write."""
    logs = host.facts["logs"]
    if logs and not logs["writable"]:
        change = 'chmod 1777 "${TPUSWARM_ROOT:-}' + FILE + '"'
        yield Wrong(
            f"{FILE} is {logs['user']}'s with mode {logs['mode']}, and {host.facts['user']} cannot write there",
            f"`sudo chmod 1777 {FILE}`", change if logs["mine"] else f"sudo {change}",
        )  # fmt: skip


CHECK = Check("tpu-logs", FILE, "libtpu of another user fails where it cannot write its log", MEND, probe)
