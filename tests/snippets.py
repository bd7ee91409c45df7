"""The snippets of a page, run in order in a folder of their own, as a reader would.

What a fence says decides what is done with a snippet:

- `yaml` and `python` with a title are written to that file; a file may be written again;
- `yaml` without one must be sections of an experiment; `python` without one runs, all of a page in
  one namespace;
- `console` has commands of fedsim, which run in this process; `sh` has others, or some that need a
  cluster: those of fedsim must be commands that there are;
- `text` is what the snippet before it prints, line by line; `...` is any lines. Numbers must be
  right as well: counts and sizes anywhere, all digits and hashes where this machine rounds as the
  one that printed the pages (`rounds_alike`). Times and the names of runs are not compared.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import shlex
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
import yaml

from fedsim import Experiment, run
from fedsim.cli import app, main

ROOT = Path(__file__).parents[1]
FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^ *```$',
    re.MULTILINE | re.DOTALL,
)
HASH = re.compile(r"\b[0-9a-f]{16}\b")
NUMBER = re.compile(rf"{HASH.pattern}|[-+−]?\d[\d.,]*(?:e[-+]?\d+)?(?: [kMGT]?B\b)?")
OF_A_RUN = re.compile(r"\b\d{8}-\d{6}-\w{4}\b|\b[\d.]+(?= (?:rounds/)?s$)")  # names, times, rates
USUAL = {"experiments", "cluster", "Makefile"}  # of the repository, which readers have


@dataclass(frozen=True)
class Snippet:
    language: str
    title: str | None
    text: str
    line: int


PAGE = "page"  # the module of a page's snippets without a title
QUICKSTART: list[str] = []  # its result hash here, as a page has printed it
END = Snippet("", None, "", 0)


def snippets(page: str) -> Iterator[Snippet]:
    for found in FENCE.finditer(page):
        line = page[: found.start()].count("\n") + 1
        text = textwrap.dedent(found["text"])
        yield Snippet(found["language"], found["title"], text, line)


def run_page(page: Path, folder: Path) -> None:
    """Run a page's snippets in a folder; AssertionError with the line of one that fails."""
    for name in USUAL:
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    runner = _Runner(folder)
    try:
        with contextlib.chdir(folder):
            for snippet in [*snippets(page.read_text(encoding="utf-8")), END]:
                try:
                    runner.run(snippet)
                except Exception as error:
                    raise AssertionError(f"{page}:{snippet.line}: {error}") from error
    finally:
        sys.modules.pop(PAGE, None)
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(f"{folder}/"):
                del sys.modules[name]


class _Runner:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        sys.modules[PAGE] = ModuleType(PAGE)  # so that classes are found, as those of cells are
        self.names: dict[str, Any] = sys.modules[PAGE].__dict__
        self.printed = ""
        self.refused = ""  # a command, which a page must show to be

    def run(self, snippet: Snippet) -> None:
        assert not self.refused or snippet.text.startswith("error: "), self.refused
        self.refused = ""
        match snippet.language, snippet.title:
            case "yaml" | "python", str(title):
                (self.folder / title).write_text(snippet.text, encoding="utf-8")
            case "yaml", None:
                known = {*Experiment.model_fields, "grid", "search"}
                unknown = set(yaml.safe_load(snippet.text)) - known
                assert not unknown, f"no sections of an experiment: {unknown}"
            case "", None:
                pass
            case "python", None:
                self.printed = self.execute(snippet)
            case "console", None:
                self.printed = "".join(map(self.command, snippet.text.splitlines()))
            case "text", None:
                assert_printed(snippet.text, self.printed)
            case "sh", None:
                check_shell(snippet.text)
            case other:
                raise ValueError(f"nobody knows what to do with {other}")

    def execute(self, snippet: Snippet) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), own_modules(self.folder):
            exec(compile(snippet.text, "<snippet>", "exec"), self.names)
        return printed.getvalue()

    def command(self, line: str) -> str:
        """What a command prints; an error is part of it, if it is meant for a person."""
        program, *words = shlex.split(line, comments=True)
        assert program == "fedsim", line
        for k, word in enumerate(words):  # as a shell would
            if "*" in word:
                found = sorted(str(p.relative_to(self.folder)) for p in self.folder.glob(word))
                assert found, f"{line}: there is no {word}"
                words[k : k + 1] = found
        if words[0] == "run" and "engine." not in line:  # the result does not depend on it
            words.append("engine.kind=local")
        printed = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            own_modules(self.folder),
        ):
            patch.setattr(sys, "argv", ["fedsim", *words])
            try:
                main()
            except SystemExit as left:
                code = left.code
            except Exception:
                raise AssertionError(f"{line}:\n{traceback.format_exc()}") from None
        text = printed.getvalue()
        if line == "fedsim run experiments/quickstart.yaml":
            QUICKSTART[:] = re.findall(rf"^result hash +({HASH.pattern})$", text, re.M)
        if code == 2 and text.startswith("error: "):
            self.refused = f"{line}: {text}"
        else:
            assert not code, f"{line}: exit code {code}:\n{text}"
        return text


@contextlib.contextmanager
def own_modules(folder: Path) -> Iterator[None]:
    """Within, modules of the folder are found, as those beside a script are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        yield


def assert_printed(text: str, printed: str) -> None:
    """Insist that each line of a text was printed, in order."""
    lines = iter(printed.splitlines())
    for line in filter(None, text.splitlines()):
        assert line == "..." or any(agree(line, other) for other in lines), (
            f"not printed: {line!r}\n{printed}"
        )


def agree(shown: str, printed: str) -> bool:
    """Whether a line is the one that a page shows: its words, and its numbers."""
    shown, printed = (OF_A_RUN.sub("#", " ".join(line.split())) for line in (shown, printed))
    if shown == printed:
        return True
    if NUMBER.sub("#", shown) != NUMBER.sub("#", printed):
        return False
    pairs = zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True)
    return all(a == b or differs_by_rounding(a, b) for a, b in pairs) and not rounds_alike()


def differs_by_rounding(shown: str, printed: str) -> bool:
    """Whether the arithmetic of two machines may explain it: never of a count, or of a size."""
    if HASH.fullmatch(shown):
        return True
    if shown.endswith("B") or "." not in shown.rstrip(".,"):
        return False
    a, b = (float(n.rstrip(".,").replace(",", "").replace("−", "-")) for n in (shown, printed))
    return math.isclose(a, b, rel_tol=0.03, abs_tol=0.03)


@cache
def rounds_alike() -> bool:
    """Whether this machine comes to the result hash of the quickstart that the README shows."""
    if not QUICKSTART:
        file = ROOT / "experiments" / "quickstart.yaml"
        with tempfile.TemporaryDirectory() as folder:
            QUICKSTART.append(
                run(Experiment.load(file, ["engine.kind=local"]), folder).result_hash
            )
    return f"result hash               {QUICKSTART[0]}\n" in (ROOT / "README.md").read_text(
        "utf-8"
    )


def check_shell(text: str) -> None:
    """Insist that the commands of fedsim in shell lines are known, with their options."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for found in re.findall(r"^fedsim .*?(?=$|[;&|>])", text, re.MULTILINE):
        name, *words = shlex.split(found, comments=True)[1:]
        if name.startswith("-"):
            continue
        assert name in commands, f"no such command: {found}"
        options = {option for p in commands[name].params for option in p.opts}
        unknown = {w for w in words if w.startswith("--")} - options
        assert not unknown, f"no such options: {unknown}"


if __name__ == "__main__":  # python tests/snippets.py docs/gallery.md FOLDER
    run_page(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
