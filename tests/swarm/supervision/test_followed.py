"""The ledger as a supervisor follows it."""

import random
from collections import Counter

from tests.swarm.chains import Run
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision.followed import RECENT, Followed


def test_a_run_that_goes_on_is_read_once_for_all_that_is_asked_of_it(tmp_path, monkeypatch):
    """Its view, its newest records and what may be deleted: reading is what a long run costs at its start."""
    run = Run(Store(str(tmp_path)), random.Random(3), arrays=False)
    for _ in range(RECENT + 4):
        run.push(run.members[0])
        run.commit()
    read, inner = Counter(), Store.read
    monkeypatch.setattr(Store, "read", lambda self, name: read.update([name]) or inner(self, name))
    followed = Followed(tmp_path, 1.0)
    assert followed.news(look=True) == run.records[-RECENT:] == followed.recent
    followed._clean(followed.view)
    assert followed.view == run.view
    run.push(run.members[1])
    run.commit()
    assert followed.news(look=True) == run.records[-1:] and followed.view == run.view
    followed._clean(followed.view)
