"""Pictures in files and archives as a memory map at one resolution, made once."""

import hashlib
import io
import json
import lzma
import os
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from rich.console import Console
from rich.progress import Progress

from tpuswarm.errors import InputError
from tpuswarm.recipes.gpt2.text import Advance, Text, looking_at, open_text
from tpuswarm.recipes.prepared import ABOUT, about, is_made, make, share
from tpuswarm.train.data.contents import contents_digest
from tpuswarm.train.process.atomic import write_atomically
from tpuswarm.train.process.platform import cache_folder

Odd = Literal["crop", "refuse"]
"""What becomes of a picture that is no square of the resolution or more: its middle square, or a refusal."""
ODD = get_args(Odd)
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
FILE = "pictures.bin"
NAMED = 5
"""Damaged pictures that are named."""
TOGETHER = 64
"""Pictures that are decoded side by side."""
LARGEST = 2**28
"""Pixels of a picture, and bytes of one in an archive; more are taken for a mistake, or an attack."""


@dataclass(frozen=True)
class Prepared:
    """`array` is memory-mapped: uint8 (count, side, side, 3)."""

    array: np.ndarray
    damaged: int
    """Pictures that could not be read, and are left out."""
    named: tuple[str, ...]
    """The first of them, and what is wrong with each."""
    folder: Path
    """Where the files lie."""


class Found(NamedTuple):
    """A picture as it lies in a file or an archive."""

    name: str
    data: bytes
    wrong: str = ""
    """Why it was not read."""


def prepare_pictures(place: str, side: int, odd: Odd) -> Prepared:
    """The memory map of all pictures at `place`, made in the user's cache if it is not there yet.

    place: a folder with all below it, a zip, a tar, or a picture; a path or a URL that fsspec reads; a folder that
    `share_pictures` filled is taken as it is. Raises InputError where there is no picture, and, with `refuse`, for the
    first that would have to be cropped or enlarged.
    """
    folder = _folder(place, side, odd)
    said = about(folder)
    path = folder / FILE
    if contents_digest(path) != said["digest"]:
        raise InputError(f"{path} is not what was written there; delete {folder} and start again: it is made anew")
    if path.stat().st_size != said["count"] * side * side * 3:
        raise InputError(f"{folder} was made for another resolution than {side}; give the pictures themselves")
    array = np.memmap(path, np.uint8, "r", shape=(said["count"], side, side, 3))
    return Prepared(array, said["damaged"], tuple(said["named"]), folder)


def share_pictures(found: Prepared, folder: Path) -> None:
    """Put them into a folder that `prepare_pictures` takes."""
    share(found.folder, folder, FILE)


def _folder(place: str, side: int, odd: Odd) -> Path:
    if "://" not in place and (Path(place) / FILE).is_file() and is_made(Path(place)):
        return Path(place)
    text = open_text(place, empty=True)
    marks = [text.key, side, odd]
    folder = cache_folder("pictures") / hashlib.sha256(json.dumps(marks).encode()).hexdigest()[:32]
    if not is_made(folder):
        make(folder, lambda making: _write(making, text, side, odd))
    return folder


def read_picture(path: Path, side: int) -> np.ndarray:
    """The middle square of one picture: uint8 (side, side, 3). Raises InputError for what is none."""
    try:
        made = _made(Found(str(path), path.read_bytes()), side, "crop")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if isinstance(made, str):
        raise InputError(f"{path} is no picture that can be read: {made}")
    return np.frombuffer(made, np.uint8).reshape(side, side, 3)


def _write(folder: Path, text: Text, side: int, odd: Odd) -> None:
    digest, count, damaged, named = hashlib.sha256(), 0, 0, list[str]()
    with (
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars,
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
        (folder / FILE).open("wb") as file,
    ):
        bar = bars.add_task(f"reading the pictures of {text.name}", total=sum(text.sizes))
        found = _pictures(text, lambda size: bars.advance(bar, size))
        while some := list(islice(found, TOGETHER)):
            for each, made in zip(some, pool.map(lambda one: _made(one, side, odd), some), strict=True):
                if isinstance(made, str):
                    damaged += 1
                    named += [f"{each.name} ({made})"] * (len(named) < NAMED)
                    continue
                digest.update(made)
                file.write(made)
                count += 1
        file.flush()
        os.fsync(file.fileno())
    if not count:
        what = (
            f"none of {damaged} can be read: {named[0]}"
            if damaged
            else f"its files do not end in {', '.join(PICTURES)}"
        )
        raise InputError(f"there is no picture in {text.name}: {what}")
    said = {"count": count, "digest": digest.hexdigest(), "damaged": damaged, "named": named}
    write_atomically(folder / ABOUT, json.dumps(said))


def _pictures(text: Text, advance: Advance) -> Iterator[Found]:
    """All of them. Files come in an order of their own, so that what is held out is not the last class.

    It is the same wherever their folder lies: a run goes on with a copy of it.
    """
    root = os.path.commonpath(text.files)
    paths = sorted(zip(text.files, text.sizes, strict=True), key=lambda each: _mark(each[0].removeprefix(root)))
    for path, size in paths:
        lower = path.lower()
        with looking_at(path):
            if lower.endswith(PICTURES):
                with text.system.open(path, "rb") as file:
                    yield Found(path, file.read())
            elif lower.endswith(".zip"):
                yield from _zipped(text, path)
            elif lower.endswith(TARS):
                yield from _tarred(text, path)
        advance(size)


def _mark(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


def _zipped(text: Text, path: str) -> Iterator[Found]:
    try:
        with text.system.open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            for name in sorted(archive.namelist(), key=_mark):
                if name.lower().endswith(PICTURES) and not _is_litter(name):
                    yield _unzipped(archive, name, f"{path}:{name}")
    except (zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"{path} is no whole zip ({error}); bring it again") from error


def _unzipped(archive: zipfile.ZipFile, name: str, where: str) -> Found:
    try:
        return _within(where, archive.getinfo(name).file_size, lambda: archive.read(name))
    except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError) as error:  # the last: it has a password
        return Found(where, b"", str(error))


class _Strict(tarfile.TarInfo):
    """A damaged header is an error: tarfile takes it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Strict":
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from error


def _tarred(text: Text, path: str) -> Iterator[Found]:
    """In the order of the archive, which is read once from its beginning to its end."""
    try:
        with text.system.open(path, "rb") as file, tarfile.open(fileobj=file, mode="r|*", tarinfo=_Strict) as archive:
            for member in archive:
                if member.isfile() and member.name.lower().endswith(PICTURES) and not _is_litter(member.name):
                    taken = archive.extractfile(member)
                    if taken is not None:
                        yield _within(f"{path}:{member.name}", member.size, taken.read)
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{path} is no whole tar ({error}); bring it again") from error


def _within(name: str, size: int, read: Callable[[], bytes]) -> Found:
    """One of an archive, unless it unpacks to more than a picture has."""
    return Found(name, read()) if size <= LARGEST else Found(name, b"", f"{size:,} bytes")


def _is_litter(name: str) -> bool:
    """What macOS puts into archives beside each file."""
    return name.startswith("__MACOSX/") or Path(name).name.startswith("._")


def _made(found: Found, side: int, odd: Odd) -> bytes | str:
    """The bytes of a picture at the resolution, or what is wrong with it. Raises InputError for a refusal."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if found.wrong:
        return found.wrong
    try:
        with Image.open(io.BytesIO(found.data)) as opened:
            if opened.width * opened.height > LARGEST:
                return f"{opened.width} x {opened.height} pixels"
            picture = ImageOps.exif_transpose(opened)
            if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
                picture = picture.convert("RGBA")
                ground = Image.new("RGBA", picture.size, "white")
                picture = Image.alpha_composite(ground, picture)
            if picture.mode.startswith("I"):  # 16 bits, which a conversion would cut off
                picture = Image.fromarray((np.asarray(picture) / 257).round().clip(0, 255).astype(np.uint8))
            picture = picture.convert("RGB")
    except UnidentifiedImageError:
        return "not a picture" if found.data else "empty"
    except Exception as error:  # noqa: BLE001  # each format has errors of its own; a damaged picture is counted and named
        return " ".join(str(error).split())[:100] or type(error).__name__
    width, height = picture.size
    if odd == "refuse" and (width != height or width < side):
        raise InputError(
            f"{found.name} is {width} x {height}, no square of {side} or more: --odd crop takes the middle of such "
            "pictures and enlarges small ones"
        )
    square = min(width, height)
    left, top = (width - square) // 2, (height - square) // 2
    made = picture.resize((side, side), Image.Resampling.LANCZOS, (left, top, left + square, top + square))
    return made.tobytes()
