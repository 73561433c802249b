"""The page of plots/report.py in a browser: values appear under the pointer, no script of a record runs."""

import pytest
from support import chromium
from test_plots import new_record, write
from test_report_page import Page, hostile_inputs

from plots import report

pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason="needs Chromium, which is not installed")
AREA = "const area = document.querySelector('.area'); const box = area.getBoundingClientRect();"
POINT = AREA + "const at = {clientX: box.left + 0.52 * box.width, bubbles: true};"
POINT += "area.dispatchEvent(new PointerEvent('pointermove', at));"
KEY = "area.dispatchEvent(new KeyboardEvent('keydown', {{key: '{}', bubbles: true}}));"


def path_of(folder, *paths):
    """Of the page of these records, by default of a new one."""
    paths = paths or [write(folder, new_record(400))]
    assert report.main([*map(str, paths), f"--output={folder / 'page.html'}"]) == 0
    return folder / "page.html"


def test_pointing_at_a_chart_shows_its_values(tmp_path):
    text, problems = chromium.shown(path_of(tmp_path), POINT)
    row = next(row for row in new_record(400)["training_iterations"] if row["iter"] == 200)
    page = Page(text)
    assert page.of("b") == ["iteration 200"] and problems == []
    (label, value), *_ = zip(page.of("span")[::2], page.of("span")[1::2], strict=True)
    assert label == "training step" and float(value) == pytest.approx(row["loss"], rel=1e-5)
    assert text.count('class="cross"') > 5, "the moment is marked in each chart"


def test_arrow_keys_go_from_row_to_row(tmp_path):
    keys = ("ArrowLeft", "ArrowLeft", "ArrowLeft", "ArrowRight")
    text, problems = chromium.shown(path_of(tmp_path), AREA + "".join(map(KEY.format, keys)))
    assert Page(text).of("b") == ["iteration 380"] and problems == []


def test_the_page_fits_the_window_of_a_phone_and_shows_its_charts(tmp_path):
    sizes = "[innerWidth, document.documentElement.scrollWidth, image.width, image.height].join(' ')"
    script = f"const image = document.querySelector('.panel img'); document.title = {sizes};"
    text, problems = chromium.shown(path_of(tmp_path), script, width=500)
    window, page, width, height = map(int, Page(text).of("title")[0].split())
    assert page <= window <= 500 and problems == [], "nobody scrolls sideways"
    assert width > 0.9 * window - 30 and height == pytest.approx(width * 3.4 / 6.0, rel=0.01)


def test_no_script_of_a_record_runs(tmp_path):
    first, second = hostile_inputs(tmp_path)
    for paths in ([first], [first, second]):
        path = path_of(tmp_path, *paths)
        for script in ("", POINT):
            text, problems = chromium.shown(path, script)
            assert "broken" not in "".join(Page(text).of("title")) and problems == []
        assert Page(text).of("b")[-1].startswith("iteration")


def test_the_policy_of_the_page_stops_a_script_that_was_put_into_it(tmp_path):
    path = path_of(tmp_path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("</main>", "<script>document.title='broken'</script></main>"))
    text, problems = chromium.shown(path)
    assert "<title>broken" not in text and "<script>document.title" in text
    assert len(problems) == 1 and "Content Security Policy" in problems[0]
