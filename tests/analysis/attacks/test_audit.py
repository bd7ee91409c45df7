"""`fedsim attack`: who was trained on, and what shared images and explanations show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments import Say, run_example, small_experiment
from fedsim import Run, audit, replay, run
from fedsim.analysis.attacks import membership
from fedsim.analysis.attacks.audit import PrivacyAudit, _about, _sent
from fedsim.analysis.attacks.membership import Fit, guessing
from fedsim.analysis.attacks.report import doubts
from fedsim.errors import BadInput
from fedsim.explain.explainers.attribution import Gradient, IntegratedGradients, Random

MODEL = {"name": "cnn", "channels": [4, 4]}
FEDXDS: dict[str, Any] = {"name": "fedxds", "warmup_rounds": 1}
FEDFED: dict[str, Any] = {"name": "fedfed", "distillation_rounds": 1, "width": 4}


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few images and passes; results that need more say so."""
    for name, value in {"AUXILIARY": 60, "EPOCHS": 1, "VICTIMS": 60}.items():
        monkeypatch.setattr(f"fedsim.analysis.attacks.audit.{name}", value)


def trained(out: Path, method: dict[str, Any], rounds: int = 3, **sections: Any) -> Run:
    """Clients of methods that share do so by round 3."""
    train = {"rounds": rounds, **sections.pop("train", {})}
    made = small_experiment(**{"method": method, "model": MODEL, "train": train, **sections})
    return run(made, out)


def noise(out: Path, rounds: int, epochs: int) -> Run:
    """Labels at random: nothing but the training examples themselves can be learnt."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((400, 16), dtype=np.float32), rng.integers(0, 4, 400)
    np.savez(out / "noise.npz", x=x, y=y)
    sections: dict[str, Any] = {
        "data": {"name": "npz", "path": str(out / "noise.npz"), "test_fraction": 0.5},
        "partition": {"kind": "iid", "clients": 2},
        "model": {"name": "mlp", "hidden": [128]},
        "train": {
            **{"local_epochs": epochs, "batch_size": 50},
            "optimizer": {"name": "adam", "lr": 0.01},
        },
    }
    return trained(out, {"name": "fedavg"}, rounds, **sections)


@pytest.fixture(scope="module")
def learnt_by_heart(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return noise(tmp_path_factory.mktemp("noise"), rounds=4, epochs=20)


def test_members_are_told_from_others_where_they_are_learnt_by_heart(
    learnt_by_heart: Run, tmp_path: Path
) -> None:
    often = PrivacyAudit(learnt_by_heart).infer_membership(4, [Gradient(), Random()])[None]
    for name, least in {
        **{"loss": 0.85, "entropy": 0.6, "lira": 0.85},
        "gradient/map_lira": 0.7,
    }.items():
        assert often[name].auc > least, name
        assert often[name].balanced_accuracy > 0.6
    # Three standard deviations of the AUC of chance, of 200 and 200: √(401/(12·200·200)) = 0.029.
    for how in "variance", "norm", "norm_lira", "map_lira":
        assert abs(often[f"random/{how}"].auc - 0.5) < 0.09
    little = PrivacyAudit(noise(tmp_path, rounds=1, epochs=1))
    once = little.infer_membership(0, [Gradient()])[None]
    for found in once.values():
        assert found.auc < 0.65


class TestWhatHasFailedIsNotPrivacy:
    """Attacks that are weak for another reason say so."""

    def test_shadow_models_that_learnt_less(
        self, learnt_by_heart: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        good = audit(learnt_by_heart, shadows=4, progress=False)
        assert good.warnings == ()
        monkeypatch.setattr(PrivacyAudit, "passes", 1)
        found = audit(learnt_by_heart, shadows=4, progress=False)
        fits = found.fits.set_index("model")
        assert fits["inside"]["the model"] == good.fits["inside"][0] > 0.9
        assert fits["inside"]["shadow models (mean)"] < 0.7
        assert fits["outside"].between(0.1, 0.5).all()
        auc = found.membership.set_index("attack")["auc"]
        assert auc["lira"] < auc["loss"] - 0.1
        text = found.text()
        assert "warning: the shadow models have learnt their examples worse than the mod" in text
        assert f"warning: LiRA (AUC {auc['lira']:.3f}) is weaker than the loss" in text
        low, high = found.guessing["auc"]
        assert (low, high) == pytest.approx((0.443, 0.557), abs=0.001)
        row = next(line for line in text.splitlines() if line.startswith("guessing"))
        assert "0.443 to 0.557" in row
        assert "warning: LiRA" in found._repr_html_()

    def test_a_model_that_has_learnt_nothing(self, tmp_path: Path) -> None:
        train = {"optimizer": {"name": "sgd", "lr": 1e-6}}
        found = audit(trained(tmp_path, {"name": "fedavg"}, 1, train=train), progress=False)
        assert found.warnings[0].startswith("the model has learnt too little to reveal its exam")
        paths = found.save(tmp_path / "out")
        content = json.loads(paths[0].read_text())
        assert content["warnings"] == list(found.warnings)
        assert set(content["guessing"]) == {"auc", "balanced_accuracy", "tpr"}
        assert [row["model"] for row in content["fits"]] == list(found.fits["model"])

    def test_a_denoiser_that_has_learnt_nothing(self, tmp_path: Path) -> None:
        found = audit(trained(tmp_path, {"name": "fedavg"}, 1), "random", progress=False)
        mse = found.reconstruction.set_index("source")["mse"]
        assert mse["explanations"] > mse["mean image of the class"]
        assert "images from explanations by random: no closer than a mean image" in found.text()

    def test_scores_that_can_be_turned_round(self) -> None:
        rows: list[dict[str, Any]] = [
            {"attack": "loss", "explainer": "", "noise": math.nan, "auc": 0.6},
            {"attack": "norm", "explainer": "gradient", "noise": 0.5, "auc": 0.31},
        ]
        fits = dict.fromkeys(("the model",), Fit(0.9, 0.5))
        fits["always the most frequent class"] = Fit(0.2, 0.2)
        (warning,) = doubts(rows, guessing(200, 200), fits)
        assert warning.startswith("below guessing: gradient/norm, noise 0.5; ")


def test_noise_keeps_explanations_from_telling_members(learnt_by_heart: Run) -> None:
    attacked = PrivacyAudit(learnt_by_heart)
    scaled, noisy = attacked.infer_membership(4, [Gradient()], [0, 30]).values()
    alone = attacked.infer_membership(4, [Gradient()], [30])
    assert alone == {30: noisy}  # that shadow models are shared changes nothing
    assert scaled["gradient/map_lira"].auc > 0.7  # the scale of maps is not what tells
    for how in "variance", "norm", "norm_lira", "map_lira":
        assert abs(noisy[f"gradient/{how}"].auc - 0.5) < 0.09, how
    for name in "loss", "entropy", "lira":
        assert noisy[name] == scaled[name]  # noise is in explanations alone


def test_scores_of_explanations_are_those_of_what_a_user_is_shown(tmp_path: Path) -> None:
    """The gradient of the logit decided upon, by autograd, as it is and of unit length."""
    attacked = PrivacyAudit(noise(tmp_path, rounds=1, epochs=2))
    rows = np.arange(50)
    x = attacked._training_examples(rows).x.clone().requires_grad_()
    attacked._network(x).amax(dim=1).sum().backward()
    assert x.grad is not None
    maps, rng = attacked._maps(Gradient(), attacked._network, x.detach(), 0)
    np.testing.assert_allclose(maps, x.grad, rtol=1e-5, atol=1e-7)
    there = np.arange(16) < rng.integers(1, 17, (50, 1))  # as of documents
    unit = _sent(maps, rng, there, 0)
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1)
    np.testing.assert_array_equal(_sent(maps, rng, there, None), np.where(there, maps, 0))
    for sent in unit, _sent(maps, rng, there, 2):
        assert not sent[~there].any()


def test_images_are_reconstructed_from_explanations_unless_there_is_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AUXILIARY": 200, "EPOCHS": 6, "VICTIMS": 40}.items():
        monkeypatch.setattr(f"fedsim.analysis.attacks.audit.{name}", value)
    attacked = PrivacyAudit(trained(tmp_path, {"name": "fedavg"}, 2))
    plain, noisy = (
        attacked.invert_explanations(IntegratedGradients(), noise) for noise in (None, 30)
    )
    assert plain.reconstructed.mse < 0.8 * plain.mean_image.mse
    assert plain.reconstructed.ssim > plain.mean_image.ssim + 0.1
    assert noisy.reconstructed.mse > 0.98 * noisy.mean_image.mse
    assert noisy.reconstructed.ssim < noisy.mean_image.ssim
    assert torch.equal(plain.originals, noisy.originals)  # and so their numbers compare
    images = torch.tensor(attacked._dataset.x)
    assert all((images == image).flatten(1).all(dim=1).any() for image in plain.originals[:5])
    assert plain.items.shape == plain.originals.shape
    extent = (plain.items - 0.5).abs().amax(dim=(1, 2, 3))
    torch.testing.assert_close(extent, torch.full_like(extent, 0.5))


def test_shared_images_are_reconstructed_the_worse_the_more_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"AUXILIARY": 200, "EPOCHS": 6, "VICTIMS": 80}.items():
        monkeypatch.setattr(f"fedsim.analysis.attacks.audit.{name}", value)
    close = []
    for sigma in (0.05, 0.4, 3.0):
        method = {**FEDXDS, "removed": 0, "sigma": sigma}
        done = trained(tmp_path, method, data={"name": "digits", "subset": 0.6})
        inversion = PrivacyAudit(done).invert_shared()
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
    assert len(inversion.items) == 60
    for image, item, label in zip(
        inversion.originals[:20], inversion.items, inversion.labels, strict=False
    ):
        same = (pool - item).flatten(1).abs().amax(dim=1) < 1e-5
        assert str(int(state.labels[int(same.int().argmax())])) == label
        assert same.any()
        dataset = torch.tensor(attacked._dataset.x)
        assert ((dataset - image).flatten(1).abs().amax(dim=1) < 1e-5).any()


@pytest.mark.parametrize("changes", [2, 3])
def test_victims_that_drift_are_seen_as_they_were_when_they_shared(
    tmp_path: Path, changes: int
) -> None:
    """FedFed's clients share in round 2. Members are what is held in the end."""
    drift = {"name": "drift", "of": {"name": "digits"}, "round": changes, "clients": 1}
    done = trained(tmp_path, FEDFED, data=drift, partition={"kind": "iid", "clients": 10})
    attacked, splits = PrivacyAudit(done), replay(done).splits
    assert attacked._sharing is not None
    originals, *_ = attacked._sharing.shared_pairs(attacked.fed, attacked.state, 4)
    held = splits.at(2, 3).train[4]
    assert torch.equal(originals, attacked._pixels(attacked._training_examples(held).x))
    assert attacked._splits.train[4].tolist() == splits.at(3, 3).train[4].tolist()
    assert splits.at(3, 3).train[4].tolist() != splits.at(1, 3).train[4].tolist()


def test_guesses_without_what_was_shared(tmp_path: Path) -> None:
    """The mean of the attacker's images, and that of its images of the victim's class."""
    attacked = PrivacyAudit(trained(tmp_path, {"name": "fedavg"}, 1))
    dataset = attacked._dataset
    own = attacked._test_examples(np.flatnonzero(dataset.test_y < 3)[:60])
    victims = np.array([np.flatnonzero(dataset.y == c)[0] for c in (0, 2, 7)])
    originals = torch.tensor(dataset.x[victims])
    found = attacked._inversion(originals, originals, originals, [0, 2, 7], own)
    x, y = own.x, own.y
    nobody = x.mean(dim=0)  # what is known of a seven
    guesses = torch.stack([x[y == 0].mean(dim=0), x[y == 2].mean(dim=0), nobody])
    for close, guess in (
        (found.class_mean, guesses),
        (found.mean_image, nobody.expand(3, -1, -1, -1)),
    ):
        mse = ((guess - originals) ** 2).flatten(1).mean(dim=1)
        assert close.mse == pytest.approx(float(mse.mean()), rel=1e-5)


def test_in_words_numbers_and_a_picture(say: Say) -> None:
    done = trained(Path("runs"), FEDXDS)
    code, text, _ = say("attack", str(done.path), "--shadows", "2")
    assert code == 0
    found = json.loads((done.path / "attacks.json").read_text())
    assert [row["attack"] for row in found["membership"]] == ["loss", "entropy", "lira"]
    for row in found["membership"]:
        said = next(line for line in text.splitlines() if line.startswith(row["attack"]))
        numbers = (row[name] for name in ("auc", "balanced_accuracy", "tpr"))
        assert said.split()[1:] == [f"{value:.3f}" for value in numbers]
    sources = [row["source"] for row in found["reconstruction"]]
    assert sources == ["shared", "reconstructed", "mean image", "mean image of the class"]
    assert f"{found['reconstruction'][1]['ssim']:.3f}" in text
    picture = done.path / "explanations" / "reconstructed-shared-images.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    plan, _, rest = text.partition("\nthis takes about ")
    assert plan == (
        "attacks on:\n  membership of 360 training examples beside as many test examples, by "
        "loss and entropy, by 2 shadow models, each trained for 1 pass\n  images from what "
        "clients shared, by a denoiser"
    )
    steps = re.findall(r"^\[.*", rest, re.M)
    assert steps == [
        *("[1/3] shadow model 1", "[2/3] shadow model 2", "[3/3] images from what was shared")
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.1, "about 1 s"), (99, "about 99 s"), (150, "about 2 min"), (9000, "about 2.5 hours")],
)
def test_how_long_attacks_take_in_words(seconds: float, words: str) -> None:
    assert _about(seconds) == f"this takes {words}"


class TestExplanations:
    """Of a run of one round, whose section `explain` has one explainer."""

    @pytest.fixture(autouse=True)
    def _less(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"AUXILIARY": 60, "EPOCHS": 1, "VICTIMS": 10, "MEMBERS": 50}.items():
            monkeypatch.setattr(f"fedsim.analysis.attacks.audit.{name}", value)

    @pytest.fixture(scope="class")
    def done(self, tmp_path_factory: pytest.TempPathFactory) -> Run:
        section = {"explainers": [{"name": "occlusion", "size": 2}], "inputs": 2}
        method = {"name": "fedavg"}
        return trained(tmp_path_factory.mktemp("runs"), method, 1, explain=section)

    def test_the_section_s_by_default(self, done: Run, say: Say) -> None:
        """With its settings, also where they are named."""
        code, text, error = say("attack", str(done.path))
        assert code == 0, error
        assert "\n  images from explanations of occlusion, by a denoiser\n" in text
        found = json.loads((done.path / "attacks.json").read_text())
        assert [(row["explainer"], row["attack"]) for row in found["membership"]] == [
            *(("", "loss"), ("", "entropy"), ("occlusion", "variance"), ("occlusion", "norm"))
        ]
        assert {row["noise"] for row in found["membership"]} == {None}
        guesses = ("the mean image, without any", "the mean image of the class, without any")
        names = ("explanations by occlusion", *guesses)
        for name, close in zip(names, found["reconstruction"], strict=True):
            (row,) = [line for line in text.splitlines() if line.startswith(name)]
            assert row.split()[-1] == f"{close['ssim']:.3f}"
        picture = done.path / "explanations" / "reconstructed-occlusion.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        code, again, error = say("attack", str(done.path), "--explainer", "occlusion")
        tables = [said.partition("\nmembership by")[2] for said in (text, again)]
        assert (code, tables[1]) == (0, tables[0]), error

    def test_levels_of_noise_share_their_shadow_models(
        self, done: Run, say: Say, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainings: list[int] = []
        original = membership.shadow_models

        def shadow_models(build: Any, x: Any, y: Any, inside: Any, *rest: Any) -> Iterator[Any]:
            trainings.append(len(x))
            return original(build, x, y, inside, *rest)

        monkeypatch.setattr("fedsim.analysis.attacks.audit.shadow_models", shadow_models)
        ways = ("--explainer", "random", "--noise", "0.5", "--noise", "2", "--shadows", "2")
        code, text, error = say("attack", str(done.path), *ways)
        assert code == 0, error
        assert trainings.count(100) == 1  # the others are to see how long it takes
        assert "by explanations of random with noise 0.5 and 2\n" in text
        found = json.loads((done.path / "attacks.json").read_text())
        of_noise = [(row["attack"], row["noise"]) for row in found["membership"]]
        attacks = ("variance", "norm", "norm_lira", "map_lira")
        assert of_noise == [
            *(("loss", None), ("entropy", None), ("lira", None)),
            *((attack, noise) for noise in (0.5, 2.0) for attack in attacks),
        ]
        assert "random/map_lira, noise 0.5 " in text
        for noise in ("0.5", "2"):
            name = f"reconstructed-random-noise-{noise}.png"
            assert (done.path / "explanations" / name).exists()

    def test_in_python(self, done: Run, tmp_path: Path) -> None:
        said: list[str] = []
        found = audit(done, [Random()], noise=1, progress=said.append)
        assert said[0].startswith("attacks on:")
        assert said[1:] == ["[1/1] images from random noise 1"]
        assert set(found.membership["explainer"]) == {"", "random"}
        paths = found.save(tmp_path / "new" / "folder")
        assert [path.name for path in paths] == [
            *("attacks.json", "reconstructed-random-noise-1.png")
        ]
        shown = found._repr_html_()
        assert "<td>random</td>" in shown
        assert 'src="data:image/png;base64,' in shown
        none = audit(done, [], progress=False)
        assert list(none.membership["attack"]) == ["loss", "entropy"]
        assert none.reconstruction.empty
        assert none.inversions == {}
        with pytest.raises(BadInput, match=r"^noise: the list is empty; name a level, such as 0"):
            audit(done, [Random()], noise=[], progress=False)

    def test_the_example_runs(self, done: Run) -> None:
        run_example(audit, folder=done.path)


def test_explanations_that_cannot_be_attacked(tmp_path: Path, say: Say) -> None:
    images = trained(Path("runs"), {"name": "fedavg"}, 1)
    for words, message in {
        ("--explainer", "gradeint"): (
            "there is no explainer 'gradeint'; did you mean 'gradient'?"
        ),
        (
            "--explainer",
            "tasks",
        ): "explainer: explainer 'tasks' does not assign a number to each part of",
        ("--explainer", "random", "--noise=-0.5"): (
            "noise=-0.5: must be 0 or more, as a share of an explanation's length"
        ),
        ("--explainer", "random", "--noise=1e39"): "noise=1e+39: must be 0 or more, as a share",
        ("--noise", "1"): "noise is added to explanations; name an explainer",
        ("--shadows", "1"): "shadows=1: LiRA needs at least 2 shadow models",
    }.items():
        code, text, error = say("attack", str(images.path), *words)
        assert (code, text) == (2, ""), words
        assert error.startswith(f"error: {message}"), error
        assert not (images.path / "attacks.json").exists()
    with pytest.raises(BadInput, match=r"its inputs are no images of 8 pixels a side or more"):
        PrivacyAudit(noise(tmp_path, rounds=1, epochs=1)).invert_explanations(Gradient())


def test_a_method_that_shares_nothing(say: Say) -> None:
    done = trained(Path("runs"), {"name": "fedavg"}, 1)
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
    ways = ("--shadows", "2", "--explainer", "occlusion", "--noise", "1")
    code, text, error = say("attack", str(done.path), *ways)
    assert code == 0, error
    assert "from explanations" not in text  # which are of no images
    rows = json.loads((done.path / "attacks.json").read_text())["membership"]
    found = {row["attack"]: row["auc"] for row in rows}
    assert 0 <= found["lira"] <= 1
    assert 0 <= found["map_lira"] <= 1
    with pytest.raises(BadInput, match="attribution gradient needs inputs of floating point"):
        PrivacyAudit(done).infer_membership(0, [Gradient()])


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
    alone = trained(Path("runs"), {"name": "local"}, 1)
    code, _, error = say("attack", str(alone.path))
    assert code == 2
    assert error.endswith(": leaves no global classifier to attack\n")
    done = trained(Path("runs"), {"name": "fedavg"}, 1)
    code, _, error = say("attack", str(done.path), "--shadows", "1")
    assert code == 2
    assert error.startswith("error: shadows=1: LiRA needs at least 2 shadow models")
