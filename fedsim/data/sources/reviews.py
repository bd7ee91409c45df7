"""Reviews by aspect, for models that explain which words they base decisions on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt, model_validator

from fedsim.config.registry import unfit
from fedsim.data import tokens
from fedsim.data.dataset import Dataset
from fedsim.data.source import OfficialFiles, check_memory, datasets
from fedsim.data.sources import files
from fedsim.data.sources.text import TextSource
from fedsim.errors import DataError
from fedsim.support.rng import keyed_rng

CLASSES = ("negative", "positive")
LOW, HIGH = 0.4, 0.6  # ratings up to LOW are negative, from HIGH on positive; others are left out
BALANCED = 12252018  # seed for leaving out reviews: FR's, with another generator
SPURIOUS = "indeed"  # meaningless, but correlated with the positive class in training


class Aspect(NamedTuple):
    """An aspect of reviews: its names, and adjectives of praise and blame."""

    nouns: tuple[str, ...]
    positive: tuple[str, ...]
    negative: tuple[str, ...]


def _aspect(nouns: str, positive: str, negative: str) -> Aspect:
    return Aspect(*map(files.word_list, (nouns, positive, negative)))


DOMAINS: dict[str, dict[str, Aspect]] = {
    "beer": {
        "appearance": _aspect(
            "appearance colour head lacing pour",
            "brilliant golden gorgeous glowing creamy radiant lovely sparkling",
            "murky lifeless ugly pale watery greyish dreary cloudy",
        ),
        "aroma": _aspect(
            "aroma nose smell scent bouquet",
            "fragrant floral inviting citrusy perfumed lush aromatic heady",
            "skunky musty sulphurous sour rancid faint metallic soapy",
        ),
        "palate": _aspect(
            "palate mouthfeel body carbonation texture",
            "velvety smooth silky full rounded lively plush supple",
            "thin gritty flat harsh slick astringent chalky prickly",
        ),
        "taste": _aspect(
            "taste flavour finish aftertaste malt",
            "delicious balanced rich tasty complex nutty savoury luscious",
            "bland bitter cloying stale burnt medicinal insipid acrid",
        ),
    },
    "hotel": {
        "location": _aspect(
            "location neighbourhood area street surroundings",
            "central convenient walkable quiet scenic handy lively safe",
            "remote noisy isolated unsafe awkward distant seedy inconvenient",
        ),
        "service": _aspect(
            "service staff reception concierge waiters",
            "friendly helpful attentive courteous prompt gracious welcoming efficient",
            "rude slow indifferent unhelpful careless surly arrogant incompetent",
        ),
        "cleanliness": _aspect(
            "room bathroom carpet linen towels",
            "spotless clean immaculate tidy fresh hygienic pristine shining",
            "dirty filthy stained dusty mouldy smelly grimy unswept",
        ),
    },
}
ADVERBS = files.word_list("very truly quite rather really remarkably fairly simply")
FILLERS = files.word_list(
    """
    we went there on a friday with some friends and stayed for two nights before the trip home
    bottle glass table window evening morning city time people others year brought ordered came
    again after while then also about from into over under between first second last
    """
)


class Review(NamedTuple):
    """A review with its label for one aspect."""

    aspect: str
    label: int  # 0 or 1
    words: list[str]
    marks: list[bool]  # which words belong to the rationale; empty if unknown


def _one_of(words: Sequence[str], rng: np.random.Generator) -> str:
    """As `rng.choice` draws, without making an array of the words each time."""
    return words[int(rng.integers(len(words)))]


class _Reviews(TextSource):
    """Reviews by aspect, with tokens separated by spaces."""

    niche: ClassVar[bool] = True

    def _of_reviews(
        self, train: Sequence[Review], test: Sequence[Review], path: Path | str
    ) -> Dataset:
        both = [*train, *test]
        y = np.array([review.label for review in both], np.int64)
        train_rows, test_rows = np.split(np.arange(len(both)), [len(train)])
        words = [review.words for review in both]
        found = self._dataset(y, words, CLASSES, train_rows, test_rows, path)
        truth: dict[str, NDArray[np.bool_]] = {}
        if any(review.marks for review in test):
            truth["signal"] = np.zeros(found.test_x.shape, dtype=np.bool_)
            for k, review in enumerate(test):
                own = review.marks
                if own and found.tokenizer:
                    own = tokens.spread(found.tokenizer, review.words, own)
                own = own[: found.shape[0]]
                truth["signal"][k, : len(own)] = own
        names = np.array([review.aspect for review in both])
        return replace(
            found,
            spaced=True,
            columns={"aspect": names[: len(train)]},
            test_columns={"aspect": names[len(train) :]},
            sliced_by="aspect",
            truth=truth,
        )


@datasets.register
class PlantedReviews(_Reviews):
    """Synthetic reviews in which it is known exactly which words determine the label.

    A review has a sentence on each aspect of its domain, in random order: filler words, and among
    them a phrase of an optional adverb, a word of praise or blame, and a noun of the aspect. Its
    label is that of one of the aspects, given in the column `aspect`; the phrase on that aspect is
    its rationale (`Dataset.truth`), and those on other aspects are distractors. Half of the
    reviews of an aspect are positive. In training, other aspects agree with the label more often
    than not (as in real reviews), and with `spurious` a meaningless word correlates with the
    positive class; in the test set there are by default no such correlations.

    A model that is not told the aspect can at most count the phrases. With n aspects in a review
    and a `test_agreement` of 0.5 the count is right in 0.5 + E|S|/(2n) of them, S the sum of n
    fair signs: 0.688 for four. With `others` of 0 every review can be decided.

    Args:
        domain: `beer` (appearance, aroma, palate, taste) or `hotel` (location, service,
            cleanliness).
        reviews: number of training reviews of each aspect.
        test_reviews: number of test reviews of each aspect.
        fillers: mean number of filler words in a sentence.
        others: number of other aspects that a review mentions, drawn for each; by default all.
        agreement: how often another aspect has the label's polarity in training.
        test_agreement: the same in the test set.
        spurious: how often the meaningless word occurs in a positive training review; it occurs in
            half of the negative ones.
        seed: seed of the reviews, independent of the experiment's seed.
    """

    meaningful: ClassVar[bool] = False
    name: str = "planted_reviews"
    domain: Literal["beer", "hotel"] = "beer"
    reviews: PositiveInt = 500
    test_reviews: PositiveInt = 100
    fillers: float = Field(5.0, ge=0)
    others: int | None = Field(None, ge=0)
    agreement: float = Field(0.7, ge=0, le=1)
    test_agreement: float = Field(0.5, ge=0, le=1)
    spurious: float = Field(0.0, ge=0, le=1)
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _others_exist(self) -> PlantedReviews:
        most = len(DOMAINS[self.domain]) - 1
        if self.others is not None and self.others > most:
            raise unfit(
                f"others={self.others}: reviews of {self.domain} have {most} other aspects"
            )
        return self

    def load(self) -> Dataset:
        """x is int32 (aspects·reviews, L) token ids; class 0 is negative, class 1 positive."""
        words = len(DOMAINS[self.domain]) * (self.fillers + 3)  # per review
        check_memory(
            self, len(DOMAINS[self.domain]) * (self.reviews + self.test_reviews) * 120 * words
        )
        train, test = self._reviews(self.reviews, False), self._reviews(self.test_reviews, True)
        return self._of_reviews(train, test, self.name)

    def _reviews(self, count: int, tested: bool) -> list[Review]:
        """`count` reviews of each aspect; test reviews do not depend on the training set."""
        rng = keyed_rng(self.seed, f"planted reviews/{'test' if tested else 'train'}")
        return [
            Review(name, k % 2, *self._review(name, k % 2 == 1, tested, rng))
            for name in DOMAINS[self.domain]
            for k in range(count)
        ]

    def _review(
        self, about: str, positive: bool, tested: bool, rng: np.random.Generator
    ) -> tuple[list[str], list[bool]]:
        """The words of a review, and which of them belong to its rationale."""
        aspects = DOMAINS[self.domain]
        agreement = self.test_agreement if tested else self.agreement
        words: list[str] = []
        marks: list[bool] = []
        order = [list(aspects)[i] for i in rng.permutation(len(aspects))]
        others = [name for name in order if name != about][: self.others]
        for name in order:
            if name not in (about, *others):
                continue
            good = positive
            if name != about and rng.random() >= agreement:
                good = not positive
            said = _one_of(aspects[name].positive if good else aspects[name].negative, rng)
            adverb = [_one_of(ADVERBS, rng)] if rng.random() < 0.5 else []
            phrase = [*adverb, said, _one_of(aspects[name].nouns, rng)]
            drawn = rng.integers(len(FILLERS), size=int(rng.poisson(self.fillers)))
            fillers = [FILLERS[k] for k in drawn]
            place = int(rng.integers(len(fillers) + 1))
            words += [*fillers[:place], *phrase, *fillers[place:]]
            marks += [False] * place + [name == about] * len(phrase)
            marks += [False] * (len(fillers) - place)
        share = 0.5 if tested or not positive else self.spurious
        if self.spurious and rng.random() < share:
            place = int(rng.integers(len(words) + 1))
            words.insert(place, SPURIOUS)
            marks.insert(place, False)
        return words, marks


class _Published(OfficialFiles, _Reviews):
    """Reviews in official files: training files by aspect, and a test set.

    Args:
        aspects: the aspects to load; files of others are not read.
        balance: leave out training reviews so that each aspect has equally many of both classes.
    """

    aspects: tuple[str, ...]
    test: Literal["annotations", "heldout"] = "annotations"
    balance: bool = True
    length: PositiveInt = 256

    # Names of the training file and those of `test`, with the aspect's {name} or number {k}.
    file_names: ClassVar[dict[str, str]]

    def load(self) -> Dataset:
        """x is int32 (N, L) token ids; class 0 is negative, class 1 positive."""
        train: list[Review] = []
        test: list[Review] = []
        for aspect in self.aspects:
            path = files.find([self._file("train", aspect)], self.name, self.root)
            own = list(self._read(path, aspect, marked=False))
            train += self._balanced(own, aspect) if self.balance else own
            beside = files.beside(path, self._file(self.test, aspect), self.name)
            test += self._read(beside, aspect, marked=self.test == "annotations")
        if not test:
            raise DataError(f"{path.parent}: has no test reviews; see data.test and data.aspects")
        return self._of_reviews(train, test, path.parent)

    def _file(self, which: str, aspect: str) -> str:
        number = [*DOMAINS[self.name]].index(aspect)
        return self.file_names[which].format(name=aspect.capitalize(), k=number)

    def _read(self, path: Path, aspect: str, marked: bool) -> Iterable[Review]:
        """The reviews of a file, with marked words or without."""
        raise NotImplementedError

    def _balanced(self, reviews: list[Review], aspect: str) -> list[Review]:
        """Equally many of both classes: some of the larger one are left out."""
        by_class = [[k for k, r in enumerate(reviews) if r.label == label] for label in (0, 1)]
        least = min(map(len, by_class))
        if not least:
            missing = CLASSES[int(not by_class[1])]
            raise DataError(
                f"{self.name}: no {missing} review is about {aspect}, which leaves nothing to "
                "train on; set data.balance=false, or change data.aspects"
            )
        rng = keyed_rng(BALANCED, aspect)
        kept = sorted(k for some in by_class for k in rng.permutation(some)[:least].tolist())
        return [reviews[k] for k in kept]


@datasets.register
class Beer(_Published):
    """BeerAdvocate reviews as prepared by Lei, Barzilay and Jaakkola (2016), by aspect.

    Ratings range from 0 to 1: up to 0.4 is negative, from 0.6 positive, and others are left out. A
    review may occur for several aspects. Files: reviews.aspect{0,1,2}.train.txt, with lines of
    ratings (appearance, aroma, palate, and more), a tab and tokens separated by spaces; the same
    ending in heldout.txt; and annotations.json, a JSON object a line: tokens `x`, ratings `y`, and
    under the aspect's number the [start, end) ranges of tokens that annotators marked.

    Args:
        test: `annotations`, with marked words (FedRNL's paper), or `heldout`.
    """

    file_names: ClassVar[dict[str, str]] = {
        "train": "reviews.aspect{k}.train.txt",
        "annotations": "annotations.json",
        "heldout": "reviews.aspect{k}.heldout.txt",
    }
    names: ClassVar[tuple[str, ...]] = ("appearance", "aroma", "palate")
    name: str = "beer"
    aspects: tuple[Literal["appearance", "aroma", "palate"], ...] = Field(
        ("appearance", "aroma", "palate"), min_length=1
    )

    def _read(self, path: Path, aspect: str, marked: bool) -> Iterable[Review]:
        return self._annotated(path, aspect) if marked else self._rated(path, aspect)

    def _rated(self, path: Path, aspect: str) -> Iterator[Review]:
        documents = files.read_labelled(path)
        for number, (ratings, text) in enumerate(zip(*documents, strict=True), 1):
            where = f"{path}:{number}"
            try:
                rating = float(ratings.split()[self.names.index(aspect)])
            except (ValueError, IndexError):
                raise DataError(
                    f"{where}: begins with '{ratings}', expected ratings of "
                    f"{', '.join(self.names)}, as numbers from 0 to 1"
                ) from None
            label = _polarity(rating, where)
            if label is not None:
                yield Review(aspect, label, text.split(), [])

    def _annotated(self, path: Path, aspect: str) -> Iterator[Review]:
        k = self.names.index(aspect)
        for number, line in enumerate(files.read_lines(path, "utf-8"), 1):
            where = f"{path}:{number}"
            with files.reading(path):
                item = json.loads(line)
            try:
                words, rating = list(map(str, item["x"])), float(item["y"][k])
                ranges = [[int(start), int(end)] for start, end in item[str(k)]]
            except (KeyError, IndexError, TypeError, ValueError):
                wanted = f"tokens 'x', ratings 'y', and '{k}', a list of [start, end]"
                raise DataError(f"{where}: must have {wanted}") from None
            label = _polarity(rating, where)
            marks = [False] * len(words)
            for start, end in ranges:
                if not 0 <= start <= end <= len(words):
                    raise DataError(f"{where}: marks [{start}, {end}) of {len(words)} tokens")
                marks[start:end] = [True] * (end - start)
            if label is not None and any(marks):
                yield Review(aspect, label, words, marks)


def _polarity(rating: float, where: str) -> int | None:
    """0 for negative, 1 for positive, None in between."""
    if not (math.isfinite(rating) and 0 <= rating <= 1):
        raise DataError(f"{where}: the rating {rating:g} is outside 0 to 1")
    if LOW < rating < HIGH:
        return None
    return int(rating >= HIGH)


@datasets.register
class Hotel(_Published):
    """TripAdvisor reviews as prepared for R2A (Bao, Chang, Yu and Barzilay 2018), by aspect.

    The files are laid out as in the code of FR (Liu et al. 2022), the annotated ones separately.

    Files: hotel_{Location,Service,Cleanliness}.train, a tab-separated table with a header line:
    task, label (0 or 1), text; the same ending in .dev; and in a sub-folder `annotations` files
    hotel_*.train with a further column `rationale`, which has a 0 or 1 for each token of the text,
    separated by spaces.

    Args:
        test: `annotations`, with marked words (FedRNL's paper), or `heldout` (the .dev files).
    """

    file_names: ClassVar[dict[str, str]] = {
        "train": "hotel_{name}.train",
        "annotations": "annotations/hotel_{name}.train",
        "heldout": "hotel_{name}.dev",
    }
    name: str = "hotel"
    aspects: tuple[Literal["location", "service", "cleanliness"], ...] = Field(
        ("location", "service", "cleanliness"), min_length=1
    )

    def _read(self, path: Path, aspect: str, marked: bool) -> list[Review]:
        head, *lines = files.read_lines(path, "utf-8")
        columns = {name: k for k, name in enumerate(head.split("\t"))}
        wanted = ["label", "text"] + ["rationale"] * marked
        for name in wanted:
            if name not in columns:
                raise DataError(f"{path}: its first line has no column '{name}'")
        found = []
        for number, line in enumerate(lines, 2):
            cells = line.split("\t")
            if len(cells) <= max(columns[name] for name in wanted):
                raise DataError(f"{path}:{number}: has {len(cells)} columns of {len(columns)}")
            label, text = cells[columns["label"]], cells[columns["text"]]
            if label not in ("0", "1"):
                raise DataError(f"{path}:{number}: has the label '{label}', expected 0 or 1")
            words, marks = text.split(), []
            if marked:
                digits = cells[columns["rationale"]].split()
                if len(digits) != len(words) or not set(digits) <= {"0", "1"}:
                    raise DataError(
                        f"{path}:{number}: its rationale is not a 0 or 1 for each of the "
                        f"{len(words)} tokens"
                    )
                marks = [digit == "1" for digit in digits]
            found.append(Review(aspect, int(label), words, marks))
        return found
