"""Which Ray is used, and what is said when it cannot be."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import AuthenticationError

from fedsim.cluster import connection, forked_workers
from fedsim.cluster.connection import connected
from fedsim.cluster.forked_workers import fork_server
from fedsim.errors import ClusterError

TOKEN = (
    "\n(if the cluster uses token authentication, set RAY_AUTH_MODE=token, and its token in "
    "RAY_AUTH_TOKEN or ~/.ray/auth_token)"
)
PRIVATE = "\n(to start a private Ray instead, set RAY_ADDRESS=local)"


@pytest.fixture(autouse=True)
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What Ray is asked for; no cluster is known yet."""
    asked: dict[str, Any] = {}
    monkeypatch.setattr(ray, "init", lambda **given: asked.update(given))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return asked


@contextmanager
def answering(answer: bytes | None) -> Iterator[str]:
    """The address of something that takes connections, and says this to each, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            held = []
            with suppress(OSError):  # the server is closed
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    if answer is not None:
                        connection.recv(64)
                        connection.sendall(answer)
                        connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def head() -> Iterator[str]:
    """The address of something that answers as the head of a cluster does."""
    with answering(b"\0\0\x12\x04\0\0\0\0\0" + bytes(18)) as address:
        yield address


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another service answers"),
        (b"", "another service answers"),
        (None, "no answer within 0 s"),
    ],
)
def test_something_answers_that_is_no_ray(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, answer: bytes | None, reason: str
) -> None:
    monkeypatch.setattr(connection, "TIMEOUT", 0.3)
    with answering(answer) as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ClusterError) as told, connected(None):
            pass
    assert str(told.value) == f"RAY_ADDRESS={address}: no Ray cluster answers there ({reason})"
    assert not asked


@pytest.fixture
def gone() -> str:
    """An address where nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def word(tmp_path: Path, head: str) -> Path:
    """Word of a cluster, as `ray start` leaves it."""
    word = tmp_path / "ray" / "ray_current_cluster"
    word.parent.mkdir()
    word.write_text(f"{head}\n")
    return word


@pytest.mark.parametrize("given", [None, "", "local"])
def test_a_private_one(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    if given is not None:
        monkeypatch.setenv("RAY_ADDRESS", given)
    lines: list[str] = []
    with connected(None, lines.append):
        pass
    assert asked["address"] == "local"
    assert lines == ["starting Ray …"]


def test_the_one_that_is_named(
    asked: dict[str, Any], head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", head)
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    lines: list[str] = []
    with connected(None, lines.append):
        pass
    assert asked["address"] == head
    assert lines == []
    assert asked["runtime_env"]["env_vars"]["MKL_CBWR"] == "AVX2"  # as in this process


@pytest.mark.usefixtures("word")
class TestOnThisMachine:
    @pytest.mark.parametrize("given", [None, ""])
    def test_ones_own(
        self,
        asked: dict[str, Any],
        head: str,
        monkeypatch: pytest.MonkeyPatch,
        given: str | None,
    ) -> None:
        if given is not None:
            monkeypatch.setenv("RAY_ADDRESS", given)
        with connected(None):
            pass
        assert asked["address"] == head

    def test_not_when_a_private_one_is_wanted(
        self, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", "local")
        with connected(None):
            pass
        assert asked["address"] == "local"

    def test_not_somebody_elses(
        self, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        me = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: me + 1)
        with connected(None):
            pass
        assert asked["address"] == "local"

    @pytest.mark.parametrize("content", ["", "no address", "{gone}"])
    def test_not_one_that_is_gone(
        self, asked: dict[str, Any], word: Path, gone: str, content: str
    ) -> None:
        word.write_text(content.format(gone=gone))
        with connected(None):
            pass
        assert asked["address"] == "local"


@pytest.mark.parametrize("given", ["http://head:8265", "ray://head:10001"])
def test_from_elsewhere(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", given)
    with pytest.raises(ClusterError) as told, connected(None):
        pass
    assert str(told.value) == (
        f"RAY_ADDRESS={given}: `fedsim run` must run on a machine of the cluster; from "
        "elsewhere, use `fedsim submit FILE --address http://head:8265`"
    )
    assert not asked


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("{gone}", "Connection refused"),
        ("head", "not of the form host:port"),
        ("head:port", "not of the form host:port"),
    ],
)
def test_nothing_answers(
    asked: dict[str, Any], gone: str, monkeypatch: pytest.MonkeyPatch, given: str, reason: str
) -> None:
    address = given.format(gone=gone)
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError) as told, connected(None):
        pass
    assert str(told.value) == f"RAY_ADDRESS={address}: no Ray cluster answers there ({reason})"
    assert not asked


@pytest.mark.usefixtures("word")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (ConnectionError("Failed to connect to Ray cluster"), TOKEN),
        (AuthenticationError("no authentication token was found"), TOKEN),
        (RuntimeError("Version mismatch"), ""),
    ],
)
def test_it_does_not_let_us_in(
    head: str, monkeypatch: pytest.MonkeyPatch, named: bool, error: Exception, hint: str
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", refuse)
    if named:
        monkeypatch.setenv("RAY_ADDRESS", head)
    with pytest.raises(ClusterError) as told, connected(None):
        pass
    assert str(told.value) == (
        f"the Ray cluster at {head} refused the connection: {error}{hint}"
        f"{'' if named else PRIVATE}"
    )


LONG = "/tmp/" + 127 * "x"


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (
            LONG,
            "Ray does not start below /tmp/x*: OSError: AF_UNIX path too long; set RAY_",
        ),
        ("/dev/null", "RAY_TMPDIR=/dev/null: no folder can be made there: Not a directory"),
        (
            "/tmp/" + 300 * "x",
            "RAY_TMPDIR=/tmp/x*: no folder can be made there: File name too long",
        ),
        ("/proc", "RAY_TMPDIR=/proc: no folder can be made there: "),
        (
            "{tmp}/nowhere",
            "RAY_TMPDIR=.*/nowhere: no folder can be made there: No such file or di",
        ),
    ],
)
def test_a_folder_in_which_ray_cannot_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, words: str
) -> None:
    folder = folder.format(tmp=tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", folder)
    made = folder == LONG
    if made:
        Path(folder).mkdir(exist_ok=True)
    monkeypatch.setattr(forked_workers, "fork_server", fork_server)  # not that of all tests
    try:
        with pytest.raises(ClusterError, match=words) as raised, connected(None):
            pass
    finally:
        if made:
            assert not list(Path(folder).iterdir())
            Path(folder).rmdir()
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "error", [OSError("AF_UNIX path length"), RuntimeError("no"), ValueError("x"), Exception("y")]
)
def test_what_keeps_ray_from_starting_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(forked_workers, "fork_server", lambda _: nullcontext(""))
    with (
        pytest.raises(ClusterError, match=rf"^Ray does not start below /.*: .*{error}; "),
        connected(None),
    ):
        pass
