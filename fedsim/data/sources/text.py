"""The text data sets by name: standard data sets from their official files, and your own files.

The vocabulary holds the words of training and test set together, as in FedSeIT's released code: a
word that only occurs in test documents keeps its vector and is not treated as unknown.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import PositiveInt

from fedsim.config.registry import nearest
from fedsim.data import text, tokens
from fedsim.data.dataset import Dataset, TestFraction, split_rows
from fedsim.data.source import OfficialFiles, Source, datasets
from fedsim.data.sources import files
from fedsim.data.sources.files import Documents
from fedsim.errors import DataError


class TextSource(Source):
    """Documents as token ids, and a vector for each word.

    Args:
        tokenizer: by default documents are words. Otherwise what divides them into tokens: a
            folder that `save_pretrained` has written, `package:module/folder` for one within an
            installed package, or a name on the Hub; or `{kind: wordpiece, size: 8000}`, trained on
            the training texts.
        vectors: file of word vectors in GloVe's text format: plain, `.gz`, or a `.zip` of one
            `.txt`; by default words get random vectors.
        dimension: dimension of random vectors.
        length: largest number of tokens; longer documents are truncated.
    """

    meaningful: ClassVar[bool] = True  # whether words mean anything beyond their use in the texts

    tokenizer: tokens.TokenizerChoice | None = None
    vectors: Path | None = None
    dimension: PositiveInt = 50
    length: PositiveInt = 1000

    def _with_test_set(
        self, train: Documents, test: Documents, path: Path, test_path: Path
    ) -> Dataset:
        classes = tuple(sorted(set(train.labels)))
        for number, label in enumerate(test.labels, 1):
            if label not in classes:
                raise DataError(
                    f"{test_path}: document {number} has the label '{label}', which does not "
                    f"occur in {path}{nearest(label, classes)}"
                )
        both = Documents(train.labels + test.labels, train.texts + test.texts)
        return self._split(both, 0, path, tests=len(test.texts))

    def _split(
        self, documents: Documents, test_fraction: float, path: Path, tests: int | None = None
    ) -> Dataset:
        """The test set is a share of the documents, or the last `tests` of them."""
        classes = tuple(sorted(set(documents.labels)))
        indices = {name: i for i, name in enumerate(classes)}
        y = np.array([indices[label] for label in documents.labels], np.int64)
        if tests is None:
            train_rows, test_rows = split_rows(y, classes, test_fraction, str(path))
        else:
            train_rows, test_rows = np.split(np.arange(len(y)), [len(y) - tests])
        return self._dataset(y, documents.texts, classes, train_rows, test_rows, path)

    def _dataset(
        self,
        y: NDArray[np.int64],
        documents: Sequence[str] | Sequence[list[str]],
        classes: tuple[str, ...],
        train: NDArray[np.intp],
        test: NDArray[np.intp],
        path: Path | str,
    ) -> Dataset:
        """The data set of documents: texts, or lists of words."""
        json, padding = "", 0
        if self.tokenizer is None:
            parted = [text.tokenise(d) if isinstance(d, str) else d for d in documents]
            words = text.vocabulary(parted)
            x = text.encode(parted, words, self.length)
        else:
            texts = [d if isinstance(d, str) else " ".join(d) for d in documents]
            learnt = [texts[row] for row in train]
            json, padding = tokens.tokenizer(self.tokenizer, learnt, self.length)
            words, x = tokens.words(json, padding), tokens.encode(json, padding, texts)
        if not x.any():
            raise DataError(f"{path}: its documents contain no words")
        vectors, known = (
            text.random_vectors(words, self.dimension)
            if self.vectors is None
            else text.read_vectors(self.vectors, words)
        )
        return Dataset(
            *(x[train], y[train], x[test], y[test], classes),
            words=words,
            vectors=vectors,
            known=known,
            random_vectors=self.vectors is None and self.meaningful,
            tokenizer=json,
            padding=padding,
        )


class _Trec(OfficialFiles, TextSource):
    """TREC questions by the type of their answer, with coarse or fine classes."""

    niche: ClassVar[bool] = True
    coarse: ClassVar[bool]

    def load(self) -> Dataset:
        """x is int32 (5452, L) token ids; classes are in order of their names."""
        path = files.find(["train_5500.label"], "trec", self.root)
        test_path = files.beside(path, "TREC_10.label", "trec")
        return self._with_test_set(self._read(path), self._read(test_path), path, test_path)

    def _read(self, path: Path) -> Documents:
        documents = files.read_labelled(path, "latin-1", separator=" ")
        for number, label in enumerate(documents.labels, 1):
            if ":" not in label:
                raise DataError(
                    f"{path}:{number}: begins with '{label}', expected a class COARSE:fine"
                )
        if not self.coarse:
            return documents
        return documents._replace(labels=[label.split(":")[0] for label in documents.labels])


@datasets.register
class Trec6(_Trec):
    """TREC questions by the type of their answer, 5,452 + 500, 6 classes."""

    name: str = "trec6"
    coarse: ClassVar[bool] = True


@datasets.register
class Trec50(_Trec):
    """TREC questions by the type of their answer, 5,452 + 500, 50 classes, 42 in the test set."""

    name: str = "trec50"
    coarse: ClassVar[bool] = False


@datasets.register
class R8(OfficialFiles, TextSource):
    """R8: Reuters-21578 news by topic, all terms, 5,485 + 2,189, 8 classes (Cachopo)."""

    niche: ClassVar[bool] = True
    name: str = "r8"

    def load(self) -> Dataset:
        """x is int32 (5485, L) token ids; classes are in order of their names."""
        path = files.find(["r8-train-all-terms.txt"], self.name, self.root)
        test_path = files.beside(path, "r8-test-all-terms.txt", self.name)
        train, test = files.read_labelled(path), files.read_labelled(test_path)
        return self._with_test_set(train, test, path, test_path)


@datasets.register
class Tmn(OfficialFiles, TextSource):
    """TagMyNews: titles and descriptions of news by topic, 24,817 + 7,780, 7 classes.

    The validation part is added to the training set, after the training part.
    """

    niche: ClassVar[bool] = True
    name: str = "tmn"

    def load(self) -> Dataset:
        """x is int32 (24817, L) token ids; classes are in order of their names."""
        path = files.find(["TMN_train.txt"], self.name, self.root)
        more_path, test_path = (
            files.beside(path, name, self.name) for name in ("TMN_val.txt", "TMN_test.txt")
        )
        first, more, test = map(files.read_labelled, (path, more_path, test_path))
        train = Documents(first.labels + more.labels, first.texts + more.texts)
        return self._with_test_set(train, test, path, test_path)


@datasets.register
class Subj(OfficialFiles, TextSource):
    """SUBJ: sentences from film reviews (subjective) and plots (objective), 5,000 each.

    Args:
        test_fraction: share of the sentences in the test set.
    """

    niche: ClassVar[bool] = True
    name: str = "subj"
    test_fraction: TestFraction = 0.2

    def load(self) -> Dataset:
        """x is int32 (N, L) token ids; class 0 is objective, class 1 subjective."""
        path = files.find(["quote.tok.gt9.5000"], self.name, self.root)
        quotes = files.read_lines(path, "latin-1")
        plots = files.read_lines(files.beside(path, "plot.tok.gt9.5000", self.name), "latin-1")
        labels = ["subjective"] * len(quotes) + ["objective"] * len(plots)
        return self._split(Documents(labels, quotes + plots), self.test_fraction, path.parent)


# The alphabet of LEAF's models.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
SEQUENCE = 80  # characters of an example


@datasets.register
class Shakespeare(OfficialFiles):
    """Shakespeare (LEAF): the next character after 80, by the role that speaks them.

    Documents are of characters, whose vectors are one-hot. The classes are the 80 characters of
    LEAF's alphabet, and any other that the files hold. The role of each example is the column
    `user`. Files: LEAF's `train` and `test` folders of json files, or `all_data*.json` (also in a
    folder `all_data`). Without a test part, the last examples of each user are the test set; as
    an example and the next overlap in 79 characters, the 79 before them are left out.

    Args:
        test_fraction: share of each user's examples in the test set if there is no test folder.
    """

    name: str = "shakespeare"
    test_fraction: TestFraction = 0.2

    def load(self) -> Dataset:
        """x is int32 (N, 80) token ids; classes are characters."""
        candidates = ["train/*.json", "all_data/all_data*.json", "all_data*.json"]
        found = files.find(candidates, self.name, self.root)
        if found.parent.name == "train":
            train = self._read(found.parent, "*.json")
            test = self._read(found.parent.parent / "test", "*.json")
        else:
            train, test = self._split(self._read(found.parent, "all_data*.json"))
        for what, part in (("training", train), ("test", test)):
            if not any(lines.y for lines in part):
                raise DataError(f"{found.parent}: there is no {what} example")
        texts = chain.from_iterable((*lines.x, *lines.y) for lines in (*train, *test))
        letters = (*LETTERS, *sorted(set().union(*texts) - {*LETTERS}))
        words = (*text.SPECIAL, *letters)
        vectors = np.zeros((len(words), len(letters)), np.float32)
        vectors[len(text.SPECIAL) :] = np.eye(len(letters), dtype=np.float32)
        (x, y), (test_x, test_y) = (_encoded(part, words) for part in (train, test))
        return Dataset(
            *(x, y, test_x, test_y, letters),
            columns={"user": np.repeat([li.user for li in train], [len(li.y) for li in train])},
            words=words,
            vectors=vectors,
            known=np.arange(len(words)) > text.UNKNOWN,
        )

    def _read(self, folder: Path, pattern: str) -> list[_Lines]:
        paths = files.match_all(folder, pattern)
        if not paths:
            raise files.MissingFileError(f"{self.name}: no json file in {folder}")
        return [
            _Lines(user, x, y)
            for path in paths
            for user, (x, y) in files.read_leaf_texts(path, SEQUENCE).items()
        ]

    def _split(self, found: Sequence[_Lines]) -> tuple[list[_Lines], list[_Lines]]:
        train, test = [], []
        for user, x, y in found:
            cut = len(y) - math.ceil(self.test_fraction * len(y))
            last = max(cut - SEQUENCE + 1, 0)
            train.append(_Lines(user, x[:last], y[:last]))
            test.append(_Lines(user, x[cut:], y[cut:]))
        return train, test


class _Lines(NamedTuple):
    """What a user says: texts, and the character that follows each."""

    user: str
    x: list[str]
    y: list[str]


def _encoded(
    part: Sequence[_Lines], words: Sequence[str]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Token ids (N, 80) and class indices (N,)."""
    codes = [ord(word) for word in words[len(text.SPECIAL) :]]
    ids = np.zeros(max(codes) + 1, np.int32)
    ids[codes] = np.arange(len(text.SPECIAL), len(words))
    x = np.array([x for lines in part for x in lines.x], f"U{SEQUENCE}").view(np.uint32)
    y = np.array([y for lines in part for y in lines.y], "U1").view(np.uint32)
    return ids[x].reshape(-1, SEQUENCE), ids[y].astype(np.int64) - len(text.SPECIAL)


@datasets.register
class Text(TextSource):
    """Your own documents, one per line of a file or row of a CSV table.

    Args:
        path: UTF-8 file with a label, a tab and a text on each line, or `.csv` with a header line.
        label: the column of labels of a `.csv`; the sorted labels are the classes.
        text: the column of texts of a `.csv`.
        test_path: file of the test set, in either format.
        test_fraction: share of the documents in the test set if there is no test file.
    """

    name: str = "text"
    path: Path
    label: str = "label"
    text: str = "text"
    test_path: Path | None = None
    test_fraction: TestFraction = 0.2

    def load(self) -> Dataset:
        """x is int32 (N, L) token ids; classes are in order of their names."""
        files.check_apart([self.path], [self.test_path] if self.test_path else [])
        documents = self._read(self.path)
        if self.test_path is None:
            return self._split(documents, self.test_fraction, self.path)
        test = self._read(self.test_path)
        return self._with_test_set(documents, test, self.path, self.test_path)

    def _read(self, path: Path) -> Documents:
        if ".csv" in path.name.lower():
            return _read_csv(path, self.label, self.text)
        return files.read_labelled(path)


def _read_csv(path: Path, label: str, text: str) -> Documents:
    import pandas as pd

    content = files.read_text(path, "utf-8-sig")
    with files.reading(path), warnings.catch_warnings():
        # If rows are longer than the header, pandas drops the excess with a warning.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        frame = pd.read_csv(
            io.StringIO(content), dtype=str, keep_default_na=False, index_col=False
        )
    for key, name in (("label", label), ("text", text)):
        if name not in frame.columns:
            raise DataError(
                f"{path}: has no column '{name}'{nearest(name, frame.columns)} (data.{key} names "
                f"the column)"
            )
    if len(frame) == 0:
        raise DataError(f"{path}: has no rows")
    labels = frame[label].tolist()
    files.check_labels(labels, f"{path}: column '{label}'")
    return Documents(labels, frame[text].tolist())
