"""Parameters by path: `blocks/attn/qkv/w`, and masks from regular expressions over such paths."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tpuswarm.errors import InputError


def leaf_paths(tree: Any) -> list[str]:
    """The path of every leaf, in the order of `jax.tree.leaves`."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in flat]


def by_path(tree: Any) -> dict[str, Any]:
    """Every leaf under its path, in the order of `jax.tree.leaves`."""
    return dict(zip(leaf_paths(tree), jax.tree.leaves(tree), strict=True))


def other_model(there: Mapping[str, Any], here: Mapping[str, Any], what: str = "arrays") -> str | None:
    """In words how arrays, their shapes by path, differ from those wanted; None where they do not."""
    if not (wrong := sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))):
        return None
    was, wanted = (each.get(wrong[0], "missing") for each in (there, here))
    return f"{len(wrong)} {what} differ, the first {wrong[0]} ({was} there, {wanted} here)"


def array_type(leaf: Any) -> str | None:
    """dtype and shape of a leaf as JAX takes it, such as `float32[3, 4]`; None for what is no array of numbers."""
    try:
        array = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    except TypeError:
        return None
    return f"{array.dtype}{list(array.shape)}"


def first_difference(before: Any, after: Any) -> tuple[str, str, str] | None:
    """The first path at which two trees differ, and the array there in each in words: `no` before, `none` after."""
    was, now = (
        {path: array_type(leaf) or f"a {type(leaf).__name__}" for path, leaf in by_path(tree).items()}
        for tree in (before, after)
    )
    wrong = min((path for path in was.keys() | now.keys() if was.get(path) != now.get(path)), default=None)
    return None if wrong is None else (wrong, was.get(wrong, "no"), now.get(wrong, "none"))


def mask(tree: Any, pattern: str | None, what: str) -> Any:
    """A tree of bools like `tree`: True where `pattern` is found in the leaf's path; all False for None.

    Raises InputError naming `what` if the pattern is no regular expression or matches nothing.
    """
    if pattern is None:
        return jax.tree.map(lambda _: False, tree)
    return jax.tree.unflatten(jax.tree.structure(tree), matching(leaf_paths(tree), pattern, what))


def matching(names: Sequence[str], pattern: str, what: str) -> list[bool]:
    """Whether `pattern` is found in each of these paths; InputError as of `mask`."""
    try:
        found = [re.search(pattern, name) is not None for name in names]
    except re.error as error:
        raise InputError(f"{what} {pattern!r} is not a regular expression: {error}") from error
    if not any(found):
        rate = " (its rate is --weight-decay)" if what == "decay" and re.fullmatch(r"[\d.e+-]+", pattern) else ""
        raise InputError(f"{what} {pattern!r} matches none of the parameters{rate}: {', '.join(dict.fromkeys(names))}")
    return found


def keep(tree: Any, wanted: Any) -> Any:
    """`tree` with None (no leaf) wherever `wanted` is False."""
    return jax.tree.map(lambda leaf, want: leaf if want else None, tree, wanted)


def like(tree: Any, part: Any) -> Any:
    """`tree` with None wherever `part`, a tree made by `keep`, has it."""
    return jax.tree.map(
        lambda kept, leaf: None if kept is None else leaf, part, tree, is_leaf=lambda node: node is None
    )


def overlay(tree: Any, part: Any) -> Any:
    """`tree` with the leaves of `part` (a tree made by `keep`) in their places."""
    return jax.tree.map(
        lambda kept, leaf: leaf if kept is None else kept, part, tree, is_leaf=lambda node: node is None
    )
