"""Fleets as commands find them: by swarm.toml, or by what this computer remembers of those it has made."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

from tpuswarm.cloud.protocol import Listing, Provider
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet.asked import desired_of, keeping_keys, new_id
from tpuswarm.fleet.clouds import REHEARSAL_PROJECT
from tpuswarm.fleet.core.desired import Desired
from tpuswarm.fleet.file import DEFAULT, SwarmFile, read_swarm
from tpuswarm.fleet.keeping.document import Damaged, Document, LocalBucket, Store, state_folder
from tpuswarm.fleet.keeping.history import History
from tpuswarm.remote.sync.tree import Kept
from tpuswarm.train.files import write_atomically


@dataclass(frozen=True)
class Fleet:
    """Where a fleet is; nothing is asked of a cloud before `provider`."""

    name: str
    provider_name: str
    project: str
    bucket: str | None
    """None: its document is a file of this computer."""

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
    def tree(self) -> Kept:
        """The folder that `sync` sent last: machines that come later get it as it was."""
        return Kept(self.folder / "tree")

    def provider(self) -> Provider:
        """The cloud."""
        from tpuswarm.cloud.google.provider import Google
        from tpuswarm.fleet.clouds import open_access

        return Google(open_access(self.provider_name, self.project))

    def store(self, provider: Provider) -> Store:
        """Its document."""
        if self.bucket:
            return Store(provider.bucket(self.bucket), self.name, f"gs://{self.bucket}")
        folder = state_folder() / "documents" / self.project
        return Store(LocalBucket(folder), self.name, str(folder))

    def remember(self) -> None:
        """That this computer knows it, for commands without a file."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "fleet.json", json.dumps(asdict(self)))

    def forget(self) -> None:
        """It is gone."""
        (self.folder / "fleet.json").unlink(missing_ok=True)


def of_file(file: SwarmFile) -> Fleet:
    """The fleet of a file."""
    from tpuswarm.cloud.google.settings import find_project

    local = file.provider == "rehearsal"
    project = (file.project or REHEARSAL_PROJECT) if local else find_project(file.project)
    return Fleet(file.name, file.provider, project, file.storage.bucket if file.storage else None)


def known() -> list[Fleet]:
    """Those that this computer has made and not brought down."""
    found = []
    for path in sorted((state_folder() / "fleets").glob("*/*/fleet.json")):
        try:
            found.append(Fleet(**json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError):
            continue  # half written or of another version: `up` writes it again
    return found


def find(text: str | None) -> tuple[Fleet, SwarmFile | None]:
    """The fleet that is meant: by its file, its name, or none where there is only one. Raises InputError."""
    if text is not None and (text.endswith(".toml") or "/" in text):
        file = read_swarm(Path(text))
        return of_file(file), file
    if text is None and DEFAULT.exists():
        file = read_swarm(DEFAULT)
        return of_file(file), file
    fleets = known()
    named = [each for each in fleets if text in (None, each.name)]
    if len(named) == 1:
        return named[0], None
    if named:
        raise InputError(f"there are {len(named)} fleets: name one of {', '.join(each.name for each in named)}")
    if text is None:
        raise InputError("there is no swarm.toml here, and this computer has made no fleet: name the file")
    raise InputError(f"there is no fleet {text!r}; {did_you_mean(text, [each.name for each in fleets])}")


def recovered_id(name: str, listing: Listing) -> str | None:
    """The id of a fleet whose document is lost, from the labels of its machines. InputError where there are several."""
    found = {each.fleet for each in listing.machines if each.fleet and each.fleet.rpartition("-")[0] == name}
    if len(found) > 1:
        raise InputError(
            f"machines of {len(found)} fleets called {name} are there ({', '.join(sorted(found))}), and which is this "
            "one's is not known: delete those of the others, or give this one another name"
        )
    return found.pop() if found else None


class Held(Protocol):
    """Something that holds a document: a `Store`, or the memory of a command."""

    where: str

    def load(self) -> Document | None:
        """As it is now; None: there is none."""

    def save(self, document: Document) -> None:
        """Write what was loaded last, changed."""

    def change(self, make: Callable[[Document | None], Document]) -> Document:
        """Read, change and write."""


class Unstored:
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


def look_at(fleet: Fleet, store: Held, cloud: Provider, file: SwarmFile | None) -> tuple[Document | None, Listing, str]:
    """The document, the machines, and a note for the user.

    A document that is damaged or lost is made again from the file and the labels of the machines; without a file,
    Damaged is raised, or InputError.
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
    if document is None and (lost := recovered_id(fleet.name, listing)):
        if file is None:
            raise InputError(f"machines of {lost} are there, and their document is lost: name swarm.toml to remake it")
        note = note or f"{store.where} is lost: it is made again from {file.name}'s file and the labels of machines"
        document = document_of(fleet, file, desired_of(file, lost, False, None))
    return document, listing, note


def document_of(fleet: Fleet, file: SwarmFile, wanted: Desired) -> Document:
    """A new one."""
    return Document(file.name, file.provider, fleet.project, wanted, wanted.zones)


def merged(file: SwarmFile, before: Desired | None, paid: bool, public_key: str | None) -> Desired:
    """What the file asks, with what earlier commands have asked."""
    if before is None:
        return desired_of(file, new_id(file.name), paid, public_key)
    wanted = desired_of(file, before.fleet, paid or before.paid, public_key)
    pools = tuple(keeping_keys(each, before.pools) for each in wanted.pools)
    return replace(wanted, pools=pools, paused=before.paused, dropped=before.dropped, revision=before.revision + 1)


def store_wanted(fleet: Fleet, store: Held, file: SwarmFile, wanted: Desired) -> None:
    """Store what is wanted from now on, in the place of a damaged document as well."""

    def make(found: Document | None) -> Document:
        if found is None:
            return document_of(fleet, file, wanted)
        return replace(found, desired=wanted, zones=tuple(dict.fromkeys((*found.zones, *wanted.zones))))

    try:
        store.change(make)
    except Damaged:
        store.save(make(None))
    fleet.remember()


def change(store: Held, wanted: Desired) -> None:
    """Store what is wanted from now on of a fleet that exists."""

    def make(found: Document | None) -> Document:
        if found is None:
            raise RunFailed(f"{store.where} is gone: somebody has deleted it")
        return replace(found, desired=wanted)

    store.change(make)


def detach(fleet: Fleet, file: Path | None) -> None:
    """Start a keeper in the background, which outlives this command and the terminal."""
    fleet.folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "tpuswarm", "keep", str(file.absolute()) if file else fleet.name]
    with fleet.log.open("a") as log:
        subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)


def orphans(fleet: Fleet, document: Document | None, listing: Listing, fleet_id: str) -> Document:
    """What stands for a fleet of which there are only machines. Raises InputError where there are none."""
    if document is not None and document.desired.fleet == fleet_id:
        raise InputError(f"{fleet_id} is this fleet: `tpuswarm down` without --orphans")
    found = [each for each in listing.machines if each.fleet == fleet_id]
    if not found:
        raise InputError(f"no machine carries the id {fleet_id}")
    zones = tuple(dict.fromkeys(each.zone for each in found))
    return Document(fleet.name, fleet.provider_name, fleet.project, Desired(fleet_id, ()), zones)
