"""The ledger of a run as its supervisor follows it: what was committed since, and whose; old files are removed."""

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.core.view import View
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.retention import Holdings, clean
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

CLEAN = 60.0
"""Seconds between two looks for what nobody needs any longer."""
RECENT = 21
LIMIT = Staleness().limit


class Followed:
    """The view of the newest version, and the newest records."""

    def __init__(self, folder: Path, contribution: float):
        """contribution: bytes that one carries, and a version back."""
        self._store = Store(folder)
        self._ledger = Ledger(self._store)
        self._contribution = contribution
        self.view: View | None = None
        """None before the first commit."""
        self.recent: list[Record] = []
        self._held = Holdings(LIMIT)
        self._cleaner = ThreadPoolExecutor(1, "cleaner")
        self._cleaning: Future[str] | None = None
        self._said = ""
        """Of the last clean-up, so that the same is not said each minute."""
        self._damage: list[Missing | Corrupt] = []
        """Of old records, which clean-up does without."""
        self._cleaned_at = time.monotonic()
        self._carried: Counter[str] = Counter()
        self._carried_at: int | None = None
        """The version at which it was counted."""

    def news(self, look: bool) -> list[Record]:
        """The records since the last call, at the first one the newest that are there; look: whether to ask at all."""
        if self.view is None:
            if not look or not self._ledger.versions():
                return []
            self.view = self._ledger.view()
            first = max(0, self.view.version + 1 - RECENT)
        else:
            first = self.view.version + 1
            if look:
                self.view = self._ledger.refresh(self.view)
        news = list(self._ledger.records(range(first, self.view.version + 1)))
        self.recent = [*self.recent, *news][-RECENT:]
        return news

    def clean(self) -> str:
        """Now and then remove what no commit needs any longer, beside whoever asks; a sentence where there is something
        new to say of the time before.
        """
        now = time.monotonic()
        if self.view is None or now - self._cleaned_at <= CLEAN or (self._cleaning and not self._cleaning.done()):
            return ""
        said, self._said = self._said, self._outcome()
        self._cleaned_at = now
        self._cleaning = self._cleaner.submit(self._clean, self.view)
        return self._said if self._said != said else ""

    def _outcome(self) -> str:
        """What is to be said of the last clean-up."""
        if self._cleaning is None:
            return ""
        if error := self._cleaning.exception():
            return f"files of old commits could not be removed: {error}"
        return self._cleaning.result()

    def _clean(self, view: View) -> str:
        """What is to be said of it."""
        self._damage += self._held.follow(self._ledger, view)
        clean(self._store, self._held)
        if not self._damage:
            return ""
        others = f" ({len(self._damage)} records are)" if self._damage[1:] else ""
        return f"{self._damage[0]}{others}; what no other record names is removed a day after it was written"

    def carried(self) -> Counter[str]:
        """Bytes of all decided contributions of each member, each there, and of a version for each back."""
        if self.view is not None and self.view.version != self._carried_at:
            made = Counter[str]()
            for key, (last, _) in self.view.verdicts.items():
                made[key.member] += last.identity.sequence  # all before it were decided, too
            self._carried = Counter({name: round(2 * self._contribution * count) for name, count in made.items()})
            self._carried_at = self.view.version
        return self._carried
