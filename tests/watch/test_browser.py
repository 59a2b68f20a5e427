"""The browser of tests records contacted hosts and console errors."""

PAGE = (
    "<meta name=viewport content='width=device-width'><p>hello</p>"
    "<script>fetch('http://elsewhere.invalid/x'); fail()</script>"
)


def test_contacted_hosts_and_console_errors_are_recorded(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(PAGE)
    browser.resize(390, 700)
    browser.open(page.as_uri())
    assert browser.wait(lambda tab: "hello" in tab.text()) and browser.js("return innerWidth") == 390
    assert browser.wait(lambda tab: any("fail is not defined" in complaint for complaint in tab.complaints()))
    assert browser.hosts() == {"elsewhere.invalid"}
