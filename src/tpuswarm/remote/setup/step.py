"""One step of set-up, and the scripts by which a machine is asked about steps and does one."""

import base64
import hashlib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tpuswarm.remote.places import OURS

FOLDER = f"{OURS}/setup"
"""Stamps and logs of steps, below the home."""
VERSIONS = f"{FOLDER}/versions"
"""The Python that the step `python` made, and the packages with their versions."""
NEEDS_PYTHON = 75
"""What a step ends with where neither uv nor a Python can be downloaded: they have to be sent."""


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
    asked = (f"about {shlex.quote(each.id)} {each.stamp} {shlex.quote(each.check)}" for each in steps)
    return f"""\
cd ~ && mkdir -p -m 700 {OURS} {FOLDER} || exit
about() {{
  if [ "$(cat {FOLDER}/$1.stamp 2>/dev/null)" != "$2" ]; then echo "$1 new"
  elif (eval "$3") </dev/null >/dev/null 2>&1; then echo "$1 same"
  else echo "$1 undone"; fi
}}
{chr(10).join(asked)}
echo "clock $(date +%s.%N)"
if [ -e {VERSIONS} ]; then echo "versions $(base64 -w0 {VERSIONS})"; fi
"""


def script(step: Step, given: str = "") -> str:
    """A script that does it, unless whoever did it meanwhile was quicker; the end of what it said where it failed.

    given: what the first machine came to, for a step that settles something.
    """
    own = f"{FOLDER}/{step.id}"
    files = "".join(_written(path, text) for path, text in {**step.files, f"{own}.given": given}.items())
    return f"""\
main() {{
cd ~ && mkdir -p -m 700 {OURS} {FOLDER} || exit
exec 9>>{FOLDER}/lock
flock -n 9 || {{ echo "another set-up is at work on it: waiting"; flock 9; }}
if [ "$(cat {own}.stamp 2>/dev/null)" = {step.stamp} ] && ( {step.check}
) </dev/null >/dev/null 2>&1; then exit 0; fi
rm -f {own}.stamp
{files}
exec 3>&1
(set -e
{step.do}
) </dev/null >{own}.log 2>&1 9>&-
code=$?
if [ $code = 0 ]; then echo {step.stamp} >{own}.stamp && exit 0; code=1; fi
tail -n 20 {own}.log
exit $code
}}
main
"""


def _written(path: str, text: str) -> str:
    packed = base64.b64encode(text.encode()).decode()
    return f"(umask 077; base64 -d >{path}.part <<'END'\n{packed}\nEND\n) && mv {path}.part {path} || exit\n"
