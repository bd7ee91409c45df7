"""Sets of images, from their official files or in folders."""

from __future__ import annotations

import importlib
import os
import string
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, PositiveInt

from fedsim.config.registry import nearest, unfit
from fedsim.data.dataset import Dataset, TestFraction, of_parts
from fedsim.data.source import OfficialFiles, Source, datasets
from fedsim.data.sources import files
from fedsim.data.sources.pictures import PICTURES, is_picture, read_picture
from fedsim.data.stored import AnyArray, ImageFiles
from fedsim.errors import DataError, warn
from fedsim.support.extras import require
from fedsim.support.words import in_short

DIGITS = tuple(string.digits)
UPPER = tuple(string.ascii_uppercase)
CHARACTERS = (*DIGITS, *UPPER, *string.ascii_lowercase)
# The lower-case letters that EMNIST does not merge with their capitals.
MERGED = (*DIGITS, *UPPER, *"abdefghnqrt")
EMNIST = {"byclass": CHARACTERS, "bymerge": MERGED, "balanced": MERGED, "letters": UPPER}

FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
CIFAR10 = files.word_list("airplane automobile bird cat deer dog frog horse ship truck")
CIFAR100 = files.word_list(
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
CIFAR100_COARSE = files.word_list(
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


class _Fetched(OfficialFiles):
    """A data set whose official files torchvision can download.

    Args:
        download: download missing files.
    """

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
        require("torchvision", f"data.download: fetching {self.name}")
        folder = files.data_root(self.root)
        torchvision = importlib.import_module("torchvision.datasets")
        fetch = getattr(torchvision, files.LAYOUTS[self.name].torchvision)
        try:
            fetch(root=folder, download=True, **arguments)
        except Exception as error:  # any error of the network, the server or the disk
            raise DataError(f"{self.name}: the download into {folder} failed: {error}") from error


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
        anchor = files.find([f"{names[0]}-ubyte"], self.name, self.root)
        paths = [files.beside(anchor, f"{name}-ubyte", self.name) for name in names]
        x, y = files.read_idx_images(paths[0], paths[1], len(classes), first)
        test_x, test_y = files.read_idx_images(paths[2], paths[3], len(classes), first)
        return Dataset(x, y, test_x, test_y, classes, mean, std)


@datasets.register
class Mnist(_Idx):
    """MNIST: handwritten digits, 28×28 grey pixels, 60,000 + 10,000, 10 classes."""

    name: str = "mnist"

    def _read(self) -> Dataset:
        return self._load_idx(("train", "t10k"), DIGITS, (0.1307,), (0.3081,))


@datasets.register
class FashionMnist(_Idx):
    """Fashion-MNIST: articles of clothing, 28×28 grey pixels, 60,000 + 10,000, 10 classes."""

    name: str = "fashion_mnist"

    def _read(self) -> Dataset:
        return self._load_idx(("train", "t10k"), FASHION, (0.2860,), (0.3530,))


@datasets.register
class Emnist(_Idx):
    """EMNIST: handwritten digits and letters, 28×28 grey pixels, in six splits.

    Args:
        split: `byclass` (62 classes), `bymerge` and `balanced` (47: capitals that look like their
            lower-case letter are merged with it), `letters` (26), `digits` or `mnist` (10).
    """

    name: str = "emnist"
    split: Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"] = "balanced"

    def _fetch(self, **arguments: str) -> None:
        super()._fetch(split=self.split, **arguments)

    def _read(self) -> Dataset:
        classes = EMNIST.get(self.split, DIGITS)
        stems = (f"emnist-{self.split}-train", f"emnist-{self.split}-test")
        loaded = self._load_idx(stems, classes, first=int(self.split == "letters"))
        # EMNIST stores images column by column.
        x, test_x = (np.asarray(part).swapaxes(2, 3) for part in (loaded.x, loaded.test_x))
        return replace(loaded, x=x, test_x=test_x)


@datasets.register
class Cifar10(_Fetched):
    """CIFAR-10: photographs, 32×32 colour pixels, 50,000 + 10,000, 10 classes.

    Reads the Python version, the binary version, or a subset in either format: fewer than five
    batches are accepted while none has the official 10,000 records.
    """

    name: str = "cifar10"

    def _read(self) -> Dataset:
        candidates = ("data_batch_[1-5]", "data_batch_[1-5].bin")
        first = files.find(candidates, self.name, self.root)
        suffix = _version(first)
        test = files.beside(first, f"test_batch{suffix}", self.name)
        labels = {"labels": len(CIFAR10)}
        names = [f"data_batch_{i}{suffix}" for i in range(1, 6)]
        found = {name: files.match(first.parent, name) for name in names}
        batches = [files.read_cifar(path, labels) for path in found.values() if path is not None]
        missing = [name for name, path in found.items() if path is None]
        if missing and max(len(x) for x, _ in batches) >= 10_000:
            raise files.missing_beside(first, missing, self.name)
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
        labels: `fine` (100 classes) or `coarse` (20 superclasses).
    """

    name: str = "cifar100"
    labels: Literal["fine", "coarse"] = "fine"

    def _read(self) -> Dataset:
        train = files.find(["train", "train.bin"], self.name, self.root)
        test = files.beside(train, f"test{_version(train)}", self.name)
        names = {"coarse_labels": len(CIFAR100_COARSE), "fine_labels": len(CIFAR100)}
        x, y = files.read_cifar(train, names)
        test_x, test_y = files.read_cifar(test, names)
        fine = self.labels == "fine"
        other = "coarse" if fine else "fine"
        return Dataset(
            *(x, y[f"{self.labels}_labels"], test_x, test_y[f"{self.labels}_labels"]),
            classes=CIFAR100 if fine else CIFAR100_COARSE,
            mean=(0.5071, 0.4865, 0.4409),
            std=(0.2673, 0.2564, 0.2762),
            columns={other: y[f"{other}_labels"]},
        )


def _version(path: Path) -> str:
    """The ending of file names of CIFAR's binary version."""
    return ".bin" if ".bin" in path.suffixes else ""


@datasets.register
class Femnist(OfficialFiles):
    """FEMNIST: handwritten characters by writer, 28×28 grey pixels, 62 classes (LEAF).

    The writer of each example is the column `writer`. Files: LEAF's `train` and `test` folders of
    json files.
    """

    name: str = "femnist"

    def load(self) -> Dataset:
        """x is float32 (N, 1, 28, 28) in [0, 1], as LEAF wrote it."""
        folder = files.find(["train/*.json"], self.name, self.root).parent.parent
        x, y, writers = self._read(folder / "train")
        test_x, test_y, _ = self._read(folder / "test")
        return Dataset(x, y, test_x, test_y, CHARACTERS, columns={"writer": writers})

    def _read(
        self, folder: Path
    ) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.str_]]:
        paths = files.match_all(folder, "*.json")
        if not paths:
            raise files.MissingFileError(f"{self.name}: no JSON file in {folder}")
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
        raise unfit(problem)
    return name


@datasets.register
class MedMnist(OfficialFiles):
    """MedMNIST: medical images in 11 sets, 28×28 grey or colour pixels, 2 to 11 classes.

    The official training and test parts are used; the validation part is not. Files of larger
    images (`pathmnist_64.npz`) are read if they are renamed to that of their set. The grades of
    `retinamnist` are classes.

    Args:
        set: `pathmnist`, `dermamnist`, `octmnist`, `pneumoniamnist`, `retinamnist`, `breastmnist`,
            `bloodmnist`, `tissuemnist`, `organamnist`, `organcmnist` or `organsmnist`.
    """

    name: str = "medmnist"
    set: Annotated[str, AfterValidator(_medmnist_set)]

    def load(self) -> Dataset:
        """x is uint8 (N, 1 or 3, 28, 28)."""
        path = files.find([f"{self.set}.npz"], self.name, self.root)
        classes = MEDMNIST[self.set]
        x, y = files.read_medmnist(path, "train", len(classes))
        test_x, test_y = files.read_medmnist(path, "test", len(classes))
        half = (0.5,) * x.shape[1]
        return Dataset(x, y, test_x, test_y, classes, mean=half, std=half)


@datasets.register
class Folder(Source):
    """Your own images in folders, one folder per class, laid out as for torchvision's ImageFolder.

    If there are both `test/` and `val/`, `val/` is not used.

    Args:
        path: folder with `train/<class>/` and `test/<class>/` or `val/<class>/`, or only with
            `<class>/`.
        size: pixels to which images are resized: height and width in one, or [height, width].
        channels: 3 for colour, 1 for grey.
        test_fraction: share of the examples in the test set if it has no folder.
        in_place: decode images whenever they are needed, for images that do not fit into memory.
    """

    name: str = "folder"
    path: Path
    size: PositiveInt | tuple[PositiveInt, PositiveInt] = 32
    channels: Literal[1, 3] = 3
    test_fraction: TestFraction = 0.2
    in_place: bool = False

    def load(self) -> Dataset:
        """x is uint8 (N, channels, height, width); classes are in order of their names."""
        top = self.path
        train = top / "train" if (top / "train").is_dir() else top
        tests = [top / name for name in ("test", "val") if (top / name).is_dir()]
        if train == top and tests:
            raise DataError(f"{top}: has {tests[0].name}/ but no train/")
        others = {*_class_folders(top)} - {"train", "test", "val"} if train != top else set()
        if others:
            told = f"{top}: has train/, so that {in_short(sorted(others))} beside it are not read"
            warn(told)
        classes = _class_folders(train)
        x, y = self._read(train, classes, of_each=True)
        if not tests:
            return of_parts((x, y), None, classes, self.test_fraction, str(train))
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
        found, hidden = _files(folder, below=False)
        # Pictures beside the classes are of none; other files there may be notes or labels.
        left = [path for path in found if is_picture(path)]
        for name in classes:
            found, more = _files(folder / name)
            hidden += more
            images.append([path for path in found if is_picture(path)])
            left += [path for path in found if not is_picture(path)]
            if of_each and not images[-1]:
                raise DataError(f"{folder / name}: contains no images")
        if hidden:
            warn(f"{folder}: {files.ignored(hidden)}")
        if left:
            warn(
                f"{folder}: {len(left)} file{'s' * (len(left) > 1)} left out, such as "
                f"{left[0].relative_to(folder)}: pictures are {', '.join(PICTURES)} files "
                "in a folder of their class"
            )
        y = np.repeat(np.arange(len(classes)), [len(found) for found in images])
        paths = [path for found in images for path in found]
        height, width = (self.size, self.size) if isinstance(self.size, int) else self.size
        shape = (self.channels, height, width)
        if self.in_place:
            return ImageFiles(paths, shape), y
        x = np.empty((len(paths), *shape), np.uint8)
        for row, path in zip(x, paths, strict=True):
            row[:] = read_picture(path, shape)
        return x, y


def _files(folder: Path, below: bool = True) -> tuple[list[Path], list[str]]:
    """The user's own files in a folder and, unless told otherwise, its sub-folders, in order.

    Links to folders are not followed, because they may form cycles.

    Returns:
        Their paths, and the names of other files and folders there (`files.is_visible`).
    """
    found: list[tuple[str, list[str]]] = []
    hidden: list[str] = []
    for place, folders, names in os.walk(folder):
        hidden += [name for name in (*folders, *names) if not files.is_visible(name)]
        folders[:] = [name for name in folders if below and files.is_visible(name)]
        found.append((place, sorted(filter(files.is_visible, names))))
    return [Path(place, name) for place, names in sorted(found) for name in names], hidden


def _class_folders(folder: Path) -> tuple[str, ...]:
    if not folder.is_dir():
        raise DataError(f"{folder}: is not a folder")
    with files.reading(folder):
        within = [path for path in folder.iterdir() if files.is_visible(path.name)]
    names = tuple(sorted(path.name for path in within if path.is_dir()))
    if not names:
        count = sum(map(is_picture, within))
        loose = f", and {count} picture{'s' * (count > 1)} of no class" if count else ""
        raise DataError(f"{folder}: has no class folders{loose}; pictures go into one per class")
    return names
