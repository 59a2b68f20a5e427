"""Pictures to train on: files and archives as a memory map at one resolution, made once; digits; random pixels."""

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
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress

from tpuswarm.errors import InputError
from tpuswarm.recipes.language.text import Advance, Text, input_errors, open_text
from tpuswarm.recipes.prepared import (
    DESCRIPTION,
    cached_folder,
    copy_files,
    is_complete,
    read_description,
    write_once,
)
from tpuswarm.train.data.contents import contents_digest
from tpuswarm.train.process.atomic import write_atomically

Odd = Literal["crop", "refuse"]
"""For a picture that is not a square of the resolution or more: use its middle square, or raise InputError."""
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")
TAR_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
PICTURES_FILE = "pictures.bin"
CACHE = "pictures"
"""Name of the folder in the user's cache."""
MAX_NAMED = 5
"""Damaged pictures that are named."""
DECODE_CHUNK_SIZE = 64
MAX_PICTURE_SIZE = 2**28
"""Pixels of a picture, and bytes of one in an archive; a larger one is a mistake or an attack."""
FAKE_COUNT = 64


@dataclass(frozen=True)
class Prepared:
    """Memory-mapped pictures: `array` is uint8 (count, side, side, 3).

    damaged: pictures left out because they cannot be read; named: the first of them, with the reasons.
    """

    array: np.ndarray
    damaged: int
    named: tuple[str, ...]
    folder: Path


class PictureFile(NamedTuple):
    """A picture in a file or an archive; problem: why it was not read."""

    name: str
    data: bytes
    problem: str = ""


def digits(side: int) -> np.ndarray:
    """scikit-learn's 1,797 handwritten digits (8 x 8, grey), enlarged: uint8 (count, side, side, 3)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("--data digits needs scikit-learn: pip install scikit-learn") from error
    grey = np.asarray(load_digits().images, np.float32) / 16 * 255
    grey = _enlarged(_enlarged(grey, side, 1), side, 2)
    return np.repeat(np.round(grey).astype(np.uint8)[..., None], 3, axis=-1)


def _enlarged(x: np.ndarray, size: int, axis: int) -> np.ndarray:
    # linear interpolation along an axis, with pixels as areas
    source = np.clip((np.arange(size) + 0.5) * x.shape[axis] / size - 0.5, 0, x.shape[axis] - 1)
    low = np.floor(source).astype(int)
    high = np.minimum(low + 1, x.shape[axis] - 1)
    share = np.expand_dims((source - low).astype(np.float32), tuple(range(1, x.ndim - axis)))
    return np.take(x, low, axis) * (1 - share) + np.take(x, high, axis) * share


def fake(side: int) -> np.ndarray:
    """Random pixels, for measurements: uint8 (count, side, side, 3), shifted views of one row."""
    row = np.random.default_rng(0).integers(0, 256, side * side * 3 + FAKE_COUNT, np.uint8)
    return np.lib.stride_tricks.as_strided(row, (FAKE_COUNT, side, side, 3), (1, side * 3, 3, 1), writeable=False)


def prepare_pictures(place: str, side: int, odd: Odd) -> Prepared:
    """Return the memory map of all pictures at `place`; it is made in the user's cache if it is not there yet.

    place: path or URL of a folder, zip, tar or picture, or a folder that `share_pictures` filled. Raises InputError if
    there is no picture, and, with `refuse`, for the first that would be cropped or enlarged.
    """
    folder = _prepared_folder(place, side, odd)
    facts = read_description(folder)
    path = folder / PICTURES_FILE
    if contents_digest(path) != facts["digest"]:
        raise InputError(f"{path} has changed since it was written; delete {folder} and start again to rebuild it")
    if path.stat().st_size != facts["count"] * side * side * 3:
        raise InputError(f"{folder} was made for another resolution than {side}; give the pictures themselves")
    array = np.memmap(path, np.uint8, "r", shape=(facts["count"], side, side, 3))
    return Prepared(array, facts["damaged"], tuple(facts["named"]), folder)


def share_pictures(prepared: Prepared, folder: Path) -> None:
    """Copy pictures into a folder that `prepare_pictures` accepts."""
    copy_files(prepared.folder, folder, PICTURES_FILE)


def _prepared_folder(place: str, side: int, odd: Odd) -> Path:
    if "://" not in place and (Path(place) / PICTURES_FILE).is_file() and is_complete(Path(place)):
        return Path(place)
    text = open_text(place, empty=True)
    cached = cached_folder(CACHE, json.dumps([text.key, side, odd])) if text.key else None
    if cached and is_complete(cached):
        return cached
    return write_once(cached, CACHE, lambda partial: _write(partial, text, side, odd))


def read_picture(path: Path, side: int) -> np.ndarray:
    """Return the middle square of one picture: uint8 (side, side, 3). Raises InputError for other files."""
    try:
        pixels = _decode(PictureFile(str(path), path.read_bytes()), side, "crop")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if isinstance(pixels, str):
        raise InputError(f"{path} is no picture that can be read: {pixels}")
    return np.frombuffer(pixels, np.uint8).reshape(side, side, 3)


def _write(folder: Path, text: Text, side: int, odd: Odd) -> None:
    digest, count, damaged, named = hashlib.sha256(), 0, 0, list[str]()
    with (
        Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bars,
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
        (folder / PICTURES_FILE).open("wb") as file,
    ):
        bar = bars.add_task(f"reading the pictures of {text.name}", total=sum(text.sizes))
        pictures = _read_pictures(text, lambda size: bars.advance(bar, size))
        while chunk := list(islice(pictures, DECODE_CHUNK_SIZE)):
            decoded = pool.map(lambda picture: _decode(picture, side, odd), chunk)
            for picture, pixels in zip(chunk, decoded, strict=True):
                if isinstance(pixels, str):
                    damaged += 1
                    named += [f"{picture.name} ({pixels})"] * (len(named) < MAX_NAMED)
                    continue
                digest.update(pixels)
                file.write(pixels)
                count += 1
        file.flush()
        os.fsync(file.fileno())
    if damaged and not count:
        raise InputError(f"there is no picture in {text.name}: none of {damaged} can be read: {named[0]}")
    if not count:
        raise InputError(f"there is no picture in {text.name}: its files do not end in {', '.join(PICTURE_ENDINGS)}")
    facts = {"count": count, "digest": digest.hexdigest(), "damaged": damaged, "named": named}
    write_atomically(folder / DESCRIPTION, json.dumps(facts))


def _read_pictures(text: Text, advance: Advance) -> Iterator[PictureFile]:
    # A shuffled order, so that the held-out part is not the last class; a copy of the folder has the same.
    root = os.path.commonpath(text.files)
    files = sorted(zip(text.files, text.sizes, strict=True), key=lambda file: _shuffle_key(file[0].removeprefix(root)))
    for path, size in files:
        lower = path.lower()
        with input_errors(path):
            if lower.endswith(PICTURE_ENDINGS):
                with text.system.open(path, "rb") as file:
                    yield PictureFile(path, file.read())
            elif lower.endswith(".zip"):
                yield from _read_zip(text, path)
            elif lower.endswith(TAR_ENDINGS):
                yield from _read_tar(text, path)
        advance(size)


def _shuffle_key(path: str) -> str:
    return hashlib.sha256(path.encode()).hexdigest()


def _read_zip(text: Text, path: str) -> Iterator[PictureFile]:
    try:
        with text.system.open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            for name in filter(_is_picture, sorted(archive.namelist(), key=_shuffle_key)):
                where = f"{path}:{name}"
                try:
                    yield _read_entry(where, archive.getinfo(name).file_size, partial(archive.read, name))
                except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, RuntimeError) as error:  # the last: a password
                    yield PictureFile(where, b"", str(error))
    except (zipfile.BadZipFile, EOFError) as error:
        raise InputError(f"{path} is a damaged zip ({error}); copy it again") from error


class _StrictTarInfo(tarfile.TarInfo):
    """Makes a damaged header an error; tarfile takes it for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_StrictTarInfo":
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from error


def _read_tar(text: Text, path: str) -> Iterator[PictureFile]:
    # in the archive's order: it is a stream
    try:
        with (
            text.system.open(path, "rb") as file,
            tarfile.open(fileobj=file, mode="r|*", tarinfo=_StrictTarInfo) as archive,
        ):
            for member in archive:
                if member.isfile() and _is_picture(member.name):
                    content = archive.extractfile(member)
                    if content is not None:
                        yield _read_entry(f"{path}:{member.name}", member.size, content.read)
    except (tarfile.TarError, EOFError) as error:
        raise InputError(f"{path} is a damaged tar ({error}); copy it again") from error


def _read_entry(name: str, size: int, read: Callable[[], bytes]) -> PictureFile:
    if size > MAX_PICTURE_SIZE:
        return PictureFile(name, b"", f"{size:,} bytes")
    return PictureFile(name, read())


def _is_picture(name: str) -> bool:
    is_macos_metadata = name.startswith("__MACOSX/") or Path(name).name.startswith("._")
    return name.lower().endswith(PICTURE_ENDINGS) and not is_macos_metadata


def _decode(picture_file: PictureFile, side: int, odd: Odd) -> bytes | str:
    """Return a picture's bytes at the resolution, or its problem. Raises InputError for a refused one."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if picture_file.problem:
        return picture_file.problem
    try:
        with Image.open(io.BytesIO(picture_file.data)) as opened:
            if opened.width * opened.height > MAX_PICTURE_SIZE:
                return f"{opened.width} x {opened.height} pixels"
            picture = ImageOps.exif_transpose(opened)
            if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
                picture = picture.convert("RGBA")
                white = Image.new("RGBA", picture.size, "white")
                picture = Image.alpha_composite(white, picture)
            if picture.mode.startswith("I"):  # 16 bits, which a conversion would cut off
                picture = Image.fromarray((np.asarray(picture) / 257).round().clip(0, 255).astype(np.uint8))
            picture = picture.convert("RGB")
    except UnidentifiedImageError:
        return "not a picture" if picture_file.data else "empty"
    except Exception as error:  # noqa: BLE001  # each format has its own errors; a damaged picture is counted and named
        return " ".join(str(error).split())[:100] or type(error).__name__
    width, height = picture.size
    if odd == "refuse" and (width != height or width < side):
        raise InputError(
            f"{picture_file.name} is {width} x {height}, no square of {side} or more: --odd crop takes the middle of "
            "such pictures and enlarges small ones"
        )
    square = min(width, height)
    left, top = (width - square) // 2, (height - square) // 2
    scaled = picture.resize((side, side), Image.Resampling.LANCZOS, (left, top, left + square, top + square))
    return scaled.tobytes()
