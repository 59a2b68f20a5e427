"""Data model and file format of an exported torch module; reading and running one needs no torch."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from tpuswarm.errors import InputError, UnknownFormat
from tpuswarm.train.data.contents import report_open
from tpuswarm.train.process.atomic import partial_path

FORMAT_PREFIX, FORMAT, EARLIER_FORMAT = "tpuswarm torch ", "3", "2"
Group = Literal["params", "buffers", "constants"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True)
class Ref:
    """An argument that is the output of another node."""

    name: str


@dataclass(frozen=True)
class Dtype:
    """An argument that is a torch dtype."""

    name: str


@dataclass(frozen=True)
class RowFormula:
    """An argument that depends on the number of rows in the batch: a sum of factor * rows**power."""

    terms: tuple[tuple[float, float], ...]
    is_integer: bool = True

    def evaluate(self, rows: int) -> int | float:
        """Return the argument for a number of rows. Raise InputError if an integer would be a fraction."""
        value = sum(factor * rows**power for factor, power in self.terms)
        if self.is_integer and abs(value - round(value)) > 1e-6:
            raise InputError(f"a size in the module would be {value:g} for {rows} rows; use another number of rows")
        return round(value) if self.is_integer else value


@dataclass(frozen=True)
class Node:
    """One operation."""

    name: str
    op: str
    """An ATen operator without its overload (`add`), a custom operator (`tpuswarm.attention`), or `getitem`."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    module: str = ""
    """Path of the submodule that calls the operation."""
    source_line: str = ""
    """User code that calls the operation: `model.py:12`."""

    def __str__(self) -> str:
        line = f"{self.source_line}: " if self.source_line else ""
        return f"{line}{self.op} of {self.module}" if self.module else f"{line}{self.op}"


@dataclass(frozen=True)
class IndexLimit:
    """An array of the data whose numbers index a table: from 0 to size - 1, or `ignored`."""

    array: str
    slices: tuple[tuple[int, int | None, int | None, int], ...]
    """Axis, start, end and step of the parts that are looked up."""
    size: int
    ignored: int | None
    source_line: str

    def check(self, array: np.ndarray) -> None:
        """Raise InputError for a number outside the table."""
        for axis, *bounds in self.slices:
            array = array[(slice(None),) * axis + (slice(*bounds),)]
        if not array.size or (array.min() >= 0 and array.max() < self.size):
            return
        outside = array[((array < 0) | (array >= self.size)) & (array != self.ignored)]
        if outside.size:
            line = self.source_line or "the module"
            raise InputError(
                f"{self.array} of the data holds {outside[0]}, but {line} looks it up among "
                f"{self.size} entries; use numbers from 0 to {self.size - 1}"
            )


@dataclass(frozen=True)
class Graph:
    """The traced loss of a batch, in training or in evaluation."""

    arrays: Mapping[str, tuple[Group, str]]
    """Group and name of the module's array that each input node stands for."""
    batch: Mapping[str, str]
    """Name of the batch's array that each input node stands for."""
    nodes: tuple[Node, ...]
    loss: Ref
    metrics: Mapping[str, Any]
    buffers: Mapping[str, Any]
    """New values of the buffers that change."""
    gradients: Mapping[str, Any] = field(default_factory=dict)
    """Gradients by parameter, without parameters that no gradient reaches; empty in evaluation."""
    forward: int = 0
    """Number of nodes in the forward pass, which come first."""
    index_limits: tuple[IndexLimit, ...] = ()


@dataclass(frozen=True)
class ExportedModule:
    """A traced module and its loss."""

    name: str
    arrays: Mapping[Group, Mapping[str, np.ndarray]]
    tied: Mapping[str, str]
    """Further names of shared parameters, mapped to the name that holds the array."""
    train: Graph
    evaluate: Graph
    frozen: tuple[str, ...] = ()
    """Parameters without a gradient."""
    has_weights: bool = True
    """False for a module on the meta device: its arrays are zeros that take no memory."""

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Buffers that training changes, without BatchNorm's step counters, which nothing reads."""
        return {
            name: buffer
            for name, buffer in self.arrays["buffers"].items()
            if name in self.train.buffers and not name.endswith("num_batches_tracked")
        }

    @property
    def constant_buffers(self) -> dict[str, np.ndarray]:
        """Buffers that are not in `state`."""
        return {name: buffer for name, buffer in self.arrays["buffers"].items() if name not in self.state}


def write(path: Path, exported: ExportedModule) -> None:
    """Write a safetensors file whose metadata holds the graphs as JSON."""
    from safetensors.numpy import save_file

    arrays = {f"{group}/{name}": array for group in GROUPS for name, array in exported.arrays[group].items()}
    shapes = {} if exported.has_weights else {name: [str(array.dtype), array.shape] for name, array in arrays.items()}
    header = {
        "format": FORMAT_PREFIX + FORMAT,
        "name": exported.name,
        "tied": dict(exported.tied),
        "frozen": list(exported.frozen),
        "shapes": shapes,
        "train": _encode(exported.train),
        "evaluate": _encode(exported.evaluate),
    }
    stored = {name: np.ascontiguousarray(array) for name, array in arrays.items() if name not in shapes}
    save_file(stored, partial_path(path), {"tpuswarm": json.dumps(header)})
    partial_path(path).chmod(0o644)  # safetensors makes files private, but another user may train
    partial_path(path).replace(path)


def zeros_without_memory(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return an array of zeros that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def read(path: Path) -> ExportedModule:
    """Read what `write` has written. Raise InputError for any other file."""
    from safetensors import SafetensorError, safe_open

    arrays: dict[Group, dict[str, np.ndarray]] = {group: {} for group in GROUPS}
    report_open(path)
    try:
        with safe_open(path, "numpy") as file:
            header = json.loads((file.metadata() or {}).get("tpuswarm", "{}"))
            form = str(header.get("format"))
            if form == f"{FORMAT_PREFIX}1":
                raise InputError(f"{path} comes from an older tpuswarm; export it again with tpuswarm.torch.save")
            if not form.startswith(FORMAT_PREFIX):
                raise InputError(f"{path} is not an exported module; tpuswarm.torch.save writes one")
            if form not in (FORMAT_PREFIX + FORMAT, FORMAT_PREFIX + EARLIER_FORMAT):
                raise UnknownFormat(str(path), form.removeprefix(FORMAT_PREFIX), FORMAT)
            shapes = header.get("shapes", {})
            found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  # it is no mapping
            found |= {key: zeros_without_memory(shape, dtype) for key, (dtype, shape) in shapes.items()}
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; tpuswarm.torch.save writes it") from None
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{path} is not an exported module ({error}); tpuswarm.torch.save writes one") from error
    for key, array in found.items():
        group, _, name = key.partition("/")
        arrays[group][name] = array
    decode = _decode if form == FORMAT_PREFIX + FORMAT else _decode_earlier_graph
    train, evaluate = (decode(header[name]) for name in ("train", "evaluate"))
    frozen = tuple(header.get("frozen", ()))
    return ExportedModule(header["name"], arrays, header["tied"], train, evaluate, frozen, not shapes)


CLASSES: dict[str, Callable[..., Any]] = {
    "tuple": lambda *items: items, "complex": complex,
    **{kind.__name__: kind for kind in (Ref, Dtype, RowFormula, Node, IndexLimit, Graph)},
}  # fmt: skip
"""What JSON lacks, by its name in a file."""


def _encode(value: Any) -> Any:
    match value:
        case list():
            return [_encode(item) for item in value]
        case Mapping():
            return {"dict": {name: _encode(item) for name, item in value.items()}}
        case tuple():
            return {"tuple": [_encode(item) for item in value]}
        case complex():
            return {"complex": [value.real, value.imag]}
        case Ref() | Dtype() | RowFormula() | Node() | IndexLimit() | Graph():
            return {type(value).__name__: [_encode(getattr(value, item.name)) for item in fields(value)]}
    return value


def _decode(value: Any) -> Any:
    match value:
        case list():
            return [_decode(item) for item in value]
        case {"dict": items}:
            return {name: _decode(item) for name, item in items.items()}
        case {"ref": name}:  # this and the next two: EARLIER_FORMAT
            return Ref(name)
        case {"dtype": name}:
            return Dtype(name)
        case {"rows": [terms, is_integer]}:
            return RowFormula(tuple(map(tuple, terms)), is_integer)
        case dict():
            ((name, arguments),) = value.items()
            return CLASSES[name](*map(_decode, arguments))
    return value


def _decode_earlier_graph(encoded: Mapping[str, Any]) -> Graph:
    """Decode a graph of EARLIER_FORMAT."""
    arrays = {name: (group, array) for name, (group, array) in encoded["arrays"].items()}
    nodes = tuple(
        Node(name, op, tuple(_decode(args)), _decode(kwargs), *source)
        for name, op, args, kwargs, *source in encoded["nodes"]
    )
    metrics, buffers, gradients = (_decode(encoded[name]) for name in ("metrics", "buffers", "gradients"))
    limits = tuple(
        IndexLimit(array, tuple(map(tuple, slices)), *others)
        for array, slices, *others in encoded.get("index_limits", ())
    )
    loss, forward = Ref(encoded["loss"]), encoded["forward"]
    return Graph(arrays, encoded["batch"], nodes, loss, metrics, buffers, gradients, forward, limits)


def resolve(value: Any, outputs: Mapping[str, Any], rows: int) -> Any:
    """Replace references and row formulas in an argument by their values."""
    if isinstance(value, Ref):
        return outputs[value.name]
    if isinstance(value, RowFormula):
        return value.evaluate(rows)
    if isinstance(value, (list, tuple)):
        return [resolve(item, outputs, rows) for item in value]
    return value


def referenced_names(value: Any) -> set[str]:
    """Return the names of the nodes that an argument refers to."""
    if isinstance(value, Ref):
        return {value.name}
    return set().union(*map(referenced_names, value)) if isinstance(value, (list, tuple)) else set()
