"""What help, completion and training leave alone, because it takes long to import."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import fedsim

HEAVY = {"torch", "ray", "numpy", "pandas", "matplotlib", "sklearn", "yaml", "optuna"}
HEAVY |= {"mlflow", "wandb", "tensorboardX"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> list[set[str]]:
    """What a new process imports for all commands, for experiments, to explain, and to view."""
    program = """
import sys
import fedsim
from typer.main import get_command
from fedsim.cli import app
get_command(app)
print(*sys.modules)
from fedsim.testing import small_experiment
print(*sys.modules)
explain = {"explainers": ["integrated_gradients"], "inputs": 2}
experiment = small_experiment(model={"name": "cnn"}, train={"rounds": 1}, explain=explain)
fedsim.run(experiment, sys.argv[1], progress=False)
print(*sys.modules)
import fedsim.viewer.worker
print(*sys.modules)
"""
    command = [sys.executable, "-c", program, str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_nothing_heavy_is_imported_before_it_is_needed(loaded: list[set[str]]) -> None:
    for_help, for_experiments, to_explain, of_viewer = loaded
    assert "fedsim.cli.runs" in for_help
    assert not HEAVY & for_help
    assert "fedsim.data.sources.images" in for_experiments
    assert not {"torchvision", "sklearn", "PIL", "scipy"} & for_experiments
    # torch.autograd.grad imports sympy to compare shapes, for half a second of each process.
    assert not {"sklearn", "sympy"} & to_explain
    assert "aiohttp" not in of_viewer


def test_every_public_name_is_there() -> None:
    assert dir(fedsim) == sorted(fedsim.__all__)
    assert all(getattr(fedsim, name) is not None for name in fedsim.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'fedsim' has no attribute 'simulate_all'"):
        fedsim.simulate_all  # noqa: B018


def test_the_version_is_that_of_the_package() -> None:
    assert fedsim.__version__ == version("fedsim")
