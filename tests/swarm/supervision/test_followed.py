"""The ledger as a supervisor follows it."""

import random
from collections import Counter

from tests.swarm.chains import Run
from tpuswarm.swarm.storage import retention
from tpuswarm.swarm.storage.ledger import commit_name
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision.followed import RECENT, Followed


def test_a_run_that_goes_on_is_read_from_its_bookmark_on(tmp_path, monkeypatch):
    """Its view and its newest records; what may be deleted, only as far back as that needs."""
    monkeypatch.setattr(retention, "BACK", RECENT)
    run = Run(Store(str(tmp_path)), random.Random(3), arrays=False)
    for _ in range(3 * RECENT):
        run.push(run.members[0])
        run.commit()
    run.ledger.bookmark(run.view)
    first = 2 * RECENT
    read, inner = Counter(), Store.read
    monkeypatch.setattr(Store, "read", lambda self, name: read.update([name]) or inner(self, name))
    followed = Followed(tmp_path, 1.0)
    assert followed.news(look=True) == run.records[-RECENT:] == followed.recent
    followed._clean(followed.view)
    assert followed.view == run.view and commit_name(first) not in read
    assert {name for name in read if name.startswith("commits/")} == {
        commit_name(n) for n in range(first + 1, 3 * RECENT + 2)
    }
    read.clear()
    run.push(run.members[1])
    run.commit()
    assert followed.news(look=True) == run.records[-1:] and followed.view == run.view
    followed._clean(followed.view)
    assert {name for name in read if name.startswith("commits/")} == {commit_name(3 * RECENT + n) for n in (1, 2)}
