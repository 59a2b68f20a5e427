"""Follow a run's ledger for its supervisor: read new records, and remove files of old ones."""

import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tpuswarm.swarm.core.choose import Staleness
from tpuswarm.swarm.core.ledger_view import LedgerView
from tpuswarm.swarm.core.values import Record
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.retention import RETAINED_COMMITS, Holdings, clean
from tpuswarm.swarm.storage.store import Corrupt, Missing, Store

CLEAN_INTERVAL_S = 60.0
RECENT_COUNT = 21
LIMIT = Staleness().limit


class LedgerFollower:
    """The view of the newest version, and the newest records."""

    def __init__(self, folder: Path, contribution_bytes: float, keep_payloads: int | None = RETAINED_COMMITS):
        """contribution_bytes: size of a contribution, and of a version's way back; keep_payloads: as for Holdings."""
        self._store = Store(folder)
        self._ledger = Ledger(self._store)
        self._contribution_bytes = contribution_bytes
        self.view: LedgerView | None = None
        """None before the first commit."""
        self.recent: list[Record] = []
        self._holdings = Holdings(LIMIT, keep_payloads)
        self._cleaner = ThreadPoolExecutor(1, "cleaner")
        self._cleaning: Future[str] | None = None
        self._last_message = ""
        """Message of the last clean-up, which is not repeated each minute."""
        self._damage: list[Missing | Corrupt] = []
        """Damage of old records, without which clean-up continues."""
        self._cleaned_at = time.monotonic()
        self._carried: Counter[str] = Counter()
        self._carried_version: int | None = None

    def new_records(self, may_exist: bool) -> list[Record]:
        """Return the records since the last call, at first the newest ones; may_exist: whether to read the storage."""
        if self.view is None:
            if not may_exist or not self._ledger.versions():
                return []
            self.view = self._ledger.view()
            first = max(0, self.view.version + 1 - RECENT_COUNT)
        else:
            first = self.view.version + 1
            if may_exist:
                self.view = self._ledger.refresh(self.view)
        records = list(self._ledger.records(range(first, self.view.version + 1)))
        self.recent = [*self.recent, *records][-RECENT_COUNT:]
        return records

    def clean(self) -> str:
        """Remove unneeded files in a thread, now and then; return a message about the last time if it is new."""
        now = time.monotonic()
        is_running = self._cleaning is not None and not self._cleaning.done()
        if self.view is None or now - self._cleaned_at <= CLEAN_INTERVAL_S or is_running:
            return ""
        before, self._last_message = self._last_message, self._outcome()
        self._cleaned_at = now
        self._cleaning = self._cleaner.submit(self._clean, self.view)
        return self._last_message if self._last_message != before else ""

    def _outcome(self) -> str:
        if self._cleaning is None:
            return ""
        if error := self._cleaning.exception():
            return f"files of old commits could not be removed: {error}"
        return self._cleaning.result()

    def _clean(self, view: LedgerView) -> str:
        self._damage += self._holdings.follow(self._ledger, view)
        clean(self._store, self._holdings)
        if not self._damage:
            return ""
        others = f" ({len(self._damage)} records are)" if self._damage[1:] else ""
        return f"{self._damage[0]}{others}; files that no other record names are removed a day after they were written"

    def carried(self) -> Counter[str]:
        """Return the bytes that each member has transferred: its decided contributions, and a version for each."""
        if self.view is not None and self.view.version != self._carried_version:
            pushes = Counter[str]()
            for key, (last, _) in self.view.verdicts.items():
                pushes[key.member] += last.identity.sequence  # all earlier ones are decided, too
            both_ways = 2 * self._contribution_bytes
            self._carried = Counter({name: round(both_ways * count) for name, count in pushes.items()})
            self._carried_version = self.view.version
        return self._carried
