"""Arrays in and out, against NumPy and the addresses of the memory; torch itself: tests/oracle/test_torch_arrays.py."""

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
    """An array of a library that shares nothing with NumPy but DLPack."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Tensor(Foreign):
    """A torch tensor as seen from outside: it refuses to be exported while it follows gradients."""

    def __init__(self, array, follows=True, device=(1, 0)):
        super().__init__(array)
        self.follows, self.device = follows, device

    def detach(self):
        return Tensor(self.array, False, self.device)

    def contiguous(self):
        return Tensor(np.ascontiguousarray(self.array), self.follows, self.device)

    def cpu(self):
        return Tensor(self.array, self.follows)

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **options):
        if self.follows:
            raise BufferError("can't export tensors that require gradient")
        assert self.device == (1, 0)
        return super().__dlpack__(**options)


def aligned(shape, dtype=np.float32):
    """An array at a multiple of 64 bytes, as torch's and memory maps are."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    first = -memory.ctypes.data % 64
    return memory[first : first + size].view(dtype).reshape(shape)


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int8, np.uint32, np.int32, bool, np.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 3)])
def test_there_and_back_is_the_same_array(dtype, shape):
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape).astype(dtype)
    there = to_jax({"a": [array, 1.5]})
    back = to_numpy(there)
    assert there["a"][0].dtype == dtype and there["a"][1].dtype == jnp.float32
    assert back["a"][0].dtype == dtype
    np.testing.assert_array_equal(back["a"][0], array)


def test_no_copy_where_memory_can_be_shared():
    array = aligned((64, 3))
    theirs = aligned((64, 3))
    taken = to_jax({"numpy": array, "dlpack": Foreign(theirs)})
    assert taken["numpy"].unsafe_buffer_pointer() == array.ctypes.data
    assert taken["dlpack"].unsafe_buffer_pointer() == theirs.ctypes.data
    assert to_numpy(taken)["numpy"].ctypes.data == array.ctypes.data


@pytest.mark.parametrize(
    "view",
    [lambda a: a.T, lambda a: a[::2, 1:], lambda a: a[:, ::-1], lambda a: np.broadcast_to(a[0], (4, 6))],
    ids=["transposed", "strided", "reversed", "broadcast"],
)
def test_views_keep_their_values(view):
    array = view(np.arange(24, dtype=np.float32).reshape(4, 6))
    np.testing.assert_array_equal(to_jax(array), array)
    np.testing.assert_array_equal(to_jax(Tensor(array)), array)


def test_what_was_taken_goes_to_the_devices_of_a_step(devices):
    # jax.dlpack.from_dlpack alone binds the array to the first device, and this call is refused
    mesh = make_mesh(devices)
    split = jax.device_put(np.ones(8, np.float32), NamedSharding(mesh, PartitionSpec("data")))
    taken = to_jax(Foreign(aligned((8,))))
    np.testing.assert_array_equal(jax.jit(jnp.add)(taken, split), np.ones(8))


def test_donating_what_was_taken_leaves_the_source_alone():
    array = aligned((1024,))
    jax.jit(lambda x: x + 1, donate_argnums=0)(to_jax(array)).block_until_ready()
    np.testing.assert_array_equal(array, np.zeros(1024))


def test_numpy_views_are_read_only_and_writable_ones_are_copies():
    array = jnp.arange(4.0)
    with pytest.raises(ValueError, match="read-only"):
        to_numpy(array)[0] = 7
    mine = to_numpy({"w": array}, writable=True)["w"]
    mine[0] = 7
    np.testing.assert_array_equal(array, np.arange(4.0))


def test_a_sharded_array_is_put_together(devices):
    split = jax.device_put(jnp.arange(16.0), NamedSharding(make_mesh(devices), PartitionSpec("data")))
    np.testing.assert_array_equal(to_numpy(split), np.arange(16.0))


def test_arrays_of_a_device_that_jax_does_not_have_come_over_the_host():
    np.testing.assert_array_equal(to_jax(Tensor(np.arange(3.0, dtype=np.float32), device=(2, 0))), np.arange(3.0))


@pytest.mark.parametrize("wrap", [np.asarray, Foreign, Tensor])
def test_64_bits_are_narrowed_only_where_nothing_is_lost(wrap):
    assert to_jax(wrap(np.array([-(2**31), 2**31 - 1]))).tolist() == [-(2**31), 2**31 - 1]
    assert to_jax(wrap(np.array([0.1, np.inf]))).dtype == jnp.float32
    with pytest.raises(InputError, match=r"^ids/0 holds 2147483648, too large for int32.*JAX_ENABLE_X64=1"):
        to_jax({"ids": [wrap(np.array([1, 2**31]))]})
    with pytest.raises(InputError, match=r"holds 1e\+300, too large for float32"):
        to_jax(wrap(np.array(1e300)))
    with jax.enable_x64(True):
        assert to_jax(wrap(np.array([2**40]))).tolist() == [2**40]


def test_big_endian_files_are_read():
    assert to_jax(np.array([1.5, -2.0], ">f8")).tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("leaf", "says"),
    [
        (np.array(["a"]), r"x \(ndarray, <U1\) is not an array of numbers"),
        (np.array([None]), r"x \(ndarray, object\) is not an array"),
        ("word", r"x \(str, <U4\) is not an array of numbers"),
        (Tensor(np.array(["a"])), r"x \(Tensor\) cannot be read: "),
    ],
)
def test_what_is_no_array_of_numbers_is_refused_by_name(leaf, says):
    with pytest.raises(InputError, match=says):
        to_jax({"x": leaf})


def test_random_keys_are_not_numbers():
    with pytest.raises(InputError, match=r"^key is a random key.*key_data"):
        to_numpy({"key": jax.random.key(0)})


def test_torch_is_asked_for_and_never_imported():
    assert "torch" not in sys.modules
    with pytest.raises(InputError, match="import torch"):
        to_torch(jnp.ones(3))


def test_shapes_of_a_tree_of_arrays_or_of_shapes():
    def init(key):
        return {"blocks": [{"w": jax.random.normal(key, (1024, 512))}], "b": jnp.zeros((), jnp.bfloat16)}

    expected = "b           bfloat16[]\nblocks/0/w  float32[1024,512]\n2 arrays, 524,289 numbers, 2.00 MiB"
    assert shapes(jax.eval_shape(init, jax.random.key(0))) == expected
    assert shapes(to_numpy(init(jax.random.key(0)))) == expected


def test_keys_are_made_on_the_cpu_whatever_the_default_device_is(devices):
    with jax.default_device(devices[3]):
        keys = cpu_keys(7)
        made = [next(keys) for _ in range(3)]
        assert all(key.devices() == {devices[0]} for key in made)
        drawn = jax.jit(lambda key, x: x + jax.random.normal(key, (2,)))(made[0], jax.device_put(0.0, devices[3]))
        assert drawn.devices() == {devices[3]}  # not bound to where it was made
    expected = [jax.random.fold_in(jax.random.key(7), number) for number in range(3)]
    assert [jax.random.key_data(key).tolist() for key in made] == [jax.random.key_data(k).tolist() for k in expected]
