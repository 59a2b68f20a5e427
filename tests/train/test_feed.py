import threading

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from tpuswarm.errors import InputError
from tpuswarm.train.feed import Feed
from tpuswarm.train.source import ArraySource

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


def test_leaving_early_ends_the_thread():
    with feed(Counter(), last=1000) as batches:
        batches.next()
    assert not feed_threads()


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
