"""`tpuswarm tensorboard`: TensorBoard's own page and answers, of runs here, of a swarm and of a machine."""

import asyncio
import json
import os
import shutil
import signal
import socket
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.hosts import free_port
from tests.processes import finish
from tests.remote.conftest import ONE
from tests.waiting import until
from tests.watch.fake_run import FakeRun
from tpuswarm.cli.look.tensorboard import unique_name
from tpuswarm.train.look.tensorboard_log import TensorBoardLog
from tpuswarm.train.run.directory import METRICS, append_rows, read_rows
from tpuswarm.watch.boards import MachineBoards, SwarmRunBoards, boards_of_run
from tpuswarm.watch.page import json_lines

pytestmark = pytest.mark.long

ZONE = "us-central1-f"
TEXT = """
const text = (node) => [...node.childNodes].map((each) =>
  (each.nodeValue || "") + (each.shadowRoot ? text(each.shadowRoot) : "") + text(each)).join(" ");
return text(document.body);
"""


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    found = EventMultiplexer().AddRunsFromDirectory(str(folder))
    found.Reload()
    return {
        f"{run} {tag}": [(point.step, point.value) for point in found.Scalars(run, tag)]
        for run, kinds in found.Runs().items()
        for tag in kinds["scalars"]
    }


def losses(run: FakeRun) -> list[list[float]]:
    """Return the steps and losses of member 1 that its curve has: every tenth."""
    rows = [row for row in read_rows(run.folder / METRICS) if row.get("member") == "m1" and row["step"] % 10 == 1]
    return [[row["step"], pytest.approx(row["loss"])] for row in rows if "loss" in row]


def test_long_swarm_has_a_curve_for_each_member_from_its_first_row_and_new_rows_are_added(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "MAX_NEW_BYTES", 5000)
    run = FakeRun(tmp_path / "run", 2, 1000)
    run.grow(200)
    made = SwarmRunBoards(run.folder, tmp_path / "board")
    asyncio.run(made.update())
    run.grow(10)
    asyncio.run(made.update())
    found = events(tmp_path / "board")
    assert list(map(list, found["m1 loss"])) == losses(run) and len(losses(run)) == 21
    assert len(found["held out eval_loss"]) == 21


def test_run_is_called_as_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [unique_name(run, {}) for run in (".", f"../{tmp_path.name}/", "gs://b/runs/far/")] == [
        tmp_path.name
    ] * 2 + ["far"]


def test_curves_and_traces_are_found_without_following_links_to_folders(tmp_path):
    swarm, plain = FakeRun(tmp_path / "swarm", 2, 1000), tmp_path / "plain"
    swarm.grow(15)
    for board in (plain / "tensorboard", swarm.folder / "tensorboard" / "m1"):
        (board / "plugins" / "profile" / "now").mkdir(parents=True)
        (board / "plugins" / "profile" / "now" / "vm.xplane.pb").touch()
    board = TensorBoardLog(plain / "tensorboard", 0)
    board.write({"step": 1, "loss": 2.0})
    board.close()
    shown = tmp_path / "shown"
    shown.mkdir()
    for source in (boards_of_run(swarm.folder, True, shown / "swarm"), boards_of_run(plain, False, shown / "plain")):
        asyncio.run(source.update())
        asyncio.run(source.update())
    found = {Path(at).relative_to(shown) for at, folders, _ in os.walk(shown) if Path(at).name == "profile"}
    assert found == {Path("plain/plugins/profile"), Path("swarm/m1/plugins/profile")}
    assert all((shown / folder / "now" / "vm.xplane.pb").is_file() for folder in found)
    assert events(shown)["plain loss"] == [(1, 2.0)]


def test_files_of_a_machine_are_copied_from_where_the_last_copy_ended(machines, tmp_path):
    host, home, board = machines.hosts[0], machines[0].home, tmp_path / "board"
    there = home / "runs" / "mine" / "tensorboard" / "events"
    there.mkdir(parents=True)
    (there / "events.out").write_bytes(b"a" * 10)
    (home / "runs" / "mine" / "secret").touch()
    copy = board / "mine" / "tensorboard" / "events" / "events.out"

    async def work(connections) -> None:
        far = MachineBoards(connections, lambda: asyncio.sleep(0, host), "runs", board)
        await far.update()
        assert copy.read_bytes() == b"a" * 10 and not list(board.rglob("secret"))
        (there / "events.out").write_bytes(b"a" * 10 + b"b" * 5)
        copy.write_bytes(b"c" * 10)
        await far.update()

    machines.run(work)
    assert copy.read_bytes() == b"c" * 10 + b"b" * 5


def test_machine_names_no_file_outside_its_copy(tmp_path, monkeypatch):
    outside, board = tmp_path / "tensorboard" / "outside", tmp_path / "board"
    names = (str(outside), "../tensorboard/outside", "mine/tensorboard/inside")

    async def ask(connections, host, line, *about):
        listing = "".join(f"3 {name}\n" for name in names)
        return 0, (listing if "find ." in line else "abc").encode(), b""

    monkeypatch.setattr("tpuswarm.watch.boards.run_shell", ask)
    asyncio.run(MachineBoards(None, lambda: asyncio.sleep(0), "runs", board).update())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [board / "mine" / "tensorboard" / "inside"]


def test_losses_of_a_machine_and_of_this_computer_are_shown_also_after_an_outage(browser, fleet):
    fleet.exec(ONE, "mkdir -p runs")
    far = fleet.user_home(f"{ONE}-0") / "runs" / "far"
    board = TensorBoardLog(far / "tensorboard", 0)
    board.write({"step": 1, "tokens": 8, "loss": 3.0})
    board.flush()
    near = FakeRun(fleet.folder / "runs" / "near", 2, 1000)
    near.grow(15)
    port = free_port()
    intervals = {
        "tpuswarm.cli.look.tensorboard.POLL_INTERVAL_S": 0.5,
        "tpuswarm.cloud.google.access.RETRY_WINDOW_S": 0.2,
    }
    command = fleet.start("tensorboard", "runs/near", f"{ONE}:runs", "--port", str(port), intervals=intervals)

    def read(path: str):
        with urlopen(f"http://127.0.0.1:{port}/data/{path}") as answer:
            return json.loads(answer.read())

    def points(run: str) -> list[list[float]]:
        if run not in read("runs"):
            return []
        return [point[1:] for point in read(f"plugin/scalars/scalars?tag=loss&run={run}")]

    try:
        line = command.stdout.readline()
        assert line.startswith(f"http://127.0.0.1:{port} shows near, {ONE}-runs"), command.communicate()
        until(lambda: points("near/m1") == losses(near))
        until(lambda: points(f"{ONE}-runs/far/tensorboard") == [[1, 3.0]])
        browser.open(f"http://127.0.0.1:{port}/#timeseries")
        browser.wait(lambda browser: "far" in browser.js(TEXT) and "loss" in browser.js(TEXT), "the curve of the loss")
        with fleet.broken(ZONE, "unreachable"):
            assert "; retrying" in command.stderr.readline()
            board.write({"step": 11, "tokens": 88, "loss": 2.0})
            board.flush()
        until(lambda: points(f"{ONE}-runs/far/tensorboard") == [[1, 3.0], [11, 2.0]])
    finally:
        command.send_signal(signal.SIGINT)
        _, err = finish(command, 130)
        shutil.rmtree(far)
        shutil.rmtree(fleet.folder / "runs")
    assert "Traceback" not in err
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", port)) != 0, "TensorBoard ends with its command"


def test_wrong_words_are_one_sentence(typed, fleet, tmp_path, monkeypatch):
    free = str(free_port())
    monkeypatch.chdir(tmp_path)
    append_rows(tmp_path / "x", [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of this computer is in use" in typed("tensorboard", "--port", str(port))[2]
    for words, sentence in ((("nowhere",), "nowhere does not exist"), ((), "no runs in ./runs")):
        code, _, err = typed("tensorboard", *words, "--port", free)
        assert code == 2 and sentence in err and err.count("\n") == 1
    _, err = fleet.run("tensorboard", "nobody:runs", "--port", free, code=2)
    assert "nobody" in err and err.count("\n") == 1
