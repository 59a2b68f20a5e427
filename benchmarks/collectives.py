"""What devices send each other in one run of a compiled program, read from its HLO text."""

import math
import re
from collections import Counter
from dataclasses import dataclass

ARRAY = re.compile(r"([a-z]+\d+)\w*\[([\d,]*)\]")
KINDS = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
COLLECTIVE = re.compile(rf"= (?P<type>.+?) (?P<op>{'|'.join(KINDS)})(?P<start>-start)?\(")
CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")


@dataclass(frozen=True)
class Sent:
    """Of one device, in one run of the program."""

    counts: Counter[str]
    """How often, by kind."""
    bytes: float
    """What a ring makes of it: all-reduce 2 (n-1)/n of its array, the others (n-1)/n, permute all of it."""


def sent(text: str, devices: int) -> Sent:
    """Over all turns of all loops; a loop counts from 0 to the number that its condition compares with."""
    computations, entry = by_name(text)
    times: Counter[str] = Counter()
    _count(computations, entry, 1, times)
    counts: Counter[str] = Counter()
    total = 0.0
    seen: set[tuple[str, ...]] = set()
    for name, lines in computations.items():
        for line in lines if times[name] else ():
            match = COLLECTIVE.search(line)
            if match is None:
                continue
            kind, arrays = match["op"], [_bytes(*array) for array in ARRAY.findall(match["type"])]
            channel = re.search(r"channel_id=(\d+)", line)
            if channel:  # an asynchronous one is written once for each kernel that carries a part of it
                key = (kind, channel[1], re.sub(r"\{[^}]*\}", "", match["type"]))
                if key in seen:
                    continue
                seen.add(key)
            size = max(arrays) if match["start"] and kind != "all-reduce" else sum(arrays)
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                kind = "reduce-scatter"  # a kernel that keeps one part of the sum
            elif kind == "reduce-scatter":
                size *= devices  # the type is that of the part
            counts[kind] += times[name]
            total += times[name] * size * _share(kind, devices)
    return Sent(counts, total)


def _share(kind: str, devices: int) -> float:
    around = (devices - 1) / devices
    return {"all-reduce": 2 * around, "collective-permute": 1.0}.get(kind, around)


def by_name(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the entry."""
    found: dict[str, list[str]] = {}
    entry = name = ""
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = head[2]
            found[name] = []
            entry = name if head[1] else entry
        elif line == "}":
            name = ""
        elif name:
            found[name].append(line)
    return found, entry


def _count(computations: dict[str, list[str]], name: str, runs: int, times: Counter[str]) -> None:
    """Adds up how often each computation under `name` runs, if that runs so often."""
    times[name] += runs
    for line in computations[name]:
        turns = runs
        if " while(" in line:
            condition = re.search(r"condition=%?([\w.\-]+)", line)
            assert condition is not None
            turns *= turns_of(computations, condition[1])
        for called in set(CALLED.findall(line)):
            if called in computations:
                _count(computations, called, turns, times)


def turns_of(computations: dict[str, list[str]], condition: str) -> int:
    """The one whole number that a loop's condition holds."""
    lines = list(computations[condition])
    for line in computations[condition]:
        lines += [inner for name in CALLED.findall(line) for inner in computations.get(name, [])]
    limits = {int(number) for number in re.findall(r"= [su]32\[\]\S* constant\((\d+)\)", "\n".join(lines))}
    if len(limits) != 1:
        raise ValueError(f"the turns of the loop of {condition} are unknown: it compares with {limits or 'nothing'}")
    return limits.pop()


def _bytes(kind: str, shape: str) -> int:
    return math.prod(int(size) for size in shape.split(",") if size) * max(1, int(re.sub(r"\D", "", kind)) // 8)
