"""The report, as a researcher and their colleague see it."""

from __future__ import annotations

import doctest
import hashlib
import io
import itertools
import json
import math
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import yaml
from browser import Browser, needs_chromium
from matplotlib.figure import Figure
from PIL import Image

import fedsim
from experiments import change_manifest, small_experiment
from fedsim import Run, cli, load, run
from fedsim.data.labels import label_table
from fedsim.errors import Damaged, RunFolderError
from fedsim.launch.prepare import prepare
from fedsim.objectives.regression import Regression
from fedsim.results.figures.charts import Line, draw_clients, draw_label_counts, draw_lines
from fedsim.results.figures.look import PAGE, PAPER, Drawing
from fedsim.results.manifest import FORMAT
from fedsim.results.report.clients import ClientScores
from fedsim.results.report.comparison import ReportData
from fedsim.results.report.curves import costs, curves, legend, of_clients
from fedsim.results.report.html import Report, _breakable
from fedsim.results.report.overview import hyper_parameters, label_counts, overview
from fedsim.results.report.page import Datum, mark_best
from fedsim.results.report.page import number as figure
from fedsim.results.report.results import (
    all_scores,
    finding,
    missing,
    notes,
    pivots,
    results,
)
from fedsim.results.summary import mean_std, summarise_cells

PROX = '<b onclick="alert(1)">prox & co</b>'  # a named variant of somebody who means no good
# The metrics of a regression; they depend on no data.
REGRESSION = Regression().metrics(None)  # type: ignore[arg-type]
Say = Callable[..., tuple[object, str, str]]  # exit code, stdout, stderr


def make_folder(path: Path, kind: str, **facts: Any) -> Path:
    """The folder of a grid or a search, with an experiment and a manifest."""
    path.mkdir(parents=True, exist_ok=True)
    content = f"name: {path.parent.name}\n"
    (path / "experiment.yaml").write_text(content)
    manifest = {
        "format": FORMAT,
        "kind": kind,
        "status": "finished",
        "experiment_hash": hashlib.sha256(content.encode()).hexdigest()[:16],
        "name": path.parent.name,
        **facts,
    }
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def make_grid(
    path: Path, cells: list[tuple[dict[str, Any], int, Path | None]], **facts: Any
) -> Path:
    """The folder of a grid from runs that there are, and of some that failed (None)."""
    rows = []
    for number, (cell, seed, run_folder) in enumerate(cells):
        folder = f"cells/{number}/seed-{seed}"
        row = {"cell": cell, "seed": seed, "folder": folder, "status": "finished", "error": None}
        if run_folder:
            shutil.copytree(run_folder, path / folder)
        else:
            row |= {"status": "failed", "error": "client 3, round 2, local_update: <boom>"}
        rows.append(row)
    return make_folder(path, "grid", axes=list(cells[0][0]), cells=rows, **facts)


def draw_something(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    figure = Figure(figsize=(2, 2))
    figure.subplots().plot([1, 2])
    figure.savefig(path)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, float, int], Run]:
    """Runs of two methods, two partitions and two seeds."""
    out = tmp_path_factory.mktemp("runs")
    return {
        (method, alpha, seed): run(
            small_experiment(
                seed=seed,
                method={"name": method},
                partition={
                    "kind": "dirichlet",
                    "clients": 6,
                    "alpha": alpha,
                    "test_fraction": 0.2,
                },
                train={"rounds": 6},
                evaluate={"clients": True},
            ),
            out,
        )
        for method in ("fedavg", "fedprox")
        for alpha in (0.3, 10)
        for seed in (0, 1)
    }


@pytest.fixture(scope="module")
def grid(
    runs: Mapping[tuple[str, float, int], Run], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A grid of all of them, and of a method that failed."""
    cells: list[tuple[dict[str, Any], int, Path | None]] = [
        (
            {"method": PROX if method == "fedprox" else method, "partition.alpha": alpha},
            seed,
            done.path,
        )
        for (method, alpha, seed), done in runs.items()
    ]
    cells.append(({"method": "broken", "partition.alpha": 10}, 0, None))
    path = tmp_path_factory.mktemp("grids") / "skew" / "1"
    make_grid(path, cells, baseline={"method": "fedavg"}, target=0.3)
    for suffix in ("png", "svg"):
        draw_something(path / f"cells/0/seed-0/explanations/saliency-client_3.{suffix}")
    return path


@pytest.fixture
def say(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Say:
    """Run the command line, in a folder of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def say(*words: object) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsim", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (ended.value.code, *capsys.readouterr())

    return say


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def page(grid: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the grid."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(Report([grid]).html(), encoding="utf-8")
    return path


# The text of a column, from the top.
COLUMN = """(name, caption) => {
  const table = [...document.querySelectorAll("table")].find(
    (t) => t.caption.textContent.startsWith(caption));
  const at = [...table.tHead.rows[0].cells].findIndex((c) => c.textContent === name);
  return { title: table.tHead.rows[0].cells[at],
           texts: [...table.tBodies[0].rows].map((r) => r.cells[at].textContent.trim()) };
}"""

# Text whose contrast with what is behind it is too low to be read by everybody (WCAG AA).
FAINT = """(() => {
  const parse = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const light = (c) => {
    const [r, g, b] = c.map((v) => v / 255)
      .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c.slice(0, 3);
    }
    return [255, 255, 255];
  };
  const found = [];
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (texts.nextNode()) {
    const e = texts.currentNode.parentElement;
    if (!texts.currentNode.data.trim() || ["SCRIPT", "title"].includes(e.tagName)) continue;
    const style = getComputedStyle(e);
    const ink = parse(e instanceof SVGElement ? style.fill : style.color).slice(0, 3);
    const [a, b] = [light(ink), light(behind(e))].sort((x, y) => y - x);
    seen += 1;
    if ((a + 0.05) / (b + 0.05) < 4.5) found.push([texts.currentNode.data, ink, behind(e)]);
  }
  return { seen, found };
})()"""


@needs_chromium
class TestInChromium:
    """The page in a real browser."""

    def test_opens_without_errors_and_fetches_nothing(self, browser: Browser, page: Path) -> None:
        browser.open(page)
        events = [(event["method"], event["params"]) for event in browser.events]
        assert [e for e in events if e[0] in ("Log.entryAdded", "Runtime.exceptionThrown")] == []
        assert [e for e in events if e[0] == "Runtime.consoleAPICalled"] == []
        fetched = [p["request"]["url"] for m, p in events if m == "Network.requestWillBeSent"]
        assert fetched[0] == page.as_uri()
        assert [url for url in fetched[1:] if not url.startswith("data:image/")] == []
        assert browser.run("document.title") == "skew · fedsim report"

    def test_a_page_that_tried_to_fetch_would_be_noticed(
        self, browser: Browser, page: Path, tmp_path: Path
    ) -> None:
        spoilt = tmp_path / "spoilt.html"
        elsewhere = '<img src="http://127.0.0.1:9/x.png"><script>console.log(1)</script></main>'
        spoilt.write_text(page.read_text().replace("</main>", elsewhere))
        browser.open(spoilt)
        refused = [e["params"]["entry"]["text"] for e in browser.events
                   if e["method"] == "Log.entryAdded"]  # fmt: skip
        assert any("img-src" in text for text in refused)
        assert any("script-src" in text for text in refused)

    def test_a_click_sorts_and_another_turns_the_order_round(
        self, browser: Browser, page: Path
    ) -> None:
        browser.open(page)
        column = f"({COLUMN})('mean of last 5', 'Test accuracy and')"
        click = f"{column}.title.querySelector('button').click()"
        order = f"{column}.texts"
        state = f"{column}.title.getAttribute('aria-sort')"
        before = browser.run(order)
        assert len(set(before)) == 4
        assert browser.run(state) is None
        browser.run(click)
        assert browser.run(order) == sorted(before, reverse=True)  # best first
        assert browser.run(state) == "descending"
        browser.run(click)
        assert browser.run(order) == sorted(before)
        assert browser.run(state) == "ascending"
        assert browser.run("document.querySelectorAll('[aria-sort]').length") == 1

    def test_the_keyboard_sorts_and_what_is_missing_comes_last(
        self, browser: Browser, page: Path
    ) -> None:
        browser.open(page)
        browser.run(f"({COLUMN})('p', 'Test accuracy and').title.querySelector('button').focus()")
        for order in ("ascending", "descending"):
            browser.press("Enter", 13)
            state = browser.run(
                f"({COLUMN})('p', 'Test accuracy and').title.getAttribute('aria-sort')"
            )
            assert state == order
            texts = browser.run(f"({COLUMN})('p', 'Test accuracy and').texts")
            assert texts[2:] == ["–", "–"]  # of the baseline itself
            numbers = [float(text.split()[0]) for text in texts[:2]]
            assert numbers == sorted(numbers, reverse=order == "descending")

    def test_a_legend_hides_lines_and_shows_them_again(self, browser: Browser, page: Path) -> None:
        browser.open(page)
        shown = """[...document.querySelectorAll('svg.figure .line-2')]
            .filter((line) => line.getBoundingClientRect().width > 0).length"""
        pressed = """[...document.querySelectorAll('button[data-line="line-2"]')]
            .map((button) => button.getAttribute('aria-pressed'))"""
        lines, others = browser.run(shown), browser.run(shown.replace("line-2", "line-1"))
        assert lines >= 7  # in each figure, with its band and its end
        assert len(browser.run(pressed)) == 3  # each legend has it
        browser.run("""document.querySelectorAll('button[data-line="line-2"]')[1].click()""")
        assert browser.run(shown) == 0
        assert set(browser.run(pressed)) == {"false"}
        assert browser.run(shown.replace("line-2", "line-1")) == others
        browser.run("""document.querySelector('button[data-line="line-2"]').focus()""")
        browser.press("Enter", 13)
        assert browser.run(shown) == lines
        assert set(browser.run(pressed)) == {"true"}

    def test_a_pivot_is_sorted_by_its_columns(self, browser: Browser, page: Path) -> None:
        browser.open(page)
        table = "document.querySelector('#pivot-1').closest('table')"
        first = f"[...{table}.tBodies[0].rows].map((row) => row.cells[1].dataset.value)"
        browser.run(f"{table}.tHead.rows[1].cells[1].querySelector('button').click()")
        found = [float(value) for value in browser.run(first)]
        assert found == sorted(found, reverse=True)
        assert browser.run(f"{table}.tHead.rows[0].textContent.trim()") == "α"

    def test_words_are_sorted_as_words(self, browser: Browser, page: Path) -> None:
        browser.open(page)
        browser.run(f"({COLUMN})('method', 'Every run').title.querySelector('button').click()")
        found = browser.run(f"({COLUMN})('method', 'Every run').texts")
        assert found == [PROX] * 4 + ["broken"] + ["fedavg"] * 4

    def test_pictures_show(self, browser: Browser, page: Path) -> None:
        browser.open(page)
        images = browser.run("[...document.images].map((i) => [i.naturalWidth, i.alt])")
        assert len(images) == 2
        assert all(width > 0 for width, _ in images)
        assert images[0][1] == "saliency client 3, fedavg, α=0.3, seed 0"
        figures = browser.run(
            "[...document.querySelectorAll('svg.figure')].map((s) => [s.getBBox().width, "
            "s.getBoundingClientRect().width, s.querySelector('title').textContent])"
        )
        assert len(figures) == 10  # 2 of labels, 3 curves, 1 of communication, 4 of clients
        for inner, outer, title in figures:
            assert inner > 300
            assert outer > 300
            assert "fedavg, α=0.3" in title or "who holds which labels: α=" in title.lower()

    def test_lines_have_colours(self, browser: Browser, page: Path) -> None:
        """A colour that is not defined would leave lines out without any error."""
        used = set(re.findall(r"var\((--[\w-]+)\)", page.read_text()))
        assert {"--line-1", "--line-4", "--figure-text", "--figure-rule"} <= used
        for scheme in ("light", "dark"):
            browser.open(page, scheme=scheme)
            style = "getComputedStyle(document.documentElement)"
            values = browser.run(f"{json.dumps(sorted(used))}.map((n) => {style}"
                                 ".getPropertyValue(n))")  # fmt: skip
            assert all(values), values

    @pytest.mark.parametrize("width", [390, 320])
    def test_a_phone_does_not_scroll_sideways(
        self, browser: Browser, page: Path, width: int
    ) -> None:
        browser.open(page, width=width)
        assert browser.run("document.documentElement.scrollWidth") == width
        wide = browser.run(
            "[...document.querySelectorAll('.scroll')].map((s) => s.scrollWidth - s.clientWidth)"
        )
        assert max(wide) > 0  # tables scroll in their own boxes

    def test_nothing_is_cut_off_on_paper(self, browser: Browser, page: Path) -> None:
        browser.open(page, width=690)  # of A4 within its margins
        browser.call("Emulation.setEmulatedMedia", media="print")
        too_wide = browser.run(
            "[...document.querySelectorAll('table, svg, img, dl, p')]"
            ".filter((e) => e.getBoundingClientRect().right > 691).map((e) => e.outerHTML)"
        )
        browser.call("Emulation.setEmulatedMedia", media="")
        assert too_wide == []

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_all_text_stands_out(self, browser: Browser, page: Path, scheme: str) -> None:
        browser.open(page, scheme=scheme)
        faint = browser.run(FAINT)
        assert faint["seen"] > 300
        assert faint["found"] == []
        page_colour = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (page_colour == "rgb(255, 255, 255)") == (scheme == "light")

    def test_can_be_read_aloud(self, browser: Browser, page: Path) -> None:
        browser.open(page)
        assert browser.run("document.documentElement.lang") == "en"
        levels = browser.run(
            "[...document.querySelectorAll('h1,h2,h3,h4')].map((h) => Number(h.tagName[1]))"
        )
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(lower <= upper + 1 for upper, lower in itertools.pairwise(levels))
        assert browser.run(
            "[...document.querySelectorAll('table')].every((t) => t.caption.textContent"
            " && [...t.querySelectorAll('th')].every((h) => h.scope))"
        )
        ids = browser.run("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert browser.run(
            "[...document.querySelectorAll('nav a, .warn a')].every((a) => "
            "document.querySelector(a.getAttribute('href')))"
        )
        assert len(ids) == len(set(ids))


def test_a_number_beyond_64_bits_is_a_figure() -> None:
    """As a manifest that was edited may have."""
    assert figure("long", 10**30) == Datum("long", 1e30)
    for missing_value in (float("nan"), float("inf")):
        assert figure("", missing_value).value is None


def test_what_comes_from_files_is_escaped(page: Path) -> None:
    text = page.read_text()
    assert "<b onclick" not in text
    assert "&lt;b onclick=&#34;alert(1)&#34;&gt;prox &amp; co&lt;/b&gt;" in text
    assert "&lt;boom&gt;" in text
    assert text.count("<script") == 1


def test_the_table_is_the_summary(grid: Path, runs: Mapping[tuple[str, float, int], Run]) -> None:
    report = Report([grid])
    entries = []
    for (method, alpha, seed), done in runs.items():
        keys = {"method": PROX if method == "fedprox" else method, "partition.alpha": alpha}
        entries.append((keys, seed, done))
    axes = ["method", "partition.alpha"]
    expected = summarise_cells(entries, axes, {"method": "fedavg"}, 0.3)
    pd.testing.assert_frame_equal(report.compared.summary, expected)
    row = [datum.text for datum in results(report.compared).rows[2]]
    scores = mean_std(expected.last5_mean, expected.last5_std)
    assert row[:3] == [PROX, "0.3", scores[2]]
    assert len({len(text.partition(" ")[0].partition(".")[2]) for text in scores}) == 1
    low, high = expected.difference_low[2], expected.difference_high[2]
    difference = f"{expected.difference_mean[2]:+z.3f} ({low:+z.3f} to {high:+z.3f})"
    assert row[3].replace("−", "-") == difference
    assert row[4] == f"{expected.p_holm[2]:.3f}"


def test_the_best_of_each_column_is_marked(grid: Path) -> None:
    report = Report([grid])
    (pivot,) = pivots(report.compared)
    assert pivot.caption == "Test accuracy by method and α"
    assert [column.title for column in pivot.columns] == ["method", "0.3", "10"]
    means = report.compared.summary.set_index(["method", "partition.alpha"])["last5_mean"]
    assert [row[0].text for row in pivot.rows] == ["fedavg", PROX]
    for k, alpha in enumerate((0.3, 10), start=1):
        of_column = [row[k] for row in pivot.rows]
        assert [d.value for d in of_column] == [means["fedavg", alpha], means[PROX, alpha]]
        assert {d.value for d in of_column if d.best} == {max(d.value for d in of_column)}
    # The table of all cells marks the same ones.
    marked = [row[2].value for row in results(report.compared).rows if row[2].best]
    assert sorted(marked) == sorted(d.value for row in pivot.rows for d in row if d.best)


def test_methods_compete_in_rows_too(grid: Path) -> None:
    compared = Report([grid], rows="alpha", columns="method").compared
    (pivot,) = pivots(compared)
    for row in pivot.rows:
        of_row = [d for d in row[1:] if isinstance(d.value, float)]
        assert {d.value for d in of_row if d.best} == {max(d.value for d in of_row)}
    assert "Bold: the best method for each α; " in " ".join(notes(compared, True))
    assert finding(compared) == finding(ReportData([grid]))


def test_problems_do_not_compete(runs: Mapping[tuple[str, float, int], Run]) -> None:
    compared = ReportData([runs["fedavg", alpha, 0].path for alpha in (0.3, 10)])
    assert not any(d.best for row in results(compared).rows for d in row)
    assert "Bold" not in " ".join(notes(compared, False))
    assert re.fullmatch(
        r"Test accuracy, as mean of the last 5 rounds evaluated: "
        r"0\.\d{4} at α=0\.3; 0\.\d{4} at α=10\.0\.",
        finding(compared),
    )


def test_few_rounds_are_compared_by_the_last_and_ties_are_named(tmp_path: Path) -> None:
    methods = ({"name": "fedavg"}, {"name": "fedprox", "mu": 0.0})  # the same mathematics
    folders = [
        run(small_experiment(method=method, train={"rounds": 2}), tmp_path).path
        for method in methods
    ]
    report = Report(folders)
    table = results(report.compared)
    score, other = (row[1] for row in table.rows)
    assert score.best
    assert other.best
    assert finding(report.compared) == (
        f"Highest test accuracy in the last round: {score.text}, by fedavg and fedprox (tied)."
    )
    titles = [column.title for column in table.columns]
    assert "last round" in titles
    assert "mean of last 5" not in titles
    assert "because some evaluated fewer than 5 rounds." in report.latex()


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A grid of two axes and three seeds with own metrics, explanations, and an own explainer."""
    folder = tmp_path_factory.mktemp("scored")
    cells: list[tuple[dict[str, Any], int, Path | None]] = []
    for method, alpha, seed in itertools.product(("fedavg", "fedprox"), (0.3, 10), range(3)):
        done = run(
            small_experiment(
                seed=seed,
                method={"name": method},
                partition={"kind": "dirichlet", "clients": 4, "alpha": alpha},
                train={"rounds": 2},
                evaluate={"metrics": ["own_metrics:error_rate", "own_metrics:extremes",
                                      "macro_f1", "class_accuracy"]},
                explain={"explainers": ["gradient", "own_relevances:OfPixels"], "every": 1,
                         "inputs": 4, "scores": ["deletion", "agreement", "sparseness"]},
            ),
            folder / "runs",
        )  # fmt: skip
        cells.append(({"method": method, "partition.alpha": alpha}, seed, done.path))
    # As many settings as there are in a figure, twice: those of FedProx stand for more methods.
    for name in ("second", "third"):
        for cell, seed, path in cells[6:12]:
            assert path is not None
            copy = shutil.copytree(path, folder / f"{name}-{cell['partition.alpha']}-{seed}")
            change_manifest(copy, result_hash=f"{name}-{path.name}")
            cells.append(({**cell, "method": name}, seed, copy))
    return make_grid(folder / "grid" / "1", cells, baseline={"method": "fedavg"})


SCORED = {
    "loss": "test loss",
    "error_rate": "test error rate",
    "extremes/least": "test extremes/least",
    "extremes/greatest": "test extremes/greatest",
    "macro_f1": "test macro F1",
    **{
        f"{explainer}/{column}": f"{words}, by {explainer}"
        for explainer in ("gradient", "own_relevances:OfPixels")
        for column, words in {
            "deletion": "area under the deletion curve, global model",
            "sparseness": "sparseness (Gini), global model",
            "client_deletion": "area under the deletion curve, models of clients",
            "client_sparseness": "sparseness (Gini), models of clients",
            "client_agreement_rank": "agreement of clients (rank correlation), models of clients",
            "client_agreement_top_k": "agreement of clients (top-k overlap), models of clients",
            "client_agreement_cosine": "agreement of clients (cosine), models of clients",
        }.items()
    },
}


class TestEveryScore:
    """Whatever was asked for is wherever accuracy is."""

    def test_it_is_in_every_table_and_figure(self, scored: Path) -> None:
        report = Report([scored])
        compared = report.compared
        assert {m.column: compared.named(m) for m in compared.further} == SCORED
        table = all_scores(compared)
        rows = {row[0].text.lower() for row in table.rows[1:]}
        assert rows == {words.lower() for words in SCORED.values()}
        assert len(table.columns) == 1 + 8
        assert all("±" in d.text for row in table.rows for d in row[1:])
        latex, csv = report.latex(), pd.read_csv(io.StringIO(report.csv()))
        assert latex.count(r"\begin{tabular}") == 2 * (1 + len(SCORED))
        for view in compared.views:
            (column,) = (metric.column for metric in view.primary)
            words = SCORED[column]
            (pivot,) = pivots(view)
            assert [row[0].text for row in pivot.rows] == ["fedavg", "fedprox", "second", "third"]
            shown = results(view)
            assert [c.title for c in shown.columns][-4:] == ["last round", "vs. baseline", "p",
                                                             "seeds"]  # fmt: skip
            assert {row[-1].text for row in shown.rows} == {"3"}
            values = [run.rounds[column].iloc[-1] for run in load(scored).runs[:3]]
            assert csv[f"{column}/last_mean"][0] == pytest.approx(np.mean(values))
            assert csv[f"{column}/last_std"][0] == pytest.approx(np.std(values, ddof=1))
            assert csv[f"{column}/p_holm"].notna().sum() == 6
            assert f"% {words[0].upper()}{words[1:]}".replace("_", r"\_") in latex
        headings = {plot.heading.lower() for plots in report.plots.values() for plot in plots}
        for words in SCORED.values():
            assert any(h.startswith(words.partition(", by ")[0].lower()) for h in headings)
        text = report.html()
        assert "OfPixels" in text
        assert "Class accuracy" not in latex  # a figure has it

    def test_chosen_ones_alone(self, scored: Path, say: Say) -> None:
        words = ["report", scored, "--metric", "gradient/deletion", "--metric", "class_accuracy/3"]
        words += ["--latex", "a.tex", "--csv", "a.csv", "--out", "a.html"]
        assert say(*words)[0] == 0
        latex = Path("a.tex").read_text()
        captions = [line for line in latex.splitlines() if re.match(r"% (Area|Test class)", line)]
        assert len(captions) == 3 * 2  # of the pivot and the table of each; and what two are of
        found = pd.read_csv("a.csv")
        everything = ReportData([scored]).summary
        for column in ("last_mean", "p_holm"):
            expected = everything[f"gradient/deletion/{column}"]
            np.testing.assert_allclose(found[column], expected)
        assert "lowest" in re.sub(r"<[^>]+>", "", Path("a.html").read_text()).lower()

    def test_a_single_setting_has_them_in_one_table(self, scored: Path) -> None:
        folders = [run.path for run in load(scored).runs[:3]]  # type: ignore[union-attr]
        latex = Report(folders).latex()
        assert latex.count(r"\begin{tabular}") == 2
        assert latex.count(" by gradient") == 7

    def test_a_notebook_and_a_figure_have_them(self, scored: Path) -> None:
        grid = load(scored)
        assert isinstance(grid, fedsim.Grid)
        page = grid._repr_html_()
        for column, words in SCORED.items():
            assert f"<th>{words.removeprefix('test ')}, last round</th>" in page
            assert column in grid.rounds
            assert f"{column}/last" in grid.cells
        assert "agreement of clients (cosine)" in grid.runs[0]._repr_html_()


def test_what_stands_there_as_equal_is_marked_alike() -> None:
    texts = [("0.80 ± 0.02", 0.8014), ("0.801 ± 0.003", 0.8010), ("0.7 ± 0.1", 0.7), ("–", None)]
    column = [Datum(text, value) for text, value in texts]
    marked = mark_best(column, True, [range(4)])
    assert [datum.best for datum in marked] == [True, True, False, False]
    marked = mark_best(column, False, [range(2, 4)])  # a single score is not the best of any
    assert not any(datum.best for datum in marked)


def test_further_axes_make_further_pivots(
    runs: Mapping[tuple[str, float, int], Run], tmp_path: Path
) -> None:
    cells = [
        ({"method": method, "skew": skew, "data": data}, 0, runs[method, alpha, 0].path)
        for method in ("fedavg", "fedprox")
        for skew, alpha in (("mild", 10), ("strong", 0.3))
        for data in ("a", "b")
        if (method, skew, data) != ("fedprox", "mild", "b")
    ]
    folder = make_grid(tmp_path / "three" / "1", cells)  # type: ignore[arg-type]
    assert pivots(ReportData([folder])) == []
    report = Report([folder], columns="skew")
    captions = [pivot.caption for pivot in pivots(report.compared)]
    assert captions == [f"Test accuracy by method and skew; data={data}" for data in "ab"]
    assert [row[1].text for row in pivots(report.compared)[1].rows][1] == "–"  # left out
    assert report.latex().count(r"\begin{tabular}") == 3 * len(report.compared.metrics)
    table = pd.read_csv(io.StringIO(report.csv()))
    assert list(table.columns[:4]) == ["data", "method", "skew=mild", "skew=mild std"]
    assert len(table) == 4


def test_hyper_parameters_and_parameters(tmp_path: Path) -> None:
    methods = [{"name": "fedavg"}, {"name": "fedprox", "mu": 0.1}, {"name": "fedprox", "mu": 1}]
    runs = [
        run(small_experiment(method=method, train={"rounds": 1}), tmp_path) for method in methods
    ]
    compared = ReportData([done.path for done in runs])
    rows = [[datum.text for datum in row] for row in hyper_parameters(compared).rows]
    assert rows == [["fedprox", "μ (mu) = 0.1, 1.0"]]
    assert dict(overview(compared))["Parameters"] == f"{64 * 32 + 32 + 32 * 10 + 10:,}"
    assert dict(overview(compared))["μ (method.mu)"] == "0.1, 1.0"


def test_weights_that_cannot_be_read(
    runs: Mapping[tuple[str, float, int], Run], tmp_path: Path
) -> None:
    path = shutil.copytree(runs["fedavg", 10, 0].path, tmp_path / "run")
    (path / "weights" / "final.safetensors").write_bytes(b"no such thing")
    with pytest.raises(RunFolderError, match=r"final\.safetensors: cannot be read"):
        _ = load(path).num_parameters


def test_who_holds_which_labels_is_on_record(runs: Mapping[tuple[str, float, int], Run]) -> None:
    done = runs["fedavg", 0.3, 0]
    dataset, splits, _ = prepare(done.experiment)
    counts = done.labels.pivot_table("examples", "client", "label", observed=False, fill_value=0)
    np.testing.assert_array_equal(counts, label_table(dataset, splits))
    assert tuple(counts.columns) == dataset.classes
    (plot,) = label_counts(ReportData([run.path for run in runs.values()]))
    held = (label_table(dataset, splits) > 0).sum(axis=1).mean()
    sizes = label_table(dataset, splits).sum(axis=1)
    words = f"{held:.1f} of 10 labels a client, {sizes.min()} to {sizes.max()} examples"
    assert plot.panels[0][0] == f"α=0.3; {words}"
    assert len(plot.panels) == 2
    (alone,) = label_counts(ReportData([done.path]))
    assert alone.heading == f"Labels of the clients: {words}"


def test_labels_that_no_reader_could_use(
    runs: Mapping[tuple[str, float, int], Run], tmp_path: Path
) -> None:
    path = shutil.copytree(runs["fedavg", 10, 0].path, tmp_path / "run")
    change_manifest(path, "files")
    for column in ("client", "label"):
        load(runs["fedavg", 10, 0].path).labels.drop(columns=column).to_parquet(
            path / "labels.parquet"
        )
        with pytest.raises(Damaged, match=f"no column '{column}'"):
            _ = load(path).labels
    (path / "labels.parquet").unlink()  # as of runs from before it was put on record
    assert load(path).labels.empty
    assert label_counts(ReportData([path])) == []


def test_the_worst_decile_of_clients(runs: Mapping[tuple[str, float, int], Run]) -> None:
    folders = [runs["fedavg", 10, seed].path for seed in (0, 1)]
    found = ReportData(folders).rounds.set_index(["seed", "round"])
    clients = runs["fedavg", 10, 1].clients
    scores = clients.loc[clients["round"] == 4, "test_accuracy"]
    expected = np.quantile(scores, 0.1)
    assert found.loc[(1, 4), "worst_decile_client_accuracy"] == pytest.approx(expected)


def test_bands_are_a_standard_deviation_below_and_above(
    runs: Mapping[tuple[str, float, int], Run],
) -> None:
    plot, *_ = curves(ReportData([runs["fedavg", 10, seed].path for seed in (0, 1)]))
    (line,) = cast(partial[None], plot.panels[0][1].draw).keywords["lines"]
    values = np.array([runs["fedavg", 10, seed].rounds["accuracy"] for seed in (0, 1)])
    mean, std = values.mean(axis=0), values.std(axis=0, ddof=1)
    np.testing.assert_allclose(line.low, mean - std)
    np.testing.assert_allclose(line.high, mean + std)


def test_many_runs_fold_their_hashes_away(
    runs: Mapping[tuple[str, float, int], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is folded is not printed."""
    monkeypatch.setattr(Drawing, "svg", lambda drawing: "")
    for count, tag in ((10, "<details open>"), (11, "<details>")):
        cells = [({"lr": lr}, 0, runs["fedavg", 10, 0].path) for lr in range(count)]
        folder = make_grid(tmp_path / str(count) / "1", cells)  # type: ignore[arg-type]
        summary = f"{tag}\n<summary>Status, time and hashes of all {count} runs</summary>"
        assert summary in Report([folder]).html()


def test_what_is_not_finished_is_named(page: Path) -> None:
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page.read_text()))
    assert "The grid 1, as given" in text
    assert "1 of 9 runs; which, and why" in text
    assert (
        "broken 10 0 missing 0 of ? rounds client 3, round 2, local_update: &lt;boom&gt;" in text
    )


def test_the_worst_client_is_named(grid: Path, runs: Mapping[tuple[str, float, int], Run]) -> None:
    last = []
    for seed in (0, 1):
        clients = runs["fedavg", 0.3, seed].clients
        last.append(clients[clients["round"] == 6].assign(seed=seed))
    worst = pd.concat(last).sort_values("test_accuracy", kind="stable").iloc[0]
    table = ClientScores(ReportData([grid])).table()
    assert table.columns[4].title == "10 % quantile"
    row = [datum.text for datum in table.rows[0]]
    assert row[2] == "12"
    assert row[3] == f"{worst.test_accuracy:.4f}"
    assert row[8] == f"client {worst.client:.0f} (seed {worst.seed:.0f})"


def test_runs_that_differ_in_seed_alone_are_one_cell(
    runs: Mapping[tuple[str, float, int], Run],
) -> None:
    report = Report([done.path for done in runs.values()])
    assert report.compared.axes == ["method", "partition.alpha"]
    assert [(cell.label, len(cell.entries)) for cell in report.compared.cells] == [
        ("fedavg, α=0.3", 2),
        ("fedavg, α=10.0", 2),
        ("fedprox, α=0.3", 2),
        ("fedprox, α=10.0", 2),
    ]


def test_a_setting_that_only_some_methods_have(tmp_path: Path) -> None:
    methods = [{"name": "fedavg"}, {"name": "fedprox", "mu": 0.1}, {"name": "fedprox", "mu": 1}]
    paths = [
        run(small_experiment(method=method, train={"rounds": 1}), tmp_path).path
        for method in methods
    ]
    labels = [cell.label for cell in ReportData(paths).cells]
    assert labels == ["fedavg", "fedprox, μ=0.1", "fedprox, μ=1.0"]
    assert [row[1].text for row in results(ReportData(paths)).rows] == ["–", "0.1", "1.0"]
    assert [cell.label for cell in ReportData(paths[:2]).cells] == ["fedavg", "fedprox"]


def test_runs_alike_in_all_but_their_names(tmp_path: Path) -> None:
    one, other = (
        run(small_experiment(name=name, train={"rounds": 1}), tmp_path)
        for name in ("before", "after")
    )
    assert [cell.label for cell in ReportData([one.path, other.path]).cells] == [
        "fedavg, name=before",
        "fedavg, name=after",
    ]
    assert len(ReportData([one.path, one.path]).cells[0].entries) == 1


def test_copies_of_a_run_count_once(
    runs: Mapping[tuple[str, float, int], Run], grid: Path, tmp_path: Path
) -> None:
    one = runs["fedavg", 10, 0].path
    copy = shutil.copytree(one, tmp_path / "fetched" / one.parent.name / one.name)
    (tmp_path / "link").symlink_to(one)
    assert len(ReportData([one, copy, tmp_path / "link"]).entries) == 1
    again = shutil.copytree(grid, tmp_path / "fetched" / "skew" / "1")
    both = ReportData([grid, again])
    pd.testing.assert_frame_equal(both.summary, ReportData([grid]).summary)
    assert len(missing(both).rows) == 1
    # Another result of the same experiment is another run.
    change_manifest(copy, result_hash="0123456789abcdef")
    told = f"{one.parent.parent.name}/small/{one.name}", f"fetched/small/{one.name}"
    labels = [cell.label for cell in ReportData([one, copy]).cells]
    assert labels == [f"fedavg, folder={folder}" for folder in told]


def test_grids_of_other_bases_are_not_pooled(
    runs: Mapping[tuple[str, float, int], Run], tmp_path: Path
) -> None:
    """The axes are the same, and the seeds are not; the partition's alpha is no axis."""
    folders = [
        make_grid(
            tmp_path / f"skew-{alpha}" / "1",
            [({"lr": 1}, seed, runs["fedavg", alpha, seed].path), ({"lr": 2}, seed, None)],
        )
        for alpha, seed in ((0.3, 0), (10, 1))
    ]
    report = Report(folders)
    assert report.compared.axes == ["lr", "partition.alpha"]
    assert [(cell.label, len(cell.entries)) for cell in report.compared.cells] == [
        ("lr=1, α=0.3", 1),
        ("lr=2, α=0.3", 1),
        ("lr=1, α=10.0", 1),
        ("lr=2, α=10.0", 1),
    ]
    assert report.compared.summary["seeds"].tolist() == [1, 1]


def test_where_logs_and_data_are_makes_no_other_cell(
    runs: Mapping[tuple[str, float, int], Run], tmp_path: Path
) -> None:
    folders = [
        shutil.copytree(runs["fedavg", 10, seed].path, tmp_path / str(seed)) for seed in (0, 1)
    ]
    for folder, loggers, root in zip(
        folders, ([], ["tensorboard"]), ("here", "there"), strict=True
    ):
        content = yaml.safe_load((folder / "experiment.yaml").read_text())
        content["loggers"] = loggers
        content["data"] |= {"root": root, "download": root == "there"}
        text = yaml.safe_dump(content)
        (folder / "experiment.yaml").write_text(text)
        change_manifest(folder, experiment_hash=hashlib.sha256(text.encode()).hexdigest()[:16])
    assert [(c.label, len(c.entries)) for c in ReportData(folders).cells] == [("fedavg", 2)]


def test_how_far_the_seeds_of_a_cell_have_come(tmp_path: Path) -> None:
    def stop(event: Any, last: int) -> None:
        if isinstance(event, dict) and event["round"] == last:
            raise KeyboardInterrupt

    for seed, last in enumerate((2, 3)):
        experiment = small_experiment(train={"rounds": 4}, checkpoint={"every": 1}, seed=seed)
        with pytest.raises(KeyboardInterrupt):
            run(experiment, tmp_path, partial(stop, last=last))
    report = Report(sorted(tmp_path.glob("small/*")))
    assert [cell.label for cell in report.compared.cells] == ["fedavg"]
    assert results(report.compared).rows[0][0].note == "(interrupted, 2 to 3 of 4 rounds)"


def test_runs_of_a_resumed_grid_say_themselves_how_they_are(
    runs: Mapping[tuple[str, float, int], Run], tmp_path: Path
) -> None:
    """The rows of the manifest are written when a grid ends."""
    cells = [({"lr": lr}, 0, runs["fedavg", 10, 0].path) for lr in (1, 2, 3)]
    folder = make_grid(tmp_path / "skew" / "1", cells)  # type: ignore[arg-type]
    rows = json.loads((folder / "manifest.json").read_text())["cells"]
    for row, status in zip(rows, ("missing", "failed", "missing"), strict=True):
        row |= {"status": status, "error": "killed" if status == "failed" else None}
    change_manifest(folder, cells=rows, status="failed")
    for row in rows[:2]:
        change_manifest(folder / row["folder"], status="running")
    report = Report([folder])
    assert [(e.status, e.error) for e in report.compared.entries] == [
        ("running", ""),
        ("failed", "killed"),  # its process could not say so any more
        ("finished", ""),
    ]


def test_labels_in_figures_are_left_as_they_are() -> None:
    label, values = 'alpha=0.12345 "q=0.98765" #0000f1', np.array([0.1, 0.2, 0.3])
    cells = {label: (0, values, "client 3")}
    svg = Drawing("t", 104, partial(draw_clients, cells=cells, limits=(0.0, 1.0))).svg()
    assert f">{label}</text>" in svg
    tags = "".join(re.findall(r"<[^>]*>", svg))
    assert not re.search(r"\.\d{3}|#0000", tags)
    assert "var(--figure-text)" in tags


def test_a_single_run_without_tests_of_clients(finish: Callable[..., Run]) -> None:
    done = finish(train={"rounds": 3})
    report = Report([done.path])
    text = report.html()
    assert ClientScores(report.compared).judged.startswith("training loss of each client")
    assert done.result_hash in text
    assert (done.path / "experiment.yaml").read_text().splitlines()[3] in text
    assert "Not finished" not in text


def test_an_unfinished_run_says_so(tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if isinstance(event, dict) and event["round"] == 4:
            raise KeyboardInterrupt

    experiment = small_experiment(train={"rounds": 6}, checkpoint={"every": 2})
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path, stop)
    (folder,) = tmp_path.glob("small/*")
    text = re.sub(r"\s+", " ", Report([folder]).html())
    assert "The run is marked “interrupted”; 4 of 6 rounds are on disk" in text


def test_an_unfinished_run_does_not_count_beside_a_finished_one(tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        raise KeyboardInterrupt

    done = run(small_experiment(train={"rounds": 2}, checkpoint={"every": 1}), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(small_experiment(train={"rounds": 2}, checkpoint={"every": 1}, seed=1), tmp_path, stop)
    report = Report(sorted(tmp_path.glob("small/*")))
    assert len(report.compared.entries) == 2
    assert report.compared.summary["seeds"].tolist() == [1]
    assert report.compared.summary["last_mean"].tolist() == [done.rounds["accuracy"].iloc[-1]]


def test_a_run_without_a_round_yet(tmp_path: Path, say: Say) -> None:
    def stop(event: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(small_experiment(checkpoint={"every": 0}), tmp_path, stop)
    (folder,) = tmp_path.glob("small/*")
    assert "No round is on disk yet." in Report([folder]).html()
    code, _, complaint = say("report", folder, "--csv", "table.csv")
    assert code == 2
    assert complaint == "error: no table to write: no rounds of runs or grids are on disk\n"


def test_a_grid_that_goes_on_shows_what_there_is(grid: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(grid, tmp_path / "skew" / "2")
    change_manifest(copy, cells=[], status="running")
    report = Report([copy])
    assert "The grid 2 is marked as running" in report.html()
    assert len(report.compared.entries) == 8
    assert len(report.compared.cells) == 4
    assert "method" in report.compared.axes
    assert "partition.alpha" in report.compared.axes


def test_a_grid_of_which_everything_failed(tmp_path: Path) -> None:
    folder = make_grid(tmp_path / "skew" / "1", [({"lr": lr}, 0, None) for lr in (1, 2)])
    text = re.sub(r"\s+", " ", Report([folder]).html())
    assert "No round is on disk yet." in text
    assert "2 of 2 runs; <a" in text


def test_too_many_lines_for_one_figure(
    runs: Mapping[tuple[str, float, int], Run], tmp_path: Path
) -> None:
    source = runs["fedavg", 10, 0].path
    by_two = [({"method": m, "lr": lr}, 0, source) for m in "abcde" for lr in (1, 2)]
    report = Report([make_grid(tmp_path / "two" / "1", by_two)])  # type: ignore[arg-type]
    figures = curves(report.compared)
    assert [panel for panel, _ in figures[0].panels] == ["lr=1", "lr=2"]
    assert [line for _, _, line in legend(report.compared)] == list("abcde")
    by_one = [({"lr": lr}, 0, source) for lr in range(11)]
    report = Report([make_grid(tmp_path / "one" / "1", by_one)])  # type: ignore[arg-type]
    assert len(curves(report.compared)[0].panels) == 1
    assert [line for _, _, line in legend(report.compared)][7:] == ["lr=7", "3 others"]


@pytest.fixture
def as_regression(
    runs: Mapping[tuple[str, float, int], Run], tmp_path: Path
) -> Callable[..., Path]:
    """A run with other tables: those of a regression, the first round's R² far below 0."""

    def as_regression(method: str, seed: int, r2: list[float], worst: float = -7.0) -> Path:
        done = runs[method, 10, seed]
        path = shutil.copytree(done.path, tmp_path / f"{method}-{seed}")
        r2s = np.array(r2)
        rounds = done.rounds.drop(columns=[c for c in done.rounds if "accuracy" in c]).assign(
            r2=r2s, loss=1 - r2s, rmse=np.sqrt(1 - r2s), mae=np.sqrt(1 - r2s) / 2,
            client_r2=r2s - 1, worst_client_r2=worst,
        )  # fmt: skip
        rounds.to_parquet(path / "rounds.parquet")
        change_manifest(path, "files", metrics=[asdict(metric) for metric in REGRESSION])
        clients = done.clients.drop(columns="test_accuracy")
        tested = clients["test_loss"].notna()
        values = np.where(clients["client"] == 3, worst, 0.5 - clients["client"] / 10)
        clients.assign(test_r2=np.where(tested, values, np.nan)).to_parquet(
            path / "clients.parquet"
        )
        return path

    return as_regression


class TestRegression:
    """Tables of runs with R² instead of accuracy."""

    def test_the_page_speaks_of_r2(self, as_regression: Callable[..., Path]) -> None:
        folders = [
            as_regression(method, seed, [first, -1, 0, 0.3, 0.5, 0.6 + seed / 10])
            for method, first in (("fedavg", -3e4), ("fedprox", -2.0))
            for seed in (0, 1)
        ]
        report = Report(folders)
        text = report.html()
        words = re.sub(r"<style.*?</style>|<script.*?</script>", "", text, flags=re.DOTALL)
        assert "accuracy" not in words.lower()
        assert "R² on the central test set" in words
        assert "R² against communication" in words
        assert results(report.compared).caption == "Test R² and communication"
        assert finding(report.compared).startswith(
            "Highest test R², as mean of the last 5 rounds evaluated: 0.090 ± 0.014, by fedavg "
            "and fedprox (tied)."
        )
        assert (
            ClientScores(report.compared).judged
            == "test R² of each client, in the round evaluated last"
        )
        assert [figure.heading for figure in curves(report.compared)] == [
            "Test R² by round (from −1 up)",
            "Test loss by round (logarithmic)",
            "Test error, root mean square (RMSE) by round (logarithmic)",
            "Test error, mean absolute (MAE) by round (logarithmic)",
            "Training loss by round",
        ]
        assert [figure.heading for figure in of_clients(report.compared)] == [
            "R², mean over clients by round",
            "R² of the worst decile of clients by round",
            "R² of the worst client by round",
        ]
        assert (
            "% R² on the central test set: the mean of the last 5 rounds evaluated"
            in report.latex()
        )

    def test_what_is_far_below_0_does_not_press_the_rest_flat(
        self, as_regression: Callable[..., Path]
    ) -> None:
        folders = [
            as_regression("fedavg", seed, [-2e38 * (seed + 1), -3, 0.1, 0.2, 0.4, 0.5], -1e30)
            for seed in (0, 1)
        ]
        report = Report(folders)
        (curve,) = costs(report.compared)
        assert curve.heading == "Test R² by bytes sent (from −1 up)"
        svg = curve.panels[0][1].svg()
        heights = [float(y) for y in re.findall(r"[ML] -?[\d.]+ (-?[\d.]+)", svg)]
        assert 3e4 < max(map(abs, heights)) < 1e6  # browsers can draw that, and it is cut off
        assert {"−1.0", "0.0", "0.4"} <= set(re.findall(r">([−\d.]+)</text>", svg))
        (clients,) = ClientScores(report.compared).figures()
        assert clients.heading == "Clients by test R² (from −1 up)"
        assert "worst: client 3 (seed 0), -1e+30" in clients.panels[0][1].svg()
        row = [datum.text for datum in ClientScores(report.compared).table().rows[0]]
        assert row[2] == "-1e+30"

    def test_where_nothing_is_above_0_all_is_shown(
        self, as_regression: Callable[..., Path]
    ) -> None:
        report = Report([as_regression("fedavg", 0, [-60, -50, -40, -30, -20, -10])])
        curve = curves(report.compared)[0]
        assert curve.heading == "Test R² by round"
        assert {"−60", "−20"} <= set(re.findall(r">([−\d.]+)</text>", curve.panels[0][1].svg()))
        assert finding(report.compared) == (
            "Test R²: -10.0000 in the last round, -30.0000 as mean of the last 5 evaluated."
        )

    def test_constant_targets_have_no_r2(self, as_regression: Callable[..., Path]) -> None:
        report = Report([as_regression("fedavg", 0, [np.nan] * 6, np.nan)])
        assert "R² against" not in report.html()
        assert results(report.compared).rows[0][1].text == "–"

    def test_beside_a_classification(
        self, as_regression: Callable[..., Path], runs: Mapping[tuple[str, float, int], Run]
    ) -> None:
        one = as_regression("fedprox", 0, [-2, -1, 0, 0.3, 0.5, 0.6])
        report = Report([runs["fedavg", 10, 0].path, one])
        assert report.compared.score == "accuracy or R²"
        assert "Accuracy or R² against communication" in report.html()
        assert finding(report.compared) == ""
        last = [row[2] for row in results(report.compared).rows]
        assert [(datum.note, datum.best) for datum in last] == [("accuracy", False), ("R²", False)]
        assert last[1].text == "0.6000"
        assert [f.heading for f in costs(report.compared)] == [
            "Test accuracy by bytes sent",
            "Test R² by bytes sent (from −1 up)",
        ]

    @needs_chromium
    def test_in_chromium(
        self, browser: Browser, as_regression: Callable[..., Path], tmp_path: Path
    ) -> None:
        folders = [
            as_regression("fedavg", seed, [-2e38 * (seed + 1), -3, 0.1, 0.2, 0.4, 0.5], -9)
            for seed in (0, 1)
        ]
        page = tmp_path / "report.html"
        page.write_text(Report(folders).html())
        browser.open(page)
        events = [event["method"] for event in browser.events]
        assert "Log.entryAdded" not in events
        assert "Runtime.exceptionThrown" not in events
        assert browser.run("document.querySelectorAll('svg.figure').length") == 11


@pytest.fixture
def by_error(runs: Mapping[tuple[str, float, int], Run], tmp_path: Path) -> Callable[..., Path]:
    """A grid of runs of somebody's own objective, whose primary metric is best at its lowest."""
    metrics = [
        {"column": "hamming", "label": "Hamming loss", "best": "min", "primary": True},
        {"column": "macro_f1", "label": "macro F1"},
    ]

    def by_error(hamming: Mapping[str, float], **facts: Any) -> Path:
        cells: list[tuple[dict[str, Any], int, Path | None]] = []
        for (method, last), seed in itertools.product(hamming.items(), (0, 1)):
            done = runs["fedavg", 10, seed]
            path = shutil.copytree(done.path, tmp_path / "own" / f"{method}-{seed}")
            change_manifest(path, "files", metrics=metrics, result_hash=f"{method}-{seed}")
            errors = np.linspace(0.9, last + seed / 100, 6)
            done.rounds.drop(columns=[c for c in done.rounds if "accuracy" in c]).assign(
                hamming=errors, macro_f1=1 - errors, client_hamming=errors,
                worst_client_hamming=errors + 0.05,
            ).to_parquet(path / "rounds.parquet")  # fmt: skip
            clients = done.clients.drop(columns=["test_accuracy", "test_loss"])
            clients.assign(test_hamming=clients["client"] / 10).to_parquet(
                path / "clients.parquet"
            )
            cells.append(({"method": method}, seed, path))
        return make_grid(tmp_path / "errors" / "1", cells, **facts)

    return by_error


class TestLessIsBetter:
    """Runs of an objective that nothing here knows."""

    def test_the_lowest_is_the_best(self, by_error: Callable[..., Path]) -> None:
        folder = by_error({"a": 0.4, "b": 0.1}, baseline={"method": "a"}, target=0.2)
        report = Report([folder])
        compared = report.compared
        assert compared.score == "Hamming loss"
        assert compared.summary["best_mean"].tolist() == pytest.approx([0.405, 0.105])
        assert compared.summary["reached"].tolist() == [0, 2]
        assert math.isnan(compared.summary["p_value"][1])  # the same difference at both seeds
        assert finding(compared).startswith("Lowest test Hamming loss, as mean of the last 5 ")
        assert finding(compared).endswith(", by b.")
        table = results(compared)
        assert table.caption == "Test Hamming loss and communication"
        best = [[column.title for column, datum in zip(table.columns, row, strict=True)
                 if datum.best] for row in table.rows]  # fmt: skip
        assert best == [[], ["mean of last 5", "last", "best"]]
        assert not any(column.high for column in table.columns)  # a click puts the lowest first
        latex = report.latex()
        assert "% No p: a single pair, or the same difference at every seed." in latex
        assert r"\textbf{0.1050 $\pm$ 0.0071}" in latex
        assert latex.count(r"\textbf") == 3 + 3  # loss, macro F1 and its error over clients
        row = pd.read_csv(io.StringIO(report.csv())).set_index("method").loc["b"]
        assert row["last_mean"] == pytest.approx(0.105)

    def test_the_page_speaks_of_it(self, by_error: Callable[..., Path]) -> None:
        report = Report([by_error({"a": 0.4, "b": 0.1}, baseline={"method": "a"}, target=0.2)])
        words = re.sub(r"<style.*?</style>|<script.*?</script>", "", report.html(), flags=re.S)
        assert "accuracy" not in words.lower()
        assert "Hamming loss on the central test set" in words
        assert "Hamming loss against communication" in words
        assert "paired by seed, corrected by Holm&#39;s method" in words
        assert [figure.heading for figure in curves(report.compared)] == [
            "Test Hamming loss by round",
            "Test macro F1 by round",
            "Training loss by round",
        ]
        assert [figure.heading for figure in of_clients(report.compared)] == [
            "Hamming loss, mean over clients by round",
            "Hamming loss of the worst decile of clients by round",
            "Hamming loss of the worst client by round",
        ]
        (plot,) = costs(report.compared)
        assert plot.heading == "Test Hamming loss by bytes sent"
        assert "target 0.2" in plot.panels[0][1].svg()

    def test_the_worst_client_has_the_highest(self, by_error: Callable[..., Path]) -> None:
        clients = ClientScores(ReportData([by_error({"a": 0.4})]))
        assert clients.judged == "test Hamming loss of each client, in the round evaluated last"
        table = clients.table()
        row = dict(zip([c.title for c in table.columns], table.rows[0], strict=True))
        assert (row["worst"].text, row["worst client"].text) == ("0.5000", "client 5 (seed 0)")
        assert "90 % quantile" in row
        assert "worst: client 5 (seed 0), 0.5" in clients.figures()[0].panels[0][1].svg()

    def test_of_too_many_lines_the_lowest_are_told_apart(
        self, by_error: Callable[..., Path]
    ) -> None:
        compared = ReportData([by_error({f"m{k}": 0.01 * k for k in range(10)})])
        assert [cell.label for cell in compared.cells if cell.style is None] == ["m8", "m9"]

    def test_beside_a_classification(
        self, by_error: Callable[..., Path], runs: Mapping[tuple[str, float, int], Run]
    ) -> None:
        compared = ReportData([by_error({"a": 0.4}), runs["fedprox", 10, 0].path])
        assert compared.score == "Hamming loss or accuracy"
        assert not any(datum.best for row in results(compared).rows for datum in row)


def test_a_target_far_out_of_sight_leaves_the_figure_as_it_is() -> None:
    values = np.array([0.090, 0.095, 0.1])
    line = Line("a", 0, np.arange(3.0), values, values, values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's, of axes without any room
        draw = partial(draw_lines, lines=[line], limits=(0.09, 0.1))
        svg = Drawing("t", 265, partial(draw, target=0.9)).svg()
    assert "target" not in svg
    assert "target 0.095" in Drawing("t", 265, partial(draw, target=0.095)).svg()


def test_a_search(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "tuned" / "1",
        "search",
        status="interrupted",
        objectives={"accuracy": "max", "total_bytes": "min"},
        space=[],
    )
    assert "No round" not in Report([folder]).html()
    trials = pd.DataFrame(
        {
            "trial": [0, 1, 2],
            "train.optimizer.lr": [0.1, 0.01, 1.0],
            "status": ["finished", "finished", "failed"],
            "accuracy": [0.9, 0.8, None],
            "total_bytes": [4.64e7, 2e7, None],
            "error": [None, None, "<boom>"],
        }
    )
    trials.to_parquet(folder / "trials.parquet")
    trials[:1].to_parquet(folder / "pareto.parquet")
    pd.DataFrame({"hyper-parameter": ["train.optimizer.lr"], "total_bytes": [0.25]}).to_parquet(
        folder / "importance.parquet"
    )
    draw_something(folder / "pareto.png")
    (folder / "best.yaml").write_text("name: the-best\n")
    text = Report([folder]).html()
    assert "<h3>tuned (interrupted)</h3>" in text
    assert '<th scope="row" class="figure" data-value="0.0"><strong>0</strong></th>' in text
    assert "46.4 MB" in text
    assert ">0.25<" in text
    assert "&lt;boom&gt;" in text
    assert 'alt="Pareto front of tuned"' in text
    assert "name: the-best" in text


def test_a_search_for_one_thing_has_a_history(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tuned" / "1", "search", objectives={"loss": "min"}, space=[])
    losses = [0.9, np.nan, 0.5, 0.2]
    status = ["finished", "failed", "finished", "stopped"]  # the last too early to be the best
    trials = pd.DataFrame({"trial": range(4), "lr": [0.1, 0.2, 0.3, 0.4], "loss": losses})
    trials["status"] = status
    trials.to_parquet(folder / "trials.parquet")
    trials[2:3].to_parquet(folder / "pareto.parquet")
    pd.DataFrame({"hyper-parameter": ["lr", "mu"], "loss": [0.25, 0.75]}).to_parquet(
        folder / "importance.parquet"
    )
    (search,) = Report([folder]).searches
    history, importance = search.figures
    assert history.heading == "Loss by trial, and the best so far"
    assert history.panels[0][1].title.endswith(": 0.5 in the end")
    assert importance.heading == "Importance for loss"
    assert re.findall(r">(0\.\d\d)</text>", importance.panels[0][1].svg()) == ["0.75", "0.25"]
    assert search.importance is None  # the figure has it all
    assert search.trials is not None
    assert search.trials.caption == "Trials; the best in bold"
    assert "Importance for loss" in Report([folder]).html()
    (folder / "importance.parquet").unlink()
    (folder / "trials.parquet").unlink()
    assert Report([folder]).searches[0].figures == []


def test_figures_for_papers(runs: Mapping[tuple[str, float, int], Run], tmp_path: Path) -> None:
    folders = [runs[method, 10, 0].path for method in ("fedavg", "fedprox")]
    for name in ("one", "other"):
        drawing = Report(folders).plots["curves"][0].panels[0][1]
        assert drawing.save(tmp_path / name) == [tmp_path / f"{name}.{k}" for k in ("pdf", "png")]
    with Image.open(tmp_path / "one.png") as image:
        assert image.width == pytest.approx(3.3 * 400, abs=3)  # 3.3 inches, 400 dpi
        assert 600 < image.height < 1000
    pdf = (tmp_path / "one.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert pdf == (tmp_path / "other.pdf").read_bytes()  # the same data, the same bytes


def test_the_command_writes_every_figure(
    runs: Mapping[tuple[str, float, int], Run], say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(drawing: Drawing, stem: Path) -> list[Path]:
        stem.with_suffix(".pdf").touch()
        return [stem.with_suffix(".pdf")]

    monkeypatch.setattr(Drawing, "save", save)
    folders = [runs[method, 10, 0].path for method in ("fedavg", "fedprox")]
    assert say("report", *folders, "--figures", "figures")[1].endswith("written: figures\n")
    assert {path.stem for path in Path("figures").iterdir()} == {
        "labels-of-the-clients",
        "test-accuracy-by-round",
        "test-loss-by-round",
        "training-loss-by-round",
        "test-accuracy-by-bytes-sent",
        "clients-by-test-accuracy",
        "accuracy-mean-over-clients-by-round",
        "accuracy-of-the-worst-decile-of-clients-by-round",
        "accuracy-of-the-worst-client-by-round",
    }


def test_files_are_called_so_that_latex_takes_them(
    runs: Mapping[tuple[str, float, int], Run],
) -> None:
    compared = ReportData([done.path for done in runs.values()])
    names = [name for plot in label_counts(compared) for name, _ in plot.files()]
    assert names == ["labels-of-the-clients-alpha-0_3", "labels-of-the-clients-alpha-10_0"]


class TestWatch:
    """A page that follows a run."""

    @pytest.fixture
    def folder(self, runs: Mapping[tuple[str, float, int], Run], tmp_path: Path) -> Path:
        path = shutil.copytree(runs["fedavg", 10, 0].path, tmp_path / "run")
        change_manifest(path, status="running")
        return path

    @pytest.fixture
    def quickly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pages that are not drawn."""
        page = lambda report, refresh=None: f"refresh: {refresh}"  # noqa: E731
        monkeypatch.setattr(Report, "html", page)

    def test_ends_when_the_run_does(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, say: Say
    ) -> None:
        pages = []

        def wait(seconds: float) -> None:
            pages.append((folder / "report.html").read_text())
            if len(pages) == 2:
                change_manifest(folder, status="finished")

        monkeypatch.setattr("time.sleep", wait)
        code, text, _ = say("report", folder, "--watch", "--csv", "a.csv")
        assert code == 0
        assert text.startswith("updating the page until everything has finished; stop with Ctrl-C")
        assert len(pages) == 2
        assert all('<meta http-equiv="refresh" content="5">' in page for page in pages)
        last = (folder / "report.html").read_text()
        assert "refresh" not in last
        assert "Not finished" not in last
        assert Path("a.csv").exists()

    @pytest.mark.usefixtures("quickly")
    def test_ctrl_c_leaves_a_page_that_stands_still(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, say: Say
    ) -> None:
        def wait(seconds: float) -> None:
            assert (folder / "report.html").read_text() == "refresh: 5"
            raise KeyboardInterrupt

        monkeypatch.setattr("time.sleep", wait)
        assert say("report", folder, "--watch")[0] == 0
        assert (folder / "report.html").read_text() == "refresh: None"

    @pytest.mark.usefixtures("quickly")
    def test_a_folder_that_is_being_written_to_is_looked_at_again(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, say: Say
    ) -> None:
        rounds = folder / "rounds.parquet"
        content = rounds.read_bytes()
        change_manifest(folder, "files", status="running")
        looks = []

        def wait(seconds: float) -> None:
            looks.append(seconds)
            rounds.write_bytes(b"half" if len(looks) < 3 else content)
            if len(looks) == 3:
                change_manifest(folder, status="finished")

        monkeypatch.setattr("time.sleep", wait)
        assert say("report", folder, "--watch")[0] == 0
        assert len(looks) == 3

    @pytest.mark.usefixtures("quickly")
    def test_one_that_stays_damaged_is_not_watched_for_ever(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, say: Say
    ) -> None:
        change_manifest(folder, "files", status="running")
        rounds = folder / "rounds.parquet"
        monkeypatch.setattr("time.sleep", lambda seconds: rounds.write_bytes(b"half"))
        code, _, complaint = say("report", folder, "--watch")
        assert code == 2
        assert "rounds.parquet: is damaged" in complaint


def test_the_example_of_its_docstring_runs(tmp_path: Path) -> None:
    experiment = small_experiment(train={"rounds": 1})
    globs = {"fedsim": fedsim, "experiment": experiment, "folder": tmp_path}
    (test,) = doctest.DocTestFinder(recurse=False).find(fedsim.report, globs=globs)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0
    assert (tmp_path / "table.tex").exists()


def test_the_command_writes_page_and_tables(say: Say, grid: Path, page: Path) -> None:
    code, text, _ = say("report", grid, "--out", "a.html", "--latex", "a.tex", "--csv", "a.csv")
    assert code == 0
    assert text == "written: a.html\nwritten: a.tex\nwritten: a.csv\n"
    assert Path("a.html").read_text() == page.read_text()  # made before: the same bytes
    pd.testing.assert_frame_equal(
        pd.read_csv("a.csv"), ReportData([grid]).summary, check_dtype=False
    )
    pivot, summary, *others = Path("a.tex").read_text().split("\n\n")
    captions = [table.splitlines()[0].removeprefix("% ") for table in others]
    assert captions == [
        r"Test loss by method and $\alpha$", "Test loss",
        r"Accuracy, mean over clients by method and $\alpha$", "Accuracy, mean over clients",
        r"Accuracy of the worst client by method and $\alpha$", "Accuracy of the worst client",
    ]  # fmt: skip
    lines = summary.splitlines()
    comments = [line for line in lines if line.startswith("% ")]
    assert comments[1] == r"% needs \usepackage{booktabs}"
    for word in ("mean of the last 5 rounds", "Bold: ", "paired by seed", "two-tailed", "Holm"):
        assert any(word in comment for comment in comments[2:])
    first = len(comments)
    assert lines[first : first + 2] == [r"\begin{tabular}{lrrrrrrrrrr}", r"\toprule"]
    row = next(line for line in lines if "prox" in line)
    prox = r'\textless{}b onclick="alert(1)"\textgreater{}prox \& co\textless{}/b\textgreater{}'
    assert row.startswith(f"{prox} & 0.3")
    assert all(line.count(" & ") == 10 for line in lines if line.endswith(r"\\"))
    assert r"& \multicolumn{2}{c}{$\alpha$} \\" in pivot
    assert r"method & 0.3 & 10 \\" in pivot
    assert f"\n{prox} & " in pivot


def test_where_the_page_goes_by_default(
    say: Say, runs: Mapping[tuple[str, float, int], Run], tmp_path: Path
) -> None:
    one, other = (
        shutil.copytree(runs["fedavg", 10, seed].path, tmp_path / "x" / str(seed))
        for seed in (0, 1)
    )
    assert say("report", one)[0] == 0
    assert (one / "report.html").exists()
    assert say("report", one, other)[1] == "written: report.html\n"
    assert Path("report.html").exists()
    assert not (other / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{tmp}/nowhere"], 2, "{tmp}/nowhere: there is no such folder"),
        (
            ["{tmp}/here"],
            2,
            "{tmp}/here: not the folder of a run, a grid or a search (no readable manifest.json "
            "in it)",
        ),
        (
            ["{run}", "--out", "{tmp}/nowhere/x.html"],
            1,
            "{tmp}/nowhere/x.html: cannot be written: No such file or directory",
        ),
        (["{run}", "--csv", "{tmp}"], 1, "{tmp}: cannot be written: Is a directory"),
        (
            ["{run}", "--figures", "{run}/log.txt"],
            1,
            "{run}/log.txt: cannot be written: File exists",
        ),
        (
            ["{grid}", "--rows", "metod"],
            2,
            "rows: 'metod' is not an axis of these runs; did you mean 'method'?",
        ),
        (
            ["{run}", "--columns", "method"],
            2,
            "columns: the runs differ in nothing but 'method'; leave it out",
        ),
    ],
)
def test_bad_input(
    say: Say,
    grid: Path,
    runs: Mapping[tuple[str, float, int], Run],
    tmp_path: Path,
    words: list[str],
    code: int,
    message: str,
) -> None:
    a_run = runs["fedavg", 10, 0].path
    words = [word.format(tmp=tmp_path, grid=grid, run=a_run) for word in words]
    if "--out" not in words:
        words += ["--out", str(tmp_path / "page.html")]
    found, _, complaint = say("report", *words)
    assert complaint == f"error: {message.format(tmp=tmp_path, grid=grid, run=a_run)}\n"
    assert found == code


def test_a_grid_whose_manifest_was_edited(grid: Path, tmp_path: Path, say: Say) -> None:
    copy = shutil.copytree(grid, tmp_path / "skew" / "2")
    change_manifest(copy, cells=[{"seed": 1}])
    code, _, complaint = say("report", copy)
    assert code == 2
    assert complaint == f"error: {copy}/manifest.json: is damaged: cells.0.cell: Field required\n"


@pytest.mark.parametrize("alone", [False, True])
def test_a_figure_of_labels_says_what_it_shows(alone: bool) -> None:
    figure = Figure()
    counts = np.array([[3, 0], [1, 40]])
    draw_label_counts(figure.subplots(), PAPER if alone else PAGE, counts, ("cat", "dog"),
                      heading="α=0.1")  # fmt: skip
    (axes,) = figure.axes
    (scale,) = axes.child_axes
    assert (axes.get_xlabel(), axes.get_ylabel(), scale.get_ylabel()) == (
        "client", "class", "examples",
    )  # fmt: skip
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]
    assert list(axes.get_xticks()) == [0, 1]
    assert figure.get_suptitle() == ("α=0.1" if alone else "")


def test_a_long_name_of_an_axis_is_in_several_lines() -> None:
    x = np.arange(3.0)
    axes = Figure().subplots()
    draw_lines(axes, PAPER, [Line("a", 0, x, x, x, x)], limits=(0, 2),
               ylabel="Accuracy of the worst decile of clients")  # fmt: skip
    assert axes.get_ylabel() == "Accuracy of the worst decile\nof clients"


def test_names_break_between_their_parts() -> None:
    assert _breakable("own_method:Slow<b>") == "own_<wbr>method:<wbr>Slow&lt;b&gt;"
    assert _breakable("α=0.1; 2.5") == "α=0.1; 2.5"
