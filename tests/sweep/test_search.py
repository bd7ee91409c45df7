"""Searches: what is refused, what is left behind, and going on after an interruption."""

from __future__ import annotations

import base64
import pickle
import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import numpy as np
import optuna
import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread
from optuna.trial import TrialState
from ray.tune.schedulers import ASHAScheduler

from experiments import WHOLE, Say, pickles, small_experiment
from fedsim import Experiment, Run, Search, load, run, tune
from fedsim.cli import runs
from fedsim.config.file import RawConfig
from fedsim.errors import RunError, UnknownObjective
from fedsim.results.archive import pack_results
from fedsim.results.figures import pareto
from fedsim.results.verify import insist_on_whole
from fedsim.sweep import search
from fedsim.sweep.search import SAMPLERS, SamplerByPlace, SearchSettings, SearchSweep
from fedsim.sweep.trials import objective_value

SPACE = {
    "method.mu": {"type": "float", "low": 0.001, "high": 1, "log": True},
    "train.participation": {"type": "float", "low": 0.2, "high": 1.0},
    "train.local_epochs": {"type": "int", "low": 1, "high": 3},
    "model.name": ["mlp", "cnn"],
}


def content(search: Any, **sections: Any) -> dict[str, Any]:
    """A small experiment file, as nested dicts, with a search."""
    sections = {"train": {"rounds": 3}, "model": {"name": "mlp"}, **sections}
    whole = small_experiment(method={"name": "fedprox"}, **sections).model_dump(mode="json")
    whole["model"] = {"name": "mlp"}
    return {**whole, "search": search}


def test_the_corners_stand_for_all_trials() -> None:
    search = {"space": SPACE, "objectives": {"accuracy": "max"}}
    assert [
        (
            trial.experiment.method.mu,  # type: ignore[attr-defined]
            trial.experiment.train.participation,
            trial.experiment.train.local_epochs,
            trial.experiment.model.name,
        )
        for trial in SearchSweep(RawConfig(content(search))).probe_trials
    ] == [
        (0.001, 0.2, 1, "mlp"),
        (1.0, 0.2, 1, "mlp"),
        (0.001, 1.0, 1, "mlp"),
        (0.001, 0.2, 3, "mlp"),
        (0.001, 0.2, 1, "cnn"),
    ]


def interrupt() -> None:
    """As Ctrl-C does."""
    signal.raise_signal(signal.SIGINT)


class TestOnRay:
    def test_what_falls_behind_is_stopped_early(self, tmp_path: Path, own_ray: None) -> None:
        """A learning rate of no use after a good one, and the same once more."""
        search = {
            "space": {"train.optimizer.lr": [0.3, 0.0001]},
            "objectives": {"loss": "min"},
            "sampler": "random",
            "seed": 11,
            "trials": 3,
            "concurrent": 1,
            "asha": {"grace": 2, "reduction": 2},
        }
        lines: list[str] = []
        whole = content(search, data=WHOLE, train={"rounds": 6, "local_epochs": 2})
        folder = tune(whole, out=tmp_path, progress=lines.append)
        trials = folder.trials
        assert list(trials["train.optimizer.lr"]) == [0.3, 0.0001, 0.0001]
        assert list(trials["status"]) == ["finished", "stopped", "stopped"]
        assert list(trials["rounds"]) == [6, 2, 2]
        assert trials["loss"][0] < trials["loss"][1] == trials["loss"][2]
        assert lines[1] == (
            "warning: the search chooses by loss on the test set. To choose by a validation set "
            "instead: evaluate.validation=0.1 'search.objectives={validation_loss: min}'"
        )
        assert [line[:5] for line in lines[2:]] == ["[1/3]", "[2/3]", "[3/3]"]
        assert re.search(r"lr=0.3: loss 0\.\d+ after round 6$", lines[2])
        assert re.search(r"stopped early, loss \d\.\d+ after round 2$", lines[4])
        assert folder.manifest["status"] == "finished"
        best = Experiment.load(folder.path / "best.yaml")
        assert best.train.optimizer.lr == 0.3
        done = load(folder.path / trials["folder"][0])
        assert done.rounds["loss"].iloc[-1] == trials["loss"][0]

        packed = pack_results(folder.path, tmp_path / "search.zip")
        assert packed.unfinished == {"stopped": 1}  # two trials with the same values are one run
        with ZipFile(packed.path) as archive:
            archive.extractall(tmp_path / "elsewhere")
        assert insist_on_whole(tmp_path / "elsewhere" / folder.path.name) == 3

    @pytest.mark.night  # by day one objective, and another folder
    def test_two_objectives_interrupted_and_resumed_leave_a_pareto_front(
        self, tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch, own_ray: None
    ) -> None:
        section = {
            "space": SPACE,
            "objectives": {"accuracy": "max", "total_bytes": "min"},
            "trials": 5,
        }
        whole = content(section, train={"rounds": 2})
        (tmp_path / "search.yaml").write_text(yaml.safe_dump(whole))
        with monkeypatch.context() as patch:
            patch.setattr(runs._Lines, "show", lambda _, line: line[:5] == "[2/5]" and interrupt())
            code, _, complaint = say("tune", "search.yaml")
        (path,) = (tmp_path / "runs" / "small").iterdir()
        told = f"interrupted; to continue:\n  fedsim resume {path.relative_to(tmp_path)}\n"
        assert (code, complaint.endswith(told)) == (130, True), complaint
        assert Search.open(path).manifest["status"] == "interrupted"
        assert not pickles(path)

        code, text, complaints = say("resume", str(path))
        assert code == 0, complaints
        folder = Search.open(path)
        assert folder.manifest["status"] == "finished"
        trials = folder.trials
        assert len(trials) == 5
        assert set(trials["status"]) == {"finished"}
        assert not pickles(path)
        assert {p.name for p in path.iterdir() if p.is_dir()} == {"trials"}

        # The study, with Optuna's own tools.
        study = optuna.load_study(study_name="fedsim", storage=f"sqlite:///{path}/study.db")
        assert [d.name for d in study.directions] == ["MAXIMIZE", "MINIMIZE"]
        assert {t.number for t in study.best_trials} == set(folder.pareto["trial"])
        for trial in study.get_trials(states=[optuna.trial.TrialState.COMPLETE]):
            row = trials[trials["trial"] == trial.number].iloc[0]
            assert trial.values == [row["accuracy"], row["total_bytes"]]
            assert trial.params == {key: row[key] for key in SPACE}

        # The picture is one, and shows something.
        picture = imread(path / "pareto.png")
        assert picture.shape[0] > 400
        assert len(np.unique(picture.reshape(-1, picture.shape[-1]), axis=0)) > 10

        shares = folder.importance.set_index("hyper-parameter")
        assert set(shares.index) == set(SPACE)
        assert shares["total_bytes"].sum() == pytest.approx(1)
        assert shares["total_bytes"][["method.mu", "train.local_epochs"]].sum() < 0.5

        best = Experiment.load(path / "best.yaml")
        again = run(best, tmp_path / "again")
        assert again.rounds["accuracy"].iloc[-1] == trials["accuracy"].max()
        assert "best, ready to run: fedsim run" in text

    def test_an_objective_that_no_round_reports_ends_the_search_at_once(
        self, tmp_path: Path, own_ray: None
    ) -> None:
        search = {
            "space": {"train.optimizer.lr": [0.1, 0.2, 0.3]},
            "objectives": {"pool": "max"},
            "trials": 9,
            "concurrent": 1,
        }
        lines: list[str] = []
        with pytest.raises(
            UnknownObjective,
            match=r"^search\.objectives\.pool: is not recorded in round 1; .* total_bytes$",
        ):
            tune(content(search), out=tmp_path, progress=lines.append)
        assert len(lines) == 1  # no trial has been told of
        assert len(list(tmp_path.glob("small/*/trials/*"))) == 1
        (folder,) = (Search.open(path) for path in tmp_path.glob("small/*"))
        assert folder.manifest["status"] == "failed"


def test_pickles_are_found(tmp_path: Path) -> None:
    content = pickle.dumps({"x": np.ones(3)})
    (tmp_path / "bytes").write_bytes(content)
    (tmp_path / "text.json").write_text(f'{{"state": "{base64.b64encode(content).decode()}"}}')
    (tmp_path / "length.safetensors").write_bytes(b"\x80\x02" + bytes(6) + b"{}")
    assert {path.name for path in pickles(tmp_path)} == {"bytes", "text.json"}


def test_trials_that_were_lost_or_failed_are_proposed_again_once() -> None:
    study = optuna.create_study()
    space = {"x": optuna.distributions.FloatDistribution(0, 1)}
    for how in (TrialState.COMPLETE, TrialState.FAIL, None, TrialState.PRUNED):
        trial = study.ask(fixed_distributions=space)
        if how is not None:
            study.tell(trial, 0.5 if how == TrialState.COMPLETE else None, state=how)
    lost = [study.trials[1].params, study.trials[2].params]
    for _ in range(2):
        search._propose_lost_ones_again(study)
    assert study.user_attrs == {search.AGAIN: [1, 2]}
    assert [t.state for t in study.trials[4:]] == [TrialState.WAITING] * 2
    assert [study.ask(fixed_distributions=space).params for _ in range(2)] == lost


def test_the_rungs_of_an_earlier_session_are_climbed_again(finish: Callable[..., Run]) -> None:
    good = finish(train={"rounds": 4})

    def decision(told: Sequence[Path]) -> str:
        scheduler = ASHAScheduler(
            "round", "accuracy", "max", max_t=4, grace_period=2, reduction_factor=2
        )
        for path in told:
            search._tell_again(scheduler, path, "accuracy")
        trial = SimpleNamespace(trial_id="bad")
        scheduler.on_trial_add(None, trial)
        return str(scheduler.on_trial_result(None, trial, {"round": 2, "accuracy": 0.0}))

    assert decision([]) == "CONTINUE"
    assert decision([good.path]) == "STOP"


@pytest.mark.parametrize("name", ["random", "tpe", "nsga2", "gp"])
@pytest.mark.parametrize("lost", [0, 2])
def test_an_interrupted_search_proposes_what_it_would_have(name: str, lost: int) -> None:
    settings = SearchSettings.model_validate(
        {"space": {"train.optimizer.lr": [0.1]}, "objectives": {"loss": "min"}, "sampler": name}
    )
    space = {"x": optuna.distributions.FloatDistribution(0, 1)}

    def propose(study: optuna.Study) -> optuna.Trial:
        return study.ask(fixed_distributions=space)

    def proposed(interrupted: bool) -> list[float]:
        storage, found = optuna.storages.InMemoryStorage(), []

        def begin() -> optuna.Study:
            return optuna.create_study(
                storage=storage,
                study_name="s",
                sampler=SamplerByPlace(SAMPLERS[name], settings.seed),
                load_if_exists=True,
            )

        study = begin()
        while len(found) < 14:  # from the eleventh on TPE goes by what came before
            if interrupted and len(found) == lost:
                propose(study)
                study = begin()
                search._propose_lost_ones_again(study)
                interrupted = False
            trial = propose(study)
            found.append(float(trial.params["x"]))
            study.tell(trial, (found[-1] - 0.3) ** 2)
        return found

    undisturbed = proposed(interrupted=False)
    assert len(set(undisturbed)) == len(undisturbed)
    assert proposed(interrupted=True) == undisturbed


def test_any_seed_of_an_experiment_will_do() -> None:
    section = {"space": {"train.optimizer.lr": [0.1]}, "objectives": {"loss": "min"}}
    settings = SearchSettings.model_validate({**section, "seed": 2**64})
    sampler = SamplerByPlace(SAMPLERS[settings.sampler], settings.seed)
    study = optuna.create_study(sampler=sampler)
    study.ask(fixed_distributions={"x": optuna.distributions.FloatDistribution(0, 1)})
    assert small_experiment(seed=2**64).seed == 2**64


class TestPareto:
    @given(
        st.lists(st.tuples(*[st.integers(0, 5)] * 3), min_size=1, max_size=12),
        st.tuples(*[st.sampled_from(["max", "min"])] * 3),
    )
    def test_against_the_definition(
        self, points: list[tuple[int, int, int]], modes: tuple[str, str, str]
    ) -> None:
        objectives = dict(zip("abc", modes, strict=True))
        found = pareto.front(pd.DataFrame(points, columns=list("abc")), objectives)
        for k, mine in enumerate(points):
            bettered = False
            for other in points:
                gains = [
                    (o - m) if mode == "max" else (m - o)
                    for o, m, mode in zip(other, mine, modes, strict=True)
                ]
                bettered |= all(g >= 0 for g in gains) and any(g > 0 for g in gains)
            assert found[k] == (not bettered)

    @pytest.mark.parametrize(("count", "across", "down"), [(2, 1, 1), (3, 3, 2), (4, 3, 3)])
    def test_a_panel_for_each_pair_and_one_of_all(
        self, tmp_path: Path, count: int, across: int, down: int
    ) -> None:
        """In rows of three; of more than two objectives, parallel coordinates below them."""
        values = {"a": [1, 2], "b": [1, 3], "c": [5e6, 4e6], "d": [0.5, 0.5]}
        trials = pd.DataFrame({"trial": [0, 1], **values})
        ways = {"a": "max", "b": "min", "c": "min", "d": "max"}
        pareto.draw(trials, dict(list(ways.items())[:count]), tmp_path / "pareto.png")
        height, width, _ = imread(tmp_path / "pareto.png").shape
        assert (width, height) == (round(5.6 * across * 160), round(4.4 * down * 160))

    def test_what_spans_orders_of_magnitude_is_drawn_by_its_logarithm(self) -> None:
        trials = pd.DataFrame({"trial": [0, 1, 2], "a": [1.0, 2, 3], "b": [0.5, 5, 50]})
        ways, axes = {"a": "max", "b": "min"}, Figure().add_subplot()
        pareto.draw_pair(axes, trials, np.array([True, False, False]), ways, ("a", "b"))
        assert (axes.get_xscale(), axes.get_yscale()) == ("linear", "log")
        axes = Figure().add_subplot()
        pareto._draw_parallel(axes, trials, np.array([True, False, False]), ways)
        heights = sorted(line.get_ydata()[1] for line in axes.lines)
        np.testing.assert_allclose(heights, [0, 0.5, 1], atol=1e-12)

    def test_trials_that_end_at_one_height_share_a_label(self) -> None:
        labels = pareto._labels([7, 3, 12, 9], [1.0, 0.0, 0.02, 0.6])
        assert labels == [(0.0, "3, 12"), (0.6, "9"), (1.0, "7")]


def test_objectives_are_columns_of_the_last_round() -> None:
    row = {"round": 3, "accuracy": 0.5, "total_bytes_up": 10, "total_bytes_down": 30, "loss": None}
    assert objective_value(row, "accuracy") == 0.5
    assert objective_value(row, "total_bytes") == 40
    with pytest.raises(UnknownObjective, match=r"^search\.objectives\.los: is not recorded in "):
        objective_value(row, "los")
    with pytest.raises(
        RunError, match=r"loss: is not a number in round 3; .* report accuracy, ro"
    ):
        objective_value(row, "loss")
    row = {"round": 1, "rmse": 0.5, "r2": float("nan")}  # of constant targets
    with pytest.raises(RunError, match=r"r2: is not .* rounds report rmse, round and total_bytes"):
        objective_value(row, "r2")
