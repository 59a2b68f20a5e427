"""Pages and reports pass axe, html-validate and Lighthouse, light and dark, on a screen and on a phone."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.swarm.views.test_report import finished_swarm  # noqa: F401  # a fixture
from tests.watch.fake_run import FakeRun, make_plain_run
from tests.web import serve_folder
from tpuswarm.swarm.views.report import write_report as write_swarm_report
from tpuswarm.train.look.report import write_report
from tpuswarm.watch.page.server import document

pytestmark = pytest.mark.slow

PACKAGES = Path(__file__).parents[1] / "checkers/node_modules"
VIOLATIONS = """
const done = arguments[0];
axe.run().then(({ violations }) => done(violations.map(({ id, nodes }) => [id, nodes.map((node) => node.html)])));
"""
WIDTH = "return document.documentElement.scrollWidth"
DRAWN = "return document.readyState === 'complete' && (typeof seen === 'undefined' || seen !== null)"
NEEDS_HTTPS = ("is-on-https", "redirects-http")
"""Audits of Lighthouse that loopback need not pass."""


@pytest.fixture(autouse=True)
def checkers() -> None:
    if not PACKAGES.exists() or shutil.which("node") is None:
        pytest.skip("the checkers are not installed: install Node.js, then run `make checkers`")


@pytest.fixture(scope="module")
def reports(tmp_path_factory, finished_swarm) -> dict[str, Path]:  # noqa: F811
    folder = Path(shutil.copytree(finished_swarm[0], tmp_path_factory.mktemp("run") / "run"))
    plain = make_plain_run(tmp_path_factory.mktemp("run") / "plain", 30)
    return {"plain": write_report(plain), "swarm": write_swarm_report(folder)}


@pytest.fixture
def url(request, tmp_path, reports, page_of) -> Iterator[str]:
    """Serve the document and the kind of run that the test names."""
    document, kind = request.param
    with ExitStack() as stack:
        if document == "report":
            path = reports[kind]
            yield f"{stack.enter_context(serve_folder(path.parent))}/{path.name}"
            return
        if kind == "plain":
            make_plain_run(tmp_path / "run", 30)
        else:
            run = FakeRun(tmp_path / "run", 3, 100).take_lock()
            stack.callback(run.release)
            run.grow(12)
            run.lose_member("m1")
            run.write_status(("m2 has a loss of 7, far from the others",))
        yield page_of(tmp_path, "run").url


@pytest.mark.parametrize(
    "url",
    [(document, kind) for document in ("page", "report") for kind in ("plain", "swarm")],
    ids="-".join,
    indirect=True,
)
def test_axe_finds_nothing_and_no_screen_is_too_narrow(browser, url):
    axe = (PACKAGES / "axe-core/axe.min.js").read_text()
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        for width in (1280, 375):
            browser.resize(width)
            browser.open(url)
            browser.wait(lambda tab: tab.js(DRAWN), "the document")
            assert browser.js("return innerWidth") == width and browser.js(WIDTH) <= width
            browser.js(axe)
            assert browser.driver.execute_async_script(VIOLATIONS) == [], f"{scheme}, {width} pixels"
    assert not browser.complaints() and not browser.hosts()


@pytest.mark.parametrize("url", [("page", "swarm"), ("report", "swarm")], ids="-".join, indirect=True)
def test_lighthouse_finds_nothing(browser, url, tmp_path):
    _, _, port = browser.driver.capabilities["goog:chromeOptions"]["debuggerAddress"].partition(":")
    found = tmp_path / "lighthouse.json"
    subprocess.run(
        [
            "node", PACKAGES / "lighthouse/cli/index.js", url, f"--port={port}", "--quiet", "--output=json",
            "--only-categories=accessibility,best-practices,seo", "--throttling-method=provided",
            f"--output-path={found}", "--no-enable-error-reporting",
            "--max-wait-for-load=5000",  # a page never stops reading its stream
        ],
        check=True, timeout=240,
    )  # fmt: skip
    report = json.loads(found.read_text())
    failed = {
        name: audit["title"]
        for name, audit in report["audits"].items()
        if audit["score"] is not None and audit["score"] < 1 and name not in NEEDS_HTTPS
    }
    assert failed == {}


def test_html_is_valid(reports, tmp_path):
    (tmp_path / "page.html").write_text(document()[0])
    for kind, path in reports.items():
        shutil.copy(path, tmp_path / f"{kind}.html")
    (tmp_path / ".htmlvalidate.json").write_text('{"root": true, "extends": ["html-validate:recommended"]}')
    command = ["node", PACKAGES / "html-validate/bin/html-validate.mjs", "--formatter=text", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
