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
        assert refusal(monkeypatch, address) == (
            f"RAY_ADDRESS={address}: no Ray cluster answers there ({reason})"
        )
    assert not asked


def refusal(monkeypatch: pytest.MonkeyPatch, address: str) -> str:
    """What is said if RAY_ADDRESS is this."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ClusterError) as told, connected(None):
        pass
    return str(told.value)


def unused() -> str:
    """An address where nothing answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        *(
            (address, f"no Ray cluster answers there ({reason})")
            for address, reason in [
                ("nobody", "Connection refused"),
                ("head", "not of the form host:port"),
                ("head:port", "not of the form host:port"),
            ]
        ),
        *(
            (
                address,
                "`fedsim run` must run on a machine of the cluster; from elsewhere, use "
                "`fedsim submit FILE --address http://head:8265`",
            )
            for address in ("http://head:8265", "ray://head:10001")
        ),
    ],
)
def test_no_cluster_is_there(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, given: str, told: str
) -> None:
    address = unused() if given == "nobody" else given
    assert refusal(monkeypatch, address) == f"RAY_ADDRESS={address}: {told}"
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
        return {"HEAD": head, "NOBODY": unused()}.get(text, text)

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
    monkeypatch.setattr(ray, "init", Mock(side_effect=error))
    monkeypatch.setattr(forked_workers, "fork_server", lambda _: nullcontext(""))
    told = refusal(monkeypatch, "")
    assert re.fullmatch(rf"Ray does not start below /.*: .*{error}; .*", told)
