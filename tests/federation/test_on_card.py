"""Training examples that lie on a card; here the card is the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import federation, small_experiment
from fedsim import run
from fedsim.data import Dataset
from fedsim.federation import context, on_card
from fedsim.federation.on_card import OnCard, keep_on_card

CPU, CARD = torch.device("cpu"), torch.device("cuda")
DATA: dict[str, dict[str, Any]] = {
    "bytes": {"data": {"name": "npz"}},
    "floats": {},
    "a regression": {
        "data": {"name": "friedman", "samples": 200},
        "model": {"name": "mlp", "hidden": [8]},
    },
    "token ids": {
        "data": {"name": "planted_reviews", "reviews": 20, "test_reviews": 5, "dimension": 4},
        "model": {"name": "text_cnn", "kernels": [1, 2], "filters": 3, "hidden": 5},
    },
}


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers keep their examples as they would on a card."""

    def keep(dataset: Dataset, device: torch.device) -> tuple[OnCard, None]:
        return OnCard(dataset, device), None

    monkeypatch.setattr(context, "keep_on_card", keep)
    monkeypatch.setattr(on_card, "CHUNK", 7)


@pytest.mark.parametrize("kind", DATA)
def test_runs_come_to_the_same_bits(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    sections = {**DATA[kind], "partition": {"kind": "iid", "clients": 4}}
    if kind == "bytes":
        x = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8)).astype(np.uint8)
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(60) % 3)
        sections["data"] = {"name": "npz", "path": tmp_path / "a.npz"}
    experiment = small_experiment(**sections, train={"rounds": 2})
    sent = run(experiment, tmp_path).result_hash
    request.getfixturevalue("on_a_card")
    assert run(experiment, tmp_path).result_hash == sent


def test_stored_inputs_are_read_once(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((50, 4)), np.arange(50) % 5
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    data = small_experiment(
        data={"name": "npz", "path": tmp_path / "a.npz", "in_place": True}
    ).data.load()
    rows = np.array([7, 3, 49])
    found_x, found_y = OnCard(data, CPU).rows(rows)
    np.testing.assert_array_equal(found_x, x[rows].astype(np.float32))
    np.testing.assert_array_equal(found_y, y[rows])


@pytest.mark.usefixtures("on_a_card")
def test_rows_are_the_client_s_own() -> None:
    fed = federation(small_experiment())
    first = fed.labelled_data
    before = first.x.clone()
    first.x.mul_(0)
    assert torch.equal(fed.labelled_data.x, before)
    np.testing.assert_array_equal(fed.labelled_data.table[0].astype(np.float32), before)


def test_nothing_is_kept_where_there_is_no_card() -> None:
    assert keep_on_card(small_experiment().data.load(), CPU) == (None, None)


def test_what_does_not_fit_is_sent_client_by_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = small_experiment().data.load()
    size = data.x.nbytes + data.y.nbytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * size - 1, 10**12))
    kept, told = keep_on_card(data, CARD)
    assert kept is None
    assert told == (
        f"the training data ({size / 1e9:.1f} GB) take more than half of the memory that is free "
        f"on the card ({(2 * size - 1) / 1e9:.1f} GB): they are sent to it client by client"
    )
    monkeypatch.setattr(context, "keep_on_card", lambda dataset, device: (None, told))
    lines: list[Any] = []
    run(small_experiment(train={"rounds": 1}), tmp_path, lines.append)
    assert lines.count(told) == 1
