"""The kernel of a slice of two workers, as a client sees it: whatever arrives while a cell runs, whatever fails."""

import json
import os
import signal
import threading
import time
import uuid
from multiprocessing import AuthenticationError, connection
from pathlib import Path

import nbformat
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nbconvert import ScriptExporter

from tests.hosts import free_port
from tests.remote.slice_kernel import Slice
from tests.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def slice_(tmp_path_factory):
    made = Slice(tmp_path_factory.mktemp("slice"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def another_slice(tmp_path_factory):
    made = Slice(tmp_path_factory.mktemp("another"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared(slice_):
    with slice_.kernel() as kernel:
        kernel.set_up()
        yield kernel


@pytest.fixture
def kernel(shared):
    """A kernel whose cells have defined SETUP; a test may leave it lost."""
    yield shared
    if shared.run("time, total, me").reply["status"] != "ok":
        shared.restart()
        shared.set_up()


def pid_of(kernel, worker: int) -> int:
    return int(kernel.run(f"%%worker {worker}\nos.getpid()").text)


SLIDER = """\
import comm
class Slider:
    def __init__(self, value):
        self.value, self.comm = value, comm.create_comm("test", data={"value": value})
        self.comm.on_msg(self.moved)
    def moved(self, message):
        self.value = message["content"]["data"]["value"]
        on_move(self.value)
on_move = lambda value: None
slider = Slider(0.5)
"""


def move(kernel, value: float, comm_id: str = "") -> str:
    """Send a page's message of a moved slider; return its identifier."""
    content = {"comm_id": comm_id or kernel.run("%%worker 0\nprint(slider.comm.comm_id)").text.strip()}
    message = kernel.client.session.msg("comm_msg", {**content, "data": {"value": value}})
    kernel.client.shell_channel.send(message)
    return message["header"]["msg_id"]


def test_messages_during_a_cell_leave_its_output_and_its_error(kernel):
    kernel.run(SLIDER)
    comm_id = kernel.run("%%worker 0\nprint(slider.comm.comm_id)").text.strip()

    def interfere() -> None:
        move(kernel, 7.5, comm_id)
        kernel.client.kernel_info()
        kernel.client.comm_info()
        kernel.client.history()
        kernel.client.complete("sli")

    waits = "print('begun', flush=True); time.sleep(0.5)\nprint(slider.value)\n1 / 0"
    shown = kernel.run(waits, "begun", interfere)
    assert shown.text == "begun\n0.5\n" and shown.error.startswith("ZeroDivisionError")
    waits = "import asyncio; print('begun', flush=True); await asyncio.sleep(0.5)\nprint(slider.value)"
    assert kernel.run(waits, "begun", lambda: move(kernel, 8.5, comm_id)).text == "begun\n7.5\n"


def test_widget_has_the_same_value_on_all_workers(kernel):
    kernel.run(SLIDER)
    move(kernel, 7.5)
    assert kernel.run("lr = slider.value\nlr").text == "7.5\n"
    assert kernel.run("print(total(lr))").text == "30.0\n"


def test_page_with_widgets_may_run_its_first_cell_at_once(another_slice):
    """JupyterLab asks for comms and opens the widgets' control channel while the kernel is still starting."""
    with another_slice.kernel() as kernel:
        session, control = kernel.client.session, uuid.uuid4().hex
        kernel.client.comm_info()
        opening = {"comm_id": control, "target_name": "jupyter.widget.control", "data": {}}
        asking = {"comm_id": control, "data": {"method": "request_states"}}
        for kind, content in (("comm_open", opening), ("comm_msg", asking)):
            kernel.client.shell_channel.send(session.msg(kind, content))
        id = kernel.start("import ipywidgets, jax; ipywidgets.IntSlider(2).value, jax.process_count()")
        assert kernel.finish(id).text == "(2, 2)\n"


def test_interact_runs_on_all_workers_and_captures_their_output(kernel):
    shown = kernel.run(
        "import ipywidgets\n@ipywidgets.interact(x=(0, 10))\ndef show(x=3):\n    print('sum', total(x))\n    seen = x"
    )
    assert not shown.error
    widgets = {
        message["content"]["data"]["state"]["_model_name"]: message["content"]["comm_id"]
        for message in shown.messages
        if message["msg_type"] == "comm_open"
    }
    update = {"method": "update", "state": {"value": 5}, "buffer_paths": []}
    content = {"comm_id": widgets["IntSliderModel"], "data": update}
    message = kernel.client.session.msg("comm_msg", content)
    kernel.client.shell_channel.send(message)
    moved = kernel.finish_message(message["header"]["msg_id"])
    assert moved.text == "sum 20.0\n" and not moved.error
    captured = [about["content"]["data"] for about in moved.messages if about["msg_type"] == "comm_msg"]
    holder = {"method": "update", "state": {"msg_id": message["header"]["msg_id"]}, "buffer_paths": []}
    assert holder in captured, "the page puts the output into the widget"


def test_callback_of_a_widget_may_use_all_devices(kernel):
    kernel.run(SLIDER + "on_move = lambda value: print('sum', total(value))")
    shown = kernel.finish_message(move(kernel, 2.0))
    assert shown.text == "sum 8.0\n" and not shown.error


def test_widget_that_only_one_worker_makes_is_said_to_be_its_own(kernel):
    shown = kernel.run(SLIDER + "other = Slider(3) if me == 0 else None")
    assert "different widgets" in shown.errors
    move(kernel, 7.5)
    assert kernel.run("slider.value").text == "7.5\nworker 1: 0.5\n"


def test_cells_of_one_worker_shift_no_count(kernel):
    first = kernel.run("%%worker 1\n'one'").reply["execution_count"]
    second = kernel.run("'both'").reply["execution_count"]
    assert second == first + 1
    assert kernel.run(f"Out.get({first}), Out[{second}]").text == "(None, 'both')\nworker 1: ('one', 'both')\n"
    third = kernel.run("'unstored'", store_history=False).reply["execution_count"]
    assert kernel.run(f"Out[{third}]").text == "'unstored'\n"
    assert kernel.run(f"In[{second}]").text == "\"'both'\"\n"
    noted = kernel.run("# a note\n\n%%worker 1\nme")
    assert noted.text == "1\n" and not noted.error
    assert "takes a worker's number, 0 to 1, not '2'" in kernel.run("%%worker 2\n1").error


def test_first_exception_is_shown_later_cells_are_refused_and_a_killed_kernel_ends_its_workers(kernel):
    worker = pid_of(kernel, 1)
    shown = kernel.run("if me == 1: raise ValueError('no data here')\nprint(total(1))")
    assert shown.error.startswith("ValueError: no data here\nworker 1:") and "Cell In[" in shown.error
    assert "KeyboardInterrupt" not in shown.error
    assert (shown.reply["status"], shown.reply["ename"]) == ("error", "ValueError")
    assert "worker 1 failed while worker 0 waited" in shown.errors
    assert "restart the kernel" in kernel.run("print(total(15))").error
    os.kill(kernel.manager.provisioner.process.pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{worker}").exists())
    kernel.restart()
    kernel.set_up()


def test_worker_whose_peer_has_begun_an_operation_alone_is_refused(kernel):
    shown = kernel.run("if me == 1: raise ValueError('late')\npending = total(7)\n'goes on'")
    assert shown.error.startswith("ValueError: late") and "different places" in shown.errors
    after = kernel.run("print(total(15))")
    assert "restart the kernel" in after.error and after.text == ""


def test_failures_at_the_same_place_leave_the_kernel_usable(kernel):
    assert kernel.run("1 / 0").errors == ""
    assert kernel.run("1 / 0 if me else 5").error.startswith("ZeroDivisionError: division by zero\nworker 1:")
    assert kernel.run("print(total(15))").text == "60.0\n"


def test_lost_worker_is_named(kernel):
    lost = kernel.run("if me: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(600)")
    assert lost.error.startswith("WorkerLost: worker 1 is lost: its process has ended: killed by signal 9, SIGKILL")
    assert "restart the kernel" in lost.error and "worker 1 is lost" in kernel.run("1").error


def test_kernel_whose_other_worker_does_not_answer_says_so(another_slice):
    about = another_slice.notebook(0) / "slice.json"
    right = json.loads(about.read_text())
    about.write_text(json.dumps({**right, "workers": [["127.0.0.1", free_port()]]}))
    try:
        with another_slice.kernel() as kernel:
            assert kernel.run("1").error.startswith("WorkerLost: worker 1 ")
            assert kernel.run("2").error.startswith("WorkerLost: worker 1 ")
            about.write_text(json.dumps(right))
            kernel.restart()
            assert kernel.run("import jax; jax.process_count()").text == "2\n"
    finally:
        about.write_text(json.dumps(right))


def test_exit_ends_the_kernel_without_a_complaint(slice_, kernel):
    shown = kernel.run("exit()")
    assert not shown.error and not shown.errors
    until(lambda: kernel.manager.provisioner.process.poll() is not None)
    kernel.restart()
    kernel.set_up()


def test_sets_have_one_order(kernel):
    assert kernel.run("list({'wq', 'wk', 'wv', 'wo', 'ln1', 'ln2'})").text.count("worker") == 0


def test_no_line_of_a_flood_is_lost(kernel):
    shown = kernel.run("for n in range(6_000): print(n, flush=True)")
    assert shown.text.splitlines() == [str(n) for n in range(6_000)]


def test_late_output_is_shown_with_its_worker(kernel):
    code = "threading.Timer(0.3, lambda: print(f'late from {me}', flush=True)).start()"
    id = kernel.start(code)
    kernel.finish(id)
    text = ""
    while "worker 1" not in text:
        message = kernel.client.get_iopub_msg(timeout=240)
        if message["msg_type"] == "stream":
            assert message["parent_header"]["msg_id"] == id
            text += message["content"]["text"]
    assert text == "late from 0\nworker 1: late from 1\n"


def test_paths_and_times_are_no_difference(kernel):
    shown = kernel.run(
        "import warnings\nwarnings.warn('same')\nprint(f'{1 + me * 3.25} s', f'00:0{me}<00:01, {me}.5it/s', object())"
    )
    assert shown.errors.count("same") == 2 and "worker" not in shown.text + shown.errors  # the message and the line
    assert "worker" not in kernel.run("%%time\nsum(range(1000))").text


def test_history_and_export_are_ipythons(kernel):
    kernel.run("remembered = 41")
    assert any(entry[2] == "remembered = 41" for entry in kernel.history())
    info = kernel.client.kernel_info(reply=True)["content"]
    assert info["language_info"]["nbconvert_exporter"] == "python"
    cells = [nbformat.v4.new_code_cell(code) for code in ("lr = 0.1", "%%worker 1\nlr = 0.2")]
    book = nbformat.v4.new_notebook(cells=cells, metadata={"language_info": info["language_info"]})
    script, _ = ScriptExporter().from_notebook_node(book)
    assert "\nlr = 0.1\n" in script and "run_cell_magic('worker', '1', 'lr = 0.2" in script
    assert "kernel subshells" not in info["supported_features"]


def test_input_is_asked_once_and_reaches_all_workers(kernel):
    asked = []

    def answer() -> None:
        for reply in ("Ada", "lovelace"):
            asked.append(kernel.client.get_stdin_msg(timeout=240)["content"])
            kernel.client.input(reply)

    asking = threading.Thread(target=answer)
    asking.start()
    code = "import getpass; print('hello', input('name? '), getpass.getpass('key? '))"
    shown = kernel.run(code, allow_stdin=True)
    asking.join()
    assert shown.text == "hello Ada lovelace\n" and not shown.error
    assert [about["password"] for about in asked] == [False, True]
    shown = kernel.run("input() if me else None", allow_stdin=True)
    assert shown.error.startswith("StdinNotImplementedError: input() did not run on worker 0")


def test_only_the_slices_key_opens_the_sockets(slice_, kernel):
    """Ports of the kernel, of an engine and of its service give neither output nor code to others."""
    pids = [pid_of(kernel, 0), pid_of(kernel, 1), slice_.service.pid]
    context = zmq.Context()
    stolen = context.socket(zmq.SUB)
    stolen.subscribe(b"")
    ports = [port for pid in pids for port in listening(pid)]
    assert len(ports) > 5
    for port in ports:
        stolen.connect(f"tcp://127.0.0.1:{port}")
    kernel.run("print('secret')")
    assert stolen.poll(500) == 0
    context.destroy(linger=0)
    with pytest.raises(AuthenticationError):
        connection.Client(("127.0.0.1", slice_.port), authkey=b"another")


def listening(pid: int) -> set[int]:
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = str(link.readlink()) if link.is_symlink() else ""
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(after_s=st.floats(0, 5))
def test_interrupt_at_any_moment_of_a_start_leaves_one_program(another_slice, after_s):
    with another_slice.kernel() as kernel:
        id = kernel.start("import time\nwhile True: time.sleep(0.01)")
        time.sleep(after_s)
        stop = threading.Event()

        def interrupt() -> None:
            kernel.interrupt()
            while not stop.wait(1):  # an earlier one does not interrupt the cell
                kernel.interrupt()

        thread = threading.Thread(target=interrupt)
        thread.start()
        shown = kernel.finish(id)
        stop.set()
        thread.join()
        # The reply, because another interrupt while IPython renders the traceback makes it print the name only.
        assert shown.reply["ename"] == "KeyboardInterrupt"
        assert kernel.run("import jax; print(jax.process_count())").text == "2\n"
