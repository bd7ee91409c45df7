"""A finished run goes on for more rounds, as another run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

from experiments import Finish, Say, change_manifest, interrupt, with_method
from fedsim import extend, replay, resume
from fedsim.errors import BadInput, RunFolderError
from fedsim.results.folder import FINAL_WEIGHTS


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedbuff"])
def test_it_is_the_run_that_was_longer_from_the_start(
    finish: Finish, tmp_path: Path, method: str
) -> None:
    def made(rounds: int) -> dict[str, Any]:
        return with_method(method, train={"rounds": rounds, "participation": 0.5})

    short, whole = finish(**made(3)), finish(**made(6))
    longer = extend(short, {"train.rounds": 6}, tmp_path / "more", progress=False)
    assert longer.manifest["continues"] == {
        "folder": str(short.path),
        "round": 3,
        "result_hash": short.result_hash,
    }
    before, after = (load_file(each.path / FINAL_WEIGHTS) for each in (whole, longer))
    for name, layer in before.items():
        np.testing.assert_array_equal(after[name], layer)
    for table in ("rounds", "clients"):
        found, expected = (
            getattr(each, table).drop(columns=["seconds"]) for each in (longer, whole)
        )
        pd.testing.assert_frame_equal(found[expected.columns.tolist()], expected)
    assert longer.result_hash == whole.result_hash
    assert longer.result_hash != short.result_hash
    assert replay(longer, 5).after == 5


def test_it_can_be_interrupted_and_resumed(finish: Finish, tmp_path: Path) -> None:
    short = finish(train={"rounds": 2})
    changes = {"train.rounds": 6, "checkpoint.every": 1}
    whole = extend(short, changes, tmp_path / "whole", progress=False)

    with pytest.raises(KeyboardInterrupt):
        extend(short.path, changes, tmp_path / "cut", interrupt(4))
    (folder,) = (tmp_path / "cut").glob("*/*")
    assert resume(folder).result_hash == whole.result_hash


def test_the_command(finish: Finish, say: Say) -> None:
    done = finish(train={"rounds": 2})
    code, text, _ = say("continue", str(done.path), "train.rounds=4", "name=longer")
    assert code == 0
    assert "accuracy, last round" in text
    (folder,) = Path("runs/longer").iterdir()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["continues"]["round"] == 2


def test_what_cannot_be_continued(finish: Finish) -> None:
    done = finish(train={"rounds": 2})
    for key, value in {"train.optimizer.lr": 1, "seed": 3}.items():
        told = f"^{key.removesuffix('.lr')} cannot change when a run is continued; only name, eng"
        with pytest.raises(BadInput, match=told):
            extend(done, {"train.rounds": 4, key: value})
    change_manifest(done.path, status="interrupted")
    with pytest.raises(BadInput, match="is interrupted; only finished runs can be continued"):
        extend(done.path, {"train.rounds": 4})


def test_tasks_one_after_another(finish: Finish, tmp_path: Path) -> None:
    tasks = [[["0", "1"], ["2", "3"]], [["4", "5"], ["0", "6"]]]
    done = finish(partition={"kind": "own_tasks", "tasks": tasks}, train={"rounds": 2})
    with pytest.raises(BadInput, match="are divided among all rounds; start a new run instead"):
        extend(done, ["train.rounds=4"], tmp_path)


def test_earlier_rounds_with_other_settings_are_recomputed_from_their_run(
    finish: Finish, tmp_path: Path
) -> None:
    schedule = {"name": "cosine"}
    short = finish(train={"rounds": 3, "schedule": schedule})
    longer = extend(short, {"train.rounds": 6}, tmp_path, progress=False)
    assert replay(short, 2).after == 2
    with pytest.raises(RunFolderError) as told:
        replay(longer, 2)
    assert str(told.value).endswith(
        f"; its first 3 rounds are those of {short.path}, perhaps with other learning rates, "
        "evaluations or devices; recompute them from that run"
    )
