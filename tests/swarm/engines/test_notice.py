"""The notice before a preemption: SIGTERM, and what the metadata server says."""

import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

SCRIPT = """
import threading
from tpuswarm.swarm.engines.notice import on_notice
left = threading.Event()
on_notice(left.set)
print("ready", flush=True)
left.wait()
print("left", flush=True)
"""


@pytest.fixture
def metadata():
    """A metadata server on loopback: the answers it still has to give, and the paths and headers it was asked."""
    answers, asked = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # the library's name
            asked.append((self.path, self.headers["Metadata-Flavor"]))
            status, text = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}", answers, asked
    server.shutdown()


def start(**environment: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_sigterm_is_a_notice():
    process = start()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0] == "left\n" and process.returncode == 0


def test_the_metadata_server_is_asked_until_it_says_so(metadata):
    host, answers, asked = metadata
    answers += [(200, b"FALSE"), (503, b"restarting"), (200, b"TRUE")]
    process = start(GCE_METADATA_HOST=host)
    assert process.communicate(timeout=60)[0] == "left\n"
    assert asked == [("/computeMetadata/v1/instance/preempted", "Google")] * 3


def test_without_a_notice_it_stays(metadata):
    host, answers, asked = metadata
    answers += [(200, b"FALSE")]
    process = start(GCE_METADATA_HOST=host)
    while len(asked) < 3:
        assert process.poll() is None
    process.kill()
    assert process.communicate()[0] == ""
