"""One host of a member of two hosts. Host 0 is also the coordinator and aggregator of its swarm."""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np

from tests.hosts import SECRET
from tests.swarm.member.test_training import Swarm
from tests.train.host import BATCH, SHARDED_BYTES, recipe
from tpuswarm.swarm.core.member_state import Adopt
from tpuswarm.swarm.core.rows import NO_ROWS, Rows
from tpuswarm.swarm.engines.threads import NodeThreads
from tpuswarm.swarm.member.device_state import Evaluation
from tpuswarm.swarm.member.leader import Leader, follow
from tpuswarm.swarm.member.program_state import ProgramState, layout_of, place_fragments
from tpuswarm.swarm.processes.effects import Call, Unreachable
from tpuswarm.swarm.storage.ledger import Ledger
from tpuswarm.swarm.storage.objects import Objects
from tpuswarm.swarm.storage.store import Store
from tpuswarm.train.data import placing
from tpuswarm.train.hosts import rendezvous
from tpuswarm.train.loop.evaluate import HeldOut
from tpuswarm.train.program import mesh
from tpuswarm.train.program.compiled import compile_step
from tpuswarm.train.program.request import Request


class Threads:
    """Every node in threads of this process, in real time; calls are plain calls."""

    def __init__(self):
        self.nodes, self.servers = {}, {}

    @property
    def now(self) -> float:
        return time.monotonic()

    def node(self, name: str) -> NodeThreads:
        return self.nodes.setdefault(name, NodeThreads(self.calls))

    def calls(self, call: Call):
        if call.address not in self.servers:
            raise Unreachable(call.address)
        return self.node(call.address).call(self.servers[call.address], call.method, call.arguments)

    def serve(self, name: str, server) -> None:
        self.servers[name] = server

    def spawn(self, name: str, process, done=lambda result: None) -> None:
        def whole():
            done((yield from process))

        self.node(name).start(name, whole())

    def run(self, until, limit: float) -> bool:
        end = time.monotonic() + limit
        while not until() and time.monotonic() < end:
            assert not [node.failure for node in self.nodes.values() if node.failure]
            time.sleep(0.01)
        for node in self.nodes.values():
            node.stop()
            assert node.wait(30)
        return until()


def main() -> None:
    index, options = int(sys.argv[1]), json.loads(sys.argv[2])
    mesh.MIN_SHARDED_BYTES = SHARDED_BYTES
    store = Store(str(Path(options["folder"]) / "swarm"))
    with rendezvous.initialize(options["address"], 2, index, SECRET, 60) as group:
        made, losses = [], []
        source = recipe().data("train")
        compiled = compile_step(recipe(), Request(batch=BATCH, shard=options["shard"]), jax.devices())
        layout = layout_of(compiled, 2)
        group.require_equal({"data": source.digest, "layout": layout.digest})
        init_key, step_key = jax.random.split(jax.random.key(0))

        def make_state(fragments):
            state = compiled.init(init_key, place_fragments(compiled, layout, fragments))
            made.append(
                ProgramState(
                    compiled, source, layout, options["form"], step_key, state, fragments,
                    lambda number, metrics: losses.append(metrics["loss"]),
                    HeldOut(recipe().data("validation"), BATCH),
                    lambda state, mean, row, allow: Evaluation(row, {}, []),
                )
            )  # fmt: skip
            return made[-1]

        def begin():
            state = compiled.init(init_key)  # a program over both hosts
            return layout.split(placing.to_host(compiled.program.exchange().get(state)))

        if index:
            follow(group, make_state, begin)
        else:
            lead = Leader(group, make_state, begin)
            found = run(LedSwarm(lead, compiled, options), losses)
            (Path(options["folder"]) / "found.json").write_text(json.dumps(found))
        check(made[0], store)


class LedSwarm(Swarm):
    """A swarm of one member, led by this host, in real time."""

    def __init__(self, lead, compiled, options):
        self.lead = lead
        folder, form, steps = Path(options["folder"]) / "swarm", options["form"], options["steps"]
        super().__init__(
            folder, recipe(), fragments=2, form=form, steps=steps, batch=BATCH, compiled=compiled, engine=Threads()
        )

    def begin(self, members):
        return [None], self.lead.initialize()

    def make_state(self, state, anchor):
        return self.lead.make_state(anchor)


def run(swarm: LedSwarm, losses) -> dict:
    swarm.run()
    newest, device_state = swarm.ledger.view().newest, swarm.device_states[0]
    fragments = [swarm.objects.get_array(digest) for digest in newest.state]
    version = device_state.place(fragments)
    device_state.place([2 * fragment for fragment in fragments])  # an average may arrive before the version is adopted
    device_state.adopt(Adopt("replace", None, newest.version, newest.state), version, 0.0)
    evaluation = device_state.evaluate(lambda allowed_s=0.0: False, None, newest.version, 1)
    return {"evaluation": evaluation.row} | second_life(swarm.lead, device_state, fragments, losses)


def second_life(lead, first, fragments, losses) -> dict:
    """Return the losses of the same steps from one version: on the state that made it, and on a loaded one."""
    steps = [Rows(((number * BATCH, (number + 1) * BATCH),)) for number in (50, 51, 52)]
    del losses[:]
    for rows in steps:
        first.train(rows, (1, 2), NO_ROWS)
    second = lead.make_state(fragments)
    second.ramp()
    for rows in steps:
        second.train(rows, (1, 2), NO_ROWS)
    second.settle()
    values = [float(loss) for loss in losses]
    return {"first": values[:3], "second": values[3:]}


def check(device_state, store) -> None:
    """Check that this host holds its shards of the ledger's newest version bit for bit (invariant 7)."""
    newest = Ledger(store).view().newest
    fragments = [Objects(store).get_array(digest) for digest in newest.state]
    for anchor, fragment in zip(device_state._anchor, fragments, strict=True):
        padded = np.pad(fragment, (0, anchor.size - fragment.size))
        assert len(anchor.addressable_shards) == 4
        for shard in anchor.addressable_shards:
            assert np.array_equal(shard.data, padded[shard.index])


if __name__ == "__main__":
    main()
