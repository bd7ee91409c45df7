"""How much the tests notice: small changes of the package, and how many the suite fails for.

    python tests/mutants.py map MAP [PYTEST ARGUMENTS]  # which test runs which line
    python tests/mutants.py draw MAP > mutants.jsonl    # 300 changes of lines that tests run
    python tests/mutants.py run mutants.jsonl MAP > outcomes.jsonl
    python tests/mutants.py compare before.jsonl after.jsonl

A mutant is killed if a test that runs its line fails, or no longer ends. The map needs pytest-cov
and is of the day's suite; `map MAP -m "night or not night"` makes one of both. Lines that only
other processes run (actors, commands) are not on it.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PACKAGES = "federation,training,methods,explain,results"
SECONDS = 30.0  # of tests of one mutant, as long as they took for the map
PATIENCE = 900.0  # seconds until what waits forever is ended; endless loops end before
IMPORTED = ("torch", "ray", "pandas", "sklearn.ensemble", "matplotlib.pyplot")  # once for all
IGNORED = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", "site")

SWAPPED = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not",
    "is not": "is", "in": "not in", "not in": "in", "+": "-", "-": "+", "*": "/", "/": "*",
    "//": "*", "%": "*", "**": "*", "@": "+", "and": "or", "or": "and", "|": "&", "&": "|",
}  # fmt: skip


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """As a plugin of `map`: how long each test takes."""
    begun = time.perf_counter()
    yield
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    with Path(os.environ["MUTANTS_MAP"], f"seconds{worker}.tsv").open("a") as file:
        file.write(f"{item.nodeid}\t{time.perf_counter() - begun:.3f}\n")


@dataclass(frozen=True, order=True)
class Mutant:
    """A change of one place.

    Attributes:
        path: of the module, from the root.
        line: number, from 1.
        start, end: of what is replaced, in bytes of the file.
        new: what stands there then.
    """

    path: str
    line: int
    start: int
    end: int
    new: str

    def applied(self, source: bytes) -> bytes:
        """The module with the change."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants_of(tree: Path, path: Path) -> Iterator[Mutant]:
    """All mutants of a module."""
    source = path.read_bytes()
    begins = np.cumsum([0, *(len(line) for line in source.splitlines(keepends=True))])
    name = str(path.relative_to(tree))

    def at(line: int, column: int) -> int:
        return int(begins[line - 1]) + column

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    def between(left: ast.expr, right: ast.expr) -> Iterator[Mutant]:
        """The operator between two operands."""
        start, end = span(left)[1], span(right)[0]
        found = re.fullmatch(rb"[\s)]*?(is not|not in|[^\s()]+)[\s(]*", source[start:end])
        operator = found[1].decode() if found else ""
        if found and operator in SWAPPED:
            a, b = found.span(1)
            yield Mutant(name, right.lineno, start + a, start + b, SWAPPED[operator])

    def visit(node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            yield from between(node.left, node.comparators[0])
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, node.right)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], node.values[1])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            start = span(node)[0]
            yield Mutant(name, node.lineno, start, start + 3, "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            other = not node.value if isinstance(node.value, bool) else node.value + 1
            yield Mutant(name, node.lineno, *span(node), repr(other))
        elif isinstance(node, ast.If | ast.IfExp):
            start, end = span(node.test)
            text = source[start:end].decode()
            yield Mutant(name, node.test.lineno, start, end, f"(not ({text}))")
        elif isinstance(node, ast.Raise | ast.AugAssign) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield Mutant(name, node.lineno, *span(node), "pass")
        for field, child in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for each in child if isinstance(child, list) else [child]:
                if isinstance(each, ast.AST):
                    yield from visit(each)

    for mutant in visit(ast.parse(source)):
        try:
            compile(mutant.applied(source), name, "exec")
        except SyntaxError:
            continue
        yield mutant


class Map:
    """Which tests run a line, and how long each takes.

    Args:
        folders: of `map`; a test file that a former one has is not taken from a later one.
        tree: the repository; tests of files that it lacks are left out.
    """

    def __init__(self, folders: list[Path], tree: Path) -> None:
        from coverage import CoverageData

        self._data, self._seconds, known = [], {}, set[str]()
        for folder in folders:
            data = CoverageData(str(folder / ".coverage"))
            data.read()
            tests = {}
            for file in folder.glob("seconds*.tsv"):
                for line in file.read_text().splitlines():
                    test, seconds = line.split("\t")[:2]
                    tests[test] = float(seconds)
            files = {test.partition("::")[0] for test in tests} - known
            known |= files
            files = {file for file in files if (tree / file).exists()}
            taken = {t: s for t, s in tests.items() if t.partition("::")[0] in files}
            paths = {f[f.rindex("/fedsim/") + 1 :]: f for f in data.measured_files()}
            self._data.append((data, paths, taken))
            self._seconds |= taken

    def tests(self, mutant: Mutant) -> list[str]:
        """What may kill a mutant: the tests of its module first, the fast ones first."""
        found = set[str]()
        for data, paths, taken in self._data:
            if mutant.path not in paths:
                continue
            lines = data.contexts_by_lineno(paths[mutant.path])
            contexts = {c.rpartition("|")[0] for c in lines.get(mutant.line, [])} & set(taken)
            if not contexts and mutant.line in lines:  # run by the import alone
                contexts = {c.rpartition("|")[0] for all in lines.values() for c in all}
            found |= contexts & set(taken)
        own = f"test_{Path(mutant.path).stem}.py"
        return sorted(found, key=lambda t: (own not in t, self._seconds[t], t))

    def chosen(self, mutant: Mutant) -> tuple[list[str], float]:
        """The first tests that take no longer than allowed, at least one; and their seconds."""
        total, chosen = 0.0, list[str]()
        for test in self.tests(mutant):
            if chosen and total + self._seconds[test] > SECONDS:
                continue
            total += self._seconds[test]
            chosen.append(test)
        return chosen, total


def draw(tree: Path, known: Map, packages: list[str], count: int, seed: int) -> list[Mutant]:
    """As many mutants of each package, of lines that some test runs."""
    rng, found = np.random.default_rng(seed), list[Mutant]()
    for package in packages:
        paths = sorted((tree / "fedsim" / package).rglob("*.py"))
        every = [mutant for path in paths for mutant in mutants_of(tree, path)]
        drawn = list[Mutant]()
        for k in rng.permutation(len(every)):
            if len(drawn) == count // len(packages):
                break
            if known.tests(every[k]):
                drawn.append(every[k])
        found += sorted(drawn)
    return found


def outcome(mutant: Mutant, tree: Path, tests: list[str], seconds: float) -> tuple[str, str]:
    """What becomes of a mutant in a tree of its own, in a fork of this process."""
    path = tree / mutant.path
    before = path.read_bytes()
    path.write_bytes(mutant.applied(before))
    stamp = time.time_ns() // 10**6 % 10**9  # a cached module is known by whole seconds
    os.utime(path, (stamp, stamp))
    printed = tree / "printed.txt"
    try:
        if not (child := os.fork()):
            _pytest(tree, tests, printed, 90 + 5 * seconds)
        deadline = time.monotonic() + PATIENCE
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.05)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what it has left behind
    finally:
        path.write_bytes(before)
        os.utime(path, (stamp + 1, stamp + 1))
    if os.WIFSIGNALED(ended[1]):
        return "killed", "does not end"
    if ended[1] == 0:
        return "survived", f"{len(tests)} tests"
    text = printed.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.M)
    return "killed", failed[1] if failed else text[-200:].replace("\n", " ")


def _pytest(tree: Path, tests: list[str], printed: Path, seconds: float) -> None:
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds)))
    handle = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(handle, stream)
    code: int = 1
    try:
        os.chdir(tree)
        sys.path[:0] = [str(tree)]
        os.environ |= {"PYTHONPATH": str(tree)}
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = folder
            options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
            options += ["-m", "night or not night", f"--basetemp={folder}/t"]
            code = int(pytest.main([*options, *tests]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def read(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=Path(), help="the repository")
    what = parser.add_subparsers(dest="what", required=True)
    one = what.add_parser("map")
    one.add_argument("map", type=Path)
    one.add_argument("arguments", nargs=argparse.REMAINDER)
    one = what.add_parser("draw")
    one.add_argument("map", type=Path, nargs="+")
    one.add_argument("--packages", default=PACKAGES)
    one.add_argument("--count", type=int, default=300)
    one.add_argument("--seed", type=int, default=0)
    one = what.add_parser("run")
    one.add_argument("mutants", type=Path)
    one.add_argument("map", type=Path, nargs="+", help="newer ones first")
    one.add_argument("--part", default="1/1", help="such as 1/2")
    one = what.add_parser("compare")
    one.add_argument("before", type=Path)
    one.add_argument("after", type=Path)
    options = parser.parse_args()
    tree = options.tree.resolve()
    if options.what == "map":
        make_map(tree, options.map.resolve(), options.arguments)
    elif options.what == "draw":
        packages = options.packages.split(",")
        for mutant in draw(tree, Map(options.map, tree), packages, options.count, options.seed):
            print(json.dumps(astuple(mutant)))
    elif options.what == "run":
        part, parts = map(int, options.part.split("/"))
        mutants = [Mutant(*row) for row in read(options.mutants)[part - 1 :: parts]]
        run(tree, mutants, Map(options.map, tree))
    else:
        compare(options.before, options.after)


def make_map(tree: Path, folder: Path, arguments: list[str]) -> None:
    folder.mkdir(parents=True)
    settings = folder / "coverage.ini"
    settings.write_text(f"[run]\nsource = {tree}/fedsim\ndata_file = {folder}/.coverage\n")
    here = os.pathsep.join((str(tree), str(Path(__file__).parent)))
    os.environ |= {"PYTHONPATH": here, "MUTANTS_MAP": str(folder)}
    os.chdir(tree)
    command = (
        f"-m pytest -p mutants --cov --cov-context=test --cov-config={settings} --cov-report="
    )
    os.execv(sys.executable, [sys.executable, *command.split(), *arguments])


def run(tree: Path, mutants: list[Mutant], known: Map) -> None:
    for module in IMPORTED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder, "tree")
        shutil.copytree(tree, copy, ignore=IGNORED)
        for mutant in mutants:
            tests, seconds = known.chosen(mutant)
            found = outcome(mutant, copy, tests, seconds) if tests else ("survived", "no test")
            print(json.dumps([*astuple(mutant), *found]), flush=True)


def compare(before: Path, after: Path) -> None:
    """How many each suite kills; and which only one of them kills."""
    one, other = ({tuple(row[:5]): row[5:] for row in read(path)} for path in (before, after))
    for name, found in (("before", one), ("after", other)):
        counts = Counter((key[0].split("/")[1], state[0]) for key, state in found.items())
        print(name, dict(sorted(counts.items())))
    for key in sorted(one.keys() & other.keys()):
        if one[key][0] != other[key][0]:
            print(f"{one[key][0]} -> {other[key][0]}", *key, *one[key][1:], *other[key][1:])


if __name__ == "__main__":
    main()
