"""What the tests in a browser rely on: it tells when a page asks another host, and when its console has complaints."""

PAGE = (
    "<meta name=viewport content='width=device-width'><p>hello</p>"
    "<script>fetch('http://elsewhere.invalid/x'); fail()</script>"
)


def test_it_sees_what_a_page_asks_for_and_complains_of(browser, tmp_path):
    page = tmp_path / "page.html"
    page.write_text(PAGE)
    browser.resize(390, 700)
    browser.open(page.as_uri())
    assert browser.wait(lambda each: "hello" in each.text()) and browser.js("return innerWidth") == 390
    assert browser.wait(lambda each: any("fail is not defined" in one for one in each.complaints()))
    assert browser.hosts() == {"elsewhere.invalid"}
