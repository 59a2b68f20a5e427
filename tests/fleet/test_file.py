"""Check swarm.toml: each mistake is one sentence with its line."""

from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fleet.conftest import GOLDEN
from tpuswarm.errors import InputError
from tpuswarm.fleet.spec import providers
from tpuswarm.fleet.spec.checks import check_file
from tpuswarm.fleet.spec.file import read_swarm
from tpuswarm.train.storage import connection

NOW = datetime(2026, 11, 22, tzinfo=UTC).timestamp()
WHOLE = (GOLDEN / "whole.toml").read_text()
TWO_ZONES = '["us-central1-f", "us-central1-b"]'


def warnings(folder: Path, text: str) -> list[str]:
    path = folder / "swarm.toml"
    path.write_text(text)
    return check_file(path, read_swarm(path), NOW)


def error(folder: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        warnings(folder, text)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence.removeprefix(f"{folder}/swarm.toml")


def test_correct_file_is_read_without_warnings(tmp_path):
    assert warnings(tmp_path, f"format = 1\n{WHOLE}") == warnings(tmp_path, WHOLE) == []
    file = read_swarm(tmp_path / "swarm.toml")
    assert file.storage and file.storage.bucket == "my-bucket"
    assert file.down_when and file.down_when.idle_s == 1800
    assert file.grant[0].expires == datetime(2027, 1, 1, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("count = 100", "cuont = 100", 10, "pool 1 has no key cuont; did you mean count?"),
        ('type = "v2-8"\n', "", 6, "pool 1 needs type"),
        ('python = "3.12"', "swap_gb = { smal = 1 }", 50, "there is no pool or VM smal; did you mean small?"),
        ('python = "3.12"', "on.smal.nofile = 9999", 50, "there is no pool or VM smal; did you mean small?"),
        ('python = "3.12"', "on.small.pip = []", 50, "has no key pip"),
        ('python = "3.12"', 'swap_gb = "much"', 50, "must be a whole number, not 'much'"),
        ('name = "gpt2"', "format = 2\nnew = 1", 1, "format 2 is unknown to tpuswarm 0.1.0, which reads format 1; use"),
        ("[budget]", "[buget]", 42, "the file has no key buget; did you mean budget?"),
        ('name = "gpt2"', 'name = "GPT 2"', 1, "name: small letters, digits and -"),
        ('"google"', '"gogle"', 2, "provider: must be 'google' or 'rehearsal', not 'gogle'"),
        ('"my-project-1"', '"My Project"', 3, "project: a project's id such as my-project-123"),
        ('"idle 30m"', '"idel 30m"', 4, '"done", "idle 30m" or a date such as 2026-12-24, not \'idel 30m\''),
        ('"idle 30m"', '"idle long"', 4, "the time after idle is a duration such as 30s, 5m, 2h or 7d"),
        ('"v2-8"\nzones', '"v2-9"\nzones', 8, "unknown TPU 'v2-9': did you mean v2-8"),
        ('"v2-8"\nzones', '"v4-8"\nzones', 9, "no list has a v4-8 in us-central1-f; zones that have it: us-central2-b"),
        ('"v2-8"\nzones', '"tpu7x-8"\nzones', 6, "Compute Engine boots an image PROJECT/FAMILY"),
        ('"v2-8"\nzones', '"v2-8"\napi = "compute"\nzones', 6, 'Compute Engine has no v2-8: write api = "tpu", or'),
        ('"v2-8"\nzones', '"tpu7x-8"\napi = "tpu"\nzones', 6, 'TPU API has no tpu7x-8: write api = "compute", or'),
        ('"us-central1-b"]', '"us-central1-f"]', 6, "zones has the same zone twice"),
        (TWO_ZONES, '"us-central1-f"', 9, "zones: must be a list such as [\"us-central1-f\"], not 'us-central1-f'"),
        ("count = 100\nhow", "count = 0\nhow", 10, "1 to 1,000 machines, not 0; leave the pool out for none"),
        ("count = 100\nhow", "count = 10_000\nhow", 10, "1 to 1,000 machines, not 10,000; make several pools for more"),
        ('"spot"\nruntime', '"free"\nruntime', 11, "must be 'spot', 'on-demand', 'queued', 'reserved' or 'flex-start'"),
        ('"spot"\nruntime', '"reserved"\nruntime', 6, 'how = "reserved" and a reservation go together'),
        ('"on-demand"\n', '"on-demand"\nwait = "4h"\n', 16, "wait is for queued, flex-start, and spot of the TPU API"),
        ('how = "spot"\nruntime', 'how = "flex-start"\nruntime', 6, "Compute Engine has no v2-8: write api"),
        ('how = "spot"\nruntime', 'max_run = "1h"\nruntime', 6, 'max_run is for how = "flex-start"'),
        ('how = "spot"\nruntime', 'max_run = "5m"\nruntime', 11, "10 minutes to 7 days, not '5m'"),
        ('how = "spot"\nruntime', 'disks = [{ name = "data" }]\nruntime', 6, "data cannot be written by 100 machines"),
        ('how = "on-demand"', 'disks = [{ name = "data" }]', 16, "data cannot be written by the 4 hosts of a v3-32"),
        ('["tpu"]', '["TPU"]', 13, "a network tag of small letters, digits and -, not 'TPU'"),
        ('owner = "me"', 'tpuswarm-fleet = "x"', 14, "a label such as owner, which does not begin with tpuswarm"),
        ('name = "slice"', 'name = "small"', 17, "there are two named small"),
        ('name = "slice"', 'name = "head"', 17, "head means something else in commands"),
        ("2027-01-01", "2026-11-20", 28, "ended on 2026-11-20: remove it (the price is then $1.35 an hour each), or"),
        ("2027-01-01", '"soon"', 28, "a date such as 2026-12-24, not 'soon'"),
        ('"n2-highmem-8"', '"big"', 31, "head.type: a machine type such as n2-highmem-8, not 'big'"),
        ('"n2-highmem-8"', '"n2-highmem-8"\nlisten = true\nexternal_ips = false', 30, "needs external_ips = true"),
        ("ip_forward = true", "ip_forward = true\nlisten = true", 41, "vm 1 has no key listen"),
        ("ip_forward = true", "ip_forward = false", 35, 'role = "router" needs ip_forward = true'),
        ("ip_forward = true", "ip_forward = true\nports = [22, 22]", 35, "ports has the same port twice"),
        ('role = "router"', "ports = [8470]", 35, 'ports is for role = "router"'),
        ("ip_forward = true", "ip_forward = true\nports = [0]", 41, "greater than or equal to 1"),
        ("hour = 40.0", "hour = 5.0", 43, "$5.00 an hour is less than a machine of pool slice costs: $32"),
        ("gs://my-bucket", "gs://My_Bucket/x", 47, "a bucket's name such as my-swarm"),
        ('"3.12"', '"2.7"', 50, "a version of Python such as 3.12, not '2.7'"),
        ('["HF_TOKEN"]', '["HF TOKEN"]', 52, "the name of an environment variable, not 'HF TOKEN'"),
        ('pip = ["numpy"]', 'requirements = "none.txt"', 49, "there is no file none.txt"),
        ('pip = ["numpy"]', 'nfs = { server = "nas" }', 51, "there is no VM nas; known: head, router"),
    ],
)
def test_mistake_is_reported_with_its_line(tmp_path, old, new, line, message):
    assert old in WHOLE
    sentence = error(tmp_path, WHOLE.replace(old, new, 1))
    assert sentence.startswith(f", line {line}: ") and message in sentence, sentence


def test_grant_permits_a_zone_that_no_list_has(tmp_path):
    text = WHOLE.replace('"us-central1-b"]', '"us-east9-z"]')
    assert "no list has a v2-8 in us-east9-z" in error(tmp_path, text)
    assert warnings(tmp_path, text.replace('zone = "us-central1-f"\nhow', 'zone = "us-east9-z"\nhow')) == []


def test_bucket_in_another_region_is_refused_with_its_price_unless_allowed(tmp_path):
    text = WHOLE.replace('"gs://my-bucket"', '"gs://my-bucket"\nregion = "us-central1"')
    far = error(tmp_path, text)
    assert "the bucket lies in us-central1 and pool slice in europe-west4: each GiB read there costs" in far
    assert far.endswith("make a bucket in europe-west4, or set allow_cross_region = true")
    near = text.replace(TWO_ZONES, '["us-central1-f"]').replace("europe-west4-a", "us-east1-d")
    assert "each GiB read there costs $0.02; make a bucket in us-east1" in error(tmp_path, near)
    assert warnings(tmp_path, f"allow_cross_region = true\n{text}") == []


def test_budget_with_an_unknown_price_is_refused(tmp_path):
    text = WHOLE.replace(TWO_ZONES, '["asia-east1-c"]').replace('"v2-8"\nzones', '"v6e-8"\nzones')
    assert "the price of a v6e-8 in asia-east1-c is unknown, so no budget" in error(tmp_path, text)


@pytest.mark.parametrize(
    ("old", "new", "warning"),
    [
        ("tpu-ubuntu2204-base", "my-own-runtime", "pool small: runtime my-own-runtime is in no list we know"),
        ("tpu-ubuntu2204-base", "v2-alpha-tpuv6e", "v2-alpha-tpuv6e is for v6e; usual for v2-8: tpu-ubuntu2204-base"),
        ("tpu-ubuntu2204-base", "tpu-vm-tf-2.17.0-pjrt", None),
        ("n2-highmem-8", "x9-huge-8", "head: the price of a x9-huge-8 in us-central1-f is unknown"),
    ],
)
def test_unknown_runtime_or_machine_type_is_only_a_warning(tmp_path, old, new, warning):
    found = warnings(tmp_path, WHOLE.replace(old, new))
    assert len(found) == (warning is not None) and all(warning in sentence for sentence in found)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"us-central1-b"]', '"us-centrall-b"]', "not 'us-centrall-b'; did you mean us-central1-b?"),
        ("[[pool]]", "[pool]", "write [[pool]]"),
        ("[head]", "[[head]]", "write [head]"),
    ],
)
def test_zone_with_a_typo_or_wrong_brackets_are_corrected(tmp_path, old, new, message):
    text = WHOLE.replace(old, new, 1)
    if new == "[pool]":  # a TOML file cannot have both
        text = 'name = "gpt2"\n[pool]\nname = "a"\ntype = "v2-8"\nzones = ["us-central1-b"]\n'
    assert message in error(tmp_path, text)


def test_byte_order_mark_of_an_editor_hides_neither_a_mistake_nor_that_the_cloud_is_local(tmp_path, monkeypatch):
    assert warnings(tmp_path, "\ufeff" + WHOLE) == []
    assert "line 1" in error(tmp_path, "\ufeffnam = 1\n" + WHOLE)
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setattr(connection, "_local_cloud", None)
    local = SimpleNamespace(endpoints=SimpleNamespace(http="http://127.0.0.1:9"), credentials=None)
    monkeypatch.setattr(providers, "open_access", lambda provider, project: local)
    (tmp_path / "swarm.toml").write_text("\ufeff" + WHOLE.replace('"google"', '"rehearsal"'))
    providers.use_rehearsed_buckets(tmp_path / "swarm.toml")
    assert connection.default_endpoint().address == "http://127.0.0.1:9"


def test_empty_or_missing_file_is_an_error(tmp_path, monkeypatch):
    assert "asks for no machine" in error(tmp_path, 'name = "gpt2"\n')
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with pytest.raises(InputError, match=r"there is no swarm\.toml here: `tpuswarm init` writes one"):
        read_swarm(Path("swarm.toml"))
