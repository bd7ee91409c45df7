"""`fedsim explain` of models that choose the words that they decide on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from experiments import REVIEWS, Say, ran
from fedsim import Run
from fedsim.analysis.replay import ModelSnapshot
from fedsim.explain.explainers.rationales import RationaleExplainer
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures import documents as highlight
from fedsim.explain.pictures.documents import CHOSEN, MARKED, Chosen, draw_rationales
from fedsim.results.report.comparison import ReportData
from fedsim.results.report.explanations import explanations

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")


def chosen_words(rounds: int, test_reviews: int = 10) -> Run:
    return ran(
        data={**REVIEWS["data"], "test_reviews": test_reviews},
        partition=REVIEWS["partition"],
        model={"name": "rationale", "hidden": 3, "share": 0.5, "sparsity": 1, "continuity": 0},
        method={"name": "fedrnl"},
        train={"rounds": rounds},
    )


def explained(subject: ModelSnapshot, inputs: Inputs | None = None) -> Any:
    return subject.explain(RationaleExplainer(), inputs)


def documents(subject: ModelSnapshot, inputs: Inputs) -> list[Chosen]:
    return list(explained(subject, inputs).documents)


@pytest.fixture(scope="module")
def done() -> Run:
    return chosen_words(rounds=1)


def test_words_are_those_that_the_final_model_chooses(done: Run) -> None:
    subject = ModelSnapshot.of(done)
    data, network = subject.dataset, subject.network()
    for row in (0, 17, 39):
        x = torch.tensor(data.test_x[row : row + 1])
        with torch.no_grad():
            z = network.features.select(x)[0].bool().tolist()
            probabilities = network(x).softmax(dim=1)[0]
        (found,) = documents(subject, Inputs.of_rows(data, [row]))
        n = int((x != 0).sum())
        assert found == Chosen(
            words=tuple(data.words[w] for w in x[0, :n].tolist()),
            decision=data.classes[int(probabilities.argmax())],
            probability=pytest.approx(float(probabilities.max())),
            label=data.classes[data.test_y[row]],
            chosen=tuple(z[:n]),
            marked=tuple(data.truth["signal"][row, :n].tolist()),
        )
        longer = [" ".join(found.words), "a " * data.shape[0]]  # what is beside it is no matter
        again = documents(subject, Inputs.of_texts(data, longer, ["", ""]))[0]
        assert (again.words, again.chosen) == (found.words, found.chosen)
        assert (again.decision, again.probability) == (found.decision, found.probability)
        maps = RationaleExplainer().relevances(
            *(subject.explained(), subject.data(), x, x[:, 0], np.random.default_rng(0))
        )
        assert maps[0, :n].tolist() == [float(chosen) for chosen in z[:n]]
    # The weights are those of the run, not initial ones.
    named = done.weights()
    assert torch.equal(network.head.weight, named["head.weight"])


def test_in_words(done: Run) -> None:
    subject = ModelSnapshot.of(done)
    (found,) = documents(subject, Inputs.of_rows(subject.dataset, [3]))
    text = found.in_words()
    decided = f"predicted {found.decision} ({found.probability:.0%}), true class {found.label}: "
    assert text.startswith(decided)
    plain = [w.strip("[]_") for w in text.partition(": ")[2].split()]
    assert tuple(plain) == found.words
    assert text.count("[") == sum(found.chosen)
    assert text.count("_") == 2 * sum(found.marked)


def test_any_text_can_be_asked_about(done: Run, say: Say) -> None:
    """Also of unknown words alone, and longer than any that it was trained on."""
    subject = ModelSnapshot.of(done)
    texts = {"": 0, "!?": 1, "qwertz uiop": 2, "lovely head " * 200: subject.dataset.shape[0]}
    found = documents(subject, Inputs.of_texts(subject.dataset, [*texts], ["text"] * 4))
    assert [len(each.words) for each in found] == [*texts.values()]
    assert all(0.5 <= each.probability <= 1 for each in found)
    assert "(no word)" in say.printed("explain", str(done.path), "--text", "")
    said = say.printed("explain", str(done.path), "--text", "qwertz uiop")
    assert said.startswith("words that do not occur in the run's data: qwertz uiop\n")


def test_chosen_on_yellow_and_marked_in_blue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Figure] = []
    monkeypatch.setattr(highlight, "save", lambda figure, *_: kept.append(figure))
    words = ("a", "lovely", "head", "bitter")
    document = Chosen(
        words, "positive", 0.9, "negative", (False, True, False, True), (False, True, True, False)
    )
    draw_rationales([document], ["row 0"], tmp_path / "x.png")
    (axes,) = kept[0].axes
    inks = {text.get_text(): text.get_color() for text in axes.texts if text.get_text() in words}
    assert inks == {"a": "black", "lovely": MARKED, "head": MARKED, "bitter": "black"}
    starts = {text.get_text(): text.get_position()[0] for text in axes.texts}
    grounds = sorted(patch.get_paths()[0].get_extents().x0 for patch in axes.collections)
    assert grounds == pytest.approx([starts["lovely"] - 0.02, starts["bitter"] - 0.02])
    assert {to_hex(patch.get_facecolor()[0]) for patch in axes.collections} == {CHOSEN}
    lines = sorted(float(line.get_xdata()[0]) for line in axes.lines)
    assert lines == pytest.approx([starts["lovely"], starts["head"]])


def test_clients_and_rounds_side_by_side_in_the_report(say: Say) -> None:
    done = chosen_words(rounds=2, test_reviews=2)
    which = ["--client", "0", "--client", "3", "--round", "1", "--round", "2"]
    said = say.printed("explain", str(done.path), *which)
    for t in (1, 2):
        for k in (0, 3):
            assert f"client {k}'s model after round {t}, on the test set:" in said
    ((heading, _, pictures),) = explanations(ReportData([done.path]))
    assert heading == "fedrnl, seed 0"
    expected = {f"rationales client {k} round {t}" for k in (0, 3) for t in (1, 2)}
    assert {picture.words for picture in pictures} == expected


def test_a_client_chooses_as_its_own_model_does(done: Run, say: Say) -> None:
    picture = done.path / "explanations" / "rationales-client-2-round-1-row-5.png"
    for words in ([], ["--round", "1"]):
        said = say.printed("explain", str(done.path), "--client", "2", "--row", "5", *words)
        assert said.startswith("client 2's model after round 1, on the test set:\naccuracy: ")
        assert "F1 of selected words against marked ones" in said
        assert picture.read_bytes().startswith(b"\x89PNG")
    whole = ModelSnapshot.of(done)
    own = ModelSnapshot.of(done, client=2)
    assert not torch.equal(whole.network().head.weight, own.network().head.weight)
    last = done.rounds.iloc[-1]
    for name, value in explained(whole).scores.items():
        assert value == pytest.approx(last[name], abs=1e-6)
