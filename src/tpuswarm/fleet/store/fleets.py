"""Fleets as commands find them: by swarm.toml, or by what this computer remembers of those it has made."""

import getpass
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from tpuswarm.cloud.protocol import Listing, Provider
from tpuswarm.config.formatting import format_age
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.jobs import end_job
from tpuswarm.fleet.decide.state import WorkStatus
from tpuswarm.fleet.spec.desired_from_file import desired_from_file, keep_ssh_keys, location_mark, new_fleet_id
from tpuswarm.fleet.spec.file import DEFAULT_FILE, SwarmFile, read_swarm
from tpuswarm.fleet.spec.providers import REHEARSAL_PROJECT
from tpuswarm.fleet.store.document import (
    Damaged,
    Document,
    DocumentStore,
    KeeperLease,
    LocalBucket,
    is_holder_alive,
    state_folder,
    state_folder_mark,
)
from tpuswarm.fleet.store.history import History
from tpuswarm.remote.sync.tree import KeptTree
from tpuswarm.train.process.atomic import write_atomically

LEAD_TIMEOUT_S = 60.0
"""Seconds in which a keeper that was started in the background should lead."""


@dataclass(frozen=True)
class Fleet:
    """Where a fleet is; nothing is asked of a cloud before `provider`."""

    name: str
    provider_name: str
    project: str
    bucket: str | None
    """None: its document is a file of this computer."""

    @property
    def called(self) -> str:
        """PROJECT/NAME, by which no other one is meant: a rehearsed fleet may have the name of one that is paid for."""
        return f"{self.project}/{self.name}"

    @property
    def folder(self) -> Path:
        """What this computer keeps of it."""
        return state_folder() / "fleets" / self.project / self.name

    @property
    def history(self) -> History:
        """What this computer has seen of it."""
        return History(self.folder / "history.db")

    @property
    def log(self) -> Path:
        """What a keeper in the background says."""
        return self.folder / "keeper.log"

    @property
    def tree(self) -> KeptTree:
        """The folder that `sync` sent last: machines that come later get it as it was."""
        return KeptTree(self.folder / "tree")

    @property
    def mark(self) -> str:
        """What the random part of its ids begins with: no fleet of this name that is kept elsewhere has the same."""
        kept = f"gs://{self.bucket}" if self.bucket else state_folder_mark()
        return location_mark(f"{kept}/{self.project}/{self.name}")

    def provider(self) -> Provider:
        """The cloud."""
        from tpuswarm.cloud.google.provider import Google
        from tpuswarm.fleet.spec.providers import open_access

        return Google(open_access(self.provider_name, self.project))

    def store(self, provider: Provider) -> DocumentStore:
        """Its document."""
        if self.bucket:
            return DocumentStore(provider.bucket(self.bucket), self.name, f"gs://{self.bucket}")
        folder = state_folder() / "documents" / self.project
        return DocumentStore(LocalBucket(folder), self.name, str(folder))

    def remember(self) -> None:
        """That this computer knows it, for commands without a file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "fleet.json", json.dumps(asdict(self)))

    def forget(self) -> None:
        """It is gone."""
        (self.folder / "fleet.json").unlink(missing_ok=True)


def fleet_of_file(file: SwarmFile) -> Fleet:
    """The fleet of a file."""
    from tpuswarm.cloud.google.settings import find_project

    local = file.provider == "rehearsal"
    project = (file.project or REHEARSAL_PROJECT) if local else find_project(file.project)
    return Fleet(file.name, file.provider, project, file.storage.bucket if file.storage else None)


def known_fleets() -> list[Fleet]:
    """Those that this computer has made and not brought down."""
    found = []
    for path in sorted((state_folder() / "fleets").glob("*/*/fleet.json")):
        try:
            found.append(Fleet(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue  # half written or of another version: `up` writes it again
    return found


def find_fleet(text: str | None) -> tuple[Fleet, SwarmFile | None]:
    """The fleet that is meant: by file, name or PROJECT/NAME, or by none where only one is known. Raises InputError."""
    fleets = known_fleets()
    if found := next((each for each in fleets if text == each.called), None):
        return found, None
    if text is not None and (text.endswith(".toml") or "/" in text):
        file = read_swarm(Path(text))
        return fleet_of_file(file), file
    if text is None and DEFAULT_FILE.exists():
        file = read_swarm(DEFAULT_FILE)
        return fleet_of_file(file), file
    named = [each for each in fleets if text in (None, each.name)]
    if len(named) == 1:
        return named[0], None
    if named:
        raise InputError(f"there are {len(named)} fleets: name one of {', '.join(each.called for each in named)}")
    if text is None:
        raise InputError("there is no swarm.toml here, and this computer has made no fleet: name the file")
    raise InputError(f"there is no fleet {text!r}; {did_you_mean(text, [each.name for each in fleets])}")


def recovered_id(fleet: Fleet, listing: Listing, adopt: str | None) -> str | None:
    """The id of a fleet whose document is lost, from the labels of its machines; None: there are none.

    A name alone proves nothing: a colleague's fleet may have the same. It is ours where its document was kept where
    ours would be, or where a person says so (`adopt`). Raises InputError for machines of which neither is true.
    """
    there = {each.fleet for each in listing.machines if each.fleet}
    if adopt is not None:
        if adopt not in there:
            raise InputError(f"no machine carries the id {adopt}; {did_you_mean(adopt, there)}")
        return adopt
    alike = sorted(each for each in there if each.rpartition("-")[0] == fleet.name)
    mine = [each for each in alike if each.rpartition("-")[2].startswith(fleet.mark)]
    if len(alike) > 1 or (alike and not mine):
        raise InputError(
            f"machines of a fleet {fleet.name} are there already ({', '.join(alike)}), which is kept elsewhere or by "
            f"somebody else: take another name, or take it over with `tpuswarm up --adopt {alike[0]}`"
        )
    return mine[0] if mine else None


class Store(Protocol):
    """Something that holds a document: a `DocumentStore`, or the memory of a command."""

    where: str

    def load(self) -> Document | None:
        """As it is now; None: there is none."""

    def save(self, document: Document) -> None:
        """Write what was loaded last, changed."""

    def change(self, make: Callable[[Document | None], Document]) -> Document:
        """Read, change and write."""


class MemoryStore:
    """The document of a fleet that has lost its own, for as long as its machines are deleted."""

    where = "memory"

    def __init__(self, document: Document):
        self._document = document

    def load(self) -> Document | None:
        """See Held."""
        return self._document

    def save(self, document: Document) -> None:
        """See Held."""
        self._document = document

    def change(self, make: Callable[[Document | None], Document]) -> Document:
        """See Held."""
        self._document = make(self._document)
        return self._document


def inspect_fleet(
    fleet: Fleet, store: Store, cloud: Provider, file: SwarmFile | None, adopt: str | None = None
) -> tuple[Document | None, Listing, str]:
    """The document, the machines, and a note for the user.

    A document that is damaged or lost is made again from the file and the labels of the machines, as `recovered_id`
    has it; without a file, Damaged is raised, or InputError.
    """
    zones = tuple(dict.fromkeys(zone for pool in file.pool for zone in pool.zones)) if file else ()
    note = ""
    try:
        document = store.load()
    except Damaged as error:
        if file is None:
            raise
        note, document = str(error), None
    listing = cloud.machines(dict.fromkeys((*zones, *(document.zones if document else ()))))
    if document is not None:
        if adopt not in (None, document.desired.fleet):
            raise InputError(
                f"{store.where} is there, of fleet {document.desired.fleet}: only what has none is adopted"
            )
        note = _changed_by(document)
    elif lost := recovered_id(fleet, listing, adopt):
        if file is None:
            raise InputError(
                f"machines of {lost} are there, and their document is lost: `tpuswarm up` with their swarm.toml makes "
                f"it again, `tpuswarm down --orphans {lost}` deletes them"
            )
        note = note or f"{store.where} is lost: it is made again from {file.name}'s file and the labels of machines"
        document = new_document(fleet, file, desired_from_file(file, lost, False, None))
    return document, listing, note


def _changed_by(document: Document) -> str:
    """Who has changed a fleet last, where that was somebody else; empty: this person here, or nobody knows."""
    if document.asked_by in ("", current_user()):
        return ""
    since = format_age(time.time() - document.asked_at)
    return f"{document.desired.fleet} was last changed by {document.asked_by}, {since} ago: it may be in use"


def current_user() -> str:
    """Who gives this command, and where."""
    return f"{getpass.getuser()}@{socket.gethostname()}"


def new_document(fleet: Fleet, file: SwarmFile, wanted: Desired) -> Document:
    """A new one."""
    found = Document(file.name, file.provider, fleet.project, wanted, wanted.zones)
    return replace(found, asked_by=current_user(), asked_at=time.time())


def merge_desired(file: SwarmFile, mark: str, before: Desired | None, paid: bool, public_key: str | None) -> Desired:
    """What the file asks, with what earlier commands have asked. `mark`: the fleet's."""
    if before is None:
        return desired_from_file(file, new_fleet_id(file.name, mark), paid, public_key)
    wanted = desired_from_file(file, before.fleet, paid or before.paid, public_key)
    pools = tuple(keep_ssh_keys(each, before.pools) for each in wanted.pools)
    kept_on = before.kept_on if any(each.name == before.kept_on for each in pools) else None
    return replace(
        wanted, pools=pools, paused=before.paused, dropped=before.dropped, revision=before.revision + 1, kept_on=kept_on
    )


def store_desired(fleet: Fleet, store: Store, file: SwarmFile, wanted: Desired, shown: Desired | None) -> None:
    """Store what is wanted from now on, in the place of a damaged document as well.

    `shown`: what was wanted when `wanted` was made of it and a person was asked; InputError if it is not so any more.
    """

    def make(found: Document | None) -> Document:
        if found is None:
            return new_document(fleet, file, wanted)
        _require_same(store, found, shown)
        zones = tuple(dict.fromkeys((*found.zones, *wanted.zones)))
        if found.desired.down is not None:  # what ran on it has ended with it
            found = replace(found, work=WorkStatus(), jobs=tuple(end_job(each) for each in found.jobs))
        kept = _with_keys(wanted, found.desired)
        # What was done before is not what is asked for now: a job may be on its way, to come down after.
        work = replace(found.work, done=False)
        return replace(found, desired=kept, zones=zones, work=work, asked_by=current_user(), asked_at=time.time())

    try:
        store.change(make)
    except Damaged:
        store.save(make(None))
    fleet.remember()


def change_desired(store: Store, wanted: Desired, shown: Desired) -> None:
    """Store what is wanted from now on of a fleet that exists; `shown` as in `store_wanted`."""

    def make(found: Document | None) -> Document:
        if found is None:
            raise RunFailed(f"{store.where} is gone: somebody has deleted it")
        _require_same(store, found, shown)
        return replace(found, desired=_with_keys(wanted, found.desired), asked_by=current_user(), asked_at=time.time())

    store.change(make)


def _require_same(store: Store, found: Document, shown: Desired | None) -> None:
    """Raises InputError where somebody, or the keeper at a limit, has asked for something else meanwhile."""
    now = found.desired
    if shown is None or (now.fleet, now.revision, now.down) != (shown.fleet, shown.revision, shown.down):
        raise InputError(
            f"{store.where} was changed while this command asked: give it again, and it shows what is wanted now"
        )


def _with_keys(wanted: Desired, found: Desired) -> Desired:
    """With the keys that other computers have added meanwhile, which is no change of what is wanted."""
    return replace(wanted, pools=tuple(keep_ssh_keys(each, found.pools) for each in wanted.pools))


def start_background_keeper(fleet: Fleet, store: Store, file: Path | None) -> None:
    """Start a keeper in the background, which outlives this command and the terminal, unless one leads already."""
    document = store.load()
    if document and document.lease and _is_detached(document.lease):
        return
    fleet.folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "tpuswarm", "keep", str(file.absolute()) if file else fleet.called]
    with fleet.log.open("a") as log:
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def wait_for_keeper(fleet: Fleet, store: Store) -> None:
    """Wait until a keeper leads that outlives this command. RunFailed, with the end of its log, where none does."""
    until = time.monotonic() + LEAD_TIMEOUT_S
    while time.monotonic() < until:
        document = store.load()
        if document is None or document.desired.down is not None:
            return  # there is nothing to be kept any more
        if (lease := document.lease) and (_is_detached(lease) or is_holder_alive(lease) is None):
            return
        time.sleep(0.3)
    lines = fleet.log.read_text(errors="replace").splitlines() if fleet.log.exists() else []
    said = lines[-1] if lines else "it said nothing"
    raise RunFailed(f"no keeper leads after {LEAD_TIMEOUT_S:.0f} s: {said}; `tpuswarm keep` keeps the fleet from here")


def _is_detached(lease: KeeperLease) -> bool:
    """Whether the holder of a lease is a keeper in the background of this computer: one of no terminal."""
    try:
        title = Path(f"/proc/{lease.pid}/cmdline").read_bytes().split(b"\0")
        return bool(is_holder_alive(lease)) and b"keep" in title and os.getsid(lease.pid) == lease.pid
    except OSError:  # it has ended this moment
        return False


def find_orphans(fleet: Fleet, store: Store, cloud: Provider, fleet_id: str) -> tuple[Document, Listing]:
    """What stands for a fleet of which there are only machines, and they. Raises InputError where there are none."""
    try:
        document = store.load()
    except Damaged:
        document = None
    listing = cloud.machines(document.zones if document else ())
    if document is not None and document.desired.fleet == fleet_id:
        raise InputError(f"{fleet_id} is this fleet: `tpuswarm down` without --orphans")
    found = [each for each in listing.machines if each.fleet == fleet_id]
    if not found:
        raise InputError(f"no machine carries the id {fleet_id}")
    zones = tuple(dict.fromkeys(each.zone for each in found))
    return Document(fleet.name, fleet.provider_name, fleet.project, Desired(fleet_id, ()), zones), listing
