"""The data sets by name: standard data sets from their official files, and your own files."""

from __future__ import annotations

import importlib
import math
import os
import string
import warnings
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
from cachetools import cached
from numpy.typing import NDArray
from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from fedsim.config.registry import nearest
from fedsim.data.dataset import UNSCALED, Dataset, Scaling, Source, check_memory, datasets
from fedsim.data.sources import files
from fedsim.data.stored import (
    AnyArray,
    ImageFiles,
    MappedArray,
    StoredArray,
    latest,
    select,
)
from fedsim.errors import DataError, FedsimWarning
from fedsim.support.extras import require
from fedsim.support.rng import keyed_rng
from fedsim.support.words import in_short

if TYPE_CHECKING:
    import pandas as pd


def word_list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DIGITS = tuple(string.digits)
UPPER = tuple(string.ascii_uppercase)
CHARACTERS = (*DIGITS, *UPPER, *string.ascii_lowercase)
# The lower-case letters that EMNIST does not merge with their capitals.
MERGED = (*DIGITS, *UPPER, *"abdefghnqrt")

FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
CIFAR10 = word_list("airplane automobile bird cat deer dog frog horse ship truck")
CIFAR100 = word_list(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse
    mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
    porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
    snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
    tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """
)
CIFAR100_COARSE = word_list(
    """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things
    large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals
    non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2
    """
)

ORGANS = (
    *("bladder", "femur-left", "femur-right", "heart", "kidney-left", "kidney-right", "liver"),
    *("lung-left", "lung-right", "pancreas", "spleen"),
)
MEDMNIST = {
    "pathmnist": (
        *("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle"),
        *("normal colon mucosa", "cancer-associated stroma"),
        "colorectal adenocarcinoma epithelium",
    ),
    "dermamnist": (
        *("actinic keratoses and intraepithelial carcinoma", "basal cell carcinoma"),
        *("benign keratosis-like lesions", "dermatofibroma", "melanoma", "melanocytic nevi"),
        "vascular lesions",
    ),
    "octmnist": ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    "pneumoniamnist": ("normal", "pneumonia"),
    "retinamnist": DIGITS[:5],
    "breastmnist": ("malignant", "normal, benign"),
    "bloodmnist": (
        *("basophil", "eosinophil", "erythroblast", "immature granulocytes", "lymphocyte"),
        *("monocyte", "neutrophil", "platelet"),
    ),
    "tissuemnist": (
        *("collecting duct, connecting tubule", "distal convoluted tubule"),
        *("glomerular endothelial cells", "interstitial endothelial cells", "leukocytes"),
        *("podocytes", "proximal tubule segments", "thick ascending limb"),
    ),
    "organamnist": ORGANS,
    "organcmnist": ORGANS,
    "organsmnist": ORGANS,
}

OPENFL_COLLABORATORS, OPENFL_COLUMNS = 5, 15

WHICH_COLUMNS = " (data.features names the columns to use)"

Float = TypeVar("Float", np.float32, np.float64)
Scale = Literal["none", "minmax", "standard"]
TestFraction = Annotated[float, Field(gt=0, lt=1)]


def stratified_split(
    y: NDArray[np.int64], classes: Sequence[str], test_fraction: float, what: str
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """A stratified split into training rows and test rows.

    The split does not depend on the experiment's seed, so all runs have the same test set.

    Args:
        y: (N,) class indices.
        classes: the names of the classes.
        test_fraction: share of the rows for testing, between 0 and 1.
        what: the name of the data, for messages.

    Returns:
        The two sets of row indices, each in ascending order.

    Raises:
        DataError: a class has fewer than 2 examples, or a part has fewer examples than classes.
    """
    present, counts = np.unique(y, return_counts=True)
    if counts.min() < 2:
        raise DataError(
            f"{what}: class '{classes[present[counts.argmin()]]}' has 1 example; splitting off a "
            "test set needs at least 2 per class"
        )
    examples = f"{len(y)} examples of {len(present)} classes"
    return _split(len(y), test_fraction, f"{what}: {examples}", y)


def _split_dataset(
    x: AnyArray,
    y: NDArray[np.int64],
    classes: tuple[str, ...],
    test_fraction: float,
    what: str,
    columns: Mapping[str, NDArray[np.generic]] | None = None,
) -> Dataset:
    train, test = stratified_split(y, classes, test_fraction, what)
    kept = {name: values[train] for name, values in (columns or {}).items()}
    return Dataset(select(x, train), y[train], select(x, test), y[test], classes, columns=kept)


def random_split(
    count: int, test_fraction: float, what: str
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """A random split of `count` rows into training rows and test rows.

    Like `stratified_split`, it does not depend on the experiment's seed.

    Raises:
        DataError: no row is left to train on.
    """
    return _split(count, test_fraction, f"{what}: {count} examples", None)


def _split(
    count: int, test_fraction: float, what: str, strata: NDArray[np.int64] | None
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    from sklearn.model_selection import train_test_split

    try:
        train, test = train_test_split(
            np.arange(count), test_size=test_fraction, stratify=strata, random_state=0
        )
    except ValueError as error:
        raise DataError(
            f"{what} cannot be split with test_fraction={test_fraction}: {error}"
        ) from error
    return np.sort(train), np.sort(test)


def _split_numbers(
    table: files.Numbers,
    test_fraction: float,
    scale: Scale,
    what: str,
    columns: Mapping[str, NDArray[np.generic]] | None = None,
) -> Dataset:
    """A regression data set with a random test set."""
    train, test = random_split(len(table.y), test_fraction, what)
    kept = {name: values[train] for name, values in (columns or {}).items()}
    return _regression(
        table._replace(x=select(table.x, train), y=table.y[train]),
        table._replace(x=select(table.x, test), y=table.y[test]),
        scale,
        kept,
    )


def _regression(
    train: files.Numbers,
    test: files.Numbers,
    scale: Scale,
    columns: Mapping[str, NDArray[np.generic]],
) -> Dataset:
    x, y = _scaling(train.x, scale), _scaling(train.y, scale)
    return Dataset(
        x=x(train.x),
        y=y(train.y),
        test_x=x(test.x),
        test_y=y(test.y),
        classes=(),
        columns=dict(columns),
        features=train.features,
        target=train.target,
        scaling=x,
        target_scaling=y,
    )


def _scaling(train: Any, scale: Scale) -> Scaling:
    return UNSCALED if scale == "none" else getattr(Scaling, scale)(train)


@datasets.register
class Digits(Source):
    """Handwritten digits, 8×8 grey pixels, 1,797 in all; included in scikit-learn, needs no file.

    Args:
        test_fraction: share of the examples in the test set.
    """

    name: str = "digits"
    test_fraction: TestFraction = 0.2

    def load(self) -> Dataset:
        """x is float32 (N, 1, 8, 8) in [0, 1]: the embedded values 0 to 16, divided by 16."""
        from sklearn.datasets import load_digits

        digits = load_digits()
        scaling = Scaling(span=16.0)
        x = scaling(digits.images[:, np.newaxis]).astype(np.float32)
        y = digits.target.astype(np.int64)
        data = _split_dataset(x, y, DIGITS, self.test_fraction, self.name)
        return replace(data, scaling=scaling)


@datasets.register
class Synthetic(Source):
    """Gaussian clusters, one per class, generated at load time in any size; needs no file.

    An example of class c is m_c + noise·ε, with the centre m_c and ε drawn from the standard
    normal distribution in each dimension. Classes are balanced to within one example.

    Args:
        samples: number of training examples.
        test_samples: number of test examples.
        shape: shape of one example.
        classes: number of classes.
        noise: standard deviation within a class; that of the centres is 1.
        seed: seed of the generated data, independent of the experiment's seed.
    """

    name: str = "synthetic"
    samples: PositiveInt = 1000
    test_samples: PositiveInt = 200
    shape: Annotated[tuple[PositiveInt, ...], Field(min_length=1)] = (16,)
    classes: int = Field(10, ge=2)
    noise: NonNegativeFloat = 1.0
    seed: int = 0

    def load(self) -> Dataset:
        """x is float32 (samples, *shape)."""
        examples = self.samples + self.test_samples
        # Two arrays of each example's shape at once, and its label.
        check_memory(self, (examples + self.classes) * (8 * math.prod(self.shape) + 16))
        centres = keyed_rng(self.seed, "synthetic centres").standard_normal(
            (self.classes, *self.shape), dtype=np.float32
        )
        x, y = self._draw(centres, self.samples, "synthetic train")
        test_x, test_y = self._draw(centres, self.test_samples, "synthetic test")
        return Dataset(x, y, test_x, test_y, tuple(str(c) for c in range(self.classes)))

    def _draw(
        self, centres: NDArray[np.float32], count: int, purpose: str
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        stream = keyed_rng(self.seed, purpose)
        y = stream.permutation(np.arange(count) % self.classes)
        x = stream.standard_normal((count, *self.shape), dtype=np.float32)
        x *= self.noise
        x += centres[y]
        return x, y


@datasets.register
class Friedman(Source):
    """Friedman's first regression problem, generated at load time in any size; needs no file.

    Inputs are uniform in [0, 1]; y = 10·sin(π·x1·x2) + 20·(x3 - 0.5)² + 10·x4 + 5·x5 + noise·ε,
    with ε standard normal; further inputs have no effect (Friedman, Multivariate Adaptive
    Regression Splines, Annals of Statistics 1991). The target is divided by 30, so that without
    noise it lies in [0, 1].

    Args:
        samples: number of training examples.
        test_samples: number of test examples.
        features: number of inputs, at least five.
        noise: standard deviation of the noise, on the scale of the formula.
        seed: seed of the generated data, independent of the experiment's seed.
    """

    name: str = "friedman"
    samples: PositiveInt = 1000
    test_samples: PositiveInt = 200
    features: int = Field(10, ge=5)
    noise: NonNegativeFloat = 1.0
    seed: int = 0

    def load(self) -> Dataset:
        """x is float64 (samples, features), y float64 (samples,)."""
        check_memory(self, (self.samples + self.test_samples) * (8 * self.features + 24))
        x, y = self._draw(self.samples, "friedman train")
        test_x, test_y = self._draw(self.test_samples, "friedman test")
        return Dataset(x, y, test_x, test_y, classes=())

    def _draw(self, count: int, purpose: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        stream = keyed_rng(self.seed, purpose)
        x = stream.random((count, self.features))
        y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
        y += 10 * x[:, 3] + 5 * x[:, 4] + self.noise * stream.standard_normal(count)
        return x, y / 30


class _Files(Source):
    """A data set in official files below a data root."""

    data_set: ClassVar[str]
    root: Path | None = None


class _Fetched(_Files):
    """A data set whose official files torchvision can download."""

    download: bool = False

    def load(self) -> Dataset:
        """The whole data set; x is uint8 (N, channels, height, width)."""
        try:
            return self._read()
        except files.MissingFileError:
            if not self.download:
                raise
        self._fetch()
        return self._read()

    def _read(self) -> Dataset:
        raise NotImplementedError

    def _fetch(self, **arguments: str) -> None:
        require("torchvision", f"data.download: fetching {self.data_set}")
        folder = files.data_root(self.root)
        fetch = getattr(
            importlib.import_module("torchvision.datasets"),
            files.LAYOUTS[self.data_set].torchvision,
        )
        try:
            fetch(root=folder, download=True, **arguments)
        except Exception as error:  # any error of the network, the server or the disk
            raise DataError(
                f"{self.data_set}: the download into {folder} failed: {error}"
            ) from error


class _Idx(_Fetched):
    """A data set of 28×28 pixel images in grey, in four IDX files."""

    def _load_idx(
        self,
        stems: tuple[str, str],
        classes: tuple[str, ...],
        mean: tuple[float, ...] = (),
        std: tuple[float, ...] = (),
        first: int = 0,
    ) -> Dataset:
        names = [f"{stem}-{kind}" for stem in stems for kind in ("images-idx3", "labels-idx1")]
        anchor = files.find([f"{names[0]}-ubyte"], self.data_set, self.root)
        paths = [files.beside(anchor, f"{name}-ubyte", self.data_set) for name in names]
        x, y = files.read_idx_images(paths[0], paths[1], len(classes), first)
        test_x, test_y = files.read_idx_images(paths[2], paths[3], len(classes), first)
        return Dataset(x, y, test_x, test_y, classes, mean, std)


@datasets.register
class Mnist(_Idx):
    """MNIST: handwritten digits, 28×28 grey pixels, 60,000 + 10,000, 10 classes.

    Args:
        root: folder that contains the files, or the sub-folder `mnist` or `MNIST/raw`; by default
            $FEDSIM_DATA.
        download: download missing files.
    """

    name: str = "mnist"
    data_set: ClassVar[str] = "mnist"

    def _read(self) -> Dataset:
        return self._load_idx(("train", "t10k"), DIGITS, (0.1307,), (0.3081,))


@datasets.register
class FashionMnist(_Idx):
    """Fashion-MNIST: articles of clothing, 28×28 grey pixels, 60,000 + 10,000, 10 classes.

    Args:
        root: folder that contains the files, or the sub-folder `fashion_mnist` or
            `FashionMNIST/raw`; by default $FEDSIM_DATA.
        download: download missing files.
    """

    name: str = "fashion_mnist"
    data_set: ClassVar[str] = "fashion_mnist"

    def _read(self) -> Dataset:
        return self._load_idx(("train", "t10k"), FASHION, (0.2860,), (0.3530,))


@datasets.register
class Emnist(_Idx):
    """EMNIST: handwritten digits and letters, 28×28 grey pixels, in six splits.

    Args:
        root: folder that contains the files, or the sub-folder `emnist`, `gzip` or `EMNIST/raw`;
            by default $FEDSIM_DATA.
        download: download missing files.
        split: `byclass` (62 classes), `bymerge` and `balanced` (47: capitals that look like their
            lower-case letter are merged with it), `letters` (26), `digits` or `mnist` (10).
    """

    name: str = "emnist"
    data_set: ClassVar[str] = "emnist"
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "balanced"

    def _fetch(self, **arguments: str) -> None:
        super()._fetch(split=self.split, **arguments)

    def _read(self) -> Dataset:
        classes = {
            "byclass": CHARACTERS,
            "bymerge": MERGED,
            "balanced": MERGED,
            "letters": UPPER,
        }.get(self.split, DIGITS)
        stems = (f"emnist-{self.split}-train", f"emnist-{self.split}-test")
        first = 1 if self.split == "letters" else 0
        loaded = self._load_idx(stems, classes, first=first)
        return Dataset(
            _upright(np.asarray(loaded.x)),
            loaded.y,
            _upright(np.asarray(loaded.test_x)),
            loaded.test_y,
            classes,
        )


def _upright(x: NDArray[np.generic]) -> NDArray[np.generic]:
    """Images with rows and columns swapped: EMNIST stores them column by column."""
    return np.ascontiguousarray(x.swapaxes(2, 3))


@datasets.register
class Cifar10(_Fetched):
    """CIFAR-10: photographs, 32×32 colour pixels, 50,000 + 10,000, 10 classes.

    Reads the Python version, the binary version, or a subset in either format: fewer than five
    batches are accepted while none has the official 10,000 records.

    Args:
        root: folder that contains the files, or the sub-folder `cifar10`, `cifar-10-batches-py` or
            `cifar-10-batches-bin`; by default $FEDSIM_DATA.
        download: download missing files.
    """

    name: str = "cifar10"
    data_set: ClassVar[str] = "cifar10"

    def _read(self) -> Dataset:
        stems = [f"data_batch_{i}" for i in range(1, 6)]
        candidates = ("data_batch_[1-5]", "data_batch_[1-5].bin")
        first = files.find(candidates, self.data_set, self.root)
        suffix = _version(first)
        test = files.beside(first, f"test_batch{suffix}", self.data_set)
        labels = {"labels": len(CIFAR10)}
        found = {stem: files.match(first.parent, f"{stem}{suffix}") for stem in stems}
        batches = [files.read_cifar(path, labels) for path in found.values() if path is not None]
        missing = [f"{stem}{suffix}" for stem, path in found.items() if path is None]
        if missing and max(len(x) for x, _ in batches) >= 10_000:
            raise files.missing_beside(first, missing, self.data_set)
        test_x, test_y = files.read_cifar(test, labels)
        return Dataset(
            x=np.concatenate([x for x, _ in batches]),
            y=np.concatenate([y["labels"] for _, y in batches]),
            test_x=test_x,
            test_y=test_y["labels"],
            classes=CIFAR10,
            mean=(0.4914, 0.4822, 0.4465),
            std=(0.2470, 0.2435, 0.2616),
        )


@datasets.register
class Cifar100(_Fetched):
    """CIFAR-100: photographs, 32×32 colour pixels, 50,000 + 10,000, 100 or 20 classes.

    Reads the Python or the binary version. The label that is not used for training is available to
    partitions as the column `fine` or `coarse`.

    Args:
        root: folder that contains the files, or the sub-folder `cifar100`, `cifar-100-python` or
            `cifar-100-binary`; by default $FEDSIM_DATA.
        download: download missing files.
        labels: `fine` (100 classes) or `coarse` (20 superclasses).
    """

    name: str = "cifar100"
    data_set: ClassVar[str] = "cifar100"
    labels: Literal["fine", "coarse"] = "fine"

    def _read(self) -> Dataset:
        train = files.find(["train", "train.bin"], self.data_set, self.root)
        test = files.beside(train, f"test{_version(train)}", self.data_set)
        names = {"coarse_labels": len(CIFAR100_COARSE), "fine_labels": len(CIFAR100)}
        x, y = files.read_cifar(train, names)
        test_x, test_y = files.read_cifar(test, names)
        fine = self.labels == "fine"
        other = "coarse" if fine else "fine"
        return Dataset(
            x=x,
            y=y[f"{self.labels}_labels"],
            test_x=test_x,
            test_y=test_y[f"{self.labels}_labels"],
            classes=CIFAR100 if fine else CIFAR100_COARSE,
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            columns={other: y[f"{other}_labels"]},
        )


def _version(path: Path) -> str:
    """The ending of file names of CIFAR's binary version."""
    return ".bin" if ".bin" in path.suffixes else ""


@datasets.register
class Femnist(_Files):
    """FEMNIST: handwritten characters by writer, 28×28 grey pixels, 62 classes (LEAF).

    The writer of each example is the column `writer`.

    Args:
        root: folder that contains LEAF's `train` and `test` folders of json files, or the
            sub-folder `femnist` or `femnist/data`; by default $FEDSIM_DATA.
    """

    name: str = "femnist"
    data_set: ClassVar[str] = "femnist"

    def load(self) -> Dataset:
        """x is float32 (N, 1, 28, 28) in [0, 1], as LEAF wrote it."""
        folder = files.find(["train/*.json"], self.data_set, self.root).parent.parent
        x, y, writers = self._read(folder / "train")
        test_x, test_y, _ = self._read(folder / "test")
        return Dataset(x, y, test_x, test_y, CHARACTERS, columns={"writer": writers})

    def _read(
        self, folder: Path
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.str_]]:
        paths = files.match_all(folder, "*.json")
        if not paths:
            raise files.MissingFileError(f"{self.data_set}: no JSON file in {folder}")
        parts = [files.read_leaf(path, 28 * 28, len(CHARACTERS)) for path in paths]
        x = np.concatenate([x for x, _, _ in parts]).reshape(-1, 1, 28, 28)
        if len(x) == 0:
            raise DataError(f"{folder}: its JSON files contain no examples")
        y = np.concatenate([y for _, y, _ in parts])
        return x, y, np.concatenate([writers for _, _, writers in parts])


def _medmnist_set(name: str) -> str:
    if name not in MEDMNIST:
        problem = "is no set of MedMNIST with 2D images" + nearest(name, MEDMNIST)
        if name == "chestmnist":
            problem = "chestmnist has several labels for each image; fedsim takes one"
        raise PydanticCustomError("medmnist", "{problem}", {"problem": problem})
    return name


@datasets.register
class MedMnist(_Files):
    """MedMNIST: medical images in 11 sets, 28×28 grey or colour pixels, 2 to 11 classes.

    The official training and test parts are used; the validation part is not. Files of larger
    images (`pathmnist_64.npz`) are read if they are renamed to that of their set. The grades of
    `retinamnist` are classes.

    Args:
        root: folder that contains `<set>.npz`, or the sub-folder `medmnist`; by default
            $FEDSIM_DATA.
        set: `pathmnist`, `dermamnist`, `octmnist`, `pneumoniamnist`, `retinamnist`, `breastmnist`,
            `bloodmnist`, `tissuemnist`, `organamnist`, `organcmnist` or `organsmnist`.
    """

    name: str = "medmnist"
    data_set: ClassVar[str] = "medmnist"
    set: Annotated[str, AfterValidator(_medmnist_set)]

    def load(self) -> Dataset:
        """x is uint8 (N, 1 or 3, 28, 28)."""
        path = files.find([f"{self.set}.npz"], self.data_set, self.root)
        classes = MEDMNIST[self.set]
        x, y = files.read_medmnist(path, "train", len(classes))
        test_x, test_y = files.read_medmnist(path, "test", len(classes))
        half = (0.5,) * x.shape[1]
        return Dataset(x, y, test_x, test_y, classes, mean=half, std=half)


@datasets.register
class Mortgage(_Files):
    """Mortgage: the weekly 30-year mortgage rate from 15 figures of the US economy (KEEL).

    1,049 rows. Each input and the target are always scaled to [0, 1] by the minimum and maximum of
    the training rows. In the file that KEEL published, the column names seem shifted relative to
    their values (its `1Y-CMaturityRate` lies between 77 and 143); they are kept as they are.

    Args:
        root: folder that contains `mortgage.dat`, or the sub-folder `mortgage`; by default
            $FEDSIM_DATA.
        test_fraction: share of the rows in the test set.
    """

    name: str = "mortgage"
    data_set: ClassVar[str] = "mortgage"
    test_fraction: TestFraction = 0.2

    def load(self) -> Dataset:
        """x is float64 (N, 15), y float64 (N,)."""
        path = files.find(["mortgage.dat"], self.data_set, self.root)
        return _split_numbers(files.read_keel(path), self.test_fraction, "minmax", str(path))


@datasets.register
class OpenflXai(_Files):
    """The regression data of OpenFL-XAI: 11,619 + 2,417 rows of 15 inputs, 5 collaborators.

    The collaborator of each training row is in the column `collaborator`, col0 to col4; the test
    set is common to all of them. Inputs and target lie in [0, 1] as published, and are anonymous:
    the documentation of OpenFL-XAI calls the data Mortgage and names its columns, but neither the
    number of rows nor any correlation with the target fits; for Mortgage, see `mortgage`.

    Args:
        root: folder that contains col0 to col4, or the sub-folder `openfl_xai/data`; by default
            $FEDSIM_DATA.
    """

    name: str = "openfl_xai"
    data_set: ClassVar[str] = "openfl_xai"

    def load(self) -> Dataset:
        """x is float64 (N, 15), y float64 (N,), in the order of the collaborators."""
        first = files.find(["col0/X_train.npy"], self.data_set, self.root)
        top = first.parent.parent
        names = [f"col{k}" for k in range(OPENFL_COLLABORATORS)]
        train = [self._read(top, name, "train") for name in names]
        test = [self._read(top, name, "test") for name in names]
        return Dataset(
            x=np.concatenate([x for x, _ in train]),
            y=np.concatenate([y for _, y in train]),
            test_x=np.concatenate([x for x, _ in test]),
            test_y=np.concatenate([y for _, y in test]),
            classes=(),
            columns={"collaborator": np.repeat(names, [len(y) for _, y in train])},
        )

    def _read(
        self, top: Path, collaborator: str, part: str
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        x_path, y_path = (
            files.beside(top / "col0", f"{collaborator}/{array}_{part}.npy", self.data_set)
            for array in ("X", "y")
        )
        x = files.read_npy(x_path, OPENFL_COLUMNS)
        y = files.read_npy(y_path)
        if len(y) != len(x):
            raise DataError(f"{y_path}: {len(y)} targets for the {len(x)} rows of {x_path.name}")
        return x, y


@datasets.register
class Keel(Source):
    """Your own regression data in a file of KEEL's format, `.dat`.

    Args:
        path: the file. Attributes are real or integer; `@outputs` names the target (by default the
            last attribute), `@inputs` the inputs (by default all others).
        test_fraction: share of the rows in the test set.
        scale: `none`; or each input and the target scaled by the training rows, in the same way
            for all clients: `minmax` to [0, 1], outside of which test rows may fall, `standard` to
            mean 0 and standard deviation 1. Constant columns become 0.
    """

    name: str = "keel"
    path: Path
    test_fraction: TestFraction = 0.2
    scale: Scale = "none"

    def load(self) -> Dataset:
        """x is float64 (N, inputs), y float64 (N,)."""
        path = self.path.expanduser()
        return _split_numbers(files.read_keel(path), self.test_fraction, self.scale, str(path))


@datasets.register
class Folder(Source):
    """Your own images in folders, one folder per class, laid out as for torchvision's ImageFolder.

    If there are both `test/` and `val/`, `val/` is not used.

    Args:
        path: folder with `train/<class>/` and `test/<class>/` or `val/<class>/`, or only with
            `<class>/`.
        size: height and width in pixels to which images are resized.
        channels: 3 for colour, 1 for grey.
        test_fraction: share of the examples in the test set if it has no folder.
        in_place: decode images whenever they are needed, for images that do not fit into memory.
    """

    name: str = "folder"
    path: Path
    size: PositiveInt = 32
    channels: Literal[1, 3] = 3
    test_fraction: TestFraction = 0.2
    in_place: bool = False

    def load(self) -> Dataset:
        """x is uint8 (N, channels, size, size); classes are in order of their names."""
        top = self.path.expanduser()
        train = top / "train" if (top / "train").is_dir() else top
        tests = [top / name for name in ("test", "val") if (top / name).is_dir()]
        if train == top and tests:
            raise DataError(f"{top}: has {tests[0].name}/ but no train/")
        classes = _class_folders(train)
        x, y = self._read(train, classes, of_each=True)
        if not tests:
            return _split_dataset(x, y, classes, self.test_fraction, str(train))
        for name in _class_folders(tests[0]):
            if name not in classes:
                raise DataError(
                    f"{tests[0] / name}: not a class of {train}{nearest(name, classes)}"
                )
        test_x, test_y = self._read(tests[0], classes, of_each=False)
        if len(test_x) == 0:
            raise DataError(f"{tests[0]}: contains no images")
        return Dataset(x, y, test_x, test_y, classes)

    def _read(
        self, folder: Path, classes: Sequence[str], of_each: bool
    ) -> tuple[AnyArray, NDArray[np.int64]]:
        images: list[list[Path]] = []
        # Pictures beside the classes are of none; other files there may be notes or labels.
        left = [path for path in _files(folder, below=False) if _is_picture(path)]
        for name in classes:
            within = _files(folder / name)
            images.append([path for path in within if _is_picture(path)])
            left += [path for path in within if not _is_picture(path)]
            if of_each and not images[-1]:
                raise DataError(f"{folder / name}: contains no images")
        if left:
            warnings.warn(
                f"{folder}: {len(left)} file{'s' * (len(left) > 1)} left out, such as "
                f"{left[0].relative_to(folder)}: pictures are {', '.join(files.PICTURES)} files "
                "in a folder of their class",
                FedsimWarning,
                stacklevel=2,
            )
        y = np.repeat(np.arange(len(classes)), [len(found) for found in images])
        paths = [path for found in images for path in found]
        shape = (self.channels, self.size, self.size)
        if self.in_place:
            return ImageFiles(paths, shape), y
        x = np.empty((len(paths), *shape), np.uint8)
        for row, path in zip(x, paths, strict=True):
            row[:] = files.read_image(path, shape)
        return x, y


def _files(folder: Path, below: bool = True) -> list[Path]:
    """The user's own files in a folder and, unless told otherwise, its sub-folders, in order.

    Links to folders are not followed, because they may form cycles.
    """
    found = []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if below and files.is_visible(name)]
        found.append((place, sorted(filter(files.is_visible, names))))
    return [Path(place, name) for place, names in sorted(found) for name in names]


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in files.PICTURES


def _class_folders(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(f"{folder}: is not a folder")
    with files.reading(folder):
        folders = [path.name for path in folder.iterdir() if path.is_dir()]
    names = tuple(sorted(filter(files.is_visible, folders)))
    if not names:
        raise DataError(f"{folder}: has no class folders")
    return names


@datasets.register
class Npz(Source):
    """Your own arrays in a NumPy `.npz` file, or in a folder of `.npy` files.

    Args:
        path: file with `x` (N, ...) and `y` (N,), or `x_train`, `y_train`, `x_test`, `y_test`;
            further arrays (N,) are columns of the training examples. Inputs are uint8 (images,
            which are divided by 255) or numbers that are read as float32. Or a folder with a
            file for each of these arrays (`x.npy`, `y.npy`).
        test_fraction: share of the examples in the test set if the file has none.
        in_place: memory-map the file, which must not be compressed, and read rows whenever they
            are needed, for inputs that do not fit into memory.
    """

    name: str = "npz"
    path: Path
    test_fraction: TestFraction = 0.2
    in_place: bool = False

    def load(self) -> Dataset:
        """x as in the file, uint8 or else float32; the classes are the labels that occur."""
        path = self.path.expanduser()
        with files.reading(path):
            arrays = _load_arrays(path, {"x", "x_train", "x_test"} if self.in_place else set())
        return of_arrays(str(path), arrays, self.test_fraction)


def of_arrays(where: str, arrays: Mapping[str, AnyArray], test_fraction: float) -> Dataset:
    """A data set from arrays as `Npz` names them.

    Args:
        where: their source, for messages.

    Raises:
        DataError: they do not fit together.
    """
    split = "x" in arrays or "y" in arrays
    x_key, y_key = ("x", "y") if split else ("x_train", "y_train")
    x = _inputs(where, arrays, x_key)
    y = _class_indices(where, arrays, y_key, x_key)
    used = {x_key, y_key} if split else {x_key, y_key, "x_test", "y_test"}
    columns = {
        key: _npz_column(where, key, np.asarray(values), len(x), x_key)
        for key, values in arrays.items()
        if key not in used
    }
    if split:
        classes, y = named_by_label(y)
        return _split_dataset(x, y, classes, test_fraction, where, columns)
    test_x = _inputs(where, arrays, "x_test")
    test_y = _class_indices(where, arrays, "y_test", "x_test")
    if test_x.shape[1:] != x.shape[1:] or test_x.dtype != x.dtype:
        raise DataError(
            f"{where}: 'x_test' has {test_x.dtype} inputs of shape {test_x.shape[1:]}, "
            f"'x_train' {x.dtype} of {x.shape[1:]}"
        )
    classes, both = named_by_label(np.concatenate([y, test_y]))
    return Dataset(x, both[: len(y)], test_x, both[len(y) :], classes, columns=columns)


def _load_arrays(path: Path, in_place: Set[str]) -> dict[str, AnyArray]:
    """The arrays of an archive or folder by name; those of `in_place` stay in their files."""
    if path.is_dir():
        found = {file.stem: file for file in files.match_all(path, "*.npy")}
        return {
            key: MappedArray(file) if key in in_place else np.load(file, allow_pickle=False)
            for key, file in found.items()
        }
    archive = np.load(path, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{path}: is not an .npz archive of named arrays")
    with archive:
        return {
            key: MappedArray(path, key) if key in in_place else archive[key]
            for key in archive.files
        }


def _array(where: str, arrays: Mapping[str, AnyArray], key: str) -> AnyArray:
    if key not in arrays:
        raise DataError(f"{where}: has no array '{key}'{nearest(key, arrays)}")
    return arrays[key]


def _inputs(where: str, arrays: Mapping[str, AnyArray], key: str) -> AnyArray:
    x = _array(where, arrays, key)
    if isinstance(x, StoredArray):
        return x
    if x.size == 0:
        raise DataError(f"{where}: '{key}', of shape {x.shape}, is empty")
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise DataError(
            f"{where}: '{key}' is {x.dtype} of shape {x.shape}, expected numbers of shape (N, ...)"
        )
    if x.dtype == np.uint8:
        return x
    return _finite(x, f"{where}: '{key}'")


def _finite(x: NDArray[Any], what: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # overflow is refused below
        values = x.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(axis=1))
    if len(wrong):
        raise DataError(f"{what} is not finite in float32 in example {wrong[0]}")
    return values


def _class_indices(
    where: str, arrays: Mapping[str, AnyArray], key: str, x_key: str
) -> NDArray[np.int64]:
    y = np.asarray(_array(where, arrays, key))
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(
            f"{where}: '{key}' is {y.dtype} of shape {y.shape}, expected integers of shape (N,)"
        )
    count = len(arrays[x_key])
    if len(y) != count:
        raise DataError(f"{where}: '{key}' has {len(y)} labels for {count} inputs in '{x_key}'")
    indices = y.astype(np.int64)
    wrong = np.flatnonzero(indices < 0)
    if len(wrong):
        raise DataError(
            f"{where}: '{key}' has the negative label {indices[wrong[0]]} at {wrong[0]}"
        )
    return indices


def _npz_column(
    where: str, key: str, values: NDArray[Any], count: int, x_key: str
) -> NDArray[np.generic]:
    if values.shape != (count,):
        raise DataError(
            f"{where}: '{key}' has shape {values.shape}; a column has shape ({count},), "
            f"as '{x_key}' has {count} examples"
        )
    return values


@datasets.register
class Table(Source):
    """Your own table, CSV or Parquet, with numeric features and labels or numbers to predict.

    Args:
        path: `.csv` file with a header line, or `.parquet` file.
        label: the column of labels, of any type; the sorted labels are the classes.
        target: instead of `label`, the numeric column that a regression predicts.
        features: the columns of features; by default all other numeric columns.
        columns: columns to partition by; they are not features unless also listed in `features`.
        test_path: file of the test set, with the same columns.
        test_fraction: share of the rows in the test set if there is no test file.
        scale: `none`; or each feature, and a regression's target, scaled by the training rows, in
            the same way for all clients: `minmax` to [0, 1], outside of which test rows may fall,
            `standard` to mean 0 and standard deviation 1. Constant columns become 0.
        in_place: read row groups of the Parquet file whenever they are needed, for features that
            do not fit into memory. A row group is always decoded completely, so a client's rows
            should be stored together.
    """

    name: str = "table"
    path: Path
    label: str | None = None
    target: str | None = None
    features: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    columns: tuple[str, ...] = ()
    test_path: Path | None = None
    test_fraction: TestFraction = 0.2
    scale: Scale = "none"
    in_place: bool = False

    @model_validator(mode="after")
    def _can_be_left_in_place(self) -> Table:
        if self.in_place:
            if not {path.suffix for path in (self.path, self.test_path) if path} <= {".parquet"}:
                raise PydanticCustomError("in_place", "only .parquet files can be read in place")
            if self.scale != "none":
                raise PydanticCustomError(
                    "in_place", "features that are read in place cannot be scaled"
                )
        return self

    @model_validator(mode="after")
    def _predicts_one_thing(self) -> Table:
        if (self.label is None) == (self.target is None):
            given = "neither is" if self.label is None else "both are"
            problem = (
                "needs either a label (a column of classes) or a target (a column of numbers), "
                "and {given} given"
            )
            raise PydanticCustomError("label", problem, {"given": given})
        for what in ("label", "target"):
            name = getattr(self, what)
            if name in (self.features or ()):
                problem = "the {what} '{name}' cannot be a feature as well"
                raise PydanticCustomError("label", problem, {"what": what, "name": name})
        return self

    def load(self) -> Dataset:
        """x is as in the file: float32 (N, features), or float64 for a regression."""
        path = self.path.expanduser()
        frame = self._read(path)
        columns = {name: _column(path, frame, name) for name in self.columns}
        if self.target is not None:
            data = self._load_numbers(path, frame, self.target, columns)
        else:
            assert self.label is not None  # validated
            data = self._load_classes(path, frame, self.label, columns)
        names = map(str, (empty_table(path) if self.in_place else frame).columns)
        unread = [name for name in names if name not in (self.label, self.target, *self.columns)]
        note = ""
        if self.features is None:
            texts = [name for name in unread if name not in data.features]
            what = "which is" if len(texts) == 1 else "which are"
            unused = f" (not used: {in_short(texts)}, {what} text)" if texts else ""
            note = f"features: {in_short(data.features)}{unused}"
        return replace(data, unread_columns=tuple(unread), note=note)

    def _load_classes(
        self,
        path: Path,
        frame: pd.DataFrame,
        label: str,
        columns: dict[str, NDArray[np.generic]],
    ) -> Dataset:
        labels = _column(path, frame, label)
        features = self.features or self._numeric(path, frame, {label, *self.columns})
        x = self._features(path, frame, features, np.float32)
        if self.test_path is None:
            classes, y = named_by_label(labels)
            data = _split_dataset(x, y, classes, self.test_fraction, str(path), columns)
        else:
            test_path = self.test_path.expanduser()
            test = self._read(test_path)
            test_labels = _column(test_path, test, label)
            if labels.dtype.kind != test_labels.dtype.kind:
                raise DataError(
                    f"{test_path}: label column '{label}' is {test_labels.dtype}, "
                    f"but {labels.dtype} in {path}"
                )
            test_x = self._features(test_path, test, features, np.float32)
            classes, y = named_by_label(np.concatenate([labels, test_labels]))
            data = Dataset(x, y[: len(x)], test_x, y[len(x) :], classes, columns=columns)
        scaling = _scaling(data.x, self.scale)
        return replace(
            data,
            x=scaling(data.x),
            test_x=scaling(data.test_x),
            features=features,
            target=label,
            scaling=scaling,
        )

    def _load_numbers(
        self,
        path: Path,
        frame: pd.DataFrame,
        target: str,
        columns: dict[str, NDArray[np.generic]],
    ) -> Dataset:
        y = _numbers(path, frame, target, np.float64)
        features = self.features or self._numeric(path, frame, {target, *self.columns})
        x = self._features(path, frame, features, np.float64)
        train = files.Numbers(x, y, features, target)
        if self.test_path is None:
            return _split_numbers(train, self.test_fraction, self.scale, str(path), columns)
        test_path = self.test_path.expanduser()
        frame = self._read(test_path)
        test = train._replace(
            x=self._features(test_path, frame, features, np.float64),
            y=_numbers(test_path, frame, target, np.float64),
        )
        return _regression(train, test, self.scale, columns)

    def _read(self, path: Path) -> pd.DataFrame:
        """The table, without its features if they stay in the file."""
        if not self.in_place:
            return read_table(path)
        return read_table(
            path, {name for name in (self.label, self.target) if name} | {*self.columns}
        )

    def _numeric(self, path: Path, frame: pd.DataFrame, others: set[str]) -> tuple[str, ...]:
        if not self.in_place:
            return _numeric(path, dict(frame.items()), others)
        # Numeric columns stay in the file; others may be numbers stored as text.
        columns = dict(empty_table(path).items())
        texts = {name for name, values in columns.items() if values.dtype.kind == "O"} - others
        for name in texts:
            columns[name] = read_table(path, {str(name)})[name]
        return _numeric(path, columns, others)

    def _features(
        self, path: Path, frame: pd.DataFrame, names: Sequence[str], dtype: type[Any]
    ) -> AnyArray:
        if self.in_place:
            return ParquetRows(path, names, dtype)
        return table_features(path, frame, names, dtype, WHICH_COLUMNS)


class ParquetRows(StoredArray):
    """Rows of numbers of a Parquet file, (N, features).

    Args:
        names: names of the columns.
        dtype: float32 or float64.

    Raises:
        DataError: a column is missing or not numeric. Values are checked when they are read.
    """

    def __init__(self, path: Path, names: Sequence[str], dtype: type[Any]) -> None:
        import pandas as pd
        import pyarrow.parquet as pq

        self.path, self.names = path.absolute(), tuple(names)
        _row_group.cache_clear()  # the file may have changed since an earlier run
        empty = empty_table(path)
        for name in names:
            if not pd.api.types.is_numeric_dtype(_present(path, empty, name)):
                raise _not_a_number(path, read_table(path, {name})[name], WHICH_COLUMNS)
        with files.reading(path):
            found = pq.read_metadata(path)
        rows = [found.row_group(i).num_rows for i in range(found.num_row_groups)]
        self.ends = np.cumsum(rows)
        super().__init__((int(self.ends[-1]), len(names)), dtype)

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        x = np.empty((len(rows), len(self.names)), self.dtype)
        groups = np.searchsorted(self.ends, rows, side="right")
        for group in np.unique(groups):
            where = groups == group
            start = self.ends[group - 1] if group else 0
            found = _row_group(self.path, int(group), self.names, self.dtype)
            x[where] = found[rows[where] - start]
        return x


@cached(latest())
def _row_group(
    path: Path, group: int, names: tuple[str, ...], dtype: np.dtype[Any]
) -> NDArray[Any]:
    import pyarrow.parquet as pq

    with files.reading(path), pq.ParquetFile(path) as file:
        frame = file.read_row_group(group, columns=list(names)).to_pandas()
    where = Path(f"{path} (row group {group})")
    return table_features(where, frame, names, dtype, WHICH_COLUMNS)


def empty_table(path: Path) -> pd.DataFrame:
    """The columns of a Parquet file, without rows.

    Raises:
        DataError: it cannot be read.
    """
    import pyarrow.parquet as pq

    with files.reading(path):
        frame: pd.DataFrame = pq.read_schema(path).empty_table().to_pandas()
    return frame


def read_table(path: Path, columns: Set[str] | None = None) -> pd.DataFrame:
    """A table, CSV with a header line or Parquet.

    Args:
        columns: the columns of a Parquet file to read; by default all.

    Raises:
        DataError: it is neither CSV nor Parquet, cannot be read, or has no rows.
    """
    import pandas as pd

    if path.suffix not in (".csv", ".parquet"):
        raise DataError(f"{path}: is neither .csv nor .parquet")
    with files.reading(path), warnings.catch_warnings():
        # If rows are longer than the header, pandas drops the excess with a warning.
        warnings.simplefilter("error", pd.errors.ParserWarning)
        if path.suffix == ".csv":
            header = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0]
            if (twice := header[header.duplicated()]).size:
                raise DataError(f"{path}: has two columns '{twice.iloc[0]}'")
            # Only blank cells are missing: "NA" can be a label.
            frame = pd.read_csv(
                path, index_col=False, keep_default_na=False, na_values=[""], low_memory=False
            )
        else:
            known = empty_table(path) if columns else pd.DataFrame()
            for name in columns or ():
                _present(path, known, name)
            frame = pd.read_parquet(path, columns=sorted(columns) if columns else None)
    if len(frame) == 0:
        raise DataError(f"{path}: has no rows")
    return frame


def _present(path: Path, frame: pd.DataFrame, name: str) -> pd.Series[Any]:
    """A column without missing values. Rows are counted from 1, below the header."""
    if name not in frame.columns:
        raise DataError(f"{path}: has no column '{name}'{nearest(name, map(str, frame.columns))}")
    series = frame[name]
    missing = np.flatnonzero(series.isna())
    if len(missing):
        place = f"line {missing[0] + 2}" if path.suffix == ".csv" else f"row {missing[0] + 1}"
        raise DataError(
            f"{path}: {place}: column '{name}' is empty ({frame.isna().any(axis=1).sum()} of "
            f"{len(frame)} rows have empty cells); fill or drop them"
        )
    for row, value in enumerate(series if series.dtype.kind == "O" else ()):
        if not isinstance(value, Hashable):
            kind = type(value).__name__
            raise DataError(f"{path}: column '{name}' has a {kind} in row {row + 1}, not a value")
    return series


def _column(path: Path, frame: pd.DataFrame, name: str) -> NDArray[np.generic]:
    """A column as numbers if it is numeric, otherwise as text."""
    import pandas as pd

    series = _present(path, frame, name)
    if pd.api.types.is_numeric_dtype(series):
        return np.asarray(series.to_numpy())
    values = [str(value) for value in series]
    files.check_labels(values, f"{path}: column '{name}'")
    return np.array(values)


def _numeric(
    path: Path, columns: Mapping[Any, pd.Series[Any]], others: set[str]
) -> tuple[str, ...]:
    """The numeric columns except `others`; text columns are skipped.

    A column of numbers with a few words is refused rather than skipped silently.
    """
    import pandas as pd

    names = []
    for name, series in columns.items():
        if name in others:
            continue
        if pd.api.types.is_numeric_dtype(series):
            names.append(name)
        elif series.dtype.kind == "O":
            words = {str(word).lower() for word in series.dropna()} - {*files.MISSING}
            flags = words and words <= {"true", "false"}
            if flags or any(map(files.is_number, series)):
                raise _not_a_number(path, series, WHICH_COLUMNS)
    if not names:
        raise DataError(f"{path}: has no numeric columns to use as features")
    return tuple(names)


def _not_a_number(path: Path, series: pd.Series[Any], hint: str = "") -> DataError:
    # The first value that is not a number, or the first one if all are numbers stored as text.
    row = next((row for row, value in enumerate(series) if not files.is_number(value)), 0)
    return DataError(
        f"{path}: column '{series.name}' has {series.iloc[row]!r:.60} in row {row + 1}, expected "
        f"a number{hint}"
    )


def table_features(
    path: Path,
    frame: pd.DataFrame,
    names: Sequence[str],
    dtype: type[Float] | np.dtype[Float],
    hint: str = "",
) -> NDArray[Float]:
    """(N, features) the columns of those names.

    Args:
        path: path of the table, for messages.
        hint: the end of messages about a column that is not numeric.

    Raises:
        DataError: a column is missing, or has a value that is missing or not a finite number.
    """
    x = np.empty((len(frame), len(names)), dtype)
    for i, name in enumerate(names):
        x[:, i] = _numbers(path, frame, name, dtype, hint)
    return x


def _numbers(
    path: Path,
    frame: pd.DataFrame,
    name: str,
    dtype: type[Float] | np.dtype[Float],
    hint: str = "",
) -> NDArray[Float]:
    """(N,) a column of finite numbers."""
    import pandas as pd

    series = _present(path, frame, name)
    if not pd.api.types.is_numeric_dtype(series):
        raise _not_a_number(path, series, hint)
    with np.errstate(over="ignore"):  # overflow is refused below
        values = series.to_numpy(np.float64).astype(dtype)
    wrong = np.flatnonzero(~np.isfinite(values))
    if len(wrong):
        raise DataError(
            f"{path}: column '{name}' has {series.iloc[int(wrong[0])]} in row {wrong[0] + 1}, "
            f"not finite in {np.dtype(dtype)}"
        )
    return values


def named_by_label(labels: NDArray[np.generic]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """The labels that occur, in order, as names of classes; and the class index of each."""
    values, y = np.unique(labels, return_inverse=True)
    return tuple(str(value) for value in values), y.astype(np.int64)
