"""The layout of fragments: complete, balanced, the same everywhere, and exact."""

import hashlib
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpuswarm.swarm.core.arithmetic.fragments import Layout

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
trees = st.dictionaries(st.text("ab/é", min_size=1, max_size=4), shapes, min_size=1, max_size=12)


def layout(tree: dict[str, tuple[int, ...]], fragments: int) -> Layout:
    return Layout.pack({path: (shape, np.dtype("float32")) for path, shape in tree.items()}, fragments)


@given(trees, st.integers(1, 15), st.integers(0, 9))
def test_every_leaf_is_in_one_of_balanced_fragments_and_comes_back_exactly(tree, fragments, seed):
    made = layout(tree, fragments)
    assert sorted(path for paths in made.paths for path in paths) == sorted(tree)
    assert len(made.paths) == min(fragments, len(tree)) and all(made.paths)
    assert all(list(paths) == sorted(paths) for paths in made.paths)
    elements = {path: int(np.prod(shape, dtype=int)) for path, shape in tree.items()}
    assert made.sizes == tuple(sum(elements[path] for path in paths) for paths in made.paths)
    assert max(made.sizes) - min(made.sizes) <= max(elements.values())
    items = list(tree.items())
    Random(seed).shuffle(items)
    shuffled = layout(dict(items), fragments)
    assert shuffled == made and shuffled.digest == made.digest
    random = np.random.default_rng(seed)
    arrays = {path: random.integers(0, 2**32, shape, np.uint32).view(np.float32) for path, shape in tree.items()}
    parts = made.split(arrays)
    assert [part.shape for part in parts] == [(size,) for size in made.sizes]
    joined = made.join(parts)
    assert joined.keys() == arrays.keys()
    for path, array in arrays.items():
        assert joined[path].shape == array.shape and joined[path].tobytes() == array.tobytes()


def test_digest_is_of_names_shapes_dtype_and_packing():
    made = layout({"b": (2,), "a": (3, 2), "c": ()}, 2)
    assert made.paths == (("a",), ("b", "c")) and made.sizes == (6, 3)
    text = '{"dtype":"float32","fragments":[[["a",[3,2]]],[["b",[2]],["c",[]]]]}'
    assert made.digest == hashlib.sha256(text.encode()).hexdigest()
    others = [({"b": (2,), "a": (2, 3), "c": ()}, 2), ({"b": (2,), "a": (3, 2), "d": ()}, 2)]
    others += [({"b": (2,), "a": (3, 2), "c": ()}, 1), ({"b": (2,), "a": (3, 2)}, 2)]
    assert len({made.digest, *(layout(*other).digest for other in others)}) == 5


@pytest.mark.parametrize("dtype", ["bfloat16", "int32", "float64", ">f4"])
def test_only_float32_is_exchanged(dtype):
    with pytest.raises(ValueError, match=f"a swarm shares float32 only, but step is {dtype}"):
        Layout.pack({"w": ((2,), "float32"), "step": ((), dtype)}, 1)


def test_arrays_that_do_not_fit_the_layout_are_refused():
    made = layout({"a": (2,), "b": (3,)}, 1)
    a, b = np.zeros(2, "f"), np.zeros(3, "f")
    with pytest.raises(ValueError, match="not have the same leaves: b, c"):
        made.split({"a": a, "c": b})
    with pytest.raises(ValueError, match=r"b is float32\[2\], the layout says float32\[3\]"):
        made.split({"a": a, "b": a})
    with pytest.raises(ValueError, match=r"b is float64\[3\]"):
        made.split({"a": a, "b": b.astype("d")})
    for odd in ([], [np.zeros(4, "f")], [np.zeros(5)], [np.zeros((5, 1), "f")], [np.zeros(5, "f")] * 2):
        with pytest.raises(ValueError, match="are not float32 of the layout's sizes"):
            made.join(odd)
    for tree, fragments in (({}, 1), ({"a": ()}, 0)):
        with pytest.raises(ValueError, match=f"{len(tree)} leaves cannot be split into {fragments}"):
            layout(tree, fragments)
