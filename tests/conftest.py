"""Every test runs on 8 virtual CPU devices, under strict rank promotion, with caches of this session's own."""

import atexit
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.xla import OLDER_COMPILER

os.environ["JAX_PLATFORMS"] = "cpu"
# Few cores must not look like dead devices: collectives of 8 virtual devices may wait long for a thread.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=120"
    f" --xla_cpu_collective_call_terminate_timeout_seconds=600 {OLDER_COMPILER}"
)
# Short runs need little optimisation: LLVM does less; XLA's program and its memory stay the same.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
# A thousand processes share the compiled modules of tpuswarm.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])  # code that a test writes elsewhere may import the tests
if "TPUSWARM_CACHE" not in os.environ:  # parallel workers inherit the one of the process that starts them
    os.environ["TPUSWARM_CACHE"] = tempfile.mkdtemp(prefix="tpuswarm-tests-")
    atexit.register(shutil.rmtree, os.environ["TPUSWARM_CACHE"], ignore_errors=True)
# One compilation cache for a session, also for tests that set another TPUSWARM_CACHE.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(Path(os.environ["TPUSWARM_CACHE"]) / "xla")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
# JAX does not write an entry atomically: a process that reads it meanwhile, or after a kill, compiles and warns.
os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache entry"

# Each worker has its own local cloud, whose server ends with these tests.
os.environ["TPUSWARM_REHEARSAL"] = f"{os.environ['TPUSWARM_CACHE']}/rehearsal-{os.getpid()}"
os.environ["TPUSWARM_REHEARSAL_OWNER"] = str(os.getpid())

import jax
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, settings

from tests.browser import browser, chromium_of_session  # noqa: F401  # fixtures for all
from tests.runs import Finished, finished_once
from tpuswarm.cli import main
from tpuswarm.train.process.stop import SIGNALS

sys.dont_write_bytecode = True  # these processes leave nothing beside the files that a test makes
jax.config.update("jax_numpy_rank_promotion", "raise")

# Tests set no deadlines: examples may compile.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


ONE_CLOUD = ("google", "rehearsal", "remote")
"""Folders whose tests share local clouds: one worker runs them, as far as it can."""


@pytest.hookimpl(trylast=True)  # after deselection
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run quick files before slow ones, in each of xdist's workers: most behaviours are checked in the first minutes.

    Tests of a local cloud come first, since one worker runs them all. Then, of the quick files, those with many tests,
    which are short; of the slow ones those with few: short tests fill the workers at the end. With `--dist worksteal`
    each worker begins with an equal part of this list.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    groups: dict[tuple[bool, Path], list[pytest.Item]] = {}
    for path, tests in files.items():
        is_slow = bool(tests[0].get_closest_marker("slow"))
        groups.setdefault((is_slow, path.parent if path.parent.name in ONE_CLOUD else path), []).extend(tests)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    parts: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for key in sorted(
        groups, key=lambda key: (key[0], key[1].name not in ONE_CLOUD, len(groups[key]) * (1 if key[0] else -1))
    ):
        min(parts, key=len).extend(groups[key])
    sizes = [(len(items) + number) // workers for number in range(workers)]
    rest = [item for part, size in zip(parts, sizes, strict=True) for item in part[size:]]
    items.clear()
    for part, size in zip(parts, sizes, strict=True):  # else a worker would begin with the last, slow tests of another
        missing = max(size - len(part), 0)
        items += part[:size] + rest[:missing]
        del rest[:missing]


def pytest_collection_finish() -> None:
    """Spare later garbage collections the modules of all tests, which take most of their time."""
    gc.collect()
    gc.freeze()


OURS = ("HF_", "JAX_", "PYTHONPATH", "STORAGE_EMULATOR_", "TPUSWARM_", "WANDB_", "XLA_")
"""Prefixes of variables that change our processes; libraries set others when they are imported."""


@pytest.fixture(autouse=True)
def _leaves_the_environment():
    """Processes of later tests would inherit changed variables."""
    before = dict(os.environ)
    yield
    changed = {name for name, _ in before.items() ^ os.environ.items() if name.startswith(OURS)}
    assert not changed, f"this test leaves {', '.join(sorted(changed))} changed"


@pytest.fixture(autouse=True)
def _leaves_the_signals():
    """A command in this process takes them for good, as it may in its own."""
    before, unraisable = {number: signal.getsignal(number) for number in SIGNALS}, sys.unraisablehook
    yield
    sys.unraisablehook = unraisable
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """Refuse a false clock for all threads: a server of other tests whose timer read it would sleep for ever."""
    true_clock = time.monotonic
    result = yield
    assert time.monotonic is true_clock, "replace `time` in the module that is tested, not time.monotonic"
    return result


@pytest.fixture(autouse=True, scope="module")
def _forgets_what_is_compiled():
    """A worker that kept the programs of all modules would take 4 GiB."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def text_file() -> Path:
    """A small text with a structure that can be learnt; beside the finished runs, which name its path."""
    path = Path(os.environ["TPUSWARM_CACHE"]) / "text.txt"
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            path.write_text(
                "".join(f"line {n}: the quick brown fox jumps over {n * n} lazy dogs.\n" for n in range(400))
            )
    return path


@pytest.fixture(scope="session")
def finished_run(text_file) -> Finished:
    """A small GPT-2, trained on the text by a real process; to look at, not to change."""
    words = ["train", "gpt2-tiny", "--data", str(text_file), "--layers", "1", "--steps", "60", "--lr", "3e-3"]
    return finished_once("plain", words)


@pytest.fixture
def devices():
    """The 8 virtual devices."""
    return jax.devices()


@pytest.fixture
def typed(monkeypatch, capsys):
    """Run a command in this process; return (code, out, err). No command may end with an internal error."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tpuswarm", *words])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert "internal error" not in err, err
        return end.value.code, out, err

    return run


@pytest.fixture
def on_small_disk(tmp_path):
    """Run a script whose argument is a small real file system, in its own mount namespace; return its output."""

    def run(script: str, mebibytes: int = 4) -> list[str]:
        disk, file = tmp_path / "disk", tmp_path / "script.py"
        disk.mkdir()
        file.write_text(script)
        mount = f"mount -t tmpfs -o size={mebibytes}m none {disk} && exec {sys.executable} {file} {disk}"
        done = subprocess.run(["unshare", "-r", "-m", "sh", "-c", mount], capture_output=True, text=True, timeout=240)
        if done.returncode != 0 and ("unshare" in done.stderr or "mount" in done.stderr):
            pytest.skip(f"this machine does not allow mount namespaces: {done.stderr.strip()}")
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
        return done.stdout.splitlines()

    return run
