"""The ledger as a supervisor follows it."""

import os
import random
import time
from itertools import pairwise

import pytest

from tests.swarm.chains import Run, object_names
from tpuswarm.swarm.storage import retention
from tpuswarm.swarm.storage.ledger import commit_name
from tpuswarm.swarm.storage.retention import MIN_AGE_S, is_recent
from tpuswarm.swarm.storage.store import Store
from tpuswarm.swarm.supervision.ledger_follower import LIMIT, RECENT_COUNT, LedgerFollower


def test_running_ledger_is_read_from_its_bookmark_on(tmp_path, monkeypatch, names_read):
    """Clean-up reads only the older records that it needs."""
    monkeypatch.setattr(retention, "RESCAN_COUNT", RECENT_COUNT)
    run = Run(Store(str(tmp_path)), random.Random(3), arrays=False)
    for _ in range(3 * RECENT_COUNT):
        run.push(run.members[0])
        run.commit()
    run.ledger.bookmark(run.view)
    names_read.clear()

    def commits_read():
        names = {name for name in names_read if name.startswith("commits/")}
        names_read.clear()
        return names

    follower = LedgerFollower(tmp_path, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "names", lambda self, prefix: pytest.fail("in a bucket that is a request"))
        assert follower.new_records(may_exist=False) == []
    assert follower.new_records(may_exist=True) == run.records[-RECENT_COUNT:] == follower.recent
    follower._clean(follower.view)
    assert follower.view == run.view
    assert commits_read() == {commit_name(n) for n in range(2 * RECENT_COUNT + 1, 3 * RECENT_COUNT + 2)}
    run.push(run.members[1])
    run.commit()
    assert follower.new_records(may_exist=True) == run.records[-1:] and follower.view == run.view
    follower._clean(follower.view)
    assert commits_read() == {commit_name(3 * RECENT_COUNT + n) for n in (1, 2)}


@pytest.mark.parametrize("is_old", [True, False])
def test_damaged_record_is_reported_once_and_stops_clean_up_only_if_it_is_recent(tmp_path, monkeypatch, is_old):
    """A damaged recent record may name any file: until it is restored, none are removed."""
    monkeypatch.setattr("tpuswarm.swarm.supervision.ledger_follower.CLEAN_INTERVAL_S", -1.0)
    run = Run(Store(tmp_path), random.Random(5), arrays=False).grow(45)
    run.ledger.bookmark(run.view)

    def stored():
        return {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("objects/*")}

    (tmp_path / "objects").mkdir()
    written = time.time() - MIN_AGE_S - 60
    for name in object_names(*run.records):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (written, written))
    before, newest = stored(), run.view.newest.changes
    recent = [record for record in run.records if is_recent(record.changes, newest, LIMIT)]
    needed = object_names(run.records[0], *recent)
    changed = [after.version for one, after in pairwise(run.records) if after.state != one.state]
    version = changed[2 if is_old else -2]
    alone = object_names(run.records[version]) - object_names(*run.records[:version], *run.records[version + 1 :])
    assert alone and needed | alone < before and is_old == (run.records[version] not in recent)
    path = tmp_path / commit_name(version)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"rate", b"rete"))
    follower = LedgerFollower(tmp_path, 1.0)
    follower.view = run.view

    def clean(times):
        reports = []
        for _ in range(times + 1):  # each reports on the one before
            reports.append(follower.clean())
            follower._cleaning.exception()  # waits
        return [report for report in reports if report]

    (report,) = clean(4)
    assert f"{commit_name(version)} in {tmp_path} is damaged" in report and "restore a copy" in report
    assert report.startswith("files of old commits could not be removed") != is_old
    assert stored() == (needed | alone if is_old else before)
    path.write_bytes(whole)
    assert clean(2) == []
    assert stored() == (needed | alone if is_old else needed)
