"""Examples in docstrings of what users extend run as they stand."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import nn

from experiments import run_example
from fedsim import Dataset, compare
from fedsim.cli.schema import experiment_schema
from fedsim.conditions.adversaries import Attack
from fedsim.conditions.aggregators import Aggregator
from fedsim.explain import groups
from fedsim.explain.scores import faithfulness, relevance
from fedsim.federation import client_function
from fedsim.federation.reduction import NothingToReduce, Reduction
from fedsim.federation.wire import to_arrays
from fedsim.objectives import Metric, Objective
from fedsim.testing import (
    check_method,
    check_model,
    check_objective,
    check_partition,
    small_experiment,
)

KNOWN = {"np": np, "nn": nn, "Metric": Metric, "to_arrays": to_arrays}
CHECKS = (check_method, check_model, check_objective, check_partition, small_experiment)
KNOWN |= {"Dataset": Dataset, "NothingToReduce": NothingToReduce}


@pytest.mark.parametrize("module", [faithfulness, groups, relevance])
def test_examples_of_modules_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize(
    "documented",
    [
        *(Objective, Reduction, client_function, compare, experiment_schema, Dataset.of),
        *(Aggregator, Attack, *CHECKS),
    ],
)
def test_examples_run(documented: Callable[..., Any]) -> None:
    run_example(documented, **{**KNOWN, documented.__name__: documented})
