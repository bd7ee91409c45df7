"""The inputs of bad_inputs.py, kind by kind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import random
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import bad_code
import numpy as np
import pandas as pd
import yaml
from pydantic import BaseModel

import fedsim
from fedsim.data import datasets, partitions
from fedsim.experiment import Experiment
from fedsim.explain.explainers.attribution import attributions
from fedsim.methods import methods
from fedsim.models import models
from fedsim.objectives import objectives
from fedsim.results import manifest as manifests
from fedsim.sweep.grid import GridSettings
from fedsim.sweep.search import SearchSettings

Tree = dict[str, Any]
Make = Callable[[Path], object]
Content = str | bytes | Make

SMALL: Tree = {
    "name": "small",
    "data": {"name": "synthetic", "samples": 60, "test_samples": 10, "shape": [4], "classes": 3},
    "partition": {"kind": "iid", "clients": 4},
    "model": {"name": "mlp", "hidden": [4]},
    "method": {"name": "fedavg"},
    "train": {"rounds": 1},
    "engine": {"kind": "local"},
}


@dataclass(frozen=True)
class Case:
    """A bad input.

    Attributes:
        kind: of input, for the table.
        label: what is wrong with it.
        words: of the command.
        files: that it needs, by path: their content, or a function that makes one.
        wrong: it cannot be right, so that exit code 0 is a failure.
        endless: code of the user's goes on for ever; Ctrl-C must end it.
        plain: given by a user whom modes of files hold for, as they do not for root.
    """

    kind: str
    label: str
    words: Sequence[str]
    files: Mapping[str, Content] = field(default_factory=dict)
    wrong: bool = True
    endless: bool = False
    plain: bool = False


def changed(**sections: Any) -> str:
    """The small experiment with other sections, as YAML."""
    return yaml.safe_dump({**SMALL, **sections}, sort_keys=False, allow_unicode=True)


def split(text: str) -> list[str]:
    return text.split()


def of_file(kind: str, label: str, content: Content, command: str = "run", **more: Any) -> Case:
    return Case(kind, label, [command, "bad.yaml"], {"bad.yaml": content}, **more)


# what can stand in a file's place


def fifo(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def unreadable(path: Path) -> None:
    path.write_bytes(b"x")
    path.chmod(0)


def link(to: str) -> Make:
    return lambda path: path.symlink_to(to or path.name)


IN_PLACE: dict[str, Content] = {
    "empty": b"",
    "a number": "3\n",
    "binary": bytes(range(256)) * 10,
    "zeros": bytes(5000),
    "noise": random.Random(0).randbytes(5000),
    "a pickle": pickle.dumps({"a": 1}),
    "a pipe": fifo,
    "a folder": a_folder,
    "unreadable": unreadable,
    "a link to nothing": link("nowhere"),
    "a link to itself": link(""),
    "/dev/zero": link("/dev/zero"),
}
PATHS = [
    "nowhere",
    "",
    ".",
    "/",
    "\0",
    "x" * 5000,
    "a\ud800",
    "~nobody/x",
    "/dev/null",
    "/proc/self/mem",
]


# fields of sections

STRANGE = [
    *({"a": 1}, [[1]], [], True, None, "", "\0", "\x1b[31mred", "[/bold]", "a" * 3000, "../.."),
    *(math.nan, math.inf, -math.inf, -1, 0, 1.5, 1e300, 10**10, 10**30, -(2**63)),
]


def leaves(annotation: Any) -> Iterator[type]:
    """The types of values that a field takes."""
    origin = get_origin(annotation)
    if isinstance(origin, type) and issubclass(origin, list | tuple | dict):
        yield origin
    elif args := get_args(annotation):
        literal = str(annotation).startswith("typing.Literal")
        for part in args:
            yield from ([type(part)] if literal else leaves(part))
    elif isinstance(annotation, type):
        yield annotation


def certainly_wrong(annotation: Any, value: Any) -> bool:
    """Whether no field of this type takes the value."""
    types = set(leaves(annotation))
    if not types or object in types:
        return False
    if isinstance(value, bool):
        return bool not in types
    if isinstance(value, int | float):
        strange = not abs(value) < 1e38
        return strange or not types & {int, float} or (value % 1 != 0 and float not in types)
    if isinstance(value, str):
        return not types & {str, Path}
    if isinstance(value, dict):
        return not any(t is dict or issubclass(t, BaseModel) for t in types)
    if isinstance(value, list):
        return not types & {list, tuple}
    return type(None) not in types


def fields(count: int) -> Iterator[Case]:
    """So many strange values for each field of each section and component."""
    sections: list[tuple[str, Tree, type[BaseModel]]] = []
    for name, about in Experiment.model_fields.items():
        for part in leaves(about.annotation):
            if issubclass(part, BaseModel):
                sections.append((name, SMALL.get(name, {}), part))
    for section, registry in {
        **{"data": datasets, "partition": partitions, "model": models},
        **{"method": methods, "objective": objectives, "attribution": attributions},
    }.items():
        for name, component in registry.items():  # type: ignore[attr-defined]
            named = {registry.key: name}  # type: ignore[attr-defined]
            base = SMALL.get(section, {})
            sections.append((section, base if named.items() <= base.items() else named, component))
    for section, base, schema in sections:
        for key, about in schema.model_fields.items():
            for value in random.sample(STRANGE, count):
                content = {section: {**base, key: value}}
                if section == "attribution":
                    content = {"method": {"name": "fedxds", **content}}
                name = base.get("name", base.get("kind", ""))
                label = f"{section} {name}: {key}={value!r:.30}"
                wrong = certainly_wrong(about.annotation, value)
                yield of_file("fields", label, changed(**content), wrong=wrong)
    for value in STRANGE:
        wrong = not isinstance(value, str)
        yield of_file("fields", f"name={value!r:.30}", changed(name=value), wrong=wrong)
        wrong = value not in (0, 10**10)
        yield of_file("fields", f"seed={value!r:.30}", changed(seed=value), wrong=wrong)


# grids and searches

LR = "train.optimizer.lr"
GOOD_GRID: Tree = {"axes": {LR: [0.1]}}
GOOD_SEARCH: Tree = {"space": {LR: [0.1]}, "objectives": {"accuracy": "max"}}
SIZES = ("rounds", "batch_size", "local_epochs")
GRIDS: dict[str, Tree] = {
    "no axes": {"axes": {}},
    "an axis of a key that is none": {"axes": {"train.lrr": [1, 2]}},
    "an axis without a section": {"axes": {"lr": [1, 2]}},
    "brackets": {"axes": {"train[0].lr": [1]}},
    "an empty key": {"axes": {"": [1]}},
    "dots": {"axes": {"...": [1]}},
    "control characters": {"axes": {"train.\x1b[31m": [1]}},
    "values of all types": {"axes": {LR: [0.1, "x", None, [1], {"a": 1}]}},
    "NaN": {"axes": {LR: [math.nan]}},
    "a value twice": {"axes": {LR: [0.1, 0.1]}},
    "too many cells": {"axes": {f"train.{key}": [*range(1, 300)] for key in SIZES}},
    "a variant that sets what is not there": {"axes": {"m": {"a": {}, "b": {"x.y": 1}}}},
    "a variant that is a list": {"axes": {"m": {"a": [1]}}},
    "a seed twice": {"seeds": [1, 1]},
    "negative seeds": {"seeds": [-1]},
    "words as seeds": {"seeds": ["one"]},
    "a baseline that is none": {"baseline": {LR: 7}},
    "a baseline of another axis": {"baseline": {"x": 7}},
    "all excluded": {"exclude": [{LR: 0.1}]},
    "a target above 1": {"target": 2},
    "axes that contain each other": {"axes": {"train": [{"rounds": 1}], LR: [0.1]}},
    "a number for a section": {"axes": {"train": [3]}},
}
FLOAT = {"type": "float", "low": 0.1, "high": 1}
SEARCHES: dict[str, Tree] = {
    "no space": {"space": {}},
    "a range upside down": {"space": {LR: {**FLOAT, "high": 0}}},
    "a log range from 0": {"space": {LR: {**FLOAT, "low": 0, "log": True}}},
    "a bound that is NaN": {"space": {LR: {**FLOAT, "low": math.nan}}},
    "a range of words": {"space": {LR: {**FLOAT, "type": "word"}}},
    "a huge range": {"space": {LR: {**FLOAT, "low": 1e307, "high": 1e308}}},
    "a huge int range": {"space": {"train.rounds": {"type": "int", "low": 1, "high": 10**30}}},
    "choices that are lists": {"space": {LR: [[1], {"a": 2}]}},
    "no choices": {"space": {LR: []}},
    "a key that is none": {"space": {"train.lrr": [1]}},
    "brackets": {"space": {"train[lr]": [1]}},
    "no objective": {"objectives": {}},
    "an objective neither way": {"objectives": {"accuracy": "up"}},
    "ASHA for two": {"objectives": {"accuracy": "max", "loss": "min"}, "asha": {}},
    "ASHA of strange numbers": {"asha": {"grace": -1, "reduction": 1}},
    "no trials": {"trials": 0},
    "an unknown sampler": {"sampler": "best"},
    "the engine": {"space": {"engine.actors": [1]}},
}


def sweeps() -> Iterator[Case]:
    kind = "grids and searches"
    for label, grid in GRIDS.items():
        yield of_file(kind, f"grid: {label}", changed(grid={**GOOD_GRID, **grid}), "grid")
    for label, search in SEARCHES.items():
        yield of_file(kind, f"search: {label}", changed(search={**GOOD_SEARCH, **search}), "tune")
    for section, good, schema, command in (
        ("grid", GOOD_GRID, GridSettings, "grid"),
        ("search", GOOD_SEARCH, SearchSettings, "tune"),
    ):
        for key, about in schema.model_fields.items():
            for value in STRANGE:
                if certainly_wrong(about.annotation, value):
                    content = changed(**{section: {**good, key: value}})
                    yield of_file(kind, f"{section}.{key}={value!r:.30}", content, command)
    for command, other in {"run": "grid", "grid": "search", "tune": "grid"}.items():
        yield of_file(kind, f"{command} of a {other}", changed(**{other: {}}), command)
    for path in ("small.yaml", "nowhere"):
        words = ["resume", path]
        yield Case(kind, " ".join(words), words, {"small.yaml": changed()})


# overrides

OVERRIDES = [
    *split("train = =1 train.rounds train.rounds= .=1 ..=1 train.=1 .rounds=1 train[rounds]=1"),
    *split("train.rounds[0]=1 [a]=1 {a}=1 train.rounds=[ train.rounds={ train.rounds=} a.b=:: "),
    *split("train.rounds=!!python/name:os.system train.rounds=*a train.rounds=nan train=3"),
    *split("train.rounds=.inf train.rounds=1:30 train.rounds=0x_ train.rounds=${oc.env:HOME}"),
    *split("train.rounds=${train.rounds} train.rounds=??? name=${ train=null data=[] model=''"),
    *split("engine.kind=ray.local data.name=synthetic.x partition.clients=1e10 тrain.rounds=1"),
    *split("data.samples=1e10 data.samples=10000000000 data.shape=[100000,100000] 💥=1 -1"),
    *split("model.hidden=[100000000,100000000] data.classes=1 data.classes=10000000000"),
    *split("train.local_epochs=10000000000 data.noise=1e39 train.batch_size=1000000000000"),
    *split("loggers=[wandb] loggers=tensorboard privacy={} __class__=1 model_config=1"),
    *split("train.__init__=1 method.model_fields=1 --nothing --out privacy={clip:0}"),
    *("train.rounds=&a [*a]", "train.rounds=\0", "train.ro\0unds=1", "\x1b[2J=1", "a.\x1b[31m=1"),
    *("train.\n=1", " =1", "train. rounds=1", "train.rounds=1\nengine: 2", "a.b={c: 1}}"),
    *("train.rounds=" + "9" * 5000, "train.rounds=" + "[" * 5000, "train.rounds=" + "{a: " * 3000),
    *(".".join("a" * 60) + "=1", ".".join(["train"] * 2000) + "=1", "a" * 100_000 + "=1"),
    "privacy={clip: 1e38, noise_multiplier: 1e38}",
]


def overrides() -> Iterator[Case]:
    names = [["--name", name] for name in ("a/b", "\x1b[31m", "..", "a\0b", "x" * 300)]
    for words in [*([each] for each in OVERRIDES), *names]:
        label = ascii(" ".join(words))[:60]
        files = {"small.yaml": changed()}
        yield Case("overrides", label, ["run", "small.yaml", *words], files)


# experiment files

BOMB = "".join(
    f"x{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10) if k else '1'}]\n" for k in range(10)
)
TEXTS: dict[str, Content] = {
    "a word": "word\n",
    "a list": "- 1\n- 2\n",
    "blanks": " \n\t\n",
    "a comment": "# nothing\n",
    "null": "null\n",
    "two documents": changed() + "---\n" + changed(),
    "UTF-16": changed().encode("utf-16"),
    "Latin-1": "name: caf\xe9\n".encode("latin-1"),
    "NUL": changed().replace("small", "sm\0all"),
    "tabs": changed().replace("  ", "\t"),
    "half of it": changed()[: len(changed()) // 2],
    "an alias to nothing": changed() + "privacy: *b\n",
    "a recursive alias": changed() + "privacy: &a [*a]\n",
    "a recursive mapping": "a: &a {b: *a}\n",
    "a merge key": changed() + "privacy: {<<: 3}\n",
    "a key twice": changed() + "train: {}\n",
    "a YAML bomb": changed() + BOMB,
    "deep lists": changed() + "privacy: " + "[" * 10_000 + "]" * 10_000 + "\n",
    "deep mappings": changed() + "privacy: " + "{a: " * 10_000 + "1" + "}" * 10_000 + "\n",
    "a hundred levels": changed() + "privacy: " + "{a: " * 100 + "1" + "}" * 100 + "\n",
    "a Python object": changed() + "privacy: !!python/object/apply:os.system ['touch x']\n",
    "an unknown tag": changed() + "privacy: !mine 3\n",
    "a set": changed() + "privacy: !!set {a, b}\n",
    "bytes": changed() + "privacy: !!binary aGVsbG8=\n",
    "pairs": changed() + "privacy: !!omap [a: 1]\n",
    "a date": changed() + "privacy: 2020-01-01\n",
    "a number to base 60": changed() + "seed: 1:30\n",
    "keys that are no words": changed() + "1: 2\nnull: 3\n2.5: 4\n",
    "a key that is a list": changed() + "? [a, b]\n: 1\n",
    "a key that is a mapping": changed() + "{a: b}: 1\n",
    "a key that is a flag": changed() + "true: 1\n",
    "a key that is NaN": changed() + ".nan: 1\n",
    "a key that is a date": changed() + "2020-01-01: 1\n",
    "brackets in a key": changed() + "'train[0]': 1\n",
    "dots in a key": changed() + "train.rounds: 1\n",
    "control characters in a key": changed() + '"\\x1b[31m": 1\n',
    "NUL in a key": changed() + '"\\0": 1\n',
    "a key of a megabyte": changed() + f"{'k' * 1_000_000}: 1\n",
    "as many keys as fit": changed() + "".join(f"k{k}: 1\n" for k in range(49_000)),
    "a number of many digits": changed() + f"seed: {'9' * 400_000}\n",
    "20 MB": "# x\n" * 5_000_000,
    "a variable": changed(name="${oc.env:HOME}"),
    "a variable that is itself": changed(name="${name}"),
    **{
        f"sections that are {what!r}": "".join(f"{name}: {what}\n" for name in SMALL)
        for what in ("word", "[1]", "1", "", "{}")
    },
}


def experiment_files() -> Iterator[Case]:
    kind = "experiment files"
    for label, content in {**IN_PLACE, **TEXTS}.items():
        for command in ("run", "data", "grid", "tune"):
            plain = label == "unreadable"
            yield of_file(kind, f"{command}: {label}", content, command, plain=plain)
    for path in PATHS:
        for command in ("run", "grid", "submit", "doctor"):
            if path or command != "doctor":
                yield Case(kind, f"{command} {path[:20]!a}", [command, path])


# components

NAMES = [
    *split("fedsim:Method fedsim.models:Model fedsim.data:Source fedsim.data:Partition"),
    *split("fedsim.objectives:Objective fedsim.config.registry:Config fedsim.explain:Explainer"),
    *split("fedsim.models.model:NetworkModel os:system os:abort sys:exit builtins:exec"),
    *split("subprocess:Popen shutil:rmtree os.path:join torch.nn:Linear numpy:zeros nowhere:It"),
    *split(":It bad_code: : :: bad_code:It:It ..bad_code:It bad_code.:It bad_code:Missing"),
    *split("bad_code:number bad_code:none bad_code:text bad_code:module bad_code:function"),
    *split("bad_code:NoComponent bad_code:Incomplete bad_code:__class__ bad_code"),
    *split("raises:It exits:It quits:It breaks:It recurses:It loud:It nötig:It"),
    *("bad_code\0:It", "\x1b[31m:It", "[/b]:It", "a" * 3000 + ":It", "a/../b:It", "a b:c d"),
    *("fedavgg", "", " ", "FEDAVG", "fedavg ", "x" * 5000, "mlp\n"),
]
MODULES: dict[str, Content] = {
    "raises.py": "raise ValueError('made\\nof\\nmany\\nlines\\n' * 9)\n",
    "exits.py": "import sys; sys.exit(0)\n",
    "quits.py": "raise BaseException('no')\n",
    "breaks.py": "def it(:\n",
    "recurses.py": "def f(): return f()\nf()\n",
    "loud.py": "print('x\\n' * 100)\n",
    "loops.py": "while True: pass\n",
}


def components() -> Iterator[Case]:
    for section in ("method", "model", "data", "partition", "objective"):
        for name in [*NAMES, "loops:It"]:
            content = changed(**{section: {"kind" if section == "partition" else "name": name}})
            yield Case(
                "components",
                f"{section} {name[:40]!a}",
                ["run", "bad.yaml"],
                {**MODULES, "bad.yaml": content},
                endless=name == "loops:It",
            )


def own_code() -> Iterator[Case]:
    def case(label: str, **sections: Any) -> Case:
        return Case(
            "own code",
            label,
            ["run", "bad.yaml"],
            {**MODULES, "bad.yaml": changed(**sections)},
            endless=label.endswith("loops"),
        )

    for name in ("build_exits", "build_recurses", "build_nothing", "build_empty", "build_loops"):
        yield case(f"model {name}", model={"name": f"bad_code:{name}"})
    for way in bad_code.FORWARD:
        yield case(f"network {way}", model={"name": "bad_code:strange", "way": way})
    for name, ways in (
        *(("Server", bad_code.ROUND), ("Sends", bad_code.SENT), ("Keeps", bad_code.KEPT)),
    ):
        for way in ways:
            method = {"name": f"bad_code:{name}", "way": way}
            yield case(f"method {name} {way}", method=method)
    for name in ("NoInit", "InitRaises", "MixedTypes"):
        method = {"name": f"bad_code:{name}"}
        yield case(f"method {name}", method=method, train={"rounds": 2})
    for name in ("NoMetrics", "TwoPrimary", "ScoresWords", "TotalsRaise"):
        yield case(f"objective {name}", objective={"name": f"bad_code:{name}"})


# data

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)).astype(np.float32), RNG.integers(0, 3, 60)
ARRAYS: dict[str, Tree] = {
    "no y": {"x": X},
    "no x": {"y": Y},
    "nothing": {},
    "other names": {"a": X, "b": Y},
    "lengths that differ": {"x": X, "y": Y[:-1]},
    "no examples": {"x": X[:0], "y": Y[:0]},
    "a single example": {"x": X[:1], "y": Y[:1]},
    "NaN": {"x": np.where(X > 2, np.nan, X), "y": Y},
    "infinity": {"x": X * np.inf, "y": Y},
    "negative labels": {"x": X, "y": Y - 1},
    "huge labels": {"x": X, "y": Y + 10**12},
    "labels that are NaN": {"x": X, "y": np.where(Y == 1, np.nan, Y)},
    "labels that are objects": {"x": X, "y": np.array([{"a": 1}] * 60)},
    "inputs that are objects": {"x": np.array([{"a": 1}] * 60), "y": Y},
    "complex inputs": {"x": X * 1j, "y": Y},
    "dates": {"x": np.full((60, 4), np.datetime64("2020-01-01")), "y": Y},
    "words": {"x": np.full((60, 4), "w"), "y": Y},
    "no dimension": {"x": np.float32(3), "y": np.int64(1)},
    "inputs of no size": {"x": X[:, :0], "y": Y},
    "labels in five dimensions": {"x": X, "y": Y.reshape(60, 1, 1, 1, 1)},
    "structured inputs": {"x": np.zeros(60, [("a", "f4"), ("b", "i4")]), "y": Y},
    "a short column": {"x": X, "y": Y, "hospital": Y[:3]},
    "huge values": {"x": X.astype(np.float64) * 1e300, "y": Y},
    "labels beyond 63 bits": {"x": X, "y": Y.astype(np.uint64) + 2**63},
}
STRANGE_ARRAYS: dict[str, Tree] = {  # which may be meant
    "one class only": {"x": X, "y": Y * 0},
    "a class that is missing": {"x": X, "y": Y * 2},
    "labels that are fractions": {"x": X, "y": Y + 0.5},
    "labels that are words": {"x": X, "y": np.array(list("abc"))[Y]},
    "flags": {"x": X > 0, "y": Y > 0},
    "inputs that are numbers": {"x": X[:, 0], "y": Y},
    "labels in two dimensions": {"x": X, "y": np.stack([Y, Y], 1)},
}
TABLES = {
    "a header only": "a,b,y\n",
    "no header": "1,2,0\n1,2,1\n",
    "ragged": "a,b,y\n1,2,3,4\n1\n",
    "no label": "a,b\n1,2\n3,4\n",
    "words": "a,b,y\nx,2,0\n" + "1,2,0\n2,3,1\n" * 20,
    "missing values": "a,b,y\n" + "1,,0\n2,3,1\n" * 20,
    "missing labels": "a,b,y\n" + "1,2,\n2,3,1\n" * 20,
    "infinity": "a,b,y\n" + "1,inf,0\n2,3,1\n" * 20,
    "labels only": "y\n" + "0\n1\n" * 20,
    "one row": "a,b,y\n1,2,0\n",
    "NUL": "a,b,y\n" + "1,\0,0\n" * 20,
    "huge numbers": "a,b,y\n" + "1e308,1e400,0\n2,3,1\n" * 20,
    "an open quote": 'a,b,y\n"1,2,0\n' + "1,2,0\n" * 20,
}
FRAMES = {
    "lists": pd.DataFrame({"a": [[1, 2]] * 40, "y": [0, 1] * 20}),
    "mappings": pd.DataFrame({"a": [{"b": 1}] * 40, "y": [0, 1] * 20}),
    "bytes": pd.DataFrame({"a": [b"x"] * 40, "y": [0, 1] * 20}),
    "dates": pd.DataFrame({"a": pd.to_datetime(["2020-01-01"] * 40), "y": [0, 1] * 20}),
    "nothing": pd.DataFrame(),
    "no rows": pd.DataFrame({"a": [1.0], "y": [0]})[:0],
    "missing values": pd.DataFrame({"a": [None, 1.0] * 20, "y": [0, 1] * 20}),
    "labels that are lists": pd.DataFrame({"a": [1.0] * 40, "y": [[0]] * 40}),
    "missing labels": pd.DataFrame({"a": [1.0] * 40, "y": [None] * 40}),
}
DOCUMENTS = {
    "no tabs": "a b c\n" * 20,
    "no text": "a\t\nb\t\n" * 20,
    "three columns": "a\tb\tc\n" * 20,
}
VECTORS = {
    "empty": "",
    "words": "x b c d e f\n",
    "ragged": "x 1 2 3 4 5\ny 1\n",
    "NaN": "x nan 1 1 1 1\n",
    "none of these words": "q 1 1 1 1 1\n",
}
HUGE_PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\0\0\0\1\0\0\x08\2\0\0\0\x90wS\xde"
IMAGES: dict[str, dict[str, bytes]] = {
    "none": {},
    "one class": {"a/1.png": b"x"},
    "other files": {"a/1.txt": b"x", "b/1.txt": b"x"},
    "damaged ones": {"a/1.png": b"x", "b/1.png": b"\x89PNG"},
    "huge ones": {"a/1.png": HUGE_PNG, "b/1.png": HUGE_PNG},
    "some without a class": {"1.png": b"x"},
}
KINDS: dict[str, tuple[str, Tree]] = {
    "npz": ("bad.npz", {"name": "npz"}),
    "npz in place": ("bad.npz", {"name": "npz", "in_place": True}),
    "csv": ("bad.csv", {"name": "table", "label": "y"}),
    "parquet": ("bad.parquet", {"name": "table", "label": "y"}),
    "parquet in place": ("bad.parquet", {"name": "table", "label": "y", "in_place": True}),
    "keel": ("bad.dat", {"name": "keel"}),
    "text": ("bad.tsv", {"name": "text", "dimension": 5}),
    "folder": ("bad", {"name": "folder", "size": 8}),
}


def npz(**arrays: Any) -> Make:
    return lambda path: np.savez(path, **arrays)


def images(content: Mapping[str, bytes]) -> Make:
    def make(path: Path) -> None:
        path.mkdir()
        for name, image in content.items():
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(image)

    return make


def damaged_npz() -> dict[str, Content]:
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, "x.npz"), x=X, y=Y)
        good = Path(folder, "x.npz").read_bytes()
    return {
        "half": good[: len(good) // 2],
        "without its end": good[:-30],
        "1e10 samples": good.replace(b"(60, 4)", b"(9999999999, 4)"),
        "another array": lambda path: np.save(path.open("wb"), X),
    }


def data_files() -> Iterator[Case]:
    def case(kind: str, label: str, content: Content, **more: Any) -> Case:
        path, section = KINDS[kind]
        sections: Tree = {"data": {**section, "path": path}}
        if kind == "text":
            sections["model"] = {"name": "text_cnn"}
        files = {path: content, "bad.yaml": changed(**sections)}
        return Case("data files", f"{kind}: {label}", ["run", "bad.yaml"], files, **more)

    for kind, (_, section) in KINDS.items():
        for label, content in IN_PLACE.items():
            yield case(kind, label, content, plain=label == "unreadable")
        for path in PATHS:
            data = changed(data={**section, "path": path})
            yield of_file("data files", f"{kind} at {path[:20]!a}", data)
    for kind in ("npz", "npz in place"):
        for label, arrays in ARRAYS.items():
            yield case(kind, label, npz(**arrays))
        for label, arrays in STRANGE_ARRAYS.items():
            yield case(kind, label, npz(**arrays), wrong=False)
        for label, content in damaged_npz().items():
            yield case(kind, label, content)
    for label, table in TABLES.items():
        yield case("csv", label, table)
    for label, frame in FRAMES.items():
        yield case("parquet", label, frame.to_parquet)
        yield case("parquet in place", label, frame.to_parquet)
    for label, found in IMAGES.items():
        yield case("folder", label, images(found))
    for label, text in DOCUMENTS.items():
        yield case("text", label, text)
    for label, text in VECTORS.items():
        data = {"name": "text", "path": "good.tsv", "dimension": 5, "vectors": "bad.txt"}
        content = changed(data=data, model={"name": "text_cnn"})
        files = {"good.tsv": "a\tx y\nb\ty z\n" * 20, "bad.txt": text, "bad.yaml": content}
        yield Case("data files", f"vectors: {label}", ["run", "bad.yaml"], files)


# partitions

COLUMN = np.arange(60) % 4 * 1.0
COLUMNS = {
    "NaN": np.where(COLUMN == 1, np.nan, COLUMN),
    "nothing but NaN": COLUMN * np.nan,
    "two dimensions": np.stack([Y, Y], 1),
    "objects": np.array([None] * 60, dtype=object),
}
STRANGE_COLUMNS = {  # which may be meant
    "infinity": np.where(COLUMN == 1, np.inf, COLUMN),
    "fractions": COLUMN / 3,
    "one value": Y * 0,
    "words": np.array(["", "a", "b"])[Y],
    "negative numbers": Y - 5,
}
ROWS = {
    "a word": '"x"',
    "no clients": "[]",
    "nothing for anybody": "[[], []]",
    "words": '[["a"], ["b"]]',
    "fractions": "[[0.5], [1]]",
    "negative rows": "[[-1], [1]]",
    "rows that are not there": "[[0], [60]]",
    "huge rows": f"[[0], [{10**30}]]",
    "a row twice": "[[0, 0], [1]]",
    "flags": "[[true], [false]]",
    "null": "[[null]]",
    "NaN": "[[NaN]]",
    "nests": "[[[[0]]]]",
    "a deep nest": "[" * 100_000,
    "a mapping": '{"a": [0]}',
    "half": "[[0, 1], [2",
}
TASKS: dict[str, Any] = {
    "none": [],
    "empty": [[]],
    "of no class": [[[]]],
    "of unknown classes": [[["x"], ["y"]]],
    "of different length": [[["0"], ["1"]], [["2"]]],
    "of a class twice": [[["0", "0"], ["1"]]],
    "nested": [[[["0"]]]],
}


def partitions_of_data() -> Iterator[Case]:
    for label, column in {**COLUMNS, **STRANGE_COLUMNS}.items():
        sections: Tree = {
            "data": {"name": "npz", "path": "d.npz"},
            "partition": {"kind": "natural", "column": "hospital"},
        }
        files = {"d.npz": npz(x=X, y=Y, hospital=column), "bad.yaml": changed(**sections)}
        wrong = label in COLUMNS
        yield Case("partitions", f"natural: {label}", ["run", "bad.yaml"], files, wrong=wrong)
    by_file = changed(partition={"kind": "file", "path": "p.json"})
    for label, rows in {**IN_PLACE, **ROWS}.items():
        files = {"p.json": rows, "bad.yaml": by_file}
        plain = label == "unreadable"
        yield Case("partitions", f"file: {label}", ["run", "bad.yaml"], files, plain=plain)
    for label, tasks in TASKS.items():
        content = changed(partition={"kind": "own_tasks", "tasks": tasks})
        yield of_file("partitions", f"tasks: {label}", content)


# where results are to go

OUTS: dict[str, tuple[str, dict[str, Content]]] = {
    "below a file": ("file/x", {"file": "x"}),
    "below /proc": ("/proc/x", {}),
    "below a device": ("/dev/full/x", {}),
    "a name that is too long": ("x" * 300, {}),
    "a path that is too long": ("x/" * 3000, {}),
    "NUL": ("a\0b", {}),
    "no text": ("a\ud800", {}),
    "unwritable": ("locked/x", {"locked": lambda path: path.mkdir(mode=0o555)}),
}
NO_FOLDERS: dict[str, tuple[str, dict[str, Content]]] = {  # files can be written there
    "a file": ("file", {"file": "x"}),
    "a device": ("/dev/null", {}),
    "a pipe": ("pipe", {"pipe": fifo}),
    "a link to itself": ("link", {"link": link("")}),
}


def outs() -> Iterator[Case]:
    small = {"small.yaml": changed()}
    finished: dict[str, Content] = {"run": copy_of("finished")}
    for label, (out, more) in {**OUTS, **NO_FOLDERS}.items():
        plain = label == "unwritable"
        words = ["run", "small.yaml", "--out", out]
        yield Case("--out", f"run: {label}", words, {**small, **more}, plain=plain)
        words = ["explain", "run", "--npy", out]
        yield Case("--out", f"explain --npy: {label}", words, {**finished, **more}, plain=plain)
        words = ["pack", "run", "--out", f"{out}.tar"]
        yield Case("--out", f"pack: {label}", words, {**finished, **more}, plain=plain)
    for label, (out, more) in OUTS.items():
        plain = label == "unwritable"
        words = ["data", "small.yaml", "--picture", f"{out}.png"]
        yield Case("--out", f"data: {label}", words, {**small, **more}, plain=plain)
        for option in ("--out", "--latex", "--csv"):
            words = ["report", "run", option, out]
            files = {**finished, **more}
            yield Case("--out", f"report {option}: {label}", words, files, plain=plain)

    def locked(path: Path) -> None:
        copy_of("begun" if path.name == "begun" else "finished")(path)
        for each in (path, *path.rglob("*")):
            each.chmod(0o555 if each.is_dir() else 0o444)

    for words in (["report", "run"], ["explain", "run"], ["resume", "begun"], ["attack", "run"]):
        yield Case("--out", f"{words[0]}: read only", words, {words[1]: locked}, plain=True)


# folders of results

TEMPLATES: dict[str, Path] = {}
COMMANDS = ["resume", "report", "verify", "explain", "attack", "pack"]


def copy_of(kind: str) -> Make:
    return lambda path: shutil.copytree(TEMPLATES[kind], path)


def make_templates(base: Path) -> None:
    """A run that broke off, one that has finished, and one of rules."""
    scaffold = Experiment.from_dict(
        {
            **SMALL,
            "method": {"name": "scaffold"},
            "train": {"rounds": 3},
            "checkpoint": {"every": 1},
        }
    )
    rules = Experiment.from_dict(
        {
            **SMALL,
            "data": {"name": "friedman", "samples": 60, "test_samples": 20},
            "model": {"name": "tsk"},
            "method": {"name": "openfl_xai"},
        }
    )

    def stop(event: Any) -> None:
        if isinstance(event, dict) and event["round"] == 2:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        fedsim.run(scaffold, base / "begun", stop)
    fedsim.run(scaffold, base / "finished")
    fedsim.run(rules, base / "rules")


def find_templates(base: Path) -> None:
    for kind in ("begun", "finished", "rules"):
        (TEMPLATES[kind],) = base.glob(f"{kind}/small/*")


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values stand in a nest of dicts and lists."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from places(value, (*above, key))


def with_value(kind: str, place: tuple[Any, ...], value: Any) -> Make:
    """A folder whose manifest has another value somewhere, and the checksum that belongs to it."""

    def make(path: Path) -> None:
        copy_of(kind)(path)
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["checksum"]
        part = manifest
        for key in place[:-1]:
            part = part[key]
        part[place[-1]] = value
        manifests.write(path, manifest)

    return make


def with_file(name: str, content: Content | None) -> Make:
    """A folder with something else in a file's place."""

    def make(path: Path) -> None:
        copy_of("finished")(path)
        (path / name).unlink()
        if content is not None:
            write(path / name, content)

    return make


def write(path: Path, content: Content) -> None:
    """Make what a case needs."""
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


FILES = [
    *("manifest.json", "manifest.copy.json", "experiment.yaml", "rounds.parquet"),
    *("clients.parquet", "weights/final.safetensors", "weights/round-000003.safetensors"),
]


def folders(count: int) -> Iterator[Case]:
    for kind in ("begun", "finished"):
        manifest = json.loads((TEMPLATES[kind] / "manifest.json").read_text())
        del manifest["checksum"]
        for place in places(manifest):
            for value in random.sample(STRANGE, count):
                command = random.choice(COMMANDS)
                label = f"{command} {kind}: {'.'.join(map(str, place))}={value!r:.20}"
                files = {"run": with_value(kind, place, value)}
                yield Case("manifests", label, [command, "run"], files, wrong=False)
    for name in FILES:
        for label, content in {**IN_PLACE, "gone": None}.items():
            command = random.choice(COMMANDS)
            yield Case(
                "folders",
                f"{command}: {name} is {label}",
                [command, "run"],
                {"run": with_file(name, content)},
                wrong=False,
                plain=label == "unreadable",
            )
    for command in COMMANDS:
        for path in PATHS:
            yield Case("folders", f"{command} {path[:20]!a}", [command, path])
        for label, content in IN_PLACE.items():
            yield Case("folders", f"{command} of {label}", [command, "x"], {"x": content})


# explain and attack

OPTIONS = [
    *(f"--round {value}".split() for value in (-1, 99, "x", 10**30)),
    *(f"--client {value}".split() for value in (-1, 99, 10**30)),
    *(f"--row {value}".split() for value in (-1, 99, 10**30)),
    *(
        ["--explainer", name]
        for name in ("tre", "", "os:system", "\0", "bad_code:It", "rationale")
    ),
    *(["--explainer", name] for name in ("shared_images", "fedsim.explain:Explainer")),
    *(["--input", path] for path in PATHS),
    *(["--row", "0", "--text", "x"], ["--text", "words"], ["--text", ""], ["--most", "-1"]),
]
ROWS_NPY: dict[str, Any] = {
    "words": np.array(["a"] * 4),
    "objects": np.array([{"a": 1}], dtype=object),
    "another shape": np.zeros((2, 7), np.float32),
    "no rows": np.zeros((0, 4), np.float32),
    "NaN": np.full((1, 4), np.nan, np.float32),
    "complex": np.zeros((1, 4), complex),
    "a number": np.float32(1),
}
ROWS_CSV = {"words": "a,b,c,d\nx,y,z,w\n", "another width": "a\n1\n", "NUL": "\0"}


def array_file(array: Any) -> Make:
    return lambda path: np.save(path.open("wb"), array)


def explanations() -> Iterator[Case]:
    kind = "explain and attack"
    inputs: list[tuple[str, str, Content]] = [
        *(("npy", label, array_file(array)) for label, array in ROWS_NPY.items()),
        *(("csv", label, text) for label, text in ROWS_CSV.items()),
        *(
            (s, label, c)
            for s in ("npy", "csv", "png", "txt", "exe")
            for label, c in IN_PLACE.items()
        ),
    ]
    for run in ("finished", "rules"):
        files: dict[str, Content] = {"run": copy_of(run)}
        for words in OPTIONS:
            label = f"explain {run} {' '.join(words)[:40]!a}"
            yield Case(kind, label, ["explain", "run", *words], files)
        for suffix, label, content in inputs:
            yield Case(
                kind,
                f"explain {run} --input: .{suffix}, {label}",
                ["explain", "run", "--input", f"in.{suffix}"],
                {**files, f"in.{suffix}": content},
                plain=label == "unreadable",
            )
    for shadows in ("-1", "1", "x", "1.5", str(10**30), str(10**10)):
        words = ["attack", "run", "--shadows", shadows]
        yield Case(kind, " ".join(words), words, {"run": copy_of("finished")})
    yield Case(kind, "attack rules", ["attack", "run"], {"run": copy_of("rules")})
    for text in ("list", "list nothing", "nothing", "report", "verify", "run", "--no", "explain"):
        yield Case(kind, text, text.split())


# clusters

HTTP = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
ANSWERS = {
    "rubbish": b"rubbish\r\n\r\n",
    "nothing": b"",
    "an error": b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
    "that it is forbidden": b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n",
    "with itself": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
    "with a page": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
    "with a list": HTTP + b"Content-Length: 2\r\n\r\n[]",
    "with a number": HTTP + b"Content-Length: 1\r\n\r\n3",
}
ADDRESSES = [
    *split("http://127.0.0.1:1 127.0.0.1:1 nowhere http:// http://nowhere.invalid:8265 ftp://x"),
    *split("http://127.0.0.1:99999 http://[::1 ray://127.0.0.1:1 ray://127.0.0.1:99999 // auto"),
    *split("http://127.0.0.1:x http://\x1b[31m:1 http://user:password@127.0.0.1:1"),
    *("x" * 3000, "\0"),
]


def serve(answer: bytes) -> int:
    """A port of this machine's that answers so."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        while True:
            connection, _ = server.accept()
            with contextlib.suppress(OSError), connection:
                connection.recv(65536)
                connection.sendall(answer)

    threading.Thread(target=run, daemon=True).start()
    return int(server.getsockname()[1])


def clusters() -> Iterator[Case]:
    small = {"small.yaml": changed()}
    commands = (["submit", "small.yaml"], ["jobs"], ["stop", "job"], ["fetch", "job"])
    answering = {f"it answers {label}": serve(answer) for label, answer in ANSWERS.items()}
    addresses = {
        **{ascii(address[:30]): address for address in ADDRESSES},
        **{label: f"http://127.0.0.1:{port}" for label, port in answering.items()},
    }
    for label, address in addresses.items():
        for words in commands:
            yield Case("clusters", f"{words[0]}: {label}", [*words, "--address", address], small)
    nobody = ["--address", "http://127.0.0.1:1"]
    for words in (["submit", "nowhere.yaml"], ["fetch", "../.."], ["fetch", ""], ["stop", "\0"]):
        yield Case("clusters", ascii(words), [*words, *nobody], small)
    for given in ("A", "=", "=1", "A=\0", "A B=1"):
        words = ["submit", "small.yaml", *nobody, "--env", given]
        yield Case("clusters", f"--env {given!a}", words, small)


def all_cases(count: int) -> list[Case]:
    """All inputs.

    Args:
        count: strange values that each field gets.
    """
    return [
        *(
            *fields(count),
            *sweeps(),
            *overrides(),
            *experiment_files(),
            *components(),
            *own_code(),
        ),
        *(*data_files(), *partitions_of_data(), *outs(), *folders(count), *explanations()),
        *clusters(),
    ]
