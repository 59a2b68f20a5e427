"""Arrays on disk: safetensors files by their digest, mapped into memory, with damage found."""

import hashlib
import mmap
import os
import random
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from tests.swarm.chains import flip_bit
from tpuswarm.errors import InputError
from tpuswarm.swarm.core.arithmetic.quantize import Quantized, encode
from tpuswarm.swarm.core.values import Identity, Incarnation
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.objects import Objects, array_digest, object_name, payload_name, update_digest
from tpuswarm.swarm.storage.store import Conflict, Corrupt, Missing, Store

ME = Identity(Incarnation("m-1.eu_west", "ab" * 16), 3)
PAYLOADS = [
    {"s": np.arange(7, dtype=np.float32)},
    {"codes": np.arange(512, dtype=np.uint8).reshape(2, 256), "scales": np.ones(2, np.float32)},
    {"s": np.zeros(0, np.float32)},
]


@pytest.fixture
def objects(store):
    return Objects(store)


arrays = st.builds(
    lambda shape, seed: np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32).view(np.float32),
    st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    st.integers(0, 9),
)


@given(st.dictionaries(st.sampled_from(["s", "scales", "array", "ä"]), arrays), st.binary(max_size=9))
def test_bytes_are_those_of_the_safetensors_library(floats, codes):
    given_arrays = {**floats, "codes": np.frombuffer(codes, np.uint8)}
    data = tensors.encode(given_arrays)
    assert data == safetensors.numpy.save(given_arrays)
    assert tensors.digest(given_arrays) == hashlib.sha256(data).hexdigest()
    back = tensors.decode(data)
    assert back.keys() == given_arrays.keys()
    for name, array in given_arrays.items():
        assert (back[name].shape, back[name].dtype) == (array.shape, array.dtype)
        assert back[name].tobytes() == array.tobytes() and not back[name].flags.writeable


def test_arrays_come_back_by_their_digest(objects):
    array = np.random.default_rng(0).standard_normal((2, 5000)).astype(np.float32)
    array[0, :3] = np.nan, -0.0, np.inf
    digest = objects.put_array(array)
    assert digest == objects.put_array(array.copy()) == array_digest(array)
    back = objects.get_array(digest, (2, 5000))
    assert back.tobytes() == array.tobytes() and not back.flags.writeable
    assert objects.get_array(digest).shape == (2, 5000)
    for strided in (array.T, array[:, 1:3], array[::-1]):
        back = objects.get_array(objects.put_array(strided), strided.shape)
        np.testing.assert_array_equal(back, strided)


@pytest.mark.parametrize("shape", [(2, 1000), (1,), (0,), (2, 0)])
def test_array_written_in_pieces_is_the_same_object(objects, shape):
    array = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    with objects.writing_array(shape) as (out, finish):
        for start in range(0, shape[-1], 300):
            out[..., start : start + 300] = array[..., start : start + 300]
        digest = finish()
        with pytest.raises(ValueError, match="read-only"):
            out[:] = 0
    assert digest == array_digest(array)
    assert objects.get_array(digest, shape).tobytes() == array.tobytes()


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_written_in_pieces_are_the_same_object(objects, bits):
    codes, scales = encode(np.random.default_rng(1).standard_normal(1000).astype(np.float32), bits)
    with objects.writing_update(1000, bits) as (out, finish):
        for block in range(4):
            out.codes[block], out.scales[block] = codes[block], scales[block]
        digest = finish()
    assert digest == update_digest(Quantized(codes, scales, bits))
    back = objects.get_update(digest, 1000)
    assert (back.bits, back.codes.tobytes(), back.scales.tobytes()) == (bits, codes.tobytes(), scales.tobytes())
    objects.check(digest)
    with pytest.raises(Corrupt, match=r"it holds scales .*, no codes of 1025 elements"):
        objects.get_update(digest, 1025)
    with pytest.raises(Corrupt, match=r"it holds array .*, no codes of 3 elements"):
        objects.get_update(objects.put_array(np.ones(3, np.float32)), 3)


def test_arrays_in_a_folder_are_maps_that_outlive_their_files(tmp_path):
    objects = Objects(Store(tmp_path))
    digest = objects.put_array(np.ones(9, np.float32))
    array = objects.get_array(digest, (9,))
    (payload,) = objects.get_payload(ME, 0, objects.put_payload(ME, 0, PAYLOADS[0])).values()
    for base in (array, payload):
        while isinstance(base, np.ndarray):
            base = base.base
        assert isinstance(base, mmap.mmap)
    objects.put_array(np.ones(9, np.float32))
    (tmp_path / object_name(digest)).unlink()
    assert array.sum() == 9


def test_unfinished_array_leaves_no_file(tmp_path):
    objects = Objects(Store(tmp_path))
    with pytest.raises(KeyError), objects.writing_array((10,)) as (out, _):
        out[:] = 1
        raise KeyError
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_payloads_come_back_and_are_never_replaced(objects):
    for number, payload in enumerate(PAYLOADS):
        digest = objects.put_payload(ME, number, payload)
        assert digest == objects.put_payload(ME, number, payload) == tensors.digest(payload)
        back = objects.get_payload(ME, number, digest)
        assert back.keys() == payload.keys()
        for name, array in payload.items():
            assert back[name].dtype == array.dtype
            np.testing.assert_array_equal(back[name], array)
    with pytest.raises(Conflict, match=r"payloads/m-1.eu_west/(ab){16}/3-0.safetensors is already stored with other"):
        objects.put_payload(ME, 0, {"s": np.zeros(7, np.float32)})
    np.testing.assert_array_equal(objects.get_payload(ME, 0, tensors.digest(PAYLOADS[0]))["s"], PAYLOADS[0]["s"])
    with pytest.raises(Missing, match=r"payloads/m-1.eu_west/(ab){16}/3-9.safetensors is missing"):
        objects.get_payload(ME, 9, "0123")
    with pytest.raises(Missing, match=r"objects/0123\.safetensors is missing"):
        objects.get_array("0123", (1,))


@pytest.mark.parametrize("dtype", [np.float64, np.float16, np.int8, bool])
def test_other_dtypes_are_refused(tmp_path, dtype):
    objects = Objects(Store(tmp_path))
    with pytest.raises(ValueError, match="shares float32"):
        objects.put_array(np.zeros(3, dtype))
    with pytest.raises(ValueError, match=f"s is {np.dtype(dtype)}, but a swarm sends only float32 and uint8"):
        objects.put_payload(ME, 0, {"s": np.zeros(3, dtype)})
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"array": np.zeros(3, np.uint8)}, r"it holds array uint8\[3\], not float32\[3\]"),
        ({"other": np.zeros(3, np.float32)}, r"it holds other float32\[3\], not float32\[3\]"),
        ({}, "it holds nothing, not"),
    ],
)
def test_unexpected_arrays_are_named(tmp_path, content, words):
    store = Store(tmp_path)
    digest = tensors.digest(content)
    store.put(object_name(digest), tensors.encode(content))
    with pytest.raises(Corrupt, match=words):
        Objects(store).get_array(digest, (3,))
    store.put(payload_name(ME, 0), tensors.encode(content))
    with pytest.raises(Corrupt, match="which is no payload"):
        Objects(store).get_payload(ME, 0, digest)


def test_process_hashes_each_file_once(tmp_path, monkeypatch):
    """Unless it may have changed; files written by this process are never hashed."""
    whole, hashed = hashlib.file_digest, []
    monkeypatch.setattr("hashlib.file_digest", lambda file, name: hashed.append(file.name) or whole(file, name))
    objects, array = Objects(Store(tmp_path)), np.arange(40, dtype=np.float32)
    digest, payload = objects.put_array(array), objects.put_payload(ME, 0, PAYLOADS[1])
    for _ in range(2):
        objects.get_array(digest), objects.get_payload(ME, 0, payload)
    assert hashed == []
    objects.check(digest)
    assert len(hashed) == 1, "check always hashes"
    other = Objects(Store(tmp_path))  # a restart
    for _ in range(2):
        other.get_array(digest)
    assert len(hashed) == 2
    file = tmp_path / object_name(digest)
    os.utime(file, (time.time() + 3600,) * 2)  # just written by another process: it may still change unnoticed
    for count in (3, 4):
        other.get_array(digest)
        assert len(hashed) == count
    os.utime(file, (1e9, 1e9))
    for _ in range(2):
        other.get_array(digest)
    assert len(hashed) == 5


def test_any_flipped_bit_and_torn_file_is_found(tmp_path):
    objects, array = Objects(Store(tmp_path)), np.arange(40, dtype=np.float32)
    digest, payload = objects.put_array(array), objects.put_payload(ME, 0, PAYLOADS[1])
    for name, read in [
        (object_name(digest), lambda: objects.get_array(digest, (40,))),
        (payload_name(ME, 0), lambda: objects.get_payload(ME, 0, payload)),
    ]:
        file = tmp_path / name
        whole = file.read_bytes()
        damages = [partial(flip_bit, file, bit) for bit in random.Random(0).sample(range(len(whole) * 8), 60)]
        damages += [partial(file.write_bytes, whole[:length]) for length in (0, 5, 8, 40, 71, -1)]
        for damage in damages:
            damage()
            with pytest.raises(Corrupt, match=f"{name} in .* is damaged: its bytes have the digest"):
                read()
            file.write_bytes(whole)
        read()
    (tmp_path / object_name(digest)).write_bytes(b"torn")
    objects.put_array(array)
    assert objects.get_array(digest, (40,)).sum() == 780


def header(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: bytes = b"F32", shape: bytes = b"[1]", end: bytes = b"4", data: bytes = b"1234") -> bytes:
    """A file with one array, whose header is padded to a multiple of 8 bytes."""
    text = b'{"a":{"dtype":"%s","shape":%s,"data_offsets":[0,%s]}}' % (dtype, shape, end)
    return header(text + b" " * (-len(text) % 8), data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (2**63).to_bytes(8, "little") + b"{}",
        header(b" " * 2**17),
        header(b"[" * 60000),
        header(b'{"a":1}  '),
        header(b'{"__metadata__":{"x":"y"}}      '),
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234"),  # not aligned
        header(b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}  ', b"12345678"),
        entry(dtype=b"F64", end=b"8", data=b"12345678"),
        entry(shape=b"[2]"),
        entry(shape=b"[-1,-1]"),
        entry(shape=b"[true]"),
        entry(data=b"12345"),
        entry(shape=b"[1099511627776]", end=b"4398046511104"),
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(ValueError, match=r"^(it|its header) (is|has|none)"):
        tensors.decode(data)


@given(st.binary(max_size=200))
def test_random_bytes_are_read_or_refused(data):
    with suppress(ValueError):
        tensors.decode(header(data[:100], data[100:]))


@pytest.mark.parametrize("member", ["", ".", "..", "../x", "a/b", "-a", ".a", "a b", "ä", "a\n", "a" * 65, "a#1"])
def test_member_names_that_are_no_file_names_are_refused(tmp_path, member):
    with pytest.raises(InputError, match="cannot be the name of a member: use 1 to 64 letters"):
        Objects(Store(tmp_path)).put_payload(Identity(Incarnation(member, "ab"), 1), 0, PAYLOADS[0])
    assert list(tmp_path.iterdir()) == []


LARGE = """
import hashlib, os, resource, sys
from pathlib import Path
from tpuswarm.swarm.storage import tensors
from tpuswarm.swarm.storage.objects import Objects, object_name
from tpuswarm.swarm.storage.store import Store
head, file = tensors.header({"array": ("F32", (2**26,))}), Path(sys.argv[1]) / "objects" / "x"
file.parent.mkdir()
file.write_bytes(head)
os.truncate(file, len(head) + 2**28)
with file.open("rb") as opened:
    digest = hashlib.file_digest(opened, "sha256").hexdigest()
file.rename(Path(sys.argv[1]) / object_name(digest))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
array = Objects(Store(sys.argv[1])).get_array(digest, (2**26,))
assert array[12345] == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_reading_needs_little_memory_at_any_size(tmp_path):
    done = subprocess.run([sys.executable, "-c", LARGE, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * 1024
