"""Connections to one host or many: who is trusted, who is not, and the errors a person reads."""

import asyncio
import json
import subprocess
from dataclasses import replace

import asyncssh
import pytest

from tests.remote.conftest import HOSTS, SLICE, Fleet
from tpuswarm.errors import InputError
from tpuswarm.fleet.hosts import setup
from tpuswarm.remote import connect
from tpuswarm.remote.connect import Connections, fan_out
from tpuswarm.remote.host import HostKeyChanged, HostTimeout, HostUnreachable, KeyRefused
from tpuswarm.remote.known_hosts import KnownHosts


def names(routes, hosts, key=None) -> list:
    async def run():
        async with Connections(key or routes.key) as connections:

            async def one(host):
                return (await (await connections.to(host)).run("echo $TPUSWARM_REHEARSAL_MACHINE")).stdout.strip()

            return await fan_out(hosts, one)

    return asyncio.run(run())


def test_words_for_hosts(routes):
    hosts, away = routes.hosts("all")
    assert [host.label for host in hosts] == HOSTS and away == ()
    assert [name.rsplit("-", 1)[0] for name in names(routes, hosts)] == [name.replace("/", "-") for name in HOSTS]
    assert [host.label for host in routes.hosts("slice")[0]] == HOSTS[1:]
    assert [host.label for host in routes.hosts("v5e/2")[0]] == [f"{SLICE}/2"]
    assert [host.label for host in routes.hosts("v2")[0]] == HOSTS[:1]
    for text, sentence in {
        "v5e/4": "v5e-usc1a-0 has no worker '4': it has 4, v5e-usc1a-0/0 to v5e-usc1a-0/3",
        "v2/x": "v2-usc1f-0 has no worker 'x': it has 1, v2-usc1f-0/0",
        "slise": "there is no machine 'slise'; did you mean slice?",
        "v5e-usc1a-9": "there is no machine 'v5e-usc1a-9'; did you mean v5e-usc1a-0?",
        "0": "'0' may be v2-usc1f-0, v5e-usc1a-0: give more of the name",
    }.items():
        with pytest.raises(InputError) as error:
            routes.hosts(text)
        assert str(error.value) == sentence


def test_command_whose_connection_breaks_has_no_exit_code(machines):
    async def work(connections):
        sleeping = asyncio.create_task(connect.run_shell(connections, machines.hosts[0], "touch ~/asleep; sleep 60"))
        while not (machines[0].home / "asleep").exists():
            await asyncio.sleep(0.02)
        (await connections.to(machines.hosts[0])).abort()
        await sleeping

    with pytest.raises(HostUnreachable, match=r"was lost: the command had not ended yet"):
        machines.run(work)


def test_changed_host_key_is_refused_and_forgotten_as_the_error_says(routes):
    (host,), _ = routes.hosts("v2")
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()
    (error,) = names(routes, [replace(host, keys=(other,))])
    assert isinstance(error, HostKeyChanged)
    assert f"`ssh-keygen -R {host.alias} -f {host.known_hosts}`" in str(error)
    known = host.known_hosts
    known.write_text("".join(f"{line.split()[0]} {other}\n" for line in known.read_text().splitlines()))
    (changed,), _ = routes.hosts("v2")
    assert changed.keys == (other,)
    subprocess.run(["ssh-keygen", "-R", host.alias, "-f", known], capture_output=True, check=True)
    (again,), _ = routes.hosts("v2")
    assert again.keys == host.keys and "v2-usc1f-0" in names(routes, [again])[0]
    known.unlink()


def test_refused_key_is_reported(machines, tmp_path):
    stranger = tmp_path / "stranger"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(stranger)
    stranger.chmod(0o600)
    (error,) = names(None, machines.hosts[:1], stranger)
    assert isinstance(error, KeyRefused) and f"does not take the key {stranger} for user" in str(error)


def test_hung_host_is_reported_and_others_finish(machines):
    async def work():
        accepted = []
        server = await asyncio.start_server(lambda *ends: accepted.append(ends), "127.0.0.1", 0)
        hung = replace(machines.hosts[1], address="127.0.0.1", port=server.sockets[0].getsockname()[1])
        refused = replace(machines.hosts[2], port=1)
        unproxied = replace(machines.hosts[0], proxy="/bin/false")
        well, slow = machines.hosts[0], machines.hosts[2]
        async with Connections(machines.key) as connections:
            await asyncio.gather(connections.to(well), connections.to(slow))
            connections._login_timeout_s = 2.0

            async def one(host):
                command = "sleep 60" if host is slow else "true"
                return (await (await connections.to(host)).run(command)).exit_status

            found = await fan_out([well, hung, refused, slow], one, time_out_s=4.0)
            with pytest.raises(HostUnreachable, match=r"^node-0/0 \(127\.\d+\.1\.1\) cannot be reached: "):
                await Connections(machines.key).to(unproxied)
        server.close()
        return found

    well, hung, refused, slow = asyncio.run(work())
    assert well == 0
    assert isinstance(hung, HostTimeout) and str(hung) == "node-1/0 (127.0.0.1) did not answer within 2 s"
    assert isinstance(refused, HostUnreachable)
    assert "cannot be reached: " in str(refused) and str(refused).endswith("refused")
    assert isinstance(slow, HostTimeout) and str(slow).endswith("was not done within 4 s")


def test_second_computer_makes_its_own_key_and_is_let_in(routes, fleet, tmp_path, monkeypatch):
    theirs, _ = routes.hosts("all")
    monkeypatch.setenv("HOME", str(tmp_path))
    hosts, _ = routes.hosts("all")
    assert routes.key == tmp_path / ".ssh/tpuswarm" and routes.key.stat().st_mode & 0o777 == 0o600

    def errors():
        return [name for name in names(routes, routes.hosts("all")[0]) if isinstance(name, HostUnreachable)]

    assert len(names(routes, hosts)) == 5 and not errors()
    fleet.run("up", "--yes", "--paid")  # by the first computer, which keeps the other one's key
    assert not errors()
    # The next command admits the key on machines that an interrupted command missed.
    admitted = routes.fleet.folder / "admitted.json"
    assert len(json.loads(admitted.read_text())["told"]) == 2
    for machine in routes.snapshot().listing.machines:
        lines = f"nobody:ssh-ed25519 AAAA\n{hosts[0].user}:ssh-ed25519 BBBB"
        routes._cloud.set_metadata(machine, {"ssh-keys": lines})
    admitted.write_text(json.dumps({**json.loads(admitted.read_text()), "told": []}))
    assert not errors()
    for machine in routes.snapshot().listing.machines:  # other people keep their keys
        assert "nobody:" in machine.metadata["ssh-keys"] and "BBBB" not in machine.metadata["ssh-keys"]
    admitted.unlink()
    assert routes.key.read_bytes() != (fleet.folder / ".ssh/tpuswarm").read_bytes() and len(theirs) == 5


def test_second_person_whose_first_command_is_up_is_let_in_and_nobody_is_locked_out(routes, fleet, tmp_path):
    before = [machine.metadata["ssh-keys"].splitlines() for machine in routes.snapshot().listing.machines]
    other = Fleet(tmp_path, fleet.place)
    other.environment["XDG_STATE_HOME"] = fleet.environment["XDG_STATE_HOME"]
    (routes.fleet.folder / "admitted.json").unlink(missing_ok=True)
    other.run("up", "--yes", "--paid", cwd=fleet.folder)
    assert "5/5 ok" in other.run("exec", "all", "--", "true", cwd=fleet.folder)[1]
    assert "5/5 ok" in fleet.run("exec", "all", "--", "true")[1]
    after = [machine.metadata["ssh-keys"].splitlines() for machine in routes.snapshot().listing.machines]
    assert [set(new) > set(old) for old, new in zip(before, after, strict=True)] == [True] * len(after)
    (routes.fleet.folder / "admitted.json").unlink()


def test_new_machines_are_waited_for_until_they_let_us_in(routes, tmp_path, monkeypatch):
    """The cloud calls them ready before they have published their keys and started sshd."""
    routes.known = KnownHosts(tmp_path / "known_hosts")
    attributes, connect, asked, tried = routes._cloud.guest_attributes, Connections._connect, [], []

    async def refuse_first(connections, host):
        tried.append(host.label)
        if len(tried) <= len(set(tried)):
            raise HostUnreachable(host, "cannot be reached: connection refused")
        return await connect(connections, host)

    def publish_late(machine, worker, path):
        asked.append(machine.name)
        return attributes(machine, worker, path) if len(asked) > 8 else {}

    monkeypatch.setattr(setup, "SSH_POLL_INTERVAL_S", 0.05)
    monkeypatch.setattr(routes._cloud, "guest_attributes", publish_late)
    monkeypatch.setattr(Connections, "_connect", refuse_first)
    asyncio.run(setup.wait_for_ssh(routes, timeout_s=0.0))
    with pytest.raises(InputError, match="has not published its SSH host key yet"):
        routes.hosts("all")
    asyncio.run(setup.wait_for_ssh(routes))
    hosts, away = routes.hosts("all")
    assert not away and {host.label for host in hosts} == set(tried) and len(tried) > len(hosts)
