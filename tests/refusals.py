"""What is refused: the rows of refusals.yaml, and those that take more than words."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import own_objects
import pandas as pd
import yaml

from experiments import change_manifest, small_experiment
from fedsim import Dataset, Experiment, run
from fedsim.cluster.placement import Node, plan_actors
from fedsim.experiment import plain
from fedsim.federation import EngineSettings
from fedsim.results.manifest import NAMES

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
    """

    ask: str | Callable[[], object]
    said: str
    lines: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)
    change: Callable[[Path], object] | None = None


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
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        path.write_text(content)
    elif isinstance(content, pd.DataFrame):
        content.to_parquet(path) if path.suffix == ".parquet" else content.to_csv(
            path, index=False
        )
    elif path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".npz":
        np.savez(path, **content)
    elif path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        path.write_bytes(pickle.dumps(content, 4))


def written() -> Iterator[Row]:
    """The rows of refusals.yaml."""
    table = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    for section, texts in table["file"].items():
        for text, said in texts.items():
            yield Row("run small.yaml", said, {section: text})
    for words, said in table["overrides"].items():
        yield Row(f"run small.yaml {words}", said)
    for words, said in table["commands"].items():
        yield Row(words, said)


# experiments


LONG = f"{'a' * 300}/{'b' * 5000}"
AXES = {f"train.{key}": [*range(1, 201)] for key in ("rounds", "local_epochs", "batch_size")}
FOLDER_COMMANDS = ("report", "verify", "pack", "resume", "explain")
GRID = "engine: {kind: local}\ngrid: {axes: {seed: [1, 2]}}"
SEARCH = "engine: {kind: local}\nsearch: {space: {seed: [1, 2]}}"
EXPERIMENTS = [
    Row(
        "run small.yaml",
        "small.yaml:1: name: String should have at most 100 characters",
        {"name": f"name: {'a' * 300}"},
    ),
    Row(  # rich reads ":100:" as the name of a pictogram
        "run small.yaml",
        "small.yaml:100: engin: unknown key; did you mean 'engine'?",
        {"engine": "\n" * 93 + "engin: {kind: local}"},
    ),
    Row(
        "run small.yaml",
        "small.yaml: is 0.6 MB long, too long for an experiment",  # it would take seconds to read
        {"engine": "#" * 600_000},
    ),
    Row(
        "tune small.yaml",
        "small.yaml: has no search section; run it with: fedsim grid small.yaml",
        {"engine": GRID},
    ),
    Row(
        "grid small.yaml",
        "small.yaml: has no grid section; run it with: fedsim tune small.yaml",
        {"engine": SEARCH},
    ),
    Row(
        "grid small.yaml",
        "small.yaml:8: grid.axes: 8,000,000 cells, ...; the maximum is 100,000",
        {"engine": f"engine: {{kind: local}}\ngrid: {json.dumps({'axes': AXES})}"},
    ),
    *(
        Row("run other.yaml", f"other.yaml: {said}", files={"other.yaml": content})
        for content, said in [
            ("data: [", "not YAML: line 2, column 1: did not find expected node content"),
            ("- data\n- model\n", "must be a mapping of sections, not a list or a word"),
            ("data: 1\ndata: 2\n", "not YAML: line 2, column 1: found duplicate key data"),
            (b"\xff\xfe\x00", "cannot be read: 'utf-8' codec can't decode byte 0xff ..."),
        ]
    ),
    Row(
        "run other.yaml",
        "\n".join(
            f"other.yaml: {key}: missing" for key in ("data", "partition", "model", "method")
        ),
        files={"other.yaml": ""},
    ),
    Row("run pipe.yaml", "pipe.yaml: is not a regular file", files={"pipe.yaml": os.mkfifo}),
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
            *((command, "HERE/...b: there is no such folder") for command in FOLDER_COMMANDS),
            ("run", "aaa...b: cannot be read: File name too long"),
            ("grid", "aaa...b: cannot be read: File name too long"),
            ("run small.yaml --out", "aaa...b: the name is too long"),
        )
    ),
    *(
        Row(
            f"{command} link",
            "HERE/link: there is no such folder",
            files={"link": lambda path: path.symlink_to(path)},
        )
        for command in FOLDER_COMMANDS
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

# Python


SMALL = small_experiment().model_dump(mode="json")
NO_MODULE = (
    "is defined within a function, or is a lambda: no other process can import it, nor can this "
    "run's folder be loaded; define it at the top of a module"
)


class Redefined(own_objects.Plain):
    __module__ = "own_objects"
    __qualname__ = "Plain"


def in_python(*rows: tuple[Any, str], section: str) -> list[Row]:
    """What is said of an experiment with that object as a section."""
    return [
        Row(partial(Experiment.from_dict, {**SMALL, section: given}), f"experiment: {said}")
        for given, said in rows
    ]


def arrays(**changed: Any) -> Dataset:
    return dataclasses.replace(own_objects.data(), **changed)


OBJECTS = [
    *in_python(
        (lambda shape, outputs: None, f"model: model '<lambda>' {NO_MODULE}"),
        (own_objects.inner(), f"model: model 'inner.<locals>.within' {NO_MODULE}"),
        (own_objects.Bare(), "model: each run builds its network from its seed; pass the ..."),
        (own_objects.Bare, "model: own_objects:Bare cannot be called as f(shape, outputs): ..."),
        (partial(own_objects.net, width=3), "model.width: own_objects:net takes no 'width'"),
        (partial(own_objects.net, (1,)), "model: model net: a partial may have only keyword ..."),
        section="model",
    ),
    *in_python(
        (partial(own_objects.data, sample=3), "data.sample: own_objects:data takes no ..."),
        section="data",
    ),
    *in_python(
        (object(), "method: must be a section of keys"),
        (own_objects.Net, "method: must be a section of keys"),
        (Redefined(), "method: method 'own_objects:Plain' was redefined in its module; ..."),
        section="method",
    ),
    *in_python(
        ({"rounds": 0}, "train.rounds: must be greater than or equal to 1, not 0"), section="train"
    ),
    *in_python(
        (
            {"metrics": [lambda outputs, targets: 0.0]},
            f"evaluate.metrics: metric '<lambda>' {NO_MODULE}",
        ),
        section="evaluate",
    ),
    Row(
        lambda: plain({"grid": {"axes": {"model": [own_objects.inner()]}}}),
        f"model: model 'inner.<locals>.within' {NO_MODULE}",
    ),
    Row(
        lambda: run({**yaml.safe_load(EXPERIMENT), "grid": {"axes": {"seed": [0, 1]}}}),
        "experiment: this dict has a grid of experiments; run it with: fedsim.grid(...)",
    ),
    Row(
        lambda: Experiment.load("small.yaml", {"train.round": 3}),
        "override train.round=3: train.round: unknown key; did you mean 'rounds'?",
    ),
    *(
        Row(partial(Experiment.from_dict, {**SMALL, "data": data}), f"data: {said}")
        for data, said in (
            (arrays(y=np.zeros(5, int)), "x of shape (48, 5) and y of (5,) do not go ..."),
            (arrays(y=np.int64(3)), "x of shape (48, 5) and y of () do not go together; they ..."),
            (arrays(y=np.full(48, 2)), "y must be class indices from 0 to 1"),
            (arrays(test_y=np.zeros(12)), "test_y must be class indices from 0 to 1"),
            (arrays(y=np.zeros((48, 1), int)), "y must be (N,) class indices, not of shape ..."),
            (arrays(test_x=np.zeros((12, 4))), "inputs in test_x are of shape (4,), in x of (5,)"),
            (arrays(x=np.full((48, 5), np.nan)), "x has NaN or infinite values"),
            (arrays(x=np.full((48, 5), "a")), "x must hold numbers, not <U1"),
            (
                arrays(test_x=np.zeros((0, 5)), test_y=np.zeros(0, int)),
                "test_x and test_y are empty",
            ),
        )
    ),
]

# what fits a cluster


def nodes(*gpus: float, cpus: float = 16) -> list[Node]:
    return [Node(f"node{i}", cpus, g, 64e9) for i, g in enumerate(gpus)]


def plan(settings: Mapping[str, Any], cluster: list[Node], **known: Any) -> Any:
    return partial(plan_actors, EngineSettings.model_validate(settings), cluster, **known)


LAPTOP = [Node("laptop", cpus=16, gpus=0, memory=10e9)]
NO_NODE = "no node can hold a client actor of"
CLUSTERS = [
    Row(
        plan({"gpus_per_actor": 0.25, "actors": 5}, nodes(1)),
        "engine.actors=5: only 4 client actor(s) of 1 CPU(s) and 0.25 GPU(s) fit (node0: 16 CPUs, "
        "1 GPUs, 64 GB); set engine.actors=4 or engine.actors=auto",
    ),
    Row(
        plan({"gpus_per_actor": 2}, nodes(1, 1)),
        f"{NO_NODE} 1 CPU(s) and 2 GPU(s) (node0: 16 CPUs, 1 GPUs, 64 GB; node1: 16 CPUs, 1 GPUs, "
        "64 GB); lower engine.cpus_per_actor or engine.gpus_per_actor, or set "
        "engine.gpus_per_actor=0",
    ),
    Row(plan({"gpus_per_actor": 0.5}, nodes(0)), f"{NO_NODE} 1 CPU(s) and 0.5 GPU(s) (node0: ..."),
    Row(plan({"cpus_per_actor": 17}, nodes(0)), f"{NO_NODE} 17 CPU(s) (node0: ..."),
    Row(
        plan({"gpus_per_actor": 1.5}, nodes(4)),
        "engine.gpus_per_actor=1.5: must be a whole number if above 1",
    ),
    Row(plan({}, []), f"{NO_NODE} 1 CPU(s) ..."),
    Row(
        plan({}, [Node("head", cpus=0, gpus=0, memory=8e9)]),
        f"{NO_NODE} 1 CPU(s) (head: 0 CPUs, 0 GPUs, 8 GB); lower ...",
    ),
    Row(
        plan({"actors": 500}, [Node("laptop", cpus=1000, gpus=0, memory=3e9)]),
        "engine.actors=500: only 10 client actor(s) ... 0 GPUs, 3 GB); set engine.actors=10 ...",
    ),
    Row(
        plan({"actors": 4}, LAPTOP, actor_bytes=3e9),
        "engine.actors=4: only 3 client actor(s) of 1 CPU(s) and 3.0 GB fit (laptop: 16 CPUs, 0 "
        "GPUs, 10 GB); set engine.actors=3 or engine.actors=auto",
    ),
    Row(
        plan({}, LAPTOP, actor_bytes=11e9),
        "no node has enough memory for a client actor of 1 CPU(s) and 11.0 GB (laptop: 16 CPUs, 0 "
        "GPUs, 10 GB); use a smaller model or a smaller engine.clients_per_step",
    ),
]

# folders of runs


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


def link(path: Path, name: str, to: str) -> None:
    """Put a link where a file or folder of a run is."""
    change_manifest(path, status="failed")
    there = path / name
    there.parent.mkdir(exist_ok=True)
    shutil.rmtree(there) if there.is_dir() else there.unlink(missing_ok=True)
    there.symlink_to(path.parent / "elsewhere" / to)


def pipe(path: Path) -> None:
    change_manifest(path, status="failed")
    os.mkfifo(path / "weights" / "round-1.safetensors")


EDITED = (
    ": its experiment.yaml was edited after the run started (or is damaged; remove it to have it "
    "put back); undo that, or start a new run with it"
)
NO_LINKS = "is a symbolic link, which no folder of fedsim's has; remove it"
LINKS = {
    **dict.fromkeys(("weights", "weights/clients", "rounds.parts"), ""),
    **dict.fromkeys(
        ("log.txt", "explanations/picture.png", "weights/final.safetensors"),
        "precious.safetensors",
    ),
    **dict.fromkeys((".manifest.json.part", ".report.html.part"), "precious.safetensors"),
}
RUNS = [
    *(
        Row("resume run", f"HERE/run{said}", change=change)
        for change, said in (
            (lambda path: None, ": the run is finished; there is nothing to resume"),
            (
                lambda path: change_manifest(path, format=99),
                ": a run folder of format 99; this version of fedsim reads format 2",
            ),
            (lambda path: change_experiment(path, "rounds: 1", "rounds: 2"), EDITED),
            (lambda path: change_experiment(path, "rounds: 1", "rounds: none"), EDITED),
            (
                lambda path: change_manifest(path, status="failed", partition_hash="another"),
                ": the data changed since the run started",
            ),
        )
    ),
    *(
        Row("resume run", f"HERE/run{said}", change=partial(write_manifests, content=content))
        for content, said in (
            (
                None,
                ": not the folder of a run, a grid or a search (no readable manifest.json in it)",
            ),
            ("[]", "/manifest.json: is damaged: it is not a mapping"),
            (
                "{",
                "/manifest.json: is damaged: Expecting property name enclosed in double quotes...",
            ),
            ("[" * 100_000, "/manifest.json: is damaged: too many levels"),
            ('{"format": 2}', "/manifest.json: is damaged: status: Field required"),
            ('{"format": "1"}', "/manifest.json: is damaged: format: Input should be a valid ..."),
        )
    ),
    *(
        Row(
            f"{command} run",
            f"HERE/run/{name}: {NO_LINKS}",
            files={"elsewhere/precious.safetensors": "mine"},
            change=partial(link, name=name, to=to),
        )
        for command, links in (
            ("resume", LINKS),
            *((command, {"weights": ""}) for command in ("report", "explain", "verify")),
        )
        for name, to in links.items()
    ),
    *(  # nobody waits for what may come through a pipe
        Row(
            f"{command} run",
            "HERE/run/weights/round-1.safetensors: is neither a file nor a folder, and fedsim "
            "makes nothing else; remove it",
            change=pipe,
        )
        for command in ("resume", "report", "explain", "verify")
    ),
]
ROWS = [*written(), *EXPERIMENTS, *OBJECTS, *CLUSTERS, *RUNS]
