"""The thread that carries jobs out: nothing ends it but the keeper, and what is wrong is said."""

import asyncio
import threading
from types import SimpleNamespace

import asyncssh

from tests.cloud.rehearsal.conftest import until
from tpuswarm.cloud.protocol import Listing
from tpuswarm.errors import InputError, RunFailed
from tpuswarm.fleet import setting_up
from tpuswarm.fleet.keeping import jobs
from tpuswarm.fleet.keeping.jobs import Carrying
from tpuswarm.fleet.setting_up import Beginning, Prepared, Preparing


def test_whatever_goes_wrong_jobs_are_carried_on(tmp_path, monkeypatch):
    key = tmp_path / "key"
    asyncssh.generate_private_key("ssh-ed25519").write_private_key(str(key))
    rounds, told = [], []

    async def one(connections, listing, now):
        rounds.append(threading.current_thread())
        if len(rounds) in (2, 3):
            raise FileNotFoundError("objects/abc")  # as where a `sync` has just forgotten it
        if len(rounds) == 4:
            raise SystemExit  # the thread ends
        return None, True

    monkeypatch.setattr(threading, "excepthook", lambda about: None)
    monkeypatch.setattr(jobs, "MOVING", 0.1)
    carrying = Carrying(lambda: SimpleNamespace(key=key, round=one, pause=0.1), told.append)

    def look() -> bool:
        carrying.look(Listing((), frozenset()), True)
        return len(rounds) >= 6

    assert until(look)
    carrying.stop()
    assert told == ["jobs: FileNotFoundError: objects/abc; tried again"]
    assert len(set(rounds)) == 2


def test_a_machine_that_cannot_be_prepared_twice_is_a_bad_one_where_others_can(monkeypatch):
    """And not where nothing can, nor where it is the keeper's own computer that cannot prepare any."""
    table = SimpleNamespace(model_dump_json=lambda: "one")
    wrong: dict[str, Exception | None] = {"a": None, "b": RunFailed("b/0: packages: no space left on device")}

    async def prepare(reach, name):
        error = wrong[name]
        if isinstance(error, InputError):
            raise error
        return Prepared({f"{name}/0": error} if error else {})

    monkeypatch.setattr(setting_up, "prepare", prepare)
    monkeypatch.setattr(setting_up, "KeptSetup", lambda fleet: SimpleNamespace(table=lambda: table))
    monkeypatch.setattr(setting_up, "AGAIN_S", 0.0)
    created = {"a": 1.0, "b": 2.0}

    async def looks(preparing: Preparing, names: str, answer: str) -> list[dict[str, tuple[float, str]]]:
        found = []
        for _ in range(4):
            preparing.look({each: Beginning(created[each], 0) for each in names}, answer)
            await asyncio.sleep(0.001)
            preparing.look({each: Beginning(created[each], 0) for each in names}, answer)
            found.append(preparing.spoilt(created))
        return found

    def after(names: str = "ab", answer: str = "a") -> list[dict[str, tuple[float, str]]]:
        return asyncio.run(looks(Preparing(SimpleNamespace(fleet=None)), names, answer))

    bad = {"b": (2.0, "b/0: packages: no space left on device")}
    assert after()[0] == {} and after()[-1] == bad
    assert after("b")[-1] == {}
    assert after(answer="")[-1] == after(answer="b")[-1] == {}, "it is the way to all of them that is cut"
    wrong["b"] = InputError("A_TOKEN is not set")
    assert after()[-1] == {}
    wrong["b"] = RunFailed("b/0: packages: no space left on device")
    created["b"] = 3.0
    assert after()[-1] == {"b": (3.0, bad["b"][1])}

    async def another_table() -> dict[str, tuple[float, str]]:
        preparing = Preparing(SimpleNamespace(fleet=None))
        await looks(preparing, "a", "a")
        table.model_dump_json = lambda: "two"
        return (await looks(preparing, "b", "a"))[-1]

    assert asyncio.run(another_table()) == {}, "the table may be wrong, with which none was prepared"


def test_one_machine_is_prepared_once_at_a_time_whether_it_answers_or_not(monkeypatch):
    now = []

    async def prepare(reach, name):
        now.append(name)
        assert len(now) == 1
        await asyncio.sleep(0.02)
        now.clear()
        return Prepared({})

    table = SimpleNamespace(model_dump_json=lambda: "one")
    monkeypatch.setattr(setting_up, "prepare", prepare)
    monkeypatch.setattr(setting_up, "KeptSetup", lambda fleet: SimpleNamespace(table=lambda: table))

    async def looks() -> list[dict[str, str]]:
        preparing, found = Preparing(SimpleNamespace(fleet=None)), []
        for runs in (3, None, 3, 4, None, 4, 4):
            found.append(preparing.look({"a": Beginning(1.0, runs)}, ""))
            await asyncio.sleep(0.03 if runs == 4 else 0.001)
        return found

    said = asyncio.run(looks())
    assert said[:4] == [{"a": "a is being set up"}] * 4 and said[-1] == {}, "4 is another beginning, silence is none"


def test_a_machine_is_ready_once_another_try_has_prepared_it(monkeypatch):
    """However long that took: longer than the pause before it, too."""
    tries, table = [], SimpleNamespace(model_dump_json=lambda: "one")

    async def prepare(reach, name):
        tries.append(name)
        await asyncio.sleep(0.05)
        return Prepared({"a/0": RunFailed("a/0: packages: no network")} if len(tries) == 1 else {})

    monkeypatch.setattr(setting_up, "prepare", prepare)
    monkeypatch.setattr(setting_up, "KeptSetup", lambda fleet: SimpleNamespace(table=lambda: table))
    monkeypatch.setattr(setting_up, "AGAIN_S", 0.01)

    async def looks() -> list[dict[str, str]]:
        preparing, found = Preparing(SimpleNamespace(fleet=None)), [{"a": ""}]
        while found[-1]:
            found.append(preparing.look({"a": Beginning(1.0, 0)}, "a"))
            await asyncio.sleep(0.02)
        return found

    said = asyncio.run(asyncio.wait_for(looks(), 30))
    assert said[1] == {"a": "a is being set up"} and said[-2] == {"a": "a/0: packages: no network"}
    assert tries == ["a", "a"]
