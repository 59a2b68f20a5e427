"""A pytree saved in a file and loaded again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from tpuswarm import InputError, load, save

TREE = {"w": [jnp.arange(6.0).reshape(2, 3).T, jnp.ones(2, jnp.bfloat16)], "n": np.int64(3), "empty": np.zeros((0, 2))}
CLASH = {"a": np.zeros(1), "a/b": np.ones(2)}


def test_pytree_comes_back_from_a_file(tmp_path):
    save(TREE, tmp_path / "tree.safetensors")
    back = load(tmp_path / "tree.safetensors")
    assert back["w"]["1"].dtype == jnp.bfloat16 and back["n"].shape == () and back["n"] == 3
    exact = load(tmp_path / "tree.safetensors", like=TREE)
    jax.tree.map(np.testing.assert_array_equal, exact, TREE)
    with pytest.raises(InputError, match=r"2 arrays differ, the first n \(\(\) there, missing here"):
        load(tmp_path / "tree.safetensors", like={"w": [np.zeros((3, 2)), np.zeros(3)], "empty": np.zeros((0, 2))})
    save(TREE["w"][0], tmp_path / "array.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "array.safetensors"), TREE["w"][0])
    save_file(CLASH, tmp_path / "clash.safetensors")  # another library saves it
    assert load(tmp_path / "clash.safetensors", like=CLASH)["a/b"].tolist() == [1, 1]
    (tmp_path / "torn.safetensors").write_bytes(b"123")
    for name, words in (
        ("clash", "array a, and others whose path begins with it.*like="),
        ("torn", "cannot be read"),
    ):
        with pytest.raises(InputError, match=words):
            load(tmp_path / f"{name}.safetensors")


@pytest.mark.parametrize(
    ("tree", "name", "words"),
    [
        (TREE, "tree.npz", r"name it tree\.safetensors"),
        ({"a": {"b": 1.0}, "a/b": 2.0}, "tree.safetensors", "two leaves have the path a/b"),
        (CLASH, "tree.safetensors", "a is a leaf, and another's path begins with it"),
        (TREE, "gs://bucket/tree.safetensors", "a pytree is saved on a disk"),
        ({"layer": {"name": "x"}}, "tree.safetensors", r"layer/name \(str32\) is no array of numbers that a .safetens"),
    ],
)
def test_tree_that_a_file_cannot_hold_is_refused(tmp_path, monkeypatch, tree, name, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        save(tree, name)
