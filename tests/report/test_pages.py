"""The pages themselves: well-formed, self-contained, and good for those who do not see them."""

from __future__ import annotations

import base64
import io
import math
import shutil
import subprocess
from dataclasses import replace
from html import escape

import pytest
from page_reader import Page
from PIL import Image

import zoo_core as zoo
from zoo_core import ZooError
from zoo_core.checkpoint.manifest import FileRecord
from zoo_core.report import charts, heat
from zoo_core.report.blocks import Lines, Range, Ranges, Series
from zoo_core.report.records import Comparison

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.fixture(scope="module")
def comparison(text_report, image_report):
    return Comparison((text_report, image_report), {"lost": "it <i>was</i> nowhere"})


@pytest.fixture(params=["text", "images", "comparison"])
def source(request, text_report, image_report, comparison):
    pages = {"text": text_report, "images": image_report, "comparison": comparison}
    return pages[request.param].html()


def test_the_page_is_sound(source):
    assert Page(source).problems == []


def test_the_reader_of_pages_finds_what_is_wrong():
    page = Page('<h1>a</h1><h3 id=x>b</h3><p id=x><img src="https://a.example/b.png"></div>')
    told = " ".join(page.problems)
    for problem in ("skip a level", "twice", "outside", "no text", "closes", "<main>"):
        assert problem in told


def test_the_page_has_the_numbers(text_report):
    page = Page(text_report.html())
    score = text_report.retention.scores["embedding_cosine"]
    for number in (score.value, score.floor):
        assert f"{number:.3f}" in page.text
    assert len(page.images) == 1 + len(text_report.maps.layers) + 1  # the scale, the rollout
    for key in ("warnings", "model", "origin", "kept", "calibration", "speed", "maps", "diagnosis"):
        assert key in page.ids


def test_what_others_wrote_is_only_text(text_report, comparison):
    assert "tiny <b>bert</b>" in Page(text_report.html()).text
    assert "it <i>was</i> nowhere" in Page(comparison.html()).text
    assert "<i>" not in comparison.markdown()


def test_provenance_has_the_hashes_and_no_path(make, tokens, tmp_path):
    zoo.save(make("bert"), tmp_path / "mine")
    report = zoo.report.examine(tmp_path / "mine", tokens, parts=[])
    [file] = report.manifest.files.values()
    text = Page(report.html()).text
    assert isinstance(file, FileRecord)
    assert report.name == "mine"
    assert file.sha256 in text
    assert str(tmp_path) not in text


def test_markdown_for_the_card(text_report):
    text = text_report.markdown()
    assert text.startswith("## tiny &lt;b&gt;bert&lt;/b&gt;\n")
    assert "| cosine of embeddings |" in text
    assert "Attention maps" not in text
    assert "by head" not in text
    assert "<" not in text


def test_write(text_report, tmp_path):
    page = text_report.write(tmp_path / "report.html")
    assert page.read_text(encoding="utf-8") == text_report.html()
    assert text_report.write(tmp_path / "report.md").read_text() == text_report.markdown()
    for path, message in (
        (tmp_path / "a.pdf", "must end with"),
        (tmp_path / "no/a.md", "no directory"),
    ):
        with pytest.raises(ZooError, match=message):
            text_report.write(path)


def test_a_report_of_nothing_has_a_page_too(text_report):
    nothing = replace(text_report, retention=None, speed=None, maps=None, diagnosis=None)
    assert Page(nothing.html()).problems == []
    assert Page(Comparison((nothing,)).html()).problems == []


@pytest.mark.parametrize("signed", [False, True], ids=["weights", "effective"])
def test_a_heat_map_orders_its_colours(signed):
    cells = ((-0.5 if signed else 0.0, 0.1), (0.5, 1.0))
    assert heat.is_signed(cells) is signed
    data = base64.b64decode(heat.png(cells).partition("base64,")[2])
    image = Image.open(io.BytesIO(data))
    levels = list(image.tobytes())
    assert image.size == (2, 2)
    assert levels == ([64, 140, 191, 255] if signed else [0, 26, 128, 255])


def test_lines_lie_where_the_numbers_are():
    chart = Lines("a", ["0", "1", "2"], "x", [Series("s", [1.0, math.nan, 3.0])])
    drawn = charts.lines(chart)
    [stroke] = drawn.strokes
    (left, low), (right, high) = stroke.dots
    ticks = {tick.text: tick.at for tick in drawn.y_ticks}
    assert (left, right) == (drawn.left, drawn.right)
    assert (low, high) == (ticks["1"], ticks["3"])
    assert stroke.path.count("M") == 2  # what is not a number leaves a gap


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [
        (1e-8, 1.0, ["1e-8", "1e-6", "1e-4", "0.01", "1"]),
        (0.3, 0.9, ["0.2", "0.5", "1"]),
        (90, 430, ["50", "100", "200", "500"]),
        (1.0, 1.0, ["1", "2"]),
    ],
)
def test_logarithmic_marks_enclose_the_numbers(low, high, wanted):
    chart = Lines("a", ["0", "1"], "x", [Series("s", [low, high])], logarithmic=True)
    assert [tick.text for tick in charts.lines(chart).y_ticks] == wanted


def test_ranges_stay_on_the_scale():
    rows = [Range("worse than nothing", -0.3, -0.4, -0.2, 0.1), Range("above", 1.1, 1.0, 1.2)]
    drawn = charts.ranges(Ranges("a", rows, 1.0, "original", "floor"))
    for bar in drawn.bars:
        assert drawn.start <= bar.low <= bar.at <= bar.high <= drawn.end


def test_a_value_beyond_its_mark_by_nothing_needs_no_other_mark():
    drawn = charts.ranges(Ranges("a", [Range("b", 1.0000002, 1.0, 1.0000002, 0.4)], 1.0, "c"))
    assert [tick.text for tick in drawn.ticks][-1] == "1"


def test_what_all_models_are_warned_of_is_said_once(text_report):
    other = replace(text_report, name="other", samples=31)
    both = Comparison((text_report, replace(text_report, name="twin"))).html()
    assert Page(both).text.count("only 12 samples were measured") == 1
    assert "keep most" in both
    mixed = Page(Comparison((text_report, other)).html()).text
    assert mixed.count("only 12 samples") == mixed.count("only 31 samples") == 1


FRAME = """<!doctype html><title>not loaded</title>
<iframe width="{width}" height="900" srcdoc="{page}" onload="
  const inner = this.contentDocument.documentElement;
  document.title = [inner.scrollWidth <= inner.clientWidth, inner.clientWidth > {width} - 30];
"></iframe>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_opens_it(comparison, text_report, tmp_path, width):
    """No message in the console, and nothing wider than the window, which may be a phone's."""
    for report in (text_report, comparison):
        page = tmp_path / "page.html"
        page.write_text(FRAME.format(width=width, page=escape(report.html())), encoding="utf-8")
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        command += ["--enable-logging=stderr", "--window-size=1400,1000", page.as_uri()]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "CONSOLE" not in run.stderr, run.stderr
        assert "<title>true,true</title>" in run.stdout
