"""Files of a run that are damaged or gone are named, and cost rounds but no bit of the result."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import fedsim
from experiments import Say, change_manifest, grid_in_process, interrupted, small_experiment
from fedsim.analysis.replay import replay
from fedsim.errors import Damaged, RunFolderError
from fedsim.results.run import Run

ROUNDS, BROKEN_OFF = 6, 5  # with checkpoints after every second round


def scaffold(**sections: Any) -> fedsim.Experiment:
    sections = {"train": {"rounds": ROUNDS, "participation": 0.4}, **sections}
    return small_experiment(
        method={"name": "scaffold"}, checkpoint={"every": 2, **sections.pop("checkpoint", {})},
        **sections,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fedsim.run(scaffold(), tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that broke off in round 5, with checkpoints of rounds 2 and 4."""
    return interrupted(scaffold(), tmp_path_factory.mktemp("begun"), BROKEN_OFF)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[2 * len(content) // 3] ^= 16
    path.write_bytes(content)


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


DAMAGES = {"flipped": flip, "truncated": truncate, "removed": Path.unlink}
IN_BOTH = "weights/clients/*-000002.safetensors"
# Where a run goes on if these are damaged; 0 is its start.
FILES = {
    "weights/round-000004.safetensors": 2,
    "weights/round-000002.safetensors": 4,
    "weights/clients/*-000004.safetensors": 2,
    IN_BOTH: 0,
    "rounds.parts/000004.parquet": 2,
    "rounds.parts/000002.parquet": 0,
    "clients.parts/000004.parquet": 2,
    "clients.parts/000002.parquet": 0,
}


def cases(names: Iterable[str], hows: Iterable[str]) -> Iterator[Any]:
    """Each file with one damage, and the first one with all; the other pairs at night."""
    hows = list(hows)
    for i, name in enumerate(names):
        for j, how in enumerate(hows):
            chosen = i == 0 or i % len(hows) == j
            yield pytest.param(name, how, marks=[] if chosen else pytest.mark.night)


def same_result(done: Run, whole: Run) -> None:
    assert done.result_hash == whole.result_hash
    for table in ("rounds", "clients"):
        a, b = (getattr(run, table).drop(columns="seconds") for run in (done, whole))
        pd.testing.assert_frame_equal(a, b)


@pytest.mark.parametrize(("file", "how"), cases(FILES, DAMAGES))
def test_a_resumed_run_ends_as_if_nothing_had_been(
    begun: Path, whole: Run, tmp_path: Path, say: Say, file: str, how: str
) -> None:
    begin = FILES[file]
    path = shutil.copytree(begun, tmp_path / "run")
    damaged, *_ = (
        found
        for found in sorted(path.glob(file))
        # Of client states, one that both checkpoints need.
        if file != IN_BOTH or not found.with_name(found.name.replace("2.", "4.")).exists()
    )
    unused = begin == 4  # the checkpoint before the last
    assert say("verify", str(path))[0] == 0
    DAMAGES[how](damaged)
    code, _, complaint = say("verify", str(path))
    assert code == 2
    assert re.search(rf"{damaged.parent}/\S+: is (damaged|missing)", complaint)
    lines: list[str] = []
    done = fedsim.resume(path, lambda event: isinstance(event, str) and lines.append(event))
    same_result(done, whole)
    if not unused:
        assert damaged.parent.name in lines[0]
        assert lines[0].endswith("; skipping this checkpoint")
    assert (f"continuing after round {begin}" in lines) == bool(begin)
    assert say("verify", str(path))[0] == 0


@pytest.mark.parametrize(
    ("name", "how"),
    cases(["rounds.parquet", "clients.parquet", "labels.parquet", "final.safetensors"], DAMAGES),
)
def test_a_finished_run_is_made_whole(
    whole: Run, tmp_path: Path, say: Say, name: str, how: str
) -> None:
    path = shutil.copytree(whole.path, tmp_path / "run")
    (damaged,) = path.rglob(name)
    DAMAGES[how](damaged)
    run = fedsim.load(path)
    read: Callable[[], object] = {
        "rounds.parquet": lambda: run.rounds,
        "clients.parquet": lambda: run.clients,
        "labels.parquet": lambda: run.labels,
        "final.safetensors": run.weights,
    }[name]
    with pytest.raises(RunFolderError, match=f"{damaged}: |it has no weights yet"):
        read()
    code, _, complaint = say("verify", str(path))
    assert (code, str(damaged) in complaint) == (2, True)
    same_result(fedsim.resume(path), whole)
    pd.testing.assert_frame_equal(fedsim.load(path).labels, whole.labels)
    assert say("verify", str(path))[:2] == (0, "no damage found (1 folder(s))\n")


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


OF_DESCRIPTIONS = {"zeros": zeros, "removed": Path.unlink}


@pytest.mark.parametrize(
    ("name", "how"),
    cases(["manifest.json", "manifest.copy.json", "experiment.yaml"], OF_DESCRIPTIONS),
)
def test_either_description_of_a_folder_makes_the_other_good(
    begun: Path, whole: Run, tmp_path: Path, say: Say, name: str, how: str
) -> None:
    path = shutil.copytree(begun, tmp_path / "run")
    OF_DESCRIPTIONS[how](path / name)
    code, _, complaint = say("verify", str(path))
    assert (code, str(path / name) in complaint) == (2, True)
    same_result(fedsim.resume(path), whole)
    assert (path / "manifest.copy.json").read_bytes() == (path / "manifest.json").read_bytes()
    assert say("verify", str(path))[0] == 0


def test_a_damaged_manifest_is_read_from_its_copy(whole: Run, tmp_path: Path, say: Say) -> None:
    path = shutil.copytree(whole.path, tmp_path / "run")
    file = path / "manifest.json"
    file.write_text(file.read_text().replace(whole.result_hash, whole.result_hash[::-1]))
    assert fedsim.load(path).result_hash == whole.result_hash
    damage = f"{file}: is damaged: its checksum does not match"
    assert damage in say("verify", str(path))[2]
    lines: list[object] = []
    same_result(fedsim.resume(path, lines.append), whole)
    assert lines == [damage]
    assert say("verify", str(path))[0] == 0
    for each in (file, path / "manifest.copy.json"):
        each.write_text(each.read_text().replace(whole.result_hash, whole.result_hash[::-1]))
    with pytest.raises(Damaged, match=damage):
        fedsim.load(path)
    assert say("report", str(path))[0] == 2


def test_a_run_whose_process_ended_while_it_cleared_up(
    begun: Path, whole: Run, tmp_path: Path
) -> None:
    """All is written, and the manifest has the hash; the parts of a table are still there."""
    path = shutil.copytree(whole.path, tmp_path / "run")
    shutil.copytree(begun / "rounds.parts", path / "rounds.parts")
    change_manifest(path, status="running")
    rounds: list[Any] = []
    same_result(fedsim.resume(path, rounds.append), whole)
    assert rounds == []
    assert not (path / "rounds.parts").exists()


def test_what_was_being_written_is_removed(begun: Path, tmp_path: Path) -> None:
    path = shutil.copytree(begun, tmp_path / "run")
    left = [path / ".manifest.json.1a2b.part", path / "weights/.round-000006.safetensors.0.part"]
    for file in left:
        file.write_bytes(b"half")
    fedsim.resume(path)
    assert not any(file.exists() for file in left)


def test_a_grid_is_verified_run_by_run(tmp_path: Path, say: Say) -> None:
    content = small_experiment(train={"rounds": 2}).model_dump(mode="json")
    axes = {"partition.clients": [5, 6]}
    folder = grid_in_process({**content, "grid": {"axes": axes, "seeds": [0, 1]}}, tmp_path)
    assert say("verify", str(folder))[:2] == (0, "no damage found (5 folder(s))\n")
    run = sorted(folder.glob("cells/*/*"))[0]
    flip(run / "rounds.parquet")
    truncate(folder / "summary.parquet")
    code, _, complaint = say("verify", str(folder))
    assert code == 2
    assert complaint.startswith("error: 2 file(s) damaged or missing:\n  ")
    assert all(
        str(file) in complaint for file in (run / "rounds.parquet", folder / "summary.parquet")
    )


def test_a_run_that_goes_on_elsewhere_says_so(begun: Path, tmp_path: Path) -> None:
    path = shutil.copytree(begun, tmp_path / "run")
    manifest = fedsim.load(path).manifest
    there = {**manifest["hardware"], "processor": "Z80", "capability": "NONE"}
    there["variables"] = {"MKL_CBWR": "AUTO"}
    packages = {**manifest["packages"], "torch": "1.0"}
    change_manifest(path, hardware=there, packages=packages)
    lines: list[Any] = []
    fedsim.resume(path, lines.append)
    here = manifest["hardware"]
    assert lines[0] == (
        f"the run began on another system (processor 'Z80', now {here['processor']!r}; "
        f"capability 'NONE', now {here['capability']!r}; variables {{'MKL_CBWR': 'AUTO'}}, now "
        f"{here['variables']}; torch 1.0, now "
        f"{manifest['packages']['torch']}): further rounds may round differently and "
        "change the hash"
    )
    lines.clear()
    fedsim.resume(shutil.copytree(begun, tmp_path / "here"), lines.append)
    assert "another system" not in str(lines)


# whole files that are another's


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same with another seed."""
    return fedsim.run(scaffold(seed=7), tmp_path_factory.mktemp("other"))


def checkpoint(path: Path, t: int) -> Path:
    return path / "weights" / f"round-{t:06d}.safetensors"


def states(path: Path, t: int) -> list[Path]:
    return sorted((path / "weights" / "clients").glob(f"*-{t:06d}.safetensors"))


def swap(a: Path, b: Path) -> None:
    one, another = a.read_bytes(), b.read_bytes()
    a.write_bytes(another)
    b.write_bytes(one)


def earlier_state(path: Path) -> Path:
    """A client's state of round 4 becomes that of round 2."""
    for state in states(path, 4):
        before = state.with_name(state.name.replace("4.", "2."))
        if before.exists():
            shutil.copyfile(before, state)
            return state
    raise AssertionError("no client has both")


# Of a run that broke off: what is mixed up, where it goes on, and what is said.
BEGUN: dict[str, tuple[Callable[[Path, Path], object], int, str]] = {
    "an earlier round": (
        lambda path, other: shutil.copyfile(checkpoint(path, 2), checkpoint(path, 4)),
        *(2, "round-000004.safetensors: is the checkpoint of round 2, not of 4"),
    ),
    "a later round": (
        lambda path, other: shutil.copyfile(checkpoint(path, 4), checkpoint(path, 5)),
        *(4, "round-000005.safetensors: is the checkpoint of round 4, not of 5"),
    ),
    "two clients": (
        lambda path, other: swap(*states(path, 4)[:2]),
        *(2, "-000004.safetensors: is whole, but another file than the checkpoint's"),
    ),
    "a client's earlier state": (
        lambda path, other: earlier_state(path),
        *(2, "-000004.safetensors: is whole, but another file than the checkpoint's"),
    ),
    "another run": (
        lambda path, other: shutil.copyfile(checkpoint(other, 4), checkpoint(path, 4)),
        *(2, "round-000004.safetensors: is a checkpoint of another run, with another experiment"),
    ),
    "another run's table": (
        lambda path, other: shutil.copyfile(
            other / "rounds.parquet", path / "rounds.parts/000004.parquet"
        ),
        *(2, ".parquet: is damaged, or a part before or after it is gone"),
    ),
}


@pytest.mark.parametrize("what", BEGUN)
def test_a_mix_up_is_passed_over(
    begun: Path, whole: Run, other: Run, tmp_path: Path, say: Say, what: str
) -> None:
    path = shutil.copytree(begun, tmp_path / "run")
    mix, begin, message = BEGUN[what]
    mix(path, other.path)
    code, _, complaint = say("verify", str(path))
    assert (code, message in complaint) == (2, True), complaint
    lines: list[str] = []
    done = fedsim.resume(path, lambda event: isinstance(event, str) and lines.append(event))
    same_result(done, whole)
    assert message in lines[0]
    assert f"continuing after round {begin}" in lines
    assert say("verify", str(path))[0] == 0


LAST = checkpoint(Path(), ROUNDS)
OTHER_END = (
    rf"{LAST}: is a checkpoint of another run|{LAST}: is not the end of this run: its result hash "
    r"is \w{16}, and the run's is \w{16}"
)
OTHERS = {
    "end": ([LAST], OTHER_END),
    "final weights": ([Path("weights/final.safetensors")], "final.safetensors: is damaged"),
    "all weights": ([Path("weights")], f"final.safetensors: is damaged|{OTHER_END}"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_the_weights_of_another_run(
    whole: Run, other: Run, tmp_path: Path, say: Say, what: str
) -> None:
    path, from_ = (shutil.copytree(r.path, tmp_path / r.path.name) for r in (whole, other))
    names, message = OTHERS[what]
    for name in names:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
            shutil.copytree(from_ / name, path / name)
        else:
            shutil.copyfile(from_ / name, path / name)
    code, _, complaint = say("verify", str(path))
    assert code == 2
    assert re.search(message, complaint)
    run = fedsim.load(path)
    with pytest.raises(RunFolderError, match=message):
        fedsim.compare(run, whole)
    with pytest.raises(RunFolderError, match=message):
        fedsim.extend(run, {"train.rounds": ROUNDS + 1}, tmp_path)
    if what != "end":
        with pytest.raises(RunFolderError, match=r"final.safetensors: is damaged"):
            run.weights()
    with warnings.catch_warnings(record=True) as found:
        again = replay(run)
    assert bool(found) == (what != "final weights")
    assert (again.state.weights == replay(whole).state.weights).all()


def test_a_copy_of_another_manifest(whole: Run, other: Run, tmp_path: Path, say: Say) -> None:
    path = shutil.copytree(whole.path, tmp_path / "run")
    shutil.copyfile(other.path / "manifest.copy.json", path / "manifest.copy.json")
    code, _, complaint = say("verify", str(path))
    assert (code, "manifest.copy.json: is the manifest of another run" in complaint) == (2, True)
    shutil.copyfile(other.path / "manifest.json", path / "manifest.json")
    code, _, complaint = say("verify", str(path))
    assert (code, "experiment.yaml was edited after the run started" in complaint) == (2, True)


def test_runs_that_kept_no_weights_are_compared(whole: Run, other: Run, tmp_path: Path) -> None:
    path = shutil.copytree(whole.path, tmp_path / "run")
    shutil.rmtree(path / "weights")
    results = fedsim.compare(fedsim.load(path), other).results
    assert results["differs_from_round"].tolist()[1:] == [1]
