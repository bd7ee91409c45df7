"""Adversaries: who they are, the examples that they poison, and the updates that they forge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from experiments import WHOLE, small_experiment
from fedsim import Run, run
from fedsim.conditions.adversaries import Adversaries, attacks
from fedsim.conditions.adversaries.on_updates import largest_z
from fedsim.conditions.adversaries.section import POISONED
from fedsim.errors import BadInput
from fedsim.launch.prepare import prepare
from fedsim.results.records import known_columns
from fedsim.support.rng import keyed_rng

IID = {"kind": "iid", "clients": 10}
TABLE = {"name": "synthetic", "samples": 200, "test_samples": 50, "classes": 4}


def forged(attack: dict[str, Any], changes: np.ndarray, adversary: list[bool]) -> np.ndarray:
    made = attacks.parse(attack)
    found = made.forge(changes, np.array(adversary), np.random.default_rng(0))
    assert isinstance(found, np.ndarray)
    return found


# updates


def test_a_sign_is_flipped() -> None:
    changes = np.array([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0]])
    found = forged({"name": "sign_flip", "scale": 2}, changes, [True, False, True])
    assert found.tolist() == [[-2, 4], [-10, -12]]


def test_noise_has_its_size() -> None:
    adversary = [True, True, False]
    found = forged({"name": "gaussian", "std": 3}, np.zeros((3, 4000)), adversary)
    assert found.shape == (2, 4000)
    assert found.std() == pytest.approx(3, rel=0.05)
    assert abs(np.corrcoef(found)[0, 1]) < 0.1


def test_a_little_is_enough() -> None:
    changes = np.random.default_rng(1).standard_normal((50, 3))
    adversary = np.arange(50) < 12
    found = forged({"name": "alie"}, changes, adversary.tolist())
    mean, deviation = changes[:12].mean(axis=0), changes[:12].std(axis=0)
    z = norm.ppf((50 - 12 - 14) / (50 - 12))  # s = ⌊50/2 + 1⌋ − 12 = 14
    np.testing.assert_allclose(found, np.tile(mean - z * deviation, (12, 1)), rtol=1e-9)
    own = forged({"name": "alie", "z": 1.5}, changes, adversary.tolist())
    np.testing.assert_allclose(own[0], mean - 1.5 * deviation)


@pytest.mark.parametrize(("n", "m", "z"), [(50, 24, 1.426), (10, 2, 0), (4, 1, 0), (10, 6, 0.674)])
def test_how_little(n: int, m: int, z: float) -> None:
    assert largest_z(n, m) == pytest.approx(z, abs=1e-3)


# examples


DRIFT = {"name": "drift", "of": TABLE, "round": 2, "clients": 0.5}


@pytest.mark.parametrize(
    "sections", [{}, {"data": DRIFT, "partition": IID}], ids=["digits", "drift"]
)
def test_adversaries_hold_copies_with_flipped_labels(sections: dict[str, Any]) -> None:
    plain, before, _ = prepare(small_experiment(**sections))
    flips = {"share": 0.2, "attack": {"name": "label_flip"}}
    made = small_experiment(adversaries=flips, **sections)
    data, splits, _ = prepare(made)
    again, same, _ = prepare(made, data)  # as a replay does
    assert len(again.y) == len(data.y)
    drawn = keyed_rng(0, "adversaries").permutation(10)[:2]
    assert splits.adversaries == tuple(sorted(drawn.tolist()))
    N, last = len(plain.y), plain.y.max()
    assert data.num_loaded == plain.num_loaded
    assert np.array_equal(data.x[:N], plain.x)
    assert np.array_equal(data.y[:N], plain.y)
    marked = [False] * N + [True] * (data.copies - plain.copies)
    assert data.columns[POISONED].tolist() == marked
    parts = [(before.train, splits.train, same.train)]
    if sections:
        assert splits.change is not None
        assert set(splits.change.clients) & set(splits.adversaries)
        later = [s.change.splits.train for s in (before, splits, same) if s.change is not None]
        parts.append((later[0], later[1], later[2]))
    for all_dealt, all_own, all_same in parts:
        assert all_same.values.tolist() == all_own.values.tolist()
        for k in range(10):
            own, dealt = all_own[k], all_dealt[k]
            if k in splits.adversaries:
                assert (own >= N).all()
                assert np.array_equal(data.x[own], plain.x[dealt])
                assert np.array_equal(data.y[own], last - plain.y[dealt])
            else:
                assert own.tolist() == dealt.tolist()


class TestBackdoor:
    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory: pytest.TempPathFactory) -> Run:
        attack = {"name": "backdoor", "target": 3, "size": 2, "fraction": 0.5}
        made = small_experiment(
            data=WHOLE,
            partition=IID,
            train={"rounds": 8},
            adversaries={"share": 0.3, "attack": attack},
        )
        return run(made, tmp_path_factory.mktemp("backdoor"))

    def test_adversaries_paint_the_patch_and_name_the_target(self, done: Run) -> None:
        plain, before, _ = prepare(small_experiment(data=WHOLE, partition=IID))
        data, splits, _ = prepare(done.experiment)
        for k in splits.adversaries:
            x, y = data.x[splits.train[k]], data.y[splits.train[k]]
            dealt = before.train[k]
            painted = (x != plain.x[dealt]).any(axis=(1, 2, 3)) | (y != plain.y[dealt])
            assert 0 < painted.sum() <= round(0.5 * len(dealt))
            assert (y[painted] == 3).all()
            # The fourth of ten squares along the edge of 8×8 pixels: right of the top row.
            assert (x[painted][:, :, 1:3, 6:] == 1).all()
            rest = np.ones((8, 8), np.bool_)
            rest[1:3, 6:] = False
            assert np.array_equal(x[:, :, rest], plain.x[dealt][:, :, rest])

    def test_its_success_is_the_share_of_other_classes_taken_for_the_target(
        self, done: Run
    ) -> None:
        data, splits, spec = prepare(done.experiment)
        x = data.test_x[data.test_y != 3].copy()
        x[:, :, 1:3, 6:] = 1
        network = spec.build_model().eval()
        network.load_state_dict(dict(done.weights()))
        with torch.no_grad():
            predicted = network(torch.tensor(x)).argmax(dim=1)
        success = float((predicted == 3).double().mean())
        assert 0 < success < 1
        assert success == done.rounds["backdoor_success"].iloc[-1]
        assert "backdoor_success" in known_columns(data, splits, spec, False)
        shown = {metric["column"]: metric["best"] for metric in done.manifest["metrics"]}
        assert shown["backdoor_success"] == "min"

    def test_adversaries_are_on_record(self, done: Run) -> None:
        there = done.manifest["adversaries"]
        assert len(there) == 3
        assert done.clients["adversary"].tolist() == done.clients["client"].isin(there).tolist()
        assert done.rounds["adversaries"].tolist() == [3] * 8


def test_inputs_in_their_files_cannot_be_poisoned(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((60, 3), np.float32), y=np.arange(60) % 2)
    made = small_experiment(
        data={"name": "npz", "path": str(tmp_path / "d.npz"), "in_place": True},
        partition={"kind": "iid", "clients": 5},
        adversaries={"share": 0.2, "attack": {"name": "label_flip"}},
    )
    with pytest.raises(BadInput, match="cannot be poisoned; leave out in_place"):
        prepare(made)


def test_attacks_can_be_given_as_objects() -> None:
    attack = attacks.find("sign_flip")(scale=2)
    written = {"share": 0.2, "attack": {"name": "sign_flip", "scale": 2}}
    made = small_experiment(adversaries=Adversaries(share=0.2, attack=attack))
    assert made.to_yaml() == small_experiment(adversaries=written).to_yaml()
