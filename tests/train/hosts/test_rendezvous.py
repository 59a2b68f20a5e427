"""One program over two real processes of four virtual devices each."""

import json
import math
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from tests.hosts import SECRET, err, finished, free_port, sentence_after, start_hosts
from tests.train import host
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.data import placing
from tpuswarm.train.hosts import line, rendezvous
from tpuswarm.train.program import mesh

MODULE = "tests.train.host"


@pytest.mark.parametrize("shard", ["replicate", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_hosts_train_as_one_process_with_their_devices(tmp_path, monkeypatch, shard):
    """Up to the order in which gradients are summed: within a process and between processes it is another."""
    started = start_hosts(MODULE, tmp_path, shard=shard, steps=host.STEPS)
    monkeypatch.setattr(mesh, "MIN_SHARDED_BYTES", host.SHARDED_BYTES)
    one = host.train(shard, host.STEPS)
    finished(started, tmp_path)
    zero, other = (json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2))
    assert zero == other, "all hosts have the same bits"
    assert (zero["split"], zero["read"], one["read"]) == (shard == "fsdp", [host.BATCH // 2], [host.BATCH])
    np.testing.assert_allclose(zero["losses"], one["losses"], rtol=1e-5)
    for name, leaf in one["params"].items():
        np.testing.assert_allclose(zero["params"][name], leaf, rtol=1e-4, atol=1e-5)
    assert zero["losses"][-1] < 0.8 * zero["losses"][0]


@pytest.mark.parametrize(
    ("victim", "how", "why"),
    [
        (1, signal.SIGKILL, "connection closed"),
        (0, signal.SIGKILL, "connection closed"),
        pytest.param(1, signal.SIGSTOP, "silent for 15 s", marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, "silent for 15 s", marks=pytest.mark.slow),
    ],
)
def test_a_host_that_dies_ends_the_other_with_one_sentence(tmp_path, victim, how, why):
    """The other is in a step, whose collective would never return."""
    started = start_hosts(MODULE, tmp_path, steps=0)
    said = sentence_after(started, tmp_path, (tmp_path / f"{1 - victim}.step").exists, victim, how)
    assert said == f"host {victim} is gone ({why}), so this host stops too; start all hosts again\n"


def test_no_host_ends_before_what_its_devices_owe_the_others(tmp_path):
    """Else the other waits for them for ever, at the end of its process."""
    finished(start_hosts(MODULE, tmp_path, exchanges=4), tmp_path)


def test_hosts_with_other_data_are_refused_by_name(tmp_path):
    started = start_hosts(MODULE, tmp_path, differ="data")
    finished(started, tmp_path, code=1)
    sentence = "host 1 and host 0 disagree on data (digest of 1 vs digest of 0); all hosts need the same"
    for index in range(2):
        assert err(tmp_path, index).read_text().endswith(f"InputError: {sentence}\n")


def test_a_host_with_another_number_than_its_worker_ends_both_as_wrong_input(tmp_path):
    """JAX's runtime has started by then."""
    finished(start_hosts(MODULE, tmp_path, worker=0), tmp_path, code=2)
    sentence = "host 1 is worker 0 of its TPU slice; number the hosts like the workers"
    assert f"InputError: {sentence}\n" in err(tmp_path, 1).read_text()
    assert err(tmp_path, 0).read_text().startswith(f"host 1 is gone (it ended: {sentence})")


class Came:
    """Another host that has come to host 0, and how it was told to end."""

    def __init__(self, at: tuple[str, int], index: int):
        self.told, self.ended = [], threading.Event()
        self.connection = socket.create_connection(at)
        assert line.authenticate(self.connection, SECRET, index) == 0
        self.line = line.Line(self.connection, self._lost)

    def _lost(self, why: str, status: int) -> None:
        self.told = [why, status]
        self.ended.set()


def test_hosts_that_go_and_doubles_while_the_others_are_awaited(monkeypatch):
    """One that goes is awaited again, a double is refused, and when host 0 goes the others leave with it."""
    lines = []
    monkeypatch.setattr(rendezvous, "Line", lambda *about: lines.append(line.Line(*about)) or lines[-1])
    monkeypatch.setattr(rendezvous, "LOOK", 0.1)
    at = ("127.0.0.1", free_port())
    leave = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        awaited = lambda: not leave.is_set()  # noqa: E731
        zero = pool.submit(rendezvous.initialize, f"{at[0]}:{at[1]}", 3, 0, SECRET, math.inf, awaited)
        try:
            while True:
                try:
                    socket.create_connection(at).close()  # a stranger
                    break
                except ConnectionRefusedError:
                    assert not zero.done(), zero.result()
            one, double = Came(at, 1), Came(at, 1)
            assert double.ended.wait(20)
            assert double.told == ["it ended: it expects hosts 1 to 2, each once, not another host 1", line.TAKEN]
            one.connection.shutdown(socket.SHUT_RDWR)
            assert one.ended.wait(20)
            lines[0].wait(20)  # until host 0 has seen it
            again = Came(at, 1)
            assert not zero.done()
        finally:
            leave.set()
        with pytest.raises(rendezvous.Absent):
            zero.result(20)
        assert again.ended.wait(20) and again.told == ["it ended: it stopped waiting", line.LEFT]


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        return server.accept()[0], far


@pytest.mark.parametrize(("error", "status"), [(InputError, line.WRONG), (RunFailed, line.LOST), (KeyError, line.LOST)])
def test_the_others_are_told_how_host_0_ended(error, status):
    near, far = connected()
    told, ended = [], threading.Event()

    def lost(*how):
        told.extend(how)
        ended.set()

    line.Line(far, lost)
    with pytest.raises(error), rendezvous.Hosts(0, 2, {1: line.Line(near, pytest.fail)}):
        raise error("why")
    assert ended.wait(20) and told[1] == status and "why" in told[0]


@pytest.mark.parametrize(("error", "heard"), [(RuntimeError("Gloo: closed by peer"), True), (InputError("no"), False)])
def test_what_a_collective_throws_waits_for_what_the_lines_say(error, heard):
    """The other host goes half a second after the error: a person is told of that host, not of the collective."""
    here, there = connected()
    said = []
    group = rendezvous.Hosts(1, 2, {0: line.Line(here, lambda why, status: said.append(why))})
    threading.Timer(0.5, there.close).start()
    with pytest.raises(type(error)), group:
        raise error
    assert said == (["connection closed"] if heard else [])


def test_a_host_gives_signs_of_life_until_its_own_farewell(monkeypatch):
    """The other has said its own and waits; in a silence it would take this one for dead."""
    monkeypatch.setattr(line, "BEAT", 0.05)
    near, far = connected()
    far.settimeout(20)
    about = json.dumps({"farewell": None, "status": line.LOST}).encode()
    far.sendall(line.HEAD.pack(len(about), 0) + about)
    this = line.Line(near, lambda why, status: pytest.fail(why))
    assert this.receive() is None
    for _ in range(5):
        assert line.HEAD.unpack(line._exactly(far, line.HEAD.size)) == (0, 0)
    this.farewell()
    said = b"".join(iter(lambda: far.recv(4096), b""))  # up to the end of the connection
    assert about in said


def test_a_secret_has_to_be_known_at_both_ends():
    def both(one, other):
        found = []

        def far():
            try:
                found.append(line.authenticate(ends[1], other, 3))
            except (line.WrongSecret, OSError) as error:
                found.append(type(error))

        ends = socket.socketpair()
        thread = threading.Thread(target=far)
        thread.start()
        try:
            found.insert(0, line.authenticate(ends[0], one, 0))
        except line.WrongSecret as error:
            found.insert(0, type(error))
            ends[0].close()
        thread.join()
        return found

    assert both(b"secret", b"secret") == [3, 0]
    assert both(b"secret", b"other") == [line.WrongSecret, line.WrongSecret]


@pytest.mark.parametrize(
    ("address", "count", "index", "words"),
    [
        ("nowhere", 2, 0, "not 'nowhere'"),
        ("127.0.0.1:84900", 2, 0, "is HOST:PORT, with a port up to 65535"),
        ("127.0.0.1:1", 2, 2, "no host 2 of 2"),
        ("127.0.0.1:1", 2, 1, "host 0 did not answer at 127.0.0.1:1 within 0 s"),
        ("127.0.0.1:0", 3, 0, "hosts 1, 2 did not connect to 127.0.0.1:0 within 0 s; start all 3"),
    ],
)
def test_hosts_that_do_not_come_together(address, count, index, words):
    with pytest.raises(InputError, match=words):
        rendezvous.initialize(address, count, index, b"", 0.3)


def test_on_one_host_arrays_are_placed_and_fetched_as_ever(devices):
    made = mesh.make_mesh(devices)
    sharding = mesh.batch_sharding(made)
    array = np.arange(48, dtype=np.float32).reshape(16, 3)
    placed = placing.place_batch(lambda first, count: {"x": array[first : first + count]}, 16, sharding)["x"]
    assert placed.sharding == sharding == placing.within_host(sharding)
    assert placing.on_every_host([placed])[0] is placed
    assert np.array_equal(placing.to_host({"x": placed})["x"], array)
    assert np.array_equal(placing.place(array, mesh.replicated(made)), array)
    with rendezvous.initialize("127.0.0.1:1", 1, 0, b"") as alone:
        alone.agree({"data": "any"})
        assert (alone.index, alone.count, jax.process_count()) == (0, 1, 1)


def test_a_library_that_ends_the_process_waits_for_the_sentence(tmp_path):
    """gloo does, in a thread of its own, where two devices no longer send each other the same once a host is gone."""
    script = """
import ctypes, threading, time
from tpuswarm.train.hosts.line import end_process, hold_terminate

hold_terminate()
threading.Thread(target=ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"], daemon=True).start()
time.sleep(1)
end_process("host 1 is gone")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (line.LOST, "host 1 is gone\n")
    script = script.replace("hold_terminate()\n", "line.SILENCE = line.BEAT = 0.1\nhold_terminate()\n")
    script = "from tpuswarm.train.hosts import line\n" + script.replace("time.sleep(1)", "time.sleep(60)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGABRT and "terminate called" in done.stderr, "it has only waited"
