"""What an installation refuses, and what it brings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from fedsim import __version__

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NEEDED = PROJECT["requires-python"].removeprefix(">=")
REQUIREMENTS = [
    requirement
    for group in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in map(Requirement, group)
    if requirement.name != "fedsim"
]


def python(path: Path, version: tuple[int, ...]) -> Path:
    """This Python, which says that it is of another version and can only run `-c`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    code = f"import sys; sys.version_info = {version}; exec(sys.argv[2])"
    path.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{code}' \"$@\"\n")
    path.chmod(0o755)
    return path


class TestMake:
    def quickstart(self, folder: Path, python: Path | str) -> subprocess.CompletedProcess[str]:
        assigned = [f"VENV={folder / 'venv'}", f"PYTHON={python}"]
        # Of the make that runs the tests, which would make this one name its folder.
        inherited = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES")
        environment = {k: v for k, v in os.environ.items() if k not in inherited}
        command = ["make", "quickstart", *assigned]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    @pytest.mark.parametrize("version", [(2, 7, 18), (3, 6, 15), (3, 10, 13), (3, 11, 3)])
    def test_an_old_python_is_named_before_anything_is_installed(
        self, version: tuple[int, ...], tmp_path: Path
    ) -> None:
        done = self.quickstart(tmp_path, python(tmp_path / "python3", version))
        assert done.returncode == 2
        (told,) = (line for line in done.stderr.splitlines() if not line.startswith("make"))
        assert told.startswith(f"error: fedsim needs Python {NEEDED} or newer, and ")
        assert f" is Python {'.'.join(map(str, version))}; " in told
        assert told.endswith("make quickstart PYTHON=python3.11")
        assert not done.stdout
        assert not (tmp_path / "venv").exists()

    def test_an_environment_of_an_old_python_is_not_taken(self, tmp_path: Path) -> None:
        python(tmp_path / "venv" / "bin" / "python", (3, 10, 13))
        done = self.quickstart(tmp_path, sys.executable)
        assert done.returncode == 2
        assert "is Python 3.10.13; " in done.stderr
        assert f"delete an old {tmp_path / 'venv'}" in done.stderr
        assert not done.stdout

    @pytest.mark.parametrize("page", ["README.md", "Makefile"])
    def test_pages_name_the_python_that_is_needed(self, page: str) -> None:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert set(re.findall(r"Python (3[\d.]+\d) or newer", text)) == {NEEDED}


def test_a_folder_of_that_name_hides_nothing(tmp_path: Path) -> None:
    """As the folder that holds the clone has one."""
    (tmp_path / "fedsim" / "fedsim").mkdir(parents=True)
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, "-c", "import fedsim; print(fedsim.__version__)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{__version__}\n", done.stderr


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=lambda requirement: requirement.name)
def test_floors(requirement: Requirement) -> None:
    """Each direct dependency has one, at most as high as what fedsim is tested with."""
    (floor,) = requirement.specifier
    assert floor.operator == ">="
    pins = dict(re.findall(r"^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))
    tested = {name.lower(): Version(version) for name, version in pins.items()}
    if requirement.name != "wandb":  # tests have a stand-in
        assert Version(floor.version) <= tested[requirement.name.lower()]
