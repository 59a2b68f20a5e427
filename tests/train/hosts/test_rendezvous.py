"""Hosts that come together to one program, and how each learns of another's end."""

import json
import math
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib.metadata import version
from queue import SimpleQueue

import jax
import numpy as np
import pytest

from tests.hosts import SECRET, connected_sockets, finished, free_port, signal_host, start_hosts
from tests.train import host
from tests.waiting import until
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.train.hosts import control_channel, rendezvous
from tpuswarm.train.hosts.control_channel import ExitStatus
from tpuswarm.train.program import mesh


@pytest.mark.slow
@pytest.mark.parametrize("numbered_by_slice", [False, True])
def test_two_hosts_train_as_one_process_with_their_devices(tmp_path, monkeypatch, numbered_by_slice):
    """Losses and parameters agree up to the order of sums, and both hosts end, however JAX numbers them."""
    shards = ["replicate", "fsdp"]
    started = start_hosts(host.__file__, tmp_path, shards=shards, numbered_by_slice=numbered_by_slice)
    monkeypatch.setattr(mesh, "MIN_SHARDED_BYTES", host.SHARDED_BYTES)
    expected = {shard: host.train(shard, host.STEPS) for shard in shards}
    finished(started, tmp_path)
    (zero, process_0), (other, process_1) = (json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2))
    assert [process_0, process_1] == ([1, 0] if numbered_by_slice else [0, 1])
    assert zero == other, "all hosts have the same bits"
    for shard, one in expected.items():
        two = zero[shard]
        assert (two["split"], two["read"], one["read"]) == (shard == "fsdp", [host.BATCH // 2], [host.BATCH])
        np.testing.assert_allclose(two["losses"], one["losses"], rtol=1e-5)
        for name, leaf in one["params"].items():
            np.testing.assert_allclose(two["params"][name], leaf, rtol=1e-4, atol=1e-5)
        assert two["losses"][-1] < 0.8 * two["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "why"),
    [(signal.SIGKILL, "connection closed"), (signal.SIGSTOP, "silent for 15 s")],
    ids=["dead", "hung"],
)
def test_dead_or_hung_host_ends_the_other_with_one_sentence(tmp_path, number, why):
    """The other is in a step, whose collective would never return. tests/crash kills host 1."""
    started = start_hosts(host.__file__, tmp_path)
    sentence = signal_host(started, tmp_path, (tmp_path / "1.step").exists, 0, number)
    assert sentence == f"host 0 is gone ({why}), so this host stops too; start all hosts again\n"


def watched(connection: socket.socket) -> tuple[control_channel.ControlChannel, SimpleQueue]:
    ends = SimpleQueue()
    return control_channel.ControlChannel(connection, lambda why, status: ends.put((why, status))), ends


def dial(address: tuple[str, int], index: int, host_0) -> socket.socket:
    while not host_0.done():
        with suppress(ConnectionRefusedError):
            connection = socket.create_connection(address)
            assert control_channel.authenticate(connection, SECRET, index) == 0
            return connection
    raise AssertionError(host_0.result())


def test_hosts_that_leave_and_duplicates_while_the_others_are_awaited(monkeypatch):
    channels = []

    def connect(*args):
        channels.append(control_channel.ControlChannel(*args))
        return channels[-1]

    monkeypatch.setattr(rendezvous, "ControlChannel", connect)
    monkeypatch.setattr(rendezvous, "POLL_INTERVAL_S", 0.1)
    address, leave = ("127.0.0.1", free_port()), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        is_awaited, name = lambda: not leave.is_set(), f"127.0.0.1:{address[1]}"
        zero = pool.submit(rendezvous.initialize, name, 3, 0, SECRET, math.inf, is_awaited)
        try:
            connection = dial(address, 1, zero)
            _, one = watched(connection)
            socket.create_connection(address).close()  # a stranger
            _, duplicate = watched(dial(address, 1, zero))
            words = "it ended: it expects hosts 1 to 2, each once, not another host 1"
            assert duplicate.get(timeout=240) == (words, ExitStatus.REFUSED)
            connection.shutdown(socket.SHUT_RDWR)
            one.get(timeout=240)
            channels[0].wait(60)  # until host 0 has seen it
            _, again = watched(dial(address, 1, zero))
            assert not zero.done()
        finally:
            leave.set()
        with pytest.raises(rendezvous.HostsAbsent):
            zero.result(60)
        assert again.get(timeout=240) == ("it ended: it stopped waiting", ExitStatus.LEFT)


def test_host_connects_although_its_attempts_are_shorter_than_a_question_of_host_0(monkeypatch):
    """A busy coordinator answers slowly whether the run continues; each attempt has expired when host 0 accepts it."""
    monkeypatch.setattr(control_channel, "AUTHENTICATION_TIMEOUT_S", 0.2)
    port, end = free_port(), time.monotonic() + 60

    def should_wait() -> bool:
        time.sleep(0.5)
        return True

    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(rendezvous._accept_all, "127.0.0.1", port, 2, SECRET, end, should_wait)
        one = rendezvous._connect("127.0.0.1", port, 1, SECRET, end)[0]
        other = zero.result(60)[1]
    for channel in (one, other):
        channel.farewell()
    for channel in (one, other):
        channel.wait(60)


def test_host_that_reaches_itself_tries_again(monkeypatch):
    """On one machine, without a listener, the kernel may choose the port that a host connects to as the host's own."""
    port = free_port()
    connect = socket.create_connection
    itself = connect(("127.0.0.1", port), source_address=("127.0.0.1", port))
    connections = iter([itself])
    monkeypatch.setattr(socket, "create_connection", lambda *about: next(connections, None) or connect(*about))
    with ThreadPoolExecutor(1) as pool:
        one = pool.submit(rendezvous._connect, "127.0.0.1", port, 1, SECRET, time.monotonic() + 60)
        until(lambda: itself.fileno() == -1)
        other = rendezvous._accept_all("127.0.0.1", port, 2, SECRET, time.monotonic() + 60, lambda: True)[1]
        for channel in (one.result(60)[0], other):
            channel.farewell()


def test_port_of_the_coordinator_is_kept_from_other_programs():
    with rendezvous._reserve_port("127.0.0.1") as reserved, pytest.raises(OSError, match="in use"):
        socket.create_server(reserved.getsockname())


def test_another_version_is_refused_before_jax_starts():
    address = ("127.0.0.1", free_port())
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(rendezvous.initialize, f"127.0.0.1:{address[1]}", 2, 0, SECRET, 60)
        other, _ = watched(dial(address, 1, zero))
        versions = {name: version(name) for name in ("jax", "jaxlib", "numpy")}
        other.send({"facts": {"number of hosts": "2", **versions, "jax": "0.0.1"}})
        refused = f"host 1 and host 0 disagree on jax (0.0.1 vs {version('jax')}); all hosts need the same"
        assert other.receive()[0] == {"refused": refused}
        other.farewell()
        with pytest.raises(InputError, match="jax"):
            zero.result(60)


@pytest.mark.parametrize(
    ("error", "status"),
    [(InputError, ExitStatus.WRONG_INPUT), (RunFailed, ExitStatus.LOST), (KeyError, ExitStatus.LOST)],
)
def test_other_hosts_are_told_how_host_0_ended(error, status):
    near, far = connected_sockets()
    _, ends = watched(far)
    with pytest.raises(error), rendezvous.Hosts(0, 2, {1: control_channel.ControlChannel(near, pytest.fail)}):
        raise error("why")
    why, found = ends.get(timeout=240)
    assert found == status and "why" in why


@pytest.mark.parametrize("error", [RuntimeError("Gloo: closed by peer"), InputError("no")])
def test_error_of_a_collective_waits_for_the_news_that_explains_it(monkeypatch, error):
    monkeypatch.setattr(rendezvous, "HEARTBEAT_INTERVAL_S", 60.0)
    near, far = connected_sockets()
    here, ends = watched(near)
    is_unexpected = isinstance(error, RuntimeError)
    if is_unexpected:
        threading.Timer(0.2, far.close).start()
    with pytest.raises(type(error)), rendezvous.Hosts(1, 2, {0: here}):
        raise error
    assert ends.empty() != is_unexpected
    far.close()


def test_host_sends_heartbeats_until_its_own_farewell(monkeypatch):
    """The other has said its farewell and waits; in a silence it would take this one for dead."""
    monkeypatch.setattr(control_channel, "HEARTBEAT_INTERVAL_S", 0.05)
    near, far = connected_sockets()
    far.settimeout(60)
    farewell = json.dumps({"farewell": None, "status": ExitStatus.LOST}).encode()
    far.sendall(control_channel.SIZES.pack(len(farewell), 0) + farewell)
    this = control_channel.ControlChannel(near, lambda why, status: pytest.fail(why))
    assert this.receive() is None
    for _ in range(5):
        assert control_channel.SIZES.unpack(control_channel._receive_exactly(far, control_channel.SIZES.size)) == (0, 0)
    this.farewell()
    rest = b"".join(iter(lambda: far.recv(4096), b""))  # up to the end of the connection
    assert farewell in rest


@pytest.mark.parametrize(
    ("secret", "found"), [(SECRET, [3, 0]), (b"other", [control_channel.WrongSecret, control_channel.WrongSecret])]
)
def test_secret_has_to_be_known_at_both_ends(secret, found):
    def authenticate(end, secret, index):
        try:
            return control_channel.authenticate(end, secret, index)
        except control_channel.WrongSecret:
            end.close()
            return control_channel.WrongSecret

    ends = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        far = pool.submit(authenticate, ends[1], secret, 3)
        assert [authenticate(ends[0], SECRET, 0), far.result(60)] == found


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
def test_hosts_that_do_not_come_together_are_named(address, count, index, words):
    with pytest.raises(InputError, match=words):
        rendezvous.initialize(address, count, index, b"", 0.1)


def test_host_without_the_secret_is_told_to_share_the_run_directory():
    address = ("127.0.0.1", free_port())
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(rendezvous.initialize, f"127.0.0.1:{address[1]}", 2, 0, SECRET, 5.0)
        while not zero.done():
            with suppress(ConnectionRefusedError):
                socket.create_connection(address).close()
                break
        with pytest.raises(InputError, match=r"host 1 did not connect .* without the secret, .*disk, such as NFS"):
            zero.result(60)


def test_one_host_needs_no_others():
    with rendezvous.initialize("127.0.0.1:1", 1, 0, b"") as alone:
        alone.require_equal({"data": "any"})
        assert (alone.index, alone.count, jax.process_count()) == (0, 1, 1)


@pytest.mark.parametrize("is_in_time", [True, False])
def test_library_that_ends_the_process_waits_for_the_sentence(is_in_time):
    """gloo throws in its own thread once a host is gone."""
    script = f"""
import ctypes, threading
from tpuswarm.train.hosts import control_channel
control_channel.SILENCE_TIMEOUT_S = control_channel.HEARTBEAT_INTERVAL_S = {60 if is_in_time else 0.1}
control_channel.delay_terminate()
library = threading.Thread(target=ctypes.CDLL("libstdc++.so.6")["_ZSt9terminatev"], daemon=True)
library.start()
library.join({0.3 if is_in_time else ""})
control_channel.end_process("host 1 is gone")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    if is_in_time:
        assert (done.returncode, done.stderr) == (ExitStatus.LOST, "host 1 is gone\n")
    else:
        assert done.returncode == -signal.SIGABRT and "terminate called" in done.stderr
