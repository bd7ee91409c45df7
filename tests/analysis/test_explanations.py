"""`fedsim.explanations`: what `fedsim explain` shows, in Python."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from experiments import FEW, Say, run_example, small_experiment
from fedsim import Experiment, Run, explanations, load, run
from fedsim.analysis.attacks.audit import _explainers
from fedsim.analysis.explanations import explainer_of
from fedsim.analysis.replay import ModelSnapshot
from fedsim.errors import BadInput
from fedsim.explain.explainers.occlusion import Occlusion
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures import canvas


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    made = small_experiment(data=FEW, train={"rounds": 2}, checkpoint={"every": 1})
    return run(made, tmp_path_factory.mktemp("runs"))


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

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"row": 1, "text": "x"}, "give only one of row, input and text"),
            ({"row": 1, "explainer": "tree"}, "tree takes none: a surrogate decision tree"),
            ({"settings": {"step": 3}}, "not a setting of explainer .*; did you mean 'steps'"),
            ({"settings": {"steps": 0}}, "steps: must be greater than or equal to 1$"),
            ({"explainer": "lpr"}, "there is no explainer 'lpr'; did you mean 'lrp'"),
            ({"client": 11}, "there is no client 11; there are 10"),
            ({"after": 3}, "there is no round 3; it has 2"),
        ],
    )
    def test_what_cannot_be_explained(
        self, done: Run, arguments: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(BadInput, match=message):
            explanations(done, **arguments)


class TestCommand:
    def test_pictures_of_all_inputs_lie_side_by_side(
        self, done: Run, say: Say, tmp_path: Path
    ) -> None:
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
            code, text, _ = say("explain", str(done.path), *words, "--out", "drawn")
            assert code == 0
            assert text.startswith(first)
        assert sorted(path.name for path in Path("drawn").iterdir()) == [
            "integrated_gradients-client-1-round-1-row-3.png",
            "integrated_gradients-round-2-mine.png",
            "integrated_gradients-round-2-photo.png",
            "integrated_gradients-round-2-row-3.png",
        ]

    def test_files_that_will_not_do(self, done: Run, say: Say) -> None:
        Path("broken.png").write_bytes(b"no picture")
        Image.fromarray(np.zeros((8, 8), np.int32)).save("deep.tif")
        for name, message in {
            "nowhere.jpg": "there is no such file",
            "broken.png": "cannot be read: cannot identify image file 'broken.png'",
            "deep.tif": "cannot be read: it has pixels of type I, for which black and white are "
            "not defined; save it with 8 bits a channel",
        }.items():
            code, text, error = say("explain", str(done.path), "--input", name)
            assert (code, text) == (2, "")
            assert error == f"error: {name}: {message}\n"

    def test_a_picture_says_whose_model_it_is_about(
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
        code, text, error = say("resume", folder)
        assert (code, text) == (2, "")
        first, second = error.splitlines()
        latest = (below / done.path.name).relative_to(tmp_path)
        assert first == f"{folder}: the latest of 2 results, {latest.relative_to(folder)}"
        assert second.endswith(f"{latest}: the run is finished; there is nothing to resume")
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=r"not .* \(no readable manifest.json in it\)$"):
        load(tmp_path / "empty")


WRITE = "write a name, or a name with settings"


class TestSettings:
    """Those of the run count, unless others are given."""

    @pytest.fixture(scope="class")
    def explained(self, tmp_path_factory: pytest.TempPathFactory) -> Run:
        named = [{"name": "occlusion", "size": 2}, {"name": "integrated_gradients", "steps": 3}]
        section = {"explainers": named, "inputs": 2}
        made = small_experiment(data=FEW, train={"rounds": 1}, explain=section)
        return run(made, tmp_path_factory.mktemp("runs"))

    @pytest.mark.parametrize(
        ("asked", "expected"),
        [
            (None, {"name": "integrated_gradients", "steps": 3}),
            ("integrated_gradients", {"name": "integrated_gradients", "steps": 3}),
            ("integrated_gradients: {target: centred}", {"steps": 3, "target": "centred"}),
            ("occlusion", {"name": "occlusion", "size": 2}),
            ("occlusion: {size: 1}", {"name": "occlusion", "size": 1}),
            ("occlusion:", {"name": "occlusion", "size": 2}),
            ("{name: occlusion, size: 3}", {"name": "occlusion", "size": 3}),
            ({"name": "occlusion", "size": 3}, {"name": "occlusion", "size": 3}),
            ({"occlusion": {"size": 3}}, {"name": "occlusion", "size": 3}),
            (Occlusion(), {"name": "occlusion", "size": 4}),
            (
                "lrp: {composite: epsilon, epsilon: 1e-3}",
                {"composite": "epsilon", "epsilon": 1e-3},
            ),
            ("smoothgrad", {"name": "smoothgrad", "samples": 20}),
        ],
    )
    def test_in_explanations_and_audits(
        self, explained: Run, asked: Any, expected: dict[str, Any]
    ) -> None:
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

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            ("oclusion: {size: 1}", "there is no explainer 'oclusion'; did you mean 'occlusion'?"),
            ("occlusion: {sizes: 1}", "sizes is not a setting of explainer occlusion; did you"),
            ("occlusion: {size: 0}", "explainer occlusion: size: must be greater than or equal"),
            ("occlusion: 2", f"explainer 'occlusion: 2': {WRITE}: '"),
            ("occlusion: {size: ", f"{WRITE}: 'occlusion: {{size: 1}}'"),
            ("{size: 1, every: 2}", WRITE),
        ],
    )
    def test_what_will_not_do(self, explained: Run, asked: str, message: str) -> None:
        for find in (
            lambda: explainer_of(explained, asked),
            lambda: _explainers(asked, explained.experiment.explain),
        ):
            with pytest.raises(BadInput) as refused:
                find()
            assert message in str(refused.value)
            assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("command", ["explain", "attack"])
    def test_commands_say_so(self, explained: Run, say: Say, command: str) -> None:
        code, text, error = say(command, str(explained.path), "--explainer", "occlusion: 2")
        assert (code, text) == (2, "")
        assert error.startswith(f"error: explainer 'occlusion: 2': {WRITE}: '")
        assert error.count("\n") == 1

    @pytest.mark.parametrize(
        ("sections", "names"),
        [
            ({"explain": {"every": 2}}, ["integrated_gradients", "random"]),
            ({"explain": {}}, ["integrated_gradients", "random"]),
            ({"explain": {"every": 2, "explainers": ["gradient"]}}, ["gradient"]),
            (
                {
                    "explain": {"every": 2},
                    "data": {"name": "friedman"},
                    "partition": {"kind": "iid", "clients": 3},
                    "model": {"name": "tsk"},
                    "method": {"name": "openfl_xai"},
                    "train": {"rounds": 1},
                },
                ["rules", "random"],
            ),
        ],
    )
    def test_the_usual_explainer_beside_random(
        self, sections: dict[str, Any], names: list[str]
    ) -> None:
        made = small_experiment(**sections)
        assert made.explain is not None
        assert [one.name for one in made.explain.explainers] == names
        again = Experiment.from_dict(made.model_dump(mode="json"))
        assert again == made
        with pytest.raises(BadInput, match=r"explain\.explainers: is an empty list"):
            small_experiment(explain={"explainers": []})
