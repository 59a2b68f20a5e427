"""Name the leaves of a pytree by paths such as `blocks/attn/qkv/w`, select and compare them."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tpuswarm.errors import InputError


def leaf_paths(tree: Any) -> list[str]:
    """Return the path of every leaf, in the order of `jax.tree.leaves`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves by path, in the order of `jax.tree.leaves`."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def describe_mismatch(there: Mapping[str, Any], here: Mapping[str, Any], kind: str = "arrays") -> str | None:
    """Say how stored arrays, given as shapes by path, differ from the wanted ones; None if they are the same."""
    if not (wrong := sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))):
        return None
    stored, wanted = (shapes.get(wrong[0], "missing") for shapes in (there, here))
    return f"{len(wrong)} {kind} differ, the first {wrong[0]} ({stored} there, {wanted} here)"


def array_type(leaf: Any) -> str | None:
    """Return dtype and shape of a leaf in JAX, such as `float32[3, 4]`; None if it is no array of numbers."""
    try:
        array = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    except TypeError:
        return None
    return f"{array.dtype}{list(array.shape)}"


def first_difference(before: Any, after: Any) -> tuple[str, str, str] | None:
    """Return the first path at which two trees differ, and the array types there; a missing one is `no` or `none`."""
    was, now = (
        {path: array_type(leaf) or f"a {type(leaf).__name__}" for path, leaf in by_path(tree).items()}
        for tree in (before, after)
    )
    wrong = min((path for path in was.keys() | now.keys() if was.get(path) != now.get(path)), default=None)
    return None if wrong is None else (wrong, was.get(wrong, "no"), now.get(wrong, "none"))


def mask(tree: Any, pattern: str | None, option: str) -> Any:
    """Return a tree of bools: True if `pattern` is found in the leaf's path; all False for None.

    Raises InputError naming `option` if the pattern is no regular expression or matches nothing.
    """
    if pattern is None:
        return jax.tree.map(lambda _: False, tree)
    return jax.tree.unflatten(jax.tree.structure(tree), match_paths(leaf_paths(tree), pattern, option))


def match_paths(names: Sequence[str], pattern: str, option: str) -> list[bool]:
    """Return whether `pattern` is found in each path. Raises InputError as `mask` does."""
    try:
        found = [re.search(pattern, name) is not None for name in names]
    except re.error as error:
        raise InputError(f"{option} {pattern!r} is not a regular expression: {error}") from error
    if not any(found):
        rate = " (its rate is --weight-decay)" if option == "decay" and re.fullmatch(r"[\d.e+-]+", pattern) else ""
        raise InputError(
            f"{option} {pattern!r} matches none of the parameters{rate}: {', '.join(dict.fromkeys(names))}"
        )
    return found


def select(tree: Any, wanted: Any) -> Any:
    """Return `tree` with None (no leaf) wherever `wanted` is False."""
    return jax.tree.map(lambda leaf, want: leaf if want else None, tree, wanted)


def select_like(tree: Any, part: Any) -> Any:
    """Return `tree` with None wherever `part`, a tree made by `select`, has None."""
    return jax.tree.map(
        lambda kept, leaf: None if kept is None else leaf, part, tree, is_leaf=lambda node: node is None
    )


def overlay(tree: Any, part: Any) -> Any:
    """Return `tree` with the leaves of `part`, a tree made by `select`, in their places."""
    return jax.tree.map(
        lambda kept, leaf: leaf if kept is None else kept, part, tree, is_leaf=lambda node: node is None
    )
