"""Which Ray is used, and what is said when it cannot be."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import ray
from ray.exceptions import AuthenticationError

from experiments import unused_address
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


def refusal(monkeypatch: pytest.MonkeyPatch, address: str) -> str:
    """What is said if RAY_ADDRESS is this."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError) as told, connected(None):
        pass
    return str(told.value)


NO_RAY = "no Ray cluster answers there ({})"
ELSEWHERE = (
    "`fedsim run` must run on a machine of the cluster; from elsewhere, use "
    "`fedsim submit FILE --address http://head:8265`"
)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        *(
            (b, NO_RAY.format("another service answers"))
            for b in (b"HTTP/1.1 400 Bad\r\n\r\n", b"")
        ),
        (None, NO_RAY.format("no answer within 0 s")),
        ("nobody", NO_RAY.format("Connection refused")),
        *((word, NO_RAY.format("not of the form host:port")) for word in ("head", "head:port")),
        *((address, ELSEWHERE) for address in ("http://head:8265", "ray://head:10001")),
    ],
)
def test_no_cluster_is_there(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, given: bytes | str | None, told: str
) -> None:
    """Something else answers, nothing does, or it is no address."""
    monkeypatch.setattr(connection, "TIMEOUT", 0.3)
    there = nullcontext(unused_address() if given == "nobody" else given)
    with there if isinstance(given, str) else answering(given) as address:
        assert refusal(monkeypatch, str(address)) == f"RAY_ADDRESS={address}: {told}"
    assert not asked


@pytest.fixture
def word(tmp_path: Path, head: str) -> Path:
    """Word of a cluster, as `ray start` leaves it."""
    word = tmp_path / "ray" / "ray_current_cluster"
    word.parent.mkdir()
    word.write_text(f"{head}\n")
    return word


@pytest.mark.parametrize(
    ("given", "left", "mine", "taken"),
    [
        # By what is given, what was left on this machine, and by whom.
        (None, None, True, "local"),
        ("", None, True, "local"),
        ("local", None, True, "local"),
        ("HEAD", None, True, "HEAD"),
        (None, "HEAD", True, "HEAD"),
        ("", "HEAD", True, "HEAD"),
        ("local", "HEAD", True, "local"),
        (None, "HEAD", False, "local"),
        (None, "", True, "local"),
        (None, "no address", True, "local"),
        (None, "NOBODY", True, "local"),
    ],
)
def test_which_ray_is_used(
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    head: str,
    word: Path,
    given: str | None,
    left: str | None,
    mine: bool,
    taken: str,
) -> None:
    def address(text: str) -> str:
        return {"HEAD": head, "NOBODY": unused_address()}.get(text, text)

    if given is not None:
        monkeypatch.setenv("RAY_ADDRESS", address(given))
    word.write_text(address(left)) if left is not None else word.unlink()
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me if mine else me + 1)
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    lines: list[str] = []
    with connected(None, lines.append):
        pass
    assert asked["address"] == address(taken)
    if taken == "local":
        assert lines == ["starting Ray …"]
    else:
        assert lines == []
        assert asked["runtime_env"]["env_vars"]["MKL_CBWR"] == "AVX2"  # as in this process


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
    word: Path,
    head: str,
    monkeypatch: pytest.MonkeyPatch,
    named: bool,
    error: Exception,
    hint: str,
) -> None:
    monkeypatch.setattr(ray, "init", Mock(side_effect=error))
    assert refusal(monkeypatch, head if named else "") == (
        f"the Ray cluster at {head} refused the connection: {error}{hint}"
        f"{'' if named else PRIVATE}"
    )


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (
            "{tmp}/" + 99 * "x",
            "Ray does not start below .*x: OSError: AF_UNIX path too long; set R",
        ),
        ("/dev/null", "RAY_TMPDIR=/dev/null: no folder can be made there: Not a directory"),
        ("/tmp/" + 300 * "x", "RAY_TMPDIR=/tmp/x*: no folder can be made there: File name too lo"),
        ("{tmp}/nowhere", "RAY_TMPDIR=.*/nowhere: no folder can be made there: No such file or d"),
    ],
)
def test_a_folder_in_which_ray_cannot_be(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str, words: str
) -> None:
    (tmp_path / (99 * "x")).mkdir()
    monkeypatch.setenv("RAY_TMPDIR", folder.format(tmp=tmp_path))
    monkeypatch.setattr(forked_workers, "fork_server", fork_server)  # not that of all tests
    with pytest.raises(ClusterError, match=words) as raised, connected(None):
        pass
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / (99 * "x")).iterdir())


@pytest.mark.parametrize(
    "error", [OSError("AF_UNIX path length"), RuntimeError("no"), ValueError("x"), Exception("y")]
)
def test_what_keeps_ray_from_starting_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(ray, "init", Mock(side_effect=error))
    monkeypatch.setattr(forked_workers, "fork_server", lambda _: nullcontext(""))
    told = refusal(monkeypatch, "")
    assert re.fullmatch(rf"Ray does not start below /.*: .*{error}; .*", told)
