"""Every command and program in README.md and docs/ runs as shown."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.journeys.documents import DOCUMENTS, ROOT, Block, blocks
from tests.local_cloud import local_cloud
from tests.processes import ONE_DEVICE, PROGRAM, READ_AT_IMPORT, fork_server, read_at_import
from tpuswarm.cloud.rehearsal.connect import FOLDER_VARIABLE

pytestmark = pytest.mark.slow
NOT_RUN = re.compile(r"^make ([\w-]+)")
"""Only the target's existence is checked."""
ON_LOCAL_CLOUD = ("rehearsing.md", "running-programs.md", "set-up.md")
"""Documents whose commands make a fleet, with a key in the home folder."""
WHOLE_MODELS = ("README.md", "checkpoints.md", "fine-tuning.md")
"""They train a model for longer than its compilation with all optimisations takes."""
TIMEOUT_S = 600
NOT_HERE = ("benchmarks.md", "torch.md")
"""One takes hours, the other needs torch (tests/oracle/test_torch_docs.py)."""

FORK = f"""#!{sys.executable} -IS
import json, os, socket, sys
name = os.path.basename(sys.argv[0])
is_file = name == "python" and sys.argv[1:2] and "os.environ" not in open(sys.argv[1]).read()
variables = {{key: os.environ[key] for key in sorted(os.environ) if key.startswith({READ_AT_IMPORT!r})}}
variables.pop("JAX_PLATFORMS", None)
if (name == "python" and not is_file) or variables != json.loads(os.environ["FORK_SERVER_VARIABLES"]):
    program = {str(sys.executable)!r} if name == "python" else {PROGRAM!r}
    os.execv(program, [program, *sys.argv[1:]])
argv = sys.argv[1:] if is_file else [{PROGRAM!r}, *sys.argv[1:]]
answers, theirs = socket.socketpair()
job = {{"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ), "terminal": False}}
with socket.socket(fileno=int(os.environ["FORK_SERVER"])) as server:
    socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2, theirs.fileno()])
theirs.close()
pid, status = answers.makefile()
sys.exit(os.waitstatus_to_exitcode(int(status)) % 256)
"""
"""`tpuswarm …` and `python FILE.py` by the fork server; a new process where other variables are needed."""


SAME_RUN = ("README.md", "getting-started.md")
"""They train the same run by the same command, so the second one, in the folder of the first, finds it finished."""


def journeys() -> list:
    """Return the documents with commands or programs; those of a list run in one folder."""
    runnable = [path for path in DOCUMENTS if any(block.language in ("sh", "python") for block in blocks(path))]
    together = [path for path in runnable if path.name in SAME_RUN]
    others = [[path] for path in runnable if path.name not in (*SAME_RUN, *NOT_HERE)]
    return [pytest.param(together), *(pytest.param(one, marks=pytest.mark.long) for one in others)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """A folder with a tpuswarm and a python that are forked."""
    folder = tmp_path_factory.mktemp("bin")
    for name in ("tpuswarm", "python"):
        (folder / name).write_text(FORK)
        (folder / name).chmod(0o755)
    return folder


def user(programs: Path, document: Path) -> tuple[dict[str, str], int]:
    """Return the environment of a reader of the document, and the file descriptor that its programs need."""
    env = {**os.environ, **ONE_DEVICE}
    if document.name in WHOLE_MODELS:
        del env["JAX_DISABLE_MOST_OPTIMIZATIONS"]
    server = fork_server(env).fileno()
    more = {"FORK_SERVER": str(server), "FORK_SERVER_VARIABLES": json.dumps(read_at_import(env))}
    return {**env, **more, "PATH": os.pathsep.join([str(programs), str(Path(PROGRAM).parent), env["PATH"]])}, server


@pytest.mark.parametrize("documents", journeys(), ids=lambda paths: " ".join(path.name for path in paths))
def test_commands_and_programs_run(documents: list[Path], tmp_path: Path, programs: Path):
    env, server = user(programs, documents[0])
    here, home = tmp_path / "here", tmp_path / "home"
    here.mkdir()
    (here / "my-text.txt").write_text(
        "".join(f"The {n} quick brown foxes jump over {n * n} lazy dogs.\n" for n in range(400))
    )
    if documents[0].name not in ON_LOCAL_CLOUD:
        for document in documents:
            run_document(document, here, env, server)
        return
    home.mkdir()
    with local_cloud(tmp_path / "cloud") as place:
        try:
            run_document(documents[0], here, {**env, "HOME": str(home), FOLDER_VARIABLE: str(place.path)}, server)
        finally:
            kill_processes_in(here)  # a keeper in the background would ask a cloud that has ended, for ever


def run_document(document: Path, folder: Path, env: dict[str, str], server: int) -> None:
    for number, block in enumerate(blocks(document)):
        commands: list[tuple[int, str]] = []
        if block.language == "python":
            path = folder / (block.file or f"block_{number}.py")
            path.write_text(block.text)
            if block.file is None or not is_used_later(document, block):
                commands = [(block.line, f"python {path.name}")]
        elif block.language in ("toml", "jinja") and block.file:
            (folder / block.file).write_text(block.text)
        elif block.language == "sh":
            commands = block.commands()
        for line, command in commands:
            where = f"{document.name}:{line}: {command}"
            if target := NOT_RUN.match(command):
                assert re.search(rf"^{target[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), where
            elif not command.startswith("tpuswarm demo"):
                process = subprocess.Popen(
                    ["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=env, pass_fds=[server],
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                )  # fmt: skip
                try:
                    out, err = process.communicate(timeout=TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    kill_processes_in(folder)
                    out, err = process.communicate(timeout=TIMEOUT_S)
                shown = f"{where}\nexit {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"
                assert process.returncode == 0 and "Traceback" not in err, shown


def kill_processes_in(folder: Path) -> None:
    """Kill the processes whose current folder this is: forks are in no group or session of bash."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                os.kill(int(process.name), signal.SIGKILL)


def is_used_later(document: Path, block: Block) -> bool:
    """Return whether a later block runs or imports the file that this one shows."""
    name = block.file or ""
    uses = (name, f"from {name.removesuffix('.py')} import")
    later = (item.text for item in blocks(document) if item.line > block.line and item.language in ("sh", "python"))
    return any(use in text for text in later for use in uses)
