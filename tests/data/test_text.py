"""Texts as token ids: words, their vectors, and files of documents."""

from __future__ import annotations

import gzip
import os
import tempfile
import tracemalloc
import unicodedata
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import VECTORS, WORDS, zipped

from experiments import by_day
from fedsim.data import Dataset, datasets, text
from fedsim.data.sources import files
from fedsim.errors import DataError

# Before any test changes the environment.
REAL = Path(os.environ.get("FEDSIM_DATA", "/nowhere"))

TOKENS = st.text("abcdé'1", min_size=1, max_size=3)
DOCUMENTS = st.lists(st.lists(TOKENS, max_size=12), max_size=8)

pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors:UserWarning")


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
        # sentences
        ("The hotel wasn’t far from “Platform 9¾”, was it?",
         "the hotel wasn't far from platform 9 ¾ was it"),
        ("L’été dernier, nous n’avons pas dîné à l'hôtel.",
         "l'été dernier nous n'avons pas dîné à l'hôtel"),
        ("Die Straßenbahn fährt um 8 Uhr – „pünktlich“!",
         "die straßenbahn fährt um 8 uhr pünktlich"),
        ("La col·lecció és il·lustrada · i nova.", "la col·lecció és il·lustrada i nova"),
        ("Моє ім’я — Олег; п'ять яблук.", "моє ім'я олег п'ять яблук"),
        ("Ο Οδυσσέας γύρισε στην Ιθάκη· ήταν αργά.", "ο οδυσσέας γύρισε στην ιθάκη ήταν αργά"),
        ('צה״ל הודיע: "ג׳ירפה נולדה"; צה"ל.', "צה״ל הודיע ג׳ירפה נולדה צה״ל"),
        ("ג׳ ׳ד ٫ ٣٫٥ ,٬", "ג׳ ד ٣٫٥"),
        ("اشترى ١٬٢٠٠ كتاب، ثم عاد.", "اشترى ١٬٢٠٠ كتاب ثم عاد"),
        ("او می‌خواهد برود.", "او میخواهد برود"),
        ("यह हिन्दी की किताब बहुत अच्छी है।", "यह हिन्दी की किताब बहुत अच्छी है"),
        ("나는 어제 학교에 갔다.", "나는 어제 학교에 갔다"),
        ("我们在北京住了30年。", "我 们 在 北 京 住 了 30 年"),
        ("人々は東京タワーへ行きました。", "人 々 は 東 京 タ ワ ー へ 行 き ま し た"),
        ("ฉันชอบน้ำชา ๑๒ ถ้วย", "ฉั น ช อ บ น้ำ ช า ๑๒ ถ้ ว ย"),
        ("ຂ້ອຍດີໃຈ", "ຂ້ ອ ຍ ດີ ໃ ຈ"),
        ("ខែមករា។", "ខែ ម ក រា"),
        ("ရေသောက်တယ်။", "ရေ သော က် တ ယ်"),
        ("ok👩‍🚀👍🏽🇺🇦🇯🇵 1️⃣ ab", "ok 👩‍🚀 👍🏽 🇺🇦 🇯🇵 1⃣ a b"),
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


@given(st.text())
def test_tokens_are_the_same_in_either_coding_of_accents(content):
    composed, decomposed = (unicodedata.normalize(form, content) for form in ("NFC", "NFD"))
    assert text.tokenise(composed) == text.tokenise(decomposed) == text.tokenise(content)


PLAIN = st.characters(categories=["Ll", "Lo", "Nd", "No", "So", "Po", "Zs"]).filter(
    lambda c: c == unicodedata.normalize("NFKC", c) == c.lower()
)


@given(st.text(PLAIN))
def test_no_letter_number_or_symbol_is_lost(content):
    def kept(characters: str) -> list[str]:
        return [c for c in characters if unicodedata.category(c) not in ("Po", "Zs")]

    composed = unicodedata.normalize("NFC", content)
    assert kept("".join(text.tokenise(content))) == kept(composed)


@given(st.text(st.characters(max_codepoint=127)))
def test_tokens_of_ascii_are_those_of_keras(content):
    spaces = str.maketrans(dict.fromkeys('!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~', " "))
    assert text.tokenise(content) == content.lower().translate(spaces).split()


@given(DOCUMENTS)
def test_vocabulary_has_each_word_once_by_falling_frequency_then_by_first_appearance(given):
    words = text.vocabulary(given)
    assert words[:2] == ("", "<unknown>")
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
    rows = text.encode([["cat", "xyz"], [], ["the"]], WORDS, 9)
    assert rows.tolist() == [[3, 1], [0, 0], [2, 0]]  # other words are unknown


@given(st.lists(TOKENS, unique=True, max_size=8), st.lists(TOKENS, unique=True, max_size=8))
def test_a_word_has_the_same_random_vector_in_two_vocabularies(ours, theirs):
    first, second = ((*text.SPECIAL, *words) for words in (ours, theirs))
    a, b = (text.random_vectors(words, 6)[0] for words in (first, second))
    for word in {*first} & {*second}:
        np.testing.assert_array_equal(a[first.index(word)], b[second.index(word)])
    assert len(np.unique(a, axis=0)) == len(a)


def test_random_vectors_are_standard_normal():
    words = (*text.SPECIAL, *(f"word{i}" for i in range(8000)))
    vectors, known = text.random_vectors(words, 50)
    assert (vectors.shape, vectors.dtype) == ((8002, 50), np.float32)
    assert not vectors[0].any()
    assert vectors[1].any()
    assert known.tolist() == [False, False] + [True] * 8000
    scaled = vectors[2:] * np.sqrt(50)
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=0.04)
    np.testing.assert_allclose(scaled.std(axis=0), 1, atol=0.04)
    assert np.abs(np.corrcoef(scaled[:200]) - np.eye(200)).max() < 0.8


def read(folder: Path, content: str | bytes, name: str = "v.txt") -> tuple[np.ndarray, np.ndarray]:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return text.read_vectors(path, WORDS)


def test_vectors(tmp_path):
    vectors, known = read(tmp_path, VECTORS)
    assert (vectors.shape, vectors.dtype) == ((6, 3), np.float32)
    assert known.tolist() == [False, False, True, True, False, False]
    np.testing.assert_array_equal(vectors[2:4], np.float32([[1, 2, 3], [-0.5, 0, 1e-3]]))
    assert not vectors[0].any()
    # Others are always the same, whatever else was drawn and whichever words the file has.
    np.random.default_rng(0).random(9)
    others, _ = read(tmp_path, "sat 4 5 6\n")
    np.testing.assert_array_equal(others[[1, 5]], vectors[[1, 5]])
    # They fill their interval.
    read(tmp_path, VECTORS)
    words = (*WORDS, *(f"w{i}" for i in range(994)))
    vectors, known = text.read_vectors(tmp_path / "v.txt", words)
    drawn = vectors[1:][~known[1:]] * 1000
    assert len(np.unique(drawn)) > 2900
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


@pytest.mark.parametrize("name", ["v.txt.gz", "v.zip"])
def test_compressed_vectors(tmp_path, name):
    expected, _ = read(tmp_path, VECTORS)
    zip_file = zipped("glove/v.txt", "README.md")
    squeezed = gzip.compress(VECTORS.encode()) if name == "v.txt.gz" else zip_file
    np.testing.assert_array_equal(read(tmp_path, squeezed, name)[0], expected)


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
        stream.writelines(f"word{i} {line}\n" for i in range(1500))
        stream.write(f"cat {line}\nsat {line}\n")
    assert (tmp_path / "v.txt").stat().st_size > 3_500_000
    tracemalloc.start()
    _, known = text.read_vectors(tmp_path / "v.txt", WORDS)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert known.sum() == 2
    assert peak < 1_000_000


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


def lines(*documents: tuple[str, str]) -> bytes:
    return "".join("\t".join(document) + "\n" for document in documents).encode()


OWN = b"spam\tBuy now, buy CHEAP!\nham\tsee you now\nspam\t...\nham\tit's you\n"
OWN_TEST = b"ham\tyou and me now\nham\t\n"


@pytest.fixture
def own(write, tmp_path):
    """The files of a data set."""
    path, test_path = write.raw(tmp_path / "a", OWN), write.raw(tmp_path / "b.gz", OWN_TEST)
    return {"name": "text", "path": path, "test_path": test_path}


def test_text_with_a_test_set(own):
    data = load(**own, dimension=7)
    assert data.random_vectors
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


def test_text_with_vectors(own, write, tmp_path):
    vectors = write.raw(tmp_path / "v.txt.gz", b"you 1 2\nme 3 4\nother 5 6\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = load(**own, vectors=vectors, dimension=9)
    assert_sound(data)
    known = [word for word, known in zip(data.words, data.known, strict=True) if known]
    assert known == ["you", "me"]
    assert data.vectors[data.known].tolist() == [[1, 2], [3, 4]]
    assert np.abs(data.vectors[~data.known]).max() <= 0.5 / len(data.words)


def test_long_documents_are_cut(write, tmp_path):
    tokens = [f"w{i % 97}" for i in range(10_000)]
    path = write.raw(tmp_path / "a", lines(("a", " ".join(tokens)), ("b", "short")))
    test_path = write.raw(tmp_path / "b", lines(("a", "w3")))
    for fields, length in (({}, 1000), ({"length": 3}, 3), ({"length": 20_000}, 10_000)):
        data = load("text", path=path, test_path=test_path, **fields)
        assert_sound(data)
        assert (data.x.shape, data.test_x.shape) == ((2, length), (1, length))
        assert [data.words[i] for i in data.x[0]] == tokens[:length]
    path = write.raw(tmp_path / "a.csv", b"label,text\na," + b"word " * 100_000 + b"\nb,x\n")
    assert load("text", path=path, test_path=path).x.shape == (2, 1000)


def test_csv(write, tmp_path):
    content = (
        'id,label,text\r\n1,spam,"Buy now,\r\nbuy ""cheap"""\r\n'
        "2,ham,NA\r\n\r\n3,007,\r\n4,null,naïve\r\n"
    )
    path = write.raw(tmp_path / "a.CSV", content.encode("utf-8-sig"))
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


TREC = {
    "trec/train_5500.label": "DESC:def What is a café ?\nHUM:ind Who ?\nDESC:reason Why ?\n",
    "trec/TREC_10.label": "HUM:ind Who ?\nDESC:def What ?\n",
}
QUESTIONS = ["what is a café", "who", "why", "who", "what"]
OFFICIAL = {
    "trec6": (TREC, QUESTIONS, ["DESC", "HUM", "DESC", "HUM", "DESC"]),
    "trec50": (TREC, QUESTIONS, ["DESC:def", "HUM:ind", "DESC:reason", "HUM:ind", "DESC:def"]),
    "r8": (
        {
            "r8/r8-train-all-terms.txt": "money-fx\tone two\nacq\tthree",
            "r8/r8-test-all-terms.txt": "acq\tone",
        },
        ["one two", "three", "one"],
        ["money-fx", "acq", "acq"],
    ),
    "tmn": (
        {
            "tmn/TMN_train.txt": "us\tone two\nsport\tthree\n",
            "tmn/TMN_val.txt": "world\tfour\n",
            "tmn/TMN_test.txt": "world\tone\n",
        },
        ["one two", "three", "four", "one"],
        ["us", "sport", "world", "world"],
    ),
}


@pytest.mark.parametrize("below", [True, False])
@pytest.mark.parametrize("name", OFFICIAL)
def test_official_files(write, tmp_path, monkeypatch, name, below):
    """In a folder of their own or not, and what is said if one of them is missing."""
    content, texts, labels = OFFICIAL[name]
    first, *others = [
        write.raw(tmp_path / (path if below else Path(path).name), text.encode("latin-1"))
        for path, text in content.items()
    ]
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path))
    data = load(name)
    assert_sound(data)
    assert documents(data) == [f"{c} {words}" for c, words in zip(labels, texts, strict=True)]
    assert len(data.test_x) == len(others[-1].read_text().splitlines())
    for path in others:
        kept = path.read_bytes()
        path.unlink()
        with pytest.raises(DataError, match=rf"has {first.name} but no {path.name} .*\nget "):
            load(name, root=tmp_path)
        path.write_bytes(kept)
    first.unlink()
    folder = next(iter(content)).partition("/")[0]
    places = f"\n  {tmp_path}/{folder}\n  {tmp_path}\nget .*, and set data.root or FEDSIM_DATA to "
    with pytest.raises(DataError, match=rf"^{folder}: no file '{first.name}' .* any of{places}"):
        load(name, root=tmp_path)


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
    message = r"subj: .* but no plot\.tok\.gt9\.5000 .*\nget rotten_imdb"
    with pytest.raises(DataError, match=message):
        load("subj", root=tmp_path)


DOCUMENTS_OF = {  # how many there are, and how some of them begin, by their place
    "trec6": (
        (5452, 500),
        {0: "DESC how did serfdom develop in and then leave russia", 5454: "HUM who was galileo"},
    ),
    "trec50": ((5452, 500), {0: "DESC:manner how did serfdom develop"}),
    "r8": (
        (5485, 2189),
        {
            0: "earn champion products ch approves stock split",
            5487: "ship australian foreign ship ban ends",
        },
    ),
    "tmn": ((24_817, 7_780), {22_817: "sport ronaldo goal sets spanish league record"}),
}


@pytest.mark.parametrize("name", by_day(["trec6", "trec50", "r8", "tmn"], ["trec6"]))
def test_real_documents(name):
    if not (REAL / name.rstrip("650")).exists():
        pytest.skip(f"{name} is not in FEDSIM_DATA")
    counts, beginnings = DOCUMENTS_OF[name]
    data = load(name, root=REAL)
    assert_sound(data)
    assert (len(data.y), len(data.test_y)) == counts
    assert len(data.classes) == {"trec6": 6, "trec50": 50, "r8": 8, "tmn": 7}[name]
    shown = documents(data)
    for place, beginning in beginnings.items():
        assert shown[place].startswith(beginning)
    assert "sisterðcity" in data.words or not name.startswith("trec")
