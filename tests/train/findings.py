"""What the diagnostics reported of a run."""

from tpuswarm.train.run.directory import EVENTS, read_rows


def read_findings(folder, kind=None):
    """Return each finding with its numbers."""
    found = [row for row in read_rows(folder / EVENTS) if row["event"] == "diagnostic"]
    return [row for row in found if kind in (None, row["kind"])]


def complaints(folder):
    """Return the kinds of findings, without starvation, which a busy machine may cause."""
    return {row["kind"] for row in read_findings(folder)} - {"starvation"}
