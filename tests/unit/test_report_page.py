"""The page of plots/report.py: it holds the record's own figures, needs no network, escapes what it shows."""

import base64
import copy
import json
import math
import random
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from matplotlib.figure import Figure
from support.hostile_files import no_hang  # noqa: F401
from test_plots import V1, cpu_record, new_record, old_record, resumed_record, write

from plots import figure, report
from plots.run_record import load_run, spread

HOSTILE = (
    "</script></style><script>document.title='broken'</script><img src=x onerror=alert(1)>\"'`{{7*7}}&lt;"
)
ADDRESSES = {"src", "href", "srcset", "action", "formaction", "data", "poster", "background", "ping", "cite"}


class Page(HTMLParser):
    """A page that was read back: its elements, their texts, and the figures of its charts."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.texts = [], [["", ""]]
        self.feed(text)
        self.texts = [(tag, text) for tag, text in self.texts if tag]
        self.figures = json.loads(self.of("script")[0])
        self.style, self.script = self.of("style")[0], self.of("script")[1]

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.texts.append([tag, ""])

    def handle_data(self, data):
        self.texts[-1][1] += data

    def handle_endtag(self, tag):
        self.texts.append(["", ""])  # what follows belongs to no element whose text is asked for

    def of(self, tag):
        return [text for name, text in self.texts if name == tag]

    def cells(self, name):
        """The cells of the row of a table with this name."""
        places = [i for i, (tag, text) in enumerate(self.texts) if tag == "th" and text.strip() == name]
        found = []
        for tag, text in self.texts[places[0] + 1 :]:
            if tag not in ("td", "i"):
                break
            found += [text.strip()] if tag == "td" else []
        return found

    def losses(self):
        """(the head, the rows) of the table of times to a loss."""
        texts = self.texts[self.texts.index(("h2", "Time to a loss")) + 1 :]
        texts = texts[: next(i for i, (tag, _) in enumerate(texts) if tag == "h2")]
        head, cells = ([text for tag, text in texts if tag == wanted] for wanted in ("th", "td"))
        return head, [cells[i : i + len(head)] for i in range(0, len(cells), len(head))]

    def panel(self, title):
        return next(panel for panel in self.figures if panel["title"] == title)

    def images(self):
        """The SVGs of the charts, which are data of their images."""
        sources = [found["src"].partition("base64,")[2] for tag, found in self.elements if tag == "img"]
        return [base64.b64decode(source).decode() for source in sources]


def page_of(folder, *records, **options):
    """The page of these records, read back."""
    paths = [str(write(folder, record, f"run_{index}")) for index, record in enumerate(records)]
    output = folder / "page.html"
    flags = [f"--{name}={value}" for name, value in options.items()]
    assert report.main([*paths, *flags, f"--output={output}"]) == 0
    return Page(output.read_text(encoding="utf-8"))


def line(panel, label):
    return next(found for found in panel["lines"] if found["label"] == label)


# --- the figures ---


def test_the_charts_hold_the_figures_of_the_record(tmp_path):
    record = new_record(400)
    page = page_of(tmp_path, record)
    rows = record["training_iterations"]
    columns = {
        ("Loss", "training step"): [row["loss"] for row in rows],
        ("MFU", "MFU"): [row["mfu"]["mfu_percent"] for row in rows],
        ("MFU", "causal"): [row["mfu"]["mfu_causal_percent"] for row in rows],
        ("Throughput", "Throughput"): [row["tokens_per_sec"] for row in rows],
        ("Step time", "Step time"): [row["time_ms"] for row in rows],
        ("Learning rate", "Learning rate"): [row["lr"] for row in rows],
        ("Peak memory", "Peak memory"): [row["memory"]["max_allocated_gb"] for row in rows],
    }
    for (title, label), values in columns.items():
        shown = line(page.panel(title), label)
        assert shown["x"] == [row["iter"] for row in rows]
        assert shown["y"] == pytest.approx(values, rel=1e-6)
    evaluated = line(page.panel("Loss"), "evaluation, val")
    assert evaluated["x"] == [250]
    assert evaluated["y"] == pytest.approx([record["eval_steps"][0]["val_loss"]], rel=1e-6)


def test_the_tables_hold_the_medians_of_the_record(tmp_path):
    record = new_record(400)
    page, run = page_of(tmp_path, record), load_run(tmp_path / "run_0.json")
    median, low, high = spread(run, "tokens_per_sec")
    assert page.cells("tokens/s, all GPUs") == [f"{median:,.0f} ({low:,.0f} to {high:,.0f})"]
    median, low, high = spread(run, "mfu_percent")
    assert page.cells("MFU, %") == [f"{median:.2f} ({low:.2f} to {high:.2f})"]
    assert page.cells("validation loss, lowest") == [f"{record['eval_steps'][0]['val_loss']:.4f}"]
    assert page.cells("GPUs") == ["8 x NVIDIA B200"]
    assert page.cells("MFU formula") == ["component_summation_v2025"]
    assert page.cells("peak") == ["2,250 TFLOPS per GPU"]


def test_when_a_loss_was_reached_is_a_table(tmp_path):
    """Of loss_targets; without them, of the best held-out loss."""
    record = new_record(2000)
    best = record["eval_steps"][-1]
    head, cells = page_of(tmp_path, record).losses()
    assert head[:3] == ["validation loss", "iteration", "training time"]
    assert cells[0][:2] == [f"{best['val_loss']:.4f}, the best", f"{best['iter']:,}"]
    assert cells[0][3:6] == ["-", "-", "-"], "wall clock, tokens and FLOPs are not in this record"
    record["config"]["loss_targets"] = "3.5,1"
    _, rows = page_of(tmp_path, record, record).losses()
    assert [row[:2] for row in rows] == [["A", "3.5"], ["A", "1"], ["B", "3.5"], ["B", "1"]]
    assert rows[1][2] == "not reached" and 700 < float(rows[0][2]) < 800
    assert "Time to a loss" not in page_of(tmp_path, new_record(100)).of("h2")


def test_several_runs_are_side_by_side_with_the_verdict(tmp_path):
    slower = new_record(400, tokens_per_sec=700_000)
    page = page_of(tmp_path, new_record(400), slower)
    assert len(page.cells("MFU, %")) == 2
    assert page.cells("GPUs") == ["8 x NVIDIA B200"], "what is the same is said once"
    assert any(re.match(r"B is 3\.\d % slower than A, 95 % interval", text) for text in page.of("p"))
    assert [found["label"] for found in page.panel("Throughput")["lines"]] == ["A", "B"]
    assert page.panel("Learning rate")["x_name"] == "iteration"


def test_marks_are_drawn_and_a_missing_mfu_is_explained(tmp_path):
    record = resumed_record() | {"events": [{"iter": 700, "kind": "spike"}], "checkpoints": [{"iter": 500}]}
    page = page_of(tmp_path, record)
    assert all(f">{word}<" in page.images()[0] for word in ("resumed", "anomaly", "checkpoint"))
    assert "No MFU: a CPU has no published peak" in " ".join(page_of(tmp_path, cpu_record()).of("p"))


def test_the_text_of_a_profile_is_shown(tmp_path, capsys):
    (tmp_path / "profile.txt").write_text("idle <b>10 ms</b>\x1b[2J")
    page = page_of(tmp_path, new_record(100), profile=tmp_path / "profile.json")
    assert page.of("pre") == ["idle <b>10 ms</b>?[2J"]
    missing = [tmp_path / "run_0.json", f"--profile={tmp_path / 'x.json'}"]
    assert_refused(missing, "x.txt cannot be read: No such file", capsys)


# --- what anybody may send ---


def test_the_page_has_no_address(tmp_path):
    for page in (page_of(tmp_path, new_record(100)), page_of(tmp_path, new_record(100), resumed_record())):
        for tag, attributes in page.elements:
            assert tag not in ("link", "iframe", "object", "embed", "base", "image", "use", "form"), tag
            found = attributes if tag != "img" else {}  # its address is its data
            assert not ADDRESSES & found.keys(), (tag, attributes)
            assert "url(" not in (attributes.get("style") or "")
        assert "url(" not in page.style and "@import" not in page.style
        script = re.sub(r"//.*", "", page.script)  # without its comments
        assert not re.search(r"https?:|//[a-z]|fetch|XMLHttp|import\(|innerHTML", script)
        policy = next(found["content"] for _, found in page.elements if found.get("http-equiv"))
        sources = [found["src"] for tag, found in page.elements if tag == "img"]
        assert all(source.startswith("data:image/svg+xml;") for source in sources)
        for image in page.images():
            assert not re.search(r"href=\"[^#]|url\([^#]|<script|<image|foreignObject|metadata", image)
        assert policy.startswith("default-src 'none'; img-src data:; ") and "script-src 'sha256-" in policy


def hostile(value):
    """The value with HOSTILE in place of every text, also of names that nothing looks up."""
    if isinstance(value, dict):
        return {key: hostile(item) for key, item in value.items()} | {HOSTILE: HOSTILE}
    if isinstance(value, list):
        return [hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def hostile_inputs(folder):
    """Two records in which every text is a script; the folder's name is one, too."""
    folder = folder / "<script>alert(2)<"
    folder.mkdir()
    record = resumed_record()
    for row in record["training_iterations"]:
        row["throttle"] = {"power_limit": 1.0}
    record["events"] = [{"iter": 700, "kind": "spike", "time": "now", "message": "a spike"}]
    facts = {"software": {"torch": "2"}, "git": {"commit": "1"}, "low_precision": {"recipe": "x"}}
    record["startup_info"] |= facts
    return write(folder, hostile(record), "a"), write(folder, hostile(new_record(300)), "b")


def test_texts_of_a_record_are_escaped(tmp_path):
    first, second = hostile_inputs(tmp_path)
    for paths in ([first], [first, second]):
        output = tmp_path / "page.html"
        assert report.main([*map(str, paths), f"--output={output}"]) == 0
        page = Page(output.read_text(encoding="utf-8"))
        tags = [tag for tag, _ in page.elements]
        assert tags.count("script") == 2 and not any("<script" in image for image in page.images())
        assert page.script == (report.FILES / "page.js").read_text(encoding="utf-8")
        assert not [found for _, found in page.elements if any(name.startswith("on") for name in found)]
        assert sum("document.title='broken'" in text for text in page.of("td")) > 2, "they are shown as text"


def test_bad_arguments_are_one_clear_line(tmp_path, capsys):
    good, old = write(tmp_path, new_record(50), "good"), write(tmp_path, old_record(50, V1), "old")
    assert_refused([tmp_path], "Is a directory; name run records", capsys)
    assert_refused([good, "--output=page.png"], "must end in .html", capsys)
    assert_refused([good, old], "count MFU by different formulas", capsys)


def assert_refused(arguments, message, capsys):
    assert report.main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("error: ") and error.count("\n") == 1, error


def test_any_value_anywhere_gives_a_page_or_a_clear_line(tmp_path, capsys):
    noise = random.Random(20)
    values = [None, -1, 1e300, 1e29, 1e-320, math.nan, "x", [], {}, [{}], {"a": 1}, True, 10**400]
    for _ in range(12):
        record = new_record(60)
        for _ in range(3):
            replace_one(record, noise, values)
        status = report.main([str(write(tmp_path, record, "run"))])
        assert status == 0 or (status == 2 and capsys.readouterr().err.count("\n") == 1)


def replace_one(value, noise, values):
    """Puts one of `values` somewhere in a JSON value."""
    while True:
        place = noise.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if not isinstance(value[place], (dict, list)) or not value[place] or noise.random() < 0.1:
            value[place] = copy.deepcopy(noise.choice(values))
            return
        value = value[place]


# --- charts ---


def test_a_spike_among_many_rows_is_told():
    values = np.ones(200_000)
    values[77_777] = 9.0
    (line,) = Figure().subplots().plot(values, label="_Loss")
    shown = figure.values(line, 4000)
    assert len(shown["x"]) <= 4000 and shown["label"] == "Loss"
    assert (shown["x"][shown["y"].index(9)], shown["x"][0], shown["x"][-1]) == (77_777, 0, 199_999)


def test_the_area_of_a_chart_is_where_its_axes_are(tmp_path):
    """The script reads the row under the pointer from there."""
    page = page_of(tmp_path, new_record(100))
    image, panel = page.images()[0], page.panel("Loss")
    width, height = map(float, re.search(r'viewBox="0 0 (\S+) (\S+)"', image).groups())
    frame = re.search(r'id="patch_2">\s*<path d="M (\S+) (\S+)\s*L (\S+) \S+\s*L \S+ (\S+)', image)
    left, bottom, right, top = map(float, frame.groups())
    wanted = (left / width, top / height, (right - left) / width, (bottom - top) / height)
    assert panel["area"] == pytest.approx([100 * share for share in wanted], abs=0.01)
    assert panel["x"] == pytest.approx([-1.8, 91.8])
