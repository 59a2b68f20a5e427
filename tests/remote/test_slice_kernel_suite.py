"""Jupyter's own tests of kernels, on the kernel of a slice of two workers."""

import jupyter_kernel_test
import pytest
import zmq

from tests.remote.slice_kernel import Slice

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def slice_of_two(tmp_path_factory):
    made = Slice(tmp_path_factory.mktemp("suite"))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in made.environment.items():
            patch.setenv(name, value)
        patch.setenv("HOME", str(made.homes[0]))
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)
        yield
    made.close()


class TestSliceKernel(jupyter_kernel_test.KernelTests):
    # ruff: noqa: RUF012
    language_name, file_extension = "python", ".py"
    code_hello_world = "print('hello, world')"
    code_stderr = "import sys; print('test', file=sys.stderr)"
    completion_samples = [{"text": "zi", "matches": {"zip"}}]
    complete_code_samples = ["1", "print('hello, world')", "def f(x):\n  return x*2\n\n\n"]
    incomplete_code_samples = ["print('''hello", "def f(x):\n  x*2"]
    invalid_code_samples = ["import = 7q"]
    code_page_something = "zip?"
    code_generate_error = "raise"
    code_execute_result = [
        {"code": "1+2+3", "result": "6"},
        {"code": "[n*n for n in range(1, 4)]", "result": "[1, 4, 9]"},
        {"code": "'a'*3", "result": "'aaa'"},
    ]
    code_display_data = [
        {"code": "from IPython.display import HTML, display\ndisplay(HTML('<b>test</b>'))", "mime": "text/html"},
        {"code": "from IPython.display import Math, display\ndisplay(Math('1/2'))", "mime": "text/latex"},
    ]
    code_history_pattern = "1?2*"
    supported_history_operations = ("tail", "search")  # ipykernel answers "range" with session 0
    code_inspect_sample = "zip"
    code_clear_output = "from IPython.display import clear_output\nclear_output()"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.kc.execute_interactive("pass", timeout=240)  # the workers become one program


class TestWelcome(jupyter_kernel_test.IopubWelcomeTests):
    support_iopub_welcome = True

    @classmethod
    def setUpClass(cls) -> None:
        """Let the test subscribe to an idle kernel: ipykernel's "starting" may overtake its welcome.

        Until then only one topic is subscribed to: a kernel welcomes only the first client that wants all topics, until
        it has noticed that this one left.
        """
        super().setUpClass()
        client = cls.km.client()
        client.start_channels(iopub=False)
        with client.context.socket(zmq.SUB) as states:
            states.subscribe(b"kernel")
            states.connect(f"tcp://127.0.0.1:{cls.km.iopub_port}")
            assert states.poll(240_000), "this subscription is welcomed"
            request = client.execute("pass")
            while states.poll(240_000):
                _, parts = client.session.feed_identities(states.recv_multipart())
                message = client.session.deserialize(parts)
                if (
                    message["parent_header"].get("msg_id") == request
                    and message["content"].get("execution_state") == "idle"
                ):
                    break
            else:
                raise TimeoutError("the kernel is not idle")
        client.stop_channels()


del jupyter_kernel_test
