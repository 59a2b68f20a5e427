"""Damage the files of a run between and during commands, then read and resume it.

`python -m tests.damaged_runs SEED --cases COUNT [--swarm]` repeats the cases of the seeds from SEED on. What must
hold: a resumed run gives the parameters and rows of the undisturbed run, or a sentence says what is damaged; no command
ends with an internal error or a traceback; what a run needs no more never ends it.
"""

import argparse
import faulthandler
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.report import Settings, Table

from tests.damage import KINDS, Mounts, damage, move_to_another_place, replace_by_older
from tests.swarm.chaos import Swarm

STEPS = 12
MODEL = (
    "gpt2-tiny", "--data", "text.txt", "--tokenizer", "bytes", "--layers", "1", "--width", "32", "--heads", "2",
    "--context", "16", "--batch", "4",
)  # fmt: skip
PLAIN = (
    "train", *MODEL, "--run", "run", "--devices", "1", "--steps", str(STEPS), "--seed", "1", "--save-every", "3",
    "--keep", "2", "--eval-every", "4", "--keep-best", "eval_loss",
)  # fmt: skip
SWARM_STEPS = 400
SWARM = ("train", *MODEL, "--steps", str(SWARM_STEPS), "--members", "2", "--cycle", "5", "--outer", "nesterov")
SWARM_TOKENS = SWARM_STEPS * 4 * 16
READING = (
    "status", "status run", "status run --json", "logs run", "doctor run", "sample run --tokens 3", "evaluate run",
    "evaluate run --best", "export run exported", "ledger show run", "ledger verify run", "train gpt2-tiny --dry-run",
)  # fmt: skip
PRINT_PROBLEMS = ("doctor", "ledger verify")
"""Commands that exit with 1 if they find something, and print it to stdout."""
OUR_KINDS = ("busy", "read-only", "moved", "older", "older", "other step")
"""Kinds of damage besides those of tests/damage.py."""
DERIVED = ("tensorboard", "pictures", "loss.png", "report.html")
"""Parts of a run that no resume reads."""
NEEDLESS_KINDS = ("gone", "older", "cut", "empty", "noise", "flip", "value", "line")
"""Kinds of damage of these parts after which they can be written."""
EDITS = ("flip", "value", "noise")
SNAPSHOT_COUNT, MAX_EVENTS = 8, 60
SOAK_S, QUICK_S = 600.0, 30.0
COUNTS = ("faults", "commands", "resumed", "refused")
COMMAND_TIMEOUT_S = 300.0
TIMES = ("tokens_per_s", "wait_s", "wall_s")
FILE_EVENTS = {
    "open", "os.chmod", "os.link", "os.listdir", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.scandir",
    "os.truncate", "os.utime",
}  # fmt: skip
OWN_MOUNTS = ("unshare", "-r", "-m")
"""Starts a program in a mount namespace of its own."""
RUN = Path("run")


class Wrong(Exception):
    """A run or command is not as it must be."""


class Fault(NamedTuple):
    """A damage that was done. is_needless: a resume needs nothing of what was damaged."""

    kind: str
    path: Path
    is_needless: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.path}"


class Ended(NamedTuple):
    """The end of a command."""

    line: str
    code: Any
    out: str
    err: str

    def __str__(self) -> str:
        return f"$ tpuswarm {self.line}\n{self.out}{self.err}exit code {self.code}"


class FileEvents:
    """Calls an action before certain file operations of this process in a folder."""

    def __init__(self, folder: Path):
        self._folder = str(folder.absolute())
        self.count = 0
        self._numbers: Collection[int] = ()
        self._action: Callable[[], None] | None = None
        sys.addaudithook(self._see)

    @contextmanager
    def at(self, numbers: Collection[int], action: Callable[[], None]) -> Iterator[None]:
        """Within the block, call the action before the operations with these numbers, counted from 1."""
        self.count, self._numbers, self._action = 0, numbers, action
        try:
            yield
        finally:
            self._action = None

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._action is None or event not in FILE_EVENTS or not isinstance(arguments[0], str | os.PathLike):
            return
        if not os.path.abspath(arguments[0]).startswith(self._folder):  # noqa: PTH100  # Path would be slow
            return
        self.count += 1
        if self.count in self._numbers:
            action, self._action = self._action, None
            action()
            self._action = action


def call(line: str) -> Ended:
    """Run a command in this process."""
    from tpuswarm.cli import main

    streams = [io.TextIOWrapper(io.BytesIO(), write_through=True) for _ in range(2)]
    code: Any = None
    sys.argv = ["tpuswarm", *line.split()]
    faulthandler.dump_traceback_later(COMMAND_TIMEOUT_S, exit=True)
    with redirect_stdout(streams[0]), redirect_stderr(streams[1]):
        try:
            main()
        except SystemExit as end:
            code = end.code
    faulthandler.cancel_dump_traceback_later()
    out, err = (stream.buffer.getvalue().decode() for stream in streams)
    return Ended(line, code, out, err)


class Fuzzer:
    """Damages copies of one run, made in the current folder. Without mounts, nothing is made busy or read-only."""

    def __init__(self, train: Sequence[str], mounts: Mounts | None):
        self._train, self._mounts = " ".join(train), mounts
        self._is_swarm = "--members" in train
        self._events = FileEvents(RUN)
        self._snapshots: list[Path] = []
        if self._is_swarm:
            self._make_swarm()
        else:
            self._make_runs()
        self.counts: Counter[str] = Counter()

    def _make_runs(self) -> None:
        """Train twice: to count the file operations, and to copy the run before some of them, as if killed there."""
        with self._events.at((), lambda: None):
            self._require_success(call(self._train))
        self._operation_count = self._events.count
        self._rows, self._arrays = _rows(), _arrays()[0]
        shutil.rmtree(RUN)
        numbers = {self._operation_count * n // SNAPSHOT_COUNT for n in range(2, SNAPSHOT_COUNT)}
        with self._events.at(numbers, self._take_snapshot):
            self._require_success(call(self._train))
        self._take_snapshot()

    def _make_swarm(self) -> None:
        """Stop a swarm, kill the first process of its next start, and let it finish; copy the run each time."""
        swarm = Swarm(RUN.absolute(), SWARM[1:])
        start = time.monotonic()
        for version, signal_number in ((2, signal.SIGINT), (6, signal.SIGKILL)):
            has_version = partial(_has_version, swarm, version)
            swarm.start()
            swarm.wait(has_version)
            swarm.process.send_signal(signal_number)
            swarm.process.wait(COMMAND_TIMEOUT_S)
            self._take_snapshot()
        self._require_success(self._train_swarm(False))
        self._duration_s = (time.monotonic() - start) / 3
        self._take_snapshot()

    def _train_swarm(self, is_disturbed: bool) -> Ended:
        """Train in processes of its own, and damage a file at a random time."""
        log = Path("run.log")
        log.unlink(missing_ok=True)
        swarm = Swarm(RUN.absolute(), SWARM[1:])
        swarm.start()
        if is_disturbed:
            time.sleep(self._random.uniform(0, self._duration_s))
            self._damage()
        code = swarm.process.wait(COMMAND_TIMEOUT_S)
        return Ended(self._train, code, "", log.read_text())

    @staticmethod
    def _require_success(ended: Ended) -> None:
        if ended.code:
            raise SystemExit(f"the undisturbed run failed\n{ended}")

    def _take_snapshot(self) -> None:
        snapshot = Path("snapshots", str(len(self._snapshots)))
        for _ in range(10):
            shutil.rmtree(snapshot, ignore_errors=True)
            with suppress(shutil.Error):  # a file that another thread removed meanwhile
                shutil.copytree(RUN, snapshot, symlinks=True)
                (snapshot / "lock").write_text("")
                self._snapshots.append(snapshot)
                return

    def check(self, seed: int) -> str:
        """Damage, read and resume a run; return what is wrong, with all that was done, or an empty text."""
        self._random, self._done = Random(seed), list[str]()
        self._faults: list[Fault] = []
        for path in (RUN, Path("elsewhere")):
            shutil.rmtree(path, ignore_errors=True)
        snapshot = self._random.choice(self._snapshots)
        shutil.copytree(snapshot, RUN, symlinks=True)
        self._done.append(f"{snapshot}")
        try:
            for _ in range(self._random.choice([0, 1, 2, 3])):
                self._damage()
            for line in [*self._random.sample(READING, 2), self._train, *self._random.sample(READING, 1)]:
                self._call(line, self._random.random() < 0.4)
            if self._mounts:
                self._mounts.clear()
                self._done.append("nothing is busy or read-only any more")
            self._call(self._train, False)
            self._call(self._random.choice(READING), False)
        except Wrong as wrong:
            return "\n".join([f"seed {seed}: {wrong}", *self._done])
        finally:
            if self._mounts:
                self._mounts.clear()
        return ""

    def _damage(self) -> None:
        """Damage one file or folder of the run."""
        path = RUN
        while path.is_dir() and not path.is_symlink() and (inside := sorted(path.iterdir())):
            if path != RUN and self._random.random() < 0.3:
                break
            path = self._random.choice(inside)
        if path == RUN or path.is_symlink():
            return
        kind = self._random.choice((*KINDS, *OUR_KINDS))
        is_needless = self._is_needless(path, kind)
        relative = path.relative_to(RUN)
        if kind in ("busy", "read-only"):
            if self._mounts is None:
                return
            self._mounts.add(path, is_read_only=kind == "read-only")
        elif kind == "moved":
            with suppress(OSError):  # it is busy
                move_to_another_place(path, Path("elsewhere", str(len(self._faults)), path.name).absolute())
        elif kind in ("older", "other step"):
            others = [snapshot / relative for snapshot in self._snapshots]
            if kind == "other step" and len(relative.parts) > 1:
                others = sorted(RUN.glob(str(Path(relative.parts[0], "*", *relative.parts[2:]))))
                others = [other for other in others if other != path]
            self._random.shuffle(others)
            with suppress(OSError):
                if not replace_by_older(path, others):
                    return
        else:
            with suppress(OSError):
                damage(path, kind, self._random)
        self._faults.append(Fault(kind, relative, is_needless))
        self._done.append(f"damage: {self._faults[-1]}")
        self.counts["faults"] += 1

    def _is_needless(self, path: Path, kind: str) -> bool:
        parts = path.relative_to(RUN).parts
        if parts[0] == "checkpoints" and len(parts) > 1:
            whole = sorted(manifest.parent.name for manifest in RUN.glob("checkpoints/*/manifest.json"))
            return bool(whole) and parts[1].isdigit() and parts[1] < whole[-1]
        return parts[0] in DERIVED and kind in (NEEDLESS_KINDS[:2] if path.is_dir() else NEEDLESS_KINDS)

    def _call(self, line: str, is_disturbed: bool) -> None:
        """Run a command and check how it ends."""
        shutil.rmtree("exported", ignore_errors=True)
        if line == self._train and self._is_swarm:
            ended = self._train_swarm(is_disturbed)
        else:
            most = self._operation_count if line == self._train else MAX_EVENTS
            numbers = {self._random.randrange(1, most)} if is_disturbed else set[int]()
            with self._events.at(numbers, self._damage):
                try:
                    ended = call(line)
                except Exception as error:
                    raise Wrong(f"`{line}` raised {error!r}") from error
        self._done.append(str(ended))
        self.counts["commands"] += 1
        if ended.code not in (0, 1, 2):
            raise Wrong(f"`{line}` exited with {ended.code}")
        for words in ("Traceback", "internal error", "Exception ignored"):
            if words in ended.err + ended.out:
                raise Wrong(f"`{line}` printed {words!r}")
        if ended.code and not (line.startswith(PRINT_PROBLEMS) and ended.code == 1):
            last = (ended.err.splitlines() or [""])[-1]
            if not last.startswith("error: ") or "run" not in last.removeprefix("error: "):
                raise Wrong(f"`{line}` does not say what is damaged")
        if line == self._train:
            self._check_trained(ended)

    def _check_trained(self, ended: Ended) -> None:
        self.counts["resumed" if ended.code == 0 else "refused"] += 1
        if ended.code:
            if all(fault.is_needless for fault in self._faults):
                raise Wrong("the run ended although it needs nothing of what is damaged")
        elif self._is_swarm:
            self._check_swarm()
        else:
            self._check_parameters()
            self._check_rows()

    def _check_swarm(self) -> None:
        """A finished run's ledger has all tokens, or `verify` says what is damaged."""
        verified = call("ledger verify run --json")
        found = json.loads(verified.out) if verified.out else {}
        if found.get("applied") != SWARM_TOKENS and not found.get("problems") and "error: " not in verified.err:
            raise Wrong(f"the ledger has not {SWARM_TOKENS} tokens, and nothing says why\n{verified}")

    def _check_parameters(self) -> None:
        import numpy as np

        arrays, damages = _arrays()
        if arrays is None:
            if not damages:
                raise Wrong(f"it finished without a checkpoint of step {STEPS}")
            return
        assert self._arrays is not None
        for name, array in self._arrays.items():
            if not np.array_equal(arrays[name], array):
                raise Wrong(f"{name} is not that of the undisturbed run")

    def _check_rows(self) -> None:
        from tpuswarm.train.run.listing import missing_rows

        rows, expected = _rows(), {_key(row): row for row in self._rows}
        kinds = {fault.kind for fault in self._faults if fault.path == Path("metrics.jsonl")}
        if kinds & set(EDITS):  # rows have no digests
            return
        keys = [_key(row) for row in rows]
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            raise Wrong(f"metrics.jsonl has {twice[0]} twice")
        for row in rows:
            if expected.get(_key(row)) != row:
                raise Wrong(f"metrics.jsonl has {row}, and not {expected.get(_key(row))}")
        missing = expected.keys() - keys
        if kinds:  # steps are numbered, and evaluations are not
            missing = {key for key in missing if key[1] == "update"}
        if missing and not missing_rows(RUN):
            raise Wrong(f"nothing says that metrics.jsonl has no {sorted(missing)}")


def _has_version(swarm: Swarm, version: int) -> bool:
    return (swarm.status().get("version") or 0) >= version


def _key(row: dict[str, Any]) -> tuple[int, str]:
    return row["step"], "update" if "loss" in row else "evaluation"


def _rows() -> list[dict[str, Any]]:
    from tpuswarm.train.run.directory import read_rows

    rows = read_rows(RUN / "metrics.jsonl")
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def _arrays() -> tuple[dict[str, Any] | None, list[str]]:
    """Return the arrays of the last step's checkpoint, None if it is not whole, and what is damaged."""
    from tpuswarm.train.run.checkpoint import newest_intact, read_arrays

    saved, damages = newest_intact(RUN / "checkpoints")
    return (read_arrays(saved) if saved and saved.step == STEPS else None), damages


def fuzz(first_seed: int, cases: int, seconds: float, train: Sequence[str], mounts: Mounts | None) -> dict[str, Any]:
    """Check cases until their number or the time is reached; print what is wrong, and return the counts."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # where nothing waits for a disk
    with tempfile.TemporaryDirectory(prefix="damaged-runs-", dir=in_memory) as folder:
        os.chdir(folder)
        os.environ |= {"TPUSWARM_CACHE": f"{folder}/cache", "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache/xla"}
        Path("text.txt").write_text("".join(f"line {n}: the fox jumps over {n * n} dogs.\n" for n in range(200)))
        fuzzer = Fuzzer(train, mounts)
        end = time.monotonic() + seconds
        wrong = []
        seed = first_seed
        while seed < first_seed + cases and time.monotonic() < end:
            if found := fuzzer.check(seed):
                wrong.append(seed)
                print(f"{found}\n", file=sys.stderr, flush=True)
            seed += 1
        os.chdir("/")
    return {"seeds": [first_seed, seed - 1], "wrong": wrong, **fuzzer.counts}


def run(settings: Settings) -> Table:
    """Check both kinds of runs in processes of their own."""
    seconds, rows = QUICK_S if settings.quick else SOAK_S, []
    first_seed = random.SystemRandom().randrange(10**6)
    for name, options in (("plain run", []), ("swarm of 2", ["--swarm"])):
        command = [sys.executable, "-m", "tests.damaged_runs", str(first_seed), "--cases", "1000000"]
        done = subprocess.run([*command, "--seconds", str(seconds), *options], stdout=subprocess.PIPE, text=True)
        found = json.loads(done.stdout or "{}")
        seeds = "{} to {}".format(*found["seeds"]) if found else f"exit code {done.returncode}"
        wrong = ", ".join(map(str, found.get("wrong", []))) or "none"
        rows.append((name, seeds, *(str(found.get(kind, 0)) for kind in COUNTS), wrong))
    notes = ["a wrong case again: `python -m tests.damaged_runs SEED`, for a swarm with `--swarm`"]
    return Table("Damaged files of runs", ("run", "seeds", *COUNTS, "wrong seeds"), rows, notes)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.damaged_runs", description=__doc__)
    parser.add_argument("seed", type=int, metavar="SEED", help="the first seed")
    parser.add_argument("--cases", type=int, default=1, metavar="COUNT", help="default: 1")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no case later; default: 3600")
    parser.add_argument("--swarm", action="store_true", help="a swarm of two processes instead of a plain run")
    parser.add_argument("--mounts", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.mounts and _may_mount():
        again = [sys.executable, "-m", "tests.damaged_runs", *sys.argv[1:], "--mounts"]
        os.execvp("unshare", [*OWN_MOUNTS, *again])
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    mounts = Mounts() if arguments.mounts else None
    train = SWARM if arguments.swarm else PLAIN
    counts = fuzz(arguments.seed, arguments.cases, arguments.seconds, train, mounts)
    print(json.dumps(counts))
    sys.exit(1 if counts["wrong"] else 0)


def _may_mount() -> bool:
    return subprocess.run([*OWN_MOUNTS, "true"], capture_output=True).returncode == 0


if __name__ == "__main__":
    main()
