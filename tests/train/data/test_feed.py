import threading
import time
from types import SimpleNamespace

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
    """Row n is n; `before` is called with the first row of each batch, before it is read."""

    def __init__(self, before=lambda start: None, in_memory=False, first=0):
        self.in_memory, self._before, self._first = in_memory, before, first

    def rows(self, start, count):
        self._before(start)
        return {"x": self._first + np.arange(start, start + count)}


def feed_threads():
    return [thread for thread in threading.enumerate() if thread.name == "feed"]


def test_batches_come_in_order_from_the_given_step():
    with feed(Counter(), first=3, last=6) as batches:
        read = np.concatenate([batches.next()[0]["x"] for _ in range(3)])
    assert read.tolist() == list(range(12, 24)) and not feed_threads()


@pytest.mark.parametrize("in_memory", [False, True])  # read by the thread, and where the batch is taken
def test_source_may_fill_the_same_buffer_again(in_memory):
    class Reuses(Counter):
        buffer = np.zeros((4, 4096), np.float32)

        def rows(self, start, count):
            self.buffer[:] = start // count
            return {"x": self.buffer}

    spec = {"x": jax.ShapeDtypeStruct((4, 4096), np.float32)}
    with feed(Reuses(in_memory=in_memory), last=10**6, spec=spec) as batches:
        read = [batches.next()[0]["x"] for _ in range(6)]
        while in_memory and feed_threads():
            read.append(batches.next()[0]["x"])
        read += [batches.next()[0]["x"] for _ in range(6)]
    assert [set(np.asarray(batch).ravel().tolist()) for batch in read] == [{step} for step in range(len(read))]


def test_feed_reads_no_more_than_two_batches_ahead_and_can_be_left():
    """Each batch takes device memory as soon as it is read."""
    read = {start: threading.Event() for start in range(0, 40, 4)}
    with feed(Counter(lambda start: read[start].set())) as batches:
        assert read[4].wait(300) and not read[8].wait(0.3)
        batches.next()
        assert read[8].wait(300)
    assert not feed_threads()


def test_fast_source_needs_no_thread_until_it_becomes_slow():
    slow, read = threading.Event(), []
    source = Counter(lambda start: time.sleep(0.02 * slow.is_set()), in_memory=True)
    with feed(source, last=10**6) as batches:

        def read_until(done):
            while not done():
                read.append(int(batches.next()[0]["x"][0]))

        read_until(lambda: not feed_threads())
        slow.set()
        read_until(feed_threads)
        slow.clear()
        read_until(lambda: not feed_threads())
    assert read == list(range(0, 4 * len(read), 4))


def test_files_always_keep_the_thread(tmp_path):
    """A file may block while a save is due, or be read in large parts."""
    np.save(tmp_path / "x.npy", np.arange(400))
    source = ArraySource({"x": np.load(tmp_path / "x.npy", mmap_mode="r")}, seed=0)
    with feed(source, last=100) as batches:
        for _ in range(90):
            batches.next()
            assert feed_threads()


def fails(start):
    raise OSError("the bucket is gone")


@pytest.mark.parametrize(
    ("source", "good", "words"),
    [
        (Counter(lambda start: start and fails(start)), 1, r"OSError: the bucket is gone \(.*test_feed.py:"),
        (ArraySource({"x": np.zeros((9, 2), np.float32)}), 0, r"\(4, 2\), 'float32'.*\(4,\), 'int64'"),
        (Counter(first=2**31 - 6), 1, "x holds 2147483648, too large for int32"),
    ],
)
def test_error_of_the_source_is_raised_where_the_batch_is_taken(source, good, words):
    with feed(source) as batches:
        for _ in range(good):
            batches.next()
        with pytest.raises(InputError, match=words):
            batches.next()


def test_waiting_time_is_measured(monkeypatch):
    seconds, waiting = [0.0], threading.Event()

    def perf_counter():
        if threading.current_thread() is threading.main_thread():
            waiting.set()
        return seconds[0]

    def before(start):
        assert waiting.wait(300)
        seconds[0] += 5.0

    monkeypatch.setattr("tpuswarm.train.data.feed.time", SimpleNamespace(perf_counter=perf_counter))
    with feed(Counter(before), last=1) as batches:
        assert batches.next()[1] == 5.0
