"""Pictures of one's own: folders, zips, tars, odd sizes, damaged ones, buckets."""

import io
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.swarm.bucket import bucket
from tpuswarm.errors import InputError
from tpuswarm.recipes.stylegan2.files import prepare_pictures
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2

SIDE = 8


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))


def picture(number: int, width: int = SIDE, height: int = SIDE, kind: str = "PNG", mode: str = "RGB") -> bytes:
    """Of one colour, so that no format and no size changes it by much."""
    color = {"RGB": (number * 10, 255 - number * 10, 7), "L": number * 10, "RGBA": (number * 10, 0, 0, 0)}[mode]
    file = io.BytesIO()
    Image.new(mode, (width, height), color).save(file, kind)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Twelve pictures, some below, among what is none."""
    made = tmp_path / "pictures"
    (made / "below").mkdir(parents=True)
    for number in range(12):
        (made / ("below" if number % 2 else ".") / f"{number:02}.png").write_bytes(picture(number))
    (made / "README.md").write_text("not a picture")
    (made / ".hidden.png").write_bytes(b"no picture")
    return made


def colors(array: np.ndarray) -> list[int]:
    """The red of each picture, sorted: which pictures there are."""
    assert array.dtype == np.uint8 and array.shape[1:] == (SIDE, SIDE, 3)
    assert (array == array[:, :1, :1]).all()
    return sorted(int(each) for each in array[:, 0, 0, 0])


def packed(folder: Path, place: Path) -> Path:
    """The same in an archive, with what WebDatasets and macOS put beside pictures."""
    files = sorted(path for path in folder.rglob("*.png") if not path.name.startswith("."))
    if place.suffix == ".zip":
        with zipfile.ZipFile(place, "w") as archive:
            for path in files:
                archive.write(path, path.relative_to(folder))
            archive.writestr("__MACOSX/._00.png", b"litter")
    else:
        with tarfile.open(place, "w:gz" if place.suffix == ".tgz" else "w") as archive:
            for path in files:
                archive.add(path, str(path.relative_to(folder)))
                archive.add(folder / "README.md", f"{path.stem}.txt")
    return place


@pytest.mark.parametrize("kind", ["folder", "pictures.zip", "shard-000.tar", "shard-000.tgz"])
def test_pictures_are_read_once_from_wherever_they_lie(folder, tmp_path, kind):
    place = folder if kind == "folder" else packed(folder, tmp_path / kind)
    found = prepare_pictures(str(place), SIDE, "refuse")
    assert colors(found.array) == [10 * number for number in range(12)] and found.damaged == 0
    made = Path(found.array.filename)
    before = made.stat().st_mtime_ns
    again = prepare_pictures(str(place), SIDE, "refuse")
    assert again.array.filename == found.array.filename and made.stat().st_mtime_ns == before
    assert isinstance(again.array, np.memmap)


def test_a_bucket_of_archives(folder, tmp_path, monkeypatch):
    (tmp_path / "cloud").mkdir()
    with bucket("pictures", tmp_path / "cloud") as made:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", made.endpoint)
        from tpuswarm.train.bucket.stored import Bucket

        there = Bucket("gs://pictures/all")
        for name in ("one.zip", "two.tar"):
            there.put(name, packed(folder, tmp_path / name).read_bytes())
        found = prepare_pictures("gs://pictures/all", SIDE, "refuse")
    assert colors(found.array) == sorted(2 * [10 * number for number in range(12)])


def test_odd_sizes_are_cropped_or_refused_as_asked(folder):
    (folder / "wide.jpg").write_bytes(picture(20, 3 * SIDE, SIDE, "JPEG"))
    (folder / "small.png").write_bytes(picture(21, 3, 3))
    (folder / "grey.png").write_bytes(picture(22, 40, 40, mode="L"))
    (folder / "clear.png").write_bytes(picture(23, mode="RGBA"))
    found = prepare_pictures(str(folder), SIDE, "crop")
    assert len(found.array) == 16 and found.damaged == 0
    reds = found.array[:, 4, 4, 0]
    assert 210 in reds and 220 in reds and 255 in reds and (abs(reds.astype(int) - 200) <= 3).any(), "clear is on white"
    with pytest.raises(
        InputError, match=r"(wide.jpg is 24 x 8|small.png is 3 x 3), no square of 8 or more: --odd crop"
    ):
        prepare_pictures(str(folder), SIDE, "refuse")


def test_the_middle_of_a_wide_picture_is_taken(tmp_path):
    wide = np.zeros((SIDE, 3 * SIDE, 3), np.uint8)
    wide[:, SIDE : 2 * SIDE] = (200, 100, 50)
    Image.fromarray(wide).save(tmp_path / "wide.png")
    (found,) = prepare_pictures(str(tmp_path / "wide.png"), SIDE, "crop").array
    assert (found == (200, 100, 50)).all()


def test_damaged_pictures_are_counted_named_and_left_out(folder, capsys):
    whole = picture(1, 64, 64, "JPEG")
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "text.png").write_bytes(b"this is a text")
    (folder / "empty.png").touch()
    recipe = StyleGAN2(resolution=SIDE, data=str(folder))
    assert recipe.data("all").rows_per_epoch == 12
    said = capsys.readouterr().err
    assert said.startswith("3 of 15 pictures cannot be read: ") and "cut.jpg (" in said
    assert "text.png (not a picture)" in said and "empty.png (empty)" in said
    assert StyleGAN2(**recipe.options()).data("validation").rows_per_epoch == 1


def test_a_damaged_picture_of_a_zip_is_left_out_as_one_of_a_folder(folder, tmp_path):
    """Other bytes than were packed, a password, a method that Python has not: the pictures beside it are fine."""
    place = packed(folder, tmp_path / "all.zip")
    whole = place.read_bytes()
    there, listed = whole.find(b"PK\x03\x04"), whole.find(b"PK\x01\x02")
    for changes, why in (
        ({whole.find(b"IDAT") + 6: 0xFF}, "Bad CRC-32"),
        ({there + 6: 1, listed + 8: 1}, "encrypted"),
        ({there + 8: 9, listed + 10: 9}, "compression method"),
    ):
        damaged = bytearray(whole)
        for at, value in changes.items():
            damaged[at] ^= value
        place.write_bytes(damaged)
        found = prepare_pictures(str(place), SIDE, "crop")
        assert len(found.array) == 11 and found.damaged == 1 and "all.zip:" in found.named[0] and why in found.named[0]


def test_a_tar_that_is_damaged_in_the_middle_is_not_taken_for_a_shorter_one(tmp_path):
    place = tmp_path / "all.tar"
    with tarfile.open(place, "w") as archive:
        for number in range(12):
            about = tarfile.TarInfo(f"{number:02}.png")
            about.size = len(picture(number))
            archive.addfile(about, io.BytesIO(picture(number)))
    whole = bytearray(place.read_bytes())
    whole[whole.find(b"06.png")] ^= 0xFF
    place.write_bytes(whole)
    with pytest.raises(InputError, match=r"all\.tar is no whole tar \(bad checksum\); bring it again"):
        prepare_pictures(str(place), SIDE, "crop")


def test_pictures_that_cannot_be_read_are_said_in_a_sentence(folder, monkeypatch):
    from fsspec.implementations.local import LocalFileSystem

    def denied(self, path, mode):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(LocalFileSystem, "open", denied)
    with pytest.raises(InputError, match=r"\.png cannot be read: .*Permission denied"):
        prepare_pictures(str(folder), SIDE, "crop")


def test_a_run_goes_on_with_the_same_pictures_in_another_folder(folder, tmp_path):
    """Their order, what is held out and the digest of the data do not depend on where they lie."""
    before = StyleGAN2(resolution=SIDE, data=str(folder)).data("train")
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    folder.rename(moved)
    after = StyleGAN2(resolution=SIDE, data=str(moved)).data("train")
    assert (after.rows(0, 8)["pictures"] == before.rows(0, 8)["pictures"]).all() and after.digest == before.digest


def test_a_run_finds_its_pictures_from_every_folder(folder, tmp_path, monkeypatch):
    """As `evaluate` and a resumed run build the recipe: from the options in config.toml, wherever they are typed."""
    monkeypatch.chdir(folder.parent)
    options = StyleGAN2(resolution=SIDE, data=folder.name).options()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    assert StyleGAN2(**options).data("all").rows_per_epoch == 12
    assert StyleGAN2().options()["data"] == "digits"


def test_members_of_a_swarm_get_the_pictures_and_need_no_other(folder, tmp_path, monkeypatch):
    (folder / "broken.png").write_bytes(b"broken")
    recipe = StyleGAN2(data=str(folder), resolution=SIDE)
    shared = recipe.share(tmp_path / "run" / "data")
    shutil.rmtree(folder)
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "of-another-machine"))
    member = StyleGAN2(**{**recipe.options(), **shared})
    np.testing.assert_array_equal(*(each.data("train").rows(3, 5)["pictures"] for each in (member, recipe)))
    with pytest.raises(InputError, match=r"run/data was made for another resolution than 64"):
        StyleGAN2(resolution=64, **shared).data("train")
    assert StyleGAN2(data="digits").share(tmp_path / "digits") == {}  # scikit-learn has them on every machine


def test_where_there_are_no_pictures_it_is_said(tmp_path, folder):
    with pytest.raises(InputError, match=r"there is no file or folder .*absent"):
        StyleGAN2(data=str(tmp_path / "absent")).data("train")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    with pytest.raises(InputError, match=r"there is no picture in .*texts: its files do not end in \.png"):
        prepare_pictures(str(tmp_path / "texts"), SIDE, "crop")
    (tmp_path / "texts" / "a.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match=r"none of 1 can be read: .*a\.png \(not a picture"):
        prepare_pictures(str(tmp_path / "texts"), SIDE, "crop")
    (tmp_path / "half.zip").write_bytes(packed(folder, tmp_path / "whole.zip").read_bytes()[:200])
    with pytest.raises(InputError, match=r"half\.zip is no whole zip"):
        prepare_pictures(str(tmp_path / "half.zip"), SIDE, "crop")
    for path in list(folder.rglob("*.png"))[:6]:
        path.unlink()
    with pytest.raises(InputError, match=r"too few pictures \(\d+\): it takes at least 10, one of them held out"):
        StyleGAN2(resolution=SIDE, data=str(folder)).data("train")


@pytest.mark.parametrize(
    ("kind", "mode", "seen"),
    [
        ("PNG", "L", [90, 90, 90]),
        ("PNG", "RGBA", [255, 255, 255]),
        ("PNG", "I;16", [128, 128, 128]),
        ("JPEG", "CMYK", [255, 255, 255]),
        ("GIF", "P", [0, 0, 0]),
        ("PNG", "1-pixel", [10, 20, 30]),
    ],
)
def test_pictures_of_every_kind_become_rgb(tmp_path, kind, mode, seen):
    """CMYK without ink and full transparency are white; of an animation the first picture is taken."""
    made = {
        "L": lambda: Image.new("L", (9, 9), 90),
        "RGBA": lambda: Image.new("RGBA", (9, 9), (5, 5, 5, 0)),
        "I;16": lambda: Image.fromarray(np.full((9, 9), 128 * 257, np.uint16)),
        "CMYK": lambda: Image.new("CMYK", (9, 9), (0, 0, 0, 0)),
        "P": lambda: Image.new("P", (9, 9), 0),
        "1-pixel": lambda: Image.new("RGB", (1, 1), (10, 20, 30)),
    }[mode]()
    more = {"save_all": True, "append_images": [Image.new("P", (9, 9), 1)]} if kind == "GIF" else {}
    (tmp_path / "in").mkdir()
    made.save(tmp_path / f"in/one.{kind.lower()}", kind, **more)
    found = prepare_pictures(str(tmp_path / "in"), SIDE, "crop")
    assert found.damaged == 0 and np.abs(found.array[0].astype(int) - seen).max() <= 1


def test_what_unpacks_to_gigabytes_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr("tpuswarm.recipes.stylegan2.files.LARGEST", 10_000)
    zeros = bytes(1_000_000)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb.png", zeros)
        archive.writestr("one.png", picture(3))
    with tarfile.open(tmp_path / "b.tar", "w") as archive:
        for name, data in (("bomb.png", zeros), ("two.png", picture(4))):
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))
    for place in ("a.zip", "b.tar"):
        found = prepare_pictures(str(tmp_path / place), SIDE, "crop")
        assert len(found.array) == 1 and found.damaged == 1 and "bomb.png (1,000,000 bytes)" in found.named[0]
