"""The table of assumptions names what exists, and a report confirms or contradicts its rows."""

import datetime
import json
import os

import pytest

from tests.journeys.documents import ROOT
from tests.journeys.test_docs import definitions
from tpuswarm.catalog.figures import find_source, read_data
from tpuswarm.cloud.errors import NoCapacity
from tpuswarm.doctor import survey
from tpuswarm.doctor.assumptions import HOST_CHECKS, REFUSALS, judge_assumptions
from tpuswarm.doctor.report import list_refusals, make_report
from tpuswarm.fleet.decide.actions import Event
from tpuswarm.fleet.decide.desired import Desired
from tpuswarm.fleet.store.document import Document

PAGE = ROOT / "docs" / "assumptions.md"
HEAD = f"| id | assumption | source, day read | relied on by | imitated by | checked | seen |\n{'|---' * 7}|\n"
ROWS = read_data("assumptions")
CHECKED = {*HOST_CHECKS, *REFUSALS}


def source_of(row) -> tuple[str, datetime.date]:
    if row["source"] not in read_data("sources"):
        return row["source"], row["read"]
    source = find_source(row["source"])
    return source.title, source.read


def test_documentation_has_every_row():
    def cells(name, row):
        source, read = source_of(row)
        test = f"`{row['test'].partition(':')[0]}`" if "test" in row else "–"
        return (
            name,
            row["assumes"],
            f"{source}, {read}",
            f"`{row['file']}`",
            test,
            name in CHECKED,
            row.get("seen", "no"),
        )

    shown = {True: "✓", False: ""}
    rows = "".join(
        "| " + " | ".join(shown[cell] if isinstance(cell, bool) else cell for cell in cells(*item)) + " |\n"
        for item in ROWS.items()
    )
    before, _, after = PAGE.read_text().partition(HEAD)
    documented, end, after = after.partition("\n## ")
    if os.environ.get("TPUSWARM_GOLDEN") == "write":
        PAGE.write_text(before + HEAD + rows + end + after)
    else:
        assert documented == rows


def test_table_is_short_and_has_each_check():
    assert len(ROWS) <= 60 and ROWS.keys() >= CHECKED


@pytest.mark.parametrize("name", ROWS)
def test_row_has_a_source_and_names_a_file_and_a_test_that_exist(name):
    row = ROWS[name]
    source, read = source_of(row)
    assert source and isinstance(read, datetime.date)
    assert (ROOT / "src/tpuswarm" / row["file"]).is_file()
    if "test" in row:
        file, _, test = row["test"].partition(":")
        assert test in definitions(ROOT / "tests" / file)


GOOD = {
    "host": "v3-0/1", "number": 1, "type": "v3-32", "is_rehearsed": False, "lost": {},
    "system": {"name": "Ubuntu 22.04.4 LTS", "kernel": "6.8", "python": "3.10.12"}, "cpus": 96,
    "memory": {"MemTotal": 333e9}, "devices": [f"/dev/accel{chip}" for chip in range(4)],
    "pci": {f"/dev/accel{chip}": [] for chip in range(4)}, "product": "Google Compute Engine",
    "preload": {"/usr/lib/libtcmalloc.so.4": ""}, "endpoints": ["unknown:unknown:IP"] * 4,
    "metadata_keys": ["preempted", "attributes/instance-id"],
    "metadata": {
        "worker": "1", "type": "v3-32", "preempted": "FALSE", "maintenance": "NONE",
        "scopes": "https://www.googleapis.com/auth/cloud-platform",
    },
    "jax": {
        "platform": "tpu", "kinds": ["TPU v3"] * 8, "memory": [int(15.48 * 2**30)] * 8, "process": 2, "processes": 4,
        "lock": {"file": {}, "is_locked": True}, "metrics_error": "",
        "second": {"error": "ABORTED: The TPU is already in use by process with pid 7"},
    },
}  # fmt: skip
"""A worker of a v3-32 as the table expects it."""
ONLY_TPU7X = {"tpu7x-files"}


def facts(**changes):
    """`metadata__worker="2"` replaces a value inside a fact."""
    host = json.loads(json.dumps(GOOD))
    for name, value in changes.items():
        fact, _, key = name.partition("__")
        if key:
            host[fact][key] = value
        else:
            host[fact] = value
    return host


def test_machine_as_expected_confirms_each_row_that_concerns_it():
    verdicts = judge_assumptions([facts()], [])
    assert verdicts.keys() == HOST_CHECKS.keys() - ONLY_TPU7X and all(verdict.holds for verdict in verdicts.values())


@pytest.mark.parametrize(
    ("assumption", "changes", "seen"),
    [
        ("worker-number", {"metadata__worker": "2"}, "2, expected 1"),
        ("worker-endpoints", {"endpoints": ["unknown:unknown:IP"] * 3}, "unknown:unknown:IP"),
        ("worker-endpoints", {"endpoints": ["IP:8470:unknown"] * 4}, "IP:8470:unknown"),
        ("accelerator-type", {"metadata__type": "V3_POD"}, "V3_POD, expected v3-32"),
        ("instance-id", {"metadata_keys": ["preempted"]}, "1 keys"),
        ("preempted", {"metadata__preempted": None}, "None"),
        ("maintenance-event", {"metadata__maintenance": None}, "None"),
        ("scopes", {"metadata__scopes": "cloud-platform"}, "cloud-platform"),
        ("product-name", {"product": "KVM"}, "KVM"),
        ("device-files", {"devices": ["/dev/vfio/0"]}, "/dev/vfio/0"),
        ("chips-per-host", {"pci": {"/dev/accel0": [], "/dev/accel1": []}}, "2, expected 4"),
        ("tpu7x-files", {"type": "tpu7x-8"}, "4, expected 8"),
        ("jax-devices", {"jax__kinds": ["TPU v3"] * 4}, "4, expected 8"),
        ("device-kind", {"jax__kinds": ["TPU v3 lite"] * 8}, "TPU v3 lite"),
        ("hbm", {"jax__memory": [2**34] * 8}, "17,179,869,184 bytes, expected"),
        ("host-size", {"cpus": 48}, "48 vCPUs, 333 GB, expected 96 and 334"),
        ("lock-file", {"jax__lock": {"file": None, "is_locked": False}}, "no file"),
        ("one-process", {"jax__second": {"platform": "tpu"}}, "a second process started"),
        ("metrics-port", {"jax__metrics_error": "Connection refused"}, "Connection refused"),
        ("preload", {"preload": {}}, "none"),
        ("image", {"system__name": "Ubuntu 24.04"}, "Ubuntu 24.04, Python 3.10.12"),
    ],
)
def test_other_machine_contradicts_a_row(assumption, changes, seen):
    """A row that one host confirms and another contradicts is contradicted."""
    report = make_report([facts(), facts(host="v3-0/2", **changes), facts()], [])
    assert report["contradicted"][assumption].startswith(f"v3-0/2: {seen}")
    assert assumption not in report["confirmed"]


def test_fact_that_cannot_be_read_and_equal_numbers_show_nothing():
    unread = {name: value for name, value in facts().items() if name != "metadata"} | {
        "lost": {"metadata": "timed out"}
    }
    assert {"worker-number", "preempted"} <= set(make_report([unread], [])["not_seen"])
    assert "process-index" in make_report([facts(jax__process=1)], [])["not_seen"]


def test_refusals_are_compared_with_their_codes_and_name_no_project():
    error = NoCapacity('creating a in my-project for me@example.com: There is no more capacity in the zone "z"')
    error.code = "RESOURCE_EXHAUSTED"
    other = "You have reached IN_USE_ADDRESSES limit. (UNAVAILABLE)"
    events = tuple(Event(0.0, "p", "a", kind, text) for kind, text in (
        ("refused", error.with_code), ("refused", other), ("ready", "it is ready")
    ))  # fmt: skip
    document = Document("f", "google", "my-project", Desired("f", ()), (), events=events)
    report = make_report([], list_refusals(document))
    assert report["confirmed"] == {"no-capacity": "refused: RESOURCE_EXHAUSTED"}
    assert report["contradicted"] == {"region-quota": "refused: UNAVAILABLE"}
    assert len(report["refusals"]) == 2 and "There is no more capacity" in report["refusals"][0]
    assert "my-project" not in str(report) and "me@example.com" not in str(report)


def test_values_that_may_be_secret_stay_on_the_host(monkeypatch):
    shown = {"TPU_WORKER_HOSTNAMES": "10.1.2.3,10.1.2.4", "LIBTPU_INIT_ARGS": "--xla_a=1", "JAX_PLATFORMS": "tpu"}
    hidden = {"WANDB_API_KEY": "w", "HF_TOKEN": "h", "TPU_API_KEY": "t", "HOME": "/home/me", "TPUSWARM_ROOT": "/r"}
    monkeypatch.setattr(os, "environ", shown | hidden)
    assert survey.read_environment() == shown | dict.fromkeys(hidden)
    assert survey.hide_addresses("libtpu 0.0.42.1 at 10.1.2.3:8470,10.1.2.4") == "libtpu 0.0.42.1 at IP:8470,IP"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("raise SystemExit('RuntimeError: no chips')", "exit 1: RuntimeError: no chips"),
        ("import time; time.sleep(1000)", "exit -9: no output"),
    ],
)
def test_jax_that_does_not_start_is_reported_with_its_error(monkeypatch, tmp_path, program, error):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(survey, "PROGRAM", program)
    monkeypatch.setattr(survey, "JAX_TIMEOUT_S", 0.5 if "sleep" in program else 60.0)
    assert survey.start_jax({"holders": [], "devices": ["/dev/accel0"]}, "1") == {"error": error}
