"""`fedsim attack`: who was trained on, and what shared images show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import Say, small_experiment
from fedsim import Run, run
from fedsim.analysis.audit import PrivacyAudit
from fedsim.errors import BadInput

MODEL = {"name": "cnn", "channels": [4, 4]}
FEDXDS: dict[str, Any] = {"name": "fedxds", "warmup_rounds": 1}
FEDFED: dict[str, Any] = {"name": "fedfed", "distillation_rounds": 1, "width": 4}


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images and passes; results that need more say so."""
    monkeypatch.setattr("fedsim.analysis.audit.AUXILIARY", 300)
    monkeypatch.setattr("fedsim.analysis.audit.EPOCHS", 10)


def trained(out: Path, method: dict[str, Any], rounds: int = 3, **sections: Any) -> Run:
    train = {"rounds": rounds, **sections.pop("train", {})}
    made = small_experiment(**{"method": method, "model": MODEL, "train": train, **sections})
    return run(made, out)


def test_members_are_told_from_others_where_they_are_learnt_by_heart(tmp_path: Path) -> None:
    """Labels at random: nothing but the training examples themselves can be learnt."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((400, 16), dtype=np.float32), rng.integers(0, 4, 400)
    np.savez(tmp_path / "noise.npz", x=x, y=y)
    sections: dict[str, Any] = {
        "data": {"name": "npz", "path": str(tmp_path / "noise.npz"), "test_fraction": 0.5},
        "partition": {"kind": "iid", "clients": 2},
        "model": {"name": "mlp", "hidden": [128]},
    }
    often, never = (
        PrivacyAudit(
            trained(tmp_path, {"name": "fedavg"}, rounds, train={"local_epochs": n}, **sections)
        )
        for rounds, n in ((30, 4), (1, 1))
    )
    for name, found in often.infer_membership(shadows=4).items():
        assert found.auc > (0.7 if name == "entropy" else 0.9), name
        assert found.balanced_accuracy > 0.6
    for found in never.infer_membership().values():
        assert found.auc < 0.65


def test_shared_images_are_reconstructed_the_worse_the_more_noise(tmp_path: Path) -> None:
    close = []
    for sigma in (0.05, 0.4, 3.0):
        method = {**FEDXDS, "removed": 0, "sigma": sigma}
        inversion = PrivacyAudit(trained(tmp_path, method)).invert_shared()
        close.append(inversion.reconstructed)
        assert inversion.reconstructed.mse < inversion.shared.mse or sigma == 0.05
    assert close[0].ssim > close[1].ssim > close[2].ssim
    assert close[0].psnr > close[1].psnr > close[2].psnr


@pytest.mark.parametrize(
    "method",
    [
        FEDXDS,
        {**FEDXDS, "encoding": "uint8"},
        {**FEDXDS, "attribution": {"name": "random"}},
        FEDFED,
    ],
)
def test_the_attack_sees_what_was_shared(tmp_path: Path, method: dict[str, Any]) -> None:
    """But for the noise: what it makes of a client's images is what that client shared."""
    quiet = {"sigma1": 0.0, "sigma2": 0.0} if method["name"] == "fedfed" else {"sigma": 0.0}
    attacked = PrivacyAudit(trained(tmp_path, {**method, **quiet}))
    state, fed = attacked.state, attacked.fed
    rows = np.concatenate([attacked._splits.train[k] for k in range(10)])
    assert attacked._sharing is not None
    made = attacked._shared(attacked._sharing, attacked._training_examples(rows), "try")
    if method["name"] == "fedfed":
        pool = torch.tensor(state.shared1)
    elif method.get("encoding") == "uint8":
        levels = attacked.experiment.method.levels(fed)
        pool = (torch.tensor(state.shared).float() - levels[1]) * levels[0]
    else:
        pool = torch.tensor(state.shared)
    if method.get("attribution"):  # other random maps
        assert (made != 0).float().mean() == pytest.approx(
            float((pool != 0).float().mean()), abs=0.02
        )
    else:
        torch.testing.assert_close(made, pool, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "method",
    [
        {**FEDXDS, "attribute_with": "local", "fraction": 0.5},
        {**FEDXDS, "encoding": "uint8", "attribution": {"name": "random"}},
        FEDFED,
    ],
)
def test_victims_are_images_that_were_shared_as_they_were(
    tmp_path: Path, method: dict[str, Any]
) -> None:
    attacked = PrivacyAudit(trained(tmp_path, method))
    inversion = attacked.invert_shared()
    state = attacked.state
    if method["name"] == "fedfed":
        pool = attacked.experiment.method.combined(
            torch.tensor(state.shared1), torch.tensor(state.shared2)
        )
    elif method.get("encoding") == "uint8":
        levels = attacked.experiment.method.levels(attacked.fed)
        pool = (torch.tensor(state.shared).float() - levels[1]) * levels[0]
    else:
        pool = torch.tensor(state.shared)
    assert len(inversion.items) == 300
    for image, item, label in zip(
        inversion.originals[:20], inversion.items, inversion.labels, strict=False
    ):
        same = (pool - item).flatten(1).abs().amax(dim=1) < 1e-5
        assert str(int(state.labels[int(same.int().argmax())])) == label
        assert same.any()
        dataset = torch.tensor(attacked._dataset.x)
        assert ((dataset - image).flatten(1).abs().amax(dim=1) < 1e-5).any()


def test_in_words_numbers_and_a_picture(say: Say) -> None:
    done = trained(Path("runs"), FEDXDS)
    code, text, _ = say("attack", str(done.path), "--shadows", "2")
    assert code == 0
    found = json.loads((done.path / "attacks.json").read_text())
    assert list(found["membership"]) == ["loss", "entropy", "lira"]
    for name, numbers in found["membership"].items():
        row = next(line for line in text.splitlines() if line.startswith(name))
        assert row.split()[1:] == [f"{value:.3f}" for value in numbers.values()]
    assert f"{found['reconstructed']['ssim']:.3f}" in text
    picture = done.path / "explanations" / "reconstructed.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_method_that_shares_nothing(say: Say) -> None:
    done = trained(Path("runs"), {"name": "fedavg"})
    code, text, _ = say("attack", str(done.path))
    assert code == 0
    assert "membership by" in text
    assert "shared images" not in text
    with pytest.raises(BadInput, match="shares no images to invert"):
        PrivacyAudit(done).invert_shared()


@pytest.mark.parametrize(
    "model",
    [
        {"name": "text_cnn", "kernels": [1, 2], "filters": 3, "hidden": 5},
        {"name": "rationale", "hidden": 3},
    ],
    ids=lambda model: str(model["name"]),
)
def test_shadows_of_models_of_documents(say: Say, model: dict[str, Any]) -> None:
    few = {"reviews": 20, "test_reviews": 5, "dimension": 4}
    sections = {
        "data": {"name": "planted_reviews", **few},
        "partition": {"kind": "aspects", "clients": 4},
        "model": model,
    }
    done = trained(Path("runs"), {"name": "fedavg"}, 1, **sections)
    code, text, error = say("attack", str(done.path), "--shadows", "2")
    assert code == 0, error
    assert "lira" in text
    found = json.loads((done.path / "attacks.json").read_text())["membership"]
    assert 0 <= found["lira"]["auc"] <= 1


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
def test_methods_without_a_global_model_cannot_be_attacked(tmp_path: Path, say: Say) -> None:
    lines = [f"{c}\tone two {c} {k % 7}" for c in "abcd" for k in range(30)]
    (tmp_path / "documents.txt").write_text("\n".join(lines))
    sections = {
        "data": {"name": "text", "path": str(tmp_path / "documents.txt"), "dimension": 7},
        "partition": {"kind": "own_tasks", "tasks": [[["a", "b"], ["c", "d"]]]},
        "model": {"name": "text_cnn", "kernels": [1, 2], "filters": 3, "hidden": 5},
        "train": {"optimizer": {"name": "adam", "lr": 0.01}},
    }
    done = trained(Path("runs"), {"name": "fedweit"}, 2, **sections)
    code, _, error = say("attack", str(done.path))
    assert code == 2
    assert error.endswith(": leaves no global classifier to attack\n")


def test_what_cannot_be_attacked(say: Say) -> None:
    alone = trained(Path("runs"), {"name": "local"})
    code, _, error = say("attack", str(alone.path))
    assert code == 2
    assert error.endswith(": leaves no global classifier to attack\n")
    done = trained(Path("runs"), {"name": "fedavg"})
    code, _, error = say("attack", str(done.path), "--shadows", "1")
    assert code == 2
    assert error.startswith("error: shadows=1: LiRA needs at least 2 shadow models")
