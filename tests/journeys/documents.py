"""The documents of this repository, read as programs: fenced blocks, files they show, options they name."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)$")
FILE_BEFORE = re.compile(r"`([\w-]+\.\w+)`[:.]$")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, its first line in the document, and the file it is shown as."""

    language: str
    text: str
    line: int
    file: str | None

    def commands(self) -> list[tuple[int, str]]:
        """Line number and text of each shell command; a backslash at a line's end joins the next one to it."""
        found: list[tuple[int, str]] = []
        joined = ""
        for number, line in enumerate(self.text.splitlines(), start=self.line):
            joined += line
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            if joined.strip() and not joined.lstrip().startswith("#"):
                found.append((number, joined.strip()))
            joined = ""
        return found


def blocks(document: Path) -> list[Block]:
    """The fenced blocks of a document, in order.

    A block after a line that ends in a file's name (`my_recipe.py`: or This is `line.py`.) is that file.
    """
    found: list[Block] = []
    language, start, inside, before = "", 0, [], ""
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1):
        fence = FENCE.match(line)
        if start == 0:
            if fence:
                language, start, inside = fence[1], number + 1, []
            elif line.strip():
                before = line.strip()
        elif line == "```":
            named = FILE_BEFORE.search(before)
            found.append(Block(language, "\n".join(inside) + "\n", start, named[1] if named else None))
            start, before = 0, ""
        else:
            inside.append(line)
    assert start == 0, f"{document.name}: the block at line {start} has no end"
    return found


def links(document: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def named_options(text: str) -> set[str]:
    """Return all --options in prose, tables and blocks, except in lines of gcloud."""
    ours = re.sub(r"^.*\bgcloud \w+ .*$", "", text, flags=re.MULTILINE)
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w-]*_)", ours))


def named_commands(document: Path) -> set[str]:
    prose = document.read_text(encoding="utf-8")
    found = set(re.findall(r"`tpuswarm ([a-z][a-z-]*)", prose))
    for block in blocks(document):
        found |= set(re.findall(r"^(?:\w+=\S+ )*tpuswarm ([a-z][a-z-]*)", block.text, flags=re.MULTILINE))
    return found
