"""Find fleets, by swarm.toml or by name, and load, create and change their documents."""

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tpuswarm.cloud.protocol import Listing, Provider
from tpuswarm.config.formatting import format_age
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.decide.fleet_state import WorkStatus
from tpuswarm.fleet.decide.jobs import end_job
from tpuswarm.fleet.spec.desired_from_file import desired_from_file, keep_ssh_keys, location_mark, new_fleet_id
from tpuswarm.fleet.spec.file import DEFAULT_FILE, SwarmFile, read_swarm
from tpuswarm.fleet.spec.providers import REHEARSAL_PROJECT
from tpuswarm.fleet.store.document import (
    Damaged,
    Document,
    DocumentStore,
    KeeperLease,
    LocalBucket,
    MemoryBucket,
    is_holder_alive,
    state_folder_mark,
)
from tpuswarm.fleet.store.history import History
from tpuswarm.remote.sync.tree_store import TreeStore
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.computer import process_start, state_folder

LEAD_TIMEOUT_S = 60.0
"""A background keeper must lead within this time."""
PID_FILE = "keeper.pid"
"""In a fleet's folder: the process of this computer's background keeper."""


@dataclass(frozen=True)
class Fleet:
    """The location of a fleet; contacts no cloud."""

    name: str
    provider_name: str
    project: str
    bucket: str | None
    """Without a bucket, the document is a file of this computer."""

    @property
    def full_name(self) -> str:
        """PROJECT/NAME: a rehearsed fleet may have the name of a real one."""
        return f"{self.project}/{self.name}"

    @property
    def folder(self) -> Path:
        """This computer's files of the fleet."""
        return state_folder() / "fleets" / self.project / self.name

    @property
    def history(self) -> History:
        return History(self.folder / "history.db")

    @property
    def log(self) -> Path:
        """The log of a background keeper."""
        return self.folder / "keeper.log"

    @property
    def tree_store(self) -> TreeStore:
        """A copy of the folder that `sync` sent last, for machines that come later."""
        return TreeStore(self.folder / "tree")

    @property
    def mark(self) -> str:
        """Letters in the fleet's ids that no fleet of this name with a document elsewhere has."""
        location = f"gs://{self.bucket}" if self.bucket else state_folder_mark()
        return location_mark(f"{location}/{self.project}/{self.name}")

    def provider(self) -> Provider:
        from tpuswarm.cloud.google.provider import GoogleProvider
        from tpuswarm.fleet.spec.providers import open_access

        return GoogleProvider(open_access(self.provider_name, self.project))

    def store(self, provider: Provider) -> DocumentStore:
        if self.bucket:
            return DocumentStore(provider.bucket(self.bucket), self.name, f"gs://{self.bucket}")
        folder = state_folder() / "documents" / self.project
        return DocumentStore(LocalBucket(folder), self.name, str(folder))

    def remember(self) -> None:
        """Let commands without a file find the fleet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "fleet.json", json.dumps(asdict(self)), is_shared=True)

    def forget(self) -> None:
        (self.folder / "fleet.json").unlink(missing_ok=True)


def fleet_of_file(file: SwarmFile) -> Fleet:
    from tpuswarm.cloud.google.settings import find_project

    local = file.provider == "rehearsal"
    project = (file.project or REHEARSAL_PROJECT) if local else find_project(file.project)
    return Fleet(file.name, file.provider, project, file.storage.bucket if file.storage else None)


def known_fleets() -> list[Fleet]:
    """Return the fleets that this computer has made and not brought down."""
    fleets = []
    for path in sorted((state_folder() / "fleets").glob("*/*/fleet.json")):
        try:
            fleets.append(Fleet(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue  # half written, or by another version: `up` writes it again
    return fleets


def find_fleet(text: str | None) -> tuple[Fleet, SwarmFile | None]:
    """Find a fleet by file, NAME or PROJECT/NAME; without a text, the file here or the only known fleet."""
    fleets = known_fleets()
    if found := next((fleet for fleet in fleets if text == fleet.full_name), None):
        return found, None
    if text is not None and (text.endswith(".toml") or "/" in text):
        file = read_swarm(Path(text))
        return fleet_of_file(file), file
    if text is None and DEFAULT_FILE.exists():
        file = read_swarm(DEFAULT_FILE)
        return fleet_of_file(file), file
    matching = [fleet for fleet in fleets if text in (None, fleet.name)]
    if len(matching) == 1:
        return matching[0], None
    if matching:
        names = ", ".join(fleet.full_name for fleet in matching)
        raise InputError(f"there are {len(matching)} fleets: name one of {names}")
    if text is None:
        raise InputError("there is no swarm.toml here, and this computer has made no fleet: name the file")
    raise InputError(f"there is no fleet {text!r}; {did_you_mean(text, [fleet.name for fleet in fleets])}")


def recovered_id(fleet: Fleet, listing: Listing, adopt: str | None) -> str | None:
    """Return the id of a fleet whose document is lost, from the labels of its machines, if there are any.

    A colleague's fleet may have the same name. An id is ours if its mark fits our document's location, or if the user
    adopts it. Raise InputError for other machines of a fleet of this name.
    """
    ids = {machine.fleet for machine in listing.machines if machine.fleet}
    if adopt is not None:
        if adopt not in ids:
            raise InputError(f"no machine carries the id {adopt}; {did_you_mean(adopt, ids)}")
        return adopt
    same_name = sorted(id_ for id_ in ids if id_.rpartition("-")[0] == fleet.name)
    own = [id_ for id_ in same_name if id_.rpartition("-")[2].startswith(fleet.mark)]
    if len(same_name) > 1 or (same_name and not own):
        raise InputError(
            f"machines of a fleet {fleet.name} exist already ({', '.join(same_name)}), whose document is elsewhere: "
            f"choose another name, or take it over with `tpuswarm up --adopt {same_name[0]}`"
        )
    return own[0] if own else None


def inspect_fleet(
    fleet: Fleet, store: DocumentStore, cloud: Provider, file: SwarmFile | None, adopt: str | None = None
) -> tuple[Document | None, Listing, str]:
    """Return the document, the machines, and a note for the user.

    A lost or damaged document is made again from the file and `recovered_id`; without a file, raise Damaged or
    InputError.
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
            raise InputError(f"{store.where} exists, of fleet {document.desired.fleet}: there is nothing to adopt")
        note = _changed_by(document)
    elif lost := recovered_id(fleet, listing, adopt):
        if file is None:
            raise InputError(
                f"machines of {lost} exist, and their document is lost: `tpuswarm up` with their swarm.toml makes it "
                f"again, `tpuswarm down --orphans {lost}` deletes them"
            )
        note = note or f"{store.where} is lost; it is made again from {file.name}'s file and the machines' labels"
        document = new_document(fleet, file, desired_from_file(file, lost, False, None))
    return document, listing, note


def _changed_by(document: Document) -> str:
    if document.asked_by in ("", current_user()):
        return ""
    age = format_age(time.time() - document.asked_at)
    return f"{document.desired.fleet} was last changed by {document.asked_by}, {age} ago: it may be in use"


def current_user() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


def new_document(fleet: Fleet, file: SwarmFile, desired: Desired) -> Document:
    return Document(
        file.name, file.provider, fleet.project, desired, desired.zones, asked_by=current_user(), asked_at=time.time()
    )


def merge_desired(file: SwarmFile, mark: str, before: Desired | None, paid: bool, public_key: str | None) -> Desired:
    """Combine the file with what earlier commands have requested. `mark`: the fleet's."""
    if before is None:
        return desired_from_file(file, new_fleet_id(file.name, mark), paid, public_key)
    desired = _with_keys(desired_from_file(file, before.fleet, paid or before.paid, public_key), before)
    kept_on = before.kept_on if any(pool.name == before.kept_on for pool in desired.pools) else None
    return replace(desired, paused=before.paused, dropped=before.dropped, revision=before.revision + 1, kept_on=kept_on)


def store_desired(fleet: Fleet, store: DocumentStore, file: SwarmFile, desired: Desired, shown: Desired | None) -> None:
    """Store the desired state of a new or existing fleet, also in place of a damaged document.

    `shown`: the state that `desired` was derived from when the user confirmed. Raise InputError if it has changed.
    """

    def make(found: Document | None) -> Document:
        if found is None:
            created = new_document(fleet, file, desired)
            return created if shown else replace(created, used_zones=())  # nothing can exist of a new id
        if found.desired.down is not None:  # its jobs have ended with it
            found = replace(found, work=WorkStatus(), jobs=tuple(end_job(job) for job in found.jobs))
        zones = tuple(dict.fromkeys((*found.zones, *desired.zones)))
        found = replace(found, zones=zones, work=replace(found.work, done=False))  # a job may follow
        return _with_desired(store, found, desired, shown)

    try:
        store.change(make)
    except Damaged:
        store.save(make(None))
    fleet.remember()


def change_desired(store: DocumentStore, desired: Desired, shown: Desired) -> None:
    """Store the desired state of an existing fleet; `shown` as in `store_desired`."""

    def make(found: Document | None) -> Document:
        if found is None:
            raise RunFailed(f"{store.where} was deleted")
        return _with_desired(store, found, desired, shown)

    store.change(make)


def _with_desired(store: DocumentStore, found: Document, desired: Desired, shown: Desired | None) -> Document:
    now = found.desired
    if shown is None or (now.fleet, now.revision, now.down) != (shown.fleet, shown.revision, shown.down):
        raise InputError(f"{store.where} was changed while this command asked: repeat it to see the new state")
    desired = _with_keys(desired, now)
    return replace(found, desired=desired, waits=(), asked_by=current_user(), asked_at=time.time())


def _with_keys(desired: Desired, found: Desired) -> Desired:
    return replace(desired, pools=tuple(keep_ssh_keys(pool, found.pools) for pool in desired.pools))


def start_background_keeper(fleet: Fleet, store: DocumentStore, file: Path | None) -> None:
    """Start a keeper that outlives this command and its terminal, unless one leads already."""
    document = store.load()
    if document and document.lease and _is_background_keeper(document.lease):
        return
    fleet.folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "tpuswarm", "keep", str(file.absolute()) if file else fleet.full_name]
    with fleet.log.open("a") as log:
        keeper = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    (fleet.folder / PID_FILE).write_text(f"{keeper.pid} {process_start(keeper.pid)}")


def end_background_keeper(fleet: Fleet) -> None:
    """End this computer's keeper of a fleet that is down: on a local cloud that stops now, it would wait for ever."""
    with suppress(OSError, ValueError):  # there is none, or it has ended
        pid, start = (fleet.folder / PID_FILE).read_text().split()
        if process_start(int(pid)) == start:
            os.kill(int(pid), signal.SIGTERM)


def wait_for_keeper(fleet: Fleet, store: DocumentStore) -> None:
    """Wait until a keeper leads that outlives this command. Raise RunFailed with the end of its log."""
    deadline = time.monotonic() + LEAD_TIMEOUT_S
    while time.monotonic() < deadline:
        document = store.load()
        if document is None or document.desired.down is not None:
            return
        if (lease := document.lease) and (_is_background_keeper(lease) or is_holder_alive(lease) is None):
            return
        time.sleep(0.3)
    lines = fleet.log.read_text(errors="replace").splitlines() if fleet.log.exists() else []
    words = lines[-1] if lines else "its log is empty"
    raise RunFailed(f"no keeper leads after {LEAD_TIMEOUT_S:.0f} s: {words}; `tpuswarm keep` keeps the fleet from here")


def _is_background_keeper(lease: KeeperLease) -> bool:
    """Whether the holder is a keeper without a terminal on this computer."""
    try:
        words = Path(f"/proc/{lease.pid}/cmdline").read_bytes().split(b"\0")
        return bool(is_holder_alive(lease)) and b"keep" in words and os.getsid(lease.pid) == lease.pid
    except OSError:  # it has just ended
        return False


def find_orphans(
    fleet: Fleet, store: DocumentStore, cloud: Provider, fleet_id: str
) -> tuple[DocumentStore, Document, Listing]:
    """Return the machines of a fleet that has lost its document, with a document in memory. Raise InputError."""
    try:
        document = store.load()
    except Damaged:
        document = None
    listing = cloud.machines(document.zones if document else ())
    if document is not None and document.desired.fleet == fleet_id:
        raise InputError(f"{fleet_id} is this fleet: `tpuswarm down` without --orphans")
    desired = Desired(fleet_id, ())
    zones = tuple(dict.fromkeys(machine.zone for machine in desired.own(listing.machines)))
    if not zones:
        raise InputError(f"no machine carries the id {fleet_id}")
    orphaned = Document(fleet.name, fleet.provider_name, fleet.project, desired, zones)
    store = DocumentStore(MemoryBucket(), fleet.name, "memory")
    store.save(orphaned)
    return store, orphaned, listing
