"""What a newcomer is told: which run, which key, which module was meant."""

from __future__ import annotations

import re
import shutil
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from refusals import EXPERIMENT

import fedsim
from experiments import Say, small_experiment
from fedsim import Experiment, Run, compare, run
from fedsim.cli.console import latest
from fedsim.config.registry import nearest
from fedsim.errors import (
    ExperimentError,
    FedsimWarning,
    RunFolderError,
)
from fedsim.methods.fedavg import FedAvg
from fedsim.results.listing import list_results
from fedsim.sweep.trials import SweepPlan, _about_test_set


def test_suggestions_are_close() -> None:
    assert nearest("gradcam", ["random", "tree"]) == "; known: random, tree"
    assert nearest("f1", ["macro_f1", "auroc"]) == "; did you mean 'macro_f1'?"
    assert nearest("FedAvg", ["fedavg", "moon"]) == "; did you mean 'fedavg'?"


@pytest.fixture(autouse=True)
def _small_experiment(say: Say) -> None:
    Path("small.yaml").write_text(EXPERIMENT)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, of which the last by name counts as the latest."""
    out = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        run(small_experiment(name="own", seed=seed, train={"rounds": 2}), out)
    return out / "own"


class TestFoldersOfSeveralRuns:
    @pytest.fixture
    def runs(self, two_runs: Path, tmp_path: Path) -> list[Run]:
        """They, in runs/own."""
        own = shutil.copytree(two_runs, tmp_path / "runs" / "own")
        return [fedsim.load(path) for path in sorted(own.iterdir())]

    def test_the_latest_is_taken(self, say: Say, runs: list[Run]) -> None:
        _, last = runs
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
        self, say: Say, runs: list[Run]
    ) -> None:
        last = runs[1].path
        for path in last.glob("manifest*.json"):
            path.write_text("{")
        for command in ("explain", "attack", "verify"):
            code, _, told = say(command, "runs/own")
            assert code == 2
            assert f"error: {last / 'manifest.json'}: is damaged: " in told

    def test_python_takes_it_as_well(self, runs: list[Run], tmp_path: Path) -> None:
        other, last = runs
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
        content = {**yaml.safe_load(EXPERIMENT), "method": FedAvg()}
        experiment = Experiment.load(path)
        hashes = {
            fedsim.run(given, tmp_path, progress=False).result_hash
            for given in (experiment, path, str(path), content)
        }
        assert len(hashes) == 1

    def test_a_folder_without_any_is_taken_as_it_is(self, tmp_path: Path) -> None:
        assert latest(tmp_path) == tmp_path
        assert list_results(tmp_path) == []


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

    def test_features_and_clients_are_named(self, say: Say) -> None:
        rows = [f"{k},{k % 7},{'fm'[k % 2]},{['Kiel', 'Ulm'][k % 2]},{k % 3}" for k in range(60)]
        rows[0] = rows[0].replace("0,0,", "0,1.5,", 1)
        Path("clinic.csv").write_text("\n".join(["id,crp,sex,site,ill", *rows]))
        note = "features: id, crp, sex"
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
