"""Adversaries: who they are, the examples that they poison, and the updates that they forge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from experiments import small_experiment
from fedsim import Run
from fedsim.conditions.adversaries import Adversaries, attacks
from fedsim.conditions.adversaries.on_updates import largest_z
from fedsim.conditions.adversaries.section import POISONED
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import BadInput
from fedsim.launch.prepare import prepare
from fedsim.results.records import known_columns
from fedsim.support.rng import keyed_rng

Finish = Callable[..., Run]
IID = {"kind": "iid", "clients": 10}
TABLE = {"name": "synthetic", "samples": 200, "test_samples": 50, "classes": 4}


def forged(attack: dict[str, Any], changes: np.ndarray, adversary: list[bool]) -> np.ndarray:
    made = attacks.parse(attack)
    found = made.forge(changes, np.array(adversary), np.random.default_rng(0))
    assert isinstance(found, np.ndarray)
    return found


def poisoned(attack: dict[str, Any], **sections: Any) -> tuple[Dataset, ClientSplits]:
    dataset, splits, _ = prepare(
        small_experiment(adversaries={"share": 0.2, "attack": attack}, **sections)
    )
    return dataset, splits


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


class TestLabelFlips:
    def test_adversaries_hold_copies_with_flipped_labels(self) -> None:
        plain, before, _ = prepare(small_experiment())
        data, splits = poisoned({"name": "label_flip"})
        assert splits.adversaries == tuple(
            sorted(keyed_rng(0, "adversaries").permutation(10)[:2].tolist())
        )
        N = len(plain.y)
        assert data.num_loaded == N
        assert np.array_equal(data.x[:N], plain.x)
        assert np.array_equal(data.y[:N], plain.y)
        assert data.columns[POISONED].tolist() == [False] * N + [True] * data.copies
        for k in range(10):
            own, dealt = splits.train[k], before.train[k]
            if k in splits.adversaries:
                assert (own >= N).all()
                assert np.array_equal(data.x[own], plain.x[dealt])
                assert np.array_equal(data.y[own], 9 - plain.y[dealt])
            else:
                assert own.tolist() == dealt.tolist()

    def test_data_that_are_poisoned_already_stay_as_they_are(self) -> None:
        """A replay may start from them."""
        sections = {"adversaries": {"share": 0.3, "attack": {"name": "label_flip"}}}
        made = small_experiment(**sections)
        data, splits, _ = prepare(made)
        again, same, _ = prepare(made, data)
        assert len(again.y) == len(data.y)
        assert same.train.values.tolist() == splits.train.values.tolist()

    def test_clients_that_drift_stay_poisoned(self) -> None:
        drift = {"name": "drift", "of": TABLE, "round": 2, "clients": 0.5}
        attack = {"name": "label_flip"}
        plain, clean, _ = prepare(small_experiment(data=drift, partition=IID))
        data, splits = poisoned(attack, data=drift, partition=IID)
        assert splits.change is not None
        assert clean.change is not None
        drifting = set(splits.change.clients) & set(splits.adversaries)
        assert drifting
        for k in splits.adversaries:
            for own, dealt in (
                (splits.train[k], clean.train[k]),
                (splits.change.splits.train[k], clean.change.splits.train[k]),
            ):
                assert np.array_equal(data.x[own], plain.x[dealt])
                assert np.array_equal(data.y[own], 3 - plain.y[dealt])
        made = small_experiment(
            data=drift, partition=IID, adversaries={"share": 0.2, "attack": attack}
        )
        again, same, _ = prepare(made, data)
        assert len(again.y) == len(data.y)
        assert same.change is not None
        later = splits.change.splits.train.values
        assert same.change.splits.train.values.tolist() == later.tolist()


class TestBackdoor:
    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory: pytest.TempPathFactory) -> Run:
        from fedsim import run

        attack = {"name": "backdoor", "target": 3, "size": 2, "fraction": 0.75}
        made = small_experiment(
            partition=IID,
            train={"rounds": 3},
            adversaries={"share": 0.3, "attack": attack},
        )
        return run(made, tmp_path_factory.mktemp("backdoor"))

    def test_adversaries_paint_the_patch_and_name_the_target(self, done: Run) -> None:
        plain, before, _ = prepare(small_experiment(partition=IID))
        data, splits, _ = prepare(done.experiment)
        for k in splits.adversaries:
            x, y = data.x[splits.train[k]], data.y[splits.train[k]]
            dealt = before.train[k]
            painted = (x != plain.x[dealt]).any(axis=(1, 2, 3)) | (y != plain.y[dealt])
            assert 0 < painted.sum() <= round(0.75 * len(dealt))
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
        assert 0 < success == done.rounds["backdoor_success"].iloc[-1]
        assert "backdoor_success" in known_columns(data, splits, spec, False)
        shown = {metric["column"]: metric["best"] for metric in done.manifest["metrics"]}
        assert shown["backdoor_success"] == "min"

    def test_adversaries_are_on_record(self, done: Run) -> None:
        there = done.manifest["adversaries"]
        assert len(there) == 3
        assert done.clients["adversary"].tolist() == done.clients["client"].isin(there).tolist()
        assert done.rounds["adversaries"].tolist() == [3, 3, 3]


# what is refused


@pytest.mark.parametrize(
    ("share", "attack", "sections", "message"),
    [
        (
            0.04,
            "sign_flip",
            {},
            "share=0.04 of 10 clients makes nobody an adversary; 0.1 makes 1",
        ),
        (
            0.96,
            "sign_flip",
            {},
            "share=0.96 of 10 clients makes everybody an adversary; lower it",
        ),
        (0.1, "alie", {}, "makes 1 an adversary, and alie takes 2; 0.2 makes 2"),
        (
            0.2,
            "label_flip",
            {"data": {"name": "friedman"}, "partition": IID},
            "attack.name=label_flip: needs a class for each example, and the target here is a nu",
        ),
        (
            0.2,
            "backdoor",
            {"data": TABLE},
            "name=backdoor: paints a patch over images, and these are inputs of shape (16,)",
        ),
        (0.2, {"name": "backdoor", "target": 10}, {}, "target=10: there are 10 classes, 0 to 9"),
        (
            0.2,
            {"name": "backdoor", "size": 9},
            {},
            "size=9: the patch is larger than images of",
        ),
        (
            0.2,
            "label_flip",
            {
                "data": TABLE,
                "partition": {"kind": "own_tasks", "tasks": [[["0", "1"], ["2", "3"]]] * 5},
                "train": {"rounds": 2},
            },
            "label_flip: clients that learn tasks one after another cannot be poisoned",
        ),
    ],
)
def test_impossible_attacks(
    share: float, attack: Any, sections: dict[str, Any], message: str
) -> None:
    attack = {"name": attack} if isinstance(attack, str) else attack
    made = small_experiment(adversaries={"share": share, "attack": attack}, **sections)
    with pytest.raises(BadInput) as refused:
        prepare(made)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_inputs_in_their_files_cannot_be_poisoned(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((60, 3), np.float32), y=np.arange(60) % 2)
    data = {"name": "npz", "path": str(tmp_path / "d.npz"), "in_place": True}
    with pytest.raises(BadInput, match="cannot be poisoned; leave out in_place"):
        poisoned({"name": "label_flip"}, data=data, partition={"kind": "iid", "clients": 5})


def test_unknown_attacks_and_keys() -> None:
    with pytest.raises(BadInput, match=r"adversaries\.attack\.name: unknown attack 'sign_flop'"):
        small_experiment(adversaries={"share": 0.2, "attack": {"name": "sign_flop"}})
    with pytest.raises(BadInput, match=r"attack\.size: unknown key; known: name, scale$"):
        small_experiment(adversaries={"share": 0.2, "attack": {"name": "sign_flip", "size": 2}})


def test_attacks_can_be_given_as_objects() -> None:
    attack = attacks.find("sign_flip")(scale=2)
    made = small_experiment(adversaries=Adversaries(share=0.2, attack=attack))
    assert (
        made.to_yaml()
        == small_experiment(
            adversaries={"share": 0.2, "attack": {"name": "sign_flip", "scale": 2}}
        ).to_yaml()
    )
