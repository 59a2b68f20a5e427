import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tpuswarm.errors import InputError
from tpuswarm.train.data.feed import Feed
from tpuswarm.train.data.source import ArraySource

SPEC = {"x": jax.ShapeDtypeStruct((4,), np.dtype(np.int64))}


def feed(source, first=0, last=10, spec=SPEC):
    return Feed(source, spec, SingleDeviceSharding(jax.devices()[0]), first, last)


class Counter:
    """Row n is n."""

    def __init__(self, broken_at=None):
        self.broken_at = broken_at

    def rows(self, start, count):
        if self.broken_at is not None and start >= self.broken_at:
            raise OSError("the bucket is gone")
        return {"x": np.arange(start, start + count)}


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name == "feed"]


def test_batches_come_in_order_from_the_step_asked():
    with feed(Counter(), first=3, last=6) as batches:
        got = [np.asarray(batches.next()[0]["x"]).tolist() for _ in range(3)]
    assert got == [[12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22, 23]]
    assert not feed_threads()


@pytest.mark.parametrize("quick", [False, True])  # by the thread, and where the batch is taken
def test_a_source_that_fills_one_buffer_again_and_again_is_read_as_it_was(quick):
    class Reuses:
        in_memory = quick
        buffer = np.zeros((4, 4096), np.float32)

        def rows(self, start, count):
            self.buffer[:] = start // count
            return {"x": self.buffer}

    spec = {"x": jax.ShapeDtypeStruct((4, 4096), np.float32)}
    with feed(Reuses(), last=10**6, spec=spec) as batches:
        got = [batches.next()[0]["x"] for _ in range(6)]
        deadline = time.monotonic() + 60
        while quick and feed_threads():
            assert time.monotonic() < deadline
            got.append(batches.next()[0]["x"])
        got += [batches.next()[0]["x"] for _ in range(6)]
    assert [set(np.asarray(batch).ravel().tolist()) for batch in got] == [{step} for step in range(len(got))]


def test_a_memory_map_stays_one(tmp_path):
    """Its rows are read from the file as they come: neither the digest nor a copy has it whole in memory."""
    made = np.memmap(tmp_path / "x", np.float32, "w+", shape=(8, 2))
    made[:] = np.arange(16).reshape(8, 2)
    made.flush()
    source = ArraySource({"x": made, "n": list(range(8))})
    rows = source.rows(0, 8)
    np.testing.assert_array_equal(rows["x"][:, 0], 2.0 * rows["n"])
    assert type(rows["x"]) is np.ndarray and source.digest == ArraySource({"x": made, "n": list(range(8))}).digest


def test_no_more_batches_are_read_than_a_plan_counts():
    """Each of them is on the devices as soon as it is read."""
    third = threading.Event()

    class Counted(Counter):
        def rows(self, start, count):
            if start == 2 * 4:
                third.set()
            return super().rows(start, count)

    with feed(Counted()) as batches:
        assert not third.wait(0.5)
        batches.next()
        assert third.wait(30)


def test_leaving_early_ends_the_thread():
    with feed(Counter(), last=1000) as batches:
        batches.next()
    assert not feed_threads()


def test_what_is_read_in_no_time_needs_no_thread_until_it_is_slow():
    """From one to the other and back no batch is left out or comes twice."""
    slow = threading.Event()

    class Now(Counter):
        in_memory = True

        def rows(self, start, count):
            if slow.is_set():
                threading.Event().wait(0.02)
            return super().rows(start, count)

    got, deadline = [], time.monotonic() + 60
    with feed(Now(), last=10**6) as batches:

        def until(done):
            while not done():
                assert time.monotonic() < deadline
                got.append(int(batches.next()[0]["x"][0]))

        until(lambda: not feed_threads())
        slow.set()
        until(feed_threads)
        slow.clear()
        until(lambda: not feed_threads())
    assert got == list(range(0, 4 * len(got), 4))


def test_what_may_be_slow_at_any_time_keeps_its_thread(tmp_path):
    """A file may stand still while a save is due, or be read in large parts."""
    np.save(tmp_path / "x.npy", np.arange(400))
    source = ArraySource({"x": np.load(tmp_path / "x.npy", mmap_mode="r")}, seed=0)
    with feed(source, last=100) as batches:
        for _ in range(90):
            batches.next()
            assert feed_threads()


def test_an_error_of_the_source_arrives_where_the_batch_is_taken():
    with feed(Counter(broken_at=4)) as batches:
        batches.next()
        with pytest.raises(InputError, match=r"the data source failed: OSError: the bucket is gone \(.*test_feed.py:"):
            batches.next()


def test_rows_of_another_shape_or_dtype_are_refused_with_both():
    source = ArraySource({"x": np.zeros((9, 2), np.float32)})
    with feed(source) as batches, pytest.raises(InputError, match=r"\(4, 2\), 'float32'.*\(4,\), 'int64'"):
        batches.next()


def test_waiting_is_measured():
    class Slow(Counter):
        def rows(self, start, count):
            threading.Event().wait(0.05)
            return super().rows(start, count)

    with feed(Slow()) as batches:
        assert sum(batches.next()[1] for _ in range(10)) > 0.3


def test_a_number_that_32_bits_do_not_hold_is_refused_by_name():
    class Large(Counter):
        def rows(self, start, count):
            return {"x": np.arange(2**31 - 6, 2**31 - 6 + count) + start}

    with feed(Large()) as batches:
        assert np.asarray(batches.next()[0]["x"]).tolist()[-1] == 2**31 - 3
        with pytest.raises(InputError, match="x holds 2147483648, too large for int32"):
            batches.next()
