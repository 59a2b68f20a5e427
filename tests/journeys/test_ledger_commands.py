"""`status`, `ledger show`, `ledger verify`, `logs` and `stop`, on folders made without a swarm."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import tomli_w

from tests.swarm.chains import PER_ROW
from tests.swarm.chains import Run as Chain
from tpuswarm.cli.train import logs_and_stop
from tpuswarm.cli.train.ledger import is_one_of
from tpuswarm.swarm.core.summary import Summary, Tokens
from tpuswarm.swarm.storage.ledger import commit_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.views.events import commit_event
from tpuswarm.swarm.views.status import MemberStatus, Progress, compose, write_status
from tpuswarm.train.process import terminal
from tpuswarm.train.process.timestamps import format_timestamp
from tpuswarm.train.run.directory import Run, append_event, append_rows

COMMITS = 9
CONFIG = {
    "recipe": {"name": "toy", "target": "toy", "options": {}},
    "train": {"steps": 1000, "batch": 2, "seed": 0},
    "chosen": {"tokens_per_row": PER_ROW, "devices": 1, "platform": "cpu"},
}


@pytest.fixture
def call(call, monkeypatch):
    monkeypatch.setattr(logs_and_stop, "DISK_POLL_INTERVAL_S", 0.02)
    return call


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """A swarm's run of 9 commits."""
    return Chain(Store(tmp_path_factory.mktemp("grown")), random.Random(4), rule="nesterov").grow(COMMITS)


@pytest.fixture
def chain(call, grown):
    """The same run as runs/a."""
    folder = Path("runs/a")
    shutil.copytree(grown.store.root, folder)
    swarm = {"members": 4, "cycle": 5, "outer": "nesterov", "quantize": "plain"}
    (folder / "config.toml").write_text(tomli_w.dumps({**CONFIG, "swarm": swarm}))
    row = {"step": 1, "tokens": grown.records[-1].tokens, "loss": 1.0, "member": "m0", "version": 0}
    append_rows(folder / "metrics.jsonl", [row])
    return grown


@pytest.fixture
def plain(call):
    folder = Path("runs/plain")
    folder.mkdir(parents=True)
    chosen = {"tokens_per_row": 1, "devices": 1, "device": "cpu"}
    (folder / "config.toml").write_text(tomli_w.dumps(CONFIG | {"chosen": chosen}))
    append_event(folder, "started")
    append_event(folder, "stopped", message="stopped at step 3", step=3)


def show(call, options=""):
    code, out, err = call(f"ledger show runs/a {options}")
    assert (code, err) == (0, "")
    return out


ATTACK = "\x1b]0;owned\x07\x1b[2J\x9b2Jtitle\x7f\r"


def test_control_characters_of_a_run_do_not_reach_the_terminal(call, plain, chain, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    for folder in (Path("runs/a"), Path("runs/plain")):
        config = tomllib.loads((folder / "config.toml").read_text())
        config["recipe"]["name"] = ATTACK
        (folder / "config.toml").write_text(tomli_w.dumps(config))
        append_event(folder, "note", message=ATTACK)
        append_event(folder, "failed", message=ATTACK)
        (folder / "logs").mkdir()
        (folder / "logs" / "m\x1b[2J.log").write_text(f"{ATTACK}\n")
    commands = ["status", "status runs/a", "status runs/plain", "logs runs/a", "logs runs/plain", "ledger show runs/a"]
    shown = [call(command) for command in commands]
    text = "".join(out + err for _, out, err in shown)
    colours = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "title" in text and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", colours)


def test_logs_do_not_follow_links_out_of_the_run(call, plain):
    Path("secret").write_text("secret\n")
    for name in ("m0.log", "logs"):
        link = Path("runs/plain") / name
        link.symlink_to(Path("secret").resolve() if name == "m0.log" else Path("outside").resolve())
        Path("outside").mkdir(exist_ok=True)
        Path("outside/m1.log").write_text("secret\n")
        code, out, err = call("logs runs/plain")
        assert code == 2 and "secret" not in out and "is a link to a file outside the run" in err
        link.unlink()


def test_ledger_shows_the_last_commits(call, chain):
    made = json.loads(show(call, "--json"))["commits"]
    assert [item["version"] for item in made] == list(range(COMMITS + 1))
    verdicts = [[verdict["fate"] for verdict in item["verdicts"]] for item in made]
    assert verdicts == [[decision.fate for decision in record.decisions] for record in chain.records]
    lines = show(call, "-n 3").splitlines()
    assert lines[0].split()[:3] == ["commit", "time", "epoch"] and len(lines) == 4
    for line, record in zip(lines[1:], chain.records[-3:], strict=True):
        assert line.split()[0] == str(record.version) and f"{record.tokens:,}" in line
        for decision in record.decisions:
            name = decision.identity.incarnation.member
            words = (
                f"{name} {decision.weight:.0%} ({decision.tokens:,})"
                if decision.fate == "applied"
                else f"{name} {decision.fate}: "
            )
            assert words in line
    assert len(show(call, "-n 1000").splitlines()) == COMMITS + 2


def test_ledger_is_recomputed_where_payloads_are_left_and_damage_exits_1(call, chain):
    code, out, err = call("ledger verify a")
    assert code == 0 and "reading the records" in err and "recomputing fragment 3 of 3" in err
    assert f"commits 0 to {COMMITS}: hash chain intact" in out and out.splitlines()[-1] == "a is sound"
    changed = [r.version for r in chain.records if any(d.fate == "applied" for d in r.decisions)]
    found = json.loads(call("ledger verify runs/a --json")[1])
    assert found["sound"] and found["newest"] == COMMITS and found["recomputed"] == changed
    assert found["applied"] == chain.records[-1].tokens and found["problems"] == []
    key = next(d.identity for d in chain.records[1].decisions if d.fate == "applied")
    for path in Path("runs/a/payloads").rglob(f"*{key.incarnation.name}*/*"):
        path.unlink()
    path = Path("runs/a") / commit_name(5)
    path.write_bytes(path.read_bytes()[:-3])
    code, out, _ = call("ledger verify runs/a")
    assert code == 1 and re.search(rf"^problem: .*{re.escape(path.name)}", out, re.M) and "runs/a is not sound" in out
    assert re.search(r"^not recomputed: 1\b.*: payloads are gone", out, re.M)
    code, out, err = call("ledger show runs/a")
    assert (code, out) == (1, "") and path.name in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ledger show runs/plain", "runs/plain is a plain run and has no ledger"),
        ("ledger verify plain", "is a plain run and has no ledger"),
        ("ledger show runs/young", "runs/young has no commits yet"),
        ("ledger verify runs/young", "has no commits"),
        ("ledger show runs/a -n 0", "-n, a number of commits, must be at least 1, not 0"),
        ("logs runs/a mO", "runs/a has no process 'mO'; did you mean m0?"),
        ("logs runs/plain m0", "runs/plain has no process 'm0'; none of its processes has logged anything"),
        ("stop runs/plain", "runs/plain is not running (stopped)"),
        ("stop runs/a", "runs/a is not running (killed)"),
        ("status runs/a", "runs/a/status.json is not a swarm status"),
    ],
)
def test_wrong_run_is_one_sentence(call, chain, plain, line, words):
    young = Path("runs/young")
    young.mkdir()
    (young / "config.toml").write_text(Path("runs/a/config.toml").read_text())
    log(0)
    Path("runs/a/status.json").write_text("{")
    code, out, err = call(line)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1 and words in err


def log(member: int, text: str = "") -> None:
    path = Path(f"runs/a/logs/m{member}.log")
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(text)


MEMBERS = (
    MemberStatus("m0", "alive", 11, "ab" * 16, 9, 700, 50.0, 2.0, 1.0, 0),
    MemberStatus("m1", "lost", None, None, None, 0, None, None, None, None),
)


def status(chain, age=0.0):
    tokens = Tokens(900, chain.records[-1].tokens, 8, 16, 876 - chain.records[-1].tokens)
    summary = Summary(COMMITS, 3, False, "grace", tokens, (), 1.0, False)
    alarms, progress = ["m1 is far [away]"], Progress(time.time() - age - 60)
    write_status(Path("runs/a"), compose(summary, MEMBERS, 16_000, alarms, "host:1", {}, time.time() - age, progress))


def test_status_of_a_running_swarm(call, chain, plain):
    status(chain)
    held = Run(Path("runs/a"))
    code, out, err = call("status runs/a")
    assert code == 0 and err == "" and "alarm: m1 is far [away]" in out and "does not respond" not in out
    assert "to add a machine: `tpuswarm join host:1 --token-file runs/a/token`\n" in out
    found = {run["run"]: run for run in json.loads(call("status --json")[1])["runs"]}
    assert found["runs/plain"]["state"] == "stopped" and found["runs/a"] == json.loads(call("status a --json")[1])
    lines = call("status")[1].splitlines()
    steps = chain.records[-1].tokens // (2 * PER_ROW)
    assert lines[1].split()[:6] == ["runs/a", "toy", "running", str(os.getpid()), "now", f"{steps}/1,000"]
    status(chain, age=60.0)
    assert f"process {os.getpid()} does not respond; this status is 60 s old" in call("status runs/a")[1]
    held.close()
    Path("runs/a/status.json").write_text("{")
    code, out, err = call("status")  # the others are still listed
    assert code == 0 and "runs/plain" in out and "left out: runs/a/status.json" in err


def test_logs_merge_all_processes_or_show_one(call, chain):
    folder, began = Path("runs/a"), time.time() - 30
    for number, (kind, facts) in enumerate(
        [
            ("started", {"message": "4 members"}),
            ("joined", {"member": "m0", "incarnation": "ab" * 16, "pid": 7}),
            ("commit", commit_event(chain.records[1])),
            ("lost", {"member": "m0", "incarnation": "ab" * 16, "pid": 7, "message": "killed", "tokens": 1234}),
            ("coordinator", {"name": "coordinator", "message": "it died; restarting it"}),
        ]
    ):
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": began + 2 * number, "event": kind, **facts}) + "\n")
    stamps = [time.strftime("%H:%M:%S", time.localtime(began + after)) for after in (1, 3)]
    log(0, f"{stamps[0]} compiling\n{stamps[1]} failed\nTraceback:\n  a line of it\nhalf a li")
    log(1, f"{stamps[1]} compiled\n")
    for path in folder.glob("logs/*"):
        os.utime(path, (began + 3.5, began + 3.5))
    code, out, err = call("logs runs/a")
    printed = [line[21:].split(maxsplit=1) for line in out.splitlines()]
    assert (code, err) == (0, "") and [source for source, _ in printed] == [
        "run", "m0", "run", "m0", "m0", "m0", "m1", "run", "run", "run",
    ]  # fmt: skip
    texts = [text for _, text in printed]
    assert texts[:6] == [
        "started: 4 members",
        "compiling",
        "m0 joined (abababab, pid 7)",
        "failed",
        "Traceback:",
        "a line of it",
    ]
    assert (
        texts[7].startswith("commit 1: ")
        and "m0 killed; about 1,234 uncommitted tokens lost, commits are safe" in texts[8]
    )
    dates = [time.mktime(time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")) for line in out.splitlines()]
    assert dates == sorted(dates) and abs(dates[0] - began) < 2
    assert [line[21:].split(maxsplit=1)[1] for line in call("logs runs/a m1")[1].splitlines()] == ["compiled"]
    mine = call("logs runs/a m0")[1]
    assert "m0 killed" in mine and "commit 1" not in mine and "compiled" not in mine


def test_logs_of_a_joined_machine_are_its_events(call, chain):
    facts = {"member": "j-tpu", "incarnation": "ab" * 16, "pid": 7}
    append_event(Path("runs/a"), "note", member="j-tpu", message="new machine: j-tpu")
    append_event(Path("runs/a"), "joined", **facts)
    append_event(Path("runs/a"), "lost", **facts, message="killed", tokens=5, own_machine=True)
    append_event(Path("runs/a"), "lost", **facts | {"member": "m0"}, message="killed", tokens=5, own_machine=False)
    log(0, "00:00:00 compiled\n")
    code, out, err = call("logs runs/a j-tpu")
    texts = [line[21:].split(maxsplit=1)[1] for line in out.splitlines()]
    assert code == 0 and "its own log is on its machine" in err and len(texts) == 3
    assert texts[:2] == ["note: new machine: j-tpu", "j-tpu joined (abababab, pid 7)"]
    assert texts[2].endswith("commits are safe; it rejoins when its machine is back")
    code, out, err = call("logs runs/a m0")
    assert (code, err) == (0, "") and "compiled" in out and "5 uncommitted tokens lost, commits are safe\n" in out
    assert "has no process 'j-tqu'; did you mean j-tpu" in call("logs runs/a j-tqu")[2]


def test_logs_over_days_have_dates(call, chain):
    """The date of a line follows from the file's modification time."""
    log(0, "23:00:00 first\n01:00:00 second\n00:30:00 third\n")
    end = time.mktime((2026, 3, 10, 0, 30, 0, 0, 0, -1))
    os.utime("runs/a/logs/m0.log", (end, end))
    days = [line[:16] for line in call("logs runs/a m0")[1].splitlines()]
    assert days == ["2026-03-08 23:00", "2026-03-09 01:00", "2026-03-10 00:30"]


def test_following_logs_ends_with_the_run(call, chain, monkeypatch):
    """Two members write in turns within one second, between two reads."""
    folder, began = Path("runs/a"), time.time() // 1 - 30
    held = Run(folder)
    append_event(folder, "started", message="4 members")
    steps = [range(3), range(3, 6), range(6, 9)]

    def between_reads(seconds):
        for number in steps.pop(0):
            log(number % 2, f"{format_timestamp(began + number / 10)}step {number}\n")
        if not steps:
            append_event(folder, "finished", message="100 steps")
            held.close()

    monkeypatch.setattr(logs_and_stop, "time", SimpleNamespace(sleep=between_reads, monotonic=time.monotonic))
    monkeypatch.setattr(logs_and_stop, "LAST_WORDS_S", 0.0)  # the run's process is this one, and lives on
    code, out, _ = call("logs runs/a -f")
    texts = [line[21:].split(maxsplit=1)[1] for line in out.splitlines()]
    assert code == 0 and texts == ["started: 4 members", *(f"step {n}" for n in range(9)), "finished: 100 steps"]


def test_closed_pipe_ends_logs_quietly(call, chain):
    log(0, "".join(f"00:00:00 line {number}\n" for number in range(50_000)))
    program = Path(sys.executable).with_name("tpuswarm")
    done = subprocess.run(f"{program} logs runs/a | head -1", shell=True, capture_output=True, text=True)
    assert done.stdout.count("\n") == 1 and done.stderr == ""


HOLDER = """
import signal, sys, time
from pathlib import Path
from tpuswarm.train.run.directory import Run
run, signals = Run(Path("runs/a")), []
signal.signal(signal.SIGINT, lambda *_: signals.append(1))
run.write_event("started", message="4 members")
print("ready", flush=True)
while not signals:
    time.sleep(0.01)
run.write_event("note", message="members hand in what they have done")
if sys.argv[1] == "late":
    sys.stdin.readline()
if sys.argv[1] != "killed":
    run.write_event("stopped", message="stopped at commit 9")
"""


@pytest.mark.parametrize("end", ["stopped", "killed", "late"])
def test_stop_waits_for_the_end(call, chain, monkeypatch, end):
    monkeypatch.setattr(logs_and_stop, "STOP_OVERDUE_S", 0.1 if end == "late" else 60.0)
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, end], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"

    def say(text, **about):
        terminal.echo(text, **about)
        if "kill -9" in text:
            process.stdin.close()

    monkeypatch.setattr(logs_and_stop, "echo", say)
    code, out, err = call("stop a")
    assert process.wait(240) == 0 and f"stopping process {process.pid}" in err
    assert "note: members hand in what they have done" in err and "started" not in err
    assert err.count(f"`kill -9 {process.pid}`; nothing committed is lost") == (end == "late")
    if end == "killed":
        assert (code, out) == (1, "") and err.endswith("error: runs/a killed\n")
    else:
        resume = "To resume: the same `tpuswarm train` command with --run runs/a"
        assert (code, out) == (0, f"runs/a: stopped at commit 9. {resume}\n")


def test_run_is_rebuilt_without_a_member(chain, call):
    counted = {d.identity.incarnation.member for record in chain.records for d in record.decisions if d.weight}
    excluded = sorted(counted)[0]
    code, out, _ = call(f"ledger rebuild runs/a --without {excluded} --to runs/b")
    assert code == 0 and "runs/b is sound" in out and f"of {excluded}; to go on: `tpuswarm train --run runs/b`" in out
    assert call("ledger verify runs/b")[0] == 0
    assert excluded in show(call) and f"{excluded} returned: left out" in call("ledger show runs/b")[1].replace(
        "\n", " "
    )
    before = chain.records[-1].tokens
    code, out, _ = call(f"ledger rebuild runs/a --without {excluded} --without {sorted(counted)[1]} --to runs/c --json")
    found = json.loads(out)
    assert code == 0 and found["newest"] == COMMITS and 0 < found["tokens"] <= before
    _, out, _ = call(f"ledger rebuild runs/a {' '.join(f'--without {member}' for member in counted)} --to runs/d")
    assert "nobody else contributed: it is back at its beginning" in out
    assert (Path("runs/b/metrics.jsonl").read_bytes(), Path("runs/b/lock").exists()) == (
        Path("runs/a/metrics.jsonl").read_bytes(), False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "members"),
    [("ada", ["ada-colab", "ada-colab-2"]), ("ada-colab", ["ada-colab"]), ("m1", ["m1"]), ("j-box", ["j-box"]),
     ("", []), ("j", []), ("ad", [])],
)  # fmt: skip
def test_rebuild_leaves_out_a_member_or_all_members_of_a_person(name, members):
    present = ["m1", "m10", "ada-colab", "ada-colab-2", "adam-colab", "j-box", "j-box-2"]
    assert list(filter(is_one_of([name]), present)) == members


def test_rebuild_names_what_is_impossible(chain, call):
    Path("runs/there").mkdir()
    Path("runs/there/file").write_text("")
    for options, reason in [
        ("--without nobody --to runs/b", "nothing would change"),
        ("--without m0 --to runs/there", "already exists"),
    ]:
        code, _, err = call(f"ledger rebuild runs/a {options}")
        assert code == 2 and reason in err and not Path("runs/b").exists()
    for payload in Path("runs/a/payloads").rglob("*.safetensors"):
        payload.unlink()
    member = next(d for r in chain.records for d in r.decisions if d.weight).identity.incarnation.member
    code, _, err = call(f"ledger rebuild runs/a --without {member} --to runs/b")
    assert code == 1 and "--keep-payloads all" in err and not Path("runs/b").exists()
    assert "restore a copy" not in err, "payloads are deleted on purpose"
