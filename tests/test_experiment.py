"""An experiment is the same one as YAML, as overrides, and in Python."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from experiments import NETWORK_METHODS, TREE_METHODS, Say, examples, small_experiment, with_method
from fedsim import Experiment
from fedsim.config.file import RawConfig
from fedsim.config.registry import LARGEST, Registry
from fedsim.data import datasets, partitions
from fedsim.errors import ExperimentError
from fedsim.experiment import EXCLUSIVE, UNSUPPORTED
from fedsim.methods import methods
from fedsim.methods.learns import Learns
from fedsim.models import RuleModel, models
from fedsim.models.boosted_trees import BoostedTrees
from fedsim.sweep.grid import GridSweep
from fedsim.sweep.search import SearchSettings

QUICKSTART = Path(__file__).parents[1] / "experiments" / "quickstart.yaml"
REGISTRIES = {"data": datasets, "partition": partitions, "model": models, "method": methods}
# What has no default.
NEEDED: dict[str, Any] = {"clients": 4, "alpha": 0.5, "column": "writer", "round": 5}
NEEDED["hash"] = "0" * 16
NEEDED["path"] = "some/file.npz"
NEEDED["set"] = "pathmnist"
NEEDED["dataset"] = "glue"
NEEDED["tasks"] = [[["a", "b"], ["c"]]]
NEEDED["of"] = {"name": "digits"}
NEEDED["checkpoint"] = "some/folder"
NEEDED["task"] = "image_classification"
BASE: dict[str, Any] = {
    "data": {"name": "digits"},
    "partition": {"kind": "iid", "clients": 4},
    "model": {"name": "mlp"},
    "method": {"name": "fedavg"},
}


def reread(experiment: Experiment) -> Experiment:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "experiment.yaml")
        path.write_text(experiment.to_yaml())
        return Experiment.load(path)


def components() -> Iterator[Any]:
    for section, registry in REGISTRIES.items():
        for name, _ in registry.items():
            yield pytest.param(section, registry, name, id=f"{section}-{name}")


@pytest.mark.parametrize(("section", "registry", "name"), components())
def test_defaults_of_every_component(section: str, registry: Registry[Any], name: str) -> None:
    fields = registry.find(name).model_fields
    content = {key: NEEDED[key] for key, field in fields.items() if field.is_required()}
    if name == "table":  # a label or a target
        content["label"] = "y"
    others = dict(BASE)
    component = registry.find(name)
    learns = getattr(component, "learns", Learns())
    if issubclass(component, RuleModel) or learns.models == "rule model":
        others |= {"model": {"name": "tsk"}, "method": {"name": "openfl_xai"}}
        others["train"] = {"rounds": 1}
    if learns.models == "tree ensemble" or component is BoostedTrees:
        others |= {"model": {"name": "boosted_trees"}, "method": {"name": "hist_trees"}}
    if getattr(component, "asynchronous", False):
        others["devices"] = {}
    if getattr(component, "adapts", ""):
        others["adapters"] = {}
    if learns.task_sequences == "only":
        others["train"] = {"optimizer": {"name": "adam"}}
    experiment = Experiment.from_dict({**others, section: {registry.key: name, **content}})
    assert type(getattr(experiment, section)) is registry.find(name)
    assert reread(experiment) == experiment
    assert yaml.safe_load(experiment.to_yaml())[section].keys() == fields.keys()


# Words that YAML readers like to take for something else, and plain ones.
words = st.sampled_from(["null", "true", "no", "12", "1_0", "0x1f", "2024-01-31", "~", "a: b"])
words |= st.sampled_from(["#x", " x ", "é", "- x", "12:30", "'x'", ".inf", "[x]", "*x", "!x"])
words |= st.text("abcXYZ _-/.", min_size=1)
counts = st.integers(1, 10**6)
positive = st.floats(1e-300, LARGEST)
shares = st.floats(0, 1, exclude_min=True)
below_one = st.floats(0, 1, exclude_max=True)


def section(needed: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(needed, optional=optional)


split = {"test_fraction": below_one, "labelled_fraction": shares}
contents = st.fixed_dictionaries(
    {
        "data": section(
            {"name": st.just("synthetic")},
            {
                "samples": counts,
                "shape": st.lists(counts, min_size=1, max_size=3),
                "noise": st.floats(0, LARGEST),
                "seed": st.integers(-(10**9), 10**9),
            },
        )
        | section(
            {"name": st.just("table"), "path": words, "label": st.just("y")},
            {
                "features": st.none() | st.lists(words.filter(lambda w: w != "y"), min_size=1),
                "columns": st.lists(words),
            },
        ),
        "partition": section(
            {"kind": st.just("dirichlet"), "clients": counts, "alpha": positive}, split
        )
        | section({"kind": st.just("natural"), "column": words}, split),
        "model": section({"name": st.just("mlp")}, {"hidden": st.lists(counts)})
        | section({"name": st.just("cnn")}, {"padding": st.just("auto") | st.integers(0, 5)}),
        "method": section(
            {"name": st.just("fedavgm")}, {"beta": below_one, "server_lr": positive}
        ),
    },
    optional={
        "name": st.from_regex(r"[A-Za-z][A-Za-z0-9._-]*", fullmatch=True),
        "seed": st.integers(0, 2**64),
        "train": section(
            {},
            {
                "rounds": counts,
                "participation": shares,
                "optimizer": section(
                    {"name": st.just("adamw")},
                    {"lr": positive, "betas": st.tuples(below_one, below_one)},
                ),
                "on_client_error": st.sampled_from(["stop", "skip"]),
            },
        ),
        "engine": section(
            {}, {"actors": st.just("auto") | counts, "gpus_per_actor": st.floats(0, 8)}
        ),
        "evaluate": section({}, {"every": counts}),
        "checkpoint": section({}, {"every": st.integers(0, 10**9)}),
    },
)


@examples(40)
@given(contents)
def test_yaml_and_back(content: dict[str, Any]) -> None:
    experiment = Experiment.from_dict(content)
    again = reread(experiment)
    assert again == experiment
    assert again.to_yaml() == experiment.to_yaml()


@pytest.mark.parametrize("word", ["1e5", "12E3", "${writer}", "???"])
def test_words_that_might_be_read_otherwise(word: str) -> None:
    partition = {"kind": "natural", "column": word}
    experiment = Experiment.from_dict({**BASE, "partition": partition})
    assert reread(experiment) == experiment


def test_no_file_holds_half_a_character() -> None:
    with pytest.raises(ExperimentError, match=r"'/x\\udcff.npz' is no Unicode text"):
        small_experiment(data={"name": "npz", "path": "/x\udcff.npz"}).to_yaml()


@pytest.mark.parametrize("name", ["1e5", "2024", "no", "null"])
def test_a_name_is_a_name(name: str, say: Say) -> None:
    printed = say.printed("run", str(QUICKSTART), "--name", name, "--print-config")
    assert yaml.safe_load(printed)["name"] == name


# files and overrides


def test_overrides_win() -> None:
    experiment = Experiment.load(
        QUICKSTART,
        ["seed=3", "train.optimizer.lr=0.5", "partition.alpha=1", "evaluate={every: 2}", "seed=4"],
    )
    expected = yaml.safe_load(QUICKSTART.read_text())
    expected["seed"] = 4
    expected["train"]["optimizer"]["lr"] = 0.5
    expected["partition"]["alpha"] = 1
    expected["evaluate"]["every"] = 2
    assert experiment == Experiment.from_dict(expected)


def test_an_override_may_fill_what_the_file_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "part.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in BASE.items() if k != "method"}))
    with pytest.raises(ExperimentError, match=r"part\.yaml: method: missing"):
        Experiment.load(path)
    experiment = Experiment.load(path, ["method.name=fedprox", "method.mu=0.1"])
    fedprox = {"name": "fedprox", "mu": 0.1}
    assert experiment == Experiment.from_dict({**BASE, "method": fedprox})


# what is printed


@pytest.mark.parametrize("data", ["long path/" * 60, ":100:"])
def test_print_config_is_the_complete_experiment(data: str, say: Say, tmp_path: Path) -> None:
    overrides = ["train.rounds=3", f"data={{name: npz, path: '{data}'}}"]
    printed = say.printed("run", str(QUICKSTART), *overrides, "--print-config")
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "printed.yaml"
    path.write_text(printed)
    assert Experiment.load(path) == Experiment.load(QUICKSTART, overrides)
    assert_complete(Experiment.load(path), yaml.safe_load(printed))


def assert_complete(section: BaseModel, shown: dict[str, Any]) -> None:
    """Every field of every section is there, whether the file had it or not."""
    assert shown.keys() == type(section).model_fields.keys()
    for key, value in section:
        if isinstance(value, BaseModel):
            assert_complete(value, shown[key])


# what is written, and hashed to notice an edit


def changed(value: Any) -> Any:
    """Something else of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, tuple):
        return (*value, 1)
    return f"{value}x"


def variants(section: BaseModel) -> Iterator[tuple[str, BaseModel]]:
    """The section with each of its fields changed, one at a time, unchecked."""
    for key, value in section:
        if isinstance(value, BaseModel):
            for inner, variant in variants(value):
                yield f"{key}.{inner}", section.model_copy(update={key: variant})
        else:
            yield key, section.model_copy(update={key: changed(value)})


def test_any_change_shows() -> None:
    experiment = Experiment.load(QUICKSTART)
    written = {"": experiment.to_yaml()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a Literal changed into no word of its own
        for key, variant in variants(experiment):
            written[key] = variant.to_yaml()  # type: ignore[attr-defined]
    assert {"seed", "data.test_fraction", "train.optimizer.betas"} < written.keys()
    assert len(set(written.values())) == len(written)


def test_the_order_of_keys_does_not_show(tmp_path: Path) -> None:
    path = tmp_path / "other.yaml"
    content = yaml.safe_load(QUICKSTART.read_text())
    path.write_text(yaml.safe_dump(content, sort_keys=True))
    assert Experiment.load(path).to_yaml() == Experiment.load(QUICKSTART).to_yaml()


def test_an_override_replaces_what_stands_at_its_key(tmp_path: Path) -> None:
    file = tmp_path / "experiment.yaml"
    file.write_text(small_experiment(method={"name": "fedprox", "mu": 0.5}).to_yaml())
    changed = Experiment.load(
        file, ["method={name: scaffold}", "partition={kind: iid, clients: 5}", "train.rounds=3"]
    )
    assert changed.method == methods.find("scaffold")()
    assert changed.partition == partitions.find("iid")(clients=5)
    assert changed.train == small_experiment(train={"rounds": 3}).train


# the files that come with fedsim

FILES = sorted((QUICKSTART.parent).rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(QUICKSTART.parent)))
def test_files_of_experiments_fit_the_schema(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (path.parents[1], path.parent):  # where some have components of their own
        monkeypatch.syspath_prepend(folder)
    sheet = RawConfig.read(path)
    if "grid" in sheet.content:
        assert GridSweep(sheet).runs
        return
    if "search" in sheet.content:
        search, sheet = sheet.take("search")
        SearchSettings.model_validate(search)
    sheet.build(Experiment)


DEVICES = {"speed": 50, "deadline": 60.0}
USES: dict[str, dict[str, Any]] = {
    "explain.share": {"explain": {"explainers": ["gradient"], "share": {}}},
    "privacy": {"privacy": {"clip": 1.0, "noise_multiplier": 1.0}},
    "privacy.level=example": {
        "privacy": {"level": "example", "clip": 1.0, "noise_multiplier": 1.0}
    },
    "secure_aggregation": {"secure_aggregation": {}},
    "uplink": {"uplink": {"name": "int8"}},
    "downlink": {"downlink": {"name": "int8"}},
    "aggregation": {"aggregation": {"name": "median"}},
    "adversaries": {"adversaries": {"share": 0.3, "attack": {"name": "label_flip"}}},
    "adversaries.attack": {"adversaries": {"share": 0.3, "attack": {"name": "sign_flip"}}},
    "devices.over_selection": {"devices": {**DEVICES, "over_selection": 1.5}},
    "devices.partial_work": {"devices": {**DEVICES, "partial_work": True}},
    "without.replace": {"without": {"clients": [1], "replace": True}},
}


@pytest.mark.parametrize(("first", "second", "reason"), EXCLUSIVE)
def test_what_excludes_each_other(first: str, second: str, reason: str) -> None:
    for key in (first, second):
        small_experiment(**USES[key])
    with pytest.raises(ExperimentError) as refused:
        small_experiment(**USES[first], **USES[second])
    line = str(refused.value)
    assert f": {reason}; leave out `{first}`, or `{second}`" in line
    assert line.startswith(f"experiment: {first}")
    assert "\n" not in line


@pytest.mark.parametrize(("key", "supported", "reason"), UNSUPPORTED)
def test_what_methods_do_not_support(
    key: str, supported: Callable[[Any], bool], reason: str
) -> None:
    """A method that lacks what a section needs is refused, whatever its name."""
    lacking = [
        n
        for n in (*NETWORK_METHODS, *TREE_METHODS)
        if not supported(small_experiment(**with_method(n)).method)
    ]
    assert lacking
    for name in lacking:
        with pytest.raises(ExperimentError) as refused:
            small_experiment(**with_method(name, **USES[key]))
        line = str(refused.value)
        assert line.startswith(f"experiment: {key.partition('.')[0]}")
        assert "\n" not in line
        if "sends no weights" not in line:  # which is told first
            assert f": method.name={name} {reason}; leave it out, or take another" in line
