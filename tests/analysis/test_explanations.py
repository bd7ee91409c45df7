"""`fedsim.explanations`: what `fedsim explain` shows, in Python."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from experiments import KINDS, Say, ran, refusal, run_example, small_experiment
from fedsim import Experiment, Run, explanations, load
from fedsim.analysis.attacks.audit import _explainers
from fedsim.analysis.explanations import explainer_of
from fedsim.analysis.replay import ModelSnapshot
from fedsim.explain.explainers.occlusion import Occlusion
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures import canvas


@pytest.fixture(scope="module")
def done() -> Run:
    return ran(train={"rounds": 2}, checkpoint={"every": 1})


class TestExplanations:
    def test_of_clients_after_rounds(self, done: Run) -> None:
        said: list[str] = []
        found = explanations(
            *(done, Occlusion(size=2)), client=[3, 5], after=[1, 2], row=4, progress=said.append
        )
        assert said == ["[1/1] recomputing round 1", "[2/2] recomputing round 2"]
        frame = found.frame
        assert frame[["round", "client"]].to_numpy().tolist() == [[1, 3], [1, 5], [2, 3], [2, 5]]
        assert set(frame["explainer"]) == {"occlusion"}
        assert set(frame["input"]) == {"row 4"}
        assert len(found) == 4
        snapshot = ModelSnapshot.of(done, client=5, after=1)
        inputs = Inputs.of_rows(snapshot.dataset, [4])
        own = snapshot.explain(Occlusion(size=2), inputs)
        assert found[1].text() == own.text()
        assert found.text() == "\n\n".join(each.text() for each in found)

    def test_of_the_last_global_model_by_default(self, done: Run, tmp_path: Path) -> None:
        found = explanations(done)
        assert found.frame["client"].isna().all()
        assert set(found.frame["round"]) == {2}
        assert len(found.frame) == 8
        (path,) = found.save(tmp_path / "made" / "here")
        assert path.name == "integrated_gradients-round-2.png"
        assert not (done.path / "explanations").exists()  # nothing is drawn unasked
        assert repr(found) == f"<1 explanation of {done.path}>"

    def test_settings_and_inputs_made_by_hand(self, done: Run) -> None:
        asked = [(Occlusion(size=2), None), ("occlusion", {"size": 2}), ("occlusion", None)]
        texts = [explanations(done, one, row=0, settings=own).text() for one, own in asked]
        assert texts[0] == texts[1] != texts[2]
        data = ModelSnapshot.of(done).dataset
        by_hand = explanations(done, input=Inputs.of_arrays(data.test_x[:1], "mine"))
        of_row = explanations(done, row=0)
        assert by_hand.frame["input"].tolist() == ["mine 0"]
        assert by_hand.frame["half"].tolist() == of_row.frame["half"].tolist()

    def test_it_shows_itself_in_a_notebook(self, done: Run, tmp_path: Path) -> None:
        Image.new("RGB", (30, 20)).save(tmp_path / "a<b.png")
        found = explanations(done, input=tmp_path / "a<b.png")
        shown = found._repr_html_()
        assert "a&lt;b.png: 30×20 RGB, resized to 8×8 gray" in shown
        assert "a<b" not in shown
        assert shown.count('<img src="data:image/png;base64,iVBOR') == 1
        assert "<th>decision</th>" in shown
        (one,) = found
        assert 'src="data:image/png;base64,' in one._repr_html_()

    def test_the_example_runs(self, done: Run, tmp_path: Path) -> None:
        run_example(explanations, folder=done.path)
        shutil.rmtree(done.path / "pictures")


class TestCommand:
    def test_pictures_lie_side_by_side(self, done: Run, say: Say, tmp_path: Path) -> None:
        (tmp_path / "mine").mkdir()
        for name in ("photo.jpg", "mine/one.png", "mine/two.jpeg"):
            Image.new("RGB", (30, 20)).save(tmp_path / name)
        notes = {
            ("--input", "photo.jpg"): "photo.jpg: 30×20 RGB, resized to 8×8 gray\n",
            ("--input", "mine"): "mine: 2 pictures of 30×20 RGB, resized to 8×8 gray\n",
            ("--row", "3"): "the global model after round 2",
            ("--row", "3", "--client", "1", "--round", "1"): "client 1's model after round 1",
        }
        for words, first in notes.items():
            text = say.printed("explain", str(done.path), *words, "--out", "drawn")
            assert text.startswith(first)
        beside = ("client-1-round-1-row-3", "round-2-mine", "round-2-photo", "round-2-row-3")
        names = [f"integrated_gradients-{each}.png" for each in beside]
        assert sorted(path.name for path in Path("drawn").iterdir()) == names

    def test_a_picture_says_whose_it_is(
        self, done: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And what its colours mean."""
        drawn: list[Figure] = []
        original = canvas.save

        def save(figure: Figure, path: Path, title: str = "") -> None:
            original(figure, path, title)
            drawn.append(figure)

        monkeypatch.setattr("fedsim.explain.pictures.images.save", save)
        explanations(done, client=3, after=1, row=[0, 1]).save(tmp_path)
        words = [text.get_text().replace("\n", " ") for text in drawn[0].texts]
        assert words == ["Client 3's model after round 1, integrated_gradients"]
        bar = drawn[0].axes[-1]
        assert [label.get_text() for label in bar.get_xticklabels()] == ["against", "0", "for"]
        title = drawn[0].texts[0].get_window_extent()
        assert all(title.y0 > axes.title.get_window_extent().y1 for axes in drawn[0].axes)


def test_the_latest_run_below_is_taken(done: Run, say: Say, tmp_path: Path) -> None:
    below = tmp_path / "runs" / "small"
    for name in ("20200101-000000-0000", done.path.name):
        shutil.copytree(done.path, below / name)
    for folder in ("runs/small", "runs"):
        error = say.refused("resume", folder)
        first, second = error.splitlines()
        latest = (below / done.path.name).relative_to(tmp_path)
        assert first == f"{folder}: the latest of 2 results, {latest.relative_to(folder)}"
        assert second.endswith(f"{latest}: the run is finished; there is nothing to resume")
    (tmp_path / "empty").mkdir()
    assert "(no readable manifest.json in it)" in refusal(lambda: load(tmp_path / "empty"))


class TestSettings:
    """Those of the run count, unless others are given."""

    @pytest.fixture(scope="class")
    def explained(self) -> Run:
        named = [{"name": "occlusion", "size": 2}, {"name": "integrated_gradients", "steps": 3}]
        return ran(train={"rounds": 1}, explain={"explainers": named, "inputs": 2})

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            (None, {"name": "integrated_gradients", "steps": 3}),
            ("integrated_gradients: {target: centred}", {"steps": 3, "target": "centred"}),
            ("occlusion", {"name": "occlusion", "size": 2}),
            ("occlusion: {size: 1}", {"name": "occlusion", "size": 1}),
            ("occlusion:", {"name": "occlusion", "size": 2}),
            ("{name: occlusion, size: 3}", {"name": "occlusion", "size": 3}),
            ({"name": "occlusion", "size": 3}, {"name": "occlusion", "size": 3}),
            ({"occlusion": {"size": 3}}, {"name": "occlusion", "size": 3}),
            (Occlusion(), {"name": "occlusion", "size": 4}),
            ("lrp: {composite: epsilon}", {"composite": "epsilon"}),
            ("smoothgrad", {"name": "smoothgrad", "samples": 20}),
        ],
    )
    def test_everywhere(self, explained: Run, asked: Any, expected: dict[str, Any]) -> None:
        used = explainer_of(explained, asked)
        assert {key: getattr(used, key) for key in expected} == expected
        if asked is not None:
            (audited,) = _explainers(asked, explained.experiment.explain)
            assert audited == used

    def test_the_map_of_the_run_is_shown(self, explained: Run) -> None:
        sizes = {
            words: explanations(explained, words, row=0)[0].rows()[0]["half"]
            for words in ("occlusion", "occlusion: {size: 2}", "occlusion: {size: 4}")
        }
        assert sizes["occlusion"] == sizes["occlusion: {size: 2}"] != sizes["occlusion: {size: 4}"]

    def test_the_usual_beside_random(self) -> None:
        for sections, names in (
            ({"explain": {}}, ["integrated_gradients", "random"]),
            ({"explain": {"every": 2, "explainers": ["gradient"]}}, ["gradient"]),
            ({**KINDS["rules"], "train": {"rounds": 1}, "explain": {}}, ["rules", "random"]),
        ):
            made = small_experiment(**sections)
            assert [one.name for one in made.explain.explainers] == names
            assert Experiment.from_dict(made.model_dump(mode="json")) == made
