"""A slice of two workers without a cloud: the service of one, and the kernel of the other through jupyter_client."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager

from tests.remote.cells import Shown
from tests.waiting import until
from tpuswarm.remote.notebook import begin

PATIENCE_S = 120.0
SETUP = """\
import jax, jax.numpy as jnp, os, signal, sys, threading, time
from jax.sharding import NamedSharding, PartitionSpec as P
me = jax.process_index()
rows = NamedSharding(jax.make_mesh((jax.device_count(),), ("x",)), P("x"))
def total(*values):
    '''The sum over both workers of each one's value.'''
    mine = jnp.full(jax.local_device_count(), float(values[me % len(values)]))
    return jax.jit(jnp.sum)(jax.make_array_from_process_local_data(rows, mine))
float(total(0))
"""


class Slice:
    def __init__(self, folder: Path):
        self.homes = [folder / "worker-0", folder / "worker-1"]
        secret = os.urandom(16).hex()
        script = f'#!/bin/bash\nexport PATH={Path(sys.executable).parent}:"$PATH" PYTHONHASHSEED=0\nexec "$@"\n'
        files = {"begin": script, "secret": secret, **begin.slice_files(), **begin._kernel_files("test", 2)}
        self.environment = {
            **os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JUPYTER_PATH": str(self.notebook(0) / "share"), "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }  # fmt: skip
        self.environment.pop("PYTEST_CURRENT_TEST", None)
        for number in range(2):
            for name, text in files.items():
                path = self.notebook(number) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        port = folder / "port"
        service = (
            f"exec /bin/bash {self.notebook(1)}/begin python3 ~/.tpuswarm/notebook/code/run.py worker 127.0.0.1 {port}"
        )
        self.service = subprocess.Popen(
            ["/bin/bash", "-c", service], env={**self.environment, "HOME": str(self.homes[1])}
        )
        until(port.exists)
        self.port = int(port.read_text())
        about = {"address": "127.0.0.1", "workers": [["127.0.0.1", self.port]]}
        (self.notebook(0) / "slice.json").write_text(json.dumps(about))

    def notebook(self, number: int) -> Path:
        return self.homes[number] / ".tpuswarm/notebook"

    def manager(self) -> KernelManager:
        specs = KernelSpecManager(kernel_dirs=[str(self.notebook(0) / "share/kernels")], ensure_native_kernel=False)
        return KernelManager(kernel_name="python3", kernel_spec_manager=specs, transport_encryption="required")

    @contextmanager
    def kernel(self) -> Iterator["Kernel"]:
        manager = self.manager()
        manager.start_kernel(env={**self.environment, "HOME": str(self.homes[0])}, cwd=str(self.homes[0]))
        kernel = Kernel(manager)
        try:
            yield kernel
        finally:
            kernel.client.stop_channels()
            manager.shutdown_kernel(now=True)

    def close(self) -> None:
        self.service.terminate()
        self.service.wait()


class Kernel:
    def __init__(self, manager: KernelManager):
        self.manager = manager
        self.connect()

    def connect(self) -> None:
        self.client = self.manager.client()
        self.client.session.session = uuid.uuid4().hex  # else its messages carry the manager's session
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE_S)

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=True)
        self.connect()

    def set_up(self) -> None:
        """Define SETUP; the other cells make gloo report its connections now."""
        for code in (SETUP, "1 / 0", "time.sleep(0.3)"):
            reply = self.run(code).reply
        assert reply["status"] == "ok", reply

    def start(self, code: str, **options: Any) -> str:
        return self.client.execute(code, **options)

    def run(self, code: str, at: str = "", callback: Callable[[], Any] = lambda: None, **options: Any) -> Shown:
        """Run a cell to its end; call back once it has printed `at`."""
        return self.finish(self.start(code, **options), at, callback)

    def finish_message(self, id: str) -> Shown:
        """Collect the output of a message that has no reply."""
        return self.finish(id, has_reply=False)

    def history(self) -> list[list[Any]]:
        return self.client.history(hist_access_type="tail", n=10, reply=True, timeout=PATIENCE_S)["content"]["history"]

    def finish(
        self, id: str, at: str = "", callback: Callable[[], Any] = lambda: None, has_reply: bool = True
    ) -> Shown:
        """Collect a cell's output until its reply and its end."""
        shown = Shown()
        while not shown.is_idle:
            message = self.client.get_iopub_msg(timeout=PATIENCE_S)
            if message["parent_header"].get("msg_id") == id:
                shown.add(message)
                if at and at in shown.text:
                    at = ""
                    callback()
        while has_reply and not shown.reply:
            reply = self.client.get_shell_msg(timeout=PATIENCE_S)
            if reply["parent_header"].get("msg_id") == id:
                shown.add(reply)
        return shown

    def interrupt(self) -> None:
        self.manager.interrupt_kernel()
