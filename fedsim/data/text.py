"""Documents as rows of token ids: tokens, a vocabulary, and a vector for each word."""

from __future__ import annotations

import gzip
import re
import unicodedata
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsim.data.sources import files
from fedsim.errors import DataError
from fedsim.support.rng import keyed_rng

# (V, D) vectors of words, and (V,) which are known
Vectors = tuple[NDArray[np.float32], NDArray[np.bool_]]

PADDING, UNKNOWN = 0, 1  # token ids
SPECIAL = ("", "<unknown>")  # their words, which never occur in a text

UNLISTED_SEED = 42  # as in FedSeIT's released code, for words missing from a file of vectors

_SEPARATORS = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
_TO_SPACES = str.maketrans(_SEPARATORS, " " * len(_SEPARATORS))
_APOSTROPHE = re.compile(r"(?<=\w)[\u2019\u02bc\uff07](?=\w)")
# Scripts without spaces: Thai, Lao, Burmese, Khmer, kana, Han; and marks on their letters.
_UNSPACED = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u30ff\u31f0-\u31ff\u3400-\u4dbf"
    "\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
    "[\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u102b-\u103e\u1056-\u1059"
    "\u105e-\u109d\u17b4-\u17d3\u3099\u309a]*)"
)


def tokenise(text: str) -> list[str]:
    """The words of a text, as Keras's classic Tokenizer splits them by default.

    In lower case, without punctuation except apostrophes. Words are separated by any white space
    (in Keras only by spaces, tabs and line feeds). Beyond ASCII, for which Keras has no rules,
    full-width letters and ligatures are the plain letters, the codings of an accented letter are
    one (NFKC), typographic apostrophes are the plain one, and other punctuation and the signs of
    currencies and mathematics separate words. Symbols such as emoji, numbers such as ½ and ², and
    the characters of scripts without spaces are words.
    """
    if not text.isascii():
        text = _spaced(_APOSTROPHE.sub("'", text))
        # NFKC, except of ½ and ², which would go into the numbers and words beside them.
        others = {c for c in text if unicodedata.category(c) != "No"}
        text = text.translate({ord(c): unicodedata.normalize("NFKC", c) for c in others})
        text = _spaced(unicodedata.normalize("NFC", text))
        text = _UNSPACED.sub(r" \1 ", text)
    return text.lower().translate(_TO_SPACES).split()


def _spaced(text: str) -> str:
    return text.translate({ord(c): _replaced(c) for c in set(text) if not c.isascii()})


def _replaced(character: str) -> str:
    """A character beyond ASCII as it is, or what separates words in its place."""
    kind = unicodedata.category(character)
    if kind in ("So", "No"):
        return f" {character} "
    if character == "\u200b" or kind[0] == "P" or kind[0] == "S":  # a space of no width
        return " "
    return "" if kind == "Cf" or character in "\ufe0e\ufe0f" else character


def vocabulary(documents: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The word of each token id: "" for padding, "<unknown>", then the words of documents.

    They are in order of decreasing frequency, ties by first occurrence.
    """
    counts = Counter(chain.from_iterable(documents))
    return (*SPECIAL, *(word for word, _ in counts.most_common()))


def encode(
    documents: Sequence[Sequence[str]], words: Sequence[str], length: int
) -> NDArray[np.int32]:
    """Documents as rows of token ids (N, L), as long as the longest, but at most `length`.

    Longer ones are truncated; `PADDING` follows the end of a document, and `UNKNOWN` stands for
    other words than `words`, the word of each token id.
    """
    ids = {word: i for i, word in enumerate(words)}
    longest = max(map(len, documents), default=0)
    rows = np.full((len(documents), min(longest, length)), PADDING, np.int32)
    for row, document in zip(rows, documents, strict=True):
        tokens = document[:length]
        row[: len(tokens)] = [ids.get(token, UNKNOWN) for token in tokens]
    return rows


def random_vectors(words: Sequence[str], dimension: int) -> Vectors:
    """Vectors (V, dimension) of words, and which are known (V,): all except `SPECIAL`.

    Components are drawn from N(0, 1/dimension), zeros for padding. A word has the same vector in
    every vocabulary.
    """
    vectors = np.zeros((len(words), dimension), np.float32)
    for i in range(UNKNOWN, len(words)):
        vectors[i] = keyed_rng(0, f"vector of {words[i]}").standard_normal(dimension)
    return vectors / np.float32(np.sqrt(dimension)), np.arange(len(words)) > UNKNOWN


def read_vectors(path: Path, words: Sequence[str]) -> Vectors:
    """The vectors of some words in a file of GloVe's text layout, `word v1 ... vD` in each line.

    The first vector of a word counts. Words missing from the file, and `UNKNOWN`, get fixed
    components drawn uniformly from ±0.5/V. Vectors of other words are not parsed, so a large file
    takes little more than reading its lines.

    Args:
        path: the file, plain, `.gz`, or `.zip` with one `.txt` member. A first line `count D`, as
            word2vec writes, is skipped.
        words: the word of each token id, as of `vocabulary`.

    Returns:
        The vectors (V, D), zeros for padding; and which ids the file has (V,).
    """
    ids = {word.encode(): i for i, word in enumerate(words) if i > UNKNOWN}
    found: dict[int, NDArray[np.float32]] = {}
    dimension = 0
    for number, line in enumerate(_lines(path), 1):
        line = line.rstrip()
        spaces = line.count(b" ")
        if not line or (number == 1 and re.fullmatch(rb"\d+ \d+", line)):
            continue
        first = not dimension
        dimension = dimension or spaces
        if not dimension:
            raise DataError(
                f"{path}:{number}: has no space; in GloVe's text format, a line is 'word v1 ... "
                "vD'"
            )
        # A word may contain spaces (as some in glove.840B): the last fields are the vector.
        word, vector = _parted(line, spaces, dimension)
        if word is None:
            raise DataError(
                f"{path}:{number}: a word and {spaces} numbers, but earlier lines have {dimension}"
            )
        i = ids.get(word)
        if first or (i is not None and i not in found):
            values = _numbers(f"{path}:{number}", vector)
            if i is not None:
                found[i] = values
    if not dimension:
        raise DataError(f"{path}: contains no word vectors")
    if not found:
        examples = ", ".join(repr(word) for word in words[2:5])
        raise DataError(
            f"{path}: has no vector for any of the {len(ids)} words of the documents (the most "
            f"frequent are {examples}); data.vectors must name a file with words in lower case, "
            "in the language of the documents"
        )
    bound = 0.5 / len(words)
    drawn = np.random.default_rng(UNLISTED_SEED).uniform(-bound, bound, (len(words), dimension))
    vectors = drawn.astype(np.float32)
    vectors[PADDING] = 0
    known = np.zeros(len(words), np.bool_)
    known[list(found)] = True
    vectors[list(found)] = list(found.values())
    return vectors, known


def _lines(path: Path) -> Iterator[bytes]:
    with files.reading(path):
        if not path.exists():
            raise DataError(
                f"{path}: there is no such file; data.vectors must name a file of word vectors "
                "in GloVe's text format"
            )
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive, archive.open(_member(path, archive)) as stream:
                yield from stream
        else:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
                yield from stream


def _member(path: Path, archive: zipfile.ZipFile) -> str:
    members = [name for name in archive.namelist() if name.endswith(".txt")]
    if len(members) != 1:
        listed = f" ({', '.join(members)})" if members else ""
        raise DataError(
            f"{path}: contains {len(members)} .txt files{listed}, expected 1; unzip it and set "
            "data.vectors to the file of vectors"
        )
    return members[0]


def _parted(line: bytes, spaces: int, dimension: int) -> tuple[bytes | None, bytes]:
    """The word and the vector of a line; no word if the vector has another dimension."""
    if spaces < dimension:
        return None, b""
    *parts, vector = line.split(b" ", spaces - dimension + 1)
    if len(parts) > 1 and all(map(files.is_number, parts[1:])):
        return None, b""
    return b" ".join(parts), vector


def _numbers(where: str, vector: bytes) -> NDArray[np.float32]:
    fields = vector.split(b" ")
    try:
        values = [float(field) for field in fields]
    except ValueError:
        wrong = next(field for field in fields if not files.is_number(field))
        shown = wrong[:40].decode(errors="replace")
        raise DataError(f"{where}: '{shown}' in the vector is not a number") from None
    with np.errstate(over="ignore"):  # overflow is refused below
        row = np.array(values).astype(np.float32)
    if not np.isfinite(row).all():
        raise DataError(f"{where}: the vector has values that are not finite in float32")
    return row
