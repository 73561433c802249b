"""The page of plots/report.py in a browser: values appear under the pointer, no script of a record runs."""

import pytest
from support import chromium
from test_plots import new_record, write
from test_report_page import hostile_inputs

from plots import report

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium, which is not installed")
HEADS = "[...document.querySelectorAll('.tip b')].map(e => e.textContent)"
TEXTS = "[...e.querySelectorAll('span')].map(s => s.textContent)"
ROWS = f"[...document.querySelectorAll('.tip div')].map(e => {TEXTS})"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = chromium.Chromium(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture
def page(browser, tmp_path):
    """page(*records): opens their page; gives its path."""
    browser.problems.clear()

    def opened(*records, **window):
        paths = [str(write(tmp_path, record, f"run_{index}")) for index, record in enumerate(records)]
        path = tmp_path / "page.html"
        assert report.main([*paths, f"--output={path}"]) == 0
        browser.open(path, **window)
        return path

    yield opened
    assert browser.problems == [], "no error, no dialog, no request, nothing that the page's policy forbids"


def test_pointing_at_a_chart_shows_its_values(browser, page):
    record = new_record(400)
    page(record)
    browser.point_at(".area", 0.52)
    row = next(row for row in record["training_iterations"] if row["iter"] == 200)
    head, rows = browser.value(HEADS), browser.value(ROWS)
    assert head == ["iteration 200"] and [name for name, _ in rows] == ["training step"]
    assert float(rows[0][1]) == pytest.approx(row["loss"], rel=1e-5)
    assert browser.value("document.querySelectorAll('.cross').length") > 5, (
        "the moment is marked in each chart"
    )


def test_arrow_keys_go_from_row_to_row(browser, page):
    page(new_record(400))
    browser.value("document.querySelector('.area').focus()")
    for key in ("ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowRight"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert browser.value(HEADS) == ["iteration 380"]


def test_the_page_fits_the_window_of_a_phone_and_shows_its_charts(browser, page):
    page(new_record(400), width=400)
    assert browser.value("document.documentElement.scrollWidth") <= 400, "nobody scrolls sideways"
    size = "(b => [b.width, b.height])(document.querySelector('.panel img').getBoundingClientRect())"
    box = browser.value(size)
    assert box[0] > 0.4 * 400 and box[1] == pytest.approx(box[0] * 3.7 / 7.2, rel=0.01)


def test_no_script_of_a_record_runs(browser, page, tmp_path):
    first, second = hostile_inputs(tmp_path)
    for paths in ([first], [first, second]):
        output = tmp_path / "hostile.html"
        assert report.main([*map(str, paths), f"--output={output}"]) == 0
        browser.open(output)
        for share in (0.3, 0.7):
            browser.point_at(".area", share)
        assert browser.value(HEADS)[0].startswith("iteration")
        assert browser.value("document.title") != "broken"
        assert browser.value("document.querySelectorAll('img:not(.panel img)').length") == 0


def test_the_policy_of_the_page_stops_a_script_that_was_put_into_it(browser, page):
    path = page(new_record(100))
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</main>", "<script>document.title='broken'</script></main>"))
    browser.open(path)
    assert browser.value("document.title") != "broken"
    assert len(browser.problems) == 1 and "Content Security Policy" in browser.problems.pop()
