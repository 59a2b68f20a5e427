"""Several people, and several computers, in one project: nobody takes another's machines for his own."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.fleet.cloud_model import Cloud
from tests.fleet.test_keeper import keeper, run
from tpuswarm.errors import InputError
from tpuswarm.fleet import asked
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.keeping import fleets
from tpuswarm.fleet.keeping.document import own_mark


class Person:
    """Someone with a computer of their own, who asks for a TPU without a file."""

    def __init__(self, name: str, folder: Path, cloud: Cloud, monkeypatch):
        self.name, self.folder, self.cloud, self._monkeypatch = name, folder / name, cloud, monkeypatch

    def here(self) -> None:
        self._monkeypatch.setenv("XDG_STATE_HOME", str(self.folder / "state"))
        self._monkeypatch.setattr(fleets, "me", lambda: f"{self.name}@laptop")

    def up(self, adopt: str | None = None, bucket: str | None = None) -> tuple[fleets.Held, str]:
        """What `up --type v2-8` stores, and its note."""
        self.here()
        file, _ = asked.asked(None, "v2-8", ["us-central1-f"], None, False, "google")
        fleet = fleets.Fleet(file.name, "google", "shared", bucket)
        store = fleet.store(self.cloud)
        document, _, note = fleets.look_at(fleet, store, self.cloud, file, adopt)
        wanted = fleets.merged(file, fleet.mark, document.desired if document else None, True, None)
        fleets.store_wanted(fleet, store, file, wanted, document.desired if document else None)
        keeping = keeper(self.cloud, self.folder)
        keeping._store = store
        run(keeping, self.cloud, 400)
        return store, note


@pytest.fixture
def cloud() -> Cloud:
    return Cloud()


@pytest.fixture
def ann(tmp_path, cloud, monkeypatch) -> Person:
    return Person("ann", tmp_path, cloud, monkeypatch)


@pytest.fixture
def bob(tmp_path, cloud, monkeypatch) -> Person:
    return Person("bob", tmp_path, cloud, monkeypatch)


def test_machines_of_somebody_elses_fleet_are_not_adopted_for_their_name(cloud, ann, bob):
    ann.up()
    (hers,) = cloud.there.values()
    with pytest.raises(
        InputError, match=f"kept elsewhere or by somebody else: take another name.*--adopt {hers.fleet}"
    ):
        bob.up()
    assert list(cloud.there.values()) == [hers] and not cloud.deleted


def test_who_has_lost_the_document_finds_the_machines_again(cloud, ann):
    store, _ = ann.up()
    (fleet,) = {each.fleet for each in cloud.there.values()}
    Path(store.where).unlink()
    store, note = ann.up()
    assert "is lost: it is made again" in note and store.load().desired.fleet == fleet and len(cloud.there) == 1


def test_another_computer_of_the_same_person_says_which_fleet_it_takes_over(cloud, ann, bob):
    ann.up()
    (fleet,) = {each.fleet for each in cloud.there.values()}
    with pytest.raises(InputError, match="no machine carries the id v2-8-zzz"):
        bob.up(adopt="v2-8-zzz")
    store, _ = bob.up(adopt=fleet)
    assert store.load().desired.fleet == fleet and len(cloud.there) == 1
    with pytest.raises(InputError, match="only what has none is adopted"):
        bob.up(adopt="v2-8-zzz")


def test_a_fleet_in_a_shared_bucket_says_who_has_changed_it_last(ann, bob):
    assert ann.up(bucket="shared")[1] == "" and ann.up(bucket="shared")[1] == ""
    assert "was last changed by ann@laptop, 0 s ago: it may be in use" in bob.up(bucket="shared")[1]


def test_what_is_asked_while_another_command_waits_for_an_answer_is_not_undone(ann):
    """`down` of the keeper, at a limit, above all; a key that another computer adds is no change of what is wanted."""
    store, _ = ann.up()
    shown = store.load().desired
    store.change(lambda found: replace(found, desired=with_keys(found.desired, "ssh-ed25519 BBBB")))
    fleets.change(store, replace(with_keys(shown, "ssh-ed25519 AAAA"), revision=2), shown)
    keys = store.load().desired.pools[0].spec.metadata["ssh-keys"]
    assert "AAAA" in keys and "BBBB" in keys
    with pytest.raises(InputError, match="was changed while this command asked: give it again"):
        fleets.change(store, replace(shown, revision=2), shown)
    shown = store.load().desired
    store.change(lambda found: replace(found, desired=replace(found.desired, down="dollars are spent")))
    with pytest.raises(InputError, match="was changed while this command asked: give it again"):
        fleets.change(store, replace(shown, revision=3), shown)
    assert store.load().desired.down == "dollars are spent"


def with_keys(wanted: Desired, key: str) -> Desired:
    return replace(wanted, pools=tuple(asked.with_key(each, key) for each in wanted.pools))


def test_every_home_has_a_mark_of_its_own(ann, bob):
    marks = []
    for person in (ann, bob, ann):
        person.here()
        marks.append((own_mark(), fleets.Fleet("v2-8", "google", "shared", None).mark))
    assert marks[0] == marks[2] != marks[1] and marks[0][1] != marks[1][1]
