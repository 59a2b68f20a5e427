"""A step that was traced from torch, in plain data: torch is not needed to read or run it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tpuswarm.errors import InputError

FORMAT = "tpuswarm torch 2"
Group = Literal["params", "buffers", "constants"]
GROUPS: tuple[Group, ...] = ("params", "buffers", "constants")


@dataclass(frozen=True)
class Ref:
    """What another node gives, in the place of an argument."""

    name: str


@dataclass(frozen=True)
class Dtype:
    """A dtype of torch's, by its name there, in the place of an argument."""

    name: str


@dataclass(frozen=True)
class Rows:
    """A number that follows from the rows of the batch, in the place of an argument."""

    terms: tuple[tuple[float, float], ...]
    """Its summands: factors, and powers of the rows."""
    whole: bool = True

    def of(self, rows: int) -> int | float:
        """For so many rows. Raises InputError where a whole number would be a fraction."""
        found = sum(factor * rows**power for factor, power in self.terms)
        if self.whole and abs(found - round(found)) > 1e-6:
            raise InputError(f"a size of the module is {found:g} for {rows} rows: give it another number of rows")
        return round(found) if self.whole else found


@dataclass(frozen=True)
class Node:
    """One operation."""

    name: str
    op: str
    """An ATen operator without its overload (`add`), one of ours (`tpuswarm.attention`), or `getitem`."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    module: str = ""
    """The path of the module that it is from."""
    where: str = ""
    """The line of the module's source: `model.py:12`."""


@dataclass(frozen=True)
class Graph:
    """One traced program: the objective of a batch, in training or in evaluation."""

    arrays: Mapping[str, tuple[Group, str]]
    """Nodes that stand for arrays of the module: their group and their name in it."""
    batch: Mapping[str, str]
    """Nodes that stand for arrays of the batch: their name in it."""
    nodes: tuple[Node, ...]
    loss: Ref
    metrics: Mapping[str, Any]
    """What each metric is."""
    buffers: Mapping[str, Any]
    """What each buffer that changes is afterwards."""
    gradients: Mapping[str, Any] = field(default_factory=dict)
    """What the gradient of each parameter is; without those that get none, and empty in evaluation."""
    forward: int = 0
    """How many nodes are the forward pass: the first ones."""


@dataclass(frozen=True)
class Exported:
    """A module and its loss."""

    name: str
    """Of the module's class."""
    arrays: Mapping[Group, Mapping[str, np.ndarray]]
    tied: Mapping[str, str]
    """Other names of parameters: of each the one under which its array is."""
    train: Graph
    evaluate: Graph
    integers: tuple[str, ...] = field(default=())
    """Inputs that were traced as integers."""
    frozen: tuple[str, ...] = field(default=())
    """Parameters that get no gradient, because they ask for none or because none reaches them."""
    weights: bool = True
    """Whether the arrays have values: those of a module on the meta device are zeros that take no memory."""

    @property
    def state(self) -> dict[str, np.ndarray]:
        """The buffers that training changes."""
        changed = self.train.buffers
        return {name: each for name, each in self.arrays["buffers"].items() if name in changed and not counts(name)}

    @property
    def fixed(self) -> dict[str, np.ndarray]:
        """The other buffers. What only ever has its first value needs no place in a state."""
        return {name: each for name, each in self.arrays["buffers"].items() if name not in self.state}


def counts(name: str) -> bool:
    """Whether a buffer is BatchNorm's counter, which nothing reads."""
    return name.endswith("num_batches_tracked")


def write(path: Path, exported: Exported) -> None:
    """One file: the arrays as safetensors, the rest as JSON in its header."""
    from safetensors.numpy import save_file

    arrays = {f"{group}/{name}": array for group in GROUPS for name, array in exported.arrays[group].items()}
    about = {
        "format": FORMAT,
        "name": exported.name,
        "tied": dict(exported.tied),
        "integers": list(exported.integers),
        "frozen": list(exported.frozen),
        "shapes": {} if exported.weights else {name: [str(each.dtype), each.shape] for name, each in arrays.items()},
        "train": _encode_graph(exported.train),
        "evaluate": _encode_graph(exported.evaluate),
    }
    whole = {name: np.ascontiguousarray(each) for name, each in arrays.items()} if exported.weights else {}
    save_file(whole, path, {"tpuswarm": json.dumps(about)})
    Path(path).chmod(0o644)  # the library writes for its user alone


def shape_alone(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """An array of zeros that takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def read(path: Path) -> Exported:
    """What `write` has written. Raises InputError."""
    from safetensors import SafetensorError, safe_open

    arrays: dict[Group, dict[str, np.ndarray]] = {group: {} for group in GROUPS}
    try:
        with safe_open(path, "numpy") as file:
            about = json.loads((file.metadata() or {}).get("tpuswarm", "{}"))
            if about.get("format") == "tpuswarm torch 1":
                raise InputError(f"{path} was written by an older tpuswarm: write it anew with tpuswarm.torch.save")
            if about.get("format") != FORMAT:
                raise InputError(f"{path} is no exported module: tpuswarm.torch.save writes one, where torch is")
            for key in file.keys():  # noqa: SIM118  # it is no mapping
                group, _, name = key.partition("/")
                arrays[group][name] = file.get_tensor(key)
            shapes = about.get("shapes", {})  # older files always hold the arrays themselves
            for key, (dtype, shape) in shapes.items():
                group, _, name = key.partition("/")
                arrays[group][name] = shape_alone(shape, dtype)
    except FileNotFoundError:
        raise InputError(f"there is no {path}: tpuswarm.torch.save writes it, where torch is") from None
    except (SafetensorError, ValueError) as error:
        raise InputError(f"{path} is no exported module ({error}): tpuswarm.torch.save writes one") from error
    train, evaluate = (_decode_graph(about[name]) for name in ("train", "evaluate"))
    integers, frozen = tuple(about["integers"]), tuple(about.get("frozen", ()))
    return Exported(about["name"], arrays, about["tied"], train, evaluate, integers, frozen, not shapes)


def _encode_graph(graph: Graph) -> dict[str, Any]:
    return {
        "arrays": {name: list(where) for name, where in graph.arrays.items()},
        "batch": dict(graph.batch),
        "nodes": [
            [each.name, each.op, _encode(each.args), _encode(each.kwargs), each.module, each.where]
            for each in graph.nodes
        ],
        "loss": graph.loss.name,
        "metrics": _encode(graph.metrics),
        "buffers": _encode(graph.buffers),
        "gradients": _encode(graph.gradients),
        "forward": graph.forward,
    }


def _decode_graph(found: Mapping[str, Any]) -> Graph:
    nodes = (
        Node(name, op, tuple(_decode(args)), _decode(kwargs)["dict"], module, where)
        for name, op, args, kwargs, module, where in found["nodes"]
    )
    return Graph(
        {name: (where[0], where[1]) for name, where in found["arrays"].items()},
        found["batch"],
        tuple(nodes),
        Ref(found["loss"]),
        _decode(found["metrics"])["dict"],
        _decode(found["buffers"])["dict"],
        _decode(found["gradients"])["dict"],
        found["forward"],
    )


def _encode(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, Dtype):
        return {"dtype": value.name}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Rows):
        return {"rows": [value.terms, value.whole]}
    if isinstance(value, Mapping):
        return {"dict": {name: _encode(each) for name, each in value.items()}}
    return [_encode(each) for each in value] if isinstance(value, (list, tuple)) else value


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "ref" in value:
        return Ref(value["ref"])
    if "dtype" in value:
        return Dtype(value["dtype"])
    if "complex" in value:
        return complex(*value["complex"])
    if "rows" in value:
        return Rows(tuple((factor, power) for factor, power in value["rows"][0]), value["rows"][1])
    return {"dict": {name: _decode(each) for name, each in value["dict"].items()}}


def resolve(value: Any, known: Mapping[str, Any], rows: int) -> Any:
    """An argument with the values of the nodes that it refers to, for a batch of so many rows."""
    if isinstance(value, Ref):
        return known[value.name]
    if isinstance(value, Rows):
        return value.of(rows)
    if isinstance(value, (list, tuple)):
        return [resolve(each, known, rows) for each in value]
    return value


def referred(value: Any) -> set[str]:
    """The nodes that an argument refers to."""
    if isinstance(value, Ref):
        return {value.name}
    return set().union(*map(referred, value)) if isinstance(value, (list, tuple)) else set()
