"""torchvision is imported beside any build of torch, by anybody."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace

import pytest

from experiments import small_experiment
from fedsim.launch.prepare import prepare
from fedsim.support import torchvision as _torchvision

REGISTRATIONS = "torchvision._meta_registrations"


def test_torchvision_and_zennit_are_imported() -> None:
    assert importlib.import_module("torchvision.datasets").MNIST
    assert importlib.import_module("zennit.composites").EpsilonPlusFlat


def test_a_model_of_ones_own_may_import_it() -> None:
    prepare(small_experiment(model={"name": "own_torchvision_model:resized"}))


@pytest.mark.parametrize("has_operators", [True, False])
def test_registrations_are_left_out_only_where_operators_are_missing(
    has_operators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    extension = SimpleNamespace(_has_ops=lambda: has_operators)
    monkeypatch.setitem(sys.modules, "torchvision.extension", extension)
    found = _torchvision._Registrations().find_spec(REGISTRATIONS, None)
    assert (found is None) == has_operators


def test_the_hook_is_there_once() -> None:
    _torchvision.import_beside_any_torch()
    hooks = [f for f in sys.meta_path if isinstance(f, _torchvision._Registrations)]
    assert len(hooks) == 1
