"""A pytree saved in a file and loaded again."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpuswarm import InputError, load, save


def test_pytree_comes_back_from_a_file_and_misuse_is_named(tmp_path):
    tree = {
        "w": [jnp.arange(6.0).reshape(2, 3).T, jnp.ones(2, jnp.bfloat16)],
        "n": np.int64(3),
        "empty": np.zeros((0, 2)),
    }
    save(tree, tmp_path / "tree.safetensors")
    back = load(tmp_path / "tree.safetensors")
    assert back["w"]["1"].dtype == jnp.bfloat16 and back["n"].shape == () and back["n"] == 3
    exact = load(tmp_path / "tree.safetensors", like=tree)
    jax.tree.map(np.testing.assert_array_equal, exact, tree)
    with pytest.raises(InputError, match=r"2 arrays differ, the first n \(\(\) there, missing here"):
        load(tmp_path / "tree.safetensors", like={"w": [np.zeros((3, 2)), np.zeros(3)], "empty": np.zeros((0, 2))})
    save(tree["w"][0], tmp_path / "array.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "array.safetensors"), tree["w"][0])
    with pytest.raises(InputError, match=r"name it tree\.safetensors"):
        save(tree, tmp_path / "tree.npz")
    with pytest.raises(InputError, match="two leaves have the path a/b"):
        save({"a": {"b": 1.0}, "a/b": 2.0}, tmp_path / "two.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"123")
    with pytest.raises(InputError, match=r"torn\.safetensors cannot be read"):
        load(tmp_path / "torn.safetensors")
