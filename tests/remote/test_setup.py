"""Set-up of machines: steps done, repeated, changed, failed and hung, and where secrets are."""

import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.waiting import until
from tpuswarm.errors import InputError
from tpuswarm.remote.connect import run_shell
from tpuswarm.remote.copy import upload
from tpuswarm.remote.host import Host
from tpuswarm.remote.paths import in_environment
from tpuswarm.remote.setup import step
from tpuswarm.remote.setup.machine_steps import Machine, steps
from tpuswarm.remote.setup.python import bundle_path
from tpuswarm.remote.setup.run import set_up
from tpuswarm.remote.setup.table import Setup, gather_secrets

pytestmark = pytest.mark.slow
WHOLE = {
    "python": "3.12",
    "apt": ("htop", "tmux"),
    "pip": ("numpy==2.1.0", "nobodys-package"),
    "env": {"GREETING": 'it\'s a "good" $day'},
    "secrets": ("HF_TOKEN",),
    "timezone": "Asia/Tokyo",
    "run": ({"name": "clone", "do": "echo $GREETING >> cloned", "check": "test -e cloned"},),
    "swap_gb": 1,
    "nofile": 4096,
    "nfs": {"server": "head"},
    "data_disk": "/mnt/data",
}
ALL = ["timezone", "nofile", "swap", "data-disk", "apt", "python", "packages", "environment", "secrets"]
WHEEL = "tpuswarm-0.1.0+0123456789ab-py3-none-any.whl"
CHANGES = [
    ({"nofile": 8192, "timezone": "Europe/Berlin"}, ["timezone", "nofile"]),
    ({"swap_gb": 2}, ["swap"]),
    ({"data_disk": "/mnt/other"}, ["data-disk"]),
    ({"apt": ("htop", "zsh")}, ["apt"]),
    ({"python": "3.13"}, ["python", "packages"]),
    ({"pip": ("numpy==2.2.0",)}, ["packages"]),
    ({"env": {"GREETING": "bye"}}, ["environment"]),
    ({"run": ({"name": "clone", "do": "true"},)}, ["run-clone"]),
    ({"nfs": {"server": "head", "mount": "/mnt/other"}}, ["nfs"]),
]
"""One after the other, and the steps that each repeats."""


def table(**changes) -> Setup:
    return Setup.model_validate(WHOLE | changes)


@pytest.fixture
def apply(machines):
    """Set the machines up, the first as NFS server; return steps done and errors by label, and the outcome."""
    for machine in machines:
        (machine.root / "etc/disks").write_text("/dev/sdb\n")

    def run(wanted, secrets=None, only=None, report=None, **options):
        server = machines[0]
        clients = tuple(host.address for host in machines.hosts[1:])
        planned = [
            Machine(machine.host, machine is server, None if machine is server else server.host.address, True, clients)
            for machine in machines
        ]
        chosen = planned if only is None else [planned[number] for number in only]
        plan = {machine.host: steps(wanted, machine, secrets or {"HF_TOKEN": "hf_s3cret"}, WHEEL) for machine in chosen}

        outcome = machines.run(
            lambda connections: set_up(connections, plan, report or (lambda *about: None), **options)
        )
        return (
            {host.label: done for host, done in outcome.done.items()},
            {host.label: str(error) for host, error in outcome.failed.items()},
            outcome,
        )

    return run


def sh(machines, number: int, command: str) -> str:
    code, out, err = machines.run(lambda connections: run_shell(connections, machines.hosts[number], command))
    assert code == 0, err
    return out.decode().strip()


def one_step(name: str, do: str, **more: str) -> Setup:
    return Setup.model_validate({"run": ({"name": name, "do": do, **more},)})


def test_all_steps_run_once(machines, apply):
    before = state_of_this_computer()
    done, failed, outcome = apply(table())
    assert not failed
    python = f"python there is this computer's {platform.python_version()}, for 3.12, with the packages it has"
    assert outcome.notes == [f"3 hosts: rehearsed: {python}; nobodys-package is not among them"]
    assert done["node-0/0"] == [*ALL, "nfs-server", "nfs-clients", "run-clone"]
    assert done["node-1/0"] == [*ALL, "nfs", "run-clone"]
    assert outcome.versions == "nobodys-package\nnumpy==2.1.0\n# Python 3.12\n"
    for machine in machines:
        root = machine.root
        assert (root / "etc/timezone").read_text() == "Asia/Tokyo\n"
        assert "hard nofile 4096" in (root / "etc/security/limits.d/tpuswarm.conf").read_text()
        assert "/swapfile none swap sw 0 0\n" in (root / "etc/fstab").read_text()
        assert "UUID=uuid-of-sdb /mnt/data ext4 defaults,nofail 0 2\n" in (root / "etc/fstab").read_text()
        assert {"htop", "tmux"} <= set((root / "var/lib/dpkg/installed").read_text().split())
        assert "/dev/sdb on /mnt/data" in (root / "run/mounts").read_text()
        assert (machine.home / "cloned").read_text() == 'it\'s a "good" $day\n'
    address, *clients = (host.address for host in machines.hosts)
    exports = (machines[0].root / "etc/exports.d/tpuswarm.exports").read_text().splitlines()
    assert exports == [f"/srv/shared {client}(rw,async,no_subtree_check)" for client in clients]
    assert f"{address}:/srv/shared on /mnt/shared" in (machines[2].root / "run/mounts").read_text()
    out = sh(machines, 1, in_environment('which python; echo "$GREETING $HF_TOKEN"'))
    assert out == f'{machines[1].home}/.tpuswarm/venv/bin/python\nit\'s a "good" $day hf_s3cret'
    assert sh(machines, 1, in_environment("python -c 'import sys, numpy; print(sys.executable)'")) == sys.executable

    done, failed, outcome = apply(table())
    assert not failed and set(map(tuple, done.values())) == {()}
    assert state_of_this_computer() == before, "stand-ins keep it from being changed"

    # After a reboot: no mounts and swap, but stamps.
    for name in ("mounts", "swaps"):
        (machines[1].root / "run" / name).unlink()
    done, _, _ = apply(table())
    assert done == {"node-0/0": [], "node-1/0": ["swap", "data-disk", "nfs"], "node-2/0": []}


def state_of_this_computer():
    return (
        [Path(path).exists() for path in ("/swapfile", "/mnt/shared", "/etc/exports.d/tpuswarm.exports")],
        Path("/proc/mounts").read_text(), Path("/proc/swaps").read_text(), Path("/etc/fstab").stat().st_mtime_ns,
    )  # fmt: skip


def test_only_what_changed_runs_again(machines, apply):
    apply(table(), only=[2])
    changed = {}
    for change, expected in CHANGES:
        changed |= change
        done, failed, _ = apply(table(**changed), only=[2])
        assert not failed, failed
        assert done["node-2/0"] == expected, change
    done, _, _ = apply(table(**changed), secrets={"HF_TOKEN": "another"}, only=[2])
    secrets = machines[2].home / ".tpuswarm/secrets"
    assert done["node-2/0"] == ["secrets"] and "another" in secrets.read_text()
    apply(table(**changed, secrets=()), only=[2])
    assert not secrets.exists()
    done, _, _ = apply(table(**changed), only=[2])
    assert done["node-2/0"] == ["environment", "secrets"] and "hf_s3cret" in secrets.read_text()


STEPS = (*ALL, "nfs", "run-clone")


@pytest.mark.parametrize("step", ["timezone", "packages", "run-clone"])
def test_failed_step_is_named_and_repeated_with_those_after_it(machines, apply, step):
    log = machines[1].home / ".tpuswarm/setup" / f"{step}.log"
    log.mkdir(parents=True)  # its log cannot be written
    done, failed, _ = apply(table(), only=[1])
    assert not done and failed["node-1/0"].startswith(f"node-1/0: {step}: ")
    assert "the same command resumes" in failed["node-1/0"]
    log.rmdir()
    done, failed, _ = apply(table(), only=[1])
    assert not failed and done == {"node-1/0": [*STEPS[STEPS.index(step) :]]}


def test_apts_lock_is_waited_for_and_its_holder_is_named(machines, apply):
    lock = machines[0].root / "var/lib/dpkg/lock-frontend"
    lock.parent.mkdir(parents=True)
    lock.write_text("1234\n")

    def unlock(host, step: str, text: str) -> None:
        if text == "apt is busy there, waiting: held by process 1234 (unattended-upgr)":
            lock.unlink()

    done, failed, _ = apply(Setup.model_validate({"apt": ["htop"]}), only=[0], report=unlock)
    assert not failed and "apt" in done["node-0/0"] and not lock.exists()


def test_broken_repository_is_reported_and_an_interrupted_installation_is_ended(machines, apply):
    root = machines[0].root
    for file in ("etc/apt/broken-repository", "var/lib/dpkg/interrupted"):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    done, failed, outcome = apply(Setup.model_validate({"apt": ["htop"]}), only=[0])
    assert not failed and "apt" in done["node-0/0"]
    assert (root / "var/lib/dpkg/installed").read_text() == "htop\n"
    assert any("apt-get update failed: E: The repository 'https://example.org" in note for note in outcome.notes)


def test_shell_without_a_terminal_has_the_environment_although_its_bashrc_ends_early(machines, apply):
    home = machines[0].home
    bashrc = home / ".bashrc"
    bashrc.write_text("case $- in *i*) ;; *) return ;; esac\nexport MINE=1\n")
    bashrc.chmod(0o600)
    for greeting in ("hello", "bye"):
        _, failed, _ = apply(Setup.model_validate({"env": {"GREETING": greeting}}), only=[0])
        assert not failed
        assert sh(machines, 0, '. ~/.bashrc; echo "$GREETING $(command -v python)"') == (
            f"{greeting} {home}/.tpuswarm/venv/bin/python"
        )
    _, *rest = bashrc.read_text().splitlines()
    assert rest == ["case $- in *i*) ;; *) return ;; esac", "export MINE=1"]
    assert bashrc.stat().st_mode & 0o777 == 0o600


def steps_on(pool: str, table: Setup) -> dict[str, step.Step]:
    host = Host("node/0", "127.0.0.1", 22, "me", "node", (), Path("known"))
    return {step.id: step for step in steps(table, Machine(host, pool=pool), {}, "")}


@pytest.mark.parametrize(("pool", "size"), [("head", 100), ("small", 20), ("none", 0)])
def test_swap_has_its_size_on_each_pool(pool, size):
    found = steps_on(pool, Setup(swap_gb={"head": 100, "all": 20, "none": 0}))
    assert "swap" not in found if size == 0 else f"fallocate -l {size}GB /swapfile" in found["swap"].do


def test_pool_gets_its_own_additions_alone():
    table = Setup.model_validate({
        "apt": ["htop"], "env": {"A": "1", "B": "1"}, "run": [{"name": "one", "do": "true"}],
        "on": {"head": {
            "apt": ["iperf3"], "env": {"B": "2"}, "nofile": 9999, "run": [{"name": "two", "do": "true"}]
        }},
    })  # fmt: skip
    head, small = steps_on("head", table), steps_on("small", table)
    assert head.keys() - small.keys() == {"nofile", "run-two"} and not small.keys() - head.keys()
    assert "htop iperf3" in head["apt"].do and "iperf3" not in small["apt"].do
    assert [str(found["environment"]).count("export B=2") for found in (head, small)] == [1, 0]
    assert head["packages"] == small["packages"]
    with pytest.raises(ValueError, match="two steps in run have the name one"):
        Setup.model_validate({"run": [{"name": "one", "do": ""}], "on": {"head": {"run": [{"name": "one", "do": ""}]}}})


@pytest.mark.parametrize(("shift", "direction"), [("+3000", "ahead of"), ("-3000", "behind")])
def test_clock_that_is_off_is_reported(machines, apply, tmp_path, shift, direction):
    bin_ = tmp_path / "cloud/bin/date"
    bin_.write_text(f'#!/bin/bash\n[[ $TPUSWARM_ROOT != {machines[1].root} ]] && exec /bin/date "$@"\n'
                    f'echo $(/bin/date +%s.%N) {shift} | awk \'{{printf "%.3f\\n", $1 + $2}}\'\n')  # fmt: skip
    bin_.chmod(0o755)
    _, failed, outcome = apply(Setup())
    (note,) = (note for note in outcome.notes if "clock" in note)
    skew_s = re.search(rf"^node-1/0: its clock is (\d+) s {direction} ", note)
    assert not failed and 2_500 < int(skew_s[1]) <= 3_000  # less the time that the question took


def test_full_disk_is_reported_with_the_ways_out(machines, apply):
    full = "echo 'tar: data: Cannot write: No space left on device' >&2; exit 2"
    _, failed, _ = apply(one_step("data", full), only=[0])
    assert "node-0/0: run-data: its disk is full" in failed["node-0/0"] and "disk_gib" in failed["node-0/0"]


def test_set_up_continues_after_a_lost_connection(machines, apply):
    begun = machines[1].home / "begun"
    wanted = one_step("slow", "touch begun; until [ -e go ]; do sleep 0.05; done; echo ran >> runs")
    for number in (0, 2):
        (machines[number].home / "go").touch()

    def cut() -> None:
        until(begun.exists)
        machines.disconnect(1)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(cut)
        done, failed, _ = apply(wanted)
    assert failed.keys() == {"node-1/0"} and len(done) == 2
    (machines[1].home / "go").touch()
    done, failed, _ = apply(wanted)
    assert not failed and (machines[1].home / "runs").read_text() == "ran\n", "it went on there, and ran once"


def test_hung_step_is_ended_on_its_machine_with_its_children(machines, apply, monkeypatch):
    """Whoever began it may be gone, and it holds set-up's lock there."""
    assert "seq 50" in step.WITHIN
    monkeypatch.setattr(step, "WITHIN", step.WITHIN.replace("seq 50", "seq 2"))  # before they are killed
    stubborn = "(trap '' TERM; while :; do sleep 0.1; done) & echo $! >stubborn; echo waits for its server; sleep 4321"
    apply(Setup(), only=[0])  # or an earlier step may be the one that takes long
    _, failed, _ = apply(one_step("hangs", stubborn), only=[0], timeout_s=6.0)
    assert "node-0/0: run-hangs: not done after 0.1 minutes; ended with all its programs" in failed["node-0/0"]
    command = Path("/proc") / (machines[0].home / "stubborn").read_text().strip() / "cmdline"
    assert not command.exists() or not command.read_bytes()  # a zombie at most
    sh(machines, 0, "flock -n ~/.tpuswarm/setup/lock true")
    assert "waits for its server" in (machines[0].home / ".tpuswarm/setup/run-hangs.log").read_text()
    done, _, _ = apply(one_step("hangs", "true"), only=[0])
    assert done == {"node-0/0": ["run-hangs"]}


def test_step_may_leave_a_program_running(machines, apply):
    serves = "nohup sleep 4321 >/dev/null 2>&1 </dev/null & echo $! >server"
    done, _, _ = apply(one_step("serves", serves), only=[0])
    assert done["node-0/0"][-1] == "run-serves"
    command = Path("/proc") / (machines[0].home / "server").read_text().strip() / "cmdline"
    assert until(lambda: b"sleep\x004321" in command.read_bytes())  # empty while it is being executed


def test_shell_that_prints_as_it_starts_is_in_no_version(machines, apply):
    for machine in machines[1:]:
        (machine.root / "etc/chatty-shell").touch()
    _, failed, outcome = apply(table())
    assert not failed and outcome.versions == "nobodys-package\nnumpy==2.1.0\n# Python 3.12\n"


def test_hung_check_is_ended_and_named(machines, apply, monkeypatch):
    once = one_step("mount", "true", check="[ ! -e hang ] || sleep 4321")
    _, failed, _ = apply(once, only=[0])
    assert not failed
    for module in ("run", "step"):
        monkeypatch.setattr(f"tpuswarm.remote.setup.{module}.CHECKS_TIMEOUT_S", 1.0)
    (machines[0].home / "hang").touch()
    _, failed, _ = apply(once, only=[0])
    assert failed["node-0/0"] == "node-0/0: run-mount: its check did not end within 1 s"


def test_all_machines_get_the_versions_of_the_first(machines, apply):
    wanted = Setup.model_validate({"pip": ["numpy"]})
    _, _, outcome = apply(wanted, only=[0])
    _, _, later = apply(wanted, only=[1], versions=outcome.versions)
    given = (machines[1].home / ".tpuswarm/setup/packages.given").read_text()
    assert given == outcome.versions == later.versions
    (machines[1].home / ".tpuswarm/setup/versions").write_text("numpy==1.0\n# Python 3.12\n")
    _, failed, _ = apply(wanted)
    assert "the packages of node-1/0 differ from the fleet's (numpy==1.0 there, numpy elsewhere)" in failed["node-1/0"]


def test_uv_and_a_python_are_sent_where_nothing_can_be_downloaded(machines, apply, tmp_path):
    stand_ins = tmp_path / "cloud/bin"
    uv = (stand_ins / "uv").read_bytes()
    (stand_ins / "uv").unlink()
    (stand_ins / "curl").write_text("#!/bin/bash\necho 'curl: (6) Could not resolve host' >&2; exit 6\n")
    (stand_ins / "curl").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "python").mkdir()
    (tmp_path / "bin/uv").write_bytes(uv)
    (tmp_path / "bin/uv").chmod(0o755)
    subprocess.run(["tar", "-cf", "python.tar", "./bin", "./python"], check=True, cwd=tmp_path)

    async def send(connections, host, step):
        await upload(connections, host, tmp_path / "python.tar", bundle_path("3.12"))
        return "uv and Python"

    wanted, reports = Setup.model_validate({"pip": ["numpy"]}), []
    _, failed, _ = apply(wanted, only=[0])
    assert "curl: (6) Could not resolve host" in failed["node-0/0"]
    assert not [path for path in machines[0].home.iterdir() if not path.name.startswith(".")], "no file is left"
    done, failed, _ = apply(wanted, only=[0], send=send, report=lambda host, *about: reports.append(about))
    assert not failed and "packages" in done["node-0/0"]
    assert ("python", "uv and Python sent") in reports


def test_tpuswarm_of_this_computer_is_sent_for_it_is_in_no_index(machines, apply, tmp_path):
    (tmp_path / WHEEL).write_text("a wheel")

    async def send(connections, host, step):
        await upload(connections, host, tmp_path / WHEEL, f".tpuswarm/wheels/{WHEEL}")
        return WHEEL

    wanted, reports = Setup.model_validate({"pip": ["numpy==2.1.0", "tpuswarm[gcloud, tpu]"]}), []
    done, failed, outcome = apply(wanted, send=send, report=lambda host, *about: reports.append(about))
    assert not failed and reports.count(("packages", f"{WHEEL} sent")) == 3
    assert outcome.versions == "numpy==2.1.0\n# Python 3.12\n", "the same on machines of other users"
    done, failed, _ = apply(wanted, send=send)
    assert not failed and set(map(tuple, done.values())) == {()}
    _, failed, _ = apply(Setup.model_validate({"pip": ["tpuswarm==99"]}), send=send, only=[0])
    assert "no version of tpuswarm==99 was found" in failed["node-0/0"]


def test_secrets_are_in_no_log_or_command_line_and_only_their_owner_reads_them(machines, apply):
    watch = "while sleep 0.01; do cat /proc/[0-9]*/cmdline 2>/dev/null; done"
    seen = subprocess.Popen(["bash", "-c", f"timeout 20 bash -c '{watch}'"], stdout=subprocess.PIPE)
    _, failed, _ = apply(table(), secrets={"HF_TOKEN": "hf_s3" + "cret_value"})
    seen.terminate()
    out, _ = seen.communicate()
    assert not failed and b"hf_s3" + b"cret_value" not in out
    for machine in machines:
        (with_it,) = [path for path in machine.root.rglob("*") if path.is_file() and b"cret_value" in path.read_bytes()]
        assert with_it == machine.home / ".tpuswarm/secrets" and with_it.stat().st_mode & 0o077 == 0


def test_secrets_come_from_the_environment_or_an_earlier_one_and_missing_ones_are_named(tmp_path):
    file = tmp_path / "state/secrets.json"
    with pytest.raises(InputError, match=r"^A, B are not set in this shell.*`export A=…`"):
        gather_secrets(file, ["A", "B"], {})
    assert not file.exists()
    assert gather_secrets(file, ["A", "B"], {"A": "1", "B": "2", "C": "3"}) == {"A": "1", "B": "2"}
    assert file.stat().st_mode & 0o077 == 0
    assert gather_secrets(file, ["A", "B"], {"B": "3"}) == {"A": "1", "B": "3"}
    assert gather_secrets(file, ["A"], {}) == {"A": "1"}
    with pytest.raises(InputError, match=r"^D is not set in this shell"):
        gather_secrets(file, ["A", "D"], {})
