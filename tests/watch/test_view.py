"""A page receives the figures of `list` and `top`, and then only changes."""

from tests.watch.fake_run import FakeRun
from tests.watch.fleets import fleet_state
from tpuswarm.swarm.views.status import read_run
from tpuswarm.watch.page.view import changed_sections, make_sections


def test_fleet_lists_machines_with_chips_and_reasons_for_missing_ones():
    state, rows = fleet_state(None)
    found = make_sections(state, rows)
    busy, idle = found["machines"]["v2-usc1f-0"], found["machines"]["v2-usc1f-1"]
    assert busy[:4] == ["small", "v2-8", "us-central1-f", "ready"] and busy[12:] == [70, [6e9, 8e9], 1]
    assert idle[12:14] == [None, None] and "v2-usc1f-2 was preempted" in found["machines"]["small: missing"][7]
    assert found["facts"]["wanted"] == 3 and found["facts"]["fleet"] == state.machines.document.desired.fleet
    assert len({len(row) for row in found["machines"].values()}) == 1


def test_only_changes_are_sent(tmp_path):
    run = FakeRun(tmp_path / "run", 5, 100).take_lock()
    run.grow(3)
    state, rows = fleet_state(read_run(run.folder))
    before = make_sections(state, rows)
    assert changed_sections(before, make_sections(state, rows)) == {}
    run.lose_member("m2")
    now = make_sections(fleet_state(read_run(run.folder))[0], rows)
    found = changed_sections(before, now)
    assert set(found["members"]) == {"m2"} and found["members"]["m2"][0] == "lost" and "machines" not in found
    gone = {**now, "members": {name: row for name, row in now["members"].items() if name != "m0"}}
    assert changed_sections(now, gone) == {"members": {"m0": None}}
    run.release()
