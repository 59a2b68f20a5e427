"""Compute the least time of a GPU's kernels from their HLO: FLOPs and bytes over the card's rates.

A GPU runs kernels one after another. Each reads its operands and writes its results once, from and to memory. Matrix
products, convolutions and cuDNN's attention have FLOPs here; other kernels only bytes.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

BYTES = {
    "f64": 8, "s64": 8, "u64": 8, "c64": 8, "f32": 4, "s32": 4, "u32": 4, "bf16": 2, "f16": 2, "s16": 2, "u16": 2,
    "s8": 1, "u8": 1, "pred": 1,
}  # fmt: skip
ARRAY = re.compile(r"\b(" + "|".join(BYTES) + r")\[([\d,]*)\]")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
NO_KERNEL = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "async-done", "async-update", "copy-done",
}  # fmt: skip
SLICES = {"slice", "dynamic-slice", "gather"}
ATTENTION_PRODUCTS = {"__cudnn$fmhaSoftmaxBackward": 5, "__cudnn$fmhaSoftmax": 2}
"""Products of cuDNN's attention, recomputed scores included; a causal mask hides half of each."""


class LeastTime(NamedTuple):
    """Seconds that kernels need at least: those limited by FLOPs, and those limited by memory."""

    compute: float
    memory: float


@dataclass(frozen=True)
class Instruction:
    name: str
    is_root: bool
    type: str
    op: str
    operands: tuple[str, ...]
    line: str

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern in the instruction's line; empty without a match."""
        match = re.search(pattern, self.line)
        return match[1] if match else ""


def least_time(text: str, flops_per_s: Mapping[str, float], bytes_per_s: float) -> LeastTime:
    """Return the least time of a program's kernels.

    text: its optimized HLO; flops_per_s: by dtype of a product's operands, the highest for others. A loop's body counts
    as often as it runs, once if that is unknown; a condition counts its fastest branch.
    """
    computations = _parse(text)

    def of_computation(name: str) -> LeastTime:
        body, compute, memory = computations[name], 0.0, 0.0
        for instruction in body.values():
            time = of_instruction(instruction, body)
            compute, memory = compute + time.compute, memory + time.memory
        return LeastTime(compute, memory)

    def of_instruction(instruction: Instruction, body: Mapping[str, Instruction]) -> LeastTime:
        if instruction.op in NO_KERNEL:
            return LeastTime(0.0, 0.0)
        if instruction.op == "while":
            turns = int(instruction.attribute(r'"known_trip_count":\{"n":"(\d+)"') or 1)
            once = of_computation(instruction.attribute(r"body=%?([\w.\-]+)"))
            return LeastTime(turns * once.compute, turns * once.memory)
        if instruction.op == "conditional":
            names = instruction.attribute(r"branch_computations=\{([^}]*)\}").split(", ")
            if not any(names):
                names = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", instruction.line)
            return min((of_computation(name.lstrip("%")) for name in names), key=sum)
        if instruction.op in ("call", "async-start"):
            return of_computation(instruction.attribute(r"(?:to_apply|calls)=%?([\w.\-]+)"))
        seconds_of_flops = 0.0
        for product, operand_type in _products(instruction, body, computations):
            dtype = ARRAY.findall(operand_type)[0][0]
            seconds_of_flops += product / flops_per_s.get(dtype, max(flops_per_s.values()))
        seconds_of_bytes = _moved_bytes(instruction, body, computations) / bytes_per_s
        if seconds_of_flops > seconds_of_bytes:
            return LeastTime(seconds_of_flops, 0.0)
        return LeastTime(0.0, seconds_of_bytes)

    return of_computation("ENTRY")


def _parse(text: str) -> dict[str, dict[str, Instruction]]:
    """Return the instructions of each computation by name; the program's own is ENTRY."""
    found: dict[str, dict[str, Instruction]] = {}
    body: dict[str, Instruction] = {}
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            body = found["ENTRY" if head[1] else head[2]] = {}
        elif match := INSTRUCTION.match(line):
            root, name, type_, op, rest = match.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
            body[name] = Instruction(name, bool(root), type_, op, operands, line)
    return found


Computations = Mapping[str, Mapping[str, Instruction]]


def _size(type_: str) -> int:
    """Return the bytes of all arrays in a type."""
    return sum(BYTES[dtype] * _elements(dims) for dtype, dims in ARRAY.findall(type_))


def _elements(dims: str) -> int:
    return math.prod(map(int, filter(None, dims.split(","))))


def _shape(type_: str) -> list[int]:
    """Return the shape of a type's first array."""
    return [int(size) for size in ARRAY.findall(type_)[0][1].split(",") if size]


def _moved_bytes(instruction: Instruction, body: Mapping[str, Instruction], computations: Computations) -> int:
    operands = [body[name].type for name in instruction.operands if name in body]
    if instruction.op == "fusion":
        fused = computations[instruction.attribute(r"calls=%?([\w.\-]+)")]
        return _read_bytes(fused, operands) + _written_bytes(fused)
    result = instruction.type
    if instruction.op == "custom-call":
        result = re.sub(r"\b[su]8\[\d*\]", "", result)  # a library's work space
    if instruction.op in SLICES:
        return 2 * _size(result)
    if instruction.op == "dynamic-update-slice":  # in place
        return 2 * _size(operands[1])
    return _size(result) + sum(map(_size, operands))


def _read_bytes(fused: Mapping[str, Instruction], operands: Sequence[str]) -> int:
    """Return how many bytes a fusion reads.

    An operand that it only slices counts with its slices, and one that it updates in place not at all.
    """
    total = 0
    for parameter in fused.values():
        if parameter.op != "parameter":
            continue
        whole = _size(operands[int(parameter.attribute(r"parameter\((\d+)\)"))])
        parts = 0
        for user, via in _users(fused, parameter.name):
            if user.op in SLICES and user.operands[0] == via:
                parts += _size(user.type)
            elif not (user.op == "dynamic-update-slice" and user.operands[0] == via):
                parts += whole
        total += min(parts, whole)
    return total


def _users(fused: Mapping[str, Instruction], name: str) -> Iterator[tuple[Instruction, str]]:
    """Yield the users of a value, past bitcasts, each with the name under which it uses the value."""
    for user in fused.values():
        if name in user.operands:
            if user.op == "bitcast":
                yield from _users(fused, user.name)
            else:
                yield user, name


def _written_bytes(fused: Mapping[str, Instruction]) -> int:
    """Return how many bytes a fusion writes; an array that it updates in place counts with the update."""
    root = next(instruction for instruction in fused.values() if instruction.is_root)
    results = [fused[name] for name in root.operands] if root.op == "tuple" else [root]
    total = 0
    for result in results:
        while result.op == "bitcast":
            result = fused[result.operands[0]]
        is_update = result.op == "dynamic-update-slice"
        total += _size(fused[result.operands[1]].type if is_update else result.type)
    return total


def _products(
    instruction: Instruction, body: Mapping[str, Instruction], computations: Computations
) -> Iterator[tuple[float, str]]:
    """Yield FLOPs and the type of an operand of each product in a kernel."""
    if instruction.op == "fusion":
        fused = computations[instruction.attribute(r"calls=%?([\w.\-]+)")]
        for inner in fused.values():
            yield from _products(inner, fused, computations)
        return
    target = instruction.attribute(r'custom_call_target="([^"]+)"')
    if instruction.op != "dot" and not target.startswith(("__cublas$", "__cudnn$fmha", "__cudnn$conv")):
        return
    left, right = (body[name].type for name in instruction.operands[:2])
    if target.startswith("__cudnn$fmha"):
        products = next((count for start, count in ATTENTION_PRODUCTS.items() if target.startswith(start)), 2)
        yield products * math.prod(_shape(left)) * _shape(right)[1], left  # queries BxTxHxK, keys BxSxGxK
        return
    if target.startswith("__cudnn$conv"):
        convolution = {
            "__cudnn$convBackwardInput": (left, right),
            "__cudnn$convBackwardFilter": (right, instruction.type),
        }
        outputs, kernel = map(_shape, convolution.get(target, (instruction.type, right)))
        features = kernel[instruction.attribute(r"dim_labels=\w+_(\w+)->").index("o")]
        yield 2 * math.prod(outputs) * math.prod(kernel) / features, left
        return
    contracting = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    if not contracting:
        contracting = instruction.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]').replace('"', "")
    sizes = _shape(left)
    contracted = math.prod(sizes[int(axis)] for axis in contracting.split(",") if axis)
    yield 2 * math.prod(_shape(instruction.type)) * contracted, left
