"""The layout of fragments: complete, balanced, the same everywhere, and exact."""

import hashlib
import json
from random import Random

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.swarm.core.arithmetic.test_quantize import varied
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.swarm.core.arithmetic.fragments import FRAGMENT_BYTES, Layout, Piece, fragments_for
from tpuswarm.swarm.core.arithmetic.merge import Contribution
from tpuswarm.swarm.core.arithmetic.outer import MovingAverage, OuterRule, commit_fragment, initial_state, state_rows
from tpuswarm.swarm.core.arithmetic.quantize import BITS, BLOCK_SIZE, Quantized, empty, encode
from tpuswarm.swarm.storage.founding import FOUNDING, Founding, keep_founding, read_founding
from tpuswarm.swarm.storage.store import Corrupt, Store
from tpuswarm.train.paths import leaf_paths
from tpuswarm.train.program.contract import abstract_state, program_of
from tpuswarm.train.recipe import Options

shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 30, 300]), max_size=2).map(tuple)
trees = st.dictionaries(st.text("ab/é", min_size=1, max_size=4), shapes, min_size=1, max_size=8)


def layout(tree: dict[str, tuple[int, ...]], fragments: int) -> Layout:
    return Layout.pack({path: (shape, np.dtype("float32")) for path, shape in tree.items()}, fragments)


def arrays_of(tree, seed) -> dict[str, np.ndarray]:
    whole = varied(seed, sum(int(np.prod(shape, dtype=int)) for shape in tree.values()))
    ends = np.cumsum([int(np.prod(shape, dtype=int)) for shape in tree.values()])[:-1]
    return {path: part.reshape(shape) for (path, shape), part in zip(tree.items(), np.split(whole, ends), strict=True)}


@given(trees, st.integers(1, 15), st.integers(0, 9))
def test_leaves_are_cut_into_equal_fragments_and_come_back_exactly(tree, fragments, seed):
    made = layout(tree, fragments)
    elements = sum(int(np.prod(shape, dtype=int)) for shape in tree.values())
    assert sum(made.sizes) == elements and all(size % BLOCK_SIZE == 0 for size in made.sizes[:-1])
    assert max(made.sizes) - min(made.sizes) <= BLOCK_SIZE
    assert len(made.sizes) == max(1, min(fragments, -(-elements // BLOCK_SIZE)))
    items = list(tree.items())
    Random(seed).shuffle(items)
    shuffled = layout(dict(items), fragments)
    assert shuffled == made and shuffled.digest == made.digest
    arrays = arrays_of(tree, seed)
    parts = made.split(arrays)
    in_order = np.concatenate([arrays[path].ravel() for path in sorted(tree)])
    assert np.concatenate(parts).tobytes() == in_order.tobytes()
    on_devices = made.split({path: jax.numpy.asarray(array) for path, array in arrays.items()})
    assert [part.tobytes() for part in parts] == [np.asarray(part).tobytes() for part in on_devices]
    joined = made.join(parts)
    assert joined.keys() == arrays.keys()
    for path, array in arrays.items():
        assert joined[path].shape == array.shape and joined[path].tobytes() == array.tobytes()


def committed(made: Layout, states, form, outer, averaged) -> list[bytes]:
    """Commit two contributions fragment by fragment; return parameters, outer state and update."""
    base, *snapshots = (made.split(state) for state in states)
    slices = OuterRule("average", averaged=made.find_slices(averaged))
    new, new_outer, codes, scales = [], [], [], []
    for number, theta in enumerate(base):
        contributions = []
        for weight, clip, snapshot in zip((0.75, 0.25), (1.0, 0.5), snapshots, strict=True):
            payload = snapshot[number]
            if form != "plain":
                payload = Quantized(*encode(theta - payload, BITS[form]), BITS[form])
            contributions.append(Contribution(weight, clip, theta, payload))
        first = initial_state(outer, theta)
        rows = state_rows(outer, 0.0)
        new.append(np.empty_like(theta))
        new_outer.append(np.empty((rows, theta.size), np.float32))
        update = None if outer.downlink == "plain" else empty(theta.size, BITS[outer.downlink])
        means = slices.averaged_slices(number)
        out = new_outer[-1] if rows else None
        commit_fragment(theta, first, contributions, outer, 0.5, 1.0, new[-1], out, update, means, 0.25)
        codes.append(update.codes if update else theta[:0])
        scales.append(update.scales if update else theta[:0])
    return [b"".join(part.tobytes() for part in parts) for parts in (new, codes, scales)] + [
        np.concatenate(new_outer, axis=1).tobytes()
    ]


@given(
    trees.filter(lambda tree: any(np.prod(shape) for shape in tree.values())),
    st.integers(2, 9),
    st.sampled_from([("plain", "plain"), ("int8", "int8"), ("int4", "int4"), ("int8", "plain")]),
    st.sampled_from(["average", "nesterov"]),
    st.integers(0, 9),
)  # fmt: skip
def test_commit_has_the_same_bits_in_any_number_of_fragments(tree, fragments, forms, rule, seed):
    form, downlink = forms
    outer = OuterRule(rule, 0.9, downlink=downlink, average=MovingAverage(10.0))
    averaged = sorted(tree)[::2] if form == "plain" else []
    states = [arrays_of(tree, 3 * seed + number) for number in range(3)]
    states = [{path: np.clip(array, -1e30, 1e30) for path, array in state.items()} for state in states]
    whole, cut = (committed(layout(tree, count), states, form, outer, averaged) for count in (1, fragments))
    assert whole == cut


@pytest.mark.parametrize(("size", "members", "fragments"), [("124m", 8, 3), ("124m", 1000, 63), ("1558m", 100, 49)])
def test_gpt2_with_stacked_layers_is_cut_into_equal_fragments(size, members, fragments):
    recipe = GPT2(data="fake", size=size)
    program = program_of(recipe, Options())
    shared = program.exchange().get(abstract_state(program, recipe.name))
    leaves = dict(zip(leaf_paths(shared), jax.tree.leaves(shared), strict=True))
    elements = sum(leaf.size for leaf in leaves.values())
    assert max(leaf.size for leaf in leaves.values()) > 0.3 * elements, "stacked layers"
    assert fragments_for(elements, members) == fragments
    made = Layout.pack({path: (leaf.shape, leaf.dtype) for path, leaf in leaves.items()}, fragments)
    assert len(made.sizes) == fragments and max(made.sizes) - min(made.sizes) <= BLOCK_SIZE
    assert 4 * max(made.sizes) < 2 * FRAGMENT_BYTES


def test_digest_is_of_names_shapes_dtype_and_packing():
    made = layout({"b": (200,), "a": (3, 100), "c": ()}, 2)
    assert made.fragments == (
        (Piece("a", (3, 100), (0, 256)),),
        (Piece("a", (3, 100), (256, 300)), Piece("b", (200,)), Piece("c", ())),
    )
    text = '{"dtype":"float32","fragments":[[["a",[3,100],[0,256]]],[["a",[3,100],[256,300]],["b",[200]],["c",[]]]]}'
    assert made.digest == hashlib.sha256(text.encode()).hexdigest()
    others = [({"b": (200,), "a": (100, 3), "c": ()}, 2), ({"b": (200,), "a": (3, 100), "d": ()}, 2)]
    others += [({"b": (200,), "a": (3, 100), "c": ()}, 1), ({"b": (200,), "a": (3, 100)}, 2)]
    assert len({made.digest, *(layout(*other).digest for other in others)}) == 5


def test_founding_keeps_the_layout_and_reads_one_of_undivided_leaves(tmp_path):
    """Runs of earlier versions packed whole leaves, without spans."""
    made = layout({"b": (200,), "a": (3, 100)}, 2)
    store = Store(tmp_path)
    keep_founding(store, Founding(made.fragments, {}))
    assert read_founding(store).layout == made
    old = {"fragments": [[["b", [200]]], [["a", [3, 100]], ["c", []]]], "chosen": {}}
    (tmp_path / FOUNDING).write_text(json.dumps(old))
    found = read_founding(store).layout
    assert found.sizes == (200, 301)
    text = '{"dtype":"float32","fragments":[[["b",[200]]],[["a",[3,100]],["c",[]]]]}'
    assert found.digest == hashlib.sha256(text.encode()).hexdigest()
    arrays = arrays_of(found.leaves, 1)
    joined = found.join(found.split(arrays))
    assert all(joined[path].tobytes() == arrays[path].tobytes() for path in arrays)
    for pieces in (
        [["a", [300], [0, 256]]],
        [["a", [300], [0, 256]], ["a", [300], [255, 300]]],
        [["a", [300], [0, 256]], ["a", [301], [256, 300]]],
        [["a", [300], [0, 256]], ["a", [300], [256, 200]]],
        [["a", [300]], ["a", [300]]],
    ):
        (tmp_path / FOUNDING).write_text(json.dumps({"fragments": [pieces], "chosen": {}}))
        with pytest.raises(Corrupt):
            read_founding(store)


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
