"""`tpuswarm tensorboard`: TensorBoard's own page and answers, of runs here, of a swarm and of a machine together."""

import asyncio
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.remote.machines import machines
from tests.watch.conftest import PROGRAM, free_port
from tests.watch.made import MadeRun
from tpuswarm.cli.tensorboard import _name
from tpuswarm.train.look.board import Board
from tpuswarm.train.run.directory import METRICS, append_rows, read_rows
from tpuswarm.watch.boards import Far, Made, of_run
from tpuswarm.watch.page import lines

TEXT = """
const text = (node) => [...node.childNodes].map((each) =>
  (each.nodeValue || "") + (each.shadowRoot ? text(each.shadowRoot) : "") + text(each)).join(" ");
return text(document.body);
"""


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Scalars by run and tag, read by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

    found = EventMultiplexer().AddRunsFromDirectory(str(folder))
    found.Reload()
    return {
        f"{run} {tag}": [(each.step, each.value) for each in found.Scalars(run, tag)]
        if "scalars" in kinds and tag in kinds["scalars"]
        else [(each.step, each.tensor_proto.float_val[0]) for each in found.Tensors(run, tag)]
        for run, kinds in found.Runs().items()
        for tag in (*kinds["scalars"], *kinds["tensors"])
    }


def test_a_swarm_has_a_curve_for_each_member_and_what_comes_is_added(tmp_path):
    run = MadeRun(tmp_path / "run", 2, 1000)
    run.grow(15)
    made = Made(run.folder, tmp_path / "board")
    asyncio.run(made.update())
    run.grow(10)
    asyncio.run(made.update())
    found = events(tmp_path / "board")
    rows = [row for row in read_rows(run.folder / METRICS) if row.get("member") == "m1" and row["step"] % 10 == 1]
    assert found["m1 loss"] == [(row["step"], pytest.approx(row["loss"])) for row in rows if "loss" in row]
    assert len(found["held out eval_loss"]) == 2


def test_a_swarm_of_many_rows_is_shown_from_its_first_one(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "AT_ONCE", 5000)
    run = MadeRun(tmp_path / "run", 2, 1000)
    run.grow(200)
    asyncio.run(Made(run.folder, tmp_path / "board").update())
    assert [step for step, _ in events(tmp_path / "board")["m1 loss"]] == list(range(1, 201, 10))


def test_curves_and_traces_are_found_by_what_follows_no_link_to_a_folder(tmp_path):
    """As xprof looks for `plugins/profile`, in a plain run and in a swarm's."""
    swarm, plain = MadeRun(tmp_path / "swarm", 2, 1000), tmp_path / "plain"
    swarm.grow(15)
    for board in (plain / "tensorboard", swarm.folder / "tensorboard" / "m1"):
        (board / "plugins" / "profile" / "now").mkdir(parents=True)
        (board / "plugins" / "profile" / "now" / "vm.xplane.pb").touch()
    board = Board(plain / "tensorboard", 0)
    board.write({"step": 1, "loss": 2.0})
    board.close()
    shown = tmp_path / "shown"
    shown.mkdir()
    for source in (of_run(swarm.folder, True, shown / "swarm"), of_run(plain, False, shown / "plain")):
        asyncio.run(source.update())
        asyncio.run(source.update())
    found = {Path(at).relative_to(shown) for at, folders, _ in os.walk(shown) if Path(at).name == "profile"}
    assert found == {Path("plain/plugins/profile"), Path("swarm/m1/plugins/profile")}
    assert all((shown / each / "now" / "vm.xplane.pb").is_file() for each in found)
    assert events(shown)["plain loss"] == [(1, 2.0)]


def test_a_run_is_called_as_its_folder(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert [_name(run, {}) for run in (".", "../mine/", "gs://bucket/runs/far/")] == ["mine", "mine", "far"]


def test_what_a_machine_writes_comes_from_where_it_ended_last(tmp_path):
    with machines(tmp_path, 1) as here:
        host = here.hosts[0]

        async def work() -> None:
            async with here.connections() as connections:

                async def find():
                    return host

                home = Path((await _said(connections, host, "echo $PWD")).strip())
                root = next(each for each in (here.machines[0].root / str(home).lstrip("/"), home) if each.exists())
                there = root / "runs" / "mine" / "tensorboard" / "events"
                there.mkdir(parents=True)
                (there / "events.out").write_bytes(b"a" * 10)
                (root / "runs" / "mine" / "secret").write_bytes(b"no")
                far = Far(connections, find, "runs", tmp_path / "board")
                await far.update()
                copy = tmp_path / "board" / "mine" / "tensorboard" / "events" / "events.out"
                assert copy.read_bytes() == b"a" * 10 and not list((tmp_path / "board").rglob("secret"))
                with (there / "events.out").open("ab") as file:
                    file.write(b"b" * 5)
                await far.update()
                assert copy.read_bytes() == b"a" * 10 + b"b" * 5

        asyncio.run(work())


def test_a_machine_names_no_file_outside_its_copy(tmp_path, monkeypatch):
    outside, board = tmp_path / "tensorboard" / "outside", tmp_path / "board"
    names = (str(outside), "../tensorboard/outside", "mine/tensorboard/inside")

    async def ask(connections, host, line, *about):
        listing = "".join(f"3 {name}\n" for name in names)
        return 0, (listing if "find ." in line else "abc").encode(), b""

    async def find():
        return None

    monkeypatch.setattr("tpuswarm.watch.boards.ask", ask)
    asyncio.run(Far(None, find, "runs", board).update())
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == [board / "mine" / "tensorboard" / "inside"]


async def _said(connections, host, line: str) -> str:
    from tpuswarm.remote.connect import ask

    return (await ask(connections, host, line))[1].decode()


def test_the_loss_of_a_machine_and_of_this_computer_in_a_browser(browser, fleet, finished_run, tmp_path):
    fleet.run("exec", "v2-usc1f-0", "--", "mkdir -p runs")
    home = fleet.user_home("v2-usc1f-0-0")
    there, here = home / "runs" / "far", fleet.folder / "runs" / "near"
    for run in (there, here):
        shutil.copytree(finished_run.run, run, dirs_exist_ok=True)
    port = free_port()
    command = fleet.start("tensorboard", "runs/near", "v2-usc1f-0:runs", "--port", str(port))
    try:
        said = command.stdout.readline()
        assert said.startswith(f"http://127.0.0.1:{port} shows near, v2-usc1f-0-runs"), command.communicate()
        names = {"near", "v2-usc1f-0-runs/far/tensorboard"}
        browser.wait(lambda _: names <= set(_answer(port, "/data/runs")), "both runs")
        tag = "/data/plugin/scalars/scalars?tag=loss&run=v2-usc1f-0-runs/far/tensorboard"
        shown = {step: value for _, step, value in _answer(port, tag)}
        rows = {row["step"]: row["loss"] for row in read_rows(finished_run.run / METRICS) if "loss" in row}
        assert shown == {step: pytest.approx(rows[step]) for step in range(1, 60, 10)}
        browser.open(f"http://127.0.0.1:{port}/#timeseries")
        browser.wait(lambda each: "far" in each.js(TEXT) and "loss" in each.js(TEXT), "the curve of the loss")
    finally:
        command.send_signal(2)
        command.communicate(timeout=60)
    assert command.returncode == 130
    with socket.socket() as gone:
        assert gone.connect_ex(("127.0.0.1", port)) != 0, "TensorBoard ends with its command"


def _answer(port: int, path: str):
    with urlopen(f"http://127.0.0.1:{port}{path}") as answer:
        return json.loads(answer.read())


def test_wrong_words_are_said_in_a_sentence(typed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    append_rows(tmp_path / "x", [])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of this computer is taken" in typed("tensorboard", "--port", str(port))[2]
    free = str(free_port())
    for words, said in ((("nowhere",), "nowhere does not exist"), ((), "there are no runs in ./runs")):
        code, _, err = typed("tensorboard", *words, "--port", free)
        assert code == 2 and said in err and err.count("\n") == 1
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = typed("tensorboard")
    assert code == 2 and "pip install 'tpuswarm[tensorboard]'" in err


def test_the_program_ends_with_one_line_where_a_machine_is_unknown(fleet, tmp_path):
    done = subprocess.run(
        [PROGRAM, "tensorboard", "nobody:runs", "--port", str(free_port())], cwd=fleet.folder, env=fleet.environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2 and "nobody" in done.stderr and done.stderr.count("\n") == 1, (done, sys.path)
