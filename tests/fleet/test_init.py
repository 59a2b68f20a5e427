"""`tpuswarm init --dry-run`: the steps, their commands and the file it would write."""

import datetime
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from tpuswarm.cli.fleet.init import _ask_yes_or_no
from tpuswarm.config.toml_file import parse_toml
from tpuswarm.errors import InputError
from tpuswarm.fleet.apply.file_text import complete
from tpuswarm.fleet.apply.init import GrantText, parse_grant
from tpuswarm.fleet.decide.money import GrantCover
from tpuswarm.fleet.spec.desired_from_file import TpuOptions, file_from_options, list_grants
from tpuswarm.fleet.spec.file import SwarmFile
from tpuswarm.fleet.training import train_jobs

ONE = "--project my-project --type v5litepod-8 --zone us-west4-a"
PREVIEWS = {
    "one": ONE,
    "trc": "--project my-project --allow-cross-region --grant '64 spot Cloud TPU v6e chips in zone us-east1-d' "
    "--grant '5 v3-8 europe-west4-a' --grant '64 v5e us-central1-a spot until 2099-01-31'",
    "rehearsal": "--provider rehearsal --type v3-8 --zone europe-west4-a --count 3 --on-demand",
}


@pytest.fixture
def init(typed, signed_out):
    return lambda line: typed("init", *shlex.split(line))


def file_of(out: str) -> SwarmFile:
    """The file that a dry run would write."""
    text = out[out.index("write swarm.toml") :].split("\n", 1)[1].rsplit("\n", 2)[0]
    return parse_toml(re.sub("(?m)^ {5}", "", text), Path("swarm.toml"), SwarmFile)


@pytest.mark.parametrize("name", PREVIEWS)
def test_preview_matches_the_golden_file_and_contains_a_valid_swarm_toml(name, init, golden):
    line = f"--dry-run {PREVIEWS[name]}"
    code, out, err = init(line)
    assert (code, err) == (0, "")
    golden(f"init-{name}", f"init {line}", out)
    assert not list(Path.cwd().iterdir()), "a dry run writes nothing"
    file = file_of(out)
    assert file.name == "swarm" and file.storage and all(pool.network == "tpuswarm-swarm" for pool in file.pool)


@pytest.mark.parametrize(
    ("text", "grant"),
    [
        ("5 v3-8 europe-west4-a on-demand", (5, "v3-8", "europe-west4-a", "on-demand", None)),
        ("64 v5litepod-8 us-central1-a spot", (64, "v5e-8", "us-central1-a", "spot", None)),
        ("9 v2-8 us-central1-f preemptible until 2027-01-31",
         (9, "v2-8", "us-central1-f", "spot", datetime.date(2027, 1, 31))),
        ("64 v6e us-east1-d spot", (64, "v6e", "us-east1-d", "spot", None)),
        ("64 spot Cloud TPU v6e chips in zone us-east1-d", (64, "v6e", "us-east1-d", "spot", None)),
        ("* 32 on-demand Cloud TPU v4 chips in zone us-central2-b.", (32, "v4", "us-central2-b", "on-demand", None)),
        ("5 on-demand Cloud TPU v3-8 device(s) in zone europe-west4-a",
         (5, "v3-8", "europe-west4-a", "on-demand", None)),
        ("**100 preemptible Cloud TPU v2-8 device(s) in zone us-central1-f**",
         (100, "v2-8", "us-central1-f", "spot", None)),
    ],
)  # fmt: skip
def test_grant_is_parsed(text, grant):
    assert parse_grant(text) == GrantText(*grant)


MAIL = """Thanks again for your interest in using Cloud TPUs to accelerate your machine learning research. Your Google
Cloud project my-project-123 now has access to the following quota free of charge for 30 days:

**64 spot Cloud TPU v6e chips in zone us-east1-d**
**32 on-demand Cloud TPU v4 chips in zone us-central2-b**
**32 spot Cloud TPU v4 chips in zone us-central2-b**
**64 spot Cloud TPU v5e chips in zone europe-west4-b**
**64 spot Cloud TPU v5e chips in zone us-central1-a**
**64 spot Cloud TPU v6e chips in zone europe-west4-a**

Only the TPUs above are free of charge.
"""


@pytest.mark.parametrize(
    ("option", "pools"),
    [
        ("", {
            ("v6e-8", "spot"): (16, ("us-east1-d", "europe-west4-a")), ("v4-8", "on-demand"): (8, ("us-central2-b",)),
            ("v4-8", "spot"): (8, ("us-central2-b",)), ("v5e-16", "spot"): (8, ("europe-west4-b", "us-central1-a")),
        }),
        ("--type v5e-32", {("v5e-32", "spot"): (4, ("europe-west4-b", "us-central1-a"))}),
    ],
)  # fmt: skip
def test_whole_mail_becomes_grants_and_slices_that_the_grants_cover(option, pools, init):
    Path("mail.txt").write_text(MAIL)
    code, out, _ = init(f"--dry-run --allow-cross-region --grant-mail mail.txt {option}")
    file = file_of(out)
    assert code == 0 and "end 30 days after the mail" in out and file.project == "my-project-123"
    assert {(pool.type, pool.how): (pool.count, pool.zones) for pool in file.pool} == pools
    cover = GrantCover(list_grants(file), 0.0)
    assert len(file.grant) == 6
    for pool in file.pool:
        for zone in pool.zones:
            tpu = SimpleNamespace(type=pool.type, zone=zone, how=pool.how, api="tpu")
            assert all(cover.claim(tpu) for _ in range(pool.count // len(pool.zones)))


def test_mail_without_a_grant_is_refused(init):
    Path("mail.txt").write_text("Dear researcher, you have 64 chips.")
    assert "the mail names no grant" in init("--dry-run --grant-mail mail.txt")[2]
    assert "none.txt cannot be read" in init("--dry-run --grant-mail none.txt")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks the count and the type and the zone; a grant is a line"),
        ("v2-8 us-central1-f", "lacks the count;"),
        ("0 v2-8 us-central1-f", "the count is at least 1"),
        ("5 v99-8 us-central1-f", "unknown TPU 'v99-8'"),
        ("5 spot v2-8 us-central1", "'us-central1' has no place in it"),
        ("5 v2-8 us-central1-f spot until soon", "'soon' has no place in it"),
        ("5 v2-8 us-central1-f spot 2027-01-31 please", "'please' has no place in it"),
    ],
)
def test_invalid_grant_is_refused(text, message):
    with pytest.raises(InputError, match=re.escape(message)):
        parse_grant(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "--type or --grant is needed"),
        ("--type v5e-8 --zone us-west4-a", "--project is needed"),
        ("--type v5e-8 --zone us-central1-b --project my-project", "no list has a v5e-8 in us-central1-b"),
        ("--type v2-8 --zone us-central1-b --project P", "a project's id"),
        ("--provider azure", "there is no provider 'azure'; known: google, rehearsal"),
        ("--project my-project --grant '2 v2-8 us-central1-b' --grant '1 v3-8 europe-west4-a'", "cross_region = true"),
    ],
)
def test_invalid_input_is_one_sentence_and_writes_nothing(line, message, init):
    code, _, err = init(f"--dry-run {line}")
    assert code == 2 and message in err and err.count("\n") == 1
    assert not list(Path.cwd().iterdir())


def test_question_is_repeated_until_the_answer_is_yes_or_no():
    answers = iter(["maybe", "NO ", "", "y"])
    found = [_ask_yes_or_no(lambda question, flag, default: next(answers) or default, "?", "--a") for _ in range(3)]
    assert found == [False, False, True]


def test_existing_file_is_prepared_for_and_not_overwritten(init):
    text = 'name = "mine"\nproject = "my-project"\n[storage]\nbucket = "b-1"\n[[pool]]\nname = "a"\ntype = "v2-8"\n'
    Path("swarm.toml").write_text(text + 'zones = ["us-central1-b"]\ncount = 1\nnetwork = "own"\n')
    code, out, _ = init("--dry-run")
    assert code == 0 and "bucket b-1 in us-central1; network own" in out
    assert "write swarm.toml – already done" in out and "--source-tags=tpuswarm-mine" in out
    for option in ("--type v3-8", "--provider rehearsal", "--count 2"):
        code, _, err = init(f"--dry-run {option}")
        assert code == 2 and "swarm.toml exists. Change it there" in err
    Path("swarm.toml").write_text('name = "mine"\n[head]\ntype = "e2-small"\nzone = "us-central1-b"\n')
    code, _, err = init("--dry-run")
    assert code == 2 and "no project is set" in err


POOL = '[[pool]]  # mine\nname = "a"\ntype = "v2-8"\nzones = ["us-central1-b"]\n'
HEAD = '[head]\ntype = "e2-small"\nzone = "us-central1-b"\n'
OWN = 'network = "own"\nservice_account = "me@x.iam.gserviceaccount.com"\n'
TOP, STORAGE = 'name = "mine"\nproject = "my-project"\n', '[storage]\nbucket = "b-1"\n'
ADDED_STORAGE = '\n[storage]\nbucket = "my-project-mine"\nregion = "us-central1"\n'


@pytest.mark.parametrize(
    ("text", "completed"),
    [
        (TOP + POOL, TOP + POOL + ADDED_STORAGE),
        (TOP + STORAGE + POOL + OWN + HEAD, TOP + STORAGE + POOL + OWN + HEAD.replace("[head]\n", f"[head]\n{OWN}")),
        (
            TOP + HEAD + POOL + STORAGE,
            (TOP + HEAD + POOL + STORAGE).replace("[head]\n", '[head]\nnetwork = "tpuswarm-mine"\n').replace(
                "# mine\n", '# mine\nnetwork = "tpuswarm-mine"\n'
            ),
        ),
    ],
    ids=["without a bucket", "head added by hand", "without a network"],
)  # fmt: skip
def test_existing_file_is_completed_in_place_and_then_passes(text, completed):
    spec = parse_toml(text, Path("swarm.toml"), SwarmFile)
    assert complete(text, spec, "my-project") == completed
    spec = parse_toml(completed, Path("swarm.toml"), SwarmFile)
    assert complete(completed, spec, "my-project") == completed
    assert len({(table.network, table.service_account) for _, table, _ in spec.machine_tables}) == 1


def test_changes_of_an_existing_file_are_shown_first(init):
    Path("swarm.toml").write_text(TOP + POOL)
    code, out, _ = init("--dry-run")
    assert code == 0 and "complete swarm.toml" in out and '     +bucket = "my-project-mine"' in out
    assert Path("swarm.toml").read_text() == TOP + POOL


def test_new_file_has_a_training_as_comments_that_is_valid(init):
    _, out, _ = init(f"--dry-run {ONE}")
    text = re.sub("(?m)^ {5}", "", out[out.index("write swarm.toml") :].split("\n", 1)[1].rsplit("\n", 2)[0])
    before, _, tables = text.partition("# [head]")
    file = parse_toml(before + re.sub("(?m)^# ?", "", f"[head]{tables}"), Path("swarm.toml"), SwarmFile)
    assert file.train and file.head and file.head.network == file.pool[0].network
    assert len(train_jobs(file)) == 2


@pytest.mark.parametrize(
    ("user", "name"), [("ann", "ann"), ("Bob.Smith", "bob-smith"), ("007", "swarm"), ("用户", "swarm")]
)
def test_fleet_is_named_after_its_user_or_file(user, name, init, monkeypatch):
    monkeypatch.setenv("LOGNAME", user)
    assert f"bucket my-project-{name} in us-west4; network tpuswarm-{name}" in init(f"--dry-run {ONE}")[1]
    assert "bucket my-project-big in us-west4; network tpuswarm-big" in init(f"big.toml --dry-run {ONE}")[1]


def test_tpu_without_a_file_prefers_gclouds_zone(monkeypatch):
    monkeypatch.setenv("CLOUDSDK_COMPUTE_ZONE", "europe-west4-a")
    file = file_from_options(TpuOptions("v2-8"))
    assert file.pool[0].zones[0] == "europe-west4-a" and len(file.pool[0].zones) > 1
    file = file_from_options(TpuOptions("v2-8", ["us-central1-b"]))
    assert file.pool[0].zones == ("us-central1-b",)


def test_question_for_zones_names_those_that_only_some_projects_have(typed, signed_out, monkeypatch):
    asked = []

    def prompt(question, **_):
        asked.append(question)
        raise typer.Abort("no")

    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", prompt)
    typed("init", "--project", "my-project-123", "--type", "v2-8")
    assert asked == ["zones, in order of preference (some projects have us-central1-f too)"]
