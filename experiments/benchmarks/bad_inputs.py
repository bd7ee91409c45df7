"""Feed bad inputs to the commands, and count those that end in anything but a short message.

    python bad_inputs.py --fields 3 --seed 0

Each input gets a process and a folder of its own, and so many seconds. It fails if it ends in a
traceback or a signal, goes on for longer, says nothing or more than six lines, is carried out
although it must be wrong, or is refused (exit code 2) and has left something behind.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import math
import os
import pickle
import random
import re
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args, get_origin

import numpy as np
import pandas as pd
import torch
import yaml
from pydantic import BaseModel
from ray import tune  # noqa: F401  # imported once, not by each of a thousand processes

import fedsim
from fedsim.cli import main as command_line
from fedsim.data import datasets, partitions
from fedsim.errors import FedsimError
from fedsim.experiment import Experiment
from fedsim.explain.attribution import attributions
from fedsim.methods import methods
from fedsim.models import models
from fedsim.objectives import objectives
from fedsim.results import manifest as manifests
from fedsim.sweep.grid import GridSettings
from fedsim.sweep.search import SearchSettings

MOST_LINES = 6
MEMORY = 8 * 10**9  # bytes of addresses that a process may take
Tree = dict[str, Any]
Prepare = Callable[[], None]

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
        files: that it needs, by path: content, or a function that makes one.
        wrong: it cannot be right, so that exit code 0 is a failure.
        endless: code of the user's goes on for ever; Ctrl-C must end it.
        plain: given by a user whom modes of files hold for, as they do not for root.
    """

    kind: str
    label: str
    words: Sequence[str]
    files: Mapping[str, str | bytes | Callable[[Path], None]] = field(default_factory=dict)
    wrong: bool = True
    endless: bool = False
    plain: bool = False


def changed(**sections: Any) -> str:
    """The small experiment with other sections, as YAML."""
    return yaml.safe_dump({**SMALL, **sections}, sort_keys=False, allow_unicode=True)


def of_file(
    kind: str, label: str, content: str | bytes, command: str = "run", **more: Any
) -> Case:
    return Case(kind, label, [command, "bad.yaml"], {"bad.yaml": content}, **more)


# fields of sections

STRANGE = [
    *(
        {"a": 1},
        [[1]],
        [],
        True,
        None,
        "",
        "\0",
        "\x1b[31mred",
        "[/bold]",
        "a" * 3000,
        "../..",
        "1e2",
    ),
    *(math.nan, math.inf, -math.inf, -1, 0, 1.5, 1e300, 10**10, 10**30, -(2**63)),
]


def leaves(annotation: Any) -> Iterator[type]:
    """The types of values that a field takes, each once more for what they are made of."""
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
    if not types or Any in types or object in types:
        return False
    if isinstance(value, bool):
        return bool not in types
    if isinstance(value, int | float):
        strange = not abs(value) < 1e38
        return strange or not types & {int, float} or (value % 1 != 0 and float not in types)
    if isinstance(value, str):
        return not types & {str, Path, int, float} and not (value == "" and type(None) in types)
    if isinstance(value, dict):
        return not any(t is dict or issubclass(t, BaseModel) for t in types)
    if isinstance(value, list):
        return not types & {list, tuple}
    return type(None) not in types


def fields(count: int) -> Iterator[Case]:
    """Strange values for some of every field's."""
    sections: list[tuple[str, str, Any, type[BaseModel]]] = []
    for name, about in Experiment.model_fields.items():
        for part in leaves(about.annotation):
            if issubclass(part, BaseModel):
                sections.append((name, "", None, part))
    for section, registry in (
        *(("data", datasets), ("partition", partitions), ("model", models)),
        *(("method", methods), ("objective", objectives)),
    ):
        for name, component in registry.items():
            sections.append((section, registry.key, name, component))
    for name, attribution in attributions.items():
        sections.append(("attribution", "name", name, attribution))
    for section, key, name, schema in sections:
        for each, about in schema.model_fields.items():
            for value in random.sample(STRANGE, count):
                base = (
                    SMALL.get(section, {})
                    if name in (None, SMALL.get(section, {}).get(key))
                    else {}
                )
                content = {**base, **({key: name} if key else {}), each: value}
                if section == "attribution":
                    section, content = "method", {"name": "fedxds", "attribution": content}
                label = f"{section}.{name or ''}.{each}={str(value)[:30]!r}"
                wrong = certainly_wrong(about.annotation, value)
                yield of_file("fields", label, changed(**{section: content}), wrong=wrong)
    for section, schema, command in (
        ("grid", GridSettings, "grid"),
        ("search", SearchSettings, "tune"),
    ):
        valid: Tree = {
            "grid": {"axes": {"train.optimizer.lr": [0.1]}},
            "search": {"space": {"train.optimizer.lr": [0.1]}, "objectives": {"accuracy": "max"}},
        }[section]
        for each, about in schema.model_fields.items():
            for value in STRANGE:
                if certainly_wrong(about.annotation, value):
                    content = changed(**{section: {**valid, each: value}})
                    yield of_file(
                        "grids and searches", f"{section}.{each}={value!r:.30}", content, command
                    )
    for value in STRANGE:
        content = changed(**{"name": value})
        yield of_file("fields", f"name={value!r:.30}", content, wrong=not isinstance(value, str))
        if value not in (0, True, None, "1e2", 1.5, 10**10):
            yield of_file("fields", f"seed={value!r:.30}", changed(seed=value))


# grids and searches


def sweeps() -> Iterator[Case]:
    axis = "train.optimizer.lr"
    for label, grid in {
        "no axes": {},
        "an axis of a key that is none": {"axes": {"train.lrr": [1, 2]}},
        "an axis without a section": {"axes": {"lr": [1, 2]}},
        "brackets": {"axes": {"train[0].lr": [1]}},
        "empty key": {"axes": {"": [1]}},
        "dots": {"axes": {"...": [1]}},
        "control characters": {"axes": {"train.\x1b[31m": [1]}},
        "values of all types": {"axes": {axis: [0.1, "x", None, [1], {"a": 1}]}},
        "NaN": {"axes": {axis: [math.nan]}},
        "twice": {"axes": {axis: [0.1, 0.1]}},
        "too many cells": {
            "axes": {
                f"train.{k}": [*range(1, 300)] for k in ("rounds", "batch_size", "local_epochs")
            }
        },
        "a variant that sets nothing": {"axes": {"m": {"a": {}, "b": {"x.y": 1}}}},
        "a variant that is a list": {"axes": {"m": {"a": [1]}}},
        "seeds twice": {"axes": {axis: [0.1]}, "seeds": [1, 1]},
        "negative seeds": {"axes": {axis: [0.1]}, "seeds": [-1]},
        "words as seeds": {"axes": {axis: [0.1]}, "seeds": ["one"]},
        "a baseline that is none": {"axes": {axis: [0.1]}, "baseline": {axis: 7}},
        "a baseline of another axis": {"axes": {axis: [0.1]}, "baseline": {"x": 7}},
        "all excluded": {"axes": {axis: [0.1]}, "exclude": [{axis: 0.1}]},
        "a target above 1": {"axes": {axis: [0.1]}, "target": 2},
        "axes that contain each other": {"axes": {"train": [{"rounds": 1}], axis: [0.1]}},
        "an axis that replaces a section by a number": {"axes": {"train": [3]}},
    }.items():
        yield of_file("grids and searches", f"grid: {label}", changed(grid=grid), "grid")
    ways = {"accuracy": "max"}
    for label, search in {
        "nothing": {},
        "no space": {"space": {}, "objectives": ways},
        "a range upside down": {
            "space": {axis: {"type": "float", "low": 1, "high": 0}},
            "objectives": ways,
        },
        "a log range from 0": {
            "space": {axis: {"type": "float", "low": 0, "high": 1, "log": True}},
            "objectives": ways,
        },
        "a NaN bound": {
            "space": {axis: {"type": "float", "low": math.nan, "high": 1}},
            "objectives": ways,
        },
        "a range of nothing": {
            "space": {axis: {"type": "word", "low": 1, "high": 2}},
            "objectives": ways,
        },
        "choices of lists": {"space": {axis: [[1], {"a": 2}]}, "objectives": ways},
        "no choices": {"space": {axis: []}, "objectives": ways},
        "a key that is none": {"space": {"train.lrr": [1]}, "objectives": ways},
        "brackets": {"space": {"train[lr]": [1]}, "objectives": ways},
        "no objective": {"space": {axis: [0.1]}, "objectives": {}},
        "an objective neither way": {"space": {axis: [0.1]}, "objectives": {"accuracy": "up"}},
        "ASHA for two": {
            "space": {axis: [0.1]},
            "objectives": {"accuracy": "max", "loss": "min"},
            "asha": {},
        },
        "ASHA of strange numbers": {
            "space": {axis: [0.1]},
            "objectives": ways,
            "asha": {"grace": -1, "reduction": 1},
        },
        "trials below 1": {"space": {axis: [0.1]}, "objectives": ways, "trials": 0},
        "an unknown sampler": {"space": {axis: [0.1]}, "objectives": ways, "sampler": "best"},
        "the engine": {"space": {"engine.actors": [1]}, "objectives": ways},
        "a huge range": {
            "space": {axis: {"type": "float", "low": 1e307, "high": 1e308}},
            "objectives": ways,
        },
        "a huge int range": {
            "space": {"train.rounds": {"type": "int", "low": 1, "high": 10**30}},
            "objectives": ways,
        },
    }.items():
        yield of_file("grids and searches", f"search: {label}", changed(search=search), "tune")
    for command, other in (
        ("run", "grid"),
        ("run", "search"),
        ("grid", "search"),
        ("tune", "grid"),
    ):
        yield of_file(
            "grids and searches", f"{command} of a {other}", changed(**{other: {}}), command
        )
    for command in ("grid", "tune"):
        small = {"small.yaml": changed()}
        yield Case(
            "grids and searches",
            f"{command} --resume of a file",
            [command, "--resume", "small.yaml"],
            small,
        )
        yield Case(
            "grids and searches",
            f"{command} --resume of nothing",
            [command, "--resume", "nowhere"],
        )


# overrides


def overrides() -> Iterator[Case]:
    given = [
        *("train", "=", "=1", "train.rounds", "train.rounds=", ".=1", "..=1", "train.=1", ".rounds=1"),
        *("train[rounds]=1", "train.rounds[0]=1", "[a]=1", "{a}=1", "train.rounds=[", "train.rounds={"),
        *("train.rounds=}", "train.rounds=: :", "train.rounds=!!python/name:os.system", "train.rounds=*a"),
        *("train.rounds=&a [*a]", "train.rounds=\0", "train.ro\0unds=1", "\x1b[2J=1", "train.\x1b[31m=1"),
        *("train.\n=1", " =1", "train. rounds=1", "train.rounds=1\nengine: 2", "тrain.rounds=1", "💥=1"),
        *("train.rounds=nan", "train.rounds=.inf", "train.rounds=1:30", "train.rounds=0x_", "train.rounds=" + "9" * 5000),
        *("train.rounds=${oc.env:HOME}", "train.rounds=${train.rounds}", "train.rounds=???", "name=${"),
        *(".".join("a" * 60) + "=1", ".".join(["train"] * 2000) + "=1", "a" * 100_000 + "=1"),
        *("train.rounds=" + "[" * 5000, "train.rounds=" + "{a: " * 3000, "train=null", "train=3", "data=[]", "model=''"),
        *("engine.kind=ray.local", "data.name=synthetic.x", "partition.clients=1e10", "data.samples=1e10"),
        *("data.samples=10000000000", "data.shape=[100000,100000]", "model.hidden=[100000000,100000000]"),
        *("data.classes=1", "data.classes=10000000000", "train.local_epochs=10000000000", "data.noise=1e39"),
        *("train.batch_size=10000000000000000000000", "loggers=[wandb]", "loggers=tensorboard", "privacy={}"),
        *("privacy={clip: 0, noise_multiplier: 1}", "privacy={clip: 1e38, noise_multiplier: 1e38}", "__class__=1"),
        *("model_config=1", "train.__init__=1", "method.model_fields=1", "--nothing", "--out", "-1"),
    ]  # fmt: skip
    for text in given:
        yield Case(
            "overrides",
            text[:60].encode("unicode_escape").decode(),
            ["run", "small.yaml", text],
            {"small.yaml": changed()},
        )
    for words in (
        ["--name", "a/b"],
        ["--name", "\x1b[31m"],
        [
            "--name",
            "..",
        ],
        ["--name", "a\0b"],
        ["--name", "x" * 300],
    ):
        yield Case(
            "overrides", repr(words)[:50], ["run", "small.yaml", *words], {"small.yaml": changed()}
        )


# experiment files


def fifo(path: Path) -> None:
    os.mkfifo(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def unreadable(content: bytes) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.write_bytes(content)
        path.chmod(0)

    return make


def experiment_files() -> Iterator[Case]:
    bomb = "".join(
        f"x{k}: &a{k} [{', '.join([f'*a{k - 1}'] * 10) if k else '1'}]\n" for k in range(10)
    )
    texts: dict[str, str | bytes | Callable[[Path], None]] = {
        "a number": "3\n",
        "a word": "word\n",
        "a list": "- 1\n- 2\n",
        "nothing": "",
        "blanks": " \n\t\n",
        "a comment": "# nothing\n",
        "null": "null\n",
        "two documents": changed() + "---\n" + changed(),
        "binary": bytes(range(256)) * 10,
        "UTF-16": changed().encode("utf-16"),
        "Latin-1": "name: caf\xe9\n".encode("latin-1"),
        "NUL": changed().replace("small", "sm\0all"),
        "a pickle": pickle.dumps({"a": 1}),
        "tabs": changed().replace("  ", "\t"),
        "half of it": changed()[: len(changed()) // 2],
        "a YAML bomb": changed() + bomb,
        "a recursive alias": changed() + "privacy: &a [*a]\n",
        "a recursive mapping": "a: &a {b: *a}\n",
        "an alias to nothing": changed() + "privacy: *b\n",
        "a merge key": changed() + "privacy: {<<: 3}\n",
        "a key twice": changed() + "train: {}\n",
        "deep lists": changed() + "privacy: " + "[" * 10_000 + "]" * 10_000 + "\n",
        "deep mappings": changed() + "privacy: " + "{a: " * 10_000 + "1" + "}" * 10_000 + "\n",
        "a hundred levels": changed() + "privacy: " + "{a: " * 100 + "1" + "}" * 100 + "\n",
        "a Python object": changed() + "privacy: !!python/object/apply:os.system ['touch x']\n",
        "an unknown tag": changed() + "privacy: !mine 3\n",
        "a set": changed() + "privacy: !!set {a, b}\n",
        "bytes": changed() + "privacy: !!binary aGVsbG8=\n",
        "pairs": changed() + "privacy: !!omap [a: 1]\n",
        "a date": changed() + "privacy: 2020-01-01\n",
        "a time": changed() + "seed: 1:30\n",
        "keys that are no words": changed() + "1: 2\nnull: 3\n2.5: 4\n",
        "a key that is a list": changed() + "? [a, b]\n: 1\n",
        "a key that is a mapping": changed() + "{a: b}: 1\n",
        "a flag as a key": changed() + "true: 1\n",
        "NaN as a key": changed() + ".nan: 1\n",
        "a date as a key": changed() + "2020-01-01: 1\n",
        "brackets in a key": changed() + "'train[0]': 1\n",
        "dots in a key": changed() + "train.rounds: 1\n",
        "control characters in a key": changed() + '"\\x1b[31m": 1\n',
        "NUL in a key": changed() + '"\\0": 1\n',
        "a key of a megabyte": changed() + f"{'k' * 1_000_000}: 1\n",
        "a hundred thousand keys": changed() + "".join(f"k{k}: 1\n" for k in range(100_000)),
        "a number of a million digits": changed() + f"seed: {'9' * 1_000_000}\n",
        "an interpolation": changed(name="${oc.env:HOME}"),
        "itself": changed(name="${name}"),
        "sections that are words": "".join(f"{name}: word\n" for name in SMALL),
        "sections that are lists": "".join(f"{name}: [1]\n" for name in SMALL),
        "sections that are nothing": "".join(f"{name}:\n" for name in SMALL),
        "sections that are numbers": "".join(f"{name}: 1\n" for name in SMALL),
        "all sections empty": "".join(f"{name}: {{}}\n" for name in SMALL),
        "a pipe": fifo,
        "a folder": a_folder,
        "unreadable": unreadable(changed().encode()),
        "a link to nothing": lambda path: path.symlink_to("nowhere"),
        "a link to itself": lambda path: path.symlink_to(path.name),
        "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "20 MB": lambda path: path.write_bytes(b"# x\n" * 5_000_000) and None,
    }  # fmt: skip
    for label, content in texts.items():
        for command in ("run", "data", "grid", "tune"):
            if command in ("run", "data") or random.random() < 0.5:
                yield of_file(
                    "experiment files",
                    f"{command}: {label}",
                    content,
                    command,
                    plain=label == "unreadable",
                )
    for path in (
        "",
        ".",
        "/",
        "nowhere.yaml",
        "\0",
        "x" * 5000,
        "/dev/null",
        "/dev/stdin",
        "/proc/self/mem",
        "bad\ud800",
    ):
        for command in ("run", "grid", "submit", "doctor"):
            yield Case("experiment files", f"{command} {path[:20]!r}", [command, path])


# components


MODULE = """
import os, sys, threading, time
import torch
from torch import nn
from fedsim import Method, Update
from fedsim.data import Partition, Source
from fedsim.methods.fedavg import FedAvg
from fedsim.models import Model
from fedsim.objectives import Classification, Metric

number, none, text, module = 3, None, "text", os
def function(): ...
def net(shape, outputs): return nn.Sequential(nn.Flatten(), nn.Linear(4, outputs))
def exits(shape, outputs): sys.exit(3)
def recurses(shape, outputs): return recurses(shape, outputs)
def loops(shape, outputs):
    while True: time.sleep(0.01)
def nothing(shape, outputs): return None
def frozen(shape, outputs): return net(shape, outputs).requires_grad_(False)
def empty(shape, outputs): return nn.Sequential()
def double(shape, outputs): return net(shape, outputs).double()
def shared(shape, outputs, made=[]):
    made or made.append(net(shape, outputs)); return made[0]
def by_kind(*shape, **outputs): return net(shape, 3)

class Out(nn.Module):
    def __init__(self, way):
        super().__init__(); self.line, self.way = nn.Linear(4, 3), way
    def forward(self, x):
        y = self.line(x.flatten(1))
        if self.way == "raises": raise ValueError("no\\nnot\\nthis\\nway\\never\\nagain\\nplease")
        if self.way == "exits": sys.exit(1)
        if self.way == "loops":
            while True: time.sleep(0.01)
        return {"tuple": (y, y), "none": None, "nan": y * float("nan"), "wide": y.repeat(1, 2), "flat": y.sum(),
                "ints": y.long(), "string": "x", "half": y.half(), "cut": y[:1], "detached": y.detach()}[self.way]
WAYS = ["raises", "exits", "loops", "tuple", "none", "nan", "wide", "flat", "ints", "string", "half", "cut", "detached"]
for way in WAYS:
    globals()["net_" + way] = lambda shape, outputs, way=way: Out(way)

class NoMethod: ...
class Nameless(FedAvg): ...
class Incomplete(Method): name: str = "x"
class Raises(FedAvg):
    def round(self, fed, state, t): raise ValueError("at\\nlength\\n" * 10)
class Exits(FedAvg):
    def round(self, fed, state, t): sys.exit(0)
class HardExit(FedAvg):
    def local_update(self, client, weights): raise SystemExit("bye")
class StopsIteration(FedAvg):
    def local_update(self, client, weights): raise StopIteration
class Recurses(FedAvg):
    def round(self, fed, state, t): return self.round(fed, state, t)
class Loops(FedAvg):
    def local_update(self, client, weights):
        while True: time.sleep(0.01)
class NoState(FedAvg):
    def round(self, fed, state, t): return None
class OtherState(FedAvg):
    def round(self, fed, state, t): return 3
class NoInit(FedAvg):
    def init(self, fed): return None
class InitRaises(FedAvg):
    def init(self, fed): raise KeyError("x")
class Nobody(FedAvg):
    def round(self, fed, state, t): return type(state)(fed.mean(self.local_update, [], weights=state.weights).weights)
class Strangers(FedAvg):
    def round(self, fed, state, t): return type(state)(fed.mean(self.local_update, [99], weights=state.weights).weights)
class Twice(FedAvg):
    def round(self, fed, state, t): return type(state)(fed.mean(self.local_update, [1, 1], weights=state.weights).weights)
class WordCohort(FedAvg):
    def round(self, fed, state, t): return type(state)(fed.mean(self.local_update, ["x"], weights=state.weights).weights)
class LogsObjects(FedAvg):
    def round(self, fed, state, t):
        fed.log(x=object()); return super().round(fed, state, t)
class LogsMixed(FedAvg):
    def round(self, fed, state, t):
        fed.log(x="word" if t == 1 else 3); return super().round(fed, state, t)
class LogsArray(FedAvg):
    def round(self, fed, state, t):
        fed.log(x=torch.zeros(3)); return super().round(fed, state, t)
class LogsRound(FedAvg):
    def round(self, fed, state, t):
        fed.log(round="x"); return super().round(fed, state, t)
class ClientSends(FedAvg):
    what: str = ""
    def local_update(self, client, weights):
        w = client.train(weights)
        return {"none": lambda: None, "nothing": lambda: Update(), "words": lambda: Update(weights="x"),
                "lists": lambda: Update(weights=[1.0]), "objects": lambda: Update(weights=object()),
                "complex": lambda: Update(weights=w.to(torch.complex64)), "matrix": lambda: Update(weights=w[None]),
                "negative": lambda: Update(weights=w, weight=-1), "nan": lambda: Update(weights=w, weight=float("nan")),
                "zero": lambda: Update(weights=w, weight=0), "huge": lambda: Update(weights=w, weight=1e300),
                "word": lambda: Update(weights=w, weight="x"), "ints": lambda: Update(weights=w.long()),
                "short": lambda: Update(weights=w[:3]), "empty": lambda: Update(weights=w[:0]),
                "inf": lambda: Update(weights=w / 0)}[self.what]()
class Keeps(FedAvg):
    def local_update(self, client, weights):
        client.state = {"x": object()}
        return super().local_update(client, weights)
class KeepsWord(FedAvg):
    def local_update(self, client, weights):
        client.state = "x"
        return super().local_update(client, weights)
class Unlocked(FedAvg):
    def local_update(self, client, weights):
        client.state = {"x": threading.Lock()}
        return super().local_update(client, weights)
class NoMetrics(Classification):
    name: str = "MODULE:NoMetrics"
    def metrics(self, data): return ()
class TwoPrimary(Classification):
    name: str = "MODULE:TwoPrimary"
    def metrics(self, data): return (Metric("a", "a", primary=True), Metric("b", "b", primary=True))
class ScoresNothing(Classification):
    name: str = "MODULE:ScoresNothing"
    def scores(self, totals): return {}
class ScoresWords(Classification):
    name: str = "MODULE:ScoresWords"
    def scores(self, totals): return {"accuracy": "good", "loss": None}
class TotalsRaise(Classification):
    name: str = "MODULE:TotalsRaise"
    def totals(self, outputs, batch): raise ValueError("x")
"""
SENDS = [
    "none",
    "nothing",
    "words",
    "lists",
    "objects",
    "complex",
    "matrix",
    "negative",
    "nan",
    "zero",
    "huge",
]
SENDS += ["word", "ints", "short", "empty", "inf"]


def components() -> Iterator[Case]:
    names = [
        *("fedsim:Method", "fedsim.methods:Method", "fedsim.models:Model", "fedsim.data:Source"),
        *("fedsim.data:Partition", "fedsim.objectives:Objective", "fedsim.registry:Config"),
        *("fedsim.models.model:NetworkModel", "fedsim.methods.method:Method", "fedsim.explain:Explainer"),
        *("os:system", "os:abort", "sys:exit", "builtins:exec", "subprocess:Popen", "shutil:rmtree", "os.path:join"),
        *("torch.nn:Linear", "numpy:zeros", "nowhere:It", ":It", "own:", ":", "::", "own:It:It", "..own:It", "own.:It"),
        *("own:number", "own:none", "own:text", "own:module", "own:function", "own:NoMethod", "own:Missing"),
        *("own:__class__", "own:Incomplete", "raises:It", "exits:It", "quits:It", "breaks:It", "recurses:It"),
        *("loud:It", "own\0:It", "\x1b[31m:It", "[/b]:It", "a" * 3000 + ":It", "own/../own:It", "nötig:It", "a b:c d"),
        *("fedavgg", "", " ", "FEDAVG", "fedavg ", "x" * 5000, "mlp\n", "own"),
    ]  # fmt: skip
    helpers = {
        "own.py": MODULE.replace("MODULE", "own"),
        "raises.py": "raise ValueError('made\\nof\\nmany\\nlines\\n' * 9)\n",
        "exits.py": "import sys; sys.exit(0)\n",
        "quits.py": "raise KeyboardInterrupt.__base__('no')\n",
        "breaks.py": "def it(:\n",
        "recurses.py": "def f(): return f()\nf()\n",
        "loud.py": "print('x\\n' * 100)\n",
        "loops.py": "import time\nwhile True: time.sleep(0.01)\n",
    }
    for section, key in (
        ("method", "name"),
        ("model", "name"),
        ("data", "name"),
        ("partition", "kind"),
        ("objective", "name"),
    ):
        for name in names:
            files = {**helpers, "bad.yaml": changed(**{section: {key: name}})}
            yield Case("components", f"{section} {name[:40]!r}", ["run", "bad.yaml"], files)
        files = {**helpers, "bad.yaml": changed(**{section: {key: "loops:It"}})}
        yield Case("components", f"{section} loops:It", ["run", "bad.yaml"], files, endless=True)

    def own(label: str, wrong: bool = True, endless: bool = False, **sections: Any) -> Case:
        files = {**helpers, "bad.yaml": changed(**sections)}
        return Case("own code", label, ["run", "bad.yaml"], files, wrong=wrong, endless=endless)

    for name in (
        "exits",
        "recurses",
        "nothing",
        "frozen",
        "empty",
        "double",
        "shared",
        "by_kind",
        "loops",
    ):
        fine = name in ("double", "shared", "by_kind", "frozen")
        yield own(
            f"model {name}", model={"name": f"own:{name}"}, wrong=not fine, endless=name == "loops"
        )
    ways = [
        *("raises", "exits", "loops", "tuple", "none", "nan", "wide", "flat", "ints", "string")
    ]
    for way in [*ways, "half", "cut", "detached"]:
        yield own(
            f"network {way}",
            model={"name": f"own:net_{way}"},
            wrong=way not in ("half", "wide"),
            endless=way == "loops",
        )
    bad = [
        *(
            "Raises",
            "Exits",
            "HardExit",
            "Interrupts",
            "StopsIteration",
            "Recurses",
            "Loops",
            "NoState",
        )
    ]
    bad += [
        "OtherState",
        "NoInit",
        "InitRaises",
        "Nobody",
        "Strangers",
        "Twice",
        "WordCohort",
        "LogsObjects",
    ]
    bad += ["LogsMixed", "LogsArray", "LogsRound", "Keeps", "KeepsWord", "Unlocked"]
    for name in bad:
        fine = name == "Twice"
        yield own(
            f"method {name}",
            method={"name": f"own:{name}"},
            train={"rounds": 2},
            wrong=not fine,
            endless=name == "Loops",
        )
    for what in SENDS:
        fine = what in ("ints", "huge", "matrix")
        yield own(
            f"sends {what}", method={"name": "own:ClientSends", "what": what}, wrong=not fine
        )
    for name in ("NoMetrics", "TwoPrimary", "ScoresNothing", "ScoresWords", "TotalsRaise"):
        yield own(
            f"objective {name}", objective={"name": f"own:{name}"}, wrong=name != "ScoresNothing"
        )


# data


def npz(**arrays: Any) -> Callable[[Path], None]:
    return lambda path: np.savez(path, **arrays)


def data_files() -> Iterator[Case]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 4)).astype(np.float32), rng.integers(0, 3, 60)
    nan_x, nan_column = x.copy(), np.arange(60) % 4 * 1.0
    nan_x[3, 2], nan_column[5] = np.nan, np.nan
    arrays: dict[str, Tree] = {
        "no y": {"x": x},
        "no x": {"y": y},
        "nothing": {},
        "other names": {"a": x, "b": y},
        "lengths that differ": {"x": x, "y": y[:-1]},
        "no examples": {"x": x[:0], "y": y[:0]},
        "a single example": {"x": x[:1], "y": y[:1]},
        "one class only": {"x": x, "y": y * 0},
        "a class that is missing": {"x": x, "y": y * 2},
        "NaN": {"x": nan_x, "y": y},
        "infinite": {"x": x * np.inf, "y": y},
        "negative labels": {"x": x, "y": y - 1},
        "huge labels": {"x": x, "y": y + 10**12},
        "NaN labels": {"x": x, "y": np.where(y == 1, np.nan, y)},
        "labels as fractions": {"x": x, "y": y + 0.5},
        "labels as words": {"x": x, "y": np.array(list("abc"))[y]},
        "labels as objects": {"x": x, "y": np.array([object()] * 60)},
        "pickled inputs": {"x": np.array([{"a": 1}] * 60), "y": y},
        "complex": {"x": x * 1j, "y": y},
        "dates": {"x": np.full((60, 4), np.datetime64("2020-01-01")), "y": y},
        "words": {"x": np.full((60, 4), "w"), "y": y},
        "flags": {"x": x > 0, "y": y > 0},
        "no dimension": {"x": np.float32(3), "y": np.int64(1)},
        "inputs that are numbers": {"x": x[:, 0], "y": y},
        "inputs of no size": {"x": x[:, :0], "y": y},
        "labels in two dimensions": {"x": x, "y": np.stack([y, y], 1)},
        "labels in five dimensions": {"x": x, "y": y.reshape(60, 1, 1, 1, 1)},
        "structured": {"x": np.zeros(60, [("a", "f4"), ("b", "i4")]), "y": y},
        "a short column": {"x": x, "y": y, "hospital": y[:3]},
        "huge values": {"x": x.astype(np.float64) * 1e300, "y": y},
        "64-bit unsigned labels": {"x": x, "y": y.astype(np.uint64) + 2**63},
    }  # fmt: skip
    fine = {"a class that is missing", "flags", "labels as words", "inputs that are numbers", "one class only", "labels in two dimensions", "labels as fractions"}  # fmt: skip
    for label, parts in arrays.items():
        for in_place in (False, True):
            section = {"name": "npz", "path": "bad.npz", "in_place": in_place}
            files = {"bad.npz": npz(**parts), "bad.yaml": changed(data=section)}
            yield Case(
                "data files",
                f"npz{' in place' * in_place}: {label}",
                ["run", "bad.yaml"],
                files,
                wrong=label not in fine,
            )
    whole: list[bytes] = []

    def bytes_of_npz() -> bytes:
        if not whole:
            path = Path(tempfile.mkdtemp()) / "x.npz"
            np.savez(path, x=x, y=y)
            whole.append(path.read_bytes())
            shutil.rmtree(path.parent)
        return whole[0]

    good = bytes_of_npz()
    claims = good.replace(b"(60, 4)", b"(9999999999, 4)")
    broken: dict[str, bytes | Callable[[Path], None]] = {
        "empty": b"",
        "text": b"x,y\n1,2\n",
        "half": good[: len(good) // 2],
        "without its end": good[:-30],
        "noise": random.Random(0).randbytes(5000),
        "zeros": bytes(5000),
        "an .npy": lambda path: np.save(path.open("wb"), x),
        "a pickle": pickle.dumps(x),
        "1e10 samples": claims,
        "flipped": good[:300] + bytes([good[300] ^ 255]) + good[301:],
        "a pipe": fifo,
        "a folder": a_folder,
        "unreadable": unreadable(good),
        "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
        "a link to itself": lambda path: path.symlink_to(path.name),
    }
    kinds: dict[str, tuple[str, Tree]] = {
        "npz": ("bad.npz", {"name": "npz"}),
        "npz in place": ("bad.npz", {"name": "npz", "in_place": True}),
        "csv": ("bad.csv", {"name": "table", "label": "y"}),
        "parquet": ("bad.parquet", {"name": "table", "label": "y"}),
        "parquet in place": ("bad.parquet", {"name": "table", "label": "y", "in_place": True}),
        "keel": ("bad.dat", {"name": "keel"}),
        "text": ("bad.tsv", {"name": "text", "dimension": 5}),
        "folder": ("bad", {"name": "folder", "size": 8}),
    }
    for kind, (name, section) in kinds.items():
        for label, content in broken.items():
            if kind.startswith("npz") and label in ("flipped",):
                continue  # as the header of an archive may be, twice over
            files = {name: content, "bad.yaml": changed(data={**section, "path": name})}
            yield Case(
                "data files",
                f"{kind}: {label}",
                ["run", "bad.yaml"],
                files,
                plain=label == "unreadable",
            )
    for kind, (name, section) in kinds.items():
        for path in ("nowhere", "", "\0", "~nobody/x", "x" * 5000, "/dev/null", "/proc/self/mem"):
            label = f"{kind} at {path[:20]!r}"
            yield of_file("data files", label, changed(data={**section, "path": path}))
    tables = {
        "a header only": "a,b,y\n",
        "no header": "1,2,0\n1,2,1\n",
        "ragged": "a,b,y\n1,2,3,4\n1\n",
        "a label that is missing": "a,b\n1,2\n3,4\n",
        "words": "a,b,y\nx,2,0\ny,3,1\n" * 1 + "z,2,0\n" * 20,
        "NaN": "a,b,y\n" + "1,,0\n2,3,1\n" * 20,
        "NaN labels": "a,b,y\n" + "1,2,\n2,3,1\n" * 20,
        "infinite": "a,b,y\n" + "1,inf,0\n2,3,1\n" * 20,
        "a column twice": "a,a,y\n" + "1,2,0\n2,3,1\n" * 20,
        "labels only": "y\n" + "0\n1\n" * 20,
        "one row": "a,b,y\n1,2,0\n",
        "NUL": "a,b,y\n1,\0,0\n" * 20,
        "huge numbers": "a,b,y\n" + "1e308,1e400,0\n2,3,1\n" * 20,
        "an open quote": 'a,b,y\n"1,2,0\n' * 20,
    }
    for label, text in tables.items():
        section = {"name": "table", "path": "bad.csv", "label": "y"}
        fine_here = label in ("a column twice",)
        files = {"bad.csv": text, "bad.yaml": changed(data=section)}
        yield Case("data files", f"csv: {label}", ["run", "bad.yaml"], files, wrong=not fine_here)
    frames: dict[str, pd.DataFrame] = {
        "lists": pd.DataFrame({"a": [[1, 2]] * 40, "y": [0, 1] * 20}),
        "mappings": pd.DataFrame({"a": [{"b": 1}] * 40, "y": [0, 1] * 20}),
        "bytes": pd.DataFrame({"a": [b"x"] * 40, "y": [0, 1] * 20}),
        "dates": pd.DataFrame({"a": pd.to_datetime(["2020-01-01"] * 40), "y": [0, 1] * 20}),
        "nothing": pd.DataFrame(),
        "no rows": pd.DataFrame({"a": [1.0], "y": [0]})[:0],
        "missing values": pd.DataFrame({"a": [None, 1.0] * 20, "y": [0, 1] * 20}),
        "labels that are lists": pd.DataFrame({"a": [1.0] * 40, "y": [[0]] * 40}),
        "labels that are missing": pd.DataFrame({"a": [1.0] * 40, "y": [None] * 40}),
    }
    for label, frame in frames.items():
        for in_place in (False, True):
            section = {"name": "table", "path": "bad.parquet", "label": "y", "in_place": in_place}
            files = {"bad.parquet": frame.to_parquet, "bad.yaml": changed(data=section)}
            yield Case(
                "data files",
                f"parquet{' in place' * in_place}: {label}",
                ["run", "bad.yaml"],
                files,
            )

    def images(*made: tuple[str, bytes]) -> Callable[[Path], None]:
        def make(path: Path) -> None:
            path.mkdir()
            for name, content in made:
                (path / name).parent.mkdir(exist_ok=True)
                (path / name).write_bytes(content)

        return make

    bomb = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\1\0\0\0\1\0\0\x08\2\0\0\0\x90wS\xde"
    for label, made in {
        "empty": images(),
        "one class": images(("a/1.png", b"x")),
        "no images": images(("a/1.txt", b"x"), ("b/1.txt", b"x")),
        "damaged images": images(("a/1.png", b"x"), ("b/1.png", b"\x89PNG")),
        "an image bomb": images(("a/1.png", bomb), ("b/1.png", bomb)),
        "images without a class": images(("1.png", b"x")),
    }.items():
        files = {
            "bad": made,
            "bad.yaml": changed(data={"name": "folder", "path": "bad", "size": 8}),
        }
        yield Case("data files", f"images: {label}", ["run", "bad.yaml"], files)
    for label, text in {
        "no tabs": "a b c\n" * 20,
        "no text": "a\t\nb\t\n" * 20,
        "three columns": "a\tb\tc\n" * 20,
        "one label": "a\tx y\n" * 20,
    }.items():
        section = {"name": "text", "path": "bad.tsv", "dimension": 5}
        files = {"bad.tsv": text, "bad.yaml": changed(data=section, model={"name": "text_cnn"})}
        yield Case(
            "data files", f"text: {label}", ["run", "bad.yaml"], files, wrong=label != "one label"
        )
    for label, text in {
        "empty": "", "words": "a b c d e f\n", "ragged": "a 1 2 3 4 5\nb 1\n", "NaN": "x nan 1 1 1 1\n", "another dimension": "x 1 2\n",
    }.items():  # fmt: skip
        section = {"name": "text", "path": "good.tsv", "dimension": 5, "vectors": "bad.txt"}
        files = {
            "good.tsv": "a\tx y\nb\ty z\n" * 20,
            "bad.txt": text,
            "bad.yaml": changed(data=section, model={"name": "text_cnn"}),
        }
        yield Case(
            "data files",
            f"vectors: {label}",
            ["run", "bad.yaml"],
            files,
            wrong=label != "another dimension",
        )
    yield from partitions_of(x, y, nan_column)


def partitions_of(x: Any, y: Any, nan_column: Any) -> Iterator[Case]:
    columns = {
        "NaN": nan_column,
        "all NaN": nan_column * np.nan,
        "infinite": np.where(nan_column == 1, np.inf, 0),
        "fractions": nan_column / 3,
        "one value": y * 0,
        "words": np.array(["", "a", "b"])[y],
        "two dimensions": np.stack([y, y], 1),
        "negative": y - 5,
        "objects": np.array([None] * 60, dtype=object),
    }
    for label, column in columns.items():
        section = {"kind": "natural", "column": "hospital"}
        data = {"name": "npz", "path": "d.npz"}
        files = {
            "d.npz": npz(x=x, y=y, hospital=column),
            "bad.yaml": changed(data=data, partition=section),
        }
        fine = label in ("one value", "words", "fractions", "negative", "infinite")
        yield Case("partitions", f"natural by {label}", ["run", "bad.yaml"], files, wrong=not fine)
    for label, text in {
        "nothing": "",
        "a number": "3",
        "a word": '"x"',
        "no clients": "[]",
        "nobody holds anything": "[[], []]",
        "words as rows": '[["a"], ["b"]]',
        "fractions": "[[0.5], [1]]",
        "negative": "[[-1], [1]]",
        "too large": "[[0], [60]]",
        "huge": f"[[0], [{10**30}]]",
        "twice": "[[0, 0], [1, 2]]",
        "shared": "[[0, 1], [1, 2]]",
        "flags": "[[true], [false]]",
        "null": "[[null]]",
        "NaN": "[[NaN]]",
        "nested": "[[[[0]]]]",
        "deep": "[" * 100_000,
        "a mapping": '{"a": [0]}',
        "half": "[[0, 1], [2",
        "binary": "\0\1\2",
        "a mapping of splits": '{"train": 3}',
        "a mapping of words": '{"train": [["x"]], "test": [[0]]}',
    }.items():
        files = {"p.json": text, "bad.yaml": changed(partition={"kind": "file", "path": "p.json"})}
        yield Case(
            "partitions", f"file: {label}", ["run", "bad.yaml"], files, wrong=label != "shared"
        )
    for label, special in {
        "a pipe": fifo,
        "a folder": a_folder,
        "unreadable": unreadable(b"[[0]]"),
    }.items():
        files = {
            "p.json": special,
            "bad.yaml": changed(partition={"kind": "file", "path": "p.json"}),
        }
        yield Case(
            "partitions", f"file: {label}", ["run", "bad.yaml"], files, plain=label == "unreadable"
        )
    for label, tasks in {
        "none": [], "empty": [[]], "of no class": [[[]]], "of unknown classes": [[["x"], ["y"]]], "of numbers": [[[0, 1]]],
        "of different length": [[["0"], ["1"]], [["2"]]], "of one class twice": [[["0", "0"], ["1"]]], "nested": [[[["0"]]]],
    }.items():  # fmt: skip
        yield of_file(
            "partitions",
            f"tasks {label}",
            changed(partition={"kind": "own_tasks", "tasks": tasks}),
            wrong=label not in ("of numbers",),
        )


# where results are to go


def outs() -> Iterator[Case]:
    small = {"small.yaml": changed()}
    places = {
        "a file": ("file", {"file": "x"}),
        "below a file": ("file/x", {"file": "x"}),
        "/proc": ("/proc/x", {}),
        "/dev/null": ("/dev/null", {}),
        "/dev/full": ("/dev/full/x", {}),
        "a pipe": ("pipe", {"pipe": fifo}),
        "a link to itself": ("link", {"link": lambda path: path.symlink_to(path.name)}),
        "a name that is too long": ("x" * 300, {}),
        "a path that is too long": ("x/" * 3000, {}),
        "NUL": ("a\0b", {}),
        "no text": ("a\ud800", {}),
        "unwritable": ("locked/x", {"locked": lambda path: path.mkdir(mode=0o555)}),
    }
    for label, (out, more) in places.items():
        nobody = label == "unwritable"
        yield Case(
            "--out",
            f"run: {label}",
            ["run", "small.yaml", "--out", out],
            {**small, **more},
            plain=nobody,
        )
        yield Case("--out", f"data: {label}", ["data", "small.yaml", "--picture", out], {**small, **more}, plain=nobody,
                   wrong=label not in ("a file", "a pipe", "a link to itself"))  # fmt: skip
        for command, option in (
            ("report", "--out"),
            ("report", "--latex"),
            ("report", "--csv"),
            ("pack", "--out"),
        ):
            files = {"run": copy_of("finished"), **more}
            yield Case("--out", f"{command} {option}: {label}", [command, "run", option, out], files, plain=nobody,
                       wrong=command == "pack" or label not in ("a file", "a pipe", "a link to itself", "/dev/null"))  # fmt: skip
        files = {"run": copy_of("finished"), **more}
        yield Case(
            "--out",
            f"explain --npy: {label}",
            ["explain", "run", "--npy", out],
            files,
            plain=nobody,
        )
    for command in (["report", "run"], ["explain", "run"], ["resume", "run"], ["attack", "run"]):
        kind = "begun" if command[0] == "resume" else "finished"

        def locked(path: Path, kind: str = kind) -> None:
            copy_of(kind)(path)
            for each in (path, *path.rglob("*")):
                each.chmod(0o555 if each.is_dir() else 0o444)

        yield Case(
            "--out",
            f"{command[0]}: a folder that is read only",
            command,
            {"run": locked},
            plain=True,
        )


# folders of results

TEMPLATES: dict[str, Path] = {}


def copy_of(kind: str) -> Callable[[Path], None]:
    return lambda path: shutil.copytree(TEMPLATES[kind], path) and None


def make_templates(base: Path) -> None:
    """A run that broke off, one that has finished, one of rules, one of documents, and a grid."""
    scaffold = {
        **SMALL,
        "method": {"name": "scaffold"},
        "train": {"rounds": 3},
        "checkpoint": {"every": 1},
    }

    def stop(event: Any) -> None:
        if isinstance(event, dict) and event["round"] == 2:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        fedsim.run(Experiment.from_dict(scaffold), base / "begun", stop)
    fedsim.run(Experiment.from_dict(scaffold), base / "finished")
    rules = {
        **SMALL,
        "data": {"name": "friedman", "samples": 60, "test_samples": 20},
        "model": {"name": "tsk"},
        "method": {"name": "openfl_xai"},
    }
    fedsim.run(Experiment.from_dict(rules), base / "rules")


def found_templates(base: Path) -> None:
    for kind in ("begun", "finished", "rules"):
        (TEMPLATES[kind],) = base.glob(f"{kind}/small/*")


COMMANDS = [["resume"], ["report"], ["verify"], ["explain"], ["attack"], ["pack"]]


def places(tree: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values stand in a nest of dicts and lists."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*above, key)
        if isinstance(value, dict | list):
            yield from places(value, (*above, key))


def folders(count: int) -> Iterator[Case]:
    """Values of manifests in another type, and whatever else can stand in a folder's place."""
    for kind in ("begun", "finished"):
        manifest = json.loads((TEMPLATES[kind] / "manifest.json").read_text())
        for place in places(manifest):
            for value in random.sample(STRANGE, count):

                def edit(
                    path: Path, kind: str = kind, place: Any = place, value: Any = value
                ) -> None:
                    copy_of(kind)(path)
                    content = json.loads((path / "manifest.json").read_text())
                    content.pop("checksum")
                    part = content
                    for key in place[:-1]:
                        part = part[key]
                    if place != ("checksum",):
                        part[place[-1]] = value
                    manifests.write(path, content)

                command = random.choice(COMMANDS)
                label = f"{command[0]} {kind}: {'.'.join(map(str, place))}={value!r:.20}"
                yield Case("manifests", label, [*command, "run"], {"run": edit}, wrong=False)

    def replaced(name: str, make: Callable[[Path], None]) -> Callable[[Path], None]:
        def edit(path: Path) -> None:
            copy_of("finished")(path)
            (path / name).unlink()
            make(path / name)

        return edit

    makers: dict[str, Callable[[Path], None]] = {
        "empty": Path.touch,
        "a number": lambda path: path.write_text("3") and None,
        "binary": lambda path: path.write_bytes(bytes(range(256))) and None,
        "a pipe": fifo,
        "a folder": a_folder,
        "gone": lambda path: None,
        "unreadable": unreadable(b"x"),
    }
    files = [
        "manifest.json",
        "manifest.copy.json",
        "experiment.yaml",
        "rounds.parquet",
        "clients.parquet",
    ]
    files += ["weights/final.safetensors", "weights/round-000003.safetensors", "log.txt"]
    for name in files:
        for label, make in makers.items():
            for command in random.sample(COMMANDS, 2):
                case = {"run": replaced(name, make)}
                yield Case(
                    "folders",
                    f"{command[0]}: {name} {label}",
                    [*command, "run"],
                    case,
                    wrong=False,
                    plain=label == "unreadable",
                )
    for command in COMMANDS:
        for path, made in {
            "nowhere": {}, "file": {"file": "x"}, "empty": {"empty": a_folder}, "pipe": {"pipe": fifo},
            "/": {}, "/dev/null": {}, "/proc/self": {}, "\0": {}, "x" * 5000: {}, "a\ud800": {}, "": {},
        }.items():  # fmt: skip
            yield Case("folders", f"{command[0]} of {path[:20]!r}", [*command, path], made)
    for words in (
        *(["--round", "-1"], ["--round", "99"], ["--round", "x"], ["--round", str(10**30)]),
        *(["--client", "-1"], ["--client", "99"], ["--client", str(10**30)]),
        *(["--row", "-1"], ["--row", "99"], ["--row", str(10**30)], ["--row", "0", "--text", "x"]),
        *(
            ["--explainer", "tre"],
            ["--explainer", ""],
            ["--explainer", "os:system"],
            ["--explainer", "\0"],
        ),
        *(["--explainer", "own:It"], ["--explainer", "rules"], ["--explainer", "shared_images"]),
        *(
            ["--explainer", "fedsim.explain:Explainer"],
            ["--explainer", "lrp"],
            ["--explainer", "rationale"],
        ),
        *(["--text", "words"], ["--text", ""], ["--most", "-1"], ["--most", "3"], ["--npy", "x"]),
        *(["--input", "nowhere.npy"], ["--input", "."], ["--input", ""], ["--input", "\0"]),
    ):
        for kind in ("finished", "rules"):
            fine = kind == "rules" and words[0] in ("--most", "--npy") and words[1] != "-1"
            fine = fine or (kind == "rules" and words == ["--explainer", "rules"])
            label = f"explain {kind} {' '.join(words)[:40]!r}"
            yield Case(
                "explain and attack",
                label,
                ["explain", "run", *words],
                {"run": copy_of(kind)},
                wrong=not fine,
            )
    inputs: dict[str, dict[str, str | bytes | Callable[[Path], None]]] = {
        "npy": {
            "empty": b"", "noise": bytes(range(256)), "words": lambda p: np.save(p.open("wb"), np.array(["a"] * 4)),
            "a pickle": lambda p: np.save(p.open("wb"), np.array([{"a": 1}], dtype=object)),
            "another shape": lambda p: np.save(p.open("wb"), np.zeros((2, 7), np.float32)),
            "no row": lambda p: np.save(p.open("wb"), np.zeros((0, 4), np.float32)),
            "NaN": lambda p: np.save(p.open("wb"), np.full((1, 4), np.nan, np.float32)),
            "complex": lambda p: np.save(p.open("wb"), np.zeros((1, 4), complex)),
            "a number": lambda p: np.save(p.open("wb"), np.float32(1)), "a pipe": fifo, "a folder": a_folder,
            "unreadable": unreadable(b"x"), "/dev/zero": lambda p: p.symlink_to("/dev/zero"),
        },
        "csv": {"empty": "", "words": "a,b,c,d\nx,y,z,w\n", "short": "a\n1\n", "NUL": "\0", "a pipe": fifo, "a folder": a_folder},
        "png": {"empty": b"", "noise": bytes(range(256)), "a pipe": fifo, "a folder": a_folder},
        "txt": {"empty": "", "noise": bytes(range(256)), "a pipe": fifo, "words": "words"},
        "exe": {"anything": "x"},
    }  # fmt: skip
    for suffix, contents in inputs.items():
        for label, content in contents.items():
            for kind in ("finished", "rules"):
                case = {"run": copy_of(kind), f"in.{suffix}": content}
                yield Case("explain and attack", f"explain {kind}: .{suffix} {label}",
                           ["explain", "run", "--input", f"in.{suffix}"], case, plain=label == "unreadable")  # fmt: skip
    for shadows in ("-1", "x", "1.5", str(10**30), str(10**10)):
        yield Case(
            "explain and attack",
            f"attack --shadows {shadows[:12]}",
            ["attack", "run", "--shadows", shadows],
            {"run": copy_of("finished")},
        )
    yield Case("explain and attack", "attack rules", ["attack", "run"], {"run": copy_of("rules")})
    for words in (
        ["list"],
        ["list", "nothing"],
        ["nothing"],
        ["report"],
        ["verify"],
        ["run"],
        ["--nothing"],
        ["explain"],
    ):
        yield Case("explain and attack", f"{' '.join(words)}", words)


# clusters


def serve(answer: bytes | None) -> int:
    """A port that answers so, or never."""
    server = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        held = []
        while True:
            connection, _ = server.accept()
            held.append(connection)
            if answer is not None:
                with contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(answer)
                    connection.close()

    threading.Thread(target=run, daemon=True).start()
    return int(server.getsockname()[1])


def clusters() -> Iterator[Case]:
    addresses = [
        *("http://127.0.0.1:1", "127.0.0.1:1", "nowhere", "http://", "http://nowhere.invalid:8265", "ftp://x", "\0"),
        *("http://127.0.0.1:99999", "http://[::1", "ray://127.0.0.1:1", "http://127.0.0.1:x", "x" * 3000, "//", "auto"),
        *("http://\x1b[31m:1", "http://user:password@127.0.0.1:1"),
    ]  # fmt: skip
    small = {"small.yaml": changed()}
    for command in (["submit", "small.yaml"], ["jobs"], ["stop", "job"], ["fetch", "job"]):
        for address in addresses:
            yield Case(
                "clusters",
                f"{command[0]} --address {address[:30]!r}",
                [*command, "--address", address],
                small,
            )
    answers = {
        "rubbish": b"rubbish\r\n\r\n",
        "nothing": b"",
        "an error": b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n",
        "a page": b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
        "a list": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n[]",
        "another number": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n3",
        "a redirection to itself": b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n",
        "that it is forbidden": b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n",
    }
    for label, answer in answers.items():
        port = serve(answer)
        for command in (["submit", "small.yaml"], ["jobs"], ["stop", "job"], ["fetch", "job"]):
            where = f"http://127.0.0.1:{port}"
            yield Case(
                "clusters",
                f"{command[0]}: it answers {label}",
                [*command, "--address", where],
                small,
            )
    for command in (["submit", "nowhere.yaml"], ["fetch", "../.."], ["fetch", ""], ["stop", "\0"]):
        yield Case("clusters", repr(command), [*command, "--address", "http://127.0.0.1:1"], small)
    for given in ("A", "=", "=1", "A=\0", "A B=1"):
        words = ["submit", "small.yaml", "--address", "http://127.0.0.1:1", "--env", given]
        yield Case("clusters", f"--env {given!r}", words, small)


# carrying them out


def give_up_privileges() -> None:
    """Of root, by which it may read and write what modes forbid."""
    version_3, this_process = 0x20080522, 0
    header = (ctypes.c_uint32 * 2)(version_3, this_process)
    if os.geteuid() == 0 and ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()):
        raise OSError("root's privileges cannot be given up here")


def as_command(case: Case, folder: Path) -> int:
    """In a process of its own: prepare the folder and carry out the command; its exit code."""
    os.chdir(folder)
    for name, content in case.files.items():
        path = folder / name
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    Path(".prepared").write_text("\n".join(sorted(map(str, folder.rglob("*")))))
    if case.plain:
        give_up_privileges()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.argv = ["fedsim", *case.words]
    try:
        command_line()
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
            return 1
        return left.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def start(case: Case, folder: Path) -> int:
    """Fork a process for a case; its id."""
    process = os.fork()
    if process:
        return process
    code = 120  # of this script, not of the command
    try:
        os.setsid()
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(
                os.open(folder.with_suffix(f".{name}"), os.O_CREAT | os.O_WRONLY, 0o600),
                descriptor,
            )
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = as_command(case, folder)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def faults(case: Case, base: Path, limit: float) -> list[str]:
    """What is wrong with how a bad input ended; nothing, if all is well."""
    folder = base / "case"
    folder.mkdir()
    for name in ("stdout", "stderr"):
        folder.with_suffix(f".{name}").unlink(missing_ok=True)
    process, began, asked = start(case, folder), time.monotonic(), False
    while not (status := os.waitpid(process, os.WNOHANG))[0]:
        waited = time.monotonic() - began
        if case.endless and waited > 2 and not asked:
            asked = True
            os.kill(process, signal.SIGINT)
        if waited > limit:
            os.killpg(process, signal.SIGKILL)
            status = os.waitpid(process, 0)
            break
        time.sleep(0.002)
    code = os.waitstatus_to_exitcode(status[1])
    told = folder.with_suffix(".stderr").read_text(errors="replace")
    found = []
    lines = [
        line for line in told.splitlines() if line.strip() and not line.startswith("warning: ")
    ]
    if time.monotonic() - began > limit:
        found.append("goes on")
    elif code not in (0, 1, 2, 130):
        found.append(f"ended by {code}")
    if "Traceback" in told or re.search(r"^\w*Error", told, re.MULTILINE):
        found.append("traceback")
    elif len(lines) > MOST_LINES:
        found.append(f"{len(lines)} lines")
    if code == 0 and case.wrong and not case.endless:
        found.append("accepted")
    if code in (1, 2) and not re.search(r"error: |Error|Usage|to go on", told):
        found.append("says nothing")
    if code == 2 and case.words[0] in ("run", "data", "grid", "tune"):
        before = (folder / ".prepared").read_text().splitlines()
        left = sorted({*map(str, folder.rglob("*"))} - {*before, str(folder / ".prepared")})
        left = [path for path in left if "__pycache__" not in path]
        if left:
            found.append(f"left {left[0]}")
    for each in (folder, *folder.rglob("*")):
        if each.is_dir() and not each.is_symlink():
            each.chmod(0o700)
    shutil.rmtree(folder)
    if found:
        found.append(" | ".join(line[-160:] for line in told.strip().splitlines()[-2:]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--fields", type=int, default=2, help="strange values for each field")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=20.0, help="seconds for each input")
    parser.add_argument("--only", default="", help="kinds, or parts of labels, to be tried")
    given = parser.parse_args()
    random.seed(given.seed)
    torch.set_num_threads(1)
    base = Path(tempfile.mkdtemp(prefix="fedsim-bad-"))
    base.chmod(0o711)
    home = base / "home"
    home.mkdir()
    home.chmod(0o777)
    os.environ |= {
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home),
        "FEDSIM_DATA": str(base / "data"),
    }
    os.environ |= {"RAY_TMPDIR": str(base), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    sys.dont_write_bytecode = True
    making = os.fork()  # so that no thread of torch's is lost in a later fork
    if not making:
        try:
            make_templates(base)
            os._exit(0)
        except FedsimError:
            traceback.print_exc()
        finally:
            os._exit(1)
    if os.waitpid(making, 0)[1]:
        sys.exit("the runs that are to be damaged could not be made")
    found_templates(base)
    cases = [
        *fields(given.fields), *overrides(), *experiment_files(), *sweeps(), *components(),
        *data_files(), *outs(), *folders(given.fields), *clusters(),
    ]  # fmt: skip
    cases = [c for c in cases if given.only in c.kind or given.only in c.label]
    tried, failed = Counter[str](), Counter[tuple[str, str]]()
    began = time.monotonic()
    lines = []
    for case in cases:
        tried[case.kind] += 1
        if found := faults(case, base, given.limit):
            sort = "lines" if found[0].endswith(" lines") else found[0].partition(" /")[0]
            failed[case.kind, sort] += 1
            lines.append(f"{case.kind}: {case.label}: {', '.join(found[:-1])}\n    {found[-1]}")
            print(lines[-1], flush=True)
    sorts = sorted({sort for _, sort in failed})
    print(f"\nseed {given.seed}, {len(cases)} inputs in {time.monotonic() - began:.0f} s")
    table = pd.DataFrame(
        [{"kind": k, "tried": n, **{s: failed[k, s] for s in sorts}} for k, n in tried.items()]
    )
    print(table.to_string(index=False))
    shutil.rmtree(base, ignore_errors=True)
    sys.exit(bool(lines))


if __name__ == "__main__":
    main()
