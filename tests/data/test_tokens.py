"""Tokenizers: what they are trained on, what becomes of their ids, and what is shown of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from experiments import examples
from fedsim.data import Dataset, datasets, load_dataset, tokens
from fedsim.data.sources import from_python
from fedsim.explain.explainer import ExplainedData, ExplainedModel
from fedsim.explain.explainers.occlusion import Occlusion
from fedsim.explain.inputs import Inputs
from fedsim.models import models

TEXTS = [
    f"{word} number {k}, and {other}"
    for k, word in enumerate(("one", "two", "three", "four"))
    for other in ("zebras", "quails", "é ü", "日本")
]


def of_file(path: Path, tokenizer: Any, **fields: Any) -> Dataset:
    lines = [f"{c}\t{text} {c}" for c in "ab" for text in TEXTS]
    path.write_text("\n".join(lines) + "\n")
    tested = path.with_suffix(".test")
    tested.write_text("a\txylophone zebras\nb\tone number\n")
    section = {"name": "text", "path": str(path), "test_path": str(tested), **fields}
    return load_dataset(datasets.parse({**section, "tokenizer": tokenizer}))


def test_the_same_texts_give_the_same_tokenizer() -> None:
    """In another process as well, where hash tables have another order."""
    program = """
import json, sys
from fedsim.data import tokens
for kind in ("wordpiece", "bpe"):
    found = tokens.TrainedTokenizer.model_validate({"kind": kind, "size": 300})
    print(json.dumps(found.on(sys.argv[1:]).get_vocab()))
"""
    asked = [sys.executable, "-c", program, *TEXTS]
    there = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    for kind, line in zip(("wordpiece", "bpe"), there.splitlines(), strict=True):
        made: Any = tokens.TrainedTokenizer.model_validate({"kind": kind, "size": 300})
        found = made.on(TEXTS).get_vocab()
        assert found == made.on(TEXTS).get_vocab() == json.loads(line)
        assert [found[word] for word in tokens.SPECIAL] == [0, 1, 2, 3]
        assert len(found) <= 300


def test_it_is_trained_on_training_texts_alone(tmp_path: Path) -> None:
    data = of_file(tmp_path / "it.txt", {"kind": "wordpiece"})
    shown = Inputs.of_rows(data, [0, 1]).words
    assert shown == (("[CLS]", "[UNK]", "zebras", "[SEP]"), ("[CLS]", "one", "number", "[SEP]"))
    assert not any("x" in word for word in data.words)
    assert data.x.dtype == np.int32
    assert data.spec.padding == 0
    assert Dataset(data.x, data.y, data.test_x, data.test_y, data.classes).spec.padding is None


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_own_texts_are_read_like_the_data(tmp_path: Path, kind: str) -> None:
    data = of_file(tmp_path / "it.txt", {"kind": kind}, length=6)
    assert data.shape == (6,)
    found = Inputs.of_texts(data, [f"{TEXTS[0]} a", "x" * 99], ["one", "other"])
    assert np.array_equal(found.x[0], data.x[0])
    assert found.words[0] == tuple(data.words[i] for i in data.x[0] if i)
    assert found.words[0][-1] == "[SEP]"  # also of truncated documents
    assert not found.notes


def test_it_is_kept_with_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    data = of_file(tmp_path / "it.txt", {"kind": "wordpiece"})
    found = from_python.kept(from_python.keep(data)["hash"], None)
    assert (found.tokenizer, found.padding, found.words) == (
        data.tokenizer,
        data.padding,
        data.words,
    )


READERS = {
    kind: tokens.tokenizer(
        tokens.TrainedTokenizer.model_validate({"kind": kind, "size": 300}), TEXTS, 200
    )
    for kind in ("wordpiece", "bpe")
}


@pytest.mark.parametrize("kind", READERS)
@given(
    words=st.lists(st.text("abez3é日,-", min_size=1, max_size=6), min_size=1, max_size=5),
    seed=st.integers(0, 9),
)
@examples(40)
def test_marks_of_words_become_marks_of_their_tokens(
    kind: str, words: list[str], seed: int
) -> None:
    marks = np.random.default_rng(seed).integers(0, 2, len(words)).astype(bool).tolist()
    found = tokens.spread(READERS[kind][0], words, marks)
    ids = tokens.encode(*READERS[kind], [" ".join(words)])[0]
    assert len(found) == len(ids)
    assert not found[0]
    assert not found[-1]
    shares = []
    for k, word in enumerate(words):  # what a word alone becomes, the special tokens apart
        alone = tokens.encode(*READERS[kind], [word])[0]
        shares += [marks[k]] * (len(alone) - 2)
    assert found[1:-1] == shares


def test_reviews_say_which_tokens_are_rationales() -> None:
    section = {"name": "planted_reviews", "reviews": 30, "test_reviews": 4, "fillers": 2.0}
    whole = load_dataset(datasets.parse(section))
    parted = load_dataset(
        datasets.parse({**section, "tokenizer": {"kind": "wordpiece", "size": 300}})
    )
    assert parted.truth["signal"].shape == parted.test_x.shape
    for row in range(len(whole.test_y)):
        of_words = whole.test_x[row][whole.truth["signal"][row]]
        own = zip(parted.test_x[row], parted.truth["signal"][row], strict=True)
        pieces = "".join(parted.words[i].removeprefix("##") for i, marked in own if marked)
        assert pieces == "".join(whole.words[i] for i in of_words)


@pytest.mark.parametrize("kind", READERS)
@given(words=st.lists(st.text("abez", min_size=1, max_size=9), min_size=1, max_size=5))
@examples(40)
def test_tokens_are_joined_to_words(kind: str, words: list[str]) -> None:
    if kind == "bpe":  # letters of several bytes; the other one knows none
        words = [word.replace("z", "é").replace("b", "日") for word in words]
    rows = np.pad(tokens.encode(*READERS[kind], [" ".join(words)]), ((0, 0), (0, 2)))
    of_word = tokens.words_of(*READERS[kind], rows)[0]
    assert (of_word[-2:] == -1).all()
    found = [tokens.read(*READERS[kind], rows[0, of_word == w]) for w in range(of_word.max() + 1)]
    assert len(found) == len(words) + 2
    assert all(one in (word, "[UNK]") for one, word in zip(found[1:-1], words, strict=True))


def test_a_word_does_not_go_on_with_a_special_token() -> None:
    """As of RoBERTa, whose tokenizer puts no space before the first word."""
    processors = pytest.importorskip("tokenizers.processors")
    found: Any = tokens.TrainedTokenizer(kind="bpe", size=300).on(TEXTS)
    found.pre_tokenizer = pytest.importorskip("tokenizers.pre_tokenizers").ByteLevel(False)
    found.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    reader = found.to_str(), 0
    rows = tokens.encode(*reader, ["number zebras"])
    of_word = tokens.words_of(*reader, rows)[0]
    words = [tokens.read(*reader, rows[0, of_word == w]) for w in range(of_word.max() + 1)]
    assert words == ["[CLS]", "number", "zebras", "[SEP]"]


@pytest.mark.parametrize("kind", READERS)
def test_explanations_speak_of_words(tmp_path: Path, kind: str) -> None:
    """Relevances of a word's tokens are summed, and occlusion leaves out all of them."""
    data = of_file(tmp_path / "it.txt", {"kind": kind})
    inputs = Inputs.of_texts(data, ["zebrasn a", "a"], ["one", "other"])
    relevance = np.arange(inputs.x.size, dtype=np.float32).reshape(inputs.x.shape)
    joined, summed = inputs.joined(data, relevance)
    assert joined.words == (("[CLS]", "zebrasn", "a", "[SEP]"), ("[CLS]", "a", "[SEP]"))
    n = len(inputs.words[0])
    assert n > 4
    expected = [relevance[0, 0], relevance[0, 1 : n - 2].sum(), *relevance[0, n - 2 : n]]
    assert summed[0, :4].tolist() == expected
    assert not summed[0, 4:].any()

    class Count(nn.Module):
        """How many tokens a document has."""

        def forward(self, x: Tensor) -> Tensor:
            return (x != 0).sum(1, keepdim=True).float()

    explained = ExplainedData(data, torch.tensor)
    model = ExplainedModel(models.parse({"name": "text_cnn"}), "", 1, 0, network=Count())
    x, y = torch.tensor(inputs.x), torch.zeros(2, dtype=torch.int64)
    found = Occlusion().relevance_in(model, explained, x, y, np.random.default_rng(0))
    assert torch.equal(found, (x != 0).float())  # its number of tokens, over these


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_a_shortcut_is_a_word_of_the_text(tmp_path: Path, kind: str) -> None:
    """It stands between the tokens that the tokenizer adds to each text."""
    data = of_file(tmp_path / "it.txt", {"kind": kind, "size": 300})
    assert tokens.around(data.tokenizer) == (1, 1)
    section = {"name": "text", "path": str(tmp_path / "it.txt"), "tokenizer": {"kind": kind}}
    found = load_dataset(datasets.parse({"name": "shortcut", "of": section, "test": ["aligned"]}))
    for row in found.test_x:
        shown = [found.words[i] for i in row if i]
        assert (shown[0], shown[-1]) == ("[CLS]", "[SEP]")
        assert sum(word.startswith("shortcut-") for word in shown[1:-1]) == 1
    inputs = Inputs.of_rows(found, [0])
    joined, _ = inputs.joined(found, np.zeros(inputs.x.shape, np.float32))
    assert sum(word.startswith("shortcut-") for word in joined.words[0]) == 1


def test_no_token_goes_on_with_a_shortcut() -> None:
    """Which may stand within a word: three words then, the shortcut's between two parts."""
    json, padding = READERS["wordpiece"]
    ids = tokens.encode(json, padding, ["zebrasn"])[0]
    assert len(ids) > 3
    first, rest = ids[:2], ids[2:]
    row = np.concatenate([first, [len(tokens.words(json, padding))], rest, [0]])[None]
    assert tokens.words_of(json, padding, row)[0, :4].tolist() == [0, 1, 2, 3]
    assert tokens.words_of(json, padding, row)[0, -1] == -1
