"""Readers of the official formats of the standard data sets: IDX, CIFAR, LEAF, KEEL, NumPy, text.

Every reader takes a path and returns NumPy arrays whose sizes and labels it has checked, or text.
Files may be plain, `.gz` or `.xz`. Any problem with a file is a `DataError` that begins with its
path.
"""

from __future__ import annotations

import gzip
import io
import json
import lzma
import math
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedsim.config.registry import nearest
from fedsim.errors import DataError, warn
from fedsim.support.words import in_short, visible

OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
COMPRESSIONS = ("", *OPENERS)
MISSING = ("na", "n/a", "nan", "none", "null")  # unless they are labels among other words
CIFAR_SHAPE = (3, 32, 32)


class Layout(NamedTuple):
    """Where a data set's files are kept, and how to get them."""

    folders: tuple[str, ...]  # sub-folders of the data root that may hold them
    torchvision: str = ""  # its class that downloads them, if any
    publisher: str = ""  # where to get them if they cannot be downloaded


# torchvision's own folder comes first, so that a download is found before an incomplete copy.
LAYOUTS = {
    "mnist": Layout(("MNIST/raw", "mnist"), "MNIST"),
    "fashion_mnist": Layout(("FashionMNIST/raw", "fashion_mnist"), "FashionMNIST"),
    "emnist": Layout(("EMNIST/raw", "emnist", "emnist/gzip", "gzip"), "EMNIST"),
    "cifar10": Layout(("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10"), "CIFAR10"),
    "cifar100": Layout(("cifar-100-python", "cifar-100-binary", "cifar100"), "CIFAR100"),
    "femnist": Layout(("femnist", "femnist/data")),
    "shakespeare": Layout(
        ("shakespeare", "shakespeare/data"),
        publisher="the json files that data/shakespeare/preprocess.sh of "
        "github.com/TalwalkarLab/leaf writes",
    ),
    "medmnist": Layout(("medmnist",), publisher="the file of the set from medmnist.com"),
    "mortgage": Layout(("mortgage",), publisher="'mortgage' from KEEL's regression data sets"),
    "openfl_xai": Layout(
        ("openfl_xai/data", "openfl_xai", "data"),
        publisher="data/col0_data.zip to col4_data.zip from github.com/Unipisa/OpenFL-XAI, "
        "unzipped into col0 to col4",
    ),
    "trec": Layout(
        ("trec",),
        publisher="train_5500.label and TREC_10.label from cogcomp.seas.upenn.edu/Data/QA/QC",
    ),
    "r8": Layout(
        ("r8",),
        publisher="r8-train-all-terms.txt and r8-test-all-terms.txt from ana.cachopo.org's data "
        "sets for single-label text categorization",
    ),
    "tmn": Layout(
        ("tmn",),
        publisher="training.csv, validation.csv and test.csv from datasets/TMN of "
        "github.com/pgcool/iDocNADEe, name them TMN_train.txt, TMN_val.txt and "
        "TMN_test.txt, replace the first comma of each line by a tab",
    ),
    "subj": Layout(
        ("subj", "rotten_imdb"),
        publisher="rotten_imdb.tar.gz from cs.cornell.edu/people/pabo/movie-review-data, unpack "
        "it",
    ),
    "beer": Layout(
        ("beer",),
        publisher="reviews.aspect{0,1,2}.{train,heldout}.txt.gz and annotations.json of "
        "people.csail.mit.edu/taolei/beer, which asks for BeerAdvocate's permission",
    ),
    "hotel": Layout(
        ("hotel",),
        publisher="data.zip of people.csail.mit.edu/yujia/files/r2a; hotel_*.train, hotel_*.dev "
        "are in data/oracle, and those of data/target go into a sub-folder annotations",
    ),
}


Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]


class MissingFileError(DataError):
    """A file of a data set was not found."""


_OF_PROGRAMS = (  # in lower case
    *("__macosx", "__pycache__", "lost+found", "$recycle.bin", "system volume information"),
    *("@eadir", "#recycle", "@recycle", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"),
)


def is_visible(name: str) -> bool:
    """Whether a file or folder is the user's, not one that a program keeps beside them."""
    return not name.startswith(".") and name.lower() not in _OF_PROGRAMS


def ignored(hidden: Iterable[str]) -> str:
    """What is said of files and folders that are not visible, by their names."""
    names = [visible(name) for name in hidden]
    s = "s" * (len(names) > 1)
    return f"{len(names)} hidden or system item{s} ignored: {in_short(sorted(set(names)))}"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any exception of a parser into a `DataError` that names the file.

    Decoders raise many types of exceptions on damaged files (EOFError, zlib.error, LZMAError,
    UnpicklingError, ValueError, MemoryError, ...), so all are caught: keep the block to one call.
    """
    if path.is_fifo():  # reading would wait for a writer
        raise DataError(f"{path}: is a pipe, not a file")
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        # In one line, without what pydicom says of its own code.
        told = " ".join(cause.partition("\nTraceback ")[0].split()) or type(error).__name__
        raise DataError(f"{path}: cannot be read: {told}") from error


def data_root(root: Path | None) -> Path:
    """The folder of all data: `root`, else $FEDSIM_DATA, else ~/.cache/fedsim."""
    return (root or Path(os.environ.get("FEDSIM_DATA") or "~/.cache/fedsim")).expanduser()


def find(candidates: Sequence[str], data_set: str, root: Path | None) -> Path:
    """The first existing file of some candidates: names or glob patterns without `.gz` and `.xz`.

    Looks into each sub-folder of the data root in `LAYOUTS`, then into the root: MNIST and
    Fashion-MNIST have the same file names, so the more specific folder comes first.

    Raises:
        MissingFileError: there is none.
    """
    top = data_root(root)
    folders = [top / folder for folder in LAYOUTS[data_set].folders] + [top]
    for folder in folders:
        for name in candidates:
            found = match(folder, name)
            if found is not None:
                return found
    looked = "".join(f"\n  {folder}" for folder in folders)
    names = " or ".join(f"'{name}'" for name in candidates)
    raise MissingFileError(
        f"{data_set}: no file {names} (nor .gz, .xz) in any of{looked}\n{_how_to_get(data_set)}"
    )


def match(folder: Path, name: str) -> Path | None:
    """The file of that name or pattern in a folder (plain, `.gz` or `.xz`), or None."""
    for compression in COMPRESSIONS:
        with reading(folder):
            found = [path for path in _glob(folder, name + compression) if path.is_file()]
        if found:
            return found[0]
    return None


def _glob(folder: Path, pattern: str) -> list[Path]:
    return sorted(path for path in folder.glob(pattern) if is_visible(path.name))


def match_all(folder: Path, pattern: str) -> list[Path]:
    """All files of that pattern in a folder, plain, `.gz` or `.xz`, in order."""
    with reading(folder):
        return sorted(path for end in COMPRESSIONS for path in _glob(folder, pattern + end))


def beside(first: Path, name: str, data_set: str) -> Path:
    """The file of that name in the folder of another one.

    All files of a data set come from one folder, so that data sets never mix.
    """
    found = match(first.parent, name)
    if found is None:
        raise missing_beside(first, [name], data_set)
    return found


def missing_beside(first: Path, names: Sequence[str], data_set: str) -> MissingFileError:
    """The error for files missing from the folder of another one."""
    return MissingFileError(
        f"{data_set}: {first.parent} has {first.name} but no {', '.join(names)} "
        f"(nor .gz, .xz)\n{_how_to_get(data_set)}"
    )


def _how_to_get(data_set: str) -> str:
    layout = LAYOUTS[data_set]
    get = f"get {layout.publisher}, and " if layout.publisher else ""
    download = ", or data.download=true" if layout.torchvision else ""
    return f"{get}set data.root or FEDSIM_DATA to its folder{download}"


def read_bytes(path: Path) -> bytes:
    """All bytes of a file, decompressed if its name ends in `.gz` or `.xz`."""
    opens: Callable[..., IO[bytes]] = OPENERS.get(path.suffix.lower(), open)
    with reading(path), opens(path, "rb") as stream:
        return stream.read()


def read_idx(path: Path, dimensions: int) -> Bytes:
    """The array of unsigned bytes in an IDX file, of as many dimensions as asked."""
    content = read_bytes(path)
    magic = 0x0800 | dimensions  # two zero bytes, 8 for unsigned bytes, the number of dimensions
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(f"{path}: {len(content)} bytes, shorter than its IDX header of {header}")
    found = int.from_bytes(content[:4], "big")
    if found != magic:
        raise DataError(
            f"{path}: IDX magic number {found}, expected {magic} "
            f"(unsigned bytes, {dimensions} dimensions)"
        )
    shape = tuple(int(n) for n in np.frombuffer(content, ">u4", dimensions, offset=4))
    expected = header + math.prod(shape)
    if len(content) != expected:
        raise DataError(f"{path}: {len(content)} bytes, expected {expected} for shape {shape}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()  # writable copy


def read_idx_images(
    images: Path, labels: Path, classes: int, first: int = 0
) -> tuple[Bytes, Ints]:
    """The images (N, 1, 28, 28) of a pair of IDX files, and their class indices (N,).

    The files hold unsigned bytes: (N, 28, 28), and labels (N,) from `first` on.
    """
    x = read_idx(images, 3)
    if x.shape[1:] != (28, 28):
        raise DataError(f"{images}: images of {x.shape[1]}×{x.shape[2]} pixels, expected 28×28")
    if len(x) == 0:
        raise DataError(f"{images}: contains no images")
    y = read_idx(labels, 1).astype(np.int64)
    if len(y) != len(x):
        raise DataError(f"{labels}: {len(y)} labels for the {len(x)} images of {images.name}")
    _check_labels(labels, y, first, classes)
    return x[:, np.newaxis], y - first


def _check_labels(path: Path, y: Ints, first: int, classes: int) -> None:
    wrong = np.flatnonzero((y < first) | (y >= first + classes))
    if len(wrong):
        raise DataError(
            f"{path}: record {wrong[0]} has label {y[wrong[0]]}, "
            f"expected {first} to {first + classes - 1}"
        )


def read_cifar(path: Path, labels: Mapping[str, int]) -> tuple[Bytes, dict[str, Ints]]:
    """The images (N, 3, 32, 32) of one CIFAR file, and each label's class indices (N,) by name.

    A file with `.bin` in its name is of the binary version, others of the Python version. `labels`
    are the numbers of classes, by name in the Python version, in the order of the binary version.
    """
    read = read_cifar_binary if ".bin" in path.suffixes else read_cifar_python
    x, y = read(path, labels)
    if len(x) == 0:
        raise DataError(f"{path}: contains no records")
    for name, classes in labels.items():
        _check_labels(path, y[name], 0, classes)
    return x, y


def read_cifar_binary(path: Path, labels: Mapping[str, int]) -> tuple[Bytes, dict[str, Ints]]:
    """CIFAR's binary version: records of one byte per label and 3072 bytes of pixels."""
    content = read_bytes(path)
    size = len(labels) + math.prod(CIFAR_SHAPE)
    if len(content) % size:
        raise DataError(
            f"{path}: {len(content)} bytes, expected a multiple of the record size {size}"
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    y = {name: records[:, i].astype(np.int64) for i, name in enumerate(labels)}
    return np.ascontiguousarray(records[:, len(labels) :]).reshape(-1, *CIFAR_SHAPE), y


def read_cifar_python(path: Path, labels: Mapping[str, int]) -> tuple[Bytes, dict[str, Ints]]:
    """CIFAR's Python version: a pickled dictionary of an array `data` and lists of labels.

    No code of the pickle is run: only NumPy arrays and plain values are allowed.
    """
    content = read_bytes(path)
    with reading(path):
        batch = ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    if not isinstance(batch, dict):
        raise DataError(f"{path}: a pickled {type(batch).__name__}, expected a dictionary")
    x = _entry(path, batch, "data")
    pixels = math.prod(CIFAR_SHAPE)
    if not (isinstance(x, np.ndarray) and x.dtype == np.uint8 and x.shape[1:] == (pixels,)):
        raise DataError(f"{path}: 'data' is {_describe(x)}, expected uint8 of shape (N, {pixels})")
    y = {name: _integers(path, f"'{name}'", _entry(path, batch, name), len(x)) for name in labels}
    return x.reshape(-1, *CIFAR_SHAPE), y


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles NumPy arrays and plain values, and refuses every other global."""

    admitted = (
        *(("numpy._core.multiarray", "_reconstruct"), ("numpy", "ndarray"), ("numpy", "dtype")),
    )

    def find_class(self, module: str, name: str) -> Any:
        # NumPy 2 renamed numpy.core, which the official files (written by NumPy 1) still name.
        module = module.replace("numpy.core", "numpy._core")
        if (module, name) not in self.admitted:
            raise pickle.UnpicklingError(
                f"the pickle contains {module}.{name}, which is not allowed"
            )
        return super().find_class(module, name)


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    return f"a {type(value).__name__}"


def _entry(path: Path, mapping: Mapping[Any, Any], key: str) -> Any:
    if key not in mapping:
        raise DataError(f"{path}: has no '{key}'{nearest(key, [str(known) for known in mapping])}")
    return mapping[key]


def _integers(path: Path, what: str, values: Any, count: int) -> Ints:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise DataError(f"{path}: {what} is not a list of integers")
    if len(values) != count:
        raise DataError(f"{path}: {what} has {len(values)} labels for {count} examples")
    with reading(path):  # OverflowError for values beyond int64
        return np.array(values, np.int64)


def read_leaf(
    path: Path, features: int, classes: int
) -> tuple[NDArray[np.float32], Ints, NDArray[np.str_]]:
    """One LEAF json file: examples (N, features) in [0, 1], class indices (N,), and users (N,)."""
    users = _leaf_users(path)
    parts = [_leaf_user(path, user, data, features, classes) for user, data in users.items()]
    x = np.concatenate([np.empty((0, features), np.float32), *(x for x, _ in parts)])
    y = np.concatenate([np.empty(0, np.int64), *(y for _, y in parts)])
    return x, y, np.repeat(np.array(list(users), np.str_), [len(y) for _, y in parts])


def read_leaf_texts(path: Path, length: int) -> dict[str, tuple[list[str], list[str]]]:
    """The texts of each user in a LEAF json file, of one length, and the character after each."""
    found = {}
    for user, data in _leaf_users(path).items():
        texts = _entry(path, data, "x")
        following = _entry(path, data, "y")
        for key, values, size in (("x", texts, length), ("y", following, 1)):
            if not isinstance(values, list) or not all(
                isinstance(value, str) and len(value) == size for value in values
            ):
                raise DataError(
                    f"{path}: '{key}' of user '{user}' is not a list of texts of {size} "
                    f"character{'s' * (size > 1)}"
                )
        if len(texts) != len(following):
            raise DataError(
                f"{path}: user '{user}' has {len(texts)} texts in 'x' and {len(following)} "
                f"characters in 'y'"
            )
        found[user] = texts, following
    return found


def _leaf_users(path: Path) -> dict[str, dict[str, Any]]:
    """What `user_data` of a LEAF json file has of each of the `users`."""
    content = read_bytes(path)
    with reading(path):
        document = json.loads(content)
    if not isinstance(document, dict):
        raise DataError(f"{path}: a JSON {type(document).__name__}, expected an object")
    users, user_data = _entry(path, document, "users"), _entry(path, document, "user_data")
    if not isinstance(users, list) or not all(isinstance(user, str) for user in users):
        raise DataError(f"{path}: 'users' is not a list of names")
    if not isinstance(user_data, dict) or sorted(user_data) != sorted(users):
        raise DataError(f"{path}: 'user_data' and 'users' have different users")
    for user in users:
        if not isinstance(user_data[user], dict):
            raise DataError(f"{path}: the data of user '{user}' are not an object of 'x' and 'y'")
    return {user: user_data[user] for user in users}


def _leaf_user(
    path: Path, user: str, data: dict[str, Any], features: int, classes: int
) -> tuple[NDArray[np.float32], Ints]:
    of = f"of user '{user}'"
    rows = _entry(path, data, "x")
    with reading(path):  # ValueError for rows of different lengths
        x = np.array(rows) if rows != [] else np.empty((0, features))
    if x.ndim != 2 or x.shape[1] != features or x.dtype.kind not in "iuf":
        raise DataError(
            f"{path}: 'x' {of} is {_describe(x)}, expected numbers of shape (N, {features})"
        )
    wrong = np.flatnonzero(~((x >= 0) & (x <= 1)).all(axis=1))  # also NaN
    if len(wrong):
        raise DataError(f"{path}: example {wrong[0]} {of} has values outside 0 to 1")
    y = _integers(path, f"'y' {of}", _entry(path, data, "y"), len(x))
    _check_labels(path, y, 0, classes)
    return x.astype(np.float32), y


def read_medmnist(path: Path, part: str, classes: int) -> tuple[Bytes, Ints]:
    """The images (N, 1 or 3, height, width) and class indices (N,) of a part of a MedMNIST file.

    They are the arrays `<part>_images` and `<part>_labels` of an `.npz` file, part being `train`,
    `val` or `test`.
    """
    content = read_bytes(path)
    with reading(path), np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files if key.startswith(f"{part}_")}
    images, labels = (_entry(path, arrays, f"{part}_{name}") for name in ("images", "labels"))
    colours = images.ndim == 4 and images.shape[3] == 3
    if images.dtype != np.uint8 or not (images.ndim == 3 or colours) or images.size == 0:
        raise DataError(
            f"{path}: '{part}_images' is {_describe(images)}, expected uint8 of shape (N, height, "
            f"width) or (N, height, width, 3)"
        )
    if labels.dtype.kind not in "iu" or labels.shape != (len(images), 1):
        raise DataError(
            f"{path}: '{part}_labels' is {_describe(labels)}, expected integers of shape "
            f"({len(images)}, 1)"
        )
    y = labels[:, 0].astype(np.int64)
    _check_labels(path, y, 0, classes)
    x = images.transpose(0, 3, 1, 2) if colours else images[:, np.newaxis]
    return np.ascontiguousarray(x), y


def read_npy(path: Path, columns: int = 0) -> NDArray[np.float64]:
    """The float64 array in a `.npy` file: (N, columns), or (N,) if `columns` is 0.

    No code of the file is run: object arrays are refused.
    """
    content = read_bytes(path)
    with reading(path):
        array = np.load(io.BytesIO(content), allow_pickle=False)
    shape = (columns,) if columns else ()
    if not (
        isinstance(array, np.ndarray)
        and array.dtype == np.float64
        and array.ndim == 1 + len(shape)
        and array.shape[1:] == shape
    ):
        expected = f"(N, {columns})" if columns else "(N,)"
        raise DataError(f"{path}: is {_describe(array)}, expected float64 of shape {expected}")
    if len(array) == 0:
        raise DataError(f"{path}: contains no rows")
    wrong = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))
    if len(wrong):
        raise DataError(f"{path}: row {wrong[0]} has values that are not finite")
    return np.ascontiguousarray(array)


def check_labels(labels: Sequence[str], where: str, what: str = "row") -> None:
    """Refuse blank labels, and words for a missing one, such as NA, among numbers.

    `where` they are from, and `what` each is one of (a row, say), is for messages.
    """
    words = {label: label.strip().lower() for label in set(labels)}
    given = {word for word in words.values() if word and word not in MISSING}
    numeric = given and all(word in ("true", "false") or is_number(word) for word in given)
    for number, label in enumerate(labels, 1):
        if not words[label]:
            raise DataError(f"{where} has no value in {what} {number}")
        if numeric and words[label] in MISSING:
            raise DataError(
                f"{where} has '{label}' in {what} {number}, and numbers in others; fill or drop it"
            )


def check_apart(paths: Sequence[Path], test_paths: Sequence[Path]) -> None:
    """Warn of a file of the test set that is also one of the training set."""
    training = {path.resolve() for path in paths}
    for path in test_paths:
        if path.resolve() in training:
            told = f"{path} is also read for training, so that scores on it say little"
            warn(f"data.test_path: {told}")


def is_number(value: object) -> bool:
    """Whether it is, or reads as, a number that a float can hold."""
    try:
        return math.isfinite(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False


def word_list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Documents(NamedTuple):
    """Texts, and the label of each."""

    labels: list[str]
    texts: list[str]


def read_text(path: Path, encoding: str) -> str:
    """The text of a file."""
    content = read_bytes(path)
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        # Without the byte order mark, if there is one.
        line = error.object.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path}:{line}: byte 0x{error.object[error.start]:02x} is not {error.encoding}; save "
            f"the file in that encoding"
        ) from None


def read_lines(path: Path, encoding: str) -> list[str]:
    r"""The lines of a text file, which end in "\n" or "\r\n"; the last one need not."""
    lines = read_text(path, encoding).split("\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise DataError(f"{path}: is empty")
    return [line.removesuffix("\r") for line in lines]


def read_labelled(path: Path, encoding: str = "utf-8-sig", separator: str = "\t") -> Documents:
    """Lines of a label and a text, separated by the first separator; the text may be empty."""
    documents = Documents([], [])
    for number, line in enumerate(read_lines(path, encoding), 1):
        label, found, text = line.partition(separator)
        if not found:
            sign = "tab" if separator == "\t" else "space"
            raise DataError(f"{path}:{number}: has no {sign} between a label and a text")
        if not label.strip():
            raise DataError(f"{path}:{number}: has no label before its text")
        documents.labels.append(label)
        documents.texts.append(text)
    check_labels(documents.labels, f"{path}: the label", "line")
    return documents
