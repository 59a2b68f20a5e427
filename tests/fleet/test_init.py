"""`tpuswarm init` shown: the steps, their commands and the file that is written, for several beginnings."""

import datetime
import os
import re
import shlex
from pathlib import Path

import pytest

from tpuswarm.config.toml_file import parse_toml
from tpuswarm.errors import InputError
from tpuswarm.fleet.asked import asked
from tpuswarm.fleet.file import SwarmFile
from tpuswarm.fleet.init import GrantText, parse_grant

GOLDEN = Path(__file__).parent / "golden"
LINES = {
    "one": ["--project", "my-project", "--type", "v5litepod-8", "--zone", "us-west4-a"],
    "trc": [
        "--project", "my-project", "--allow-cross-region",
        "--grant", "100 v2-8 us-central1-f spot until 2099-01-31",
        "--grant", "5 v3-8 europe-west4-a",
    ],
    "rehearsal": [
        "--provider", "rehearsal", "--type", "v3-8", "--zone", "europe-west4-a", "--count", "3", "--on-demand",
    ],
}  # fmt: skip


@pytest.fixture
def typed_here(typed, tmp_path, monkeypatch):
    """Runs `init` in an empty folder, by someone who has never signed in anywhere."""
    for name in [each for each in os.environ if each.startswith(("GOOGLE_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "swarm")
    monkeypatch.chdir(tmp_path)
    return lambda *words: typed("init", *words)


@pytest.mark.parametrize("name", LINES)
def test_the_preview_is_this_text(name, typed_here):
    code, out, err = typed_here("--dry-run", *LINES[name])
    golden = GOLDEN / f"init-{name}.txt"
    said = f"$ tpuswarm {shlex.join(['init', '--dry-run', *LINES[name]])}\n{out}"
    if os.environ.get("TPUSWARM_GOLDEN") == "write":
        golden.write_text(said)
    assert (code, err) == (0, "")
    assert said == golden.read_text()
    assert not list(Path.cwd().iterdir()), "a dry run leaves nothing behind"


@pytest.mark.parametrize("name", LINES)
def test_the_file_in_the_preview_is_one_that_is_understood(name, typed_here):
    _, out, _ = typed_here("--dry-run", *LINES[name])
    text = out[out.index("write swarm.toml") :].split("\n", 1)[1].rsplit("\n", 2)[0]
    file = parse_toml(re.sub("(?m)^ {5}", "", text), Path("swarm.toml"), SwarmFile)
    assert file.name == "swarm" and file.storage and all(pool.network == "tpuswarm-swarm" for pool in file.pool)


@pytest.mark.parametrize(
    ("text", "grant"),
    [
        ("5 v3-8 europe-west4-a", GrantText(5, "v3-8", "europe-west4-a", "on-demand", None)),
        ("5 v3-8 europe-west4-a on-demand", GrantText(5, "v3-8", "europe-west4-a", "on-demand", None)),
        ("64 v5litepod-8 us-central1-a spot", GrantText(64, "v5e-8", "us-central1-a", "spot", None)),
        (
            "100 v2-8 us-central1-f preemptible until 2027-01-31",
            GrantText(100, "v2-8", "us-central1-f", "spot", datetime.date(2027, 1, 31)),
        ),
    ],
)
def test_grants_are_read_as_people_type_them(text, grant):
    assert parse_grant(text) == grant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "a grant is typed like"),
        ("v2-8 us-central1-f 5", "a grant is typed like"),
        ("0 v2-8 us-central1-f", "a grant is typed like"),
        ("5 v99-8 us-central1-f", "unknown TPU 'v99-8'"),
        ("5 v2-8 us-central1-f spot until soon", "until and a date"),
        ("5 v2-8 us-central1-f spot 2027-01-31 please", "'please' has no place in it"),
    ],
)
def test_grants_that_are_none(text, words):
    with pytest.raises(InputError, match=re.escape(words)):
        parse_grant(text)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ([], "give --type or --grant"),
        (["--type", "v5e-8", "--zone", "us-west4-a"], "give --project"),
        (["--type", "v5e-9", "--zone", "us-west4-a"], "unknown TPU 'v5e-9'"),
        (
            ["--type", "v5e-8", "--zone", "us-central1-b", "--project", "my-project"],
            "no list has a v5e-8 in us-central1-b",
        ),
        (["--type", "v2-8", "--zone", "nowhere", "--project", "my-project"], "a zone such as us-central1-f"),
        (["--type", "v2-8", "--zone", "us-central1-b", "--project", "P"], "a project's id"),
        (
            ["--type", "v2-8", "--zone", "us-central1-b", "--project", "my-project", "--count", "0"],
            "1 to 1,000 machines",
        ),
        (["--type", "v2-8", "--zone", "us-central1-b", "--project", "my-project", "--bucket", "B!"], "a bucket's name"),
        (["--provider", "azure"], "there is no provider 'azure'; known: google, rehearsal"),
        (["--project", "my-project", "--grant", "1 v2-8 us-central1-b spot until 2020-01-01"], "ended on 2020-01-01"),
        (
            ["--project", "my-project", "--grant", "2 v2-8 us-central1-b", "--grant", "1 v3-8 europe-west4-a"],
            "allow_cross_region = true",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(line, words, typed_here):
    code, _, err = typed_here("--dry-run", *line)
    assert code == 2 and words in err and err.count("\n") == 1
    assert not list(Path.cwd().iterdir())


def test_a_file_that_is_there_is_made_ready_for_and_not_written(typed_here):
    text = 'name = "mine"\nproject = "my-project"\n[storage]\nbucket = "b-1"\n[[pool]]\nname = "a"\ntype = "v2-8"\n'
    Path("swarm.toml").write_text(text + 'zones = ["us-central1-b"]\ncount = 1\nnetwork = "own"\n')
    code, out, _ = typed_here("--dry-run")
    assert code == 0 and "bucket b-1 in us-central1; network own" in out
    assert "write swarm.toml – already done" in out and "--source-tags=tpuswarm-mine" in out
    for word in (["--type", "v3-8"], ["--provider", "rehearsal"], ["--count", "2"]):
        code, _, err = typed_here("--dry-run", *word)
        assert code == 2 and "swarm.toml is there already" in err
    Path("swarm.toml").write_text('name = "mine"\n[head]\ntype = "e2-small"\nzone = "us-central1-b"\n')
    code, _, err = typed_here("--dry-run")
    assert code == 2 and "no project is named" in err


@pytest.mark.parametrize(
    ("user", "name"), [("ann", "ann"), ("Bob.Smith", "bob-smith"), ("007", "swarm"), ("用户", "swarm")]
)
def test_a_fleet_is_called_after_whoever_makes_it_or_after_its_file(user, name, typed_here, monkeypatch):
    monkeypatch.setenv("LOGNAME", user)
    _, out, _ = typed_here("--dry-run", *LINES["one"])
    assert f"bucket my-project-{name} in us-west4; network tpuswarm-{name}" in out
    _, out, _ = typed_here("big.toml", "--dry-run", *LINES["one"])
    assert "bucket my-project-big in us-west4; network tpuswarm-big" in out


def test_one_tpu_without_a_file_is_asked_for_in_gclouds_own_zone_first(monkeypatch):
    monkeypatch.setenv("CLOUDSDK_COMPUTE_ZONE", "europe-west4-a")
    read, _ = asked(None, "v2-8", [], None, False, "google")
    assert read.pool[0].zones[0] == "europe-west4-a" and len(read.pool[0].zones) > 1
    read, _ = asked(None, "v2-8", ["us-central1-b"], None, False, "google")
    assert read.pool[0].zones == ("us-central1-b",)
