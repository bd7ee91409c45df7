"""Training examples that lie on a card; here the card is the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import FOUR, KINDS, NUMBERS, small_experiment
from fedsim import run
from fedsim.data import Dataset
from fedsim.federation import context, on_card
from fedsim.federation.context import WorkerContext
from fedsim.federation.on_card import OnCard, keep_on_card
from fedsim.launch.prepare import prepare

CPU, CARD = torch.device("cpu"), torch.device("cuda")
DATA: dict[str, dict[str, Any]] = {
    "bytes": {"data": {"name": "npz"}},
    "floats": {},
    "a regression": NUMBERS,
    "token ids": KINDS["documents"],
}


@pytest.fixture
def on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers keep their examples as they would on a card."""

    def keep(dataset: Dataset, device: torch.device, part: float) -> tuple[OnCard | None, None]:
        return (OnCard(dataset, device) if part else None), None

    monkeypatch.setattr(context, "keep_on_card", keep)
    monkeypatch.setattr(on_card, "CHUNK_BYTES", 1500)


@pytest.mark.parametrize("kind", DATA)
def test_runs_come_to_the_same_bits(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    sections = {**DATA[kind], "partition": FOUR}
    if kind == "bytes":
        x = np.random.default_rng(0).integers(0, 256, (60, 3, 8, 8)).astype(np.uint8)
        np.savez(tmp_path / "a.npz", x=x, y=np.arange(60) % 3)
        sections["data"] = {"name": "npz", "path": tmp_path / "a.npz"}
    experiment = small_experiment(**sections, train={"rounds": 2})
    sent = run(experiment, tmp_path).result_hash
    request.getfixturevalue("on_a_card")
    assert run(experiment, tmp_path).result_hash == sent


def test_stored_inputs_stay_in_their_files(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).random((50, 4)), np.arange(50) % 5
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:5], y_test=y[:5])
    data = small_experiment(
        data={"name": "npz", "path": tmp_path / "a.npz", "in_place": True}
    ).data.load()
    assert keep_on_card(data, CARD, 1.0) == (None, None)


@pytest.mark.usefixtures("on_a_card")
def test_rows_are_the_client_s_own() -> None:
    dataset, splits, spec = prepare(small_experiment())
    worker = WorkerContext(spec, dataset, splits, CPU, 1.0)
    rows = np.array([7, 3, 49])
    first = worker.examples(rows)
    before = first.x.clone()
    first.x.mul_(0)
    assert torch.equal(worker.examples(rows).x, before)
    np.testing.assert_array_equal(worker.examples(rows).table[0].astype(np.float32), before)


def test_nothing_is_kept_where_there_is_no_card_or_no_part_of_one() -> None:
    data = small_experiment().data.load()
    assert keep_on_card(data, CPU, 1.0) == (None, None)
    assert keep_on_card(data, CARD, 0.0) == (None, None)


def told(size: int, room: float) -> str:
    return (
        f"the training data ({size / 1e9:.1f} GB) do not fit the GPU's free memory "
        f"({room / 1e9:.1f} GB): each client's data are copied when it trains"
    )


@pytest.mark.parametrize(
    ("free", "total", "part"), [(0.9, 100, 1.0), (3, 3.9, 0.5), (100, 100, 0.01)]
)
def test_what_does_not_fit_is_sent_client_by_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, total: float, part: float
) -> None:
    data = small_experiment().data.load()
    size = data.x.nbytes + data.y.nbytes
    memory = int(free * size), int(total * size)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory)
    line = told(size, min(memory[0], 0.5 * part * memory[1]))
    assert keep_on_card(data, CARD, part) == (None, line)
    monkeypatch.setattr(context, "keep_on_card", lambda *_: (None, line))
    lines: list[Any] = []
    run(small_experiment(train={"rounds": 1}), tmp_path, lines.append)
    assert lines.count(line) == 1


def test_another_process_may_take_the_room_first(monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_experiment().data.load()

    def full(*_: Any) -> OnCard:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**12, 10**12))
    monkeypatch.setattr(on_card, "OnCard", full)
    assert keep_on_card(data, CARD, 1.0) == (None, told(data.x.nbytes + data.y.nbytes, 0))
