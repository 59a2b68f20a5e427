"""One step of set-up, and the scripts by which a machine is asked about steps and does one."""

import base64
import hashlib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tpuswarm.remote.places import OURS

FOLDER = f"{OURS}/setup"
"""Stamps and logs of steps, below the home."""
VERSIONS = f"{FOLDER}/versions"
"""The Python that the step `python` made, and the packages with their versions."""
SEND = 75
"""What a step ends with where something has to be sent to the machine first: it cannot be downloaded there."""
LIMIT_S, CHECKS_S = 3_600.0, 120.0
"""Seconds after which a step, or all checks of a machine together, hang and are ended there."""
WITHIN = """\
within() {  # SECONDS LINES: with all that they have started they are ended where they take longer; `late` says so
  late=; set -m  # a process group for each; what runs as root in it only root may end
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
"""A machine watches over its steps itself: whoever began them may be gone."""


@dataclass(frozen=True)
class Step:
    """What is done, as lines of bash; `sudo` where root has to."""

    id: str
    do: str
    """May be begun again after it was broken off. What it writes to descriptor 3 is shown at once."""
    check: str = "true"
    """Succeeds where what was done still holds."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files below the home, written first, for their owner alone."""
    waits_for: str | None = None
    """A step of another machine."""
    settles: bool = False
    """Its outcome on the first machine is how it is done on all others."""

    @property
    def stamp(self) -> str:
        """Of what it does: another one has to be done."""
        text = repr((self.id, self.do, self.check, sorted(self.files.items())))
        return hashlib.sha256(text.encode()).hexdigest()


def survey(steps: Iterable[Step]) -> str:
    """A script that prints `ID same`, `ID undone` or `ID new` for each, `clock` with its time, and its versions."""
    asked = "\n".join(f"about {shlex.quote(each.id)} {each.stamp} {shlex.quote(each.check)}" for each in steps)
    return f"""\
{WITHIN}cd ~ && mkdir -p -m 700 {OURS} {FOLDER} || exit
about() {{
  if [ "$(cat {FOLDER}/$1.stamp 2>/dev/null)" != "$2" ]; then echo "$1 new"
  elif (eval "$3") </dev/null >/dev/null 2>&1; then echo "$1 same"
  else echo "$1 undone"; fi
}}
within {CHECKS_S:g} {shlex.quote(asked)}
echo "clock $(date +%s.%N)"
if [ -e {VERSIONS} ]; then echo "versions $(base64 -w0 {VERSIONS})"; fi
"""


def script(step: Step, given: str = "", limit_s: float = LIMIT_S) -> str:
    """A script that does it, unless whoever did it meanwhile was quicker; the end of what it said where it failed.

    given: what the first machine came to, for a step that settles something. limit_s: after which it is ended.
    """
    own = f"{FOLDER}/{step.id}"
    files = "".join(_written(path, text) for path, text in {**step.files, f"{own}.given": given}.items())
    return f"""\
{WITHIN}main() {{
cd ~ && mkdir -p -m 700 {OURS} {FOLDER} || exit
exec 9>>{FOLDER}/lock
flock -n 9 || {{ echo "another set-up is at work on it: waiting"; flock 9; }}
if [ "$(cat {own}.stamp 2>/dev/null)" = {step.stamp} ] && ( {step.check}
) </dev/null >/dev/null 2>&1; then exit 0; fi
rm -f {own}.stamp
{files}
exec 3>&1
within {limit_s:g} {shlex.quote(f"set -e{chr(10)}{step.do}")} </dev/null >{own}.log 2>&1
code=$?
if [ $code = 0 ]; then echo {step.stamp} >{own}.stamp && exit 0; code=1; fi
tail -n 20 {own}.log
if [ -n "$late" ]; then echo "not done after {limit_s / 60:.3g} minutes, and ended there with all it had started"; fi
exit $code
}}
main
"""


def _written(path: str, text: str) -> str:
    packed = base64.b64encode(text.encode()).decode()
    begin = f"mkdir -p {shlex.quote(str(Path(path).parent))} && base64 -d >{path}.part"
    return f"(umask 077; {begin} <<'END'\n{packed}\nEND\n) && mv {path}.part {path} || exit\n"
