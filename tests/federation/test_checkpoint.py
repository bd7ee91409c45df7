"""Checkpoints give back what they were given, or say that they cannot."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedsim.federation.checkpoint import Checkpoints, pack, read_tree, write_tree

dtypes = st.sampled_from(
    ["float32", "float64", "float16", "int64", "int32", "uint8", "int8", "bool"]
)
arrays = hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
keys = scalars.filter(lambda key: key == key) | st.tuples(st.integers(), st.text(max_size=2))
trees = st.recursive(
    scalars | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.tuples()
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, dict):
        assert_same(list(one), list(other))
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other or (math.isnan(one) and math.isnan(other))


@given(trees)
@example(np.arange(6, dtype=np.float32).reshape(2, 3).T)
# float64 times a float32 array is float64; a plain number times it is float32.
@example([np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True)])
def test_through_a_file(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_tree(Path(folder, "tree.safetensors"), tree)
        assert_same(read_tree(Path(folder, "tree.safetensors")), tree)


@pytest.mark.parametrize("thing", [object(), {1, 2}, b"bytes", 1j, len, Path("x")])
def test_objects_are_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match=f"a state may hold .*; not {type(thing).__name__}"):
        pack({"field": [thing]}, {})


# the checkpoints of a run


@dataclass(frozen=True)
class ServerState:
    weights: NDArray[np.float32]
    control: dict[str, Any]


class Clients:
    """The part of a federation that keeps client states."""

    def __init__(self) -> None:
        self.kept: dict[int, dict[str, Any]] = {}

    def states(self) -> dict[int, Any]:
        return dict(self.kept)

    def fetch(self, handle: dict[str, Any]) -> dict[str, Any]:
        return handle

    def restore(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        self.kept = {id: dict(state) for id, state in states.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


def state(t: float) -> ServerState:
    return ServerState(np.full(3, t, dtype=np.float32), {"round": t, "deep": [np.arange(2)]})


def save(
    checkpoints: Checkpoints, t: int, fed: Clients, progress: dict[str, Any] | None = None
) -> None:
    checkpoints.save(t, state(t), fed, progress or {})  # type: ignore[arg-type]
    checkpoints.prune()


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_the_latest_is_taken_up(folder: Path) -> None:
    fed, again, saver = Clients(), Clients(), Checkpoints(folder)
    again.kept = {3: {"control": np.ones(2)}}
    assert Checkpoints(folder).latest(state(0), again) is None  # type: ignore[arg-type]
    assert again.kept == {}
    fed.kept = {1: {"control": np.ones(2)}, 12: {"count": 4}}
    save(saver, 2, fed, {"chain": "ab", "total": 5})
    fed.kept[12] = {"count": 5}
    save(saver, 4, fed, {"chain": "cd", "total": 9})
    found = Checkpoints(folder).latest(state(0), again)  # type: ignore[arg-type]
    assert found is not None
    assert (found.round, found.progress) == (4, {"chain": "cd", "total": 9})
    assert_same(found.state.weights, state(4).weights)
    assert_same(found.state.control, state(4).control)
    assert_same(again.kept, {1: {"control": np.ones(2)}, 12: {"count": 5}})


def test_only_what_changed_is_written_and_two_checkpoints_kept(folder: Path) -> None:
    fed, saver = Clients(), Checkpoints(folder)
    fed.kept = {1: {"n": 1}, 2: {"n": 1}}
    save(saver, 1, fed)
    first = {"round-000001.safetensors", "clients/1-000001.safetensors"}
    assert files(folder) == {*first, "clients/2-000001.safetensors"}
    fed.kept[2] = {"n": 2}
    save(saver, 3, fed)
    third = {"round-000003.safetensors", "clients/2-000003.safetensors"}
    assert files(folder) == {*first, "clients/2-000001.safetensors", *third}
    resumed, going_on = Clients(), Checkpoints(folder)
    going_on.latest(state(0), resumed)  # type: ignore[arg-type]
    save(going_on, 4, resumed)
    fourth = {"clients/1-000001.safetensors", "round-000004.safetensors"}
    assert files(folder) == {*third, *fourth}


def test_files_of_others_are_left_alone(folder: Path) -> None:
    (folder / "clients").mkdir(parents=True)
    theirs = {"clients/notes.txt", "round-best.safetensors", "clients/1-a.safetensors"}
    for name in theirs:
        (folder / name).write_text("mine")
    saver = Checkpoints(folder)
    for t in (1, 2, 3):
        save(saver, t, Clients())
    assert files(folder) == {"round-000002.safetensors", "round-000003.safetensors", *theirs}


@pytest.fixture
def saved(folder: Path) -> Path:
    """Checkpoints of rounds 2 and 4; client 1's state changed between them."""
    fed, saver = Clients(), Checkpoints(folder)
    for t in (2, 4):
        fed.kept = {1: {"control": np.full(50, t)}, 2: {"control": np.ones(3)}}
        save(saver, t, fed, {"t": t})
    return folder


def taken_up(folder: Path) -> tuple[int | None, list[str]]:
    """After which round a run would go on, and which checkpoints it passed over."""
    fed, checkpoints = Clients(), Checkpoints(folder)
    found = checkpoints.latest(state(0), fed)  # type: ignore[arg-type]
    if found is None:
        assert fed.kept == {}
        return None, checkpoints.skipped
    assert_same(found.state.weights, state(found.round).weights)
    assert_same(fed.kept[1], {"control": np.full(50, found.round)})
    return found.round, checkpoints.skipped


LATEST = ["round-000004.safetensors", "clients/1-000004.safetensors"]


def test_every_client_state_has_a_checksum(saved: Path) -> None:
    path = saved / LATEST[0]
    write_tree(path, {**read_tree(path), "checksums": {}})
    assert taken_up(saved) == (2, [f"{path}: is damaged: it does not contain a checkpoint"])
    Checkpoints(saved).drop_after(2)
    assert taken_up(saved) == (2, [])


@pytest.mark.parametrize("name", LATEST)
def test_a_flipped_bit_is_noticed_or_changes_nothing(saved: Path, name: str) -> None:
    path = saved / name
    content = path.read_bytes()
    survived = 0
    for place in range(0, 8 * len(content), 7):
        flipped = bytearray(content)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        t, said = taken_up(saved)
        assert (t, len(said)) in ((2, 1), (4, 0)), place
        survived += t == 4
    assert survived < len(content) / 50  # blanks that fill up the header


def test_without_any_whole_checkpoint_a_run_begins_anew(saved: Path) -> None:
    for path in saved.glob("round-*"):
        path.write_bytes(b"")
    t, said = taken_up(saved)
    assert t is None
    assert [line.partition(":")[0] for line in said] == [
        str(saved / f"round-00000{t}.safetensors") for t in (4, 2)
    ]
