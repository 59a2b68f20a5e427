"""Measure the sentences of README.md and docs/: how long they are, and which pages have the longest.

Limits: at most 15 words on average, and at most 5% of the sentences above 30 words.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from benchmarks.report import Settings, Table, verdict

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
MAX_MEAN_WORDS, LONG_WORDS, MAX_LONG_PERCENT = 15.0, 30, 5.0
LONGEST_PAGES = 5
NOT_PROSE = re.compile(r"^```(?s:.*?)^```$|^ *\|.*$|^#.*$|^!\[.*$", re.MULTILINE)
PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )")
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)[)\"*]*\s+(?=[^a-z])")


def sentences(markdown: str) -> list[str]:
    """Return the sentences of paragraphs and list items; of a link only its text."""
    text = re.sub(r"\]\([^)]*\)", "]", NOT_PROSE.sub("\n\n", markdown))
    paragraphs = (" ".join(part.split()) for part in PARAGRAPH_END.split(text))
    return [sentence for part in paragraphs for sentence in SENTENCE_END.split(part) if sentence]


def run(settings: Settings) -> Iterable[Table]:
    """Count the words, as spaces separate them, of all sentences."""
    lengths = {page: [len(found.split()) for found in sentences(page.read_text(encoding="utf-8"))] for page in PAGES}
    words = [length for page in lengths.values() for length in page]
    mean, percent = fmean(words), 100 * sum(length > LONG_WORDS for length in words) / len(words)
    worst = sorted(PAGES, key=lambda page: -fmean(lengths[page]))[:LONGEST_PAGES]
    rows = [
        ("words of a sentence, mean", f"{mean:.1f}", f"{MAX_MEAN_WORDS:g}", verdict(mean <= MAX_MEAN_WORDS)),
        (f"sentences above {LONG_WORDS} words", f"{percent:.1f}%", f"{MAX_LONG_PERCENT:g}%",
         verdict(percent <= MAX_LONG_PERCENT)),
    ]  # fmt: skip
    notes = [
        f"{len(words):,} sentences in {len(PAGES)} pages; tables, headings and code left out",
        "longest: " + ", ".join(f"{page.name} {fmean(lengths[page]):.1f}" for page in worst),
    ]
    yield Table("Sentences", ("what", "measured", "limit", "verdict"), rows, notes)
