"""Check pictures of results, light and dark: they show the measured values, and nothing overlaps."""

import itertools
import re
import statistics
import sys
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest
from command_line import call
from pictures import RESULTS, drawn, found_in, model_result
from results import decode_result, kernels_result, profile_result, verify_result
from sweep import sampled

from mlx_mtp.bench import page, panels, plots, result
from mlx_mtp.bench.panels import BarPanel, GridPanel, LinePanel

DARK_TOO = ("decode at contexts", "verify", "profile")
DRAWN = [*((name, "light") for name in RESULTS), *((name, "dark") for name in DARK_TOO)]


@pytest.fixture
def made():
    return found_in


def boxes(ax):
    """Return (text, its rectangle in pixels) for every drawn text."""
    legend = ax.get_legend()
    ticks = [
        tick.label1
        for axis in (ax.xaxis, ax.yaxis)
        for tick in axis.get_major_ticks()
        if min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    ]
    texts = [ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label, *ticks]
    texts += [*ax.texts, *(legend.get_texts() if legend else [])]
    return [(t.get_text(), t.get_window_extent()) for t in texts if t.get_text()]


# Every kind of panel in both schemes.
FEW = [
    ("decode at contexts", "light"),
    ("verify", "dark"),
    ("profile", "light"),
    ("kernels", "light"),
    ("model", "light"),
]


@pytest.mark.parametrize(("name", "scheme"), sampled(FEW, DRAWN))
def test_no_text_overlaps_another_or_leaves_the_picture(name, scheme):
    for panel, ax in drawn(name, scheme):
        written, whole = boxes(ax), ax.figure.bbox
        assert len(written) > 6
        for (a, box), (b, other) in itertools.combinations(written, 2):
            assert not box.padded(-1).overlaps(other.padded(-1)), (panel.title, a, b)
        for text, box in written:
            inside = whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1
            assert inside, (panel.title, text)
        assert ax.get_window_extent().width > 0.35 * whole.width, "hardly any room for what is drawn"


@pytest.mark.parametrize("name", sampled([name for name, _ in FEW], RESULTS))
def test_axes_have_names_with_units(name, made):
    assert drawn(name)
    for panel, ax in drawn(name):
        assert ax.get_xlabel() == panel.x_label
        assert made(name)["model"]["name"] in ax.get_title(loc="left") or isinstance(panel, GridPanel)
        match panel:
            case LinePanel():
                assert ax.get_ylabel() == panel.y_label
                assert ax.get_ylim()[0] == 0
                assert re.search(r"tokens/s|T\(1\)", panel.y_label)
                assert [t.get_text() for t in ax.get_legend().get_texts()] == [s.label for s in panel.series]
            case BarPanel():
                assert "ms" in panel.x_label
                assert ax.get_xlim()[0] == 0
            case GridPanel():
                assert "%" in panel.title or "over" in panel.title


LINES = [n for n in RESULTS if n.startswith(("decode", "verify", "model"))]


@pytest.mark.parametrize("name", sampled([n for n, _ in FEW if n in LINES], LINES))
def test_lines_follow_the_data(name):
    for panel, ax in ((p, ax) for p, ax in drawn(name) if isinstance(p, LinePanel)):
        shown = {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}
        assert list(shown) == [s.label for s in panel.series]
        for series in panel.series:
            line = shown[series.label]
            assert list(line.get_ydata()) == series.y
            assert [round(x) for x in line.get_xdata()] == series.x
            if series.low:
                assert all(low <= y <= high for low, y, high in zip(series.low, series.y, series.high, strict=True))


def test_intervals_are_drawn_to_scale():
    (panel, ax), *_ = drawn("verify")
    bars = [c.get_segments() for c in ax.collections if hasattr(c, "get_segments")]
    assert len(bars) == len(panel.series)
    for series, segments in zip(panel.series, bars, strict=True):
        ends = [(min(s[:, 1]), max(s[:, 1])) for s in segments]
        assert ends == [pytest.approx(pair) for pair in zip(series.low, series.high, strict=True)]


def test_bars_have_the_length_of_the_data():
    for panel, ax in [*drawn("profile"), *drawn("model")]:
        if isinstance(panel, BarPanel):
            lengths = [[bar.get_width() for bar in container] for container in ax.containers]
            assert lengths == [pytest.approx(values) for values in panel.parts.values()]
            starts = [[bar.get_x() for bar in container] for container in ax.containers]
            assert starts[1] == pytest.approx(lengths[0])
            totals = [sum(values) for values in zip(*panel.parts.values(), strict=True)]
            assert [t.get_text() for t in ax.texts] == [f"{total:.3g}" for total in totals]


def test_speeds_are_tokens_over_seconds(made):
    found = made("decode")
    (lines, _) = panels.panels(found)
    fixed = lines.series[0]
    assert fixed.x == [0, 1, 2, 3]
    for k, speed in zip(("plain", "k=1", "k=2", "k=3"), fixed.y, strict=True):
        entries = [e for e in found["entries"] if e["contender"] == k]
        rounds = [sum(e["tokens"][i] - 1 for e in entries) / sum(e["seconds"][i] for e in entries) for i in range(3)]
        assert speed == pytest.approx(statistics.median(rounds))
    levels = {s.label: s for s in lines.series if s.level}
    assert levels.keys() == {"adaptive", "mlx-lm"}
    assert levels["mlx-lm"].x == [0, 3]
    several = panels.panels(made("decode at contexts"))[0].series
    assert [(s.line, s.colour) for s in several] == [(line, i) for i in range(3) for line in ("-", "-.", ":")]


def test_acceptance_is_that_of_the_maximum_drafts(made):
    grid = panels.panels(made("decode"))[1]
    assert grid.values == [[pytest.approx(x) for x in (90, 70, 40)]] * 3
    assert grid.columns == ["1", "2", "3"]
    three = [p for p in panels.panels(made("decode at contexts")) if isinstance(p, GridPanel)]
    assert len({p.title for p in three}) == 3


def test_a_verify_is_relative_to_its_own_single_row(made):
    whole, parts = panels.panels(made("verify"))
    assert [s.label for s in whole.series[:2]] == ["whole at 128, stock", "whole at 128, ours"]
    assert [(s.line, s.colour) for s in whole.series] == [("--", 0), ("-", 0), ("--", 1), ("-", 1)]
    for series in whole.series:
        slope = 0.4 if "stock" in series.label else 0.1
        assert series.y == pytest.approx([1 + slope * (m - 1) for m in range(1, 17)], rel=0.03)
    assert {s.label.split(",")[0] for s in parts.series} == {"projections", "attention at 4096"}


def test_inconclusive_values_are_labelled(made):
    labels = [s.label for panel in panels.panels(made("decode, noisy"))[:1] for s in panel.series]
    assert all("inconclusive" in label for label in labels)
    assert not any("inconclusive" in s.label for s in panels.panels(made("decode"))[0].series)


def test_phases_and_unexplained_time_sum_to_the_wall_time(made):
    (bars,) = panels.panels(made("profile"))
    assert bars.parts["unexplained"] == [pytest.approx(1e3 * 0.002 / 20)]
    assert sum(v[0] for v in bars.parts.values()) == pytest.approx(4 + 12 + 0.5 + 1 + 1.5 + 0.1 + 0.1, rel=0.02)
    assert "prefill" not in bars.parts
    side_by_side = panels.panels(made("profile"), made("verify"), made("profile without drafts"))
    last = side_by_side[-1]
    assert last.bars == ["demo, k=3", "demo, k=0"]
    assert last.parts["draft"][1] == 0 < last.parts["draft"][0]


def test_the_model_is_drawn_as_a_curve_and_as_cycles(made):
    curve, cycles = panels.panels(made("model"))
    assert [s.label for s in curve.series][-2:] == ["stock MLX, predicted", "ours, predicted"]
    assert all(s.y[0] == 1 for s in curve.series)
    assert cycles.bars[:3] == ["plain, floor", "plain, stock MLX", "plain, ours"]
    dense = panels.panels(made("model, dense"))
    assert [s.label for s in dense[0].series] == ["floor", "stock MLX, predicted", "ours, predicted"]
    assert len(dense) == 2


def test_kernels_are_stock_over_ours(made):
    (timed,), (counted,) = panels.panels(made("kernels")), panels.panels(made("kernels, emulated"))
    assert timed.rows == ["qmm 4096x4096", "experts"]
    assert timed.values == [[pytest.approx(1.4)] * 8, [pytest.approx(0.9)] * 8]
    assert counted.values[0] == list(range(1, 9))


def test_intervals_at_one_position_are_shifted():
    for name in ("verify", "decode at contexts"):
        panel, ax = drawn(name)[0]
        bars = [c.get_segments() for c in ax.collections if hasattr(c, "get_segments")]
        for segments in zip(*bars, strict=True):  # points are 1/72 inch, as are widths of lines
            places = sorted(ax.transData.transform(s[0])[0] * 72 / ax.figure.dpi for s in segments)
            assert min(np.diff(places)) > 3, panel.title


FILES = [("x.png", b"\x89PNG", False), ("x.SVG", b"<?xml", True)]


@pytest.mark.parametrize(("file", "start", "dark"), sampled(FILES[1:], FILES))
def test_files_are_pictures(file, start, dark, tmp_path, made):
    plots.save([made("verify, noisy stock"), made("profile")], tmp_path / file, dark=dark)
    data = (tmp_path / file).read_bytes()
    assert data.startswith(start)
    if start == b"<?xml":
        paper = (plots.DARK if dark else plots.LIGHT).paper
        assert f"fill: {paper}" in data.decode()
        assert "rows verified, M" in data.decode()


class Page(HTMLParser):
    """Collects a page's references and contents, and whether its elements are closed."""

    VOID = ("meta", "path", "use", "br", "image", "rect", "circle", "stop")

    def __init__(self, text):
        super().__init__()
        self.open, self.found, self.outside, self.ids, self.uses = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "action") and not value.startswith("#"):
                self.outside.append(value)
            if name == "id":
                self.ids.append(value)
            self.uses += re.findall(r"url\(#([^)]*)\)", value or "") + [(value or "")[1:]] * (name == "xlink:href")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_a_page_is_self_contained(made):
    results = [{**made(name), "command": "mlx-mtp bench x --y '<z>'"} for name in ("decode", "profile")]
    text = page.page(results)
    read = Page(text)
    assert not read.open
    assert not read.outside
    assert not re.search(r"@import|url\((?!#)|<script|<link", text)
    shown = panels.panels(*results)
    assert read.found.count("svg") == 2 * len(shown) == 2 * read.found.count("figure")
    assert text.count('class="light"') == text.count('class="dark"') == len(shown)
    of_pictures = [i for i in read.ids if re.search(r"[0-9a-f]{8}", i)]
    assert len(of_pictures) == len(set(of_pictures))
    assert set(read.uses) <= set(read.ids)
    assert "prefers-color-scheme: dark" in text
    assert "mlx-mtp bench x --y &#x27;&lt;z&gt;&#x27;" in text
    assert "<z>" not in text
    for value in (made("decode")["environment"]["mlx"], "11251744", "mlx_lm"):
        assert value in text
    words = {*unescape(re.sub(r"</?(pre|span)[^>]*>|│", " ", text)).split()}
    for found in results:
        for table in page.tables_of(found):
            cells = [str(cell) for column in table.columns for cell in (column.header, *column.cells)]
            assert {word for cell in [table.title, *cells] for word in str(cell).split()} <= words


TABLES = {
    "verify": (lambda: verify_result(noise=0), 2, ["10.000", "7.00", "2.50"]),
    "kernels": (kernels_result, 1, ["1.40", "0.90"]),
    "kernels, emulated": (lambda: kernels_result(timed=False), 1, ["8.00x"]),
    "profile": (lambda: profile_result(noise=0), 1, ["  build the verify", "12.00", "0.50"]),
    "decode": (lambda: decode_result((512, 4096), noise=0), 4, ["adaptive", "90%/70%/40%", "100.0"]),
    "model": (model_result, 6, ["plain step", "verify"]),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_can_be_made_from_the_result(name):
    make, count, expected = TABLES[name]
    tables = list(page.tables_of(make()))
    assert len(tables) == count
    assert set(expected) <= {str(cell) for table in tables for column in table.columns for cell in column.cells}


def test_saved_results_are_drawn(tmp_path, made):
    files, names = [], ("profile", "verify, noisy stock")
    for name in names:
        files.append(tmp_path / f"{name}.json")
        result.write(made(name), files[-1])
    shown = call("bench", "plot", *files, "--plot", tmp_path / "x.png", "--dark", "--html", tmp_path / "x.html")
    written = [f"wrote {tmp_path / name}" for name in ("x.png", "x.html")]
    assert (shown.returncode, shown.stdout.splitlines(), shown.stderr) == (0, written, "")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "x.png").stat().st_size > 10_000
    assert (tmp_path / "x.html").read_text().count("<figure>") == len(panels.panels(*map(made, names))) > 1


def test_a_command_draws_its_result(tmp_path):
    args = ("bench", "model", "--quick", "--chip", "M4 Pro", "--model", "GLM-4.5")
    shown = call(*args, "--html", tmp_path / "x.html")
    assert shown.returncode == 0, shown.stderr
    text = (tmp_path / "x.html").read_text()
    assert all(words in text for words in ("GLM-4.5, M4 Pro", "predicted savings in a pass", "<pre>mlx-mtp"))


MISTAKES = {
    "suffix": (("--plot", "x.pdf"), "x.pdf: a picture ends in .png or .svg, not in .pdf"),
    "no suffix": (("--plot", "x"), "not in nothing"),
    "directory": (("--plot", "nonesuch/x.png"), "no directory nonesuch"),
    "page": (("--html", "nonesuch/x.html"), "no directory nonesuch"),
    "nothing": ((), "nothing to write: --plot PICTURE, --html PAGE, or both"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_line(case, tmp_path, made):
    args, message = MISTAKES[case]
    result.write(made("profile"), tmp_path / "r.json")
    shown = call("bench", "plot", tmp_path / "r.json", *args)
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)
    assert message in shown.stderr


def test_a_file_that_is_not_a_result_is_named(tmp_path):
    (tmp_path / "r.json").write_text("{}")
    shown = call("bench", "plot", tmp_path / "r.json", "--plot", tmp_path / "x.png")
    assert (shown.returncode, shown.stderr.count("\n")) == (1, 1)
    assert "r.json: no result of `mlx-mtp bench`" in shown.stderr


def test_a_truncated_result_is_named(tmp_path, made):
    cut = {name: value for name, value in made("profile").items() if name != "seconds"}
    result.write(cut, tmp_path / "r.json")
    for args in (
        ("plot", tmp_path / "r.json", "--plot", tmp_path / "x.png"),
        ("model", "--measured", tmp_path / "r.json"),
    ):
        shown = call("bench", *args)
        assert (shown.returncode, shown.stderr.count("\n")) == (1, 1)
        assert "r.json: not a whole result of `mlx-mtp bench` (KeyError: 'seconds')" in shown.stderr


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch, made):
    result.write(made("profile"), tmp_path / "r.json")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for option in ("--plot", "--html"):
        shown = call("bench", "plot", tmp_path / "r.json", option, tmp_path / "x.png")
        assert shown.returncode == 1
        assert "pictures need matplotlib: pip install -e '.[plot]'" in shown.stderr
    assert call("bench", "model", "--quick").returncode == 0
