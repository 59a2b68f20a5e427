"""Find what makes a compiled program slow, or why the compiler refuses it, with the recipe's line."""

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

MIN_REPEATS = 6
"""Copies of a block that a scan should replace: each adds compile time."""
MIN_SMALL_REPEATS = 30
"""For blocks below SMALL_FLOPS_SHARE, which compile quickly."""
SMALL_FLOPS_SHARE = 0.01
"""Share of the program's FLOPs, over all copies."""
MIN_COLLECTIVE_BYTES = 2**16
"""Smaller ones are norms, means and metrics."""


@dataclass(frozen=True)
class Hazard:
    """One thing to know about a program."""

    kind: Kind
    sentence: str
    place: CodeLine | None
    """Line of the user's recipe, if known."""

    def __str__(self) -> str:
        return f"{self.sentence} ({self.place})" if self.place else self.sentence


def find_hazards(compiled: Compiled, batch: int, unit: int) -> list[Hazard]:
    """Return the hazards of a compiled step.

    batch: rows of a step over all devices; unit: side of the matrix unit (`tpuswarm.catalog`).
    """
    text = compiled.step.as_text()  # type: ignore[attr-defined]
    shared = jax.tree.leaves(compiled.program.exchange().get(compiled.state))
    small = underfilled(compiled.flops, unit, batch // compiled.choice.accumulate, compiled.mesh.size)
    found = [Hazard("matrix unit", str(product), product.place) for product in small]
    found += [Hazard("float32", str(product), product.place) for product in float32_products(compiled)]
    if compiled.mesh.size == 1:
        found += find_collectives(text, ())
    elif compiled.choice.shard == "replicate":
        leaves = jax.tree.leaves(compiled.state)
        kinds = [PARAMETER if any(leaf is parameter for parameter in shared) else OTHER for leaf in leaves]
        jaxpr = compiled.jaxpr.jaxpr
        kinds += [OTHER] * (len(jaxpr.invars) - len(kinds))
        shapes = {leaf.shape for leaf in shared} | shapes_from_parameters(jaxpr, kinds)
        found += find_collectives(text, gradient_sizes(shapes, compiled.mesh.size))
    if compiled.options.loop == "scan":
        found += find_unrolled(compiled.flops)
    return [*find_host_transfers(text), *found]


def explain_refusal(error: BaseException, program: ClosedJaxpr) -> Hazard:
    """Explain why a traced program does not lower or compile, by the compiler's first line, with the call it means."""
    message = str(error)
    first = next(iter(message.splitlines()), type(error).__name__)
    sentence = f"the compiler refuses it: {' '.join(first.split())}"
    lines = re.findall(r"^\s+(\S+?):(\d+)(?::\d+)? \[", message, re.MULTILINE)
    places = [CodeLine(file, int(line)) for file, line in lines if is_recipe_file(file)]
    primitive = re.search(r"rule for primitive '(\w+)'", message)
    kernel = re.search("Mosaic|Pallas|space=vmem", message)
    if not places and (primitive or kernel):
        places = _find_calls(program.jaxpr, primitive[1] if primitive else "pallas_call", None)
    return Hazard("refused", sentence, places[0] if places else None)


def _find_calls(jaxpr: Jaxpr, primitive: str, caller: Any) -> list[CodeLine]:
    """Return the recipe's lines that lead to a primitive."""
    found: list[CodeLine] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            place = recipe_line(caller or equation.source_info.traceback)
            found += [place] if place else []
        else:
            for body in jaxprs_in_params(equation.params):
                found += _find_calls(body, primitive, library_caller(body, equation, caller))
    return found


def find_unrolled(flops: Flops) -> list[Hazard]:
    """Find blocks that a Python loop repeats: products with the same stack and shapes."""
    copies: Counter[Any] = Counter()
    flops_by_key: Counter[Any] = Counter()
    places: dict[Any, CodeLine | None] = {}
    for product in flops.products:
        codes, positions = product.trace.raw_frames() if product.trace else ((), ())
        stack = tuple(zip(map(id, codes), positions, strict=True))
        key = (stack, product.scope, product.kind, product.rows, product.contracted, product.columns)
        copies[key] += 1
        flops_by_key[key] += product.flops
        places[key] = product.place
    worst: dict[CodeLine | None, int] = {}
    for key, count in copies.items():
        limit = MIN_REPEATS if flops_by_key[key] >= SMALL_FLOPS_SHARE * flops.total else MIN_SMALL_REPEATS
        if count >= limit and places[key] is not None:
            worst[places[key]] = max(count, worst.get(places[key], 0))
    return [
        Hazard(
            "unrolled",
            f"one block is repeated {count} times in the program, and each copy adds compile time: stack the "
            "layers' parameters and use jax.lax.scan",
            place,
        )
        for place, count in sorted(worst.items(), key=lambda item: -item[1])[:1]
    ]


def find_host_transfers(text: str) -> list[Hazard]:
    """Callbacks, prints and feeds: each makes the device wait for its host at every step."""
    frames = _Frames(text)
    found: dict[CodeLine | None, Hazard] = {}
    for line in text.splitlines():
        if "is_host_transfer=true" in line or re.search(r" (infeed|outfeed)\(", line):
            place = frames.place(line)
            operation = re.search(r'op_name="([^"]*)"', line)
            name = operation[1].rpartition("/")[2] if operation else "a transfer"
            sentence = f"{name} moves data between device and host inside the step, and the device waits for it"
            found.setdefault(place, Hazard("host transfer", sentence, place))
    return list(found.values())


def find_collectives(text: str, expected: Iterable[int]) -> list[Hazard]:
    """Find large transfers between devices of arrays with other than the `expected` numbers of elements."""
    frames, allowed = _Frames(text), set(expected)
    found: dict[CodeLine | None, tuple[int, str]] = {}
    for line in text.splitlines():
        match = COLLECTIVE.search(line)
        if match is None:
            continue
        arrays = [(_elements(shape), _bytes(kind)) for kind, shape in ARRAY.findall(match["type"])]
        unexpected = [count * size for count, size in arrays if count not in allowed or match["op"] == PERMUTE]
        if sum(unexpected) >= MIN_COLLECTIVE_BYTES:
            place = frames.place(line)
            found[place] = max(found.get(place, (0, "")), (sum(unexpected), match["op"]))
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
    """Return the numbers of elements in which gradients are summed: whole, by layer, or scattered over devices."""
    found = set()
    for shape in shapes:
        whole = math.prod(shape)
        found |= {whole, whole // shape[0] if shape else 1}
    return found | {size // devices for size in found}


CONSTANT, PARAMETER, OTHER = range(3)
"""Origin of a value; several inputs count as the last in this order."""


def shapes_from_parameters(jaxpr: Jaxpr, argument_kinds: Sequence[int]) -> set[tuple[int, ...]]:
    """Return the shapes of values computed from parameters alone, such as reshaped kernels: gradients have them too.

    argument_kinds: PARAMETER or OTHER for each argument. Broadcasts are left out: they may have a batch's size.
    """
    kinds = dict(zip(jaxpr.invars, argument_kinds, strict=True))
    shapes: set[tuple[int, ...]] = set()
    for equation in jaxpr.eqns:
        inputs = [CONSTANT if isinstance(var, core.Literal) else kinds.get(var, CONSTANT) for var in equation.invars]
        for body in jaxprs_in_params(equation.params):
            extra = len(inputs) - len(body.invars)  # the index of a branch; negative for the outputs of a kernel
            if extra >= 0:
                shapes |= shapes_from_parameters(body, inputs[extra:])
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
    """Source lines at the head of an HLO text."""

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
        """Return the innermost recipe line that led to an instruction."""
        match = re.search(r"stack_frame_id=(\d+)", line)
        return next(self._recipe_lines(int(match[1])), None) if match else None

    def _recipe_lines(self, frame: int) -> Iterator[CodeLine]:
        while frame in self._frames:
            location, parent = self._frames[frame]
            place = self._locations[location]
            if is_recipe_file(place.file):
                yield place
            frame = parent - 1 if parent <= frame else 0  # the text counts parents from 1; 1 is none


def _section(text: str, name: str) -> str:
    _, _, rest = text.partition(f"\n{name}\n")
    return rest.partition("\n\n")[0]
