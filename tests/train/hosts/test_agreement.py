"""What hosts of a run decide together and refuse each other for; here over real lines within one process."""

import shutil
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.hosts import free_port
from tests.train import toy
from tpuswarm import InputError, RunFailed, Trainer
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.train.hosts import agreement, line, rendezvous
from tpuswarm.train.hosts.agreement import SECRET, Agreement
from tpuswarm.train.hosts.line import Line
from tpuswarm.train.hosts.rendezvous import Hosts
from tpuswarm.train.hosts.several import PORT, Several, several
from tpuswarm.train.loop import session
from tpuswarm.train.run.loaded import load_parameters
from tpuswarm.train.user_code import build_recipe


@pytest.fixture
def pair():
    """Two hosts that are connected."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        far = socket.create_connection(server.getsockname())
        near, _ = server.accept()
    ends = [Line(end, lambda why, status: None) for end in (near, far)]
    return [Agreement(Hosts(index, 2, {1 - index: end})) for index, end in enumerate(ends)]


def both(*calls):
    """What two calls give or raise, made at the same time."""
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(call) for call in calls]
        return [each.exception(20) or each.result() for each in made]


def facts(recipe, **asked):
    settings = {"batch": 8, "steps": 20, "precision": "f32", "data": recipe.data("train").digest, **asked}
    return lambda: session.facts(recipe, settings, recipe.data("train"))


def texts(folder: Path, *contents: str) -> list[str]:
    for index, content in enumerate(contents):
        (folder / f"{index}.txt").write_text(content)
    return [str(folder / f"{index}.txt") for index in range(len(contents))]


def test_hosts_that_differ_are_refused_by_name(pair, tmp_path):
    one, same, other = texts(tmp_path, "the same. " * 99, "the same. " * 99, "eht same. " * 99)
    mine = facts(GPT2(data=one))
    assert both(*[lambda host=host: host.agree(mine) for host in pair]) == [None, None]
    assert mine() == facts(GPT2(data=same))(), "the same text may lie elsewhere"
    differing = {
        "batch (16 vs 8)": facts(GPT2(data=one), batch=16),
        "lr of gpt2-tiny (0.002 vs 0.001)": facts(GPT2(data=one, lr=0.002)),
        "recipe (gpt2-124m vs gpt2-tiny)": facts(GPT2(size="124m", data="fake")),
    }
    for words, theirs in differing.items():
        found = rendezvous._difference(mine(), theirs(), 1)
        assert found == f"host 1 and host 0 disagree on {words}; all hosts need the same"
    told = both(lambda: pair[0].agree(mine), lambda: pair[1].agree(facts(GPT2(data=other))))
    assert [type(error) for error in told] == [InputError, InputError]
    theirs, ours = (facts(GPT2(data=text))()["data"][:16] for text in (other, one))
    assert (
        str(told[0])
        == str(told[1])
        == (f"host 1 and host 0 disagree on data ({theirs} vs {ours}); all hosts need the same")
    )


def test_data_without_a_digest_are_told_apart_by_their_first_row():
    class Source:
        def __init__(self, seed):
            self._x = toy.data(seed)["x"]

        def rows(self, start, count):
            return {"x": self._x[start : start + count]}

    mine, theirs = (session.facts(toy.recipe(), {"data": None}, Source(seed)) for seed in (0, 1))
    assert rendezvous._difference(mine, theirs, 1).startswith("host 1 and host 0 disagree on first row of the data")


def test_hosts_that_begin_with_other_parameters_are_refused_by_name(pair, tmp_path, monkeypatch):
    """Under the same name, which may mean a disk of each host's own."""
    (tmp_path / "made.py").write_text("from tests.train.toy import toy\n")
    parent, given = tmp_path / "parent", []

    class Heard(Agreement):
        def agree(self, facts):
            given.append(facts())

    def train(steps: int) -> dict[str, str]:
        shutil.rmtree(parent, ignore_errors=True)
        Trainer().fit(build_recipe(f"{tmp_path / 'made.py'}:toy", {}), steps=steps, batch=8, run=parent)
        with monkeypatch.context() as patch:
            patch.setattr(session, "Agreement", Heard)
            Trainer().fit(toy.recipe(), steps=1, batch=8, run=tmp_path / f"child-{steps}", init_from=parent)
        return given[-1]

    mine, theirs = train(1), train(2)
    told = both(lambda: pair[0].agree(lambda: mine), lambda: pair[1].agree(lambda: theirs))
    digests = [facts[f"parameters at {parent}"][:16] for facts in (theirs, mine)]
    words = f"parameters at {parent} ({digests[0]} vs {digests[1]})"
    assert [str(error) for error in told] == [f"host 1 and host 0 disagree on {words}; all hosts need the same"] * 2


def test_hosts_compare_a_published_model_before_they_read_it():
    class Reads(GPT2):
        def shared_digest(self, place):
            return f"digest of {place}"

        def load_shared(self, place, like):
            pytest.fail("was read")

    def agree(facts):
        assert facts() == {"parameters at hf:small": "digest of hf:small"}
        raise InputError("another")

    with pytest.raises(InputError, match="another"):
        load_parameters("hf:small", Reads(data="fake"), None, agree)

    class Alone:
        name, options_at, load_shared = "lone", GPT2.options_at, Reads.load_shared

    with pytest.raises(InputError, match="lone has no shared_digest, by which hosts compare their hf:small"):
        load_parameters("hf:small", Alone(), None, lambda facts: facts())
    with pytest.raises(InputError, match=r"hf:small is not a tpuswarm run .*, and toy can only start from one"):
        load_parameters("hf:small", toy.recipe(), None, lambda facts: facts())


def test_another_version_is_refused_before_jax_starts():
    at = ("127.0.0.1", free_port())
    with ThreadPoolExecutor(1) as pool:
        zero = pool.submit(rendezvous.initialize, f"{at[0]}:{at[1]}", 2, 0, b"secret", 20)
        while True:
            try:
                connection = socket.create_connection(at)
                break
            except ConnectionRefusedError:
                assert not zero.done(), zero.result()
        line.authenticate(connection, b"secret", 1)
        other = Line(connection, lambda why, status: None)
        mine = {"number of hosts": "2", **{name: version(name) for name in ("jax", "jaxlib", "numpy")}, "jax": "0.0.1"}
        other.send({"facts": mine})
        refused = f"host 1 and host 0 disagree on jax (0.0.1 vs {version('jax')}); all hosts need the same"
        assert other.receive()[0] == {"refused": refused}
        other.farewell()
        with pytest.raises(InputError, match="jax"):
            zero.result(20)


def test_a_wish_to_stop_at_any_host_stops_all_of_them_at_the_same_step(pair):
    """Each makes steps as fast as it can; host 0 is ahead, and steps on until it has heard of the wish."""
    stepped = threading.Event()

    def steps(host: Agreement, asks: bool) -> tuple[int, signal.Signals | None]:
        done = 0
        while not host.stopping():
            done += 1
            if done == 5:
                stepped.set()
            if asks and stepped.is_set():
                host._signals.ask(signal.SIGTERM)
        return done, host.asked

    ends = both(lambda: steps(pair[0], False), lambda: steps(pair[1], True))
    assert ends[0] == ends[1] and ends[0][0] >= 5 and ends[0][1] is signal.SIGTERM


def test_hosts_that_run_different_programs_say_so(pair):
    told = both(lambda: pair[0].same("deciding what is due", [True]), lambda: pair[1].same("leaving the loop", True))
    assert told[0] == [True] and isinstance(told[1], RunFailed)
    assert str(told[1]).startswith("host 0 is deciding what is due, this host is leaving the loop: all hosts must")


def test_a_run_directory_that_is_not_shared_is_refused(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(agreement, "LOOK", 0.3)
    with rendezvous.listen("127.0.0.1", 0) as listener:
        at = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(InputError) as refused:
            agreement.join(Several(2, 1, at), tmp_path / "run", lambda why: None)
    assert str(refused.value) == (
        f"host 0 answers at {at}, but host 1 cannot see its run directory {tmp_path / 'run'}: use the same --run on "
        "all hosts, on a shared disk"
    )
    assert "this is host 1 of 2; connecting to 127.0.0.1" in capfd.readouterr().err


def test_the_secret_is_there_for_its_user_alone_while_hosts_come_together(tmp_path, monkeypatch):
    seen = []

    def initialize(at, count, index, secret, *more):
        place = tmp_path / SECRET
        seen.append((place.read_bytes() == secret, oct(place.stat().st_mode & 0o777), len(secret)))
        raise rendezvous.Absent("nobody")

    monkeypatch.setattr(agreement, "initialize", initialize)
    (tmp_path / SECRET).write_text("what a killed process left")
    with pytest.raises(rendezvous.Absent):
        agreement.join(Several(2, 0, "127.0.0.1:9"), tmp_path, lambda why: None)
    assert seen == [(True, "0o600", 64)] and not (tmp_path / SECRET).exists()


WORKERS = {"TPU_WORKER_ID": "2", "TPU_WORKER_HOSTNAMES": "t-0,t-1,t-2,t-3"}


@pytest.mark.parametrize(
    ("asked", "environment", "found"),
    [
        ((None, None, None), WORKERS, None),
        ((1, 0, "h:1"), {}, None),
        ((4, 1, "h:1"), WORKERS, Several(4, 1, "h:1")),
        ((4, None, None), WORKERS, Several(4, 2, f"t-0:{PORT}")),
        ((4, 3, None), {}, "also needs --hosts-at"),
        ((4, None, None), {}, "also needs --host and --hosts-at"),
        ((None, 1, None), {}, "--host and --hosts-at need --hosts"),
        ((0, 0, "h:1"), {}, "hosts must be 1 or more, not 0"),
        ((2, 2, "h:1"), {}, "there is no host 2 of 2"),
        ((2, 1, "nowhere"), {}, "the address of host 0 is HOST:PORT"),
    ],
)
def test_which_host_this_is(asked, environment, found):
    if isinstance(found, str):
        with pytest.raises(InputError, match=found):
            several(*asked, environment)
    else:
        assert several(*asked, environment) == found


@pytest.mark.parametrize(
    ("trainer", "run", "words"),
    [
        (Trainer(hosts=2, host=0, hosts_at="127.0.0.1:9"), None, "needs --run, a directory on a shared disk"),
        (Trainer(hosts=2), "run", "also needs --host and --hosts-at"),
    ],
)
def test_what_a_run_over_several_hosts_needs(tmp_path, monkeypatch, trainer, run, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        trainer.fit(toy.recipe(), steps=3, run=run)
    assert not any(tmp_path.iterdir())


def test_part_of_the_devices_is_refused(pair):
    with pytest.raises(
        InputError, match="devices=4 works on one host only; a run over several hosts uses all of their devices"
    ):
        pair[0].devices(4)
