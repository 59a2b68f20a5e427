"""Agreement between two hosts in one process, over real connections."""

import re
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest

from tests.hosts import connected_sockets
from tests.train import toy
from tpuswarm import ArraySource, InputError, Recipe, RunFailed, Trainer
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.hosts import agreement, rendezvous
from tpuswarm.train.hosts.agreement import SECRET_FILE, Agreement
from tpuswarm.train.hosts.control_channel import ControlChannel
from tpuswarm.train.hosts.host_group import PORT, HostGroup, find_host_group, parse_host_group
from tpuswarm.train.hosts.rendezvous import Hosts
from tpuswarm.train.loop import run_config
from tpuswarm.train.run.loaded import initial_parameters
from tpuswarm.train.run.trust import remember
from tpuswarm.train.user_code import build_recipe


@pytest.fixture
def pair():
    ends = [ControlChannel(end, lambda why, status: None) for end in connected_sockets()]
    return [Agreement(Hosts(index, 2, {1 - index: end})) for index, end in enumerate(ends)]


def call_both(*calls):
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.exception(60) or future.result() for future in futures]


@pytest.mark.parametrize(
    ("host_1", "difference"),
    [
        ({}, None),
        ({"batch": 16}, r"batch \(16 vs 8\)"),
        ({"lr": 0.002}, r"lr of gpt2-tiny \(0.002 vs 0.001\)"),
        ({"size": "124m", "data": "fake"}, r"recipe \(gpt2-124m vs gpt2-tiny\)"),
        ({"text": "eht same. "}, r"data \(\w{16} vs \w{16}\)"),
    ],
)
def test_hosts_that_differ_are_refused_by_name(pair, tmp_path, host_1, difference):
    def facts(index, text="the same. ", batch=8, **options):
        (tmp_path / f"{index}.txt").write_text(text * 99)
        recipe = GPT2(**{"data": str(tmp_path / f"{index}.txt"), **options})
        source = recipe.data("train")
        return run_config.shared_facts(recipe, {"batch": batch, "steps": 20, "data": source.digest}, source)

    results = call_both(
        lambda: pair[0].require_equal(lambda: facts(0)), lambda: pair[1].require_equal(lambda: facts(1, **host_1))
    )
    words = difference and f"host 1 and host 0 disagree on {difference}; all hosts need the same"
    assert all(re.fullmatch(words, str(error)) if words else error is None for error in results)


def test_data_without_a_digest_are_compared_by_their_first_row():
    one, other = (run_config.shared_facts(toy.recipe(), {"data": None}, ArraySource(toy.data(seed))) for seed in (0, 1))
    assert [name for name in one if one[name] != other[name]] == ["first row of the data"]


def test_hosts_compare_the_parameters_they_start_from(tmp_path, monkeypatch):
    """One name may mean another run on each host's own disk."""
    (tmp_path / "recipe.py").write_text("from tests.train.toy import toy\n")
    parent, given = tmp_path / "parent", []
    recipe = build_recipe(f"{tmp_path / 'recipe.py'}:toy", {})
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    remember(recipe.target)
    Trainer(devices=1, save_every=1).fit(recipe, steps=2, batch=8, run=parent)
    monkeypatch.setattr(Agreement, "require_equal", lambda self, facts: given.append(facts()))
    for child in "ab":
        Trainer(devices=1).fit(toy.recipe(), steps=1, batch=8, run=tmp_path / child, init_from=parent)
        shutil.rmtree(parent / "checkpoints" / "00000002", ignore_errors=True)
    first, second = (facts[name] for facts in given for name in facts if name == f"parameters at {parent}")
    assert first != second


def test_hosts_compare_a_published_model_before_they_read_it():
    class Reads(GPT2):
        def shared_digest(self, place):
            return f"digest of {place}"

        def load_shared(self, place, like):
            pytest.fail("was read")

    class WithoutDigest(Reads):
        shared_digest = Recipe.shared_digest

    def agree(facts):
        raise InputError(facts()["parameters at hf:small"])

    for recipe, message in (
        (Reads(data="fake"), "digest of hf:small"),
        (WithoutDigest(data="fake"), "gpt2-tiny has no shared_digest, by which hosts compare their hf:small"),
        (toy.recipe(), r"hf:small is not a tpuswarm run .*, and toy can only start from one"),
    ):
        with pytest.raises(InputError, match=message):
            initial_parameters("hf:small", None, recipe, None, None, agree)


@pytest.mark.parametrize("is_zero_signalled", [False, True])
def test_stop_signal_at_any_host_stops_all_at_the_same_step(pair, is_zero_signalled):
    """Host 0 steps ahead as fast as it can, until it hears of the signal."""
    stepped = threading.Event()

    def run(host: Agreement, is_signalled: bool) -> tuple[int, signal.Signals | None]:
        steps = 0
        while not host.should_stop():
            steps += 1
            assert steps < 10**6, "the other host failed"
            if steps == 5:
                stepped.set()
            if is_signalled and stepped.is_set():
                host._signals.request(signal.SIGTERM)
        return steps, host.stop_signal

    ends = call_both(lambda: run(pair[0], is_zero_signalled), lambda: run(pair[1], True))
    assert ends[0] == ends[1] and ends[0][0] >= 5 and ends[0][1] is signal.SIGTERM


def test_hosts_that_run_different_programs_fail(pair):
    zero, one = call_both(
        lambda: pair[0].broadcast("deciding what is due", [True]), lambda: pair[1].broadcast("leaving the loop", True)
    )
    assert zero == [True] and isinstance(one, RunFailed)
    assert str(one).startswith("host 0 is deciding what is due, this host is leaving the loop: all hosts must")


def test_run_directory_that_is_not_shared_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(agreement, "FILE_VISIBLE_S", 0.3)
    with rendezvous.listen("127.0.0.1", 0) as listener:
        address, run = f"127.0.0.1:{listener.getsockname()[1]}", tmp_path / "run"
        with pytest.raises(InputError, match=f"host 0 answers at {address}, but host 1 cannot see its run dir.* {run}"):
            agreement.join_hosts(HostGroup(2, 1, address), run, lambda why: None)
    assert "this is host 1 of 2; connecting to 127.0.0.1" in capfd.readouterr().err


def test_secret_is_readable_by_its_user_alone_while_hosts_come_together(tmp_path, monkeypatch):
    seen = []

    def initialize(address, count, index, secret, *more):
        path = tmp_path / SECRET_FILE
        seen.append((path.read_bytes() == secret, oct(path.stat().st_mode & 0o777), len(secret)))
        raise rendezvous.HostsAbsent("nobody")

    monkeypatch.setattr(agreement, "initialize", initialize)
    (tmp_path / SECRET_FILE).write_text("of a killed process")
    with pytest.raises(rendezvous.HostsAbsent):
        agreement.join_hosts(HostGroup(2, 0, "127.0.0.1:9"), tmp_path, lambda why: None)
    assert seen == [(True, "0o600", 64)] and not (tmp_path / SECRET_FILE).exists()


WORKERS = {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3"}


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ((None, None, None), WORKERS, None),
        ((1, 0, "h:1"), {}, None),
        ((4, 1, "h:1"), WORKERS, HostGroup(4, 1, "h:1")),
        ((4, None, None), WORKERS, HostGroup(4, 2, f"t-0:{PORT}")),
        ((None, 1, None), {}, "--host and --hosts-at need --hosts"),
        ((0, 0, "h:1"), {}, "hosts must be 1 or more, not 0"),
    ],
)
def test_host_is_found_from_options_and_the_slices_environment(options, environment, expected):
    """Options that a command refuses: cli/test_wrong_input.py."""
    with pytest.raises(InputError, match=expected) if isinstance(expected, str) else nullcontext():
        assert parse_host_group(*options, environment) == expected


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "which train together; --hosts 1 (hosts=1) trains on this one alone"),
        (
            {"run": None},
            "it trains alone: it needs a run (--run, run=) in a bucket or on a disk that all workers share",
        ),
        ({"devices": 2}, "it trains alone: devices=2 selects devices of one host"),
        ({"is_dev_run": True}, "it trains alone: a fast dev run uses one host"),
    ],
)
def test_worker_of_a_slice_joins_the_others_or_says_why_not(monkeypatch, capfd, given, sentence):
    for name, value in WORKERS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: False)
    group = find_host_group(None, None, None, **{"run": "gs://bucket/run", **given})
    assert group == (None if given else HostGroup(4, 2, f"t-0:{PORT}"))
    assert f"this is worker 2 of a slice of 4 workers{';' if given else ','} {sentence}" in capfd.readouterr().err
    monkeypatch.undo()
    monkeypatch.setenv("TPU_WORKER_ID", "0")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    assert find_host_group(None, None, None, run="gs://bucket/run") is None and not capfd.readouterr().err


def test_incomplete_settings_of_several_hosts_are_refused(tmp_path, monkeypatch, pair):
    monkeypatch.chdir(tmp_path)
    for trainer, run, words in (
        (Trainer(hosts=2, host=0, hosts_at="127.0.0.1:9"), None, "needs --run, in a bucket or on a shared disk"),
        (Trainer(hosts=2), "run", "also needs --host and --hosts-at"),
    ):
        with pytest.raises(InputError, match=words):
            trainer.fit(toy.recipe(), steps=3, run=run)
    assert not any(tmp_path.iterdir())
    with pytest.raises(InputError, match=r"devices=4 works on one host only; .* uses all of their devices"):
        pair[0].devices(4)
