"""Data sets of Hugging Face, from folders and by name, without the network."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets as library
import numpy as np
import other_data
import pytest

from experiments import small_experiment
from fedsim import Experiment, run
from fedsim.config.registry import paths_from
from fedsim.data import Dataset, datasets, load_dataset
from fedsim.errors import DataError

pytestmark = pytest.mark.filterwarnings("ignore:.*get random vectors")


@pytest.fixture(autouse=True)
def _away_from_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()


def load(dataset: str, **keys: Any) -> Dataset:
    return load_dataset(datasets.parse({"name": "huggingface", "dataset": dataset, **keys}))


YES = library.ClassLabel(names=["yes", "no"])


def patients(start: int = 0, count: int = 8) -> library.Dataset:
    rows = np.arange(start, start + count)
    return library.Dataset.from_dict(
        {
            "age": rows,
            "dose": rows / 4,
            "ill": rows % 2,
            "site": [f"s{row % 3}" for row in rows],
            "vector": [[row, 1.0] for row in rows],
        }
    ).cast_column("ill", YES)


def reviews(*labels: int, words: str = "good bad") -> library.Dataset:
    texts = [f"{words} {number}" for number in range(len(labels))]
    part = library.Dataset.from_dict({"sentence": texts, "label": labels, "idx": labels})
    return part.cast_column("label", YES)


def pictures() -> library.Dataset:
    found = library.Dataset.from_dict({"image": other_data.pictures(), "label": [0, 1] * 5})
    return found.cast_column("image", library.Image()).cast_column("label", YES)


OF_PATIENTS = {"input": ["age", "dose"], "label": "ill", "test_fraction": 0.25}


def by_save_to_disk(part: library.Dataset) -> str:
    part.save_to_disk("saved")
    return "saved"


def as_a_dict(part: library.Dataset) -> str:
    library.DatasetDict({"train": part}).save_to_disk("saved_parts")
    return "saved_parts"


def as_parquet(part: library.Dataset) -> str:
    part.to_parquet("folder/train-00000-of-00001.parquet")
    return "folder"


def as_one_file(part: library.Dataset) -> str:
    part.to_parquet("it.parquet")
    return "it.parquet"


FORMS = [by_save_to_disk, as_a_dict, as_parquet, as_one_file]


@pytest.mark.parametrize("saved", FORMS)
def test_a_table_from_a_folder_or_a_file(saved: Callable[[library.Dataset], str]) -> None:
    data = load(saved(patients()), **OF_PATIENTS)
    assert (data.features, data.target, data.classes) == (("age", "dose"), "ill", ("yes", "no"))
    assert data.x.dtype == np.float32
    np.testing.assert_array_equal(data.x[:, 1], data.x[:, 0] / 4)
    np.testing.assert_array_equal(data.x[:, 0] % 2, data.y)
    assert list(data.columns) == ["site"]
    assert data.columns["site"].tolist() == [f"s{int(age) % 3}" for age in data.x[:, 0]]
    assert data.note == (
        "test set: 0.25 of the part 'train', as there is no part 'test', and there is no "
        "validation part"
    )


def test_images_and_vectors() -> None:
    images = load(by_save_to_disk(pictures()))
    assert (images.shape, images.x.dtype, images.classes) == ((3, 4, 6), np.uint8, ("yes", "no"))
    np.testing.assert_array_equal(images.x[:, 0, 0, 0] % 2, images.y)
    vectors = load(as_one_file(patients()), input="vector", label="dose")
    assert (vectors.shape, vectors.classes, vectors.features) == ((2,), (), ())
    np.testing.assert_array_equal(vectors.x[:, 0] / 4, vectors.y)


def test_texts() -> None:
    parts = {"train": reviews(0, 1, 1, words="so good"), "test": reviews(1, 0, words="good awful")}
    library.DatasetDict(parts).save_to_disk("texts")
    data = load("texts", length=2)
    assert data.classes == ("no", "yes")
    assert (data.y.tolist(), data.test_y.tolist()) == ([1, 0, 0], [0, 1])
    words = [[data.words[token] for token in document] for document in data.test_x]
    assert words == [["good", "awful"]] * 2
    assert data.note == ""


TWO = {"validation_matched": 2, "validation_mismatched": 1}
LABELS_LACK = "as all labels of the part 'test' are −1"
NOTHING_LEFT = "there is no validation part"


@pytest.mark.parametrize(
    ("parts", "keys", "sizes", "note"),
    [
        ({"train": 4, "test": 3, "validation": 2}, {}, (4, 3), ""),
        ({"train": 4, "validation": 2}, {}, (4, 2), "'validation', as there is no part 'test'"),
        ({"train": 4, "test": -3, **TWO}, {}, (4, 2), f"'validation_matched', {LABELS_LACK}"),
        ({"train": 8, "test": -3}, {}, (6, 2), f"'train', {LABELS_LACK}, and {NOTHING_LEFT}"),
        ({"train": 4, "test": 3, "dev": 2}, {"split": "test", "test_split": "train"}, (3, 4), ""),
        (
            *({"train": 2, "test": 8}, {"split": "test"}, (6, 2)),
            f"'test', as the part 'test' is trained on, and {NOTHING_LEFT}",
        ),
    ],
)
def test_which_part_is_the_test_set(
    parts: dict[str, int], keys: dict[str, Any], sizes: tuple[int, int], note: str
) -> None:
    made = {
        name: reviews(*([-1] * -count if count < 0 else [row % 2 for row in range(count)]))
        for name, count in parts.items()
    }
    library.DatasetDict(made).save_to_disk("parts")
    data = load("parts", **{"test_fraction": 0.25, **keys})
    assert (len(data.y), len(data.test_y)) == sizes
    part = "0.25 of the part" if NOTHING_LEFT in note else "the part"
    assert data.note == (note and f"test set: {part} {note}")


def test_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def hub(name: str, config: str | None = None) -> Any:
        asked.append((name, config))
        return library.DatasetDict({"train": patients(), "test": patients(100, 2)})

    monkeypatch.setattr(library, "load_dataset", hub)
    data = load("someone/patients", config="small", **OF_PATIENTS)
    assert asked == [("someone/patients", "small")]
    assert data.test_x[:, 0].tolist() == [100, 101]


def test_a_folder_is_found_from_elsewhere(tmp_path: Path) -> None:
    as_parquet(patients())
    with paths_from(tmp_path):
        parsed = datasets.parse({"name": "huggingface", "dataset": "folder", **OF_PATIENTS})
    assert parsed.dataset == str(tmp_path / "folder")  # type: ignore[attr-defined]


def test_a_run(tmp_path: Path) -> None:
    section = {"name": "huggingface", "dataset": as_parquet(patients(count=40)), **OF_PATIENTS}
    made = small_experiment(
        data=section, partition={"kind": "natural", "column": "site"}, train={"rounds": 1}
    )
    done = run(made, tmp_path / "runs")
    assert len(done.rounds) == 1
    assert Experiment.load(done.path / "experiment.yaml").data == made.data


def test_a_name_without_the_network() -> None:
    told = "^data.dataset=nobody/nothing: cannot be loaded: .*; without the network, name a "
    with pytest.raises(DataError, match=told):
        load("nobody/nothing")
