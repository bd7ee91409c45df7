"""The convolutional network of documents, against one that reads one at a time."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matrix import TASKS
from networks import token_rows
from torch import Tensor, nn

from experiments import examples, small_experiment
from fedsim import Run, run
from fedsim.data import Dataset
from fedsim.launch.prepare import prepare
from fedsim.models import Classifier, TextModel, models
from fedsim.models.text import Reader, TextFeatures
from fedsim.results.records import hashes
from fedsim.training import FlatModel, representation

CPU = torch.device("cpu")
V, D, CLASSES = 12, 3, 4
TINY: dict[str, Any] = {"name": "text_cnn", "kernels": [1, 2, 4], "filters": 5, "hidden": 6}

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors:UserWarning")

document = st.lists(st.integers(1, V - 1), max_size=7)


def vectors(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Of words 0 to V-1; two of them mean nothing beside the padding."""
    found = torch.randn(V, D, generator=torch.Generator().manual_seed(seed))
    found[0] = 0
    known = torch.ones(V, dtype=torch.bool)
    known[[0, 1, 5]] = False
    return found, known


def build(**fields: Any) -> Classifier:
    torch.manual_seed(1)
    model = models.parse({**TINY, **fields})
    assert isinstance(model, TextModel)
    network = model.build_text(*vectors(), CLASSES)
    assert isinstance(network, Classifier)
    return network.eval()


@torch.no_grad()
def of_document(features: nn.Module, words: list[int]) -> np.ndarray[Any, Any]:
    """What the features of one document come to: a window begins at each word."""
    assert isinstance(features, TextFeatures)
    pooled = []
    for convolution in features.convolutions:
        (width,) = convolution.kernel_size  # type: ignore[misc]
        text = torch.zeros(D, max(1, len(words)) + width - 1)  # type: ignore[operator]
        text[:, : len(words)] = features.reader.vectors[words].T
        pooled.append(convolution(text).relu().amax(dim=1))
    return features.dense(torch.cat(pooled)).relu().numpy()


NETWORK = build()


@torch.no_grad()
def read(x: Tensor) -> Tensor:
    found: Tensor = NETWORK.features(x)
    return found


@given(st.lists(document, min_size=1, max_size=5), st.integers(0, 9))
@examples(60)
def test_features_are_those_of_each_document(documents: list[list[int]], padding: int) -> None:
    """Of documents that are empty or shorter than a window too, whatever lies beside them."""
    found = read(token_rows(documents, max(map(len, documents)) + padding))
    expected = np.array([of_document(NETWORK.features, words) for words in documents])
    assert found.numpy() == pytest.approx(expected, abs=1e-5)


@given(st.lists(document, min_size=1, max_size=5), st.integers(0, 3))
@examples(40)
def test_document_vectors_are_means_of_known_words(
    documents: list[list[int]], padding: int
) -> None:
    table, known = vectors()
    reader = Reader(table, known)
    found = reader.document_vectors(token_rows(documents, max(map(len, documents)) + padding))
    for row, words in zip(found, documents, strict=True):
        kept = [table[i].double() for i in words if known[i]]  # repeats count
        expected = torch.stack(kept).mean(dim=0) if kept else torch.zeros(D)
        assert row.numpy() == pytest.approx(expected.numpy(), abs=1e-6)


def test_vectors_are_no_part_of_the_weights() -> None:
    network = build()
    model = FlatModel(network, CPU)
    windows = sum(5 * D * width + 5 for width in (1, 2, 4))
    assert model.size == model.num_parameters == windows + 15 * 6 + 6 + 6 * CLASSES + CLASSES
    assert not any("vectors" in name or "known" in name for name in model.shapes)
    model.load(torch.zeros(model.size))
    assert torch.equal(network.features.reader.vectors, vectors()[0])  # type: ignore[union-attr, arg-type]


def test_the_representation_is_that_of_other_weights_without_dropout() -> None:
    model = FlatModel(build(dropout=0.9), CPU)
    x, weights = token_rows([[2, 3, 4], []]), model.vector.clone()
    model.load(torch.zeros(model.size))
    model.train()
    assert torch.allclose(representation(model.module, weights, x), read(x))
    model.load(weights)
    assert not torch.allclose(model.module.features(x), read(x))  # type: ignore[operator]


def test_the_networks_of_the_paper() -> None:
    model = models.parse({"name": "text_cnn"})
    assert isinstance(model, TextModel)
    network = model.build_text(torch.zeros(9, 300), torch.ones(9, dtype=torch.bool), 4)
    shapes = {name: tuple(p.shape) for name, p in network.named_parameters()}
    assert [s for n, s in shapes.items() if n.endswith("weight")] == [
        *((128, 300, width) for width in (3, 4, 5)),
        (384, 384),
        (4, 384),
    ]


TEXTS: dict[str, Any] = {
    "data": TASKS["data"],
    "model": {**TINY, "dropout": 0.0},
    "partition": {"kind": "iid", "clients": 3},
    "train": {
        **{"rounds": 5, "local_epochs": 2, "batch_size": 8},
        "optimizer": {"name": "adam", "lr": 0.03},
    },
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(small_experiment(**TEXTS), tmp_path_factory.mktemp("runs"), progress=False)


def test_documents_are_learnt(done: Run) -> None:
    assert done.rounds["accuracy"].iloc[-1] > 0.9
    assert done.rounds["train_loss"].iloc[-1] < done.rounds["train_loss"].iloc[0] / 2
    data, _, spec = prepare(small_experiment(**TEXTS))
    network = spec.build_model()
    network.load_state_dict(done.weights())  # which hold no vectors
    size = sum(tensor.numel() for tensor in done.weights().values())
    assert (done.clients["bytes_up"] == 4 * size).all()
    network.eval()
    right = [
        int(network(torch.tensor(row)[None]).argmax()) == y
        for row, y in zip(data.test_x, data.test_y, strict=True)
    ]
    assert np.mean(right) == pytest.approx(done.rounds["accuracy"].iloc[-1])


def test_the_hash_of_data_is_that_of_the_vectors_too() -> None:
    found = []
    for dimension in (8, 9):
        data = {**TEXTS["data"], "dimension": dimension}
        experiment = small_experiment(**{**TEXTS, "data": data})
        found.append(hashes(*prepare(experiment)[:2], experiment)["data_hash"])
    assert found[0] != found[1]


def test_a_network_reads_with_the_vectors_of_its_data() -> None:
    data, _, spec = prepare(small_experiment(**TEXTS))
    assert isinstance(data, Dataset)
    network, again = spec.build_model(), spec.build_model()
    features = network.get_submodule("features")
    assert isinstance(features, TextFeatures)
    assert torch.equal(features.reader.vectors, torch.tensor(data.vectors))
    assert torch.equal(features.reader.known, torch.tensor(data.known))
    for one, other in zip(network.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("data", "model", "told"),
    [
        ({}, TINY, "words"),
        ({"tokenizer": {"kind": "wordpiece", "size": 300}}, TINY, "tokens"),
        ({"vectors": "vectors.txt"}, TINY, ""),
        ({"tokenizer": {"kind": "bpe", "size": 300}}, {"name": "transformer"}, ""),
        ({}, {"name": "transformer"}, ""),
        ({}, {"name": "transformer", "embeddings": "vectors"}, "words"),
        ({"name": "planted_reviews", "reviews": 8, "test_reviews": 4}, TINY, ""),
    ],
)
def test_random_vectors_that_are_not_trained_are_told(
    tmp_path: Path, data: dict[str, Any], model: dict[str, Any], told: str
) -> None:
    path = tmp_path / "documents.txt"
    path.write_text("good\ta fine beer\nbad\ta stale beer\n" * 20)
    (tmp_path / "vectors.txt").write_text("beer 1 2\nfine 3 4\n")
    section = {"name": "text", "path": str(path), **data}
    if "vectors" in data:
        section["vectors"] = str(tmp_path / data["vectors"])
    if data.get("name"):
        section = data
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        prepare(
            small_experiment(data=section, model=model, partition={"kind": "iid", "clients": 2})
        )
    lines = [str(w.message) for w in found if "random vectors" in str(w.message)]
    expected = f"model.name={model['name']}: {told} get random vectors of 50 components, "
    assert [line.startswith(expected) for line in lines] == [True] * bool(told)
