"""Connections and the same on many hosts: who is trusted, who is not, and what a person reads of it."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from tpuswarm.cloud.rehearsal.client import ask
from tpuswarm.errors import InputError
from tpuswarm.remote import connect
from tpuswarm.remote.connect import Connections
from tpuswarm.remote.fan_out import fan_out
from tpuswarm.remote.host import HostKeyChanged, KeyRefused, NoWay, Silent

NAMES = ["v2-usc1f-0/0", *(f"v5e-usc1a-0/{worker}" for worker in range(4))]


def said(reach, hosts, command="echo $TPUSWARM_REHEARSAL_MACHINE", key=None):
    """What a command prints on each host, or the error."""

    async def all_of_them():
        async with Connections(key or reach.key) as connections:

            async def one(host):
                return (await (await connections.to(host)).run(command)).stdout.strip()

            return await fan_out(hosts, one)

    return asyncio.run(all_of_them())


def test_where(reach):
    hosts, away = reach.hosts("all")
    assert [each.label for each in hosts] == NAMES and away == ()
    assert [found.rsplit("-", 1)[0] for found in said(reach, hosts)] == [each.replace("/", "-") for each in NAMES]
    assert [each.label for each in reach.hosts("slice")[0]] == NAMES[1:]
    assert [each.label for each in reach.hosts("v5e/2")[0]] == ["v5e-usc1a-0/2"]
    assert [each.label for each in reach.hosts("v2")[0]] == NAMES[:1]
    for text, sentence in {
        "v5e/4": "v5e-usc1a-0 has no worker '4': it has 4, v5e-usc1a-0/0 to v5e-usc1a-0/3",
        "v2/x": "v2-usc1f-0 has no worker 'x': it has 1, v2-usc1f-0/0",
        "slise": "there is no machine 'slise'; did you mean slice?",
        "v5e-usc1a-9": "there is no machine 'v5e-usc1a-9'; did you mean v5e-usc1a-0?",
        "0": "'0' may be v2-usc1f-0, v5e-usc1a-0: give more of the name",
    }.items():
        with pytest.raises(InputError) as error:
            reach.hosts(text)
        assert str(error.value) == sentence


def test_a_connection_is_shared_and_opened_again_when_it_was_lost(reach):
    async def see():
        async with Connections(reach.key) as connections:
            first, second = await asyncio.gather(connections.to(host), connections.to(host))
            assert first is second
            first.abort()
            await first.wait_closed()
            third = await connections.to(host)
            assert third is not first and (await third.run("true")).exit_status == 0
        assert third.is_closed()

    (host,), _ = reach.hosts("v2")
    asyncio.run(see())


def test_a_command_whose_connection_breaks_has_no_exit_code(reach):
    async def see():
        async with Connections(reach.key) as connections:
            sleeping = asyncio.create_task(connect.ask(connections, host, "touch ~/asleep; sleep 60"))
            while (await connect.ask(connections, host, "[ -e ~/asleep ]"))[0]:
                await asyncio.sleep(0.1)
            (await connections.to(host)).abort()
            with pytest.raises(NoWay, match=r"was lost: the command had not ended yet"):
                await sleeping

    (host,), _ = reach.hosts("v2")
    asyncio.run(see())


def test_another_host_key_is_refused_with_the_way_to_accept_it(reach, fleet):
    (host,), _ = reach.hosts("v2")
    other = asyncssh.generate_private_key("ssh-ed25519").export_public_key().decode().strip()
    (error,) = said(reach, [replace(host, keys=(other,))])
    assert isinstance(error, HostKeyChanged)
    assert f"`ssh-keygen -R {host.alias} -f {host.known_hosts}`" in str(error)
    # What the sentence says is what one does.
    known = host.known_hosts
    known.write_text(
        "".join(line.replace(line.split(" ", 1)[1], other) + "\n" for line in known.read_text().splitlines())
    )
    (changed,), _ = reach.hosts("v2")
    assert changed.keys == (other,)
    os.system(f"ssh-keygen -R {host.alias} -f {known} >{os.devnull} 2>&1")
    (again,), _ = reach.hosts("v2")
    assert again.keys == host.keys and "v2-usc1f-0" in said(reach, [again])[0]
    known.unlink()


def test_a_key_that_is_refused_is_said(reach, tmp_path):
    (one, *_), _ = reach.hosts("all")
    stranger = tmp_path / "stranger"
    stranger.touch(0o600)
    stranger.write_bytes(asyncssh.generate_private_key("ssh-ed25519").export_private_key())
    (error,) = said(reach, [one], key=stranger)
    assert isinstance(error, KeyRefused) and f"does not take the key {stranger} for user" in str(error)


def test_a_host_that_hangs_is_named_and_the_others_finish(reach):
    hosts, _ = reach.hosts("all")

    async def see():
        held = []
        server = await asyncio.start_server(lambda *ends: held.append(ends), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        hosts[2] = replace(hosts[2], address="127.0.0.1", port=port)
        hosts[3] = replace(hosts[3], port=1)
        async with Connections(reach.key, answer_s=4.0) as connections:

            async def one(host):
                command = "sleep 60" if host is hosts[4] else "true"
                return (await (await connections.to(host)).run(command)).exit_status

            found = await fan_out(hosts, one, time_out_s=6.0)
        server.close()
        return found

    first, second, hung, refused, slow = asyncio.run(see())
    assert (first, second) == (0, 0)
    assert isinstance(hung, Silent) and str(hung) == "v5e-usc1a-0/1 (127.0.0.1) did not answer within 4 s"
    assert isinstance(refused, NoWay) and "cannot be reached: " in str(refused) and str(refused).endswith("refused")
    assert isinstance(slow, Silent) and str(slow).endswith("was not done within 6 s")


def test_a_proxy_command_leads_there(reach, tmp_path):
    (host,), _ = reach.hosts("v2")
    through = f"/bin/bash -c 'echo %h >{tmp_path}/used; exec 3<>/dev/tcp/%h/%p; cat <&3 & exec cat >&3'"
    assert "v2-usc1f-0" in said(reach, [replace(host, proxy=through)])[0]
    assert (tmp_path / "used").read_text().strip() == host.address


def test_a_machine_that_was_made_again_is_a_new_one(reach, fleet):
    (before,), _ = reach.hosts("v2")
    ask(fleet.place, "preempt", name="v2-usc1f-0", ending="gone")
    fleet.run("up", "--yes", "--paid")
    (after,), _ = reach.hosts("v2")
    assert after.alias != before.alias and after.keys != before.keys
    assert "v2-usc1f-0" in said(reach, [after])[0]
    assert before.alias not in after.known_hosts.read_text()  # what is gone is forgotten


def test_a_second_computer_makes_its_own_key_and_is_let_in(reach, fleet, tmp_path, monkeypatch):
    theirs, _ = reach.hosts("all")
    monkeypatch.setenv("HOME", str(tmp_path))
    hosts, _ = reach.hosts("all")
    assert reach.key == tmp_path / ".ssh/tpuswarm" and reach.key.stat().st_mode & 0o777 == 0o600
    assert len(said(reach, hosts)) == 5 and not [each for each in said(reach, hosts) if isinstance(each, NoWay)]
    monkeypatch.setenv("HOME", str(fleet.folder))
    fleet.run("up", "--yes", "--paid")  # which keeps the other one's key
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not [each for each in said(reach, reach.hosts("all")[0]) if isinstance(each, NoWay)]
    # Machines that were not told, as after Ctrl-C in the middle, are told by the next command.
    admitted = reach.fleet.folder / "admitted.json"
    assert len(json.loads(admitted.read_text())["told"]) == 2
    for each in reach.look().listing.machines:
        reach._cloud.set_metadata(each, {"ssh-keys": "nobody:ssh-ed25519 AAAA"})
    admitted.write_text(json.dumps({**json.loads(admitted.read_text()), "told": []}))
    assert not [each for each in said(reach, reach.hosts("all")[0]) if isinstance(each, NoWay)]
    admitted.unlink()
    assert Path(reach.key).read_bytes() != (fleet.folder / ".ssh/tpuswarm").read_bytes() and len(theirs) == 5
