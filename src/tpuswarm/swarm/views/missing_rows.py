"""Find steps of a run that have no rows of metrics."""

import re
from collections import defaultdict
from pathlib import Path

from tpuswarm.config.formatting import token_unit
from tpuswarm.errors import RunFailed
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.run import listing
from tpuswarm.train.run.directory import METRICS, read_config, reading
from tpuswarm.train.run.life import read_life
from tpuswarm.train.storage.folders import origin

WHOLE_ROW = re.compile(rb'\{"step": (\d+), "tokens": (\d+), [^\n]*"loss": [^\n]*"member": "([^"]+)"[^\n]*\}\n')
"""A row of a member's step; a damaged one counts as missing."""
CAUSE = "lost in a power cut, or damaged"


def missing_rows(folder: Path) -> str:
    """Name the steps that have no row, although a later row, checkpoint or commit exists; empty without any.

    A damaged commit, with which nothing can be compared, is named instead.
    """
    config = read_config(folder)
    if "swarm" not in config:
        return listing.missing_rows(folder)
    try:
        counted = _tokens_counted(folder)  # first: meanwhile a running swarm adds rows
    except RunFailed as error:
        return str(error)
    tokens, gaps, last = 0, defaultdict[str, list[str]](list), defaultdict[str, int](int)
    path = folder / METRICS
    if path.exists():
        with reading(path), path.open("rb") as file:
            for line in file:
                if row := WHOLE_ROW.fullmatch(line):
                    step, member = int(row[1]), row[3].decode(errors="replace")
                    tokens += int(row[2]) // max(step, 1)
                    if (first := last[member] + 1) < step:
                        gaps[member].append(f"{first:,}" if first == step - 1 else f"{first:,} to {step - 1:,}")
                    last[member] = step
    if gaps:
        named = [f"{', '.join(steps)} of {member}" for member, steps in gaps.items()]
        return f"{METRICS} has no rows of steps {'; '.join(named)}: {CAUSE}"
    if tokens < counted:
        unit = token_unit(config["chosen"]["tokens_per_row"])
        return f"{METRICS} has rows of {tokens:,} {unit}, fewer than the {counted:,} counted: {CAUSE}"
    return ""


def _tokens_counted(folder: Path) -> int:
    """Return the tokens counted at the newest commit whose rows must be here."""
    if origin(folder) and read_life(folder).pid is not None:
        return 0  # its rows reach the bucket after its commits
    ledger = Ledger(Store(folder))
    versions = ledger.versions()
    return ledger.record(versions[-1]).tokens if versions else 0
