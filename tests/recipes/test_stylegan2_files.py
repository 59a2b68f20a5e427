"""Pictures of the user's own: folders, zips, tars, odd sizes, damaged ones, buckets."""

import io
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

from tests.swarm.bucket import bucket
from tpuswarm.errors import InputError
from tpuswarm.recipes.stylegan2.pictures import prepare_pictures
from tpuswarm.recipes.stylegan2.recipe import StyleGAN2
from tpuswarm.train.storage.bucket import Bucket

SIDE = 8


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))


def picture(number: int, width: int = SIDE, height: int = SIDE, kind: str = "PNG") -> bytes:
    """Encode a picture of one colour, which no format and no size changes by much."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (number * 10, 255 - number * 10, 7)).save(file, kind)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    """Return a folder with twelve pictures, six in a subfolder, and other files."""
    folder = tmp_path / "pictures"
    (folder / "below").mkdir(parents=True)
    for number in range(12):
        (folder / ("below" if number % 2 else ".") / f"{number:02}.png").write_bytes(picture(number))
    (folder / "README.md").write_text("not a picture")
    (folder / ".hidden.png").write_bytes(b"no picture")
    return folder


def pack(place: Path, files: dict[str, bytes]) -> Path:
    """Write an archive, of the kind that its name says."""
    if place.suffix == ".zip":
        with zipfile.ZipFile(place, "w") as zipped:
            for name, data in files.items():
                zipped.writestr(name, data, zipfile.ZIP_DEFLATED if len(data) > 10_000 else zipfile.ZIP_STORED)
    else:
        with tarfile.open(place, "w:gz" if place.suffix == ".tgz" else "w") as tar:
            for name, data in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return place


def packed(place: Path) -> Path:
    """The pictures of `folder` in an archive, with what WebDatasets and macOS put beside them."""
    pictures = {f"{'below/' * (number % 2)}{number:02}.png": picture(number) for number in range(12)}
    others = {"__MACOSX/._00.png": b"litter"} if place.suffix == ".zip" else {"00.txt": b"a caption"}
    return pack(place, pictures | others)


def reds(array: np.ndarray) -> list[int]:
    """The red of each picture, sorted: which pictures there are."""
    assert array.dtype == np.uint8 and array.shape[1:] == (SIDE, SIDE, 3)
    assert (array == array[:, :1, :1]).all()
    return sorted(int(red) for red in array[:, 0, 0, 0])


ALL = [10 * number for number in range(12)]


@pytest.mark.parametrize("kind", ["folder", "pictures.zip", "shard-000.tar", "shard-000.tgz"])
def test_pictures_are_prepared_once_from_folders_and_archives(folder, tmp_path, kind):
    place = folder if kind == "folder" else packed(tmp_path / kind)
    found = prepare_pictures(str(place), SIDE, "refuse")
    assert reds(found.array) == ALL and found.damaged == 0
    file = Path(found.array.filename)
    before = file.stat().st_mtime_ns
    again = prepare_pictures(str(place), SIDE, "refuse")
    assert again.array.filename == found.array.filename and file.stat().st_mtime_ns == before
    assert isinstance(again.array, np.memmap)


@pytest.mark.parametrize("kind", ["folder", "pictures.zip"])
def test_pictures_replaced_with_their_size_and_time_are_read_again(tmp_path, kind):
    place = tmp_path / kind
    for number in (1, 2):
        file = place / "one.bmp" if kind == "folder" else place
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(picture(number, kind="BMP")) if kind == "folder" else pack(place, {"one.bmp": picture(number)})
        os.utime(file, (1e9, 1e9))
        assert reds(prepare_pictures(str(place), SIDE, "refuse").array) == [10 * number]


def test_archives_in_a_bucket_are_read(tmp_path, monkeypatch):
    (tmp_path / "cloud").mkdir()
    with bucket("pictures", tmp_path / "cloud") as storage:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", storage.endpoint)
        for name in ("one.zip", "two.tar"):
            Bucket("gs://pictures/all").put(name, packed(tmp_path / name).read_bytes())
        found = prepare_pictures("gs://pictures/all", SIDE, "refuse")
    assert reds(found.array) == sorted(2 * ALL)


@pytest.mark.parametrize(("width", "height"), [(3 * SIDE, SIDE), (3, 3)])
def test_odd_size_is_refused_unless_cropping_is_allowed(folder, width, height):
    (folder / "odd.jpg").write_bytes(picture(20, width, height, "JPEG"))
    assert len(prepare_pictures(str(folder), SIDE, "crop").array) == 13
    with pytest.raises(InputError, match=rf"odd.jpg is {width} x {height}, no square of 8 or more: --odd crop"):
        prepare_pictures(str(folder), SIDE, "refuse")


def test_middle_of_a_wide_picture_is_taken(tmp_path):
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
    warning = capsys.readouterr().err
    assert warning.startswith("3 of 15 pictures cannot be read: ") and "cut.jpg (" in warning
    assert "text.png (not a picture)" in warning and "empty.png (empty)" in warning
    assert StyleGAN2(**recipe.options()).data("validation").rows_per_epoch == 1


def test_damaged_picture_of_a_zip_is_left_out(tmp_path):
    place = packed(tmp_path / "all.zip")
    whole = place.read_bytes()
    local, central = whole.find(b"PK\x03\x04"), whole.find(b"PK\x01\x02")
    for changes, why in (
        ({whole.find(b"IDAT") + 6: 0xFF}, "Bad CRC-32"),
        ({local + 6: 1, central + 8: 1}, "encrypted"),
        ({local + 8: 9, central + 10: 9}, "compression method"),
    ):
        damaged = bytearray(whole)
        for at, value in changes.items():
            damaged[at] ^= value
        place.write_bytes(damaged)
        found = prepare_pictures(str(place), SIDE, "crop")
        assert len(found.array) == 11 and found.damaged == 1 and "all.zip:" in found.named[0] and why in found.named[0]


@pytest.mark.parametrize(("kind", "words"), [("zip", ""), ("tar", r" \(bad checksum\); copy it again")])
def test_damaged_archive_is_not_taken_for_a_shorter_one(tmp_path, kind, words):
    place = packed(tmp_path / f"all.{kind}")
    whole = bytearray(place.read_bytes())
    whole[whole.find(b"06.png")] ^= 0xFF
    place.write_bytes(whole[:200] if kind == "zip" else whole)
    with pytest.raises(InputError, match=rf"all\.{kind} is a damaged {kind}{words}"):
        prepare_pictures(str(place), SIDE, "crop")


def test_unreadable_picture_is_reported(folder, monkeypatch):
    def denied(self, path, mode):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(LocalFileSystem, "open", denied)
    with pytest.raises(InputError, match=r"\.png cannot be read: .*Permission denied"):
        prepare_pictures(str(folder), SIDE, "crop")


def test_moved_folder_has_the_same_pictures_in_the_same_order(folder, tmp_path):
    before = StyleGAN2(resolution=SIDE, data=str(folder)).data("train")
    (tmp_path / "elsewhere").mkdir()
    moved = folder.rename(tmp_path / "elsewhere" / "moved")
    after = StyleGAN2(resolution=SIDE, data=str(moved)).data("train")
    assert (after.rows(0, 8)["pictures"] == before.rows(0, 8)["pictures"]).all() and after.digest == before.digest


def test_run_finds_its_pictures_from_every_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    options = StyleGAN2(resolution=SIDE, data=folder.name).options()
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    assert StyleGAN2(**options).data("all").rows_per_epoch == 12
    assert StyleGAN2().options()["data"] == "digits"


def test_members_of_a_swarm_need_only_the_shared_pictures(folder, tmp_path, monkeypatch):
    (folder / "broken.png").write_bytes(b"broken")
    recipe = StyleGAN2(data=str(folder), resolution=SIDE)
    shared = recipe.share(tmp_path / "run" / "data")
    shutil.rmtree(folder)
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "of-another-machine"))
    member = StyleGAN2(**{**recipe.options(), **shared})
    np.testing.assert_array_equal(*(made.data("train").rows(3, 5)["pictures"] for made in (member, recipe)))
    with pytest.raises(InputError, match=r"run/data was made for another resolution than 64"):
        StyleGAN2(resolution=64, **shared).data("train")
    assert StyleGAN2(data="digits").share(tmp_path / "digits") == {}  # scikit-learn has them on every machine


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (None, r"there is no file or folder .*pictures"),
        ({"a.txt": b"a"}, r"there is no picture in .*pictures: its files do not end in \.png"),
        ({"a.png": b"no picture"}, r"none of 1 can be read: .*a\.png \(not a picture"),
        ({"a.png": picture(1)}, r"too few pictures \(1\): it takes at least 10, one of them held out"),
    ],
)
def test_missing_pictures_are_reported(tmp_path, files, words):
    if files is not None:
        (tmp_path / "pictures").mkdir()
        for name, data in files.items():
            (tmp_path / "pictures" / name).write_bytes(data)
    with pytest.raises(InputError, match=words):
        StyleGAN2(resolution=SIDE, data=str(tmp_path / "pictures")).data("train")


@pytest.mark.parametrize(
    ("kind", "made", "rgb"),
    [
        ("PNG", lambda: Image.new("L", (9, 9), 90), [90, 90, 90]),
        ("PNG", lambda: Image.new("RGBA", (9, 9), (5, 5, 5, 0)), [255, 255, 255]),
        ("PNG", lambda: Image.fromarray(np.full((9, 9), 128 * 257, np.uint16)), [128, 128, 128]),
        ("JPEG", lambda: Image.new("CMYK", (9, 9), (0, 0, 0, 0)), [255, 255, 255]),
        ("GIF", lambda: Image.new("P", (9, 9), 0), [0, 0, 0]),
        ("PNG", lambda: Image.new("RGB", (1, 1), (10, 20, 30)), [10, 20, 30]),
    ],
    ids=["grey", "transparent", "16 bits", "CMYK", "animation", "one pixel"],
)
def test_pictures_of_every_kind_become_rgb(tmp_path, kind, made, rgb):
    """CMYK without ink and full transparency are white; of an animation the first picture is taken."""
    more = {"save_all": True, "append_images": [Image.new("P", (9, 9), 1)]} if kind == "GIF" else {}
    place = tmp_path / f"one.{kind.lower()}"
    made().save(place, kind, **more)
    found = prepare_pictures(str(place), SIDE, "crop")
    assert found.damaged == 0 and np.abs(found.array[0].astype(int) - rgb).max() <= 1


@pytest.mark.parametrize("name", ["a.zip", "b.tar"])
def test_picture_that_unpacks_to_gigabytes_is_left_out(tmp_path, monkeypatch, name):
    monkeypatch.setattr("tpuswarm.recipes.stylegan2.pictures.MAX_PICTURE_SIZE", 10_000)
    place = pack(tmp_path / name, {"bomb.png": bytes(1_000_000), "one.png": picture(3)})
    found = prepare_pictures(str(place), SIDE, "crop")
    assert len(found.array) == 1 and found.damaged == 1 and "bomb.png (1,000,000 bytes)" in found.named[0]
