"""What is refused: the rows of refusals.yaml, and those that would be long there."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import lzma
import os
import pickle
import re
import shlex
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import own_objects
import pandas as pd
import torch
from numpy.typing import NDArray
from PIL import Image

from experiments import change_manifest, small_experiment
from fedsim import Dataset, Experiment, run
from fedsim.analysis.attacks import inversion, membership
from fedsim.cluster.placement import Node, plan_actors
from fedsim.conditions.devices import read_availability, read_capacities
from fedsim.config.file import from_yaml
from fedsim.data import datasets, load_dataset, partitions, text
from fedsim.data.sources import files
from fedsim.data.sources.keel import read_keel
from fedsim.data.sources.pictures import open_picture
from fedsim.experiment import plain
from fedsim.explain.explainers.embedding import embed
from fedsim.explain.scores import faithfulness
from fedsim.explain.scores.road import road
from fedsim.explain.tree import build_tree
from fedsim.federation import EngineSettings
from fedsim.launch.prepare import prepare
from fedsim.models.masked_autoencoder import MaskedAutoencoder
from fedsim.results.manifest import NAMES
from fedsim.sweep.preflight import allocate

# For refusals.yaml.
__all__ = ["Experiment", "MaskedAutoencoder", "build_tree", "embed", "faithfulness", "files"]
__all__ += ["inversion", "membership", "open_picture", "plain", "road", "run", "torch"]

EXPERIMENT = """\
name: small
data: {name: synthetic, samples: 60, test_samples: 10, shape: [4], classes: 3}
partition: {kind: iid, clients: 4}
model: {name: mlp, hidden: [4]}
method: {name: fedavg}
train: {rounds: 1}
engine: {kind: local}
"""


@dataclass(frozen=True)
class Row:
    """Something that is refused.

    Attributes:
        ask: a command line, or what is called in Python.
        said: what is told; "..." stands for any words of a line.
        lines: what replaces lines of `EXPERIMENT` in small.yaml, by the sections they begin with.
        files: what else lies in the working directory; see `write`.
        change: what is done to run/, which is the folder of a finished run then.
        missing: a module that is not installed.
    """

    ask: str | Callable[[], object]
    said: str
    lines: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Path], object] | None = None
    missing: str | None = None


def experiment(lines: Mapping[str, str]) -> str:
    """`EXPERIMENT` with other lines."""
    sections = [line.partition(":")[0] for line in EXPERIMENT.splitlines()]
    assert lines.keys() <= set(sections)
    found = dict(zip(sections, EXPERIMENT.splitlines(), strict=True)) | lines
    return "\n".join(found.values()) + "\n"


def write(path: Path, content: Any) -> None:
    """Write text, bytes, a table, arrays or a document as the name of the file asks for."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    elif isinstance(content, bytes | str):
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    elif path.suffix == ".parquet":
        content.to_parquet(path)
    elif path.suffix.lower() == ".csv":
        content.to_csv(path, index=False)
    elif path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".npz":
        np.savez(path, **content)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(pickle.dumps(content, 4))


def load(**section: Any) -> Dataset:
    return load_dataset(datasets.parse(section))


# Names of refusals.yaml: content of files

rng = np.random.default_rng(0)
IMAGES = rng.integers(0, 256, (4, 28, 28), dtype=np.uint8)
LABELS = np.array([0, 9, 3, 3], np.uint8)
RECORD = bytes(3073)  # of CIFAR-10
FLAT = rng.integers(0, 256, (4, 3072), dtype=np.uint8)
X, Y = np.zeros((4, 3)), np.array([0, 0, 1, 1])
HEADER = "@relation r\n@attribute wind real\n@attribute rain real [0,1]\n"
VECTORS = "the 1 2 3\ncat -0.5 0 1e-3\ndog 7 8 9\n"
WORDS = ("", "<unknown>", "the", "cat", "sat", "mat")
WARDS = "age,ward,ill\n1,north,0\n2,south,1\n3,north,0\n4,south,1\n"
MANY = "name,age,ill\n" + "".join(f"n{k},{k},{k % 2}\n" for k in range(1200))


def of_file(path: Path) -> None:
    """Deal out four examples as the file says."""
    made = partitions.parse({"kind": "file", "path": str(path)})
    made.deal(Dataset(X, Y, X, Y, ("a", "b")), 0)


# How a file of that name is read.
READERS: dict[str, Callable[[Path], object]] = {
    "other.yaml": Experiment.load,
    "file": lambda path: files.read_idx(path, 3),
    "file.gz": files.read_bytes,
    "file.xz": files.read_bytes,
    "test_batch": lambda path: files.read_cifar(path, {"labels": 10}),
    "test_batch.bin": lambda path: files.read_cifar(path, {"labels": 10}),
    "train.bin": lambda path: files.read_cifar(path, {"coarse_labels": 20, "fine_labels": 100}),
    "a.json": lambda path: files.read_leaf(path, 4, 62),
    "a.npz": lambda path: load(name="npz", path=str(path)),
    "a.npy": lambda path: files.read_npy(path, 3),
    "b.npz": files.read_npy,
    **dict.fromkeys(("capacity.json", "capacity"), read_capacities),
    "online.json": read_availability,
    "a.dat": read_keel,
    "t.csv": lambda path: load(name="table", path=str(path), label="y"),
    "t.tsv": lambda path: load(name="table", path=str(path), label="y"),
    "a.xlsx": lambda path: load(name="table", path=str(path), label="y"),
    "a.parquet": lambda path: load(name="table", path=str(path), label="sick"),
    **dict.fromkeys(("v.txt", "v.txt.gz", "v.zip"), partial(text.read_vectors, words=WORDS)),
    "labelled": files.read_labelled,
    "texts.csv": lambda path: load(name="text", path=str(path)),
    **dict.fromkeys(("clients.json", "clients.npz"), of_file),
}


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def mnist(labels: NDArray[np.uint8]) -> dict[str, bytes]:
    arrays = {"images-idx3": IMAGES, "labels-idx1": labels}
    return {
        f"data/mnist/{part}-{what}-ubyte": idx(array)
        for part in ("train", "t10k")
        for what, array in arrays.items()
    }


def shape(*sides: int) -> bytes:
    """The header of a file with images."""
    return struct.pack(">4I", 2051, *sides)


def leaf(x: Any, y: Any) -> dict[str, Any]:
    return {"users": ["w"], "num_samples": [len(y)], "user_data": {"w": {"x": x, "y": y}}}


def medmnist(**changed: NDArray[Any]) -> dict[str, Any]:
    """The file as published, where labels are of shape (N, 1), or with other arrays."""
    arrays = {}
    for part, count in {"train": 6, "val": 2, "test": 3}.items():
        arrays[f"{part}_images"] = np.zeros((count, 28, 28), np.uint8)
        arrays[f"{part}_labels"] = (np.arange(count, dtype=np.uint8) % 2)[:, np.newaxis]
    return {"breastmnist.npz": arrays | changed}


def collaborators(*missing: str, **changed: NDArray[np.float64]) -> dict[str, Any]:
    """OpenFL-XAI's arrays, without some, or others."""
    found: dict[str, Any] = {}
    for k in range(5):
        for part, rows in (("train", 5), ("test", 2)):
            found[f"col{k}_X_{part}"] = np.zeros((rows, 15))
            found[f"col{k}_y_{part}"] = np.zeros(rows)
    kept = {name: array for name, array in (found | changed).items() if name not in missing}
    return {f"{name.replace('_', '/', 1)}.npy": array for name, array in kept.items()}


RATED = [
    "0.9 0.4 0.5\tA golden beer , musty .",
    "0.6 0.3 0.1\tfoam and tin",
    "0.4 0.8 0.5\tpale ; fresh hops",
    "0.5 0.5 0.5\tso so",
]
MARKED: list[dict[str, Any]] = [
    {
        "x": ["a", "golden", "head", ",", "musty"],
        "y": [0.9, 0.2, 0.5],
        "0": [[1, 3]],
        "1": [[4, 5]],
    },
    {"x": ["dull"], "y": [0.2, 0.5, 0.5], "0": [[0, 1]], "1": []},
    {"x": ["no", "ranges"], "y": [0.2, 0.9, 0.9], "0": [], "1": [[0, 1], [1, 2]]},
]
HOTEL = "task\tlabel\ttext"


def reviews(changed: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Reviews of beers and hotels as published, with other files; None is a missing one."""
    found: dict[str, Any] = {
        "beer/annotations.json": "\n".join(json.dumps({**each, "2": []}) for each in MARKED) + "\n"
    }
    for k in range(3):
        rated = gzip.compress(("\n".join(RATED) + "\n").encode())
        found[f"beer/reviews.aspect{k}.train.txt.gz"] = rated
        found[f"beer/reviews.aspect{k}.heldout.txt"] = RATED[0] + "\n"
    for name in ("Location", "Service", "Cleanliness"):
        own = f"hotel_{name}"
        rows = [f"{own}\t1\tgood {name.lower()}", f"{own}\t0\tbad !", f"{own}\t1\tas good"]
        for ending in ("train", "dev"):
            found[f"hotel/{own}.{ending}"] = "\n".join([HOTEL, *rows]) + "\n"
        marked = f"{HOTEL}\trationale\n{own}\t0\tbad {name.lower()} too\t1 1 0\n"
        found[f"hotel/annotations/{own}.train"] = marked
    return {name: content for name, content in {**found, **changed}.items() if content is not None}


def frame(column: str = "", value: Any = None, **columns: Any) -> pd.DataFrame:
    """Twenty patients, with another value in row 8 of a column, or with other columns."""
    found = pd.DataFrame(
        {
            "age": np.arange(20),
            "dose": np.arange(20) / 8,
            "sick": ["yes", "no"] * 10,
            "site": ["north"] * 5 + ["south"] * 15,
            "fit": [True, False] * 10,
        }
    ).assign(**columns)
    if column:
        values = found[column].astype(object)
        values[7] = value
        found[column] = values
    return found


def saved(save: Callable[..., None], *arrays: Any, **named: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, *arrays, **named)
    return stream.getvalue()


def zipped(*members: str) -> bytes:
    """An archive with the same vectors in several files."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for member in members:
            archive.writestr(member, VECTORS)
    return stream.getvalue()


PNG = saved(partial(Image.new("RGB", (200, 200), (1, 2, 3)).save, format="png"))

# Names of refusals.yaml: calls in Python, and folders of runs

SMALL = small_experiment().model_dump(mode="json")


class Redefined(own_objects.Plain):
    __module__ = "own_objects"
    __qualname__ = "Plain"


def begin(**sections: Any) -> None:
    """Prepare a small experiment."""
    prepare(small_experiment(**sections))


def made(**sections: Any) -> Experiment:
    return Experiment.from_dict({**SMALL, **sections})


def arrays(**changed: Any) -> Dataset:
    return dataclasses.replace(own_objects.data(), **changed)


def concepts(**changed: Any) -> Dataset:
    """With a concept, fever."""
    known = {"columns": {"fever": np.zeros(48)}, "test_columns": {"fever": np.zeros(12)}}
    return arrays(**{**known, "concepts": ("fever",), **changed})


def extended(sections: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Sections with other keys; one that names another component is replaced."""
    found = dict(sections)
    for key, change in changes.items():
        names = "kind" if key == "partition" else "name"
        extends = isinstance(change, dict) and names not in change
        found[key] = {**found.get(key, {}), **change} if extends else change
    return found


def reads(data: dict[str, Any], model: dict[str, Any]) -> None:
    """Prepare a run on documents of a model of transformers, with other keys of both sections."""
    documents = {"name": "planted_reviews", "reviews": 4, "test_reviews": 2, "length": 30}
    checkpoint = {"checkpoint": "package:checkpoints/bert", "init": "random"}
    sections = {
        "data": {**documents, "tokenizer": {"kind": "wordpiece", "size": 300}, **data},
        "model": {"name": "hf", "task": "sequence_classification", **checkpoint, **model},
    }
    prepare(made(partition={"kind": "iid", "clients": 2}, **sections))


def stream(counts: dict[str, int], **fields: Any) -> None:
    """Deal out a stream of tasks of so many examples of each class; those tested are not 0."""
    y = np.repeat(np.arange(len(counts)), [*counts.values()])
    tested = np.unique(y)
    x, test_x = np.zeros((len(y), 1)), np.zeros((len(tested), 1))
    kind = "own_tasks" if "tasks" in fields else "tasks"
    partitions.parse({"kind": kind, **fields}).deal(Dataset(x, y, test_x, tested, (*counts,)), 0)


# What two shadow models say of two examples, and who has trained on which.
SHADOWS, INSIDE = np.array([[5.0, 0.0], [4.0, 7.0]]), np.array([[True, False], [False, True]])
TOKENS = torch.ones(2, 4, dtype=torch.int64)


def pixels(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def inverted(gradient: list[torch.Tensor], shape: tuple[int, ...] = (1, 8, 8)) -> None:
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    inversion.invert_gradient(network, gradient, torch.tensor([1]), shape, 0.0, 1.0, 1, 0)


def drawn(originals: torch.Tensor, shared: torch.Tensor, labels: list[str]) -> None:
    inversion.draw_reconstructions({"": (shared, originals)}, originals, labels, Path("a.png"))


def nodes(*gpus: float, cpus: float = 16) -> list[Node]:
    return [Node(f"node{i}", cpus, g, 64e9) for i, g in enumerate(gpus)]


def plan(cluster: list[Node], **settings: Any) -> int:
    known = {key: settings.pop(key) for key in ("actor_bytes",) if key in settings}
    return plan_actors(EngineSettings(**settings), cluster, **known)


def trials(cluster: list[Node], concurrent: Any = "auto", **settings: Any) -> object:
    """Place twelve trials; the first node is this one."""
    return allocate(EngineSettings(**settings), cluster, cluster[0], 12, concurrent)


def change_experiment(path: Path, before: str, after: str) -> None:
    file = path / "experiment.yaml"
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after))


def write_manifests(path: Path, content: str | None) -> None:
    """Replace the manifest and its copy; None removes them."""
    for name in NAMES:
        (path / name).unlink()
        if content is not None:
            (path / name).write_text(content)


def link(path: Path, name: str, to: str = "") -> None:
    """Put a link to elsewhere where a file or folder of a run is."""
    change_manifest(path, status="failed")
    write(path.parent / "elsewhere" / "mine.txt", "precious")
    there = path / name
    there.parent.mkdir(exist_ok=True)
    if there.is_dir():
        shutil.rmtree(there)
    there.unlink(missing_ok=True)
    there.symlink_to(path.parent / "elsewhere" / to)


def to_itself(path: Path) -> None:
    path.symlink_to(path)


def pipe(path: Path) -> None:
    """Put a pipe into a run, from which nobody should wait to read."""
    change_manifest(path, status="failed")
    os.mkfifo(path / "weights" / "round-1.safetensors")


def evaluated(expression: str, **known: Any) -> Any:
    return eval(expression, {**globals(), **known})


def written() -> Iterator[Row]:
    """The rows of refusals.yaml."""
    table = from_yaml(Path(__file__).with_suffix(".yaml").read_text())
    for number, line in enumerate(EXPERIMENT.splitlines(), 1):
        section = line.partition(":")[0]
        for value, said in table["values"].get(section, {}).items():
            place = f"small.yaml:{number}: {section}"
            yield Row("run small.yaml", place + said, {section: f"{section}: {value}"})
        for other, said in table["lines"].get(section, {}).items():
            yield Row("run small.yaml", said, {section: other})
    for command, lines in table["sweeps"].items():
        name, _, words = command.partition(" ")
        for line, said in lines.items():
            yield Row(f"{name} small.yaml {words}", said, {"engine": line})
    for override, said in table["overrides"].items():
        words = f"run small.yaml {shlex.quote(override)}"
        yield Row(words, f"override {override}: {said}")
    for words, said in table["words"].items():
        yield Row(f"run small.yaml {words}", said)
    for words, said in table["commands"].items():
        yield Row(words, said)
    for name, contents in table["files"].items():
        for content, said in contents.items():
            end = ":" if re.match(r"\d+: ", said) else ": "  # a line or a fault
            yield in_file(name, evaluated(content), f"{end}{said}")
    for section, contents in table["data"].items():
        for content, said in contents.items():
            yield Row(partial(load, **from_yaml(section)), said, files=evaluated(content))
    for data, models in table["pairs"].items():
        for model, said in models.items():
            yield Row(partial(reads, from_yaml(data), from_yaml(model)), said)
    for sections, explainers in table["explainers"].items():
        for explainer, said in explainers.items():
            explain = {"explainers": [from_yaml(explainer)], "inputs": 2}
            told = f"explain.explainers: {said}"
            yield Row(partial(begin, **from_yaml(sections), explain=explain), told)
    for sections, lines in table["explained"].items():
        for keys, said in lines.items():
            explain = {"explainers": ["random"], "inputs": 3, **from_yaml(keys)}
            yield Row(partial(begin, **from_yaml(sections), explain=explain), said)
    for sections, changes in table["experiments"].items():
        for change, said in changes.items():
            base = from_yaml(sections.replace("TESTS", str(Path(__file__).parent)))
            given = extended(base, from_yaml(change))
            yield Row(partial(begin, **given), said)
    for call, said in table["python"].items():
        yield Row(partial(evaluated, call), said)
    for module, calls in table["missing"].items():
        for call, said in calls.items():
            yield Row(partial(evaluated, call), said, missing=module)
    for words, said in table["finished"].items():
        yield Row(words, said, change=lambda run: None)
    for change, said in table["runs"].items():
        changes = partial(lambda change, run: evaluated(change, run=run), change)
        yield Row("resume run", f"HERE/run{said}", change=changes)


def in_file(name: str, content: Any, said: str) -> Row:
    """What is said of a file of `READERS`, after its name."""
    return Row(partial(READERS[name], Path(name)), f"{name}{said}", files={name: content})


# What would be long in refusals.yaml


class Harmful:
    """Makes a folder when it is unpickled by a reader that lets it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("mark",)


def flipped(content: bytes) -> bytes:
    """With another bit in the middle."""
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 0x10]) + content[half + 1 :]


GZIP, XZ = gzip.compress(idx(IMAGES)), lzma.compress(idx(IMAGES))
BATCH = pickle.dumps({"data": FLAT, "labels": [1, 2, 3, 4]}, 4)
NPY, ARCHIVE = saved(np.save, X), saved(np.savez, x=X, y=Y)
PAIR = partial(files.read_idx_images, Path("images"), Path("labels"))
FILES = [
    *(
        in_file(
            "test_batch",
            pickle.dumps({"data": FLAT, "labels": Harmful()}, protocol),
            ": cannot be read: ... not allowed",
        )
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1)
    ),
    *(
        Row(partial(PAIR, classes), said, files={"images": idx(x), "labels": idx(y)})
        for classes, x, y, said in (
            (10, IMAGES[:, :27], LABELS, "images: images of 27×28 pixels, expected 28×28"),
            (10, IMAGES[:0], LABELS[:0], "images: contains no images"),
            (10, IMAGES, LABELS[:3], "labels: 3 labels for the 4 images of images"),
            (10, IMAGES, LABELS + 1, "labels: record 1 has label 10, expected 0 to 9"),
            (10, IMAGES, IMAGES, "labels: IDX magic number 2051, expected 2049 (unsigned ..."),
            (10, LABELS, LABELS, "images: 12 bytes, shorter than its IDX header of 16"),
        )
    ),
    Row(
        partial(PAIR, 26, first=1),
        "labels: record 1 has label 0, expected 1 to 26",
        files={"images": idx(IMAGES), "labels": idx(np.array([1, 0, 2, 3], np.uint8))},
    ),
    Row(
        "run small.yaml",
        "data/mnist/train-labels-idx1-ubyte: record 1 has label 10, expected 0 to 9",
        {"data": "data: {name: mnist}"},
        mnist(LABELS + 1),
    ),
]

LONG = f"{'a' * 300}/{'b' * 5000}"
AXES = {f"train.{key}": [*range(1, 201)] for key in ("rounds", "local_epochs", "batch_size")}
COMMANDS = [
    *(
        Row(f"{command} small.yaml", f"small.yaml:{said}", {"engine": line})
        for command, line, said in (
            # Rich reads ":100:" as the name of a pictogram.
            ("run", "\n" * 93 + "engin: {}", "100: engin: unknown key; did you mean 'engine'?"),
            # It would take seconds to read.
            ("run", "#" * 600_000, " is 0.6 MB long, too long for an experiment"),
            (
                *("grid", f"grid: {json.dumps({'axes': AXES})}"),
                "7: grid.axes: 8,000,000 cells, ...; the maximum is 100,000",
            ),
        )
    ),
    Row(
        "run small.yaml",
        "small.yaml:1: name: String should have at most 100 characters",
        {"name": f"name: {'a' * 300}"},
    ),
    Row(
        "run small.yaml",
        "pipe.npz: is a pipe, not a file",
        {"data": "data: {name: npz, path: pipe.npz}"},
        {"pipe.npz": os.mkfifo},
    ),
    Row(
        "run small.yaml",
        "HERE/runs/small/...: cannot be made: ...Not a directory...",
        files={"runs": "a file where the folder should be"},
    ),
    Row(
        "run small.yaml model.name=exits:net",
        "override ...: model.name: model 'exits:net' cannot be imported: it exits (0)",
        files={"exits.py": "import sys\nsys.exit(0)\n"},
    ),
    *(
        Row(f"{words} {LONG}", said)
        for words, said in (
            ("run", "aaa...b: cannot be read: File name too long"),
            ("grid", "aaa...b: cannot be read: File name too long"),
            ("run small.yaml --out", "aaa...b: the name is too long"),
        )
    ),
    *(
        Row(f"{command} {where}", f"HERE/{said}", files=files, change=change)
        for command in ("report", "verify", "pack", "resume", "explain")
        for where, said, files, change in (
            (LONG, "...b: there is no such folder", {}, None),
            ("link", "link: there is no such folder", {"link": to_itself}, None),
            ("run", "run/weights: is a symbolic link, ...", {}, partial(link, name="weights")),
            ("run", "run/weights/round-1.safetensors: is neither a file nor a ...", {}, pipe),
        )
    ),
    *(
        Row(
            "run small.yaml",
            f"...:{line}: {section}.name: {section} '{module}:It' cannot be imported: {said}",
            {section: f"{section}: {{name: {module}:It}}"},
            {f"{module}.py": source},
        )
        for section, line in (("model", 4), ("method", 5))
        for module, source, said in (
            ("no_python", "def it(:\n", "invalid syntax (no_python.py, line 1)"),
            ("no_name", "nothing_here\n", "name 'nothing_here' is not defined"),
        )
    ),
]

ROWS = [*written(), *FILES, *COMMANDS]
