"""Tables of numbers, categories, dates and blanks: how they become `x`, and what is fitted."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import MANY
from sklearn.compose import make_column_transformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler

import fedsim
from fedsim.data import ClientSplits, Dataset, Ragged, load_dataset
from fedsim.data.dataset import check_parts, fitted
from fedsim.data.encoding import Feature, Preprocessing
from fedsim.data.sources import from_python
from fedsim.data.sources.tables import Table
from fedsim.errors import DataError, FedsimWarning
from fedsim.explain import ExplainedData, ExplainedModel
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.attributed import Attributed
from fedsim.explain.inputs import Inputs
from fedsim.models import models
from fedsim.results.run import Run
from tests.experiments import examples

NUMBERS, WORDS = ["age", "dose"], ["ward", "sex"]


def made(n: int, seed: int, blanks: float = 0.2) -> pd.DataFrame:
    """n rows of numbers and words, of which some are blank, and a label."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.normal(60, 10, n).round(1),
            "dose": np.exp(rng.normal(0, 2, n)),
            "ward": rng.choice(["north", "south", "east"], n),
            "sex": rng.choice(["f", "m"], n),
        }
    )
    hidden = rng.random(frame.shape) < blanks
    hidden[0] = False  # a value of each, at least
    frame = frame.mask(hidden)
    frame["ill"] = np.arange(n) % 2
    return frame


def written(folder: Path, frame: pd.DataFrame, name: str = "table.csv") -> Path:
    path = folder / name
    frame.to_csv(path, index=False)
    return path


def of_numbers(x: Any, **preprocessing: Any) -> Dataset:
    """Numbers with two classes in turn."""
    x, y = np.array(x, np.float32)[:, None], np.arange(len(x)) % 2
    made = Preprocessing(**preprocessing)
    return Dataset(x, y, x, y, ("a", "b"), features=("f",), preprocessing=made)


def dealt(data: Dataset, parts: list[list[int]]) -> ClientSplits:
    none: Any = Ragged.of([[] for _ in parts])
    return ClientSplits(Ragged.of([np.array(part, np.int64) for part in parts]), none, none)


class TestFit:
    @given(st.data())
    @examples(40)
    def test_federated_is_pooled_to_the_bit(self, data: st.DataObject) -> None:
        rows = data.draw(st.integers(2, 30))
        kinds = [
            Feature("number", indicator=True),
            Feature("date", "date"),
            Feature("grade", "ordinal", codes=("a", "b"), words=("a", "b")),
            Feature("ward", "one_hot", codes=("n", "s"), words=("n", "s")),
        ]
        number = st.one_of(st.just(np.nan), st.floats(-1e6, 1e6, width=32))
        x = np.zeros((rows, 7), np.float32)
        for row in x:
            row[0], row[2] = data.draw(number), data.draw(number)
            row[1] = np.isnan(row[0])
            row[3] = data.draw(st.sampled_from([np.nan, 0, 1]))
            place = data.draw(st.sampled_from([None, 0, 1, 2]))
            row[4:] = np.nan if place is None else np.arange(3) == place
        x[0] = [1, 0, 1, 1, 1, 0, 0]  # some value of each
        client = np.array([data.draw(st.integers(0, 3)) for _ in range(rows)])
        parts = [np.flatnonzero(client == k).tolist() for k in np.unique(client)]
        y = np.arange(rows) % 2
        missing = data.draw(st.sampled_from(["mean", "most_frequent"]))
        scale = data.draw(st.sampled_from(["none", "minmax", "standard"]))
        of = Dataset(
            x, y, x, y, ("a", "b"), features=("number", "date", "grade", "ward"), encoding=kinds
        )
        found = []
        for fit in ("pooled", "federated"):
            unfitted = replace(of, preprocessing=Preprocessing(missing, scale, fit))
            found.append(fitted(unfitted, dealt(of, parts)))
        (pooled, silent), (federated, traffic) = found
        assert np.array_equal(pooled.x, federated.x)
        assert np.array_equal(pooled.scaling.fill, federated.scaling.fill, equal_nan=True)
        assert np.isfinite(pooled.x).all()
        assert silent == (0, 0)
        assert min(traffic) > 0

    @pytest.mark.parametrize("scale", ["none", "minmax", "standard"])
    @pytest.mark.parametrize("missing", ["mean", "median", "most_frequent"])
    @pytest.mark.parametrize("indicator", [False, True])
    def test_is_what_scikit_learn_does(
        self, tmp_path: Path, scale: Any, missing: Any, indicator: bool
    ) -> None:
        train, test = made(60, 1), made(20, 2)
        test.loc[3, "ward"] = "west"
        paths = written(tmp_path, train), written(tmp_path, test, "test.csv")
        source = Table(
            path=paths[0], label="ill", test_path=paths[1], missing=missing, scale=scale,
            indicator=indicator,
        )  # fmt: skip
        with pytest.warns(FedsimWarning, match="no training row has; counted as other"):
            data, _ = fitted(source.load())
        scaler = {"none": "passthrough", "minmax": MinMaxScaler(), "standard": StandardScaler()}
        one_hot = OneHotEncoder(sparse_output=False, handle_unknown="ignore")
        theirs = make_column_transformer(
            (make_pipeline(SimpleImputer(strategy=missing), scaler[scale]), NUMBERS),
            (make_pipeline(SimpleImputer(strategy="most_frequent"), one_hot), WORDS),
        ).fit(train)
        names = list(data.entry_names)
        ours = [n for n in names if not n.endswith("(other)") and not n.endswith("(blank)")]
        for frame, x in ((train, data.x), (test, data.test_x)):
            assert x[:, [names.index(n) for n in ours]] == pytest.approx(
                theirs.transform(frame), rel=1e-5, abs=1e-5
            )
            for name in NUMBERS + WORDS if indicator else ():
                blank = x[:, names.index(f"{name}=(blank)")]
                assert blank.tolist() == frame[name].isna().tolist()
        assert data.test_x[3, names.index("ward=(other)")] == 1
        assert not data.x[:, names.index("ward=(other)")].any()

    def test_each_client_fits_to_its_own(self, tmp_path: Path) -> None:
        frame = made(40, 3)
        path = written(tmp_path, frame)
        source = Table(
            path=path, label="ill", test_path=path, missing="mean", scale="standard", fit="client"
        )
        data = source.load()
        parts = [list(range(25)), list(range(25, 40))]
        found, traffic = fitted(data, dealt(data, parts))
        pooled, _ = fitted(replace(data, preprocessing=Preprocessing("mean", "standard")))
        assert traffic == (0, 0)
        assert np.array_equal(found.test_x, pooled.test_x)
        for part in parts:
            age = found.x[part, 0]
            assert age.mean() == pytest.approx(0, abs=1e-6)
            assert age.std() == pytest.approx(1, abs=1e-6)

    def test_only_training_examples_are_looked_at(self) -> None:
        none: Any = Ragged.of([[]])
        splits = ClientSplits(Ragged.of([[0, 1]]), none, Ragged.of([[2]]))
        found, _ = fitted(of_numbers([0, 2, 100], scale="minmax"), splits)
        assert found.x.ravel().tolist() == [0, 1, 50]


class TestShown:
    def test_values_are_in_the_units_and_words_of_the_file(self, tmp_path: Path) -> None:
        frame = pd.DataFrame(
            {
                "age": [63.5, 40.0, np.nan, 50.0],
                "sex": [1, 0, 1, 0],
                "seen": ["2020-02-29", "2021-01-01", "1969-12-31", "2020-02-29"],
                "fit": [True, False, True, False],
                "grade": ["low", "high", "mid", "low"],
                "ill": ["no", "yes", "no", "yes"],
            }
        )
        path = written(tmp_path, frame)
        source = Table(
            path=path, label="ill", test_path=path, missing="mean", indicator=True,
            scale="minmax", units={"age": "years"},
            categorical={"sex": {0: "female", 1: "male"}, "grade": ["low", "mid", "high"]},
        )  # fmt: skip
        data, _ = fitted(source.load())
        none = np.zeros(5, np.bool_)
        assert data.shown(data.x[0], none) == (
            "age = 63.5 years", "sex = male", "seen = 2020-02-29", "fit = yes", "grade = low",
        )  # fmt: skip
        assert data.shown(data.x[2], none)[0] == "age = (blank)"
        assert data.shown(data.test_x[1], none)[1:] == (
            "sex = female", "seen = 2021-01-01", "fit = no", "grade = high",
        )  # fmt: skip
        assert data.entry_names == (
            *("age", "age=(blank)", "sex=female", "sex=male", "sex=(other)", "seen", "fit"),
            "grade",
        )


class TestRefused:
    def test_a_feature_that_a_client_does_not_have(self, tmp_path: Path) -> None:
        frame = made(20, 0, blanks=0)
        frame.loc[10:, "age"] = np.nan
        path = written(tmp_path, frame)
        data = Table(path=path, label="ill", test_path=path, missing="mean", fit="client").load()
        splits = dealt(data, [list(range(10)), list(range(10, 20))])
        line = "data.features: client 1 has no value of 'age'; leave it out, or set data.fit"
        with pytest.raises(DataError, match=line):
            fitted(data, splits)

    def test_texts_of_too_many_words_are_not_used(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        path.write_text(MANY)
        data = Table(path=path, label="ill").load()
        assert data.features == ("age",)
        assert data.note == "features: age (not used: name, which is text)"


NAMES = ("gradient_x_input", "integrated_gradients", "occlusion")


class TestExplained:
    def test_relevance_of_a_feature_has_no_order_of_categories(self) -> None:
        rng = np.random.default_rng(0)
        words = ("a", "b", "c")
        numbers, index = rng.normal(size=(8, 1)).astype(np.float32), rng.integers(3, size=8)
        network = torch.nn.Sequential(
            torch.nn.Linear(5, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2)
        )
        weight = network[0].weight.detach().clone()
        found: dict[str, list[np.ndarray]] = {}
        y = np.arange(8) % 2
        for order in itertools.permutations(range(3)):
            one_hot = (np.array([*order, 3]) == index[:, None]).astype(np.float32)
            x = np.concatenate([numbers, one_hot], axis=1)
            feature = Feature("ward", "one_hot", codes=words, words=words)
            data = Dataset(
                x, y, x, y, ("no", "yes"), features=("age", "ward"),
                encoding=(Feature("age"), feature),
            )  # fmt: skip
            with torch.no_grad():
                network[0].weight[:] = weight[:, [0, *(1 + np.array(order)), 4]]
            model = ExplainedModel(models.parse({"name": "mlp"}), "", 0, 0, network=network.eval())
            about = ExplainedData(data, torch.from_numpy)
            tensor, decided = torch.from_numpy(x), torch.from_numpy(y)
            for name, baseline in itertools.product(NAMES, ("zero", "mean")):
                explainer = explainers.parse({"name": name, "baseline": baseline})
                own = explainer.each(model, about, tensor, decided, np.random.default_rng(1))
                assert own.shape == (8, 2)
                found.setdefault(f"{name} {baseline}", []).append(own)
        for name, maps in found.items():
            for own in maps[1:]:
                assert own == pytest.approx(maps[0], abs=1e-5), name
        for name in ("sage", "random"):  # which draw by input
            explainer = explainers.parse({"name": name})
            own = explainer.each(model, about, tensor, decided, np.random.default_rng(1))
            assert own.shape == (8, 2)


class TestRuns:
    """Whole runs on tables with categories and blanks."""

    @staticmethod
    def sections(folder: Path, **changes: Any) -> dict[str, Any]:
        path = written(folder, made(80, 5).assign(site=np.arange(80) % 4))
        data = {
            **{"name": "table", "path": str(path), "label": "ill", "client_column": "site"},
            **{"missing": "mean", "indicator": True, "scale": "standard"},
        }
        return {
            "data": {**data, **changes.pop("data", {})},
            "partition": {"kind": "natural"},
            "model": {"name": "mlp", "hidden": [4]},
            "train": {"rounds": 2},
            **changes,
        }

    def test_sums_of_clients_are_counted_once(
        self, tmp_path: Path, finish: Callable[..., Run]
    ) -> None:
        pooled = finish(**self.sections(tmp_path))
        federated = finish(**self.sections(tmp_path, data={"fit": "federated"}))
        for name, weights in pooled.weights().items():
            assert torch.equal(weights, federated.weights()[name])
        first, second = (federated.rounds.iloc[t] for t in (0, 1))
        for way in ("up", "down"):
            assert first[f"one_off_{way}"] > 0
            assert second[f"bytes_{way}"] == pooled.rounds.iloc[1][f"bytes_{way}"]
            assert first[f"bytes_{way}"] - first[f"one_off_{way}"] == second[f"bytes_{way}"]

    def test_inputs_are_read_as_training_was(
        self, tmp_path: Path, finish: Callable[..., Run]
    ) -> None:
        run = finish(**self.sections(tmp_path))
        path = tmp_path / "one.csv"
        path.write_text("age,dose,ward,sex\n61.5,,west,f\n")
        found = fedsim.explanations(run, "integrated_gradients", input=path)
        assert "age = 61.5" in found.text()
        (explanation,) = found
        assert isinstance(explanation, Attributed)
        assert explanation.inputs.shown(explanation.dataset, 0) == (
            "age = 61.5", "dose = (blank)", "ward = (other)", "sex = f",
        )  # fmt: skip


class TestAsFilesHaveThem:
    """What a file may have, and a person would not expect to matter."""

    def test_blanks_of_each_file_and_of_inputs(
        self, tmp_path: Path, finish: Callable[..., Run]
    ) -> None:
        for name, shift in (("one", 0), ("two", 3)):
            rows = [f"{k + shift},{'ab'[k % 2]},{k % 2}" for k in range(20)]
            if name == "two":
                rows[4], rows[7] = "?,a,0", "-9,?,1"
            (tmp_path / f"{name}.csv").write_text("\n".join(["age,ward,ill", *rows]))
        data = {
            **{"name": "table", "path": str(tmp_path / "*.csv"), "label": "ill"},
            **{"blanks": ["?", -9], "missing": "mean", "indicator": True, "scale": "standard"},
            "client_column": "file",
        }
        run = finish(
            data=data, partition={"kind": "natural"}, model={"name": "mlp"}, train={"rounds": 1}
        )
        path = tmp_path / "input.tsv"
        path.write_text("age\tward\n-9\t?\n4\tzzz\n")
        found = fedsim.explanations(run, "occlusion", input=path)
        (explanation,) = found
        assert isinstance(explanation, Attributed)
        told = [explanation.inputs.shown(explanation.dataset, k) for k in range(2)]
        assert told == [("age = (blank)", "ward = (blank)"), ("age = 4", "ward = (other)")]
        assert any("'zzz', which no training row has" in note for note in found.notes)

    def test_an_unknown_index_is_marked_as_blank(self, tmp_path: Path) -> None:
        train, test = tmp_path / "a.csv", tmp_path / "b.csv"
        train.write_text("grade,age,ill\nlow,1,0\nmid,2,1\n,3,0\nlow,4,1\n")
        test.write_text("grade,age,ill\nhigh,1,0\nmid,2,1\n")
        source = Table(
            path=train, test_path=test, label="ill", missing="mean", indicator=True,
            categorical={"grade": "ordinal"},
        )  # fmt: skip
        with pytest.warns(FedsimWarning, match="counted as blank"):
            data, _ = fitted(source.load())
        assert Inputs.of_rows(data, [0]).shown(data, 0)[0] == "grade = (blank)"
        assert data.test_x[:, 1].tolist() == [1, 0]

    def test_filled_cells_are_shown_as_blank(self, tmp_path: Path) -> None:
        train, test = tmp_path / "a.csv", tmp_path / "b.csv"
        train.write_text("grade,age,ill\nlow,30,0\nmid,50,1\nlow,70,0\nlow,40,1\n")
        test.write_text("grade,age,ill\n,,0\nmid,50,1\n")
        source = Table(path=train, test_path=test, label="ill", missing="mean", scale="minmax")
        data, _ = fitted(source.load())
        inputs = Inputs.of_rows(data, [0, 1])
        assert inputs.shown(data, 0) == ("grade = (blank)", "age = (blank)")
        assert inputs.shown(data, 1) == ("grade = mid", "age = 50")
        of_file = Inputs.of_file(data, test)
        assert of_file.shown(data, 0) == ("grade = (blank)", "age = (blank)")
        assert from_python.kept(from_python.keep(data)["hash"], None).test_blanks.keys() == {
            *("grade", "age")
        }

    def test_numbers_far_from_training_are_told(self, tmp_path: Path) -> None:
        train, one = tmp_path / "a.csv", tmp_path / "b.csv"
        train.write_text("age,ill\n30,0\n50,1\n70,0\n40,1\n35,0\n45,1\n55,0\n65,1\n")
        one.write_text("age\n75\n1000\n")
        source = Table(path=train, label="ill", scale="standard", units={"age": "years"})
        data, _ = fitted(source.load())
        (note,) = Inputs.of_file(data, one).notes
        assert "age = 1000 years is far from training's" in note

    @pytest.mark.parametrize(
        ("scale", "low", "step"), [("standard", 0, 1), ("minmax", 0, 1), ("standard", 1e4, 0.1)]
    )
    def test_numbers_are_shown_as_they_are_in_the_file(
        self, tmp_path: Path, scale: Any, low: float, step: float
    ) -> None:
        path, numbers = tmp_path / "a.csv", [f"{low + step * k:.6g}" for k in range(1, 121)]
        path.write_text("age,ill\n" + "".join(f"{a},{k % 2}\n" for k, a in enumerate(numbers)))
        data, _ = fitted(Table(path=path, label="ill", scale=scale).load())
        shown = [data.shown(row, np.zeros(1, np.bool_))[0] for row in data.x]
        assert set(shown) <= {f"age = {number}" for number in numbers}

    def test_decimal_commas_and_a_word_for_blanks(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        cells = ["0,5", "k.A.", "1,25", "-9,0", "2,5", "3,5", "-9,0", "4,5"]
        path.write_text("dose;ill\n" + "".join(f"{c};{k % 2}\n" for k, c in enumerate(cells)))
        for blanks in (["k.A.", "-9"], ["k.A.", "-9,0"], {"dose": ["k.A.", "-9.0"]}):
            source = Table(path=path, label="ill", blanks=blanks, missing="mean", test_path=path)
            x = source.load().x[:, 0]
            assert np.isnan(x).tolist() == [False, True, False, True, False, False, True, False]

    def test_rows_that_are_dropped_name_the_clients_that_are_lost(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        rows = [f"{'' if k % 3 == 1 else k},{'abc'[k % 3]},{k % 2}\n" for k in range(30)]
        path.write_text("dose,site,ill\n" + "".join(rows))
        source = Table(path=path, label="ill", missing="drop", client_column="site")
        with pytest.warns(FedsimWarning, match="; all rows of site b; they are left out"):
            assert set(source.load().columns["site"]) == {"a", "c"}

    def test_doubtful_tables(self, tmp_path: Path) -> None:
        path = tmp_path / "a.csv"
        rows = [f"{2**60 + k},{['high', 'High '][k % 2]},{'Aa'[k % 2]},{k % 2}" for k in range(40)]
        path.write_text("\n".join(["pid,risk,site,ill", *rows]))
        source = Table(
            path=path, label="ill", client_column="site", blanks=["none"], test_path=path
        )
        with warnings.catch_warnings(record=True) as caught:
            load_dataset(source)
        told = " | ".join(str(warning.message) for warning in caught)
        for part in (
            "column 'pid': float32 cannot hold 39 of its numbers, such as 1152921504606846977",
            "the categories of 'risk' 'High', 'high' differ only in case",
            f"data.blanks: no cell of {path} is 'none'",
            f"data.test_path: {path} is also read for training",
        ):
            assert part in told

    def test_only_features_are_blank_or_dropped(self, tmp_path: Path) -> None:
        path = tmp_path / "t.csv"
        notes = [f"note {k}" if k % 3 else "" for k in range(300)]
        rows = [f"{k % 7 or ''},{note},{k % 2}" for k, note in enumerate(notes)]
        path.write_text("\n".join(["age,note,ill", *rows]))
        with pytest.warns(FedsimWarning, match="43 of 300 rows"):
            data = Table(path=path, label="ill", missing="drop", blanks=["9", "none"]).load()
        assert data.features == ("age",)
        assert len(data.y) + len(data.test_y) == 257
        assert data.classes == ("0", "1")

    def test_clients_that_share_examples_have_no_scale_of_their_own(self) -> None:
        data = of_numbers(range(8), scale="standard", fit="client")
        with pytest.raises(DataError, match=r"^data.fit=client: clients share examples"):
            fitted(data, dealt(data, [[0, 1, 2, 3], [3, 4, 5]]))

    def test_the_server_sends_nothing(self) -> None:
        data = of_numbers(range(8), scale="standard", fit="federated")
        splits = dealt(data, [[0, 1, 2], [3, 4, 5]])
        with_server = replace(splits, server=np.array([6, 7]))
        assert fitted(data, splits)[1] == fitted(data, with_server)[1]
        assert not np.array_equal(fitted(data, splits)[0].x, fitted(data, with_server)[0].x)

    def test_two_entries_of_one_name(self) -> None:
        x = np.zeros((2, 4), np.float32)
        encoding = (Feature("w", "one_hot", codes=("a", "b"), words=("a", "b")), Feature("w=a"))
        data = Dataset(
            x, np.array([0, 1]), x, np.array([0, 1]), ("a", "b"), features=("w", "w=a"),
            encoding=encoding,
        )  # fmt: skip
        with pytest.raises(DataError, match="has two entries 'w=a'; rename a column"):
            check_parts(data, "data")
