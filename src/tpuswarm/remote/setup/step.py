"""A step of set-up, and the shell scripts that check steps and run one."""

import base64
import hashlib
import shlex
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpuswarm.errors import RunFailed
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.host import Host
from tpuswarm.remote.paths import STATE_FOLDER

FOLDER = f"{STATE_FOLDER}/setup"
"""Stamps and logs of steps, relative to the home."""
VERSIONS = f"{FOLDER}/versions"
"""The installed Python and packages, with versions."""
NEEDS_FILE = 75
"""A step's exit code if the machine cannot download a file."""
STEP_TIMEOUT_S, CHECKS_TIMEOUT_S = 3_600.0, 120.0
"""For one step, and for all checks of a machine together."""
WITHIN = """\
within() {  # SECONDS LINES: run lines; after that time end them with everything they started, and set `late`
  late=; set -m  # a process group for each job
  trap late=yes USR1
  (exec 9>&-; eval "$2") &
  local group=$! code
  (exec >/dev/null 2>&1 3>&- 9>&-; sleep "$1"; kill -USR1 $$) &
  local watch=$!; disown $watch
  wait $group; code=$?
  if [ -n "$late" ]; then
    sudo kill -TERM -- -$group
    for try in $(seq 50); do sudo kill -0 -- -$group || break; sleep 0.1; done
    sudo kill -KILL -- -$group
  else kill -- -$watch; fi 2>/dev/null
  set +m
  return $code
}
"""
"""The machine enforces the time limit itself: its caller may be gone."""


@dataclass(frozen=True)
class Step:
    """One step, as lines of bash that use `sudo` for root's work."""

    id: str
    do: str
    """May run again after an interruption. Its output to descriptor 3 is shown at once."""
    check: str = "true"
    """Succeeds if nothing has undone the step."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that are written first: texts by path from the home, readable by the user only."""
    waits_for: str | None = None
    """A step of another machine."""
    decides_versions: bool = False
    """The first machine decides the versions, and all others get the same."""

    @property
    def stamp(self) -> str:
        """A digest of the step; a machine with another stamp runs it again."""
        text = repr((self.id, self.do, self.check, sorted(self.files.items())))
        return hashlib.sha256(text.encode()).hexdigest()


class FileUnavailable(RunFailed):
    """This computer cannot get a file that a step needs; the machine is not at fault."""


Send = Callable[[Connections, Host, Step], Awaitable[str]]
"""Sends the file that a step needs; returns its description. Raises FileUnavailable."""


def survey(steps: Iterable[Step]) -> str:
    """Return a script that prints `ID same`, `ID undone` or `ID new` for each step, `clock TIME`, and `versions …`."""
    checks = "\n".join(f"about {shlex.quote(step.id)} {step.stamp} {shlex.quote(step.check)}" for step in steps)
    return f"""\
{WITHIN}cd ~ && mkdir -p -m 700 {STATE_FOLDER} {FOLDER} || exit
about() {{
  if [ "$(cat {FOLDER}/$1.stamp 2>/dev/null)" != "$2" ]; then echo "$1 new"
  elif (eval "$3") </dev/null >/dev/null 2>&1; then echo "$1 same"
  else echo "$1 undone"; fi
}}
within {CHECKS_TIMEOUT_S:g} {shlex.quote(checks)}
echo "clock $(date +%s.%N)"
if [ -e {VERSIONS} ]; then echo "versions $(base64 -w0 {VERSIONS})"; fi
"""


def script(step: Step, versions: str = "", timeout_s: float = STEP_TIMEOUT_S) -> str:
    """Return a script that runs a step unless another set-up has; it prints the end of a failed step's output.

    versions: the first machine's.
    """
    path = f"{FOLDER}/{step.id}"
    files = "".join(_write_file(name, text) for name, text in {**step.files, f"{path}.given": versions}.items())
    return f"""\
{WITHIN}main() {{
cd ~ && mkdir -p -m 700 {STATE_FOLDER} {FOLDER} || exit
exec 9>>{FOLDER}/lock
flock -n 9 || {{ echo "waiting for another set-up of this machine"; flock 9; }}
if [ "$(cat {path}.stamp 2>/dev/null)" = {step.stamp} ] && ( {step.check}
) </dev/null >/dev/null 2>&1; then exit 0; fi
rm -f {path}.stamp
{files}
exec 3>&1
within {timeout_s:g} {shlex.quote(f"set -e{chr(10)}{step.do}")} </dev/null >{path}.log 2>&1
code=$?
if [ $code = 0 ]; then echo {step.stamp} >{path}.stamp && exit 0; code=1; fi
tail -n 20 {path}.log
if [ -n "$late" ]; then echo "not done after {timeout_s / 60:.3g} minutes; ended with all its programs"; fi
exit $code
}}
main
"""


def _write_file(path: str, text: str) -> str:
    encoded = base64.b64encode(text.encode()).decode()
    write = f"mkdir -p {shlex.quote(str(Path(path).parent))} && base64 -d >{path}.part"
    return f"(umask 077; {write} <<'END'\n{encoded}\nEND\n) && mv {path}.part {path} || exit\n"
