"""Folders that were edited anywhere: every command works, or answers in a few lines."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

import fedsim
from experiments import Say, examples, grid_in_process, interrupted, small_experiment
from fedsim.federation.checkpoint import read_tree, write_tree
from fedsim.results import manifest as manifests
from fedsim.support import atomic

MOST_LINES = 6

LEAF = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -1, 10**30, float("nan"), float("inf"), 1e308]),
    st.text(max_size=6),
    st.sampled_from(["", "../..", "/etc/passwd", "\0", "\x1b[31m", "a" * 5000, "finished"]),
)
VALUE = st.recursive(
    LEAF, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3),
    max_leaves=6,
)  # fmt: skip


def places(tree: Any) -> list[tuple[Any, Any]]:
    """All (container, key) of a nest of dicts and lists."""
    found: list[tuple[Any, Any]] = []
    parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in parts:
        found.append((tree, key))
        if isinstance(value, dict | list):
            found += places(value)
    return found


def changed_somewhere(tree: Any, draw: Callable[..., Any], values: st.SearchStrategy[Any]) -> None:
    """Put another value at one place of a nest, or remove what stands there."""
    container, key = draw(st.sampled_from(places(tree)))
    if draw(st.integers(0, 4)):
        container[key] = draw(values)
    else:
        del container[key]


def edit_manifest(folder: Path, draw: Callable[..., Any]) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("checksum")
    changed_somewhere(manifest, draw, VALUE)
    manifests.write(folder, manifest)


def known_checksums(folder: Path) -> None:
    """Make the manifest fit the files, as somebody who means no good would."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest.pop("checksum")
    for name in manifest.get("files", {}):
        manifest["files"][name] = atomic.checksum(folder / name)
    manifests.write(folder, manifest)


ARRAYS = st.sampled_from(
    [np.zeros(3, np.float32), np.array("a"), np.array([], np.int64), np.full(2, np.nan)]
)


def edit_checkpoint(folder: Path, draw: Callable[..., Any]) -> None:
    files = sorted(folder.rglob("round-*.safetensors")) + sorted(folder.rglob("*-0*.safetensors"))
    if not files:
        return
    path = draw(st.sampled_from(files))
    tree = read_tree(path)
    if isinstance(tree, dict | list) and tree:
        changed_somewhere(tree, draw, VALUE | ARRAYS.filter(lambda a: a.dtype.kind in "biuf"))
    else:
        tree = draw(VALUE)
    write_tree(path, tree)


def edit_weights(folder: Path, draw: Callable[..., Any]) -> None:
    for path in sorted(folder.rglob("final.safetensors"))[:1]:
        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        name = draw(st.sampled_from(sorted(arrays)))
        how = draw(st.sampled_from(["renamed", "removed", "resized", "retyped", "metadata"]))
        array = arrays.pop(name)
        if how == "renamed":
            arrays[name + "_"] = array
        elif how == "resized":
            arrays[name] = array.reshape(-1)[:1]
        elif how == "retyped":
            arrays[name] = array.astype(np.int8)
        elif how == "metadata":
            arrays[name] = array
            metadata = {"layers": draw(st.sampled_from(["[", "{}", "3", '["x"]', "null"]))}
        save_file(arrays, path, metadata)


def edit_table(folder: Path, draw: Callable[..., Any]) -> None:
    tables = sorted(folder.rglob("*.parquet"))
    if not tables:
        return
    path = draw(st.sampled_from(tables))
    table = pd.read_parquet(path)
    column = draw(st.sampled_from(list(table.columns)))
    how = draw(st.sampled_from(["removed", "text", "empty", "missing", "lists", "negative"]))
    if how == "removed":
        table = table.drop(columns=column)
    elif how == "empty":
        table = table[:0]
    else:
        values: dict[str, Any] = {"text": "x", "missing": None, "negative": -1}
        table[column] = [[1]] * len(table) if how == "lists" else values[how]
    table.to_parquet(path)


def edit_bytes(folder: Path, draw: Callable[..., Any]) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = draw(st.sampled_from(files))
    content = path.read_bytes()
    how = draw(st.sampled_from(["cut", "zeros", "noise", "folder", "pipe", "removed"]))
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    elif how != "removed":
        noise = random.Random(len(content)).randbytes(len(content))
        path.write_bytes(
            {"cut": content[: len(content) // 2], "zeros": bytes(len(content)), "noise": noise}[
                how
            ]
        )


EDITS = [edit_manifest, edit_checkpoint, edit_weights, edit_table, edit_bytes]
COMMANDS = {
    "begun": (["resume"], ["report"], ["verify"], ["explain"]),
    "finished": (["resume"], ["report"], ["verify"], ["explain"], ["explain", "--row", "0"]),
    "grid": (["report"], ["verify"], ["explain"]),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that broke off, one that has finished, and a grid with one run left."""
    out = tmp_path_factory.mktemp("fuzz")
    sections: dict[str, Any] = {
        "method": {"name": "scaffold"},
        "train": {"rounds": 4, "participation": 0.3},
        "checkpoint": {"every": 1},
        "explain": {
            **{"explainers": ["gradient"], "every": 1, "clients": 2, "inputs": 2, "maps": True},
            "scores": ["deletion", "agreement", "drift"],
        },
    }

    begun = interrupted(small_experiment(**sections), out / "begun", 3)
    finished = fedsim.run(small_experiment(**sections), out / "finished").path
    content = small_experiment(**sections).model_dump(mode="json")
    axes = {"train.optimizer.lr": [0.1, 0.2]}
    grid = grid_in_process({**content, "grid": {"axes": axes}}, out)
    return {"begun": begun, "finished": finished, "grid": grid}


@pytest.mark.parametrize("name", ["labels", "rounds", "explanations"])
def test_a_table_without_rows(folders: dict[str, Path], say: Say, name: str) -> None:
    path = shutil.copytree(folders["finished"], Path(name))
    pd.read_parquet(path / f"{name}.parquet")[:0].to_parquet(path / f"{name}.parquet")
    known_checksums(path)
    code, _, complaint = say("report", str(path))
    assert code == 0 or "error: " in complaint


@given(st.data())
@settings(
    examples(5, by_night=70),
    phases=[Phase.explicit, Phase.generate],  # shrinking would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_edit_ends_in_a_traceback(
    folders: dict[str, Path], say: Say, tmp_path: Path, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(sorted(folders)))
    path = tmp_path / "edited"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(folders[kind], path)
    where = path
    if kind == "grid" and data.draw(st.booleans()):
        where = data.draw(
            st.sampled_from(sorted(m.parent for m in path.glob("*/**/manifest.json")))
        )
    edit = data.draw(st.sampled_from(EDITS))
    edit(where, data.draw)
    if edit in (edit_table, edit_weights) and data.draw(st.booleans()):
        known_checksums(where)
    command = data.draw(st.sampled_from(COMMANDS[kind]))
    code, _, complaint = say(*command[:1], *command[1:], str(path))
    assert code in (0, 1, 2)
    assert len(complaint.strip().splitlines()) <= MOST_LINES, complaint
    assert code == 0 or "error: " in complaint
