"""The report, as a researcher and their colleague see it.

What is on its pages is written down in `pages/`, together with what the figures draw and the
tables for papers. `WRITE_PAGES=1 pytest tests/results/test_report.py` writes it anew; `git diff`
shows then what has changed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from browser import Browser, needs_chromium
from made import (
    CLIENTS,
    Cell,
    classification,
    client_rows,
    made_grid,
    made_run,
    made_search,
    rising,
)
from matplotlib.figure import Figure
from page_text import text_of
from PIL import Image

import fedsim
from experiments import Say, change_manifest, run_example, small_experiment
from fedsim import load, run
from fedsim.data import Dataset
from fedsim.data.labels import label_table
from fedsim.errors import RunFolderError
from fedsim.launch.prepare import prepare
from fedsim.objectives import Metric
from fedsim.objectives.regression import Regression
from fedsim.results.figures.charts import Line, draw_clients, draw_label_counts, draw_lines
from fedsim.results.figures.look import PAGE, PAPER, Drawing, Look
from fedsim.results.report.clients import ClientScores
from fedsim.results.report.comparison import ReportData
from fedsim.results.report.curves import costs, curves
from fedsim.results.report.html import Report, _breakable
from fedsim.results.report.overview import label_counts
from fedsim.results.report.page import Datum, mark_best
from fedsim.results.report.page import number as figure
from fedsim.results.report.results import finding, results

PROX = '<b onclick="alert(1)">prox & co</b>'  # a named variant of somebody who means no good
# What two methods come to with two partitions.
LAST = {("fedavg", 0.3): 0.6, ("fedavg", 10): 0.7, ("fedprox", 0.3): 0.66, ("fedprox", 10): 0.69}

Runs = Mapping[tuple[str, float, int], Path]


def make_runs(path: Path) -> Runs:
    """Runs of two methods, two partitions and two seeds."""
    return {
        (method, alpha, seed): classification(
            path / f"{method}-{alpha}-{seed}",
            last + seed * (0.02 if method == "fedavg" else 0.03),
            seed=seed,
            method={"name": method},
            partition={"clients": CLIENTS, "alpha": alpha},
            train={"rounds": 6},
        )
        for (method, alpha), last in LAST.items()
        for seed in (0, 1)
    }


def skewed(path: Path) -> Path:
    """A grid of all of them, and of a method that failed."""
    cells: list[Cell] = [
        ({"method": PROX if method == "fedprox" else method, "partition.alpha": alpha}, seed, done)
        for (method, alpha, seed), done in make_runs(path / "runs").items()
    ]
    cells.append(({"method": "broken", "partition.alpha": 10}, 0, None))
    grid = made_grid(path / "skew" / "1", cells, baseline={"method": "fedavg"}, target=0.5)
    for suffix in ("png", "svg"):
        draw_something(grid / f"cells/0/seed-0/explanations/saliency-client_3.{suffix}")
    return grid


def draw_something(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    figure = Figure(figsize=(2, 2))
    figure.subplots().plot([1, 2])
    figure.savefig(path)


def regression(path: Path, r2: list[float], worst: float = -7.0, **about: Any) -> Path:
    """A run with R² instead of accuracy."""
    r2s = np.array(r2)
    scores = {
        **{"r2": r2s, "loss": 1 - r2s, "rmse": np.sqrt(1 - r2s), "mae": np.sqrt(1 - r2s) / 2},
        **{"train_loss": np.linspace(1, 0.5, 6), "client_r2": r2s - 1},
        "worst_client_r2": np.full(6, worst),
    }
    clients = client_rows(test_r2=np.full(6, 0.5))
    clients.loc[clients["client"] == 3, "test_r2"] = worst
    column = np.zeros((2, 1))
    metrics = Regression().metrics(Dataset(column, column[:, 0], column, column[:, 0], ()))
    return made_run(path, scores, metrics=metrics, clients=clients, **about)


def by_error(path: Path, last: Mapping[str, float], **facts: Any) -> Path:
    """A grid of somebody's own objective, whose primary metric is best at its lowest."""
    metrics = [
        Metric("hamming", "Hamming loss", best="min", primary=True),
        Metric("macro_f1", "macro F1"),
    ]
    cells: list[Cell] = []
    for (method, error), seed in itertools.product(last.items(), (0, 1)):
        errors = np.linspace(0.9, error + seed / 100, 6)
        scores = {
            **{"hamming": errors, "macro_f1": 1 - errors, "train_loss": errors / 2},
            **{"client_hamming": errors, "worst_client_hamming": errors + 0.05},
        }
        clients = client_rows(test_hamming=errors)
        made = made_run(
            path / f"{method}-{seed}", scores, metrics=metrics, clients=clients, seed=seed
        )
        cells.append(({"method": method}, seed, made))
    return made_grid(path / "errors" / "1", cells, **facts)


EXPLAINED = [
    Metric("gradient/deletion", "area under the deletion curve, global model", best="min"),
    Metric("own:OfPixels/deletion", "area under the deletion curve, global model", best="min"),
    Metric("gradient/client_agreement_rank", "agreement (rank correlation), models of clients"),
]
FURTHER = [
    Metric("accuracy", "accuracy", primary=True),
    Metric("error_rate", "error rate", best="min"),
    Metric("extremes", "extremes"),  # several scores
]


def scored(path: Path) -> Path:
    """A grid of two axes and two seeds with own metrics, classes and explanations."""
    cells: list[Cell] = []
    for n, method in enumerate(("fedavg", "fedprox", "second", "third")):
        for alpha, seed in itertools.product((0.3, 10), range(2)):
            accuracy = np.array(rising(0.5 + 0.1 * n + 0.01 * seed**2 + alpha / 100, rounds=3))
            scores = {
                **{"accuracy": accuracy, "error_rate": 1 - accuracy, "extremes/least": -accuracy},
                **{"extremes/greatest": accuracy * (n + 1), "train_loss": accuracy / 2},
                **{f"class_accuracy/{k}": accuracy - k / 50 for k in range(4)},
                **{metric.column: accuracy / (k + 2) for k, metric in enumerate(EXPLAINED)},
            }
            done = made_run(
                path / f"{method}-{alpha}-{seed}",
                scores,
                metrics=FURTHER,
                facts={"explained": [vars(metric) for metric in EXPLAINED]},
                seed=seed,
            )
            cells.append(({"method": method, "partition.alpha": alpha}, seed, done))
    return made_grid(path / "scored" / "1", cells, baseline={"method": "fedavg"})


def single(path: Path) -> Path:
    """A run with a validation set, classes, devices, names and rules, without tests of clients."""
    accuracy = np.array(rising(0.8))
    scores = {
        **{"accuracy": accuracy, "validation_accuracy": accuracy[::-1], "loss": 1 - accuracy},
        **{"train_loss": accuracy / 2, "total_simulated_seconds": np.arange(6) * 50.0},
    }
    names = ["Kiel", "Ulm", "Jena", "Bonn", "Trier", "Mainz"]
    facts = {"client_names": names}
    made = made_run(path / "small" / "one", scores, clients=client_rows(), facts=facts)
    rules = [
        {
            "round": t,
            "explainer": "rules",
            "client": float(k),
            "rule": f"if x{k} > {t}",
            "uninformative": k,
        }
        for t in (1, 2)
        for k in [*range(CLIENTS)] * 2
    ]
    pd.DataFrame(rules).to_parquet(made / "explanations.parquet")
    confusion = [(6, np.nan, t, p, 7 - 2 * abs(int(t) - int(p))) for t in "012" for p in "012"]
    columns = ["round", "client", "target", "prediction", "count"]
    pd.DataFrame(confusion, columns=columns).to_parquet(made / "confusion.parquet")
    return made


def several(path: Path, cells: list[dict[str, Any]]) -> Path:
    """A grid of cells with the same run."""
    source = classification(path / "source", 0.7)
    return made_grid(path / "many" / "1", [(cell, 0, source) for cell in cells])


def three_axes(path: Path) -> Path:
    """A grid of three axes, of which one combination is left out."""
    cells: list[Cell] = [
        ({"method": method, "skew": skew, "data": data}, 0, done)
        for (method, alpha, seed), done in make_runs(path / "runs").items()
        for skew, data in itertools.product(["mild" if alpha == 10 else "strong"], "ab")
        if seed == 0 and (method, skew, data) != ("fedprox", "mild", "b")
    ]
    return made_grid(path / "three" / "1", cells)


def settings(path: Path) -> list[Path]:
    """Runs of methods of which one has a hyper-parameter that varies."""
    methods = [{"name": "fedavg"}, {"name": "fedprox", "mu": 0.1}, {"name": "fedprox", "mu": 1}]
    return [
        classification(path / str(k), 0.6 + k / 10, method=method)
        for k, method in enumerate(methods)
    ]


def explainers(path: Path) -> list[Path]:
    """Runs with different explainers, of which one has one round."""
    lists = [
        ["random", {"name": "occlusion", "size": 2}],
        [{"name": "occlusion", "size": 4}],
        ["random"],
    ]
    return [
        classification(path / str(k), 0.6 + k / 10, rounds=1 + k, explain={"explainers": one})
        for k, one in enumerate(lists)
    ]


def going_on(path: Path) -> Path:
    """A grid that does not know yet which runs it has."""
    grid = several(path, [{"lr": 1}, {"lr": 2}])
    change_manifest(grid, cells=[], status="running")
    return grid


def unfinished(path: Path) -> list[Path]:
    """Two seeds of a cell that were interrupted."""
    return [
        classification(
            path / f"small/{k}",
            0.6,
            rounds=2 + k,
            seed=k,
            train={"rounds": 4},
            facts={"status": "interrupted"},
        )
        for k in (0, 1)
    ]


def search_for_two(path: Path) -> Path:
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
    importance = pd.DataFrame({"hyper-parameter": ["train.optimizer.lr"], "total_bytes": [0.25]})
    folder = made_search(
        path / "tuned" / "1",
        {"accuracy": "max", "total_bytes": "min"},
        **{"trials": trials, "pareto": trials[:1], "importance": importance},
    )
    change_manifest(folder, status="interrupted")
    draw_something(folder / "pareto.png")
    (folder / "best.yaml").write_text("name: the-best\n")
    return folder


def search_for_one(path: Path) -> Path:
    trials = pd.DataFrame({"trial": range(4), "lr": [0.1, 0.2, 0.3, 0.4]})
    trials["loss"] = [0.9, np.nan, 0.5, 0.2]
    # The last ended too early to be the best.
    trials["status"] = ["finished", "failed", "finished", "stopped"]
    importance = pd.DataFrame({"hyper-parameter": ["lr", "mu"], "loss": [0.25, 0.75]})
    tables = {"trials": trials, "pareto": trials[2:3], "importance": importance}
    return made_search(path / "tuned" / "1", {"loss": "min"}, **tables)


R2 = {"fedavg": -3e4, "fedprox": -2.0}  # in the first round
CHOSEN = ["gradient/deletion", "class_accuracy/3"]
PAGES: dict[str, Callable[[Path], Report]] = {
    "grid": lambda path: Report([skewed(path)]),
    "three_axes": lambda path: Report([three_axes(path)], columns="skew"),
    "settings": lambda path: Report(settings(path)),
    "explainers": lambda path: Report(explainers(path)),
    "every_score": lambda path: Report([scored(path)]),
    "chosen_scores": lambda path: Report([scored(path)], metrics=CHOSEN),
    "ties": lambda path: Report(
        [
            classification(path / m, 0.5, rounds=2, method={"name": m})
            for m in ("fedavg", "scaffold")
        ]
    ),
    "regression": lambda path: Report(
        [
            regression(
                path / f"{m}-{s}",
                [first, -1, 0, 0.3, 0.5, 0.6 + s / 10],
                seed=s,
                method={"name": m},
            )
            for (m, first), s in itertools.product(R2.items(), (0, 1))
        ]
    ),
    "two_objectives": lambda path: Report(
        [
            classification(path / "a", 0.7),
            regression(path / "b", [-2, -1, 0, 0.3, 0.5, 0.6], method={"name": "fedprox"}),
        ]
    ),
    "less_is_better": lambda path: Report(
        [by_error(path, {"a": 0.4, "b": 0.1}, baseline={"method": "a"}, target=0.2)]
    ),
    "single": lambda path: Report([single(path)]),
    "unfinished": lambda path: Report(unfinished(path)),
    "interrupted": lambda path: Report(unfinished(path)[1:]),
    "begun": lambda path: Report([made_run(path / "a/b", {}, facts={"status": "running"})]),
    "going_on": lambda path: Report([going_on(path)]),
    "failed": lambda path: Report(
        [made_grid(path / "skew" / "1", [({"lr": lr}, 0, None) for lr in (1, 2)])]
    ),
    "many_lines": lambda path: Report([several(path, [{"lr": lr} for lr in range(11)])]),
    "search": lambda path: Report([search_for_two(path)]),
    "search_for_one": lambda path: Report([search_for_one(path)]),
}


@pytest.mark.parametrize("name", PAGES)
def test_a_report_is_as_written_down(name: str, tmp_path: Path) -> None:
    found = text_of(PAGES[name](tmp_path / "x"))
    written = Path(__file__).parent / "pages" / f"{name}.txt"
    if "WRITE_PAGES" in os.environ:
        written.parent.mkdir(exist_ok=True)
        written.write_text(found)
        pytest.skip("written; look at what has changed")
    assert found.splitlines() == written.read_text().splitlines()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    return make_runs(folder)


@pytest.fixture(scope="module")
def grid(folder: Path) -> Path:
    return skewed(folder)


@pytest.fixture(scope="module")
def page(grid: Path, folder: Path) -> Path:
    """The page of the grid."""
    path = folder / "report.html"
    path.write_text(Report([grid]).html(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser(folder: Path) -> Iterator[Browser]:
    with Browser(folder / "profile") as browser:
        yield browser


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

    def test_opens_without_errors_and_fetches_nothing(
        self, browser: Browser, page: Path, tmp_path: Path
    ) -> None:
        browser.open(page)
        assert browser.complaints == []
        sent = [
            event for event in browser.events if event["method"] == "Network.requestWillBeSent"
        ]
        first, *others = (event["params"]["request"]["url"] for event in sent)
        assert first == page.as_uri()
        assert all(url.startswith("data:image/") for url in others)
        assert browser.run("document.title") == "skew · fedsim report"
        # One that tried to would be noticed.
        spoilt = tmp_path / "spoilt.html"
        elsewhere = '<img src="http://127.0.0.1:9/x.png"><script>console.log(1)</script></main>'
        spoilt.write_text(page.read_text().replace("</main>", elsewhere))
        browser.open(spoilt)
        refused = str(browser.complaints)
        assert "img-src" in refused
        assert "script-src" in refused

    def test_tables_are_sorted_by_click_and_by_key(self, browser: Browser, page: Path) -> None:
        browser.open(page)

        def column(name: str, caption: str = "Test accuracy and") -> Callable[[str], Any]:
            return lambda what: browser.run(f"({COLUMN})('{name}', '{caption}').{what}")

        mean = column("mean of last 5")
        before = mean("texts")
        assert len(set(before)) == 4
        assert mean("title.getAttribute('aria-sort')") is None
        for order in ("descending", "ascending"):  # the best first
            mean("title.querySelector('button').click()")
            assert mean("texts") == sorted(before, reverse=order == "descending")
            assert mean("title.getAttribute('aria-sort')") == order
            assert browser.run("document.querySelectorAll('[aria-sort]').length") == 1
        p = column("p")
        p("title.querySelector('button').focus()")
        for order in ("ascending", "descending"):
            browser.press("Enter", 13)
            assert p("title.getAttribute('aria-sort')") == order
            *numbers, one, other = p("texts")
            assert (one, other) == ("–", "–")  # of the baseline itself, and always last
            assert numbers == sorted(numbers, reverse=order == "descending")
        words = column("method", "Every run")
        words("title.querySelector('button').click()")
        assert words("texts") == [PROX] * 4 + ["broken"] + ["fedavg"] * 4
        pivot = "document.querySelector('#pivot-1').closest('table')"
        browser.run(f"{pivot}.tHead.rows[1].cells[1].querySelector('button').click()")
        shown = browser.run(f"[...{pivot}.tBodies[0].rows].map((r) => +r.cells[1].dataset.value)")
        assert shown == sorted(shown, reverse=True)
        assert browser.run(f"{pivot}.tHead.rows[0].textContent.trim()") == "α"

    def test_a_legend_hides_lines_and_shows_them_again(self, browser: Browser, page: Path) -> None:
        browser.open(page)

        def shown(line: str) -> int:
            visible = "(one) => one.getBoundingClientRect().width > 0"
            found = f"[...document.querySelectorAll('svg.figure .{line}')].filter({visible})"
            return int(browser.run(f"{found}.length"))

        buttons = """[...document.querySelectorAll('button[data-line="line-2"]')]"""
        pressed = f"{buttons}.map((button) => button.getAttribute('aria-pressed'))"
        lines, others = shown("line-2"), shown("line-1")
        assert lines >= 7  # in each figure, with its band and its end
        assert len(browser.run(pressed)) == 3  # each legend has it
        browser.run(f"{buttons}[1].click()")
        assert (shown("line-2"), shown("line-1")) == (0, others)
        assert set(browser.run(pressed)) == {"false"}
        browser.run(f"{buttons}[0].focus()")
        browser.press("Enter", 13)
        assert shown("line-2") == lines
        assert set(browser.run(pressed)) == {"true"}

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_everything_can_be_seen(self, browser: Browser, page: Path, scheme: str) -> None:
        browser.open(page, scheme=scheme)
        images = browser.run("[...document.images].map((i) => [i.naturalWidth, i.alt])")
        assert [alt for width, alt in images if width > 0] == [
            "saliency client 3, fedavg, α=0.3, seed 0"  # the SVG, not the PNG of its name
        ]
        widths = browser.run(
            "[...document.querySelectorAll('svg.figure')].map((s) => "
            "Math.min(s.getBBox().width, s.getBoundingClientRect().width))"
        )
        assert len(widths) == 10  # 2 of labels, 3 curves, 1 of communication, 4 of clients
        assert min(widths) > 300
        # A colour that is not defined would leave lines out without any error.
        used = set(re.findall(r"var\((--[\w-]+)\)", page.read_text()))
        assert {"--line-1", "--line-4", "--figure-text", "--figure-rule"} <= used
        style = "getComputedStyle(document.documentElement)"
        names = json.dumps(sorted(used))
        assert all(browser.run(f"{names}.map((n) => {style}.getPropertyValue(n))"))
        faint = browser.run(FAINT)
        assert faint["seen"] > 300
        assert faint["found"] == []
        page_colour = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (page_colour == "rgb(255, 255, 255)") == (scheme == "light")

    @pytest.mark.parametrize("width", [320, 1200])
    def test_everything_stays_in_its_place(
        self, browser: Browser, page: Path, tmp_path: Path, width: int
    ) -> None:
        """On a phone as well, and with long names and values."""
        long = tmp_path / "long.html"
        name = "test_fraction (partition.test_fraction)"
        pair = f"<div><dt>{name}</dt><dd>{'0.2, ' * 40}</dd></div>"
        long.write_text(page.read_text().replace("<dl>", f"<dl>{pair}", 1))
        browser.open(long, width=width)
        boxes = "[...document.querySelectorAll('.scroll')]"
        if width < 600:  # tables scroll in their own boxes
            assert browser.run("document.documentElement.scrollWidth") == width
            assert max(browser.run(f"{boxes}.map((s) => s.scrollWidth - s.clientWidth)")) > 0
        div = "document.querySelector('dl div')"
        (left, right, *_), *spans = browser.run(
            f"[{div}, ...{div}.children].map((e) => e.getBoundingClientRect())"
            ".map((r) => [r.left, r.right, r.width, r.height])"
        )
        for start, end, wide, high in spans:
            assert left <= start <= end <= right + 0.5
            assert high < 3 * wide

    def test_nothing_is_cut_off_on_paper(self, browser: Browser, page: Path) -> None:
        browser.open(page, width=690)  # of A4 within its margins
        browser.call("Emulation.setEmulatedMedia", media="print")
        too_wide = browser.run(
            "[...document.querySelectorAll('table, svg, img, dl, p')]"
            ".filter((e) => e.getBoundingClientRect().right > 691).map((e) => e.outerHTML)"
        )
        browser.call("Emulation.setEmulatedMedia", media="")
        assert too_wide == []

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
        assert browser.run(
            "[...document.querySelectorAll('nav a, .warn a')].every((a) => "
            "document.querySelector(a.getAttribute('href')))"
        )
        ids = browser.run("[...document.querySelectorAll('[id]')].map((e) => e.id)")
        assert len(ids) == len(set(ids))


# single facts that a reader relies on


def test_problems_do_not_compete(runs: Runs) -> None:
    compared = ReportData([runs["fedavg", alpha, 0] for alpha in (0.3, 10)])
    assert not any(d.best for row in results(compared).rows for d in row)
    assert finding(compared).endswith(" evaluated: 0.5062 at α=0.3; 0.5875 at α=10.0.")


def test_what_stands_there_as_equal_is_marked_alike() -> None:
    texts = [("0.80 ± 0.02", 0.8014), ("0.801 ± 0.003", 0.8010), ("0.7 ± 0.1", 0.7), ("–", None)]
    column = [Datum(text, value) for text, value in texts]
    for rows, best in ((range(4), [True, True, False, False]), (range(2, 4), [False] * 4)):
        # A single score is not the best of any.
        assert [datum.best for datum in mark_best(column, True, [rows])] == best


def test_a_number_beyond_64_bits_is_a_figure() -> None:
    """As a manifest that was edited may have."""
    assert figure("long", 10**30) == Datum("long", 1e30)
    for missing_value in (float("nan"), float("inf")):
        assert figure("", missing_value).value is None


def test_of_too_many_lines_the_lowest_errors_are_told_apart(tmp_path: Path) -> None:
    compared = ReportData([by_error(tmp_path, {f"m{k}": 0.01 * k for k in range(10)})])
    assert [cell.label for cell in compared.cells if cell.style is None] == ["m8", "m9"]


def test_who_holds_which_labels_is_on_record(tmp_path: Path) -> None:
    done = run(small_experiment(train={"rounds": 1}), tmp_path)
    dataset, splits, _ = prepare(done.experiment)
    counts = done.labels.pivot_table("examples", "client", "label", observed=False, fill_value=0)
    expected = label_table(dataset, splits)
    np.testing.assert_array_equal(counts, expected)
    assert tuple(counts.columns) == dataset.classes
    (plot,) = label_counts(ReportData([done.path]))
    held, sizes = (expected > 0).sum(axis=1).mean(), expected.sum(axis=1)
    words = f"{held:.1f} of 10 labels a client, {sizes.min()} to {sizes.max()} examples"
    assert plot.heading == f"Labels of the clients: {words}"
    np.testing.assert_array_equal(
        cast(partial[None], plot.panels[0][1].draw).keywords["counts"], expected
    )


# which runs belong together


def test_where_logs_and_data_are_tells_no_runs_apart(tmp_path: Path) -> None:
    here = {"loggers": [], "data": {"name": "mnist", "root": "here"}}
    there = {"loggers": ["tensorboard"], "data": {"name": "mnist", "root": "x", "download": True}}
    paths = [
        classification(tmp_path / str(k), 0.7, seed=k, **own)
        for k, own in enumerate((here, there))
    ]
    named = [classification(tmp_path / name, 0.7, name=name) for name in ("before", "after")]
    for compared, expected in (
        (paths, {"fedavg": 2}),
        (named, {"fedavg, name=before": 1, "fedavg, name=after": 1}),
    ):
        found = {cell.label: len(cell.entries) for cell in ReportData(compared).cells}
        assert found == expected


def test_copies_of_a_run_count_once(runs: Runs, grid: Path, tmp_path: Path) -> None:
    one = runs["fedavg", 10, 0]
    copy = shutil.copytree(one, tmp_path / "fetched" / one.parent.name / one.name)
    (tmp_path / "link").symlink_to(one)
    assert len(ReportData([one, one, copy, tmp_path / "link"]).entries) == 1
    again = shutil.copytree(grid, tmp_path / "fetched" / "skew" / "1")
    both = ReportData([grid, again])
    pd.testing.assert_frame_equal(both.summary, ReportData([grid]).summary)
    assert [entry.finished for entry in both.entries] == [True] * 8 + [False]
    # Another result of the same experiment is another run.
    change_manifest(copy, result_hash="0123456789abcdef")
    places = [f"{path.parents[1].name}/{path.parent.name}/{path.name}" for path in (one, copy)]
    labels = [cell.label for cell in ReportData([one, copy]).cells]
    assert labels == [f"fedavg, folder={place}" for place in places]


def test_grids_of_other_bases_are_not_pooled(runs: Runs, tmp_path: Path) -> None:
    """The axes are the same, and the seeds are not; the partition's alpha is no axis."""
    folders = [
        made_grid(
            tmp_path / f"skew-{alpha}" / "1",
            [({"lr": 1}, seed, runs["fedavg", alpha, seed]), ({"lr": 2}, seed, None)],
        )
        for alpha, seed in ((0.3, 0), (10, 1))
    ]
    compared = ReportData(folders)
    assert compared.axes == ["lr", "partition.alpha"]
    assert {cell.label: len(cell.entries) for cell in compared.cells} == dict.fromkeys(
        ["lr=1, α=0.3", "lr=2, α=0.3", "lr=1, α=10.0", "lr=2, α=10.0"], 1
    )
    assert compared.summary["seeds"].tolist() == [1, 1]


def test_an_unfinished_run_does_not_count_beside_a_finished_one(tmp_path: Path) -> None:
    status = ({}, {"status": "interrupted"})
    paths = [
        classification(tmp_path / str(seed), 0.5 + seed / 10, seed=seed, facts=facts)
        for seed, facts in enumerate(status)
    ]
    compared = ReportData(paths)
    assert len(compared.entries) == 2
    assert compared.summary["seeds"].tolist() == [1]
    assert compared.summary["last_mean"].tolist() == [0.5]


def test_runs_of_a_resumed_grid_say_themselves_how_they_are(runs: Runs, tmp_path: Path) -> None:
    """The rows of the manifest are written when a grid ends."""
    cells: list[Cell] = [({"lr": lr}, 0, runs["fedavg", 10, 0]) for lr in (1, 2, 3)]
    folder = made_grid(tmp_path / "skew" / "1", cells)
    rows = json.loads((folder / "manifest.json").read_text())["cells"]
    for row, status in zip(rows, ("missing", "failed", "missing"), strict=True):
        row |= {"status": status, "error": "killed" if status == "failed" else None}
    change_manifest(folder, cells=rows, status="failed")
    for row in rows[:2]:
        change_manifest(folder / row["folder"], status="running")
    assert [(e.status, e.error) for e in ReportData([folder]).entries] == [
        ("running", ""),
        ("failed", "killed"),  # its process could not say so any more
        ("finished", ""),
    ]


# figures


def test_a_target_far_out_of_sight_leaves_the_figure_as_it_is() -> None:
    values = np.array([0.090, 0.095, 0.1])
    line = Line("a", 0, np.arange(3.0), values, values, values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's, of axes without any room
        draw = partial(draw_lines, lines=[line], limits=(0.09, 0.1))
        svg = Drawing("t", 265, partial(draw, target=0.9)).svg()
    assert "target" not in svg
    assert "target 0.095" in Drawing("t", 265, partial(draw, target=0.095)).svg()


def test_what_is_far_below_0_does_not_press_the_rest_flat(tmp_path: Path) -> None:
    """As of two seeds that diverged at first."""
    diverged = [
        regression(tmp_path / str(k), [-2e38 * (k + 1), -3, 0.1, 0.2, 0.4, 0.5], -1e30, seed=k)
        for k in (0, 1)
    ]
    compared = ReportData(diverged)
    (curve,) = costs(compared)
    assert curve.heading == "Test R² by bytes sent (from −1 up)"
    svg = curve.panels[0][1].svg()
    heights = [float(y) for y in re.findall(r"[ML] -?[\d.]+ (-?[\d.]+)", svg)]
    assert 3e4 < max(map(abs, heights)) < 1e6  # browsers can draw that, and it is cut off
    assert {"−1.0", "0.0", "0.4"} <= set(re.findall(r">([−\d.]+)</text>", svg))
    (clients,) = ClientScores(compared).figures()
    assert clients.heading == "Clients by test R² (from −1 up)"
    assert "worst: client 3 (seed 0), -1e+30" in clients.panels[0][1].svg()


def test_r2_that_is_never_above_0(tmp_path: Path) -> None:
    """All of it is shown; or there is none, where the targets are all the same."""
    words = "Test R²: -10.0000 in the last round, -30.0000 as mean of the last 5 evaluated."
    for r2, heading, told in (
        ([-60, -50, -40, -30, -20, -10], "Test R² by round", words),
        ([np.nan] * 6, "Training loss by round", ""),
    ):
        compared = ReportData([regression(tmp_path / heading, r2, r2[0])])
        assert curves(compared)[0].heading == heading
        assert finding(compared) == told
        assert (results(compared).rows[0][1].text == "–") == (not told)


def test_labels_in_figures_are_left_as_they_are() -> None:
    label, values = 'alpha=0.12345 "q=0.98765" #0000f1', np.array([0.1, 0.2, 0.3])
    cells = {label: (0, values, "client 3")}
    svg = Drawing("t", 104, partial(draw_clients, cells=cells, limits=(0.0, 1.0))).svg()
    assert f">{label}</text>" in svg
    tags = "".join(re.findall(r"<[^>]*>", svg))
    assert not re.search(r"\.\d{3}|#0000", tags)
    assert "var(--figure-text)" in tags


def test_figures_for_papers(runs: Runs, tmp_path: Path) -> None:
    folders = [runs[method, 10, 0] for method in ("fedavg", "fedprox")]
    for name in ("one", "other"):
        drawing = Report(folders).plots["curves"][0].panels[0][1]
        assert drawing.save(tmp_path / name) == [tmp_path / f"{name}.{k}" for k in ("pdf", "png")]
    with Image.open(tmp_path / "one.png") as image:
        assert image.width == pytest.approx(3.3 * 400, abs=3)  # 3.3 inches, 400 dpi
        assert 600 < image.height < 1000
    pdf = (tmp_path / "one.pdf").read_bytes()
    assert pdf.startswith(b"%PDF")
    assert pdf == (tmp_path / "other.pdf").read_bytes()  # the same data, the same bytes


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_every_figure(
    runs: Runs, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(drawing: Drawing, stem: Path) -> list[Path]:
        stem.with_suffix(".pdf").touch()
        return [stem.with_suffix(".pdf")]

    monkeypatch.setattr(Drawing, "save", save)
    folder = str(runs["fedavg", 0.3, 0])
    words = ["report", folder, "--figures", "figures", "--out", "a.html"]
    assert say(*words)[1].endswith("written: figures\n")
    plots = [plot for of_section in Report([folder]).plots.values() for plot in of_section]
    names = {name for plot in plots for name, _ in plot.files()}
    assert len(names) == 9
    assert {path.stem for path in Path("figures").iterdir()} == names
    few = ["--figures", "few", "--figure", "training", "--figure", "test-accuracy"]
    assert say(*words[:2], *few, "--out", "a.html")[0] == 0
    chosen = {name for name in names if name.startswith(("training", "test-accuracy"))}
    assert {path.stem for path in Path("few").iterdir()} == chosen


@pytest.mark.parametrize("look", [PAGE, PAPER])
def test_a_figure_of_labels_says_what_it_shows(look: Look) -> None:
    figure, counts = Figure(), np.array([[3, 0], [1, 40]])
    draw_label_counts(figure.subplots(), look, counts, ("cat", "dog"), heading="α=0.1")
    (axes,) = figure.axes
    (scale,) = axes.child_axes
    names = axes.get_xlabel(), axes.get_ylabel(), scale.get_ylabel()
    assert names == ("client", "class", "examples")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]
    assert list(axes.get_xticks()) == [0, 1]
    assert figure.get_suptitle() == ("α=0.1" if look is PAPER else "")


def test_a_long_name_of_an_axis_is_in_several_lines() -> None:
    x = np.arange(3.0)
    axes = Figure().subplots()
    draw_lines(axes, PAPER, [Line("a", 0, x, x, x, x)], limits=(0, 2),
               ylabel="Accuracy of the worst decile of clients")  # fmt: skip
    assert axes.get_ylabel() == "Accuracy of the worst decile\nof clients"


def test_names_break_between_their_parts() -> None:
    assert _breakable("own_method:Slow<b>") == "own_<wbr>method:<wbr>Slow&lt;b&gt;"
    assert _breakable("α=0.1; 2.5") == "α=0.1; 2.5"


# the command

LOADED_AGAIN = '<meta http-equiv="refresh" content="5">'


@pytest.mark.usefixtures("undrawn")
class TestWatch:
    """A page that follows a run."""

    @pytest.fixture
    def running(self, runs: Runs, tmp_path: Path) -> Path:
        path = shutil.copytree(runs["fedavg", 10, 0], tmp_path / "run")
        change_manifest(path, status="running")
        return path

    @pytest.fixture
    def watch(
        self, undrawn: None, running: Path, monkeypatch: pytest.MonkeyPatch, say: Say
    ) -> Any:
        """Watch it, with a function in place of waiting."""

        def watch(wait: Callable[[float], object]) -> tuple[int, str, str]:
            monkeypatch.setattr("time.sleep", wait)
            return say("report", str(running), "--watch", "--csv", "a.csv")

        return watch

    def test_ends_when_the_run_does(self, running: Path, watch: Any) -> None:
        """Also if the folder is being written to meanwhile."""
        page, rounds = running / "report.html", running / "rounds.parquet"
        content, looks = rounds.read_bytes(), []

        def wait(seconds: float) -> None:
            assert LOADED_AGAIN in page.read_text()
            looks.append(seconds)
            rounds.write_bytes(b"half" if len(looks) < 3 else content)
            if len(looks) == 3:
                change_manifest(running, status="finished")

        code, text, _ = watch(wait)
        assert (code, len(looks)) == (0, 3)
        assert text.startswith("updating the page until everything has finished; stop with Ctrl-C")
        assert LOADED_AGAIN not in page.read_text()
        assert Path("a.csv").exists()

    def test_ctrl_c_leaves_a_page_that_stands_still(self, running: Path, watch: Any) -> None:
        def wait(seconds: float) -> None:
            assert LOADED_AGAIN in (running / "report.html").read_text()
            raise KeyboardInterrupt

        assert watch(wait)[0] == 0
        assert LOADED_AGAIN not in (running / "report.html").read_text()

    def test_one_that_stays_damaged_is_not_watched_for_ever(
        self, running: Path, watch: Any
    ) -> None:
        code, _, told = watch(lambda _: (running / "rounds.parquet").write_bytes(b"half"))
        assert code == 2
        assert "rounds.parquet: is damaged" in told


@pytest.mark.usefixtures("undrawn")
def test_the_example_of_its_docstring_runs(tmp_path: Path) -> None:
    experiment = small_experiment(train={"rounds": 1})
    run_example(fedsim.report, fedsim=fedsim, experiment=experiment, folder=tmp_path)
    assert (tmp_path / "table.tex").exists()


def test_the_command_writes_page_and_tables(say: Say, grid: Path, page: Path) -> None:
    code, text, _ = say(
        "report", str(grid), "--out", "a.html", "--latex", "a.tex", "--csv", "a.csv"
    )
    assert code == 0
    assert text == "written: a.html\nwritten: a.tex\nwritten: a.csv\n"
    assert Path("a.html").read_text() == page.read_text()  # made before: the same bytes
    assert Path("a.tex").read_text() == Report([grid]).latex()
    pd.testing.assert_frame_equal(
        pd.read_csv("a.csv"), ReportData([grid]).summary, check_dtype=False
    )


@pytest.mark.usefixtures("undrawn")
def test_where_the_page_goes_by_default(say: Say, runs: Runs, tmp_path: Path) -> None:
    one, other = (
        shutil.copytree(runs["fedavg", 10, seed], tmp_path / "x" / str(seed)) for seed in (0, 1)
    )
    assert say("report", str(one))[0] == 0
    assert (one / "report.html").exists()
    assert say("report", str(one), str(other))[1] == "written: report.html\n"
    assert Path("report.html").exists()
    assert not (other / "report.html").exists()


@pytest.fixture(scope="module")
def places(runs: Runs, grid: Path, folder: Path) -> dict[str, Path]:
    """Folders: of a run, of a grid, of one whose manifest was edited, of a run that has begun."""
    edited = shutil.copytree(grid, folder / "edited" / "1")
    change_manifest(edited, cells=[{"seed": 1}])
    (edited / "manifest.copy.json").unlink()
    begun = made_run(folder / "begun", {}, facts={"status": "interrupted"})
    run = runs["fedavg", 10, 0]
    return {"run": run, "grid": grid, "edited": edited, "begun": begun}


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("{run} --out {tmp}/no/x.html", 1, "{tmp}/no/x.html: cannot be written: No such file"),
        ("{run} --csv {tmp}", 1, "{tmp}: cannot be written: Is a directory\n"),
        ("{run} --figures {run}/labels.parquet", 1, "{run}/labels.parquet: cannot be written: "),
        ("{grid} --rows metod", 2, "rows: 'metod' is not an axis of these runs; did you mean"),
        ("{edited}", 2, "{edited}/manifest.json: is damaged: cells.0.cell: Field required\n"),
        ("{begun} --csv t.csv", 2, "no table to write: no rounds of runs or grids are on disk\n"),
    ],
)
@pytest.mark.usefixtures("undrawn")
def test_bad_input(
    say: Say, places: dict[str, Path], tmp_path: Path, words: str, code: int, message: str
) -> None:
    page = "" if "--out" in words else " --out {tmp}/page.html"
    found, _, complaint = say("report", *(words + page).format(**places, tmp=tmp_path).split())
    assert complaint.startswith(f"error: {message.format(**places, tmp=tmp_path)}")
    assert (found, complaint.count("\n")) == (code, 1)
    assert not Path("figures").exists()


def test_weights_and_labels_that_no_reader_could_use(runs: Runs, tmp_path: Path) -> None:
    path = shutil.copytree(runs["fedavg", 10, 0], tmp_path / "run")
    (path / "weights" / "final.safetensors").write_bytes(b"no such thing")
    with pytest.raises(RunFolderError, match=r"final\.safetensors: cannot be read"):
        _ = load(path).num_parameters
    (path / "labels.parquet").unlink()  # as of runs from before it was put on record
    assert load(path).labels.empty
    assert label_counts(ReportData([path])) == []
