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
import regex
from numpy.typing import NDArray

from fedsim.data.sources import files
from fedsim.errors import DataError
from fedsim.support.rng import keyed_rng

# (V, D) vectors of words, and (V,) which are known
Vectors = tuple[NDArray[np.float32], NDArray[np.bool_]]

PADDING, UNKNOWN = 0, 1  # token ids
SPECIAL = ("", "<unknown>")  # their words, which never occur in a text

UNLISTED_SEED = 42  # as in FedSeIT's released code, for words missing from a file of vectors

# Keras's separators, in ASCII; any other mark there is a letter to it, as ' is.
_SEPARATORS = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
_TO_SPACES = str.maketrans(_SEPARATORS, " " * len(_SEPARATORS))
# What does not show; but a space of no width separates, and a joiner joins pictographs.
_UNSEEN = regex.compile(
    r"(?V1)[\p{Cf}\ufe0e\ufe0f--[\u200b\u200d]]|\u200d(?!\p{Extended_Pictographic})"
)
_WHOLE = "\u0e33\u0eb3"  # vowels of Thai and Lao, which NFKC would take apart
_HEBREW = r"(?:\p{WB=Hebrew_Letter}\p{WB=Extend}*)"
_DIGIT = r"(?:\p{WB=Numeric}\p{WB=Extend}*)"
_LETTER = r"(?:[\p{WB=ALetter}\p{WB=Hebrew_Letter}--\p{Han}]\p{WB=Extend}*)"
_APOSTROPHE = regex.compile(
    rf"(?V1)[\u2018\u2019\u02bc\uff07](?<=(?:{_LETTER}|{_DIGIT}).)(?={_LETTER}|{_DIGIT})"
)
_GERSHAYIM = regex.compile(rf'(?V1)"(?<={_HEBREW}.)(?={_HEBREW})')  # in Hebrew's abbreviations
_WORD = regex.compile(
    rf"""(?xV1)
    (?=[\P{{P}}'])  # not a stray ׳ or ٫
    (?: {_LETTER} | {_DIGIT} | '\p{{WB=Extend}}*  # rules WB5, WB8 to WB10
      | [\p{{WB=MidLetter}}--\p{{ASCII}}] (?<={_LETTER}.)  # WB6, WB7
        \p{{WB=Extend}}* (?={_LETTER})
      | [\p{{WB=MidNum}}--\p{{ASCII}}] (?<={_DIGIT}.)  # WB11, WB12
        \p{{WB=Extend}}* (?={_DIGIT})
    )+
    | (?: \p{{RI}}{{2}} | [\p{{L}}\p{{N}}\p{{So}}\p{{Co}}\p{{Cn}}] )  # WB15, flags; WB999
      [\p{{WB=Extend}}{_WHOLE}]* (?: \u200d \p{{Extended_Pictographic}} \p{{WB=Extend}}* )*  # WB3c
    """
)


def tokenise(text: str) -> list[str]:
    """The words of a text, in lower case and without punctuation.

    In ASCII, they are those of Keras's classic Tokenizer by default: any sign but an apostrophe
    separates, also a stop or an underscore within a word. (White space of any kind does; in Keras
    only spaces, tabs and line feeds.)

    Beyond ASCII, they are those of Unicode's Standard Annex 29 (default word boundaries), with
    these choices. What looks alike is alike: codings of an accented letter, full-width letters,
    ligatures (NFC, and NFKC of each character), typographic apostrophes within words. What does
    not show, such as a soft hyphen, is left out. Each symbol, such as an emoji, and each number
    such as ½ or ², is a word. So is each character of languages without spaces (Chinese, Japanese
    with katakana, Thai, Lao, Khmer, Burmese), with its marks.
    """
    if text.isascii():
        return text.lower().translate(_TO_SPACES).split()
    text = _UNSEEN.sub("", unicodedata.normalize("NFC", text))
    text = _GERSHAYIM.sub("\u05f4", _APOSTROPHE.sub("'", text))
    text = text.translate({ord(c): _compatible(c) for c in set(text) if not c.isascii()})
    return _WORD.findall(unicodedata.normalize("NFC", text).lower())


def _compatible(character: str) -> str:
    """A character as its plainer form (NFKC), except for numbers such as ½ and ②."""
    kind = unicodedata.category(character)
    if kind == "No" or character in _WHOLE:
        return character
    plain = unicodedata.normalize("NFKC", character)
    return f" {plain} " if kind == "So" and plain != character else plain


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
