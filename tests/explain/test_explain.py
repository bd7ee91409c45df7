"""`fedsim explain`: the rules of a run in words, in pictures, and as files of OpenFL-XAI."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import FOUR, Say, ran, small_experiment
from fedsim import Run, run
from fedsim.analysis.replay import ModelSnapshot
from fedsim.data import Dataset
from fedsim.data.dataset import fitted
from fedsim.data.encoding import Feature, OfCategory, Scaling
from fedsim.explain.explainers.rules import (
    RulesExplainer,
    by_column,
    in_words,
    ranges_in_words,
    readable,
)
from fedsim.explain.pictures.rule_bases import draw_partitions, draw_rules
from fedsim.models.tree_rules import GREATEST, LEAST, TreeRules
from fedsim.models.tsk import FILES, Tsk, read_published
from fedsim.results.report.comparison import ReportData
from fedsim.results.report.curves import curves
from fedsim.results.report.explanations import curves as score_curves
from fedsim.results.report.explanations import explanations


@pytest.fixture(autouse=True)
def rates(say: Say) -> None:
    """A table, in the folder in which commands are run."""
    rng = np.random.default_rng(0)
    x = rng.uniform(1, 3, (300, 3))
    rows = [",".join(f"{v:.6g}" for v in [*row, row[0] * row[1] - row[2]]) for row in x]
    Path("rates.csv").write_text("\n".join(["bond,bill,note,rate", *rows]))


def learn(**sections: Any) -> Run:
    usual: dict[str, Any] = {
        "data": {"name": "table", "path": "rates.csv", "target": "rate", "scale": "minmax"},
        **{"model": {"name": "tsk", "rules": 6, "fuzziness": 1.2}, "partition": FOUR},
        **{"method": {"name": "openfl_xai"}, "train": {"rounds": 1}},
    }
    return run(small_experiment(**{**usual, **sections}), "runs")


def test_the_rules_in_words_and_in_pictures(say: Say) -> None:
    done = learn()
    text = say.printed("explain", str(done.path), "--row", "5", "--row", "0", "--most", "3")
    (row,) = done.rounds.to_dict("records")
    assert text.startswith(
        f"the global model after round 1:\n{row['rules']} rules of 3 conditions on average; "
    )
    assert f"for {row['coverage']:.1%} of the test set a rule fires" in text
    listed = re.findall(r"^rule (\d+): weight .*\n  (IF bond is .* THEN rate = .*)$", text, re.M)
    expected = done.explanations.head(3)
    assert [int(number) for number, _ in listed] == expected["rule"].tolist()
    assert [words for _, words in listed] == expected["text"].tolist()
    assert f"… and {row['rules'] - 3} more, in runs/small/" in text
    dataset, _ = fitted(done.experiment.data.load())
    rules = {name: array.numpy() for name, array in done.weights().items()}
    model = done.experiment.model
    found = model.predict(rules, dataset.test_x.astype(float))
    truth = done.experiment.data.model_copy(update={"scale": "none"}).load().test_y
    values = dataset.target_scaling.undo(found.values)
    low, high = dataset.target_scaling.undo(np.array([0, 1]))
    assert f"\nin the rules rate is scaled, 0 for {low:.6g} and 1 for {high:.6g}\n" in text
    for k in (5, 0):
        assert f"row {k}, where rate is {truth[k]:.6g}:" in text
        assert f"rate = {values[k]:.6g}, by rule {found.deciding[k] + 1}: " in text
    for name in ("partitions", "rules", "activations"):
        picture = done.path / "explanations" / f"{name}-round-1.png"
        assert f"written: {picture.relative_to(Path.cwd())}" in text
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("undrawn")
def test_rules_travel_to_openfl_xai_and_back(say: Say) -> None:
    done = learn()
    text = say.printed("explain", str(done.path), "--npy", "for_them")
    assert text.endswith("written: for_them\n")
    assert sorted(p.name for p in Path("for_them").iterdir()) == sorted(FILES.values())
    found = read_published(Path("for_them"))
    for name, array in done.weights().items():
        np.testing.assert_array_equal(found[name], array.numpy())
    say("explain", str(done.path))
    ((heading, (table,), pictures),) = explanations(ReportData([done.path]))
    assert heading == "openfl_xai, seed 0"
    assert table.caption.startswith("Rules, after the last round")
    shown = [row[0].text for row in table.rows]
    assert shown == done.explanations["rule"].head(8).astype(str).tolist()
    drawn = [f"{name} round 1" for name in ("activations", "partitions", "rules")]
    assert [picture.words for picture in pictures] == drawn
    assert curves(ReportData([done.path])) == []  # a single round
    say.printed("report", str(done.path))
    assert "IF bond is" in (done.path / "report.html").read_text()


def test_crisp_rules(say: Say) -> None:
    done = learn(model={"name": "tree_rules", "rules": 4})
    text = say.printed("explain", str(done.path), "--row", "1")
    assert re.search(r"^  IF .*(≤|>).* THEN rate = \S+$", text, re.MULTILINE)
    assert "(the mean of all rules that fire; alone it says" in text
    assert (done.path / "explanations" / "rules-round-1.png").exists()
    complaint = say.refused("explain", str(done.path), "--npy", "for_them")
    assert complaint == (
        "error: --npy: OpenFL-XAI supports only rules of model.name=tsk with model.terms=3\n"
    )


def test_the_report_shows_scores_and_maps() -> None:
    explain = {"explainers": ["random", "occlusion"], "every": 1, "inputs": 3, "maps": True}
    done = ran(train={"rounds": 2, "participation": 0.3}, explain=explain)
    compared = ReportData([done.path])
    ((_, tables, pictures),) = explanations(compared)
    assert tables == []  # the scores are among the results
    assert [picture.words for picture in pictures] == [
        "Deletion and insertion, global model: median and middle half",
        "Agreement of explanations by random, last round",
        "Global model, random, by round",
        "Agreement of explanations by occlusion, last round",
        "Global model, occlusion, by round",
    ]
    plots = {plot.heading: [panel for panel, _ in plot.panels] for plot in score_curves(compared)}
    assert plots["Area under the deletion curve, global model by round"] == ["random", "occlusion"]
    assert "Agreement of clients (rank correlation), models of clients by round" in plots


def test_what_cannot_be_explained_is_said(say: Say) -> None:
    alone = learn(method={"name": "local_rules"})
    done = learn()
    for of, words, message in (
        (alone, "", "method.name=local_rules has no global model after round 1; clients"),
        (done, "--round 0", "method.name=openfl_xai has no global model after round 0"),
        (done, "--npy x --client 0 --client 1", "--npy writes the rules of one model; name one"),
        (done, "--explainer lrp", "is a rule model"),
    ):
        assert message in say.refused("explain", str(of.path), *words.split())
    (done.path / "explanations").mkdir()
    (done.path / "explanations" / "rules-round-1.png").mkdir()
    code, _, complaint = say("explain", str(done.path))
    assert code == 1
    assert "explanations/rules-round-1.png: cannot be written: " in complaint


def test_other_data_than_the_runs_is_refused(say: Say) -> None:
    done = learn()
    rates = Path("rates.csv")
    rates.write_text(rates.read_text().replace("bond", "band"))
    say.printed("explain", str(done.path))  # names are not what was learnt from
    lines = rates.read_text().splitlines()
    rates.write_text("\n".join([*lines[:-1], "9,9,9,9"]))
    complaint = say.refused("explain", str(done.path))
    assert "the data changed since the run started" in complaint


@pytest.mark.parametrize("name", ["openfl_xai", "local_rules"])
def test_a_clients_own_rules(say: Say, name: str) -> None:
    done = learn(method={"name": name})
    text = say.printed("explain", str(done.path), "--client", "2", "--row", "7")
    kind = "personal " if name == "local_rules" else ""
    assert text.startswith(f"client 2's {kind}model after round 1:\n")
    base = ModelSnapshot.of(done, client=2).explain(RulesExplainer())
    first = base.rows()[0]
    assert first["text"] in text
    found = base.model.predict(base.rules, base.test_x[7:8])
    value = base.dataset.target_scaling.undo(found.values[0])
    assert f"rate = {value:.6g}, by rule {found.deciding[0] + 1}: " in text
    assert (done.path / "explanations" / "rules-client-2-round-1.png").exists()


def encoded_table() -> Dataset:
    """Ages from 20 to 80 years and three grades, scaled to [0, 1]; stages in their order."""
    features = (
        Feature("age", unit="years"),
        Feature("grade", "one_hot", codes=("low", "high"), words=("low", "high")),
        Feature("stage", "ordinal", codes=("I", "II", "III"), words=("I", "II", "III")),
    )
    x = np.array([[0.0, 1, 0, 0, 0.5], [1.0, 0, 0, 1, 1.0]])
    low, span = np.array([20.0, 0, 0, 0, 0]), np.array([60.0, 1, 1, 1, 2])
    names = tuple(feature.name for feature in features)
    more: dict[str, Any] = {"features": names, "encoding": features, "target": "rate"}
    return Dataset(x, np.zeros(2), x, np.zeros(2), (), scaling=Scaling(low, span), **more)


def test_rules_of_a_table_are_in_its_units() -> None:
    data = encoded_table()
    low = np.array([[0.5, LEAST, LEAST, LEAST, LEAST], [LEAST, LEAST, LEAST, LEAST, 0.25]])
    high = np.array([[0.75, GREATEST, 0.5, GREATEST, GREATEST], [GREATEST] * 4 + [0.75]])
    trees = {"low": low, "high": high, "values": np.zeros(2), "weights": np.ones(2)}
    rules = readable(TreeRules(), trees, data)
    assert [in_words(rule, data.entry_names) for rule in rules] == [
        "IF 50 years < age ≤ 65 years AND grade is not high THEN y = 0",
        "IF I < stage ≤ II THEN y = 0",
    ]
    assert ranges_in_words(rules, data) == ""
    together, x, names, ticks = by_column(rules, np.asarray(data.test_x), data)
    assert names == ["age", "grade", "stage"]
    assert ticks == [("20 years", "80 years"), ("low", "high", "(other)"), ("I", "III")]
    assert x.tolist() == [[0, 0, 0.5], [1, 1, 1]]
    of_grade = together[0].conditions[1]
    assert (of_grade.feature, of_grade.words) == (1, "grade is low or (other)")
    assert of_grade.membership(np.array([0, 0.5, 1])).tolist() == [1, 0, 1]
    figure = draw_partitions(together, x, names, ticks)
    shown = [[label.get_text() for label in p.get_xticklabels()] for p in figure.axes]
    assert shown[0] == ["20 years", "80 years"]
    figure = draw_rules(together, np.ones(2, np.int64), names)
    assert "≠" in {text.get_text() for text in figure.axes[0].texts}


def test_fuzzy_sets_of_a_table_are_in_its_units() -> None:
    data = encoded_table()
    base = {"antecedents": np.array([[0, 0, 2, 0, 2], [2, 2, 0, 0, 1]])}
    base |= {"consequents": np.zeros((2, 6)), "weights": np.ones(2)}
    told = "LOW (0) and HIGH (1) lie at: age 20 years and 80 years; stage I and III"
    rules = readable(Tsk(), base, data)
    assert ranges_in_words(rules, data) == told
    unscaled = replace(data, encoding=(), features=(), scaling=Scaling())
    assert ranges_in_words(rules, unscaled) == ""  # as published, in [0, 1]


def test_rules_on_categories_in_words() -> None:
    wards = (OfCategory.of("ward", ward) for ward in ("north", "south"))
    names = ("age", *wards, OfCategory.of("sex", "f"))
    rules = {"antecedents": np.array([[2, 2, 0, 0], [1, 0, 0, 1]])}
    rules |= {"consequents": np.zeros((2, 1)), "weights": np.ones(2)}
    assert [in_words(rule, names) for rule in Tsk().explain(rules, names)] == [
        "IF age is HIGH AND ward is north AND sex is not f THEN y = 0",
        "IF age is MEDIUM AND ward is not north AND ward is not south AND sex=f is MEDIUM THEN "
        "y = 0",
    ]
    low, high = [LEAST, 0.5, LEAST, LEAST], [0.3, GREATEST, 0.5, GREATEST]
    trees = {"low": np.array([low]), "high": np.array([high])}
    trees |= {"values": np.zeros(1), "weights": np.ones(1)}
    told = [in_words(rule, names) for rule in TreeRules().explain(trees, names)]
    assert told == ["IF age ≤ 0.3 AND ward is north THEN y = 0"]
