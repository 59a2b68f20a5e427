"""Hazards of a compiled program: what makes it slow, or what its compiler refuses, with the recipe's line."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.extend import core
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params

from tpuswarm.train.program.compiled import Compiled
from tpuswarm.train.program.float32 import float32_products
from tpuswarm.train.program.flops import Flops, library_caller
from tpuswarm.train.program.underfilled import underfilled
from tpuswarm.train.user_code import CodeLine, is_recipe_file, recipe_line

Kind = Literal["refused", "evaluation", "float32", "matrix unit", "host transfer", "collective", "unrolled"]

REPEATS = 6
"""Copies of a block from which on a scan pays: compile time grows with each."""
SMALL_SHARE, SMALL_REPEATS = 0.01, 30
"""Of a program's FLOPs in all copies of a product, below which it is so quick to compile that it takes this many."""
SMALL_BYTES = 2**16
"""A collective that moves less is no hazard: norms, means, metrics."""


@dataclass(frozen=True)
class Hazard:
    """One thing to know of a program, in a sentence."""

    kind: Kind
    sentence: str
    place: CodeLine | None
    """Line of the recipe; None where nothing led to one."""

    def __str__(self) -> str:
        return f"{self.sentence} ({self.place})" if self.place else self.sentence


def hazards(compiled: Compiled, batch: int, unit: int) -> list[Hazard]:
    """All hazards of a step that compiled; what is not found is none.

    batch: rows of a step over all devices; unit: side of the matrix unit (`tpuswarm.catalog`).
    """
    text = compiled.step.as_text()  # type: ignore[attr-defined]
    shared = jax.tree.leaves(compiled.program.exchange().get(compiled.state))
    found = [Hazard("matrix unit", str(each), each.place) for each in underfilled(
        compiled.flops, unit, batch // compiled.choice.accumulate, compiled.mesh.size)]  # fmt: skip
    found += [Hazard("float32", str(each), each.place) for each in float32_products(compiled)]
    if compiled.mesh.size == 1:
        found += collectives(text, ())
    elif compiled.choice.shard == "replicate":
        leaves = jax.tree.leaves(compiled.state)
        given = [PARAMETER if any(leaf is each for each in shared) else OTHER for leaf in leaves]
        jaxpr = compiled.jaxpr.jaxpr
        given += [OTHER] * (len(jaxpr.invars) - len(given))
        shapes = {leaf.shape for leaf in shared} | made_of(jaxpr, given)
        found += collectives(text, gradient_sizes(shapes, compiled.mesh.size))
    return [*host_transfers(text), *found, *unrolled(compiled.flops)]


def refusal(error: BaseException, program: ClosedJaxpr) -> Hazard:
    """Why a traced program does not lower or compile, in the compiler's first line; the place is the call it means."""
    message = str(error)
    first = next(iter(message.splitlines()), type(error).__name__)
    sentence = f"the compiler refuses it: {' '.join(first.split())}"
    suspected = re.findall(r"^\s+(\S+?):(\d+)(?::\d+)? \[", message, re.MULTILINE)
    places = [CodeLine(file, int(line)) for file, line in suspected if is_recipe_file(file)]
    named = re.search(r"rule for primitive '(\w+)'", message)
    kernel = re.search("Mosaic|Pallas|space=vmem", message)
    if not places and (named or kernel):
        places = _places(program.jaxpr, named[1] if named else "pallas_call", None)
    return Hazard("refused", sentence, places[0] if places else None)


def _places(jaxpr: Jaxpr, primitive: str, caller: Any) -> list[CodeLine]:
    """Lines of the recipe that lead to a primitive."""
    found: list[CodeLine] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            place = recipe_line(caller or equation.source_info.traceback)
            found += [place] if place else []
        else:
            for body in jaxprs_in_params(equation.params):
                found += _places(body, primitive, library_caller(body, equation, caller))
    return found


def unrolled(flops: Flops) -> list[Hazard]:
    """One block repeated by a Python loop: same stack of calls, same shapes, many times in one program."""
    copies: Counter[Any] = Counter()
    counted: Counter[Any] = Counter()
    places: dict[Any, CodeLine | None] = {}
    for product in flops.products:
        codes, positions = product.trace.raw_frames() if product.trace else ((), ())
        stack = tuple(zip(map(id, codes), positions, strict=True))
        key = (stack, product.scope, product.kind, product.rows, product.contracted, product.columns)
        copies[key] += 1
        counted[key] += product.flops
        places[key] = product.place
    worst: dict[CodeLine | None, int] = {}
    for key, count in copies.items():
        many = REPEATS if counted[key] >= SMALL_SHARE * flops.total else SMALL_REPEATS
        if count >= many and places[key] is not None:
            worst[places[key]] = max(count, worst.get(places[key], 0))
    return [
        Hazard(
            "unrolled",
            f"the same block is repeated {count} times in the program, and each copy adds compile time: stack the "
            "layers' parameters and use jax.lax.scan",
            place,
        )
        for place, count in sorted(worst.items(), key=lambda item: -item[1])[:1]
    ]


def host_transfers(text: str) -> list[Hazard]:
    """Callbacks, prints and feeds: each makes the device wait for its host at every step."""
    frames = _Frames(text)
    found: dict[CodeLine | None, Hazard] = {}
    for line in text.splitlines():
        if "is_host_transfer=true" in line or re.search(r" (infeed|outfeed)\(", line):
            place = frames.place(line)
            what = re.search(r'op_name="([^"]*)"', line)
            name = what[1].rpartition("/")[2] if what else "a transfer"
            sentence = f"{name} moves data between device and host inside the step, and the device waits for it"
            found.setdefault(place, Hazard("host transfer", sentence, place))
    return list(found.values())


def collectives(text: str, expected: Iterable[int]) -> list[Hazard]:
    """Traffic between devices, SMALL_BYTES or more, of arrays with other than the `expected` numbers of elements."""
    frames, allowed = _Frames(text), set(expected)
    found: dict[CodeLine | None, tuple[int, str]] = {}
    for line in text.splitlines():
        match = COLLECTIVE.search(line)
        if match is None:
            continue
        arrays = [(_elements(shape), _bytes(kind)) for kind, shape in ARRAY.findall(match["type"])]
        strange = [count * size for count, size in arrays if count not in allowed or match["op"] == PERMUTE]
        if sum(strange) >= SMALL_BYTES:
            place = frames.place(line)
            found[place] = max(found.get(place, (0, "")), (sum(strange), match["op"]))
    why = "the program is for one device" if not allowed else "weights are replicated and only gradients need summing"
    return [
        Hazard("collective", f"{op} of {size / 2**20:.1f} MiB between devices in every step, although {why}", place)
        for place, (size, op) in sorted(found.items(), key=lambda item: (item[0] is None, -item[1][0]))
    ]


PERMUTE = "collective-permute"
COLLECTIVE = re.compile(
    r"= (?P<type>.+?) (?P<op>all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    r"|ragged-all-to-all)(?:-start)?\("
)
ARRAY = re.compile(r"([a-z]+\d+)\w*\[([\d,]*)\]")


def gradient_sizes(shapes: Iterable[tuple[int, ...]], devices: int) -> set[int]:
    """Numbers of elements in which a gradient is summed: whole, layer by layer, or scattered over devices."""
    found = set()
    for shape in shapes:
        whole = math.prod(shape)
        found |= {whole, whole // shape[0] if shape else 1}
    return found | {size // devices for size in found}


CONSTANT, PARAMETER, OTHER = range(3)
"""What a value is computed from; of several the last in this order."""


def made_of(jaxpr: Jaxpr, given: Sequence[int]) -> set[tuple[int, ...]]:
    """Shapes of all that is computed from parameters alone, such as a kernel in another form: its gradient is summed.

    given: PARAMETER or OTHER for each argument. Broadcasts are left out: they may be of a batch's size.
    """
    kinds = dict(zip(jaxpr.invars, given, strict=True))
    shapes: set[tuple[int, ...]] = set()
    for equation in jaxpr.eqns:
        inputs = [CONSTANT if isinstance(each, core.Literal) else kinds.get(each, CONSTANT) for each in equation.invars]
        for body in jaxprs_in_params(equation.params):
            more = len(inputs) - len(body.invars)  # a branch is not given its index
            if more >= 0:  # a kernel is given its outputs, too
                shapes |= made_of(body, inputs[more:])
        kind = max(inputs, default=CONSTANT)
        if kind == PARAMETER and equation.primitive.name == "broadcast_in_dim":
            kind = OTHER
        kinds |= dict.fromkeys(equation.outvars, kind)
        if kind == PARAMETER:
            shapes |= {getattr(var.aval, "shape", ()) for var in equation.outvars}
    return shapes


def _elements(shape: str) -> int:
    return math.prod(int(size) for size in shape.split(",") if size)


def _bytes(kind: str) -> int:
    return max(1, int(re.sub(r"\D", "", kind)) // 8)


class _Frames:
    """The table of source lines at the head of an HLO text."""

    def __init__(self, text: str):
        self._files = dict(re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.MULTILINE))
        locations = re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)", _section(text, "FileLocations"), re.MULTILINE
        )
        self._locations = {id: CodeLine(self._files.get(file, "?"), int(line)) for id, file, line in locations}
        frames = re.findall(
            r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)", _section(text, "StackFrames"), re.MULTILINE
        )
        self._frames = {int(id): (location, int(parent)) for id, location, parent in frames}

    def place(self, line: str) -> CodeLine | None:
        """The innermost line of a recipe that led to an instruction."""
        match = re.search(r"stack_frame_id=(\d+)", line)
        return next(self._recipe_lines(int(match[1])), None) if match else None

    def _recipe_lines(self, frame: int) -> Iterator[CodeLine]:
        while frame in self._frames:
            location, parent = self._frames[frame]
            place = self._locations[location]
            if is_recipe_file(place.file):
                yield place
            frame = parent - 1 if parent <= frame else 0  # the text counts parents from 1, and has 1 for none


def _section(text: str, name: str) -> str:
    _, _, rest = text.partition(f"\n{name}\n")
    return rest.partition("\n\n")[0]
