"""Jobs on a cluster: what is sent, what comes back, and what is said when it does not."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import http.server
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import Command

from experiments import Say, small_experiment, unused_address
from fedsim import load, run
from fedsim.errors import BadInput, RunError, RunFolderError
from fedsim.sweep import pack, submit

# A method of the user's own, which works only where it was sent with its environment.
MINE = """
import os
import time

from fedsim.methods.fedavg import FedAvg


class Mine(FedAvg):
    name: str = "mine:Mine"

    def local_update(self, client, weights):
        assert os.environ["GREETING"] == "hello, world"
        time.sleep(float(os.environ["PAUSE"]))
        return super().local_update(client, weights)
"""
SUBMIT = ("submit", "small.yaml", "method.name=mine:Mine", "--env", "GREETING=hello, world")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory with an experiment in it, and no word of any cluster."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    Path("small.yaml").write_text(small_experiment(train={"rounds": 3}).to_yaml())
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"):
        # Set first, so that what the code under test sets is undone, too.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    # It would turn tokens on for this whole process, if its user has one.
    monkeypatch.setattr(submit, "use_token_if_there", lambda: None)
    return folder


@pytest.fixture
def say(say: Say, here: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Run the command line, in a folder of its own."""
    monkeypatch.chdir(here)
    return say


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, and that the system gives to nobody who asks for any."""
    found: set[int] = set()
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)


@contextmanager
def answering(answers: Mapping[str, Any], slowness: float = 0) -> Iterator[str]:
    """A server that answers paths with JSON, or with bytes of which it sends only the half.

    Args:
        answers: by path; those to what is sent there by method and path. A refusal is its code
            and its words.
        slowness: seconds before it reads what it is sent.
    """

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(answers.get(self.path.partition("?")[0]))

        def do_POST(self) -> None:
            time.sleep(slowness)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.answer(answers.get(f"{self.command} {self.path}"))

        def do_PUT(self) -> None:
            self.do_POST()

        def answer(self, answer: Any) -> None:
            code = 404 if answer is None else 200
            if isinstance(answer, tuple):
                code, answer = answer
            self.send_response(code)
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if isinstance(answer, bytes) else body)

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=[0.02])
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


TOKEN = "0123456789abcdef" * 4
# How a dashboard answers without the right token.
REFUSALS = {
    "missing": (401, "Unauthorized: Missing authentication token"),
    "wrong": (403, "Forbidden: Invalid authentication token"),
}
VERSION = {"/api/version": {"version": "4", "ray_version": "2.60.0", "ray_commit": ""}}


def described(id: str, started: int, **changes: Any) -> dict[str, Any]:
    """A job as a dashboard describes it."""
    about = {"fedsim_kind": "run", "fedsim_name": "small", "fedsim_folder": "~/fedsim-jobs/x"}
    return {
        "type": "SUBMISSION",
        "submission_id": id,
        "status": "SUCCEEDED",
        "entrypoint": "python -m fedsim run small.yaml",
        "start_time": started,
        "end_time": started + 61_000,
        "driver_node_id": "0123",
        "metadata": about,
        **changes,
    }


class TestWhatIsSent:
    def test_the_working_directory_less_what_is_made_or_ignored(self, here: Path) -> None:
        sent = ["mine.py", "data/small.npz", "deep/er/module.py", ".gitignore", "deep/.rayignore"]
        left = [
            *("runs/small/1/manifest.json", ".git/HEAD", ".venv/bin/python", "venv/bin/python"),
            *("deep/__pycache__/module.pyc", "pkg.egg-info/PKG-INFO", "data/large.npz"),
            *("deep/er/notes.txt", "secret.npy", ".env", "deep/.env.local", "my.key", "id_rsa"),
        ]
        for name in [*sent, *left]:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(name)
        Path(".gitignore").write_text("data/*\n!data/small.npz\nsecret.*\n")
        Path("deep/.rayignore").write_text("er/notes.txt\n")
        Path("link").symlink_to(here.parent)
        Path("link.txt").symlink_to(Path("/etc/hostname"))
        files = submit._to_send(here, Path("small.yaml"))
        assert sorted(files.values()) == sorted([*sent, "small.yaml"])
        Path(".rayignore").write_text("!.env\n")  # it is wanted there
        files = submit._to_send(here, Path("small.yaml"))
        assert sorted(files.values()) == sorted([*sent, "small.yaml", ".env", ".rayignore"])

    def test_the_experiment_wherever_it_lies(self, here: Path) -> None:
        Path("runs").mkdir()
        best, outside = Path("runs/best.yaml"), here.parent / "outside.yaml"
        for path in (best, outside):
            path.write_text("name: x")
        assert submit._to_send(here, best)[best.absolute()] == "runs/best.yaml"
        assert submit._to_send(here, outside)[outside] == ".submitted/outside.yaml"
        assert submit._to_send(here, Path("../outside.yaml"))[outside] == ".submitted/outside.yaml"

    def test_too_much_is_refused_before_anybody_is_asked(self, say: Say, here: Path) -> None:
        for name, size in (("data/a", 150), ("data/b", 100), ("notes", 30), ("x", 1), ("y", 2)):
            Path(name).parent.mkdir(exist_ok=True)
            with open(name, "wb") as file:
                file.truncate(size * 10**6)  # with nothing on the disk
        code, _, complaint = say("submit", "small.yaml", "--address", "http://127.0.0.1:9")
        assert code == 2
        assert complaint == (
            f"error: {here}: 283 MB to send, but Ray accepts 105; the largest: data (250 MB), "
            "notes (30 MB), y (2 MB). List what the job does not need in .rayignore; keep data on "
            "the cluster (--env FEDSIM_DATA=…)\n"
        )

    @pytest.mark.parametrize(
        "words", [["small.yaml", "train.particpation=1"], ["missing.yaml"], ["broken.yaml"]]
    )
    def test_a_file_is_refused_as_by_run(self, say: Say, words: list[str]) -> None:
        Path("broken.yaml").write_text("name: broken\nmodel: [\n")
        sent = say("submit", *words, "--address", "http://127.0.0.1:9")
        assert sent == say("run", *words)
        assert sent[0] == 2

    @pytest.mark.parametrize(
        ("section", "kind"), [("", "run"), ("grid: {}", "grid"), ("search: {}", "tune")]
    )
    def test_the_command_follows_from_the_sections(
        self, here: Path, section: str, kind: str
    ) -> None:
        with Path("small.yaml").open("a") as file:
            file.write(section)
        with contextlib.suppress(BadInput):  # of a grid or search without content
            assert submit.check(Path("small.yaml"), []) == (kind, "small")

    @pytest.mark.parametrize(
        ("folder", "word"),
        [("~/jobs/a b", "~/'jobs/a b'"), ("/mnt/a b", "'/mnt/a b'"), ("~/jobs", "~/jobs")],
    )
    def test_home_is_the_clusters(self, folder: str, word: str) -> None:
        assert submit._quote(folder) == word

    def test_a_slow_line_may_take_its_time(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(submit, "TIMEOUT", (0.1, 30.0))
        Path("large").write_bytes(b"x" * 30_000_000)
        answers = {**VERSION, "PUT /api/packages/gcs/large.zip": {}}
        with answering(answers, slowness=0.5) as address:
            upload = submit.Cluster(address)._upload_package
            upload("gcs://large.zip", "large", False, is_file=True)


NO_RAY = "{0}: is not the address of a Ray dashboard; by default, that is http://<head>:8265"
AT_NOBODY = ": no Ray cluster answers there"
TOKENS = (
    "; set RAY_AUTH_TOKEN to it, or RAY_AUTH_TOKEN_PATH to a file that holds it, or put it into "
    "~/.ray/auth_token (`ray get-auth-token` on the head prints it)"
)


class TestAddresses:
    @pytest.mark.parametrize(
        ("answers", "told"),
        [
            *((given, NO_RAY) for given in ({}, {"/api/version": "hello"}, {"/api/version": {}})),
            *(
                ({"/api/version": refusal}, f"{{0}}: the authentication token is {how}{TOKENS}")
                for how, refusal in REFUSALS.items()
            ),
        ],
    )
    def test_who_answers_is_no_dashboard_of_ours(
        self, say: Say, answers: dict[str, Any], told: str
    ) -> None:
        with answering(answers) as address:
            found = say("jobs", "--address", address)
        assert found == (2, "", f"error: {told.format(address)}\n")

    @pytest.mark.parametrize("words", [["jobs"], ["submit", "small.yaml"], ["stop", "x"]])
    def test_nothing_answers(self, say: Say, words: list[str]) -> None:
        address = unused_address()
        told = f"http://{address}: no Ray dashboard answers there (Connection refused)"
        assert say(*words, "--address", address) == (2, "", f"error: {told}\n")

    @pytest.mark.parametrize(
        ("address", "told"),
        [
            (
                "",
                "no cluster given: use --address http://head:8265 (its dashboard), or set R",
            ),
            ("\0", r"http://\x00: is not the address of a Ray dashboard"),
            ("ray://127.0.0.1:99999", f"ray://127.0.0.1:99999{AT_NOBODY}"),
            ("ray://NOBODY", f"ray://NOBODY{AT_NOBODY}"),  # not waited for
            ("RAY_ADDRESS=NOBODY", f"RAY_ADDRESS=NOBODY{AT_NOBODY}"),
        ],
    )
    def test_what_cannot_be_an_address(
        self, say: Say, monkeypatch: pytest.MonkeyPatch, address: str, told: str
    ) -> None:
        nobody = unused_address()
        address = address.replace("NOBODY", nobody)
        words = ["--address", address] if address else []
        if address.startswith("RAY_ADDRESS="):
            monkeypatch.setenv("RAY_ADDRESS", address.partition("=")[2])
            words = []
        code, _, complaint = say("jobs", *words)
        assert code == 2
        assert complaint.startswith(f"error: {told.replace('NOBODY', nobody)}")

    def test_the_option_wins_over_the_variables(
        self, say: Say, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
        with answering({**VERSION, "/api/jobs/": []}) as address:
            assert say("jobs", "--address", address)[:2] == (0, "no jobs\n")
            monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
            assert say("jobs")[:2] == (0, "no jobs\n")


BROKEN = RuntimeError("WebSocket connection closed unexpectedly")


def logs(patch: pytest.MonkeyPatch, *connections: Sequence[str | Exception]) -> None:
    """What the log of a job says in one connection after another."""
    left = iter(connections)

    async def log(*_: object) -> AsyncIterator[str]:
        for said in next(left):
            if isinstance(said, Exception):
                raise said
            yield said

    patch.setattr(submit.Cluster, "tail_job_logs", log)


class TestJobs:
    def test_the_newest_is_first_and_those_of_others_are_left_out(self, say: Say) -> None:
        long = "a-name-that-is-longer-than-many-another-20261121-194859-cc74"
        found = [
            described("old", 1_000_000, status="FAILED"),
            described("somebody-else", 4_000_000, metadata={"name": "x"}),
            {"type": "DRIVER", "job_id": "01", "status": "RUNNING", "entrypoint": "x.py"},
            described(long, 3_000_000, status="RUNNING", end_time=None),
            described("middle", 2_000_000),
        ]
        with answering({**VERSION, "/api/jobs/": found}) as address:
            code, text, _ = say("jobs", "--address", address)
        lines = [line.split() for line in text.splitlines()]
        assert code == 0
        assert [line[0] for line in lines] == ["job", long, "middle", "old"]
        assert lines[2][1:4] == ["run", "small", "succeeded"]
        assert lines[2][-2:] == ["61", "s"]

    def test_one_that_fails(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        end = ["run folder: x\n", "error: no data\n"]
        logs(monkeypatch, end)
        message = "Job entrypoint command failed with exit code 2, last available logs:\n"
        failed = described("x", 0, status="FAILED", message=message + "".join(end))
        lines: list[str] = []
        with answering({**VERSION, "/api/jobs/": [failed]}) as address:
            cluster = submit.Cluster(address)
            with pytest.raises(RunError) as found:
                submit.follow(cluster, submit.find(cluster, "x"), lines.append)
        assert found.value.exit_code == 1
        told = f"job x failed; the end of its log:\n{message}{''.join(end).strip()}"
        assert (str(found.value), lines) == (told, end)

    def test_a_connection_that_breaks_is_made_anew(
        self, here: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What was seen before is not told again."""
        seen = "one\ntwo\n"
        logs(monkeypatch, ["one\n", BROKEN], [seen, BROKEN], [seen, "three\n"])
        lines: list[str] = []
        with answering({**VERSION, "/api/jobs/": [described("x", 0)]}) as address:
            cluster = submit.Cluster(address)
            submit.follow(cluster, submit.find(cluster, "x"), lines.append)
        assert lines == ["one\n", "two\n", "three\n"]

    def test_one_whose_cluster_dies(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        logs(monkeypatch, ["one\n", BROKEN])
        lines: list[str] = []
        with answering({**VERSION, "/api/jobs/": [described("x", 0)]}) as address:
            cluster = submit.Cluster(address)
            job = submit.find(cluster, "x")
        told = f"^{address}: no Ray dashboard answers there .*; a job ends with its cluster$"
        with pytest.raises(RunError, match=told):
            submit.follow(cluster, job, lines.append)
        assert lines == ["one\n"]

    @pytest.mark.parametrize(
        ("words", "changes", "told"),
        [
            *(
                (f"{command} nope", {}, "ADDRESS: has no job 'nope' of fedsim; `fedsim jobs` lists"
                 " its jobs") for command in ("stop", "fetch")
            ),
            ("stop x", {}, "job x has already ended (SUCCEEDED)"),
            (
                "fetch x",
                {"status": "PENDING", "driver_node_id": None},
                "job x has no results: it has not started (PENDING)",
            ),
        ],
    )  # fmt: skip
    def test_what_is_refused(
        self, say: Say, words: str, changes: dict[str, Any], told: str
    ) -> None:
        with answering({**VERSION, "/api/jobs/": [described("x", 0, **changes)]}) as address:
            found = say(*words.split(), "--address", address)
            assert found == (2, "", f"error: {told.replace('ADDRESS', address)}\n")


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """A package with these files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return content.getvalue()


FILES = {f"small/one/{name}": name.encode() * 5000 for name in ("manifest.json", "log.txt")}


class TestFetching:
    """As far as it can be seen without a cluster."""

    @pytest.fixture
    def fetch(self, here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        """Fetch a job whose results are these files into a folder."""

        def fetch(files: Mapping[str, bytes], out: Path, sends: bytes | None = None) -> list[Path]:
            content = tar_of(files)
            sha256 = hashlib.sha256(content).hexdigest()
            packed = contextlib.nullcontext(("package.tar", sha256))
            monkeypatch.setattr(submit, "_packed", lambda *_: packed)
            sent = iter([content if sends is None else sends])
            monkeypatch.setattr(submit.Cluster, "read_log", lambda *_: sent)
            return submit.fetch(submit.Cluster(address), "x", out)

        with answering({**VERSION, "/api/jobs/": [described("x", 0)]}) as address:
            yield fetch

    def test_what_comes_is_what_was_sent_and_nothing_else(
        self, fetch: Any, tmp_path: Path
    ) -> None:
        out = tmp_path / "not" / "there"
        whole = tar_of(FILES)
        for sends in (b"", whole[:20_000], whole[:-1], whole[:600] + b"x" + whole[601:]):
            with pytest.raises(RunError, match="arrived damaged; fetch again"):
                fetch(FILES, out, sends)
            assert not list(out.iterdir())
        assert fetch({**FILES, "mlflow.db": b"logged"}, out) == [out / "small" / "one"]
        for name, content in FILES.items():
            assert (out / name).read_bytes() == content
        (database,) = out.glob("*-mlflow.db")  # beside the runs
        assert database.read_bytes() == b"logged"
        assert set(out.iterdir()) == {out / "small", database}

    @pytest.mark.parametrize("name", ["../outside", "small/../../outside"])
    def test_nothing_lands_outside(self, fetch: Any, tmp_path: Path, name: str) -> None:
        with pytest.raises(RunError, match=r"the package of results is refused: .*outside"):
            fetch({**FILES, name: b"evil"}, tmp_path / "out")
        assert not list((tmp_path / "out").iterdir())
        assert not list(tmp_path.rglob("outside"))

    def test_a_folder_that_was_fetched_before_is_renewed(self, fetch: Any, tmp_path: Path) -> None:
        out = tmp_path / "out"
        fetch(FILES, out)
        later = {"small/one/manifest.json": b"finished", "small/two/log.txt": b"new"}
        assert fetch(later, out) == [out / "small" / "one", out / "small" / "two"]
        assert (out / "small" / "one" / "manifest.json").read_bytes() == b"finished"
        assert not (out / "small" / "one" / "log.txt").exists()
        assert [path.name for path in out.iterdir()] == ["small"]

    @pytest.mark.parametrize("how", ["changed since", "from elsewhere"])
    def test_any_other_is_left_alone(self, fetch: Any, tmp_path: Path, how: str) -> None:
        out = tmp_path / "out"
        mine = out / "small" / "one" / "log.txt"
        if how == "changed since":
            fetch(FILES, out)
        else:
            mine.parent.mkdir(parents=True)
        mine.write_text("mine")
        with pytest.raises(RunFolderError, match=r"small/one: exists, and .* with --out"):
            fetch({**FILES, "small/another/log.txt": b""}, out)
        assert mine.read_text() == "mine"
        assert not (out / "small" / "another").exists()

    def test_the_same_content_is_no_matter(self, fetch: Any, tmp_path: Path) -> None:
        fetch(FILES, tmp_path)
        (tmp_path / "small" / "one" / submit.FETCH_MARK).unlink()
        assert fetch(FILES, tmp_path) == [tmp_path / "small" / "one"]

    def test_a_place_that_cannot_be_written(self, fetch: Any, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(RunFolderError, match=r"file/runs: cannot be written: .*Not a dir"):
            fetch(FILES, tmp_path / "file" / "runs")

    def test_a_full_disk(self, fetch: Any, tmp_path: Path) -> None:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
        try:
            with pytest.raises(
                RunError, match=r"out: the results of job x cannot be written: .*Fi"
            ):
                fetch(FILES, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not list((tmp_path / "out").iterdir())

    @pytest.mark.parametrize("there", [True, False])
    def test_a_transfer_that_breaks_off(self, here: Path, there: bool) -> None:
        file = {"/api/v0/logs/file": b"x" * 10_000} if there else {}
        why = (
            "the transfer was interrupted .*; fetch again" if there else "cannot send the results"
        )
        with answering({**VERSION, **file}) as address, pytest.raises(RunError, match=why):
            list(submit.Cluster(address).read_log("0123", "package.tar"))

    @pytest.mark.parametrize(
        ("status", "log", "code", "complaint"),
        [
            ("RUNNING", '{"package": "x"}\n', 2, "job x has no results yet (SUCCEEDED)"),
            ("FAILED", "", 1, "the results of job x cannot be packed: OSError: disk full"),
            (
                "PENDING",
                "",
                1,
                "nothing starts on the node where job x ran; it may be lost, with the results "
                "(in ~/fedsim-jobs/x)",
            ),
        ],
    )
    def test_what_cannot_be_packed(
        self,
        say: Say,
        monkeypatch: pytest.MonkeyPatch,
        status: str,
        log: str,
        code: int,
        complaint: str,
    ) -> None:
        monkeypatch.setattr(submit, "PATIENCE", 0.0)
        monkeypatch.setattr("secrets.token_hex", lambda _: "00")
        packing = described("fetch-x-00", 1, status=status, message="…\nOSError: disk full")
        answers = {
            "/api/jobs/": [described("x", 0), packing],
            "/api/jobs/fetch-x-00": packing,
            "/api/jobs/fetch-x-00/logs": {"logs": log},
            "POST /api/jobs/": {"job_id": "fetch-x-00", "submission_id": "fetch-x-00"},
            "POST /api/jobs/fetch-x-00/stop": {"stopped": True},
        }
        with answering({**VERSION, **answers}) as address:
            assert say("fetch", "x", "--address", address) == (code, "", f"error: {complaint}\n")
        assert not list(Path("runs").iterdir())


class TestPacking:
    def test_everything_that_is_whole(self, tmp_path: Path) -> None:
        for name in ("small/one/log.txt", "small/one/.manifest.json.part", "small/two/.hidden"):
            (tmp_path / "from" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "from" / name).write_text(name)
        (tmp_path / "from" / "empty").mkdir()
        assert pack.add_files(tmp_path / "from", tmp_path / "package.tar")
        with tarfile.open(tmp_path / "package.tar") as tar:
            packed = {"small/one/log.txt", "small/two/.hidden"}
            assert {m.name for m in tar if not m.isdir()} == packed
            assert "empty" in tar.getnames()

    def test_a_file_that_is_gone_when_its_turn_comes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("a", "b", "c"):
            (tmp_path / name).write_text(name)
        add = tarfile.TarFile.add

        def add_then_remove(tar: Any, path: Path, *words: Any, **options: Any) -> None:
            add(tar, path, *words, **options)
            (tmp_path / "b").unlink(missing_ok=True)

        monkeypatch.setattr(tarfile.TarFile, "add", add_then_remove)
        package = tmp_path.with_name("package.tar")
        assert not pack.add_files(tmp_path, package)
        with tarfile.open(package) as tar:
            assert tar.getnames() == ["a", "c"]
        assert pack.add_files(tmp_path, package)

    def test_the_package_goes_when_the_job_is_stopped(self, tmp_path: Path) -> None:
        """As it is carried out on a cluster: by itself, its log beside the package."""
        (tmp_path / "from" / "x").mkdir(parents=True)
        log, source = tmp_path / "log", Path(pack.__file__).read_text()
        with log.open("w") as file:
            job = subprocess.Popen(
                [sys.executable, "-I", "-c", source, tmp_path / "from", "package.tar"], stdout=file
            )
        try:
            while not log.read_text().endswith("\n"):
                assert job.poll() is None
                time.sleep(0.05)
            said = json.loads(log.read_text())
            content = (tmp_path / "package.tar").read_bytes()
            assert said["package"] == "package.tar"
            assert said["sha256"] == hashlib.sha256(content).hexdigest()
            assert not (tmp_path / "package.tar").stat().st_mode & 0o077
            job.terminate()
            job.wait()
        finally:
            job.kill()
        assert not (tmp_path / "package.tar").exists()


@dataclass
class Head:
    """A cluster of one node, which wants a token."""

    address: str
    environment: dict[str, str]
    folder: Path
    process: subprocess.Popen[bytes]

    def start(self, *words: str, **variables: str) -> Command:
        """Start a command of fedsim's, as its user would on another machine."""
        env = {**self.environment, **variables}
        return Command(*words, "--address", self.address, env=env, complaints_apart=True)

    def say(self, *words: str, **variables: str) -> tuple[object, str, str]:
        """Run a command of fedsim's: exit code, stdout, stderr."""
        command = self.start(*words, **variables)
        text, complaint = command.communicate()
        return command.returncode, text, complaint

    def ask(self, path: str, token: str | None = None) -> Any:
        """What the dashboard says."""
        shown = {"Authorization": f"Bearer {token}"} if token else {}
        request = urllib.request.Request(self.address + path, headers=shown)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def kill(self) -> None:
        """End it as a power failure would."""
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self.process.pid)
            for each in (started, *started.children(recursive=True)):
                each.kill()
        self.process.wait()


def alone() -> None:
    """Prepare a process that a test starts."""
    # As in a shell's background, where Ctrl-C is ignored by all that is started.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It ends with the tests, however they end: prctl(PR_SET_PDEATHSIG, SIGTERM).
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="fedsim-", dir="/tmp"))  # sockets want a short path
    (folder / "home").mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    environment |= {
        "HOME": str(folder / "home"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_TOKEN": TOKEN,
    }
    names = (
        *("dashboard-port", "port", "ray-client-server-port", "dashboard-agent-listen-port"),
        *("dashboard-agent-grpc-port", "runtime-env-agent-port", "node-manager-port"),
        "object-manager-port",
    )
    ports = free_ports(len(names))
    options = [f"--{name}={port}" for name, port in zip(names, ports, strict=True)]
    options += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"]
    options += ["--min-worker-port=0", "--max-worker-port=0", "--num-cpus=1"]
    log = folder / "log"

    def started() -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                    *("--disable-usage-stats", f"--temp-dir={folder / 'ray'}", *options),
                ],
                env={**environment, "RAY_AUTH_MODE": "token", "RAY_TMPDIR": str(folder / "ray")},
                stdout=file,
                stderr=file,
                preexec_fn=alone,
            )

    head = Head(f"http://127.0.0.1:{ports[0]}", environment, folder, started())
    try:
        while "Ray runtime started" not in (told := log.read_text()):
            if head.process.poll() is not None:  # a busy machine takes longer than Ray waits
                assert "timed out during startup" in log.read_text(), told
                head.process = started()
            time.sleep(0.2)
        yield head
        head.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.process.wait(40)
    finally:
        head.kill()
        shutil.rmtree(folder)


def until(command: Command, beginning: str) -> list[str]:
    """What a command prints until a line begins so."""
    lines = []
    for line in command.stdout:
        lines.append(line)
        if line.startswith(beginning):
            return lines
    raise AssertionError("".join(lines))


@pytest.mark.usefixtures("here")
class TestOnACluster:
    """With token authentication, by the commands that a user would give."""

    @pytest.mark.parametrize("how", ["missing", "wrong"])
    def test_it_wants_a_token(self, head: Head, how: str) -> None:
        with pytest.raises(urllib.error.HTTPError) as refused:
            head.ask("/api/version", *([] if how == "missing" else ["f" * 64]))
        assert (refused.value.code, refused.value.read().decode()) == REFUSALS[how]

    @pytest.mark.night  # by day the other one is submitted, with its environment
    def test_a_job_finishes(self, head: Head, tmp_path: Path) -> None:
        Path("mine.py").write_text(MINE)
        # The last is set for the job and, as everywhere, for what connects to the cluster.
        variables = ("--env", "PAUSE=0", "--env", f"PYTHONPATH={tmp_path}")
        code, text, complaint = head.say(*SUBMIT, "engine.kind=ray", "engine.actors=1", *variables)
        assert (code, complaint) == (0, "")
        id = text.split()[1].rstrip(":")
        assert f"job {id}: fedsim run, into ~/fedsim-jobs/{id} on the cluster" in text
        assert "round 3/3" in text
        assert text.endswith(f"  fedsim fetch {id} --address {head.address}\n")
        about = head.ask(f"/api/jobs/{id}", TOKEN)
        assert about["driver_info"], "the run was not on this cluster"

        (there,) = (head.folder / "home" / "fedsim-jobs" / id / "small").iterdir()
        same = small_experiment(train={"rounds": 3})
        assert load(there).result_hash == run(same, tmp_path / "local").result_hash
        assert load(there).manifest["status"] == "finished"

    def test_one_goes_on_without_being_followed_until_it_is_stopped(
        self, head: Head, here: Path
    ) -> None:
        Path("mine.py").write_text(MINE)
        for_long = ("train.rounds=100000", "train.participation=0.1", "checkpoint.every=1")
        command = head.start(*SUBMIT, *for_long, "--env", "PAUSE=0.5")
        id = until(command, "round 2/")[0].split()[1].rstrip(":")
        command.send_signal(signal.SIGINT)
        _, complaint = command.communicate()
        assert command.returncode == 130
        where = f"{id} --address {head.address}"
        assert complaint.endswith(f":\n  fedsim stop {where}\n  fedsim fetch {where}\n")

        code, text, complaint = head.say("fetch", id)
        assert (code, complaint) == (0, "")
        soon = load(text.split()[1])
        assert soon.manifest["status"] == "running"
        assert len(soon.rounds) >= 2
        assert soon.path.parent == here / "runs" / "small"
        while list(head.folder.glob("ray/session_*/logs/*.tar")):
            time.sleep(0.1)  # the package goes, a moment later

        assert head.say("stop", id) == (0, f"stopped: {id}\n", "")
        assert head.ask(f"/api/jobs/{id}", TOKEN)["status"] == "STOPPED"
        (there,) = (head.folder / "home" / "fedsim-jobs" / id / "small").iterdir()
        assert load(there).manifest["status"] == "interrupted"
