"""What a newcomer is told: which run, which key, which module was meant."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import fedsim
from experiments import Say, small_experiment
from fedsim import Experiment, Run, compare, run
from fedsim.cli.console import latest
from fedsim.config.registry import nearest
from fedsim.errors import (
    ClientError,
    ExperimentError,
    FedsimWarning,
    MethodError,
    RunFolderError,
)
from fedsim.launch.prepare import prepare
from fedsim.methods.fedavg import FedAvg
from fedsim.results.listing import list_results
from fedsim.sweep.trials import SweepPlan, _about_test_set

OWN = """
import torch
from fedsim import Update
from fedsim.methods.fedavg import FedAvg

class Gated(torch.nn.Sequential):
    def __init__(self, shape, outputs, width=4):
        if width == 13:
            raise ValueError("an unlucky width")
        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, width),
                         torch.nn.Linear(width, outputs))

class Cut(torch.nn.Linear):
    def __init__(self, shape, outputs):
        super().__init__(3, outputs)

class Short(FedAvg):
    def local_update(self, client, weights):
        return Update(weights=client.train(weights)[:-1])

class Fails(FedAvg):
    def local_update(self, client, weights):
        raise ValueError("made of cheese")
"""

SMALL = """\
name: small
data: {name: digits}
partition: {kind: iid, clients: 3}
model: {name: mlp, hidden: [4]}
method: {name: fedavg}
train: {rounds: 1}
engine: {kind: local}
"""


@pytest.fixture(autouse=True)
def _own_modules(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment, and a module of the user's own, in the working directory."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "own_mlp", raising=False)
    Path("own_mlp.py").write_text(OWN)
    Path("small.yaml").write_text(SMALL)


def edited(before: str, after: str) -> None:
    assert before in SMALL
    Path("small.yaml").write_text(SMALL.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("{name: mlp, hidden: [4]}", "mlp", "model: must be a section of keys; write {name: mlp}"),
        (
            "{name: fedavg}",
            "{name:fedavg}",
            "method.name: missing; write 'name: fedavg', with a space after the colon",
        ),
        (
            "{rounds: 1}",
            "{rounds:1}",
            "train.rounds:1: unknown key; write 'rounds: 1', with a space after the colon",
        ),
        ("mlp, hidden: [4]", "own_mlp:Gate", "own_mlp has no 'Gate'; did you mean 'Gated'?"),
        (
            "mlp, hidden: [4]",
            "own_mlp.Gated",
            "unknown model 'own_mlp.Gated'; write your own with a colon: own_mlp:Gated",
        ),
    ],
    ids=["word", "space in a component", "space", "class", "colon"],
)
def test_a_slip_in_the_file(say: Say, before: str, after: str, message: str) -> None:
    edited(before, after)
    code, _, told = say("run", "small.yaml")
    assert code == 2
    assert told.startswith("error: small.yaml:")
    assert told.endswith(f"{message}\n")


def test_a_module_that_is_not_there(say: Say, tmp_path: Path) -> None:
    code, _, told = say("run", "small.yaml", "model={name: 'own_mpl:Gated'}")
    assert code == 2
    assert "no module 'own_mpl' in " in told
    assert str(tmp_path) in told
    assert told.endswith(", nor installed; did you mean 'own_mlp:Gated'?\n")


def test_a_key_of_an_own_component_is_that_of_the_override(say: Say) -> None:
    edited("mlp, hidden: [4]", "'own_mlp:Gated'")
    code, _, told = say("run", "small.yaml", "model.widht=3")
    assert code == 2
    assert told == (
        "error: override model.widht=3: model.widht: own_mlp:Gated takes no 'widht'; did you "
        "mean 'width'?\n"
    )


@pytest.mark.parametrize(
    ("option", "key"),
    [
        ("--rounds", "train.rounds"),
        ("--seed", "seed"),
        ("--clients", "partition.clients"),
        ("--cpus-per-actor", "engine.cpus_per_actor"),
        ("--cheese", "section.cheese"),
    ],
)
def test_a_key_is_no_option(say: Say, option: str, key: str) -> None:
    code, _, told = say("run", "small.yaml", option, "3")
    assert code == 2
    hint = f"keys of the experiment take no dashes: {key}=3\n"
    assert told.startswith(f"error: No such option: {option}")
    assert told.endswith(hint)


def test_the_command_for_a_grid_and_a_search_is_named(say: Say) -> None:
    grid, search = "grid: {axes: {seed: [1, 2]}}\n", "search: {space: {seed: [1, 2]}}\n"
    for section, command, what in (
        (grid, "grid", "a grid of experiments"),
        (search, "tune", "a search"),
    ):
        Path("small.yaml").write_text(SMALL + section)
        code, _, told = say("run", "small.yaml")
        assert code == 2
        assert told == (
            f"error: small.yaml:8: this file has {what}; run it with: fedsim {command} "
            "small.yaml\n"
        )
        other = {"grid": "tune", "tune": "grid"}[command]
        code, _, told = say(other, "small.yaml")
        assert code == 2
        assert told.endswith(f"; run it with: fedsim {command} small.yaml\n")


def test_suggestions_are_close() -> None:
    assert nearest("gradcam", ["random", "tree"]) == "; known: random, tree"
    assert nearest("f1", ["macro_f1", "auroc"]) == "; did you mean 'macro_f1'?"
    assert nearest("FedAvg", ["fedavg", "moon"]) == "; did you mean 'fedavg'?"


class TestFoldersOfSeveralRuns:
    def test_the_latest_is_taken(self, say: Say, finish: Callable[..., Run]) -> None:
        runs = [finish(name="own", seed=seed, train={"rounds": 2}) for seed in (0, 1)]
        last = max(runs, key=lambda done: done.path.name)
        said = f"runs/own: the latest of 2 runs, {last.path.name}\n"
        code, _, told = say("explain", "runs/own", "--row", "0")
        assert (code, told) == (0, said)
        assert (last.path / "explanations").is_dir()
        code, out, told = say("verify", "runs/own")
        assert (code, out) == (0, "no damage found (1 folder(s))\n")
        assert told == said.replace("2 runs", "2 results")
        for words, code, end in (
            (["resume", "runs/own"], 2, "the run is finished; there is nothing to resume\n"),
            (["continue", "runs/own", "train.rounds=1"], 2, "2 rounds already; set more\n"),
            (["compare", "runs/own", *(str(done.path) for done in runs)], 0, ""),
            (["report", "runs/own"], 0, ""),
            (["pack", "runs/own"], 0, ""),
        ):
            found, _, told = say(*words)
            assert found == code, told
            assert told.startswith("runs/own: the latest of 2 r")
            assert told.endswith(end)
        assert (last.path / "report.html").exists()
        assert Path(f"{last.path.name}.zip").exists()

        code, _, told = say("explain", *(f"runs/own/{done.path.name}" for done in runs))
        assert code == 2
        assert told == (
            "error: fedsim explain takes one folder; runs/own means the latest below it\n"
        )
        assert all(line == line.rstrip() for line in say("ls")[1].splitlines())

        told = str(compare(*runs))
        assert told.startswith("experiments\n")
        assert "\n\nenvironments: the same\n\nresults\n" in told

    def test_the_latest_is_not_passed_over_if_it_is_damaged(
        self, say: Say, finish: Callable[..., Run]
    ) -> None:
        runs = [finish(name="own", seed=seed, train={"rounds": 1}) for seed in (0, 1)]
        last = max(done.path for done in runs)
        for path in last.glob("manifest*.json"):
            path.write_text("{")
        for command in ("explain", "attack", "verify"):
            code, _, told = say(command, "runs/own")
            assert code == 2
            assert f"error: {last / 'manifest.json'}: is damaged: " in told

    def test_python_takes_it_as_well(self, finish: Callable[..., Run], tmp_path: Path) -> None:
        runs = (finish(name="own", seed=seed, train={"rounds": 2}) for seed in (0, 1))
        other, last = sorted(runs, key=lambda run: run.path.name)  # begun in the same second
        name = tmp_path / "runs" / "own"
        for given in (name, str(name), str(last.path)):
            assert fedsim.load(given).path == Run.open(given).path == last.path
        assert fedsim.replay(name).run.path == last.path
        assert fedsim.predictions(name).equals(fedsim.predictions(last))
        assert fedsim.explanations(name, "occlusion", row=0).run.path == last.path
        assert set(compare(name, other).runs.values()) != {other}
        assert fedsim.report(name) == last.path / "report.html"
        assert fedsim.audit(name, [], progress=False).run.path == last.path
        longer = fedsim.extend(name, {"train.rounds": 5}, tmp_path, progress=False)
        assert longer.manifest["continues"]["folder"] == str(last.path)
        with pytest.raises(RunFolderError, match="the run is finished; there is nothing"):
            fedsim.resume(name)

    def test_an_experiment_is_a_file_or_a_dict_as_well(self, tmp_path: Path) -> None:
        path = tmp_path / "small.yaml"
        path.write_text(SMALL)
        content = {**yaml.safe_load(SMALL), "method": FedAvg()}
        experiment = Experiment.load(path)
        hashes = {
            fedsim.run(given, tmp_path, progress=False).result_hash
            for given in (experiment, path, str(path), content)
        }
        assert len(hashes) == 1
        many = {**content, "grid": {"axes": {"seed": [0, 1]}}}
        with pytest.raises(
            ExperimentError, match=r"has a grid of experiments; run it with: fedsim\.grid"
        ):
            fedsim.run(many)

    def test_a_folder_without_any_is_taken_as_it_is(self, tmp_path: Path) -> None:
        assert latest(tmp_path) == tmp_path
        assert list_results(tmp_path) == []


class TestRunsThatBreakOff:
    def test_weights_of_a_wrong_length(self, tmp_path: Path) -> None:
        experiment = small_experiment(method={"name": "own_mlp:Short"})
        message = (
            r"client \d+, round 1, local_update: 'weights' has (\d+) entries, expected (\d+),"
        )
        with pytest.raises(ClientError, match=message):
            run(experiment, tmp_path)

    def test_the_error_comes_first(self, say: Say) -> None:
        code, _, told = say("run", "small.yaml", "method={name: 'own_mlp:Fails'}")
        assert code == 1
        error, how, resume = told.splitlines()
        assert error.startswith("error: client 0, round 1, local_update: ValueError: made of chee")
        assert how.startswith("failed; traceback in runs/small/")
        assert how.endswith("/log.txt; once fixed, continue with:")
        assert resume.startswith("  fedsim resume runs/small/")

    def test_a_failing_metric_is_told_as_what_it_is(self, tmp_path: Path) -> None:
        experiment = small_experiment(evaluate={"metrics": ["own_metrics:vector"]})
        with pytest.raises(MethodError, match="must return a number or a dict of numbers, not an"):
            run(experiment, tmp_path)


def test_the_place_is_in_the_users_own_file() -> None:
    edited("mlp, hidden: [4]", "'own_mlp:Gated', width: 13")
    with pytest.raises(ExperimentError, match=r"an unlucky width \(own_mlp.py, line 9\)$"):
        prepare(Experiment.load("small.yaml"))
    edited("mlp, hidden: [4]", "'own_mlp:Cut'")
    with pytest.raises(ExperimentError) as refused:  # raised by torch, called by fedsim
        prepare(Experiment.load("small.yaml"))
    assert ".py, line" not in str(refused.value)


def test_actors_without_ray(tmp_path: Path) -> None:
    experiment = small_experiment(engine={"kind": "local", "actors": 2})
    with pytest.warns(FedsimWarning, match=r"^engine.actors=2 has no effect with engine.kind=loc"):
        run(experiment, tmp_path)


def test_a_missing_file_is_one_error() -> None:
    with pytest.raises(ExperimentError) as refused:
        Experiment.load("nope.yaml")
    shown = "".join(traceback.format_exception(refused.value))
    assert shown.count("Traceback") == 1


def test_overrides_are_a_dict_as_well() -> None:
    experiment = Experiment.load("small.yaml", {"train.rounds": 3, "model": {"name": "mlp"}})
    assert experiment.train.rounds == 3
    assert str(experiment) == experiment.to_yaml()
    with pytest.raises(ExperimentError, match=r"^override train.round=3: train.round: unknown"):
        Experiment.load("small.yaml", {"train.round": 3})


def test_the_package_offers_its_own_names_only() -> None:
    assert dir(fedsim) == sorted(fedsim.__all__)


def test_a_search_is_told_what_to_choose_by() -> None:
    trial = SimpleNamespace(experiment=small_experiment(evaluate={"validation": 0.1}))
    directions = {"accuracy": "max", "total_bytes": "min"}
    plan = SweepPlan(None, [trial], 1, directions=directions)  # type: ignore[arg-type]
    assert _about_test_set(plan, ["accuracy"]) == (
        "warning: the search chooses by accuracy on the test set. To choose by a validation set "
        "instead: 'search.objectives={validation_accuracy: max, total_bytes: min}'"
    )


class TestTables:
    DATA = "data={name: table, path: clinic.csv, label: ill, columns: [site]}"
    PARTITION = "partition={kind: natural, column: site}"

    def write(self, blank: str = "1.5") -> None:
        rows = [f"{k},{k % 7},{'fm'[k % 2]},{['Kiel', 'Ulm'][k % 2]},{k % 3}" for k in range(60)]
        rows[0] = rows[0].replace("0,0,", f"0,{blank},", 1)
        Path("clinic.csv").write_text("\n".join(["id,crp,sex,site,ill", *rows]))

    def test_features_and_clients_are_named(self, say: Say) -> None:
        self.write()
        note = "features: id, crp (not used: sex, which is text)"
        code, text, _ = say("data", "small.yaml", self.DATA, self.PARTITION)
        assert code == 0
        lines = text.splitlines()
        assert lines[0] == note
        assert lines[2].split()[:2] == ["client", "name"]
        assert [line.split()[:2] for line in lines[3:5]] == [["0", "Kiel"], ["1", "Ulm"]]
        code, text, _ = say("run", "small.yaml", self.DATA, self.PARTITION)
        assert code == 0
        assert text.splitlines()[1] == note
        (folder,) = Path("runs/small").iterdir()
        assert fedsim.load(folder).manifest["client_names"] == ["Kiel", "Ulm"]
        code, text, _ = say("explain", str(folder), "--client", "0", "--row", "0")
        assert text.startswith("client 0 (Kiel)'s model after round 1, ")
        assert re.search(r"^row 0: predicted [012] \(\d+%\), true class [012]$", text, re.M)

    def test_an_empty_cell(self, say: Say) -> None:
        self.write(blank="")
        code, _, told = say("data", "small.yaml", self.DATA)
        assert code == 2
        assert told.endswith(
            "clinic.csv: line 2: column 'crp' is empty (1 of 60 rows have empty cells); fill or "
            "drop them\n"
        )
