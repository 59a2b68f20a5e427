"""Tensors of torch to JAX and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tests.journeys.modern_jax_rows import check, names, rows

from tpuswarm import InputError, to_jax, to_numpy, to_torch
from tpuswarm.train.program.mesh import make_mesh

torch = pytest.importorskip("torch")

DTYPES = "float32 float16 bfloat16 float8_e4m3fn int8 uint8 int16 int32 bool complex64"


@pytest.mark.parametrize("dtype", [getattr(torch, name) for name in DTYPES.split()], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 3)], ids=str)
def test_tensor_comes_back_the_same(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = to_torch(to_jax({"w": tensor}))["w"]
    assert back.dtype == dtype and back.shape == tensor.shape
    assert back.tolist() == tensor.tolist()


def test_memory_is_shared_both_ways():
    tensor = torch.rand(33, 7)
    taken = to_jax(tensor)
    assert taken.unsafe_buffer_pointer() == tensor.data_ptr()
    assert to_torch(taken).data_ptr() == tensor.data_ptr()
    half = torch.rand(64).bfloat16()
    assert to_torch(to_jax(half)).data_ptr() == half.data_ptr()
    assert to_numpy(tensor).ctypes.data == tensor.data_ptr()


def test_writable_tensor_does_not_change_the_jax_array():
    array = jnp.arange(4.0)
    to_torch({"w": array}, writable=True)["w"].add_(10)
    np.testing.assert_array_equal(array, np.arange(4.0))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[::2, 1:],
        lambda t: t[1:2].expand(5, 6),
        lambda t: t.flatten()[1:9],
        lambda t: torch.complex(t, t).conj(),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: torch.nn.Parameter(t),
    ],
    ids=["transposed", "strided", "expanded", "unaligned", "conjugate", "negative", "parameter"],
)
def test_views_keep_their_values(view):
    tensor = view(torch.arange(24.0).reshape(4, 6))
    np.testing.assert_array_equal(to_jax(tensor), tensor.detach().resolve_conj().resolve_neg().numpy())


def test_layer_of_torch_is_the_same_function_in_jax():
    layer = torch.nn.Linear(6, 3)
    params, x = to_jax(layer.state_dict()), torch.rand(4, 6)
    ours = to_jax(x) @ params["weight"].T + params["bias"][None]
    np.testing.assert_allclose(ours, layer(x).detach(), rtol=1e-5, atol=1e-6)


def test_integers_too_large_for_jax_are_refused():
    assert to_jax(torch.tensor([5, -3])).tolist() == [5, -3]
    with pytest.raises(InputError, match="ids holds 1099511627776, too large for int32"):
        to_jax({"ids": torch.tensor([1, 2**40])})
    with jax.enable_x64(True):
        assert to_jax(torch.tensor([2**40])).tolist() == [2**40]
    assert to_torch(np.array([2**40])).tolist() == [2**40]


def test_sharded_array_becomes_one_tensor():
    mesh = make_mesh(jax.devices())
    split = jax.device_put(jnp.arange(16, dtype=jnp.bfloat16), NamedSharding(mesh, PartitionSpec("data")))
    assert torch.equal(to_torch(split), torch.arange(16).bfloat16())


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.zeros(3, device="meta")], ids=["sparse", "meta"])
def test_tensors_without_plain_memory_are_refused(tensor):
    with pytest.raises(InputError, match=r"^w \(Tensor\) cannot be read: "):
        to_jax({"w": tensor})


def test_dtypes_that_torch_lacks_are_refused():
    with pytest.raises(InputError, match=r"^torch cannot take w \(int4\)"):
        to_torch({"w": jnp.zeros(3, jnp.int4)})
    with pytest.raises(InputError, match=r"^w is a random key"):
        to_torch({"w": jax.random.key(0)})


@pytest.mark.parametrize("row", [row for row in rows() if row.needs_torch], ids=lambda row: row.now)
def test_lines_of_the_page_on_modern_jax_work(row):
    check(row, {**names(), "torch": torch, "tensor": torch.rand(3)})
