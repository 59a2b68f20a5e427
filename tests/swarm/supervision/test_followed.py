"""The ledger as a supervisor follows it."""

import os
import random
import time
from collections import Counter
from itertools import pairwise

import pytest

from tests.swarm.chains import Run
from tpuswarm.swarm.storage import retention
from tpuswarm.swarm.storage.ledger import commit_name
from tpuswarm.swarm.storage.objects import object_name
from tpuswarm.swarm.storage.retention import SETTLING, is_recent
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision.followed import LIMIT, RECENT, Followed


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
    with monkeypatch.context() as patch:
        patch.setattr(Store, "names", lambda self, prefix: pytest.fail("in a bucket that is a request"))
        assert followed.news(look=False) == []
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


def cleaned(followed, times):
    """What a supervisor says of so many clean-ups."""
    said = []
    for _ in range(times + 1):  # of the last one, at the next
        said.append(followed.clean())
        followed._cleaning.exception()  # waits
    return [each for each in said if each]


def named(records):
    return {object_name(digest) for record in records for digest in record.objects}


def stored(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("objects/*")}


@pytest.mark.parametrize("goes", [True, False])
def test_a_damaged_record_is_said_once_and_stops_clean_up_only_where_what_stays_is_in_it(tmp_path, monkeypatch, goes):
    """An old one is done without. One of the last: nobody knows what it keeps, so nothing goes until it is mended."""
    monkeypatch.setattr("tpuswarm.swarm.supervision.followed.CLEAN", -1.0)
    run = Run(Store(tmp_path), random.Random(5), arrays=False).grow(45)
    run.ledger.bookmark(run.view)
    (tmp_path / "objects").mkdir()
    for name in named(run.records):
        (tmp_path / name).touch()
        at = time.time() - SETTLING - 60
        os.utime(tmp_path / name, (at, at))
    before, newest = stored(tmp_path), run.view.newest.changes
    recent = [each for each in run.records if is_recent(each.changes, newest, LIMIT)]
    stays = named([run.records[0], *recent])
    changed = [after.version for one, after in pairwise(run.records) if after.state != one.state]
    version = changed[2 if goes else -2]
    alone = named([run.records[version]]) - named(each for each in run.records if each.version != version)
    assert alone and stays | alone < before and goes == (run.records[version] not in recent)
    path = tmp_path / commit_name(version)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"rate", b"rete"))
    followed = Followed(tmp_path, 1.0)
    followed.view = run.view
    (said,) = cleaned(followed, 4)
    assert f"{commit_name(version)} in {tmp_path} is damaged" in said and "restore a copy" in said
    assert said.startswith("files of old commits could not be removed") != goes
    assert stored(tmp_path) == (stays | alone if goes else before)
    path.write_bytes(whole)
    assert cleaned(followed, 2) == []
    assert stored(tmp_path) == (stays | alone if goes else stays)
