"""What help, completion and training leave alone, because it takes long to import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import fedsim

HEAVY = {"torch", "ray", "numpy", "pandas", "matplotlib", "sklearn", "omegaconf", "optuna"}
HEAVY |= {"mlflow", "wandb", "tensorboardX"}


@pytest.fixture(scope="module")
def loaded() -> list[set[str]]:
    """What a new process has imported for all commands with their arguments, and for images."""
    program = """
import sys
from typer.main import get_command
from fedsim.cli import app
get_command(app)
print(*sys.modules)
import fedsim.data.sources.images
print(*sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_nothing_heavy_is_imported_before_it_is_needed(loaded: list[set[str]]) -> None:
    for_help, for_images = loaded
    assert "fedsim.cli.runs" in for_help
    assert not HEAVY & for_help
    assert not {"torchvision", "sklearn", "PIL"} & for_images


def test_every_public_name_is_there() -> None:
    assert dir(fedsim) == sorted(fedsim.__all__)
    assert all(getattr(fedsim, name) is not None for name in fedsim.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fedsim' has no attribute 'simulate_all'"):
        fedsim.simulate_all  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    assert fedsim.__version__ == version("fedsim")


def test_training_imports_no_symbolic_mathematics(tmp_path: Path) -> None:
    """As torch.autograd.grad would in each client actor, for a third of a second."""
    program = """
import sys, fedsim
from fedsim.testing import small_experiment
experiment = small_experiment(model={"name": "cnn"}, train={"rounds": 1})
fedsim.run(experiment, sys.argv[1], progress=False)
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)
