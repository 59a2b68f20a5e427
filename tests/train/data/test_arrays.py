"""Arrays in and out, against NumPy and memory addresses; with torch itself: tests/oracle/test_torch_arrays.py."""

import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tpuswarm import InputError, cpu_keys, shapes, to_jax, to_numpy, to_torch
from tpuswarm.train.program.mesh import make_mesh


class Foreign:
    """An array of a library that shares only DLPack with NumPy."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Tensor(Foreign):
    def __init__(self, array, requires_grad=True, device=(1, 0)):
        super().__init__(array)
        self.requires_grad, self.device = requires_grad, device

    def detach(self):
        return Tensor(self.array, False, self.device)

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array), self.requires_grad, self.device)

    def cpu(self):
        return Tensor(self.array, self.requires_grad)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.requires_grad:
            raise BufferError("can't export tensors that require gradient")
        assert self.device == (1, 0)
        return super().__dlpack__(**options)


def aligned(shape):
    """float32 zeros at a multiple of 64 bytes, as torch's arrays and memory maps are."""
    size = int(np.prod(shape)) * 4
    memory = np.zeros(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(np.float32).reshape(shape)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint32, np.int32, bool, np.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 3)])
def test_round_trip_returns_the_same_array(dtype, shape):
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape).astype(dtype)
    there = to_jax({"a": [array, 1.5]})
    back = to_numpy(there)
    assert there["a"][0].dtype == dtype and there["a"][1].dtype == jnp.float32
    assert back["a"][0].dtype == dtype
    np.testing.assert_array_equal(back["a"][0], array)


def test_memory_is_shared_where_possible():
    array, theirs = aligned((64, 3)), aligned((64, 3))
    taken = to_jax({"numpy": array, "dlpack": Foreign(theirs)})
    assert taken["numpy"].unsafe_buffer_pointer() == array.ctypes.data
    assert taken["dlpack"].unsafe_buffer_pointer() == theirs.ctypes.data
    assert to_numpy(taken)["numpy"].ctypes.data == array.ctypes.data


def test_arrays_that_share_memory_do_not_change_each_other():
    array, ours = aligned((1024,)), jnp.arange(4.0)
    jax.jit(lambda x: x + 1, donate_argnums=0)(to_jax(array)).block_until_ready()
    np.testing.assert_array_equal(array, np.zeros(1024))
    with pytest.raises(ValueError, match="read-only"):
        to_numpy(ours)[0] = 7
    to_numpy({"w": ours}, writable=True)["w"][0] = 7
    np.testing.assert_array_equal(ours, np.arange(4.0))


def test_views_keep_their_values():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array.T, array[::2, 1:], array[:, ::-1], np.broadcast_to(array[0], (4, 6))):
        np.testing.assert_array_equal(to_jax(view), view)
        np.testing.assert_array_equal(to_jax(Tensor(view)), view)


def test_foreign_array_is_not_bound_to_a_device_and_sharded_array_is_assembled(devices):
    split = jax.device_put(jnp.arange(16.0), NamedSharding(make_mesh(devices), PartitionSpec("data")))
    added = jax.jit(jnp.add)(to_jax(Foreign(aligned((16,)))), split)
    assert len(added.devices()) == 8
    np.testing.assert_array_equal(to_numpy(added), np.arange(16.0))


@pytest.mark.parametrize(
    "array",
    [Tensor(np.array([1.5, -2.0], np.float32), device=(2, 0)), np.array([1.5, -2.0], ">f8")],
    ids=["on a device that JAX does not have", "big-endian"],
)
def test_arrays_that_need_a_conversion_are_read(array):
    assert to_jax(array).tolist() == [1.5, -2.0]


@pytest.mark.parametrize("wrap", [np.asarray, Foreign, Tensor])
def test_64_bits_are_narrowed_only_without_loss(wrap):
    assert to_jax(wrap(np.array([-(2**31), 2**31 - 1]))).tolist() == [-(2**31), 2**31 - 1]
    assert to_jax(wrap(np.array([0.1, np.inf]))).dtype == jnp.float32
    with pytest.raises(InputError, match=r"^ids/0 holds 2147483648, too large for int32.*JAX_ENABLE_X64=1"):
        to_jax({"ids": [wrap(np.array([1, 2**31]))]})
    with pytest.raises(InputError, match=r"holds 1e\+300, too large for float32"):
        to_jax(wrap(np.array(1e300)))
    with jax.enable_x64(True):
        assert to_jax(wrap(np.array([2**40]))).tolist() == [2**40]


@pytest.mark.parametrize(
    ("convert", "leaf", "words"),
    [
        (to_jax, np.array(["a"]), r"^x \(ndarray, <U1\) is not an array of numbers"),
        (to_jax, np.array([None]), r"^x \(ndarray, object\) is not an array"),
        (to_jax, "word", r"^x \(str, <U4\) is not an array of numbers"),
        (to_jax, Tensor(np.array(["a"])), r"^x \(Tensor\) cannot be read: "),
        (to_numpy, jax.random.key(0), r"^x is a random key.*key_data"),
    ],
)
def test_leaf_that_is_no_array_of_numbers_is_refused_by_name(convert, leaf, words):
    with pytest.raises(InputError, match=words):
        convert({"x": leaf})


def test_torch_has_to_be_imported_by_the_user():
    assert "torch" not in sys.modules
    with pytest.raises(InputError, match="import torch"):
        to_torch(jnp.ones(3))


def test_shapes_describes_arrays_and_abstract_shapes():
    def init(key):
        return {"blocks": [{"w": jax.random.normal(key, (1024, 512))}], "b": jnp.zeros((), jnp.bfloat16)}

    expected = "b           bfloat16[]\nblocks/0/w  float32[1024,512]\n2 arrays, 524,289 numbers, 2.00 MiB"
    assert shapes(jax.eval_shape(init, jax.random.key(0))) == expected
    assert shapes(to_numpy(init(jax.random.key(0)))) == expected


def test_cpu_keys_are_made_on_the_cpu_whatever_the_default_device(devices):
    with jax.default_device(devices[3]):
        keys = cpu_keys(7)
        made = [next(keys) for _ in range(3)]
        assert all(key.devices() == {devices[0]} for key in made)
        drawn = jax.jit(lambda key, x: x + jax.random.normal(key, (2,)))(made[0], jax.device_put(0.0, devices[3]))
        assert drawn.devices() == {devices[3]}  # not bound to where it was made
    expected = [jax.random.fold_in(jax.random.key(7), number) for number in range(3)]
    assert [jax.random.key_data(key).tolist() for key in made] == [jax.random.key_data(k).tolist() for k in expected]
