"""Experiments whose sections are Python objects."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import own_metrics
import own_objects
import pytest
import yaml
from own_components import MultiLabel, Tagged

from experiments import small_experiment
from fedsim import Dataset, Experiment, grid, load, replay, resume, run, tune
from fedsim.config.file import RawConfig, to_yaml
from fedsim.data import load_dataset
from fedsim.data.dataset import Scaling
from fedsim.errors import BadInput, DataError, ExperimentError
from fedsim.experiment import plain
from fedsim.methods.fedavg import FedAvg
from fedsim.training import Train

OBJECTS: dict[str, Any] = {
    "partition": own_objects.Halves(),
    "model": partial(own_objects.Net, width=4),
    "method": own_objects.Plain(strength=0.25),
    "train": {"rounds": 3},
    "engine": {"kind": "local"},
}


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def test_a_run_of_objects_is_the_run_of_their_names(tmp_path: Path) -> None:
    made = Experiment(data=own_objects.data(), **OBJECTS)
    names = Experiment.from_dict(
        {
            **OBJECTS,
            "data": {"name": "own_objects:data"},
            "partition": {"kind": "own_objects:Halves"},
            "model": {"name": "own_objects:Net", "width": 4},
            "method": {"name": "own_objects:Plain", "strength": 0.25},
        }
    )
    assert made.method == names.method
    assert made.model == names.model
    assert made.partition == names.partition
    done = run(made, tmp_path)
    assert done.result_hash == run(names, tmp_path).result_hash
    assert load(done.path).experiment == made
    assert replay(done, 2).state.weights.size == 4 * 6 + 2 * 5


@pytest.mark.parametrize(
    ("section", "given", "name"),
    [
        ("model", own_objects.net, "own_objects:net"),
        ("model", own_objects.Net, "own_objects:Net"),
        ("method", own_objects.Plain, "own_objects:Plain"),
        ("method", FedAvg(), "fedavg"),
        ("data", own_objects.data, "own_objects:data"),
        ("data", Tagged(samples=50), "own_components:Tagged"),
        ("objective", MultiLabel, "own_components:MultiLabel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_section_can_be(section: str, given: Any, name: str) -> None:
    assert getattr(Experiment.from_dict({**SMALL, section: given}), section).name == name


SMALL = small_experiment().model_dump(mode="json")


class TestNotebooks:
    """What is defined in a cell or a script is of the module `__main__`."""

    @pytest.fixture
    def cell(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        main = ModuleType("__main__")
        vars(main)["Cell"] = type("Cell", (FedAvg,), {"__module__": "__main__"})
        monkeypatch.setitem(sys.modules, "__main__", main)
        return vars(main)["Cell"]

    def test_it_runs_in_this_process(
        self, cell: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        done = run(
            Experiment.from_dict({**SMALL, "method": cell(), "train": {"rounds": 1}}), tmp_path
        )
        assert type(load(done.path).experiment.method) is cell
        monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # another process
        with pytest.raises(BadInput, match="'Cell' was defined in a notebook or a scri"):
            _ = load(done.path).experiment

    @pytest.mark.parametrize("start", [grid, tune])
    def test_nor_in_a_grid_or_a_search(self, cell: Any, tmp_path: Path, start: Any) -> None:
        content = {
            **SMALL,
            "method": cell,
            "grid": {"axes": {"train.batch_size": [8, 16]}},
            "search": {"space": {"train.batch_size": [8, 16]}, "objectives": {"accuracy": "max"}},
        }
        del content["search" if start is grid else "grid"]
        with pytest.raises(ExperimentError, match=r"method: Cell is defined in a .* of trials"):
            start(content, out=tmp_path / "runs")
        assert not (tmp_path / "runs").exists()


def test_content_of_a_grid_becomes_what_a_file_would_hold(data_folder: Path) -> None:
    found = plain(
        {
            "data": own_objects.data(),
            "grid": {"axes": {"model": [own_objects.net, own_objects.Net], "seed": [1]}},
            "method": own_objects.Plain(),
        }
    )
    (kept,) = (data_folder / "arrays").iterdir()
    models = [{"name": "own_objects:net"}, {"name": "own_objects:Net"}]
    assert found == {
        "data": {"name": "from_python", "hash": kept.stem},
        "grid": {"axes": {"model": models, "seed": [1]}},
        "method": {"name": "own_objects:Plain", "strength": 0.5},
    }


def test_values_become_what_yaml_has_for_them() -> None:
    found = plain(
        {
            "seed": np.int64(3),
            "train": Train(rounds=7),
            "evaluate": {"metrics": (own_metrics.f2, "ece")},
            "data": {"name": "npz", "path": Path("a", "b.npz")},
            "grid": {"axes": {"partition.alpha": np.array([0.1, 1.0])}, "seeds": range(2)},
        }
    )
    assert found["seed"] == 3
    assert type(found["seed"]) is int
    assert found["train"]["rounds"] == 7
    assert found["evaluate"] == {"metrics": ["own_metrics:f2", "ece"]}
    assert found["data"]["path"] == "a/b.npz"
    assert found["grid"] == {"axes": {"partition.alpha": [0.1, 1.0]}, "seeds": [0, 1]}


def test_so_do_values_of_overrides() -> None:
    given = {"train.rounds": np.int64(3), "train.optimizer.lr": np.float64(0.5)}
    config = RawConfig(plain({**SMALL, "grid": {}}))
    content = config.overridden(plain({**given, "grid.seeds": range(2)})).content
    written = yaml.safe_load(to_yaml(content))  # as into the folder of a grid
    assert written["train"]["rounds"] == 3
    assert written["train"]["optimizer"]["lr"] == 0.5
    assert written["grid"] == {"seeds": [0, 1]}


def test_metrics_are_functions(tmp_path: Path) -> None:
    made = small_experiment(evaluate={"metrics": [own_metrics.f2]}, train={"rounds": 1})
    assert made.evaluate.metrics == ("own_metrics:f2",)
    assert "f2" in run(made, tmp_path).rounds


class TestData:
    def test_kinds_of_labels_and_names(self) -> None:
        x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1], np.int32)
        made = Dataset(
            *(x.tolist(), y, x, y.astype(np.uint8), np.array([3, 7])),
            features=np.array(["a", "b"]),  # type: ignore[arg-type]
            mean=(np.float32(0.5),),
            std=(1,),
        )
        assert (made.classes, made.features) == (("3", "7"), ("a", "b"))
        assert made.y.dtype == made.test_y.dtype == np.int64
        experiment = Experiment.from_dict({**SMALL, "data": made})
        assert load_dataset(experiment.data).mean == (0.5,)

    def test_it_is_kept_whole(self) -> None:
        rng = np.random.default_rng(0)
        given = Dataset(
            rng.normal(size=(6, 2)),
            rng.normal(size=6),
            rng.normal(size=(3, 2)),
            rng.normal(size=3),
            (),
            mean=(0.5,),
            std=(2.0,),
            columns={"site": np.array(["a", "b", "a", "b", "a", "b"], dtype=object)},
            features=("one", "two"),
            target="price",
            test_columns={"site": np.array(["a", "b", "b"])},
            sliced_by="site",
            truth={"signal": np.ones((3, 2), dtype=bool)},
            scaling=Scaling(np.array([1.0, 2.0]), 3.0),
        )
        found = load_dataset(Experiment.from_dict({**SMALL, "data": given}).data)
        for field in dataclasses.fields(Dataset):
            one, other = getattr(given, field.name), getattr(found, field.name)
            if isinstance(one, Scaling):
                one, other = ({"low": s.low, "span": s.span} for s in (one, other))
            if isinstance(one, dict):
                assert one.keys() == other.keys(), field.name
                one, other = list(one.values()), [other[key] for key in one]
            if isinstance(one, np.ndarray):
                assert one.dtype == other.dtype
            assert (
                all(map(np.array_equal, one, other))
                if isinstance(one, list)
                else (np.array_equal(one, other))
            ), field.name

    def test_what_is_gone_is_named(self, tmp_path: Path, data_folder: Path) -> None:
        done = run(Experiment(data=own_objects.data(), **OBJECTS), tmp_path)
        (kept,) = (data_folder / "arrays").iterdir()
        kept.unlink()
        with pytest.raises(
            DataError, match=f"^{kept}: is missing: the data were arrays in Python"
        ):
            replay(done, 1)
        own = Experiment(data=own_objects.data(), **OBJECTS)
        assert kept.exists()
        assert own == done.experiment
        with pytest.raises(BadInput, match="the run is finished"):
            resume(done.path)
