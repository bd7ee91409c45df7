"""The documentation is built without a warning, is complete, and its snippets run."""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from mkdocs.commands.build import build
from mkdocs.config import load_config
from snippets import HASH, QUICKSTART, ROOT, agree, rounds_alike, run_page, snippets

from experiments import WRITTEN, by_day, small_experiment
from fedsim import Experiment, Run, run
from fedsim.explain.section import SCORES
from fedsim.methods import methods
from fedsim.support.hardware import Arithmetic

DOCS = ROOT / "docs"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
    if any(True for _ in snippets(text_of(path)))
)
# Those that run trials, which is the business of Ray Tune.
ON_RAY = [
    page
    for page in PAGES
    if any(
        snippet.language in ("console", "python")
        and re.search(r"^fedsim (grid|tune) |fedsim\.(grid|tune)\(", snippet.text, re.M)
        for snippet in snippets(text_of(ROOT / page))
    )
]


IN_PROCESS = [page for page in PAGES if page not in ON_RAY]
# By day those about code of one's own, with snippets of each kind, and some that hardly train.
BY_DAY = {
    *(f"docs/guides/{name}.md" for name in ("data", "explainer", "method", "model", "objective")),
    *(f"docs/guides/{name}.md" for name in ("clusters", "devices", "gpus", "python", "robust")),
    *("CONTRIBUTING.md", "docs/guides/reproduce.md", "docs/index.md", "docs/reference/tables.md"),
}


class TestReadme:
    README = text_of(ROOT / "README.md")
    ELSEWHERE: ClassVar = {"AMD EPYC, AVX2": "0164a2bec87bf18d"}  # than where it was printed

    def test_the_quickstarts_hash_is_known(self) -> None:
        """So that a change of results is seen where processors round otherwise, too."""
        alike, processor = rounds_alike(), str(Arithmetic.of(torch.device("cpu")))
        (found,) = QUICKSTART
        if not alike and processor not in self.ELSEWHERE:
            pytest.skip(f"nobody has recorded the hash on {processor}: here it is {found}")
        assert alike or found == self.ELSEWHERE[processor]

    def test_every_method_is_in_the_table(self) -> None:
        (table,) = re.findall(r"^\| `method.name` .*?\n\n", self.README, re.MULTILINE | re.DOTALL)
        rows = [row.split("|")[1] for row in table.splitlines()[2:-1]]
        listed = re.findall(r"`(\w+)`", "".join(rows))
        assert sorted(listed) == [name for name, _ in methods.items()]
        controls = re.findall(r"`(\w+)`", rows[-1])
        assert f"{len(listed) - len(controls)} methods from the literature" in self.README
        assert f"{len(controls)} controls" in self.README
        page = text_of(ROOT / "docs" / "reference" / "combinations.md")
        head, _, *cells = (row.split(" | ") for row in re.findall(r"^\|.*", page, re.MULTILINE))
        for section, words in (
            ("`secure_aggregation`", "of all with secure aggregation"),
            ("`privacy`: client", "of these with client-level"),
        ):
            works = sum(row[head.index(section)] == "✓" for row in cells)
            assert f"{works} {words}" in " ".join(self.README.split())

    def test_the_make_targets_exist(self) -> None:
        makefile = text_of(ROOT / "Makefile")
        for target in re.findall(r"^make (\w+)", self.README, re.MULTILINE):
            assert f"\n{target}:" in makefile

    def test_it_is_short(self) -> None:
        assert len(self.README.splitlines()) <= 150


@pytest.mark.parametrize("page", by_day(IN_PROCESS, BY_DAY & {*IN_PROCESS}))
def test_snippets_run(page: str, tmp_path: Path) -> None:
    run_page(ROOT / page, tmp_path)


HASHES = "result hash  4859d9c794c66be7", "result hash  0164a2bec87bf18d"


@pytest.mark.parametrize(
    ("shown", "printed", "alike", "elsewhere"),
    [
        ("a client holds 22 to 279", "a client holds 23 to 269", False, False),
        ("the most important row is 3", "the most important row is 5", False, False),
        ("round 5/20  accuracy 0.9", "round 6/20  accuracy 0.9", False, False),
        ("accuracy  1.0000", "accuracy  0.9500", False, False),
        ("accuracy  0.8944", "accuracy  0.8933", False, True),
        ("relevance in 10.9% of it", "relevance in 11.1% of it", False, True),
        ("y = −0.288203, by rule 38", "y = −0.2882, by rule 38", False, True),
        ("y = 0.288203, by rule 38", "y = 0.288203, by rule 37", False, False),
        ("46.5 MB sent", "46.6 MB sent", False, False),
        ("1,234 kB sent", "1,235 kB sent", False, False),
        (*HASHES, False, True),
        ("the mean is 1", "the mean is  1", True, True),
        ("the mean is 1", "the median is 1", False, False),
        ("46.5 MB sent  6.3 rounds/s", "46.5 MB sent  0.2 rounds/s", True, True),
        ("time   4.1 s", "time   13.5 s", True, True),
        ("runs/a/20261124-224258-fbbe", "runs/a/20261127-182033-7a56", True, True),
    ],
)
def test_numbers_on_pages(
    shown: str, printed: str, alike: bool, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which are right where processors round alike, and which elsewhere."""
    for rounds, expected in ((True, alike), (False, elsewhere)):
        monkeypatch.setattr("snippets.rounds_alike", lambda rounds=rounds: rounds)
        assert agree(shown, printed) == expected


def test_hashes_on_pages_are_the_readmes() -> None:
    """All are of the quickstart, so that one machine prints them."""
    (hashed,) = HASH.findall(text_of(ROOT / "README.md"))
    for page in PAGES:
        for snippet in snippets(text_of(ROOT / page)):
            assert set(HASH.findall(snippet.text)) <= {hashed}, (page, snippet.line)


def test_links_lead_to_files_of_the_repository() -> None:
    """So that they work where no site is built, too."""
    for page in (*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", text_of(page)):
            assert (page.parent / target).exists(), (page, target)


def test_the_table_of_claims_is_what_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    claims = importlib.import_module("claims")
    assert claims.FILE.read_text(encoding="utf-8") == claims.page()
    ids = [claim.id for claim in claims.CLAIMS]
    assert ids == [
        f"{s}{k}"
        for s, n in zip("RXSFDG", (9, 6, 6, 1, 8, 3), strict=True)
        for k in range(1, n + 1)
    ]


@pytest.mark.night
@pytest.mark.skipif("FEDSIM_DATA" not in os.environ, reason="needs the heart disease data")
def test_the_front_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS)
    pictures = importlib.import_module("pictures")
    kept: list[Path] = []
    monkeypatch.setattr(pictures, "keep", lambda drawn, path: kept.append(drawn))
    pictures.front(tmp_path)
    (picture,) = kept
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_each_picture_of_the_pages_has_its_script() -> None:
    shown = {
        path.name
        for page in (*DOCS.rglob("*.md"), ROOT / "README.md")
        for path in map(Path, re.findall(r"!\[[^\]]*\]\(([^)]*pictures/[^)]+)\)", text_of(page)))
    }
    gallery = set(re.findall(r"\(pictures/([^)]+)\)", text_of(DOCS / "gallery.md")))
    script = text_of(DOCS / "pictures.py")
    assert shown == {path.name for path in (DOCS / "pictures").iterdir()}
    assert all(f'"{name}"' in script for name in shown - gallery)


@pytest.mark.night
@pytest.mark.usefixtures("own_ray")
class TestOnRay:
    @pytest.fixture
    def folder(self) -> Iterator[Path]:
        """Where workers find modules as well."""
        yield WRITTEN
        for path in WRITTEN.iterdir():
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)

    @pytest.mark.parametrize("page", ON_RAY)
    def test_snippets_run(self, page: str, folder: Path) -> None:
        run_page(ROOT / page, folder)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built strictly: a warning, such as a dead link, is an error."""
    folder = tmp_path_factory.mktemp("site")
    hooks = sys.path.copy()
    logger = logging.getLogger("mkdocs")
    level = logger.level
    logger.setLevel(logging.WARNING)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))
    logger.setLevel(level)
    sys.path[:] = hooks
    return folder


@pytest.mark.night  # it takes half a minute to build
class TestSite:
    def test_it_loads_nothing_from_elsewhere(self, site: Path) -> None:
        loads = re.compile(
            r'<(?:script|img|iframe)[^>]*\ssrc="(https?:[^"]+)|@import|url\(https?:'
        )
        links = re.compile(r'<link[^>]*rel="(?:stylesheet|preconnect|icon)"[^>]*href="https?:')
        for page in site.rglob("*.html"):
            text = text_of(page)
            assert not loads.findall(text), page
            assert not links.findall(text), page

    def test_formulas_are_drawn(self, site: Path) -> None:
        text = text_of(site / "methods" / "fedprox" / "index.html")
        assert "<math" in text
        assert "arithmatex" not in text

    def test_the_reference_has_every_key(self, site: Path) -> None:
        text = text_of(site / "reference" / "experiment-file" / "index.html")
        shown = set(re.findall(r"<td><code>([\w.]+)</code>", text))
        assert set(Experiment.model_fields) <= shown
        assert {"train.optimizer.lr", "explain.share.noise", "grid.axes", "search.trials"} <= shown

    def test_every_method_has_a_page(self, site: Path) -> None:
        for name, method in methods.items():
            text = text_of(site / "methods" / name / "index.html")
            for key in method.model_fields:
                assert key == "name" or f"<code>method.{key}</code>" in text, (name, key)

    def test_every_key_is_explained(self, site: Path) -> None:
        row = re.compile(
            r"<td><code>([\w.]+)</code></td>\s*<td>.*?</td>\s*<td>.*?</td>\s*<td>(.*?)</td>"
        )
        for page in (*(site / "reference").rglob("*.html"), *(site / "methods").rglob("*.html")):
            rows = row.findall(text_of(page))
            assert not [key for key, meaning in rows if not meaning.strip()], page


def test_the_index_of_guides_has_the_groups_of_the_navigation() -> None:
    nav = load_config(str(ROOT / "mkdocs.yml")).nav
    assert nav is not None
    (guides,) = (entry["Guides"] for entry in nav if "Guides" in entry)
    grouped = {
        group: [path for page in pages for path in page.values()]
        for entry in guides[1:]
        for group, pages in entry.items()
        if isinstance(pages, list)
    }
    sections = text_of(DOCS / "guides" / "index.md").split("\n## ")[1:]
    listed = {
        section.split("\n")[0]: [
            f"guides/{page}" for page in re.findall(r"^- .*?\((.*?)\)", section, re.M)
        ]
        for section in sections
    }
    assert list(listed.items()) == list(grouped.items())


class TestTables:
    """The page of tables names every column that a run leaves behind."""

    PAGE = text_of(DOCS / "reference" / "tables.md")

    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory: pytest.TempPathFactory) -> Run:
        experiment = small_experiment(
            partition={"test_fraction": 0.2},
            evaluate={"clients": True, "metrics": ["confusion"], "validation": 0.1},
            explain={"explainers": ["random"], "inputs": 4, "maps": True},
        )
        return run(experiment, tmp_path_factory.mktemp("tables"))

    @pytest.mark.parametrize(
        "table", ["rounds", "clients", "explanations", "maps", "labels", "confusion"]
    )
    def test_columns_are_named(self, done: Run, table: str) -> None:
        section = self.PAGE.split(f"\n## {table}\n")[1].split("\n## ")[0]
        named = [re.sub("<.*?>", ".+", name) for name in re.findall(r"`([^`]+)`", section)]
        for column in getattr(done, table):
            known = column in SCORES or any(re.fullmatch(name, column) for name in named)
            assert known, (table, column)
