"""`fedsim view`: its server, and its pages in a real browser."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import pandas as pd
import psutil
import pytest
from browser import Browser, needs_chromium
from commands import Command

import fedsim
from experiments import (
    FOUR,
    KINDS,
    TABLE,
    Say,
    by_day,
    interrupted,
    ran,
    small_experiment,
    with_method,
)
from fedsim import Run, explanations
from fedsim.errors import BadInput
from fedsim.viewer.server import MOST_BYTES
from fedsim.viewer.view import View
from fedsim.viewer.work import Work
from fedsim.viewer.worker import Request

IMAGES: dict[str, Any] = {
    "partition": {"kind": "dirichlet", "clients": 4, "alpha": 1.0, "test_fraction": 0.2},
    "train": {"rounds": 4},
    "evaluate": {"clients": True},
    "explain": {"explainers": ["gradient"], "inputs": 2, "every": 1},
}
SHORT = {"train": {"rounds": 2}}
VIEWED: dict[str, dict[str, Any]] = {
    "images": IMAGES,
    "seldom": {**IMAGES, "evaluate": {"clients": True, "every": 2}, **SHORT},
    **{kind: {**KINDS[kind], **SHORT} for kind in ("numbers", "documents", "trees")},
    **{method: with_method(method, **SHORT) for method in ("ditto", "local")},
    "rules": {**KINDS["rules"], "train": {"rounds": 1}},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run of each kind."""
    above = tmp_path_factory.mktemp("view") / "results"
    for kind, sections in VIEWED.items():
        shutil.copytree(ran(**sections).path, above / kind)
    return above


@pytest.fixture(scope="module")
def page(folder: Path) -> Iterator[View]:
    with closing(fedsim.view(folder, height=500)) as shown:
        yield shown
        shown.close()  # a second time does nothing


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def fetched(url: str, data: bytes | None = None, **headers: str) -> tuple[int, bytes]:
    """The status of an answer, and its content."""
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def settled(url: str) -> tuple[int, str]:
    """The status of a page once nothing on it is being worked on, and its text."""
    while b"data-wait" in (found := fetched(url))[1]:
        if "/at/" in url:  # its table is sent once the explanation is there
            fetched(url.replace("/at/", "/file/csv/"))
        else:
            time.sleep(0.05)
    return found[0], found[1].decode()


def answered(url: str) -> str:
    status, text = settled(url)
    assert status == 200, said(text)
    return text


def said(page: str) -> str:
    """What a page warns of."""
    found = re.search(r'class="warn"[^>]*>\s*<p>(.*?)</p>', page, re.DOTALL)
    return html.unescape(found[1]) if found else ""


def until(holds: Callable[[], Any]) -> Any:
    while not (found := holds()):
        time.sleep(0.05)
    return found


def numbers(url: str) -> pd.DataFrame:
    status, content = fetched(url.replace("/at/", "/file/csv/"))
    assert status == 200, said(content.decode())
    return pd.read_csv(io.BytesIO(content), float_precision="round_trip")


class TestServer:
    def test_answers_nobody_without_the_token(self, page: View) -> None:
        address = urlsplit(page.url)
        for path in ("/", "/wrong/", f"{address.path}x/", "/page.css", address.path[:-2] + "/"):
            status, content = fetched(f"http://{address.netloc}{path}")
            assert status in (403, 404), path
            assert b"results" not in content
        assert fetched(page.url)[0] == 200
        # Nor under a name that leads here from elsewhere.
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.x"):
            assert fetched(page.url, Host=host)[0] == 403
        for host in ("localhost:1234", "127.0.0.1", "[::1]:80"):  # as a tunnel calls it
            assert fetched(page.url, Host=host)[0] == 200
        upload = f"{page.url}cancel/images"
        assert fetched(upload, b"", Origin="http://evil.example")[0] == 403

    def test_shows_nothing_outside_of_its_folder(self, page: View, folder: Path) -> None:
        (folder.parent / "secret" / "hidden").mkdir(parents=True, exist_ok=True)
        for path in ("..", "../secret", "%2e%2e/secret", "images/../../secret", "/etc", "none"):
            status, content = fetched(f"{page.url}at/{path}")
            assert status in (400, 403, 404), path
            assert b"hidden" not in content

    def test_loads_nothing_from_elsewhere(self, page: View) -> None:
        request = urllib.request.urlopen(f"{page.url}at/images")
        policy = request.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "http" not in policy
        assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//""", request.read().decode())

    def test_ten_at_once(self, page: View, folder: Path) -> None:
        run = Run.open(folder / "images")
        with ThreadPoolExecutor(10) as pool:
            urls = [f"{page.url}at/images?round=2&row={row}" for row in range(10)]
            list(pool.map(fetched, urls))
            found = list(pool.map(numbers, urls))
        (one,) = explanations(run, after=2, row=7, progress=False)
        assert np.array_equal(found[7]["global, round 2"], one.relevance.ravel())  # type: ignore[attr-defined]

    def test_names_with_markup_are_text(self, page: View, folder: Path, tmp_path: Path) -> None:
        evil = "<img src=x onerror=alert(1)>"
        rows = "\n".join(f"{k % 7},{k % 5},{(evil, 'plain')[k % 2]}" for k in range(60))
        data = tmp_path / "t.csv"
        data.write_text(f"a,{evil.replace(',', '')},y\n{rows}\n")
        section = {"name": "table", "path": str(data), "label": "y"}
        done = ran(data=section, partition={"kind": "iid", "clients": 2}, train={"rounds": 1})
        shutil.copytree(done.path, folder / "<b>runs" / "1")
        for query in ("", "/1?client=0&row=1"):
            text = answered(f"{page.url}at/%3Cb%3Eruns{query}")
            assert "&lt;b&gt;runs" in text
            assert "<img src=x" not in text
            assert "<b>" not in text
        assert html.escape(evil) in text

    @pytest.mark.parametrize("trust", by_day([False, True], [False]))
    def test_no_stranger_s_code_runs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: bool
    ) -> None:
        marker = tmp_path / "marker"
        (tmp_path / "their_method.py").write_text(
            "from pathlib import Path\nfrom fedsim.methods.fedavg import FedAvg\n"
            f"Path({str(marker)!r}).touch()\n"
            "class It(FedAvg):\n    name: str = 'their_method:It'\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "their_method", raising=False)
        monkeypatch.setenv(
            "PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        )
        with monkeypatch.context() as theirs:
            theirs.setenv("XDG_CONFIG_HOME", str(tmp_path / "their-home"))
            made = small_experiment(method={"name": "their_method:It"}, train={"rounds": 1})
            done = fedsim.run(made, tmp_path, progress=False)
        marker.unlink()
        with closing(fedsim.view(done, trust=trust)) as shown:
            text = answered(shown.url)
        assert ("code of the folder's author" in said(text)) == (not trust)
        assert "Curve of" in text  # what needs no code is there
        assert marker.exists() == trust

    def test_ctrl_c_leaves_nothing(self, folder: Path) -> None:
        command = Command("view", str(folder))
        url = command.stdout.readline().strip()
        fetched(f"{url}at/images?round=2")
        below = until(lambda: psutil.Process(command.pid).children(recursive=True))
        os.kill(command.pid, signal.SIGINT)
        assert command.wait() == 128 + signal.SIGINT
        psutil.wait_procs(below)
        assert not [one for one in below if one.is_running() and one.status() != "zombie"]
        with pytest.raises(urllib.error.URLError):
            fetched(url)

    @pytest.mark.night  # by day it is interrupted
    def test_killed_it_leaves_no_process(self, folder: Path) -> None:
        command = Command("view", str(folder))
        url = command.stdout.readline().strip()
        slow = urlencode({"explainer": "kernel_shap: {samples: 900000, size: 1}"})
        until(lambda: b"explaining" in fetched(f"{url}at/images?round=1&{slow}")[1])
        below = psutil.Process(command.pid).children(recursive=True)
        os.kill(command.pid, signal.SIGKILL)
        command.wait()
        psutil.wait_procs(below)

    def test_in_a_notebook(self, page: View) -> None:
        cell = page._repr_html_()
        assert f'src="{page.url}"' in cell
        assert "height: 500px" in cell


class TestDecisions:
    @pytest.mark.parametrize("kind", sorted({*VIEWED} - {"seldom"}))
    def test_each_kind_of_model(self, page: View, kind: str, say: Say) -> None:
        client = "&client=1" if kind in ("ditto", "trees") else ""
        url = f"{page.url}at/{kind}?round=1&row=1{client}"
        text = answered(url)
        assert not said(text)
        assert re.search(r'<img src="data:image/svg\+xml;base64,\w+', text)
        assert "fedsim explain" in text
        words = html.unescape(re.findall(r"<pre[^>]*>(.*?)</pre>", text, re.DOTALL)[0])
        # Without a global model, the first client that has one is shown.
        assert words.startswith("client 0's" if kind == "local" else "the global model after")
        assert ("train no models" in text) == (kind == "trees")
        for command in re.findall(r">(fedsim explain [^<]*)<", text):
            printed = say.printed(*shlex.split(html.unescape(command))[1:])
            assert words in printed or "--strip" in command  # which prints a table

    @pytest.mark.parametrize("of", ["cohort", "personal"])
    def test_models_of_clients(self, page: View, folder: Path, of: str) -> None:
        query = f"round=1&row=2&client=3&of={of}&explainer=occlusion"
        found = numbers(f"{page.url}at/ditto?{query}")
        (one,) = explanations(
            folder / "ditto", "occlusion", client=3, after=1, of=of, row=2, progress=False
        )
        (column,) = [name for name in found if name.startswith("client 3")]
        assert np.array_equal(found[column], one.relevance.ravel())  # type: ignore[attr-defined]

    def test_in_any_order_of_rounds(self, page: View, folder: Path) -> None:
        """Models that are kept on the way are those that are made from the start."""
        rounds, clients = [1, 2, 3, 4], [0, 1, 2, 3]
        asked = {"after": rounds, "row": 3, "progress": False}
        whole, own = (
            explanations(folder / "images", "gradient", client=k, **asked) for k in (None, clients)
        )
        expected = {f"global, round {t}": one for t, one in zip(rounds, whole, strict=True)}
        keys = [f"client {k}, round {t}" for t in rounds for k in clients]
        expected |= dict(zip(keys, own, strict=True))
        for t, k in ((4, 1), (2, 3), (3, 1), (1, 0), (4, 2), (2, 1)):
            query = f"round={t}&row=3&client={k}&explainer=gradient"
            found = numbers(f"{page.url}at/images?{query}")
            for name in (f"global, round {t}", f"client {k}, round {t}"):
                assert np.array_equal(found[name], expected[name].relevance.ravel())

    def test_the_command_draws_the_same(self, page: View, tmp_path: Path, say: Say) -> None:
        url = f"{page.url}at/images?round=4&against=2&client=1&client=2&row=5"
        (command,) = re.findall(r"fedsim explain [^<]*", answered(url))
        for ending in ("svg", "png"):
            status, picture = fetched(url.replace("/at/", f"/file/{ending}/"))
            assert status == 200
            path = tmp_path / f"same.{ending}"
            say.printed(*html.unescape(command).split()[1:], "--out", str(path))
            assert path.read_bytes() == picture

    def test_inputs_of_one_s_own(self, page: View, tmp_path: Path) -> None:
        from PIL import Image

        Image.new("RGB", (20, 20), "white").save(tmp_path / "seven.png")
        (tmp_path / "none.png").write_text("no picture")
        found = {}
        for name in ("seven.png", "none.png"):
            status, text = sent(page, name, (tmp_path / name).read_bytes())
            assert status == 200
            found[name] = answered(f"{page.url}at/images?input={json.loads(text)['input']}")
        assert "20×20 RGB, resized to 8×8 gray" in found["seven.png"]
        assert "--input seven.png" in found["seven.png"]
        assert re.search(r"none\.png: .*cannot be read", said(found["none.png"]))
        text = answered(f"{page.url}at/documents?text=wonderful+awful&explainer=occlusion")
        assert "--text &#39;wonderful awful&#39;" in text

    def test_uploads(self, page: View) -> None:
        for name in ("../../x.png", ".hidden", "..", "é" * 200, "a b;c"):
            status, text = sent(page, name, b"1")
            assert status == 200
            assert re.fullmatch(r'\{"input": "\w{12}/[^./][^/ ;]*"\}', text)
        for k in range(30):
            sent(page, "x.png", bytes([k]))
        assert len([*page._server._pages._uploads.iterdir()]) == 20
        status, text = sent(page, "big.png", bytes(MOST_BYTES + 1))
        assert (status, said(text)) == (400, "input: larger than 50 MB")
        status, text = sent(page, "x.png", b"", "text/plain")
        assert (status, said(text)) == (400, "input: no file was sent")

    def test_what_fails_again_is_told_again(self, page: View) -> None:
        url = f"{page.url}at/images?row=100000&again=1"
        with urllib.request.urlopen(url) as answer:
            assert answer.url.endswith("?row=100000")
        assert "there is no row 100000" in said(answered(url))

    def test_what_was_cancelled_or_ended_can_be_asked_again(self, page: View) -> None:
        slow = urlencode({"explainer": "kernel_shap: {samples: 900000, size: 1}"})
        url = f"{page.url}at/images?round=3&row=9&{slow}"
        assert "data-cancel" in fetched(url)[1].decode()
        asked = urlsplit(url).query
        assert fetched(f"{page.url}cancel/images?{asked}", b"")[0] == 200
        assert said(answered(url)) == "cancelled"
        assert not said(answered(f"{page.url}at/images?round=3&row=9"))
        assert "data-cancel" in fetched(f"{url}&again=1")[1].decode()
        until(lambda: b"explaining" in fetched(url)[1])
        page._server._work._process.kill()  # type: ignore[union-attr]
        assert said(answered(url)) == "the process that was to answer has ended"
        assert "data-cancel" in fetched(f"{url}&again=1")[1].decode()
        fetched(f"{page.url}cancel/images?{asked}", b"")
        assert not said(answered(f"{page.url}at/images?round=3&row=8"))


def sent(
    page: View, name: str, content: bytes, kind: str = "multipart/form-data; boundary=cut"
) -> tuple[int, str]:
    """The status and text of the answer to a file that is sent."""
    about = f'Content-Disposition: form-data; name="file"; filename="{name}"'
    head = f"--cut\r\n{about}\r\nContent-Type: application/octet-stream\r\n\r\n"
    body = head.encode() + content + b"\r\n--cut--\r\n"
    status, found = fetched(f"{page.url}input", body, **{"Content-Type": kind})
    return status, found.decode()


BAD = {
    "at/images?round=9": "round: must be from 1 to 4, not 9",
    "at/images?round=x": "'x' is not a whole number",
    "at/images?client=9": "client: there is no client 9; there are 4",
    "at/images?client=0&client=1&client=2&client=3&client=4": "client: at most 4 can be",
    "at/images?column=los": "column: nothing of that name is known of clients: 'los'",
    "at/images?curve=acuracy": "curve: the run has no column 'acuracy'; did you mean",
    "at/images?of=mine": "of: must be cohort or personal, not 'mine'",
    "at/images?input=../../etc/passwd": "input: '../../etc/passwd' is none that was dropped in",
    "at/images?input=abc/x.png": "input: it is no longer here; drop it in again",
    "at/images?input=a%00b": "is none that was dropped in",
    f"at/images?row={'9' * 5000}": "is not a whole number",
    "at/a%00b": "there is no such folder here",
    f"at/{'x' * 5000}": "there is no such folder here",
    "at/two%0Alines": "two lines: there is no such folder here",
    "at/nowhere": "nowhere: there is no such folder here",
    "?curve=nothing": "curve: no run here has a column 'nothing'",
    "file/pdf/images": "there is no .pdf of this; there is: csv, png, svg",
    "at/images?row=100000": "there is no row 100000 in the test set",
    "at/images?explainer=gradiant": "there is no explainer 'gradiant'; did you mean",
    "at/images?explainer=tree": "",
    "at/documents?explainer=lrp": "",
    "at/images?of=personal&client=1": "clients of method.name=fedavg have no personal models",
    "at/images?explainer=shared_images": "explains the run as a whole",
    "at/trees?explainer=gradient": "",
}


@pytest.mark.parametrize("path", BAD)
def test_bad_addresses(page: View, path: str) -> None:
    status, text = settled(f"{page.url}{path}")
    assert status in (200, 400)
    line = said(text)
    assert "\n" not in line.strip()
    assert BAD[path] in line
    assert "Traceback" not in text


def test_a_run_without_rounds(page: View, folder: Path) -> None:
    begun = interrupted(small_experiment(), folder / "begun", after=1).relative_to(folder)
    assert "No round is on disk yet" in answered(f"{page.url}at/{begun}")


def test_what_fails_in_fedsim_is_a_line(page: View, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        raise OSError("the disk is gone")

    monkeypatch.setattr(page._server._pages, "page", fail)
    status, content = fetched(f"{page.url}at/images")
    assert status == 500
    assert said(content.decode()).startswith("OSError: the disk is gone")


def test_columns_stay_in_rounds_without_values(page: View) -> None:
    url = f"{page.url}at/seldom?column=test_accuracy"
    assert "test accuracy is not known in this round" in answered(f"{url}&round=1")
    assert "is not known" not in answered(f"{url}&round=2")


def test_what_was_asked_for_last_comes_first() -> None:
    work = Work()
    work.close()  # nothing is worked on any more
    requests = [Request("run", "seen", (k,)) for k in range(150)]
    for request in (*requests, requests[100]):
        work.ask(request)
    assert work._next() == requests[100]
    assert len(work._waiting) <= 100


def test_a_port_that_is_taken(page: View, folder: Path, say: Say) -> None:
    port = str(urlsplit(page.url).port)
    code, _, complaint = say("view", str(folder), "--port", port)
    assert code == 1
    assert complaint.strip() == f"error: port {port} cannot be used: address already in use"


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="there is no such folder"):
        fedsim.view(tmp_path / "none")


def test_a_grid_of_many_runs_has_pages(page: View, folder: Path) -> None:
    try:
        for k in range(120):
            shutil.copytree(folder / "rules", folder / "many" / f"run-{k:03}")
        pages = [answered(f"{page.url}at/many?page={k}") for k in range(3)]
    finally:
        shutil.rmtree(folder / "many")
    found = [re.findall(r'href="/[^"/]*/at/many/(run-\d+)"', text) for text in pages]
    assert [len(each) for each in found] == [50, 50, 20]
    assert found[0][0] == "run-119"
    assert len({name for each in found for name in each}) == 120
    assert "page 2 of 3" in pages[1]


@needs_chromium
class TestInChromium:
    """The pages as a person uses them."""

    def test_drag_click_and_choose(self, browser: Browser, page: View) -> None:
        browser.open(f"{page.url}at/images")
        settle(browser)
        box = "document.getElementById('round').getBoundingClientRect()"
        left, width, top, height = (
            browser.run(f"{box}.{side}") for side in ("left", "width", "top", "height")
        )
        knob = 20
        at = [left + knob / 2 + (width - knob) * (t - 1) / 3 for t in (1, 2, 3, 4)]
        middle = top + height / 2
        browser.drag((at[3], middle), (at[2], middle))
        settle(browser, "round=3")
        assert browser.run("document.getElementById('round-told').textContent") == "3"
        handle = "document.querySelector('.handle').getBoundingClientRect().left"
        assert abs(browser.run(handle) - at[2]) < 3  # the handle stands above the knob
        browser.run("document.getElementById('client-2').click()")
        settle(browser, "client=2")
        browser.run("""document.querySelector('input[name="row"][value="5"]').click()""")
        settle(browser, "row=5")
        assert browser.complaints == []
        assert browser.run("document.querySelectorAll('.tile :checked').length") == 1
        url = browser.run("location.href")
        shown = browser.run("document.getElementById('picture').src")
        alt = browser.run("document.getElementById('picture').alt")
        assert re.match("Row 5 .*global: round 3 .*client 2: round 3 ", alt, re.DOTALL)
        browser.open(url)  # the address of the view shows the same again
        settle(browser)
        assert browser.run("document.getElementById('picture').src") == shown

    @pytest.mark.night  # by day with the mouse
    def test_by_keys_alone(self, browser: Browser, page: View) -> None:
        browser.open(f"{page.url}at/images")
        settle(browser)

        def tab_to(what: str) -> None:
            for _ in range(200):
                if browser.run(f"document.activeElement.matches({what!r})"):
                    return
                browser.press("Tab", 9)
            raise AssertionError(f"Tab does not reach {what}")

        tab_to("#round")
        browser.press("ArrowLeft", 37)
        settle(browser, "round=3")
        assert browser.run("document.activeElement.id") == "round"
        tab_to("#client-0")
        browser.press("ArrowRight", 39)
        assert browser.run("document.activeElement.id") == "client-1"
        browser.press(" ", 32)
        settle(browser, "client=1")
        assert browser.run("document.activeElement.id") == "client-1"  # as it was before
        tab_to('input[name="row"]')
        browser.press("ArrowRight", 39)
        settle(browser, "row=1")
        assert browser.run("document.activeElement.value") == "1"
        tab_to('input[name="explainer"]')
        tab_to("#picture, [aria-label='Maps of relevance']")
        tab_to("#here")
        assert browser.complaints == []

    @pytest.mark.parametrize("width", by_day([390, 1280], [390]))
    def test_nothing_scrolls_sideways(self, browser: Browser, page: View, width: int) -> None:
        kinds = ("images", "numbers", "documents", "trees", "rules")
        for path in ("", *(f"at/{kind}?client=1&against=1" for kind in kinds)):
            browser.open(f"{page.url}{path}", width=width, scheme="dark")
            settle(browser)
            assert browser.run("document.documentElement.scrollWidth") <= width
            images = browser.run("[...document.images].map((i) => [i.naturalWidth, i.alt])")
            assert all(wide > 0 for wide, _ in images)
            assert browser.complaints == []

    def test_what_is_wrong_is_said_and_the_page_stays(self, browser: Browser, page: View) -> None:
        browser.open(f"{page.url}at/images?client=0&client=1&client=2")
        settle(browser)
        browser.run("document.getElementById('client-3').click()")
        settle(browser, "client=3")
        against = "document.querySelector('[name=against]')"
        browser.run(f"{against}.value = 77")
        browser.run(f"{against}.dispatchEvent(new Event('change', {{bubbles: true}}))")
        line = until(lambda: browser.run("document.getElementById('problem')?.textContent"))
        assert line == "against: must be from 0 to 4, not 77"

    def test_a_run_that_goes_on(self, browser: Browser, tmp_path: Path) -> None:
        file = tmp_path / "long.yaml"
        train = {"rounds": 100_000}
        experiment = small_experiment(data=TABLE, partition=FOUR, train=train, name="long")
        file.write_text(experiment.to_yaml())
        command = Command("run", str(file), "--out", str(tmp_path / "runs"))
        try:
            until(lambda: [*tmp_path.glob("runs/long/*/rounds.parts/*.parquet")])
            with closing(fedsim.view(tmp_path / "runs")) as shown:
                (path,) = tmp_path.glob("runs/long/*/")
                browser.open(f"{shown.url}at/long/{path.name}")
                last = "document.getElementById('round')?.max"
                first = int(until(lambda: browser.run(last)))
                assert "still going" in browser.run("document.getElementById('seen').textContent")
                until(lambda: browser.run("document.getElementById('curve') !== null"))
                until(lambda: int(browser.run(last)) > first)
                browser.open(shown.url)
                assert "running" in browser.run("document.body.textContent")
        finally:
            command.terminate()
            command.wait()


def settle(browser: Browser, part: str = "") -> None:
    """Wait until the page is at an address with a part, and nothing is being worked on."""
    done = "!document.querySelector('[data-wait], .busy')"
    until(lambda: browser.run(f"location.href.includes({part!r}) && {done}"))
