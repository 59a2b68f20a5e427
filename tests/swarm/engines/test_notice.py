"""The notice before a preemption: SIGTERM, and what the metadata server says."""

import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

SCRIPT = """
import threading
from tpuswarm.swarm.engines import notice
notice.LOOK = 0.01
left = threading.Event()
notice.on_notice(left.set)
print("ready", flush=True)
left.wait()
print("left", flush=True)
"""


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


def test_member_leaves_once_the_metadata_server_says_preempted():
    requests, answers = [], [(200, b"FALSE"), (503, b"restarting"), (200, b"FALSE"), (200, b"TRUE")]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):  # the library's name
            status, text = answers[len(requests)]
            requests.append((self.path, self.headers["Metadata-Flavor"]))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    process = start(GCE_METADATA_HOST=f"127.0.0.1:{server.server_port}")
    assert process.communicate(timeout=60)[0] == "left\n"
    server.shutdown()
    server.server_close()
    assert requests == [("/computeMetadata/v1/instance/preempted", "Google")] * len(answers)
