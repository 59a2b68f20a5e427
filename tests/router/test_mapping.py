"""From the file to the text that nft reads."""

import os
import re
from pathlib import Path

import pytest

from tpuswarm.errors import InputError
from tpuswarm.router.file import RouterFile, Single, make_mapping, read_router
from tpuswarm.router.mapping import Target, merge_ports
from tpuswarm.router.ruleset import ruleset

GOLDEN = Path(__file__).with_name("golden")
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_show_prints_the_golden_ruleset_without_root(typed, monkeypatch):
    """nft reads small.nft, and packets go where it says: test_kernel.py."""
    monkeypatch.setattr(os, "geteuid", lambda: 65534)
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, _ = typed("router", "show", str(GOLDEN / "small.toml"))
    assert (code, out) == (0, (GOLDEN / "small.nft").read_text())


def seed() -> dict[int, Target]:
    """The loops of the shell script that the example replaces."""
    rules = {48000 + x: Target(f"10.48.{x}.2", 8470) for x in range(256)}
    rules |= {49000 + x: Target(f"10.49.{x}.2", 8470) for x in range(256)}
    for y in range(50, 56):
        rules |= {int(f"{y}000") + x: Target(f"10.{y}.0.{x}", 8470) for x in range(256)}
    return rules | {5002: Target(None, 5001), 5003: Target("10.69.128.2", 5001)}


def test_the_example_of_2048_targets_is_the_script():
    _, mapping = read_router(EXAMPLES / "router-seed.toml")
    assert mapping.targets == seed() and mapping.sources == ("10.0.0.0/8",)
    lines = [line.strip() for line in ruleset(mapping).splitlines()]
    assert {line for line in lines if re.fullmatch(r"\d+ : .*", line)} == {
        f"{port} : {to.address} . {to.port}," if to.address else f"{port} : {to.port}," for port, to in seed().items()
    }


def test_ssh_example_maps_32_machines():
    _, mapping = read_router(EXAMPLES / "router-ssh.toml")
    assert mapping.targets == {22000 + i: Target(f"10.0.0.{10 + i}", 22) for i in range(32)}


def test_consecutive_ports_are_merged():
    assert merge_ports([1, 2, 3, 7, 9, 10]) == [range(1, 4), range(7, 8), range(9, 11)]


def test_a_file_is_read_in_one_pass(monkeypatch):
    """Comparing all pairs of tables took 5 s for 2,000 targets."""
    singles = tuple(Single(port=port, to="10.0.0.2:80") for port in range(1, 301))
    file = RouterFile(outside="eth0", inside="eth1", sources=("10.0.0.0/8",), targets=singles)
    calls, numbers = [], Single.numbers
    monkeypatch.setattr(Single, "numbers", lambda self: calls.append(self) or numbers(self))
    assert len(make_mapping(file).targets) == len(calls) == 300


HEAD = 'outside = "eth0"\ninside = "eth1"\nsources = ["10.0.0.0/8"]\n'
ONE = '[[targets]]\nport = 80\nto = "10.0.0.2:80"\n'


def ranges(*tables: tuple[str, str]) -> str:
    return HEAD + "".join(f'[[ranges]]\nports = "{ports}"\nto = "{to}"\n' for ports, to in tables)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ranges(("100-199", "10.0.{i}.2:1"), ("150-249", "10.1.{i}.2:1")), "ranges 2 both have port 150-199"),
        (ranges(("1-2", "10.0.0.2:1"), ("3-4", "10.0.0.2:1"), ("2-4", "10.0.0.2:1")), "ranges 3 both have port 2: "),
        (HEAD + ONE + ONE, "targets 1 and targets 2 both have port 80: a port has one target"),
        (ranges(("80", "10.0.0.3:80")) + ONE, "ranges 1 and targets 1 both have port 80"),
        (ranges(("20-29", "10.0.0.1-10.0.0.9:22")), "line 4: ranges 1: 10.0.0.1-10.0.0.9 is 9 addresses for 20-29"),
        (ranges(("1-3", "10.0.0.1:7-8")), ":7-8 is 2 ports for 1-3, which is 3"),
        (ranges(("48000-48256", "10.48.{i}.2:8470")), "10.48.256.2 is not an IPv4 address (i = 256, from 0 to 256)"),
        (ranges(("80", "10.0.0:80")), "10.0.0 is not an IPv4 address"),
        (ranges(("80", "10.0.0.{j}:80")), "10.0.0.{j} is not an IPv4 address"),
        (ranges(("80", "fe80::1:80")), "a target looks like 10.0.0.2:8470"),
        (ranges(("80", "worker-1:80")), "not an IPv4 address"),
        (ranges(("80-89", "10.0.0.9-10.0.0.0:80")), "an address range goes from low to high"),
        (ranges(("80", "0.0.0.1-200.0.0.0:80")), "3,355,443,200 addresses"),
        (ranges(("80", "127.0.0.1:80")), "127.0.0.1 is the router itself: omit the address, as in :8470"),
        (ranges(("80", "224.0.0.1:80")), "not the address of a single machine"),
        (ranges(("80", "10.0.0.2")), "a target looks like"),
        (ranges(("80", "10.0.0.2:0")), "ports go from 1 to 65535"),
        (ranges(("65530-65536", "10.0.0.2:80")), "ports go from 1 to 65535"),
        (ranges(("90-80", "10.0.0.2:80")), "the lower one first, not 90-80"),
        (ranges(("http", "10.0.0.2:80")), "ports look like 48000-48255 or 48000, not 'http'"),
        (HEAD, "no [[ranges]] or [[targets]]"),
        (HEAD + ONE.replace("80\n", '"80"\n'), "line 5: targets 1.port"),
        (HEAD.replace("10.0.0.0/8", "10.0.0.1/8") + ONE, "line 3: sources 1: a source is an IPv4 network"),
        (HEAD.replace('"10.0.0.0/8"', "") + ONE, "sources"),
        (HEAD.replace("eth0", "eth*") + ONE, "line 1: outside: an interface name looks like eth0"),
        (HEAD.replace("eth0", "eth0 accept") + ONE, "an interface name looks like eth0"),
        (HEAD.replace("inside", "insied") + ONE, "has no key insied; did you mean inside?"),
    ],
)
def test_mistake_in_a_file_is_named(text, words, tmp_path):
    (tmp_path / "router.toml").write_text(text)
    with pytest.raises(InputError) as error:
        read_router(tmp_path / "router.toml")
    assert words in str(error.value) and str(tmp_path / "router.toml") in str(error.value)
    assert "\n" not in str(error.value)
