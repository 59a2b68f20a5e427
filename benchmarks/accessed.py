"""Bytes of main memory that one run of a program compiled for TPU reads and writes, from its HLO text.

The compiler's own count takes the body of a loop once. Here every turn counts. An operation reads its operands and
writes its results where they lie in main memory, not in the chip's own (`S(1)`); of an array that it only slices, or
updates in place, the slice counts. A kernel counts each of its arrays once, however often it reads them again.
"""

import math
import re
from dataclasses import dataclass

from benchmarks.collectives import KINDS, by_name, turns_of

LINE = re.compile(r"\s*(?:ROOT )?(%[\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)")
ARRAY = re.compile(r"\b(pred|[a-z]+\d+)\w*\[([\d,]*)\](\{[^}]*\})?")
NOTHING = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id", "replica-id",
    "opt-barrier",
)  # fmt: skip
"""Operations that move nothing; what begins asynchronously counts when it begins."""
SLICED = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True)
class _Operation:
    name: str
    kind: str
    size: int
    """Bytes of the results, in main memory."""
    whole: int
    """Bytes of the results, wherever they lie."""
    operands: tuple[str, ...]
    rest: str
    root: bool


def accessed(text: str) -> int:
    """Of one device."""
    lines, entry = by_name(text)
    seen: set[tuple[str, str]] = set()
    parsed = {name: _operations(each) for name, each in lines.items()}

    def run(name: str) -> int:
        total, sizes = 0, {each.name: each.size for each in parsed[name].values()}
        for each in parsed[name].values():
            if each.kind == "while":
                body = _called(each, "body")
                total += turns_of(lines, _called(each, "condition")) * run(body)
            elif each.kind == "call":
                total += run(_called(each, "to_apply"))
            elif each.kind == "conditional":
                branches = re.findall(r"%([\w.\-]+)", each.rest.partition("branch_computations={")[2].partition("}")[0])
                total += max(map(run, branches), default=0)
            elif each.kind not in NOTHING and not each.kind.endswith(("-done", "-update")):
                total += _moved(each, sizes)
        return total

    def _moved(each: _Operation, sizes: dict[str, int]) -> int:
        if each.kind.endswith("-start"):  # its result holds the operands too
            return each.size
        if each.kind in SLICED:
            return 2 * each.size
        if each.kind == "dynamic-update-slice":
            return 2 * sizes.get(each.operands[1], 0)
        if each.kind != "fusion":
            return each.size + sum(sizes.get(name, 0) for name in each.operands)
        inside = parsed[_called(each, "calls")]
        if each.name.startswith("%async-collective-"):
            return _carried(inside)
        read = sum(min(sizes.get(name, 0), _read(inside, number)) for number, name in enumerate(each.operands))
        return read + min(each.size, _written(inside)) + _carried(inside)

    def _carried(inside: dict[str, _Operation]) -> int:
        """By asynchronous collectives: written in every kernel that carries a part of one, it counts in the first."""
        found = {
            (each.kind, channel[1]): each.size + sum(inside[name].size for name in each.operands)
            for each in inside.values()
            if each.kind in KINDS and (channel := re.search(r"channel_id=(\d+)", each.rest))
        }
        total = sum(size for key, size in found.items() if key not in seen)
        seen.update(found)
        return total

    def _read(inside: dict[str, _Operation], number: int) -> int:
        """At most so many bytes of a parameter are read in a fused computation."""
        (name,) = (
            each.name for each in inside.values() if each.kind == "parameter" and each.operands == (str(number),)
        )
        return _used(inside, name)

    def _used(inside: dict[str, _Operation], name: str) -> int:
        total = 0
        for each in inside.values():
            if each.kind == "parameter" or name not in each.operands or each.kind in (*KINDS, "tuple"):
                continue
            if each.kind in SLICED and each.operands[0] == name:
                total += each.whole
            elif each.kind == "dynamic-update-slice" and each.operands[0] == name:
                continue  # in place: the rest of it stays where it is
            elif each.kind == "bitcast":
                total += _used(inside, each.name)
            elif each.kind == "fusion":
                deeper = parsed[_called(each, "calls")]
                total += sum(_read(deeper, at) for at, operand in enumerate(each.operands) if operand == name)
            else:
                return inside[name].whole
        return total

    def _written(inside: dict[str, _Operation]) -> int:
        (root,) = (each for each in inside.values() if each.root)
        ends = [inside[name] for name in root.operands] if root.kind == "tuple" else [root]
        return sum(_result(inside, each) for each in ends)

    def _result(inside: dict[str, _Operation], each: _Operation) -> int:
        if each.kind in ("parameter", *KINDS):
            return 0
        if each.kind == "bitcast" and each.operands[0] in inside:
            return _result(inside, inside[each.operands[0]])
        if each.kind == "dynamic-update-slice":
            return inside[each.operands[1]].whole
        return each.whole

    return run(entry)


def _operations(lines: list[str]) -> dict[str, _Operation]:
    found = {}
    for line in lines:
        if (match := LINE.match(line)) is None:
            continue
        name, kind, what, inner, rest = match.groups()
        arrays = [(_bytes(*array[:2]), "S(" in array[2]) for array in ARRAY.findall(kind)]
        size = sum(size for size, near in arrays if not near)
        operands = (inner.strip(),) if what == "parameter" else tuple(re.findall(r"%[\w.\-]+", inner))
        found[name] = _Operation(
            name, what, size, sum(size for size, _ in arrays), operands, rest, line.lstrip().startswith("ROOT")
        )
    return found


def _called(each: _Operation, role: str) -> str:
    found = re.search(rf"\b{role}=%?([\w.\-]+)", each.rest)
    assert found is not None, each
    return found[1]


def _bytes(kind: str, shape: str) -> int:
    bits = 8 if kind == "pred" else int(re.sub(r"\D", "", kind))
    return math.prod(int(size) for size in shape.split(",") if size) * bits // 8
