from __future__ import annotations

import gzip
import os
import tempfile
import time
import tracemalloc
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedsim.config.registry import first_line, key_docs
from fedsim.data import Dataset, datasets, text
from fedsim.data.sources import files
from fedsim.data.sources import text as text_sources
from fedsim.errors import DataError

# Before any test changes the environment.
REAL = Path(os.environ.get("FEDSIM_DATA", "/nowhere"))
GLOVE = "glove/glove.twitter.27B.25d.top12k.txt.gz"

NAMES = ("trec6", "trec50", "r8", "tmn", "subj", "text")
TOKENS = st.text("abcdé'1", min_size=1, max_size=3)
DOCUMENTS = st.lists(st.lists(TOKENS, max_size=12), max_size=8)

WORDS = ("", "<unknown>", "the", "cat", "sat", "mat")
VECTORS = "the 1 2 3\ncat -0.5 0 1e-3\ndog 7 8 9\n"

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors:UserWarning")


@pytest.fixture
def real() -> Callable[[str], Path]:
    """A file or folder of real data, or a skip that names it."""

    def find(name: str) -> Path:
        if not (REAL / name).exists():
            pytest.skip(f"{name} is not in FEDSIM_DATA")
        return REAL / name

    return find


def assert_sound(data: Dataset) -> None:
    for x, y in ((data.x, data.y), (data.test_x, data.test_y)):
        assert (x.dtype, y.dtype) == (np.int32, np.int64)
        assert len(x) == len(y) > 0
        assert x.shape[1:] == data.shape
        assert 0 <= x.min() <= x.max() < len(data.words)
        assert 0 <= y.min() <= y.max() < len(data.classes)
        assert x.flags.writeable
        assert not ((x[:, :-1] == 0) & (x[:, 1:] != 0)).any()  # padding is at the end
    assert np.concatenate([data.x, data.test_x])[:, -1].any()
    assert data.words[:2] == ("", "<unknown>")
    assert len(set(data.words)) == len(data.words)
    assert list(data.classes) == sorted(data.classes)
    assert len(data.vectors) == len(data.known) == len(data.words)
    assert (data.vectors.dtype, data.known.dtype) == (np.float32, np.bool_)
    assert not data.vectors[0].any()
    assert data.vectors[1:].any(axis=1).all()
    assert not data.known[:2].any()


def documents(data: Dataset) -> list[str]:
    """The documents of both sets, by label, back from their ids."""
    rows, labels = np.concatenate([data.x, data.test_x]), np.concatenate([data.y, data.test_y])
    return [
        " ".join([data.classes[label], *(data.words[i] for i in row if i)])
        for row, label in zip(rows, labels, strict=True)
    ]


def load(name: str, **fields: object) -> Dataset:
    return datasets.parse({"name": name, **fields}).load()


# tokens


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ("How far is it from Denver to Aspen ?", "how far is it from denver to aspen"),
        ("Don't  STOP--now,(it's) u.s. 3.5%", "don't stop now it's u s 3 5"),
        ("!\"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n", ""),
        ("a!b\"c#d$e%f&g(h)i*j+k,l-m.n/o:p;q<r=s>t?u@v[w\\x]y^z_0`1{2|3}4~5\t6\n7",
         "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7"),
        ("ÉCOLE\x85naïve\xa0«x»\r", "école naïve x"),
        ("", ""),
        ("“good” ‘good’ «good» good… ¿good? good\u200bgood", "good " * 7),
        ("don’t don't donʼt don＇t", "don't " * 4),
        ("ﬁne ｆｉｎｅ ＦＩＮＥ fi\u00adne fi\u200dne", "fine " * 5),
        ("cafe\u0301 café", "café café"),
        ("good😀❤️ good。good—good", "good 😀 ❤ good good good"),
        ("½ m² £5 Acme™", "½ m ² 5 acme tm"),
        ("3½ x²+y² ①② 10⁻³", "3 ½ x ² y ² ① ② 10 ³"),
        ("这部电影很好，Good。", "这 部 电 影 很 好 good"),
        ("すしがｽｷ", "す し が ス キ"),
        ("ดีมาก", "ดี ม า ก"),
        ("한국어 문장", "한국어 문장"),
        ("हिन्दी भाषा", "हिन्दी भाषा"),
    ],
)  # fmt: skip
def test_tokenise(given, tokens):
    assert text.tokenise(given) == tokens.split()


@given(st.text())
def test_tokens_hold_no_separator_and_stay_as_they_are(content):
    tokens = text.tokenise(content)
    assert not set("".join(tokens)) & set('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n ')
    assert all(token and len(token.split()) == 1 for token in tokens)
    assert not set(tokens) & set(text.SPECIAL)


@given(st.text(st.characters(max_codepoint=127)))
def test_tokens_of_ascii_are_those_of_keras(content):
    spaces = str.maketrans(dict.fromkeys('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~', " "))
    assert text.tokenise(content) == content.lower().translate(spaces).split()


# vocabulary and rows


def test_vocabulary_is_by_frequency_then_by_first_appearance():
    given = [["b", "a", "c", "c"], [], ["d", "a", "b", "c"]]
    assert text.vocabulary(given) == ("", "<unknown>", "c", "b", "a", "d")
    assert text.vocabulary([]) == ("", "<unknown>")


@given(DOCUMENTS)
def test_vocabulary_has_each_word_once_by_falling_frequency(given):
    words = text.vocabulary(given)
    tokens = [token for document in given for token in document]
    counts = Counter(tokens)
    assert set(words[2:]) == set(tokens)
    assert len(words) == 2 + len(counts)
    order = [(-counts[word], tokens.index(word)) for word in words[2:]]
    assert order == sorted(order)


@given(DOCUMENTS, st.integers(1, 15))
def test_rows_are_the_documents_cut_and_padded(given, length):
    words = text.vocabulary(given)
    rows = text.encode(given, words, length)
    assert rows.dtype == np.int32
    assert rows.shape == (len(given), min(length, max(map(len, given), default=0)))
    for row, document in zip(rows, given, strict=True):
        assert [words[i] for i in row if i] == document[:length]
        assert not row[len(document) :].any()


def test_words_outside_are_unknown():
    rows = text.encode([["cat", "xyz"], [], ["the"]], WORDS, 9)
    assert rows.tolist() == [[3, 1], [0, 0], [2, 0]]


# random vectors


@given(st.lists(TOKENS, unique=True, max_size=8), st.lists(TOKENS, unique=True, max_size=8))
def test_a_word_has_the_same_random_vector_in_two_vocabularies(ours, theirs):
    first, second = ((*text.SPECIAL, *words) for words in (ours, theirs))
    a, b = (text.random_vectors(words, 6)[0] for words in (first, second))
    for word in {*first} & {*second}:
        np.testing.assert_array_equal(a[first.index(word)], b[second.index(word)])
    assert len(np.unique(a, axis=0)) == len(a)


def test_random_vectors_of_many_words_are_standard_normal_and_quick():
    words = (*text.SPECIAL, *(f"word{i}" for i in range(30_000)))
    begin = time.process_time()
    vectors, known = text.random_vectors(words, 50)
    assert time.process_time() - begin < 5  # a tenth of it on an idle machine
    assert (vectors.shape, vectors.dtype) == ((30_002, 50), np.float32)
    assert not vectors[0].any()
    assert vectors[1].any()
    assert known.tolist() == [False, False] + [True] * 30_000
    scaled = vectors[2:] * np.sqrt(50)
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=0.03)
    np.testing.assert_allclose(scaled.std(axis=0), 1, atol=0.03)
    assert np.abs(np.corrcoef(scaled[:200]) - np.eye(200)).max() < 0.8


# vectors of a file


def read(folder: Path, content: str | bytes, name: str = "v.txt") -> tuple[np.ndarray, np.ndarray]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return text.read_vectors(path, WORDS)


def test_vectors(tmp_path):
    vectors, known = read(tmp_path, VECTORS)
    assert (vectors.shape, vectors.dtype) == ((6, 3), np.float32)
    assert known.tolist() == [False, False, True, True, False, False]
    assert vectors[2].tolist() == [1, 2, 3]
    np.testing.assert_array_equal(vectors[3], np.float32([-0.5, 0, 1e-3]))
    assert not vectors[0].any()
    rest = vectors[[1, 4, 5]]
    assert (np.abs(rest) < 0.5 / 6).all()
    assert len(np.unique(rest)) == 9
    # always the same, whatever else was drawn and whichever words the file has
    np.random.default_rng(0).random(9)
    others, _ = read(tmp_path, "sat 4 5 6\n")
    np.testing.assert_array_equal(others[[1, 5]], vectors[[1, 5]])


def test_vectors_of_words_without_one_fill_their_interval(tmp_path):
    words = (*WORDS, *(f"w{i}" for i in range(994)))
    path = tmp_path / "v.txt"
    path.write_text(VECTORS)
    vectors, known = text.read_vectors(path, words)
    drawn = vectors[1:][~known[1:]] * 1000
    assert -0.5 <= drawn.min() < -0.49
    assert 0.49 < drawn.max() <= 0.5
    np.testing.assert_allclose(drawn.mean(axis=0), 0, atol=0.03)


@pytest.mark.parametrize(
    "content",
    [
        "3 3\n" + VECTORS,  # word2vec's header
        VECTORS.replace("\n", " \n"),  # and the space at the end of its lines
        VECTORS.replace("\n", "\r\n") + "\r\n",
        "\n" + VECTORS.rstrip("\n"),
        VECTORS + "the 9 9 9\ncat x y z\n",  # the first counts
        VECTORS
        + ". . . 9 9 9\nsat name@domain.com 9 9 9\nthe x\xa0y 9 9 9\n",  # words with spaces
        VECTORS + "other x nan 1e99\n",  # is not asked for
        VECTORS.encode() + b"\xff\xfe\x85 1 2 3\n",
    ],
)
def test_vectors_of_layouts_that_are_about(tmp_path, content):
    vectors, known = read(tmp_path, content)
    expected, _ = read(tmp_path, VECTORS)
    np.testing.assert_array_equal(vectors, expected)
    assert known.sum() == 2


def zipped(path: Path, *members: str) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            archive.writestr(member, VECTORS)
    return path


def test_compressed_vectors(tmp_path):
    expected, _ = read(tmp_path, VECTORS)
    squeezed, _ = read(tmp_path, gzip.compress(VECTORS.encode()), "v.txt.gz")
    np.testing.assert_array_equal(squeezed, expected)
    path = zipped(tmp_path / "v.zip", "glove/v.txt", "README.md")
    np.testing.assert_array_equal(text.read_vectors(path, WORDS)[0], expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"v\.txt: contains no word vectors"),
        ("3 3\n", r"v\.txt: contains no word vectors"),
        ("the\n", r"v\.txt:1: has no space; in GloVe's text format, a line is 'word v1 "),
        (VECTORS + "sat 1 2\n", r"v\.txt:4: a word and 2 numbers, but earlier lines have 3$"),
        (VECTORS + "of 1 2 3 4\n", r"v\.txt:4: a word and 4 numbers, but earlier lines"),
        (VECTORS + "12 3\n", r"v\.txt:4: a word and 1 numbers"),  # a header no more
        (VECTORS + "sat\n", r"v\.txt:4: a word and 0 numbers"),
        (VECTORS + "sat 1 two 3\n", r"v\.txt:4: 'two' in the vector is not a number$"),
        (VECTORS + "sat 1  3\n", r"v\.txt:4: '' in the vector is not a number$"),
        (VECTORS.encode() + b"sat 1 2 \xff\n", r"v\.txt:4: '�' in the vector is not a number$"),
        ("<html> <head> ...\n", r"v\.txt:1: '<head>' in the vector is not a number"),
        (VECTORS + "sat 1 nan 3\n", r"v\.txt:4: .* values that are not finite in float32"),
        (VECTORS + "sat 1 1e39 3\n", r"v\.txt:4: .* values that are not finite in float32"),
        (
            "The 1 2 3\nCat 1 2 3\n",
            r"v\.txt: has no vector for any of the 4 words of the documents \(the most frequent "
            r"are 'the', 'cat', 'sat'\); data\.vectors must name a file with words in lower case",
        ),
    ],
)
def test_wrong_vectors(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, content)


def test_vectors_that_cannot_be_opened(tmp_path):
    missing = (
        rf"{tmp_path}/none\.txt: there is no such file; data\.vectors must name a file of word vec"
    )
    with pytest.raises(DataError, match=missing):
        text.read_vectors(tmp_path / "none.txt", WORDS)
    with pytest.raises(DataError, match=rf"{tmp_path}: cannot be read: Is a directory"):
        text.read_vectors(tmp_path, WORDS)
    with pytest.raises(DataError, match=r"v\.txt\.gz: cannot be read: Not a gzipped file"):
        read(tmp_path, VECTORS, "v.txt.gz")
    whole = gzip.compress(VECTORS.encode() * 1000)
    with pytest.raises(DataError, match=r"v\.txt\.gz: cannot be read: Compressed file ended"):
        read(tmp_path, whole[: len(whole) // 2], "v.txt.gz")
    with pytest.raises(DataError, match=r"v\.zip: cannot be read: File is not a zip file"):
        read(tmp_path, VECTORS, "v.zip")
    path = zipped(tmp_path / "many.zip", "glove.50d.txt", "glove.100d.txt")
    several = (
        r"many\.zip: contains 2 \.txt files \(glove\.50d\.txt, glove\.100d\.txt\), expected 1"
    )
    with pytest.raises(DataError, match=several):
        text.read_vectors(path, WORDS)
    path = zipped(tmp_path / "no.zip", "glove.bin")
    with pytest.raises(
        DataError, match=r"no\.zip: contains 0 \.txt files, expected 1; unzip it and"
    ):
        text.read_vectors(path, WORDS)


@given(st.binary(max_size=80) | st.text("the catsx 01.\n", max_size=80).map(str.encode))
def test_any_bytes_are_read_as_vectors_or_refused_in_words(content):
    with tempfile.TemporaryDirectory() as folder:
        try:
            vectors, known = read(Path(folder), content)
        except DataError as error:
            shown = str(error)
        else:
            shown = "v.txt"
            assert vectors.shape == (6, vectors.shape[1])
            assert np.isfinite(vectors).all()
            assert known.any()
    assert "v.txt" in shown


def test_a_large_file_of_vectors_is_streamed(tmp_path):
    line = " ".join(["0.12345"] * 300)
    with (tmp_path / "v.txt").open("w") as stream:
        stream.writelines(f"word{i} {line}\n" for i in range(3000))
        stream.write(f"cat {line}\nsat {line}\n")
    assert (tmp_path / "v.txt").stat().st_size > 7_000_000
    tracemalloc.start()
    _, known = text.read_vectors(tmp_path / "v.txt", WORDS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert known.sum() == 2
    assert peak < 1_000_000


# files of labels and texts


@pytest.mark.parametrize("compression", files.COMPRESSIONS)
def test_lines_end_where_they_say(write, tmp_path, compression):
    content = "a \x85 b\x0b\x1c\x0c c\r\n\nd\re".encode("latin-1")
    path = write.raw(tmp_path / f"f{compression}", content)
    expected = ["a \x85 b\x0b\x1c\x0c c", "", "d\re"]
    assert files.read_lines(path, "latin-1") == expected
    path = write.raw(tmp_path / f"f{compression}", content + b"\n")
    assert files.read_lines(path, "latin-1") == expected


def test_labelled_lines(write, tmp_path):
    content = "\ufeffgood\tnice\tand new\r\nbad\t\nso so\t ok".encode()
    read = files.read_labelled(write.raw(tmp_path / "f", content))
    assert read == (["good", "bad", "so so"], ["nice\tand new", "", " ok"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"f: is empty"),
        (b"good\tnice\nbad awful\n", r"f:2: has no tab between a label and a text"),
        (b"good\tnice\n\nbad\tawful\n", r"f:2: has no tab between a label and a text"),
        (b"good\tnice\n \tawful\n", r"f:2: has no label before its text"),
        (b"good\tnice\nbad\t\xe9\n", r"f:2: byte 0xe9 is not utf-8; save the file in that en"),
        (b"\xef\xbb\xbf\xff\n\n", r"f:1: byte 0xff is not utf-8"),
    ],
)
def test_wrong_labelled_lines(write, tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        files.read_labelled(write.raw(tmp_path / "f", content))


# what fedsim shows of the sources


def test_names_and_first_lines():
    known = dict(datasets.items())
    for name in NAMES:
        assert len(first_line(known[name])) > 20
        for field in ("vectors", "dimension", "length"):
            assert field in key_docs(known[name])


@pytest.mark.parametrize("wrong", [{"length": 0}, {"dimension": 0}, {"test_fraction": 1}])
def test_sources_refuse(tmp_path, wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        text_sources.Text(path=tmp_path, **wrong)


# a file of one's own


def lines(*documents: Sequence[str]) -> bytes:
    return "".join("\t".join(document) + "\n" for document in documents).encode()


OWN = lines(
    ("spam", "Buy now, buy CHEAP!"),
    ("ham", "see you now"),
    ("spam", "..."),
    ("ham", "it's you"),
)
OWN_TEST = lines(("ham", "you and me now"), ("ham", ""))


def test_text_with_a_test_set(write, tmp_path):
    path, test_path = write.raw(tmp_path / "a", OWN), write.raw(tmp_path / "b.gz", OWN_TEST)
    data = load("text", path=path, test_path=test_path, dimension=7)
    assert_sound(data)
    assert data.words == (
        *text.SPECIAL,
        *("now", "you", "buy", "cheap", "see", "it's", "and", "me"),
    )
    assert data.x.tolist() == [[4, 2, 4, 5], [6, 3, 2, 0], [0] * 4, [7, 3, 0, 0]]
    assert data.test_x.tolist() == [[3, 8, 9, 2], [0] * 4]
    assert data.classes == ("ham", "spam")
    assert (data.y.tolist(), data.test_y.tolist()) == ([1, 0, 1, 0], [0, 0])
    assert data.vectors.shape == (10, 7)
    assert data.known.tolist() == [False] * 2 + [True] * 8


def test_text_that_is_split(write, tmp_path):
    labels = ["b"] * 60 + ["a"] * 40
    content = lines(*((label, f"w{i} w{i}") for i, label in enumerate(labels)))
    path = write.raw(tmp_path / "a.txt", content)
    data = load("text", path=path, test_fraction=0.3)
    assert_sound(data)
    assert np.bincount(data.y).tolist() == [28, 42]
    assert np.bincount(data.test_y).tolist() == [12, 18]
    assert sorted(documents(data)) == sorted(f"{y} w{i} w{i}" for i, y in enumerate(labels))
    np.testing.assert_array_equal(data.test_x, load("text", path=path, test_fraction=0.3).test_x)


def test_long_documents_are_cut(write, tmp_path):
    tokens = [f"w{i % 97}" for i in range(10_000)]
    path = write.raw(tmp_path / "a", lines(("a", " ".join(tokens)), ("b", "short")))
    test_path = write.raw(tmp_path / "b", lines(("a", "w3")))
    for fields, length in (({}, 1000), ({"length": 3}, 3), ({"length": 20_000}, 10_000)):
        data = load("text", path=path, test_path=test_path, **fields)
        assert_sound(data)
        assert (data.x.shape, data.test_x.shape) == ((2, length), (1, length))
        assert [data.words[i] for i in data.x[0]] == tokens[:length]


def test_text_with_vectors(write, tmp_path):
    path, test_path = write.raw(tmp_path / "a", OWN), write.raw(tmp_path / "b", OWN_TEST)
    vectors = write.raw(tmp_path / "v.txt.gz", b"you 1 2\nme 3 4\nother 5 6\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load("text", path=path, test_path=test_path, vectors=vectors, dimension=9)
    assert_sound(data)
    assert [word for word, known in zip(data.words, data.known, strict=True) if known] == [
        "you",
        "me",
    ]
    assert data.vectors[data.known].tolist() == [[1, 2], [3, 4]]
    assert np.abs(data.vectors[~data.known]).max() <= 0.5 / len(data.words)


def test_without_vectors_it_is_said_what_to_set(write, tmp_path):
    path, test_path = write.raw(tmp_path / "a", OWN), write.raw(tmp_path / "b", OWN_TEST)
    message = r"^text: words get random vectors of 50 components, .* set data\.vectors to a file"
    with pytest.warns(UserWarning, match=message):
        load("text", path=path, test_path=test_path)


def test_csv(write, tmp_path):
    content = (
        'id,label,text\r\n1,spam,"Buy now,\r\nbuy ""cheap"""\r\n'
        "2,ham,NA\r\n\r\n3,007,\r\n4,null,naïve\r\n"
    )
    path = write.raw(tmp_path / "a.csv", content.encode("utf-8-sig"))
    test_path = write.raw(tmp_path / "b.csv.gz", b"text,label\nbuy na,007\n")
    data = load("text", path=path, test_path=test_path)
    assert_sound(data)
    assert data.classes == ("007", "ham", "null", "spam")
    assert documents(data) == [
        "spam buy now buy cheap",
        "ham na",
        "007",
        "null naïve",
        "007 buy na",
    ]
    other = write.raw(tmp_path / "c.csv", b"text,klass,body\n1,x,one two\n2,x,three\n")
    data = load("text", path=other, label="klass", text="body", test_fraction=0.5)
    assert sorted(documents(data)) == ["x one two", "x three"]


def test_csv_with_a_long_document(write, tmp_path):
    path = write.raw(tmp_path / "a.csv", b"label,text\na," + b"word " * 100_000 + b"\nb,x\n")
    assert load("text", path=path, test_path=path).x.shape == (2, 1000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.csv: cannot be read: No columns to parse"),
        (b"label,text\n", r"a\.csv: has no rows"),
        (
            b"labels,text\na,b\n",
            r"a\.csv: has no column 'label'; did you mean 'labels'\? \(data\.l",
        ),
        (
            b"label,body\na,b\n",
            r"a\.csv: has no column 'text'; known: body, label \(data\.text na",
        ),
        (b"label,text\na,b\n ,c\n", r"a\.csv: column 'label' has no value in row 2"),
        (b"label,text\na,b,c\n", r"a\.csv: cannot be read: Length of header or names does not"),
        (b"label,text\na,b\na,b,c\n", r"a\.csv: cannot be read: .*Expected 2 fields in line 3"),
        (b'label,text\na,"b\n', r"a\.csv: cannot be read: .*EOF inside string"),
        (b"label,text\na,b\nc,\xff\n", r"a\.csv:3: byte 0xff is not utf-8"),
    ],
)
def test_wrong_csv(write, tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        load("text", path=write.raw(tmp_path / "a.csv", content))


def test_wrong_text(write, tmp_path):
    with pytest.raises(DataError, match=r"none: cannot be read: No such file or directory"):
        load("text", path=tmp_path / "none")
    path = write.raw(tmp_path / "a", OWN)
    test_path = write.raw(tmp_path / "b", OWN_TEST + b"hum\tx\n")
    message = (
        rf"^{tmp_path}/b: document 3 has the label 'hum', which does not occur in {tmp_path}/a"
    )
    with pytest.raises(DataError, match=message + r"; did you mean 'ham'\?"):
        load("text", path=path, test_path=test_path)
    with pytest.raises(DataError, match=r"a: class 'b' has 1 example; splitting off a test set"):
        load("text", path=write.raw(path, lines(("a", "x"), ("a", "x"), ("b", "x"))))
    write.raw(path, lines(("a", "."), ("a", ""), ("b", ""), ("b", "!")))
    with pytest.raises(DataError, match=r"a: its documents contain no words"):
        load("text", path=path, test_fraction=0.5)
    with pytest.raises(DataError, match=r"v: there is no such file; data\.vectors must name"):
        load("text", path=write.raw(path, OWN), vectors=tmp_path / "v", test_fraction=0.5)


# official files


def trec(write, folder: Path) -> None:
    train = "DESC:def What is a caf\xe9 ?\nHUM:ind Who was he ?\nDESC:reason Why a cafe ?\n"
    write.raw(folder / "train_5500.label", train.encode("latin-1"))
    write.raw(folder / "TREC_10.label", b"HUM:ind Who ?\nDESC:def What ?\n")


@pytest.mark.parametrize("folder", ["", "trec"])
def test_trec(write, tmp_path, monkeypatch, folder):
    trec(write, tmp_path / folder)
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    data = load("trec6")
    assert_sound(data)
    assert data.classes == ("DESC", "HUM")
    assert (data.y.tolist(), data.test_y.tolist()) == ([0, 1, 0], [1, 0])
    assert documents(data)[0] == "DESC what is a café"
    data = load("trec50", root=tmp_path)
    assert_sound(data)
    assert data.classes == ("DESC:def", "DESC:reason", "HUM:ind")
    assert (data.y.tolist(), data.test_y.tolist()) == ([0, 2, 1], [2, 0])


def test_trec_errors(write, tmp_path):
    with pytest.raises(DataError) as caught:
        load("trec6", root=tmp_path)
    assert str(caught.value) == (
        f"trec: no file 'train_5500.label' (nor .gz, .xz) in any of\n"
        f"  {tmp_path}/trec\n  {tmp_path}\n"
        f"get train_5500.label and TREC_10.label from cogcomp.seas.upenn.edu/Data/QA/QC, and set "
        f"data.root or FEDSIM_DATA to its folder"
    )
    trec(write, tmp_path)
    path = write.raw(tmp_path / "TREC_10.label", b"HUM:ind Who ?\nDESC What ?\n")
    message = r"TREC_10\.label:2: begins with 'DESC', expected a class COARSE:fine"
    with pytest.raises(DataError, match=message):
        load("trec50", root=tmp_path)
    write.raw(path, b"HUM:ind\n")
    with pytest.raises(DataError, match=r"TREC_10\.label:1: has no space between a label and a t"):
        load("trec6", root=tmp_path)
    path.unlink()
    with pytest.raises(
        DataError, match=r"has train_5500\.label but no TREC_10\.label .*\nget tra"
    ):
        load("trec6", root=tmp_path)


def test_r8(write, tmp_path):
    write.raw(tmp_path / "r8/r8-train-all-terms.txt", b"money-fx\tone two\nacq\tthree")
    write.raw(tmp_path / "r8/r8-test-all-terms.txt", b"acq\tone")
    data = load("r8", root=tmp_path)
    assert_sound(data)
    assert documents(data) == ["money-fx one two", "acq three", "acq one"]
    (tmp_path / "r8/r8-test-all-terms.txt").unlink()
    with pytest.raises(DataError, match=r"r8: .* but no r8-test-all-terms\.txt .*\nget r8-train-"):
        load("r8", root=tmp_path)


def test_tmn(write, tmp_path):
    write.raw(tmp_path / "tmn/TMN_train.txt", b"us\tone two\nsport\tthree\n")
    write.raw(tmp_path / "tmn/TMN_test.txt", b"world\tone\n")
    with pytest.raises(DataError, match=r"tmn: .* but no TMN_val\.txt .*\nget training\.csv, val"):
        load("tmn", root=tmp_path)
    write.raw(tmp_path / "tmn/TMN_val.txt", b"world\tfour\n")
    data = load("tmn", root=tmp_path)
    assert_sound(data)
    assert (len(data.x), len(data.test_x)) == (3, 1)
    assert documents(data) == ["us one two", "sport three", "world four", "world one"]


@pytest.mark.parametrize("folder", ["", "subj", "rotten_imdb"])
def test_subj(write, tmp_path, folder):
    """With the ends of lines, and the bytes 0x85 in them, of the official files."""
    quotes = [f"smart \x85 and alert , no {i} . " for i in range(20)]
    plots = [f"the plot of film {i}" for i in range(30)]
    for name, snippets in (("quote", quotes), ("plot", plots)):
        content = "".join(f"{snippet}\r\n" for snippet in snippets)
        write.raw(tmp_path / folder / f"{name}.tok.gt9.5000", content.encode("latin-1"))
    data = load("subj", root=tmp_path)
    assert_sound(data)
    assert data.classes == ("objective", "subjective")
    assert np.bincount(data.y).tolist() == [24, 16]
    assert np.bincount(data.test_y).tolist() == [6, 4]
    assert sorted(documents(data)) == sorted(
        [f"subjective smart and alert no {i}" for i in range(20)]
        + [f"objective the plot of film {i}" for i in range(30)]
    )
    assert len(load("subj", root=tmp_path, test_fraction=0.5).x) == 25
    (tmp_path / folder / "plot.tok.gt9.5000").unlink()
    with pytest.raises(
        DataError, match=r"subj: .* but no plot\.tok\.gt9\.5000 .*\nget rotten_imdb"
    ):
        load("subj", root=tmp_path)


# real files


@pytest.mark.parametrize(
    ("name", "folder", "train", "test", "first", "last"),
    [
        (
            *("trec6", "trec"),
            {"ABBR": 86, "DESC": 1162, "ENTY": 1250, "HUM": 1223, "LOC": 835, "NUM": 896},
            {"ABBR": 9, "DESC": 138, "ENTY": 94, "HUM": 65, "LOC": 81, "NUM": 113},
            "DESC how did serfdom develop in and then leave russia",
            "HUM who was galileo",
        ),
        (
            *("r8", "r8"),
            {"acq": 1596, "crude": 253, "earn": 2840, "grain": 41, "interest": 190}
            | {"money-fx": 206, "ship": 108, "trade": 251},
            {"acq": 696, "crude": 121, "earn": 1083, "grain": 10, "interest": 81}
            | {"money-fx": 87, "ship": 36, "trade": 75},
            "earn champion products ch approves stock split",
            "ship australian foreign ship ban ends",
        ),
    ],
)
def test_real_documents(real, name, folder, train, test, first, last):
    data = load(name, root=real(folder).parent)
    assert_sound(data)
    assert dict(zip(data.classes, np.bincount(data.y), strict=True)) == train
    assert dict(zip(data.classes, np.bincount(data.test_y), strict=True)) == test
    shown = documents(data)
    assert shown[0].startswith(first)
    assert shown[len(data.x) + 2].startswith(last)
    assert "sisterðcity" in data.words or name != "trec6"


def test_real_trec50(real):
    data = load("trec50", root=real("trec").parent)
    assert_sound(data)
    assert (len(data.x), len(data.test_x)) == (5452, 500)
    assert len(data.classes) == len(set(data.y)) == 50
    assert len(set(data.test_y)) == 42


def test_real_tmn(real):
    folder = real("tmn")
    data = load("tmn", root=folder.parent)
    assert_sound(data)
    assert (len(data.x), len(data.test_x)) == (24_817, 7_780)
    listed = (folder / "labels.txt").read_text().split()
    assert data.classes == tuple(sorted(listed))
    assert documents(data)[22_817].startswith("sport ronaldo goal sets spanish league record")


def test_real_glove(real):
    path = real(GLOVE)
    data = load("trec6", root=real("trec").parent, vectors=path)
    assert_sound(data)
    assert data.vectors.shape == (len(data.words), 25)
    with gzip.open(path, "rt") as stream:
        listed = dict(line.rstrip().split(" ", 1) for line in stream)
    for word, vector, known in zip(data.words[2:], data.vectors[2:], data.known[2:], strict=True):
        assert known == (word in listed)
        if known:
            np.testing.assert_array_equal(vector, np.float32(listed[word].split()))
        else:
            assert np.abs(vector).max() <= 0.5 / len(data.words)
    assert {"the", "what", "is"} <= {w for w, k in zip(data.words, data.known, strict=True) if k}
