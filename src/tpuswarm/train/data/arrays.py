"""Convert pytrees of arrays between JAX, NumPy and torch; describe their shapes; make random keys on the CPU.

This module never imports torch: its tensors come through DLPack, a protocol to share memory between libraries.
"""

import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpuswarm.errors import InputError, first_line
from tpuswarm.train.entry_point import entry_point
from tpuswarm.train.process.platform import configure_jax

DLPACK_CPU = 1
"""kDLCPU in dlpack.h: memory of the host."""
CONVERSION_ERRORS = (BufferError, RuntimeError, TypeError, ValueError)


@entry_point
def to_jax(tree: Any) -> Any:
    """Convert a pytree of NumPy arrays, torch tensors, other DLPack arrays or numbers to JAX arrays in the same tree.

    Arrays move to the default device; arrays on a GPU stay there. On the CPU they share memory if it is contiguous and
    aligned to 64 bytes, as in torch and memory maps, but rarely in small NumPy arrays. Then writing into the source
    changes the JAX array; `jnp.array` makes an independent copy. Gradients of tensors are dropped.

    bfloat16 stays bfloat16. 64-bit types become 32-bit types unless JAX_ENABLE_X64 is set. Raise InputError, naming the
    leaf, for an integer that does not fit, a float that would become infinite, or a leaf without numbers.
    """
    configure_jax()
    return jax.tree_util.tree_map_with_path(_to_jax, tree)


@entry_point
def to_numpy(tree: Any, writable: bool = False) -> Any:
    """Convert a pytree of JAX arrays, or of anything that `to_jax` takes, to NumPy arrays.

    bfloat16 becomes ml_dtypes' bfloat16. A JAX array on the CPU becomes a read-only view, because JAX arrays never
    change; `writable` copies read-only arrays. Arrays on other devices are fetched, and sharded arrays assembled. Raise
    InputError, naming the leaf, for random keys and for an array with parts on other hosts.
    """
    configure_jax()

    def convert(path: Any, leaf: Any) -> np.ndarray:
        array = _to_host(leaf, _name(path))
        return array.copy() if writable and not array.flags.writeable else array

    return jax.tree_util.tree_map_with_path(convert, tree)


@entry_point
def to_torch(tree: Any, writable: bool = False) -> Any:
    """Convert a pytree of JAX arrays to torch tensors; `import torch` first. bfloat16 stays bfloat16.

    Arrays on one CPU device, or on one GPU that torch can use, share their memory with the tensor. Writing into it
    would change the JAX array; `writable` copies. Arrays on a TPU or on several devices are fetched to the host. Raise
    the errors of `to_numpy`.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        raise InputError("to_torch needs torch: install it and `import torch` before the call")
    configure_jax()

    def convert(path: Any, leaf: Any) -> Any:
        name = _name(path)
        if not (isinstance(leaf, jax.Array) and _is_shareable(leaf, torch)):
            host = _to_host(leaf, name)
            with jax.enable_x64(True):  # int64 stays int64
                leaf = jax.device_put(host, _cpu())
        _refuse_keys(leaf, name)
        try:
            tensor = torch.from_dlpack(leaf)
        except CONVERSION_ERRORS as error:
            raise InputError(f"torch cannot take {name} ({leaf.dtype}): {first_line(error)}") from error
        return tensor.clone() if writable else tensor

    return jax.tree_util.tree_map_with_path(convert, tree)


@entry_point
def shapes(tree: Any) -> str:
    """Return one line per array of a pytree, with path and type, and a total: `print(shapes(params))`.

    Abstract shapes are enough: `shapes(jax.eval_shape(init, jax.random.key(0)))` works for models of any size.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = [(_name(path), leaf if hasattr(leaf, "dtype") else np.asarray(leaf)) for path, leaf in flat]
    width = max((len(name) for name, _ in found), default=0)
    lines = [f"{name:{width}}  {leaf.dtype}[{','.join(map(str, leaf.shape))}]" for name, leaf in found]
    counts = [math.prod(leaf.shape) for _, leaf in found]
    size = sum(count * leaf.dtype.itemsize for count, (_, leaf) in zip(counts, found, strict=True))
    return "\n".join([*lines, f"{len(found)} arrays, {sum(counts):,} numbers, {size / 2**20:.2f} MiB"])


@entry_point
def cpu_keys(seed: int) -> Iterator[jax.Array]:
    """Yield random keys made on the CPU: key n is `jax.random.fold_in(jax.random.key(seed), n)`.

    On a TPU or GPU each key would launch a small program. A key of the CPU travels to the devices with the call that
    uses it. Inside a jitted function split and fold in as usual: that costs nothing there.
    """
    configure_jax()
    cpu = _cpu()
    with jax.default_device(cpu):
        first = jax.random.key(seed)
    for number in itertools.count():
        with jax.default_device(cpu):
            key = jax.random.fold_in(first, number)
        yield key


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/") or "the array"


def _cpu() -> jax.Device:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        platforms = jax.config.values["jax_platforms"]
        raise InputError(
            f"JAX_PLATFORMS={platforms} leaves JAX without the CPU; set JAX_PLATFORMS={platforms},cpu"
        ) from error


def _to_jax(path: Any, leaf: Any) -> jax.Array:
    if isinstance(leaf, jax.Array):
        return leaf
    name = _name(path)
    array = _from_dlpack(leaf, name)
    if isinstance(array, jax.Array) and array.dtype == jax.dtypes.canonicalize_dtype(array.dtype):
        return array
    host = narrow(np.asarray(array), name)
    try:
        return jax.device_put(host)
    except TypeError as error:
        raise InputError(f"{name} ({type(leaf).__name__}, {host.dtype}) is not an array of numbers") from error


def _refuse_keys(leaf: jax.Array, name: str) -> None:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        raise InputError(f"{name} is a random key, not numbers; jax.random.key_data gives the numbers in it")


def _to_host(leaf: Any, name: str) -> np.ndarray:
    if isinstance(leaf, jax.Array):
        _refuse_keys(leaf, name)
        if not leaf.is_fully_addressable:
            raise InputError(
                f"parts of {name} are on other hosts; jax.experimental.multihost_utils.process_allgather fetches them"
            )
    return np.asarray(_from_dlpack(leaf, name))


def _from_dlpack(leaf: Any, name: str) -> Any:
    """Return a foreign leaf as a NumPy array, or on a GPU as a JAX array there; keep its dtype."""
    if isinstance(leaf, jax.Array | np.ndarray) or not hasattr(leaf, "__dlpack__"):
        return leaf
    try:
        for unwrap in (
            "detach",
            "resolve_conj",
            "resolve_neg",
            "contiguous",
        ):  # torch's states, unknown to DLPack
            leaf = getattr(leaf, unwrap)() if hasattr(leaf, unwrap) else leaf
        if leaf.__dlpack_device__()[0] != DLPACK_CPU and jax.default_backend() == "cpu" and hasattr(leaf, "cpu"):
            leaf = leaf.cpu()  # this JAX has no such device
        with jax.enable_x64(True):
            array = jax.dlpack.from_dlpack(leaf)
            # A JAX array from the host's memory would stay on the CPU, and a step on other devices would refuse it.
            return np.asarray(array) if leaf.__dlpack_device__()[0] == DLPACK_CPU else array
    except CONVERSION_ERRORS as error:
        raise InputError(f"{name} ({type(leaf).__name__}) cannot be read: {first_line(error)}") from error


def narrow(array: np.ndarray, name: str) -> np.ndarray:
    """Convert an array to JAX's types: native byte order, 32 bits unless 64 are on; InputError if a value is lost."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    wanted = jax.dtypes.canonicalize_dtype(array.dtype)
    if wanted == array.dtype:
        return array
    with np.errstate(over="ignore"):
        narrow = array.astype(wanted)
    lost = narrow != array if array.dtype.kind in "iu" else np.isinf(narrow) & ~np.isinf(array)
    if np.any(lost):
        raise InputError(
            f"{name} holds {array[lost][0]}, too large for {wanted}; JAX's 64-bit types are off: "
            f"set JAX_ENABLE_X64=1 or bring the values into range"
        )
    return narrow


def _is_shareable(array: jax.Array, torch: Any) -> bool:
    """Return whether torch can use the array's memory in place."""
    device, *others = array.devices()
    return not others and (device.platform == "cpu" or (device.platform == "gpu" and torch.cuda.is_available()))
