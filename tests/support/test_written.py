"""Where a person has something written: what is there and no file is written to, or refused."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from refusals import EXPERIMENT

from experiments import Say, by_day
from fedsim import Run
from fedsim.data.labels import FORMATS
from fedsim.results.figures.look import Drawing
from fedsim.support import atomic


def put(path: Path) -> None:
    with atomic.named(path) as aside:
        aside.write_bytes(b"new")


def text_of(path: Path, act: Callable[[], object]) -> bytes:
    """What comes out of a pipe while something is done."""
    os.mkfifo(path)
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(handle, True)
    parts: list[bytes] = []

    def read() -> None:
        with os.fdopen(handle, "rb") as pipe:
            parts.append(pipe.read())

    # Kept open, so that the reader waits for the writer.
    writer = os.open(path, os.O_WRONLY)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        act()
    finally:
        os.close(writer)
        reader.join()
    assert path.is_fifo()
    return parts[0]


@pytest.fixture
def terminal() -> Iterator[tuple[int, Path]]:
    """A character device: what is written to it, and its path."""
    ours, theirs = os.openpty()
    yield ours, Path(os.ttyname(theirs))
    os.close(ours)
    os.close(theirs)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    target, link, dangling = tmp_path / "deep" / "target", tmp_path / "link", tmp_path / "dangling"
    target.write_text("old")
    link.symlink_to("deep/target")
    dangling.symlink_to("deep/missing")
    for path in (link, dangling):
        put(path)
        assert path.is_symlink()
        assert path.read_text() == "new"
    assert target.read_text() == "new"
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"target", "missing"}


def test_a_pipe_and_a_device_are_written_to(tmp_path: Path, terminal: tuple[int, Path]) -> None:
    assert text_of(tmp_path / "pipe", lambda: put(tmp_path / "pipe")) == b"new"
    ours, device = terminal
    put(device)
    assert os.read(ours, 10) == b"new"
    assert device.is_char_device()


def kept_of(path: Path) -> tuple[int, ...]:
    """What a failed write must not change; looking at a link changes the time of its last use."""
    status = path.lstat()
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (os.mkfifo, "nobody reads from this pipe"),
        (Path.mkdir, "Is a directory"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to(path.parent / "no" / "x"), "No such file or directory"),
        (lambda path: path.symlink_to("/proc/version"), "denied|not permitted|No such file"),
    ],
)
def test_what_cannot_be_written_is_left(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    path = tmp_path / "there"
    make(path)
    before = kept_of(path)
    with pytest.raises(OSError, match=words) as raised:
        put(path)
    assert raised.value.filename == str(path)
    assert kept_of(path) == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("make", [lambda path: None, Path.touch, os.mkfifo])
@pytest.mark.parametrize(
    ("inner", "named_after_it"),
    [
        (FileNotFoundError(errno.ENOENT, "missing", "other.csv"), False),
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (ValueError("mine"), False),
    ],
)
def test_an_error_of_the_block(
    tmp_path: Path, make: Callable[[Path], None], inner: Exception, named_after_it: bool
) -> None:
    path = tmp_path / "there"
    make(path)
    before = list(tmp_path.iterdir())
    with pytest.raises(type(inner)) as raised, atomic.named(path):
        raise inner
    assert (raised.value is not inner) == named_after_it
    if named_after_it:
        assert (raised.value.filename, raised.value.strerror) == (str(path), inner.strerror)
    assert list(tmp_path.iterdir()) == before


def test_a_block_that_writes_nothing_leaves_no_pipe_open(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError), atomic.named(tmp_path / "pipe"):
        pass
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(reader)


def test_commands(
    say: Say, finish: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drawing, "svg", lambda drawing: "")  # pages are not drawn
    done = finish(train={"rounds": 1})
    Path("small.yaml").write_text(EXPERIMENT)
    for words in (
        ["report", str(done.path), "--out"],
        ["report", str(done.path), "--csv"],
        ["report", str(done.path), "--latex"],
        ["pack", str(done.path), "--out"],
        ["data", "small.yaml", "--picture"],
        ["explain", str(done.path), "--explainer", "gradient", "--row", "0", "--out"],
    ):
        ending = {"pack": "zip", "data": "svg", "explain": "svg"}.get(words[0], "txt")
        name = f"{words[0]}{words[-1]}.{ending}"
        link, pipe = tmp_path / f"link-{name}", tmp_path / f"pipe-{name}"
        link.symlink_to(f"target-{name}")
        code, _, told = say(*words, str(link))
        assert code == 0, told
        assert link.is_symlink()
        content = link.read_bytes()
        assert content
        codes: list[int] = []
        piped = text_of(pipe, lambda: codes.append(say(*words, str(pipe))[0]))  # noqa: B023
        assert codes == [0]
        assert len(piped) > len(content) / 2
        code, _, told = say(*words, str(pipe))
        assert (code, told) == (
            1,
            f"error: {pipe}: cannot be written: nobody reads from this pipe\n",
        )
        assert pipe.is_fifo()


@pytest.mark.parametrize("ending", by_day([*FORMATS, "PNG"], ["PNG", "svg", "webp"]))
def test_a_picture_of_every_format(say: Say, ending: str) -> None:
    Path("small.yaml").write_text(EXPERIMENT)
    code, _, told = say("data", "small.yaml", "--picture", f"labels.{ending}")
    assert code == 0, told
    assert Path(f"labels.{ending}").stat().st_size > 100
