"""Reviews by aspect, for models that say which words they decide by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveInt

from fedsim.data.dataset import Dataset, datasets
from fedsim.data.files import Documents
from fedsim.data.sources import word_list
from fedsim.data.text import random_vectors
from fedsim.data.text_sources import TextSource
from fedsim.streams import numpy_stream

CLASSES = ("negative", "positive")
SPURIOUS = "indeed"  # says nothing, and goes with the positive class in training


@dataclass(frozen=True)
class Aspect:
    """What a review can praise or blame, and in which words.

    Args:
        nouns: what it is called.
        positive, negative: what is said of it.
    """

    nouns: tuple[str, ...]
    positive: tuple[str, ...]
    negative: tuple[str, ...]


def _aspect(nouns: str, positive: str, negative: str) -> Aspect:
    return Aspect(word_list(nouns), word_list(positive), word_list(negative))


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
ADVERBS = word_list("very truly quite rather really remarkably fairly simply")
FILLERS = word_list(
    """
    we went there on a friday with some friends and stayed for two nights before the trip home
    bottle glass table window evening morning city time people others year brought ordered came
    again after while then also about from into over under between first second last
    """
)


@datasets.register
class PlantedReviews(TextSource):
    """Reviews that were made up, in which it is known exactly which words the label is about.

    A review has a sentence on each aspect of its domain, in random order: fillers, and among them
    a phrase of an adverb or none, a word of praise or blame, and a noun of the aspect. Its label
    is that of one of the aspects, the column `aspect`; the phrase on that aspect is its rationale
    (`Dataset.marks`), those on others distract. Reviews of an aspect are half positive. In
    training, other aspects agree with the label more often than not (as in real reviews), and a
    word that says nothing goes with the positive class; in the test set they do not.

    Args:
        domain: `beer` (appearance, aroma, palate, taste) or `hotel` (location, service,
            cleanliness).
        reviews: for training, of each aspect.
        test_reviews: of each aspect.
        fillers: of a sentence, on average.
        agreement: how often another aspect has the label's polarity in training.
        spurious: how often the word that says nothing stands in a positive training review; in
            a negative one as often as not.
        seed: of the reviews, apart from the experiment's.
        vectors: file of word vectors in GloVe's text layout, plain, `.gz`, or `.zip` of one
            `.txt`; without one, words get random vectors.
        dimension: components of random vectors.
        length: tokens after which a document is cut.
    """

    name: str = "planted_reviews"
    domain: Literal["beer", "hotel"] = "beer"
    reviews: PositiveInt = 500
    test_reviews: PositiveInt = 100
    fillers: float = Field(5.0, ge=0)
    agreement: float = Field(0.7, ge=0, le=1)
    spurious: float = Field(0.0, ge=0, le=1)
    seed: int = Field(0, ge=0)

    def load(self) -> Dataset:
        """x is int32 (aspects·reviews, L) token ids; class 0 is negative, class 1 positive."""
        rng = numpy_stream(self.seed, "planted reviews")
        labels, texts, marked, about = [], [], [], []
        counts = (self.reviews, self.test_reviews)
        for part, count in enumerate(counts):
            for name in DOMAINS[self.domain]:
                for k in range(count):
                    words, marks = self._review(name, k % 2 == 1, part == 1, rng)
                    labels.append(CLASSES[k % 2])
                    texts.append(" ".join(words))
                    marked.append(marks)
                    about.append(name)
        train = np.arange(len(DOMAINS[self.domain]) * self.reviews)
        test = np.arange(len(train), len(texts))
        found = self._dataset(Documents(labels, texts), CLASSES, train, test, self.name)
        gold = np.zeros(found.test_x.shape, dtype=np.bool_)
        for k, i in enumerate(test):
            own = marked[i][: found.shape[0]]
            gold[k, : len(own)] = own
        names = np.array(about)
        return replace(
            found,
            columns={"aspect": names[train]},
            test_columns={"aspect": names[test]},
            marks=gold,
        )

    def _vectors(self, words: Sequence[str]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        if self.vectors is None:  # which is no loss: these words mean what they are used for here
            return random_vectors(words, self.dimension)
        return super()._vectors(words)

    def _review(
        self, about: str, positive: bool, tested: bool, rng: np.random.Generator
    ) -> tuple[list[str], list[bool]]:
        """The words of a review, and which of them its label is about."""
        aspects = DOMAINS[self.domain]
        agreement = 0.5 if tested else self.agreement
        words: list[str] = []
        marks: list[bool] = []
        for i in rng.permutation(len(aspects)):
            name = list(aspects)[i]
            good = positive
            if name != about and rng.random() >= agreement:
                good = not positive
            phrase = _phrase(aspects[name], good, rng)
            fillers = rng.choice(FILLERS, int(rng.poisson(self.fillers))).tolist()
            place = int(rng.integers(len(fillers) + 1))
            words += [*fillers[:place], *phrase, *fillers[place:]]
            marks += [False] * place + [name == about] * len(phrase)
            marks += [False] * (len(fillers) - place)
        share = 0.5 if tested or not positive else self.spurious or 0.5
        if self.spurious and rng.random() < share:
            place = int(rng.integers(len(words) + 1))
            words.insert(place, SPURIOUS)
            marks.insert(place, False)
        return words, marks


def _phrase(aspect: Aspect, good: bool, rng: np.random.Generator) -> list[str]:
    said = str(rng.choice(aspect.positive if good else aspect.negative))
    adverb = [str(rng.choice(ADVERBS))] if rng.random() < 0.5 else []
    return [*adverb, said, str(rng.choice(aspect.nouns))]
