"""`fedsim attack`: who was trained on, and what shared images and explanations show."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments import CHOOSER, FEW, KINDS, READER, REVIEWS, Say, ran, refusal, run_example
from fedsim import Run, audit, replay
from fedsim.analysis.attacks.audit import PrivacyAudit, _sent
from fedsim.analysis.attacks.membership import Fit, guessing
from fedsim.analysis.attacks.report import doubts
from fedsim.explain.explainers.control import Random
from fedsim.explain.explainers.gradients import Gradient, GradientXInput

MODEL = {"name": "cnn", "channels": [4, 4]}
DEEPER = {"name": "mlp", "hidden": [32, 16]}
FEDAVG: dict[str, Any] = {"name": "fedavg"}
FEDXDS: dict[str, Any] = {"name": "fedxds", "warmup_rounds": 1}
FEDFED: dict[str, Any] = {"name": "fedfed", "distillation_rounds": 1, "width": 4}

Little = Callable[..., None]


@pytest.fixture(autouse=True)
def little(monkeypatch: pytest.MonkeyPatch) -> Little:
    """Few images and passes; results that need more say so."""

    def change(**constants: int) -> None:
        for name, value in constants.items():
            monkeypatch.setattr(f"fedsim.analysis.attacks.audit.{name}", value)

    change(AUXILIARY=60, EPOCHS=1, VICTIMS=60)
    return change


def trained(method: dict[str, Any], rounds: int = 3, **sections: Any) -> Run:
    """Clients of methods that share do so by round 3."""
    sections["train"] = {"rounds": rounds, **sections.get("train", {})}
    return ran(**{"method": method, "model": MODEL, **sections})


def noise(out: Path, rounds: int, epochs: int) -> Run:
    """Labels at random: nothing but the training examples themselves can be learnt."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((400, 16), dtype=np.float32), rng.integers(0, 4, 400)
    np.savez(out / "noise.npz", x=x, y=y)
    adam = {"name": "adam", "lr": 0.01}
    return trained(
        *(FEDAVG, rounds),
        data={"name": "npz", "path": str(out / "noise.npz"), "test_fraction": 0.5},
        partition={"kind": "iid", "clients": 2},
        model={"name": "mlp", "hidden": [128]},
        train={"local_epochs": epochs, "batch_size": 50, "optimizer": adam},
    )


@pytest.fixture(scope="module")
def plain() -> Run:
    """Of one round, with one explainer in its section `explain`."""
    section = {"explainers": [{"name": "occlusion", "size": 2}], "inputs": 2}
    return trained(FEDAVG, 1, explain=section)


class TestMembership:
    @pytest.fixture(scope="class")
    def learnt_by_heart(self, tmp_path_factory: pytest.TempPathFactory) -> Run:
        return noise(tmp_path_factory.mktemp("noise"), rounds=4, epochs=20)

    @pytest.fixture(scope="class")
    def hardly_learnt(self, tmp_path_factory: pytest.TempPathFactory) -> PrivacyAudit:
        return PrivacyAudit(noise(tmp_path_factory.mktemp("noise"), rounds=1, epochs=1))

    @pytest.fixture(scope="class")
    def attacked(self, learnt_by_heart: Run) -> PrivacyAudit:
        return PrivacyAudit(learnt_by_heart)

    @pytest.fixture(scope="class")
    def often(self, attacked: PrivacyAudit) -> Any:
        """Outcomes with explanations as they are, scaled, and with much noise."""
        return attacked.infer_membership(4, [Gradient(), Random()], [None, 0, 30])

    def test_members_learnt_by_heart_are_told(
        self, often: Any, hardly_learnt: PrivacyAudit
    ) -> None:
        least = {"loss": 0.85, "entropy": 0.6, "lira": 0.85, "gradient/map_lira": 0.7}
        for name, auc in least.items():
            assert often[None][name].auc > auc, name
            assert often[None][name].balanced_accuracy > 0.6
        once = hardly_learnt.infer_membership(0, [Gradient()])[None]
        assert all(found.auc < 0.65 for found in once.values())

    def test_noise_hides_members(self, often: Any, hardly_learnt: PrivacyAudit) -> None:
        _, scaled, noisy = often.values()
        assert scaled["gradient/map_lira"].auc > 0.7  # the scale of maps is not what tells
        # Three standard deviations of the AUC of chance, of 200 each: √(401/(12·200·200)) = 0.029.
        for how in "variance", "norm", "norm_lira", "map_lira":
            assert abs(noisy[f"gradient/{how}"].auc - 0.5) < 0.09, how
            assert abs(often[None][f"random/{how}"].auc - 0.5) < 0.09, how
        for name in "loss", "entropy", "lira":
            assert noisy[name] == scaled[name]  # noise is in explanations alone
        several = hardly_learnt.infer_membership(2, [Gradient()], [0, 30])
        alone = hardly_learnt.infer_membership(2, [Gradient()], [30])
        assert alone == {30: several[30]}  # that shadow models are shared changes nothing

    def test_shadow_models_that_learnt_less_are_doubted(
        self,
        learnt_by_heart: Run,
        attacked: PrivacyAudit,
        often: Any,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        about = {"explainer": "", "noise": math.nan}
        good = [{**about, "attack": n, "auc": often[None][n].auc} for n in ("loss", "lira")]
        assert list(doubts(good, guessing(200, 200), attacked.fits)) == []
        monkeypatch.setattr(PrivacyAudit, "passes", 1)
        found = audit(learnt_by_heart, shadows=4, progress=False)
        fits = found.fits.set_index("model")
        assert fits["inside"]["the model"] == attacked.fits["the model"].inside > 0.9
        assert fits["inside"]["shadow models (mean)"] < 0.7
        assert fits["outside"].between(0.1, 0.5).all()
        auc = found.membership.set_index("attack")["auc"]
        assert auc["lira"] < auc["loss"] - 0.1
        loss = fits["outside_loss"] - fits["inside_loss"]
        assert loss["shadow models (mean)"] < loss["the model"] / 4
        assert fits.loc["always the most frequent class", ["inside_loss"]].isna().all()
        text = found.text()
        assert "warning: the shadow models have learnt their examples worse than the mod" in text
        assert f"warning: LiRA (AUC {auc['lira']:.3f}) is weaker than the loss" in text
        low, high = found.guessing["auc"]
        assert (low, high) == pytest.approx((0.443, 0.557), abs=0.001)
        row = next(line for line in text.splitlines() if line.startswith("guessing"))
        assert "0.443 to 0.557" in row
        assert "warning: LiRA" in found._repr_html_()

    def test_scores_are_of_what_is_shown(self, hardly_learnt: PrivacyAudit) -> None:
        """The gradient of the logit decided upon, by autograd, as it is and of unit length."""
        attacked = hardly_learnt
        x = attacked._training_examples(np.arange(50)).x.clone().requires_grad_()
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

    def test_they_need_no_images(self, hardly_learnt: PrivacyAudit) -> None:
        told = refusal(lambda: hardly_learnt.invert_explanations(Gradient()))
        assert "its inputs are no images of 8 pixels a side or mor" in told


@pytest.mark.parametrize("adapters", [None, {"r": 2}], ids=["all weights", "adapters"])
def test_shadow_models_begin_where_the_run_began(adapters: dict[str, Any] | None) -> None:
    """Who attacks a fine-tuned model knows the model that was public before."""
    adam = {"local_epochs": 4, "optimizer": {"name": "adam", "lr": 0.01}}
    first = trained(FEDAVG, 12, model=DEEPER, train=adam)
    weights = str(first.path / "weights" / "final.safetensors")
    train = {"initial_weights": weights, "optimizer": {"lr": 1e-12}}
    done = trained(FEDAVG, 1, train=train, adapters=adapters, model=DEEPER)
    fits = audit(done, shadows=2, progress=False).fits.set_index("model")
    own, shadows = (fits.loc[name] for name in ("the model", "shadow models (mean)"))
    assert own["inside"] > 0.6
    assert shadows["inside_loss"] == pytest.approx(own["inside_loss"], abs=0.2)
    assert shadows["outside_loss"] == pytest.approx(own["outside_loss"], abs=0.2)


def test_frozen_layers_of_shadow_models_are_those_of_the_run() -> None:
    """They are drawn by the run's seed, and all clients have them."""
    done = trained(FEDAVG, 1, adapters={"r": 2}, model=DEEPER)
    attacked = PrivacyAudit(done)
    shadow, own = (n.state_dict() for n in (attacked._spec.build_begun(), attacked._network))
    same = {name for name, layer in shadow.items() if torch.equal(layer, own[name])}
    assert {name for name in shadow if ".base_layer." in name} <= same
    assert not any(".lora_A." in name or name.startswith("head.") for name in same)


def test_a_model_that_has_learnt_nothing_is_doubted(tmp_path: Path) -> None:
    train = {"optimizer": {"name": "sgd", "lr": 1e-6}}
    found = audit(trained(FEDAVG, 1, train=train), progress=False)
    assert found.warnings[0].startswith("the model has learnt too little to reveal its exam")
    content = json.loads(found.save(tmp_path / "out")[0].read_text())
    assert content["warnings"] == list(found.warnings)
    assert set(content["guessing"]) == {"auc", "balanced_accuracy", "tpr"}
    assert [row["model"] for row in content["fits"]] == list(found.fits["model"])


def test_shadow_models_as_right_but_less_sure_are_doubted() -> None:
    """A loss of 0.93 beside LiRA of 0.44: what memorised examples look like was not learnt."""
    about = {"explainer": "", "noise": math.nan}
    rows = [{**about, "attack": n, "auc": auc} for n, auc in (("loss", 0.93), ("lira", 0.44))]
    fits = {
        "the model": Fit(1, 0.6, 0.01, 2.51),
        "always the most frequent class": Fit(0.2, 0.2),
        "shadow models (mean)": Fit(0.97, 0.6, 0.3, 1.5),
    }
    told = list(doubts(rows, guessing(200, 200), fits))
    assert told[0] == (
        "the shadow models remember less of their examples than the model: their losses on others "
        "exceed those on these by 1.2, the model's by 2.5; what LiRA finds is too little, and no "
        "evidence of privacy"
    )
    assert told[1].startswith("LiRA (AUC 0.440) is weaker than the loss (0.930)")
    fits["shadow models (mean)"] = Fit(0.97, 0.6, 0.3, 1.6)
    assert list(doubts(rows, guessing(200, 200), fits)) == [told[1], *told[2:]]


def test_scores_that_can_be_turned_round_are_named() -> None:
    rows: list[dict[str, Any]] = [
        {"attack": "loss", "explainer": "", "noise": math.nan, "auc": 0.6},
        {"attack": "norm", "explainer": "gradient", "noise": 0.5, "auc": 0.31},
    ]
    fits = {"the model": Fit(0.9, 0.5), "always the most frequent class": Fit(0.2, 0.2)}
    (warning,) = doubts(rows, guessing(200, 200), fits)
    assert warning.startswith("below guessing: gradient/norm, noise 0.5; ")


def test_images_are_reconstructed_from_explanations_unless_there_is_noise(little: Little) -> None:
    little(AUXILIARY=160, EPOCHS=6, VICTIMS=40)
    attacked = PrivacyAudit(trained(FEDAVG, 2, data={"name": "digits"}))
    plain, noisy = (attacked.invert_explanations(GradientXInput(), noise) for noise in (None, 30))
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


def test_shared_images_are_reconstructed_the_worse_the_more_noise(little: Little) -> None:
    little(AUXILIARY=150, EPOCHS=5, VICTIMS=80)
    little_noise, much_noise = (
        PrivacyAudit(trained({**FEDXDS, "removed": 0, "sigma": sigma})).invert_shared()
        for sigma in (0.05, 3.0)
    )
    assert little_noise.reconstructed.ssim > much_noise.reconstructed.ssim
    assert little_noise.reconstructed.psnr > much_noise.reconstructed.psnr
    assert much_noise.reconstructed.mse < much_noise.shared.mse


def shared_by(attacked: PrivacyAudit) -> Tensor:
    """All that clients have shared, in pixels, of a range of [0, 1]."""
    state, method = attacked._state, attacked._experiment.method
    if method.name == "fedfed":
        return method.combined(torch.tensor(state.shared1), torch.tensor(state.shared2))
    shared = torch.tensor(state.shared)
    if method.encoding == "uint8":
        scale, zero = method.levels(attacked._fed)
        return (shared.float() - zero) * scale
    return shared


OF_BYTES = {"encoding": "uint8"}
AT_RANDOM = {"attribution": {"name": "random"}}


@pytest.mark.parametrize(
    "method",
    [
        *({**FEDXDS, **more, "sigma": 0.0} for more in (OF_BYTES, AT_RANDOM)),
        {**FEDFED, "sigma1": 0.0, "sigma2": 0.0},
    ],
)
def test_the_attack_sees_what_was_shared(method: dict[str, Any]) -> None:
    """But for the noise: what it makes of a client's images is what that client shared."""
    attacked = PrivacyAudit(trained(method))
    rows = np.concatenate([attacked._splits.train[k] for k in range(10)])
    assert attacked._sharing is not None
    made = attacked._shared(attacked._sharing, attacked._training_examples(rows), "try")
    pool = torch.tensor(attacked._state.shared1) if "sigma1" in method else shared_by(attacked)
    if "attribution" in method:  # other random maps
        share = float((pool != 0).float().mean())
        assert (made != 0).float().mean() == pytest.approx(share, abs=0.02)
    else:
        torch.testing.assert_close(made, pool, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "method",
    [
        {**FEDXDS, "attribute_with": "local", "fraction": 0.5},
        {**FEDXDS, **OF_BYTES, **AT_RANDOM},
        FEDFED,
    ],
)
def test_victims_are_images_that_were_shared_as_they_were(method: dict[str, Any]) -> None:
    attacked = PrivacyAudit(trained(method))
    inversion, pool = attacked.invert_shared(), shared_by(attacked)
    assert len(inversion.items) == 60
    dataset = torch.tensor(attacked._dataset.x)
    for image, item, label in zip(
        inversion.originals[:20], inversion.items, inversion.labels, strict=False
    ):
        same = (pool - item).flatten(1).abs().amax(dim=1) < 1e-5
        assert str(int(attacked._state.labels[int(same.int().argmax())])) == label
        assert same.any()
        assert ((dataset - image).flatten(1).abs().amax(dim=1) < 1e-5).any()


@pytest.mark.parametrize("changes", [2, 3])
def test_victims_that_drift_are_seen_as_they_were_when_they_shared(changes: int) -> None:
    """FedFed's clients share in round 2. Members are what is held in the end."""
    drift = {"name": "drift", "of": FEW, "round": changes, "clients": 1}
    done = trained(FEDFED, data=drift, partition={"kind": "iid", "clients": 10})
    attacked, splits = PrivacyAudit(done), replay(done).splits
    assert attacked._sharing is not None
    originals, *_ = attacked._sharing.shared_pairs(attacked._fed, attacked._state, 4)
    held = splits.at(2, 3).train[4]
    assert torch.equal(originals, attacked._pixels(attacked._training_examples(held).x))
    assert attacked._splits.train[4].tolist() == splits.at(3, 3).train[4].tolist()
    assert splits.at(3, 3).train[4].tolist() != splits.at(1, 3).train[4].tolist()


def test_guesses_without_what_was_shared(plain: Run) -> None:
    """The mean of the attacker's images, and that of its images of the victim's class."""
    attacked = PrivacyAudit(plain)
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
    done = trained(FEDXDS)
    text = say.printed("attack", str(done.path), "--shadows", "2")
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
    assert text.startswith(
        "attacks on:\n  membership of 360 training examples beside as many test examples, by "
        "loss and entropy, by 2 shadow models, each trained for 1 pass\n  images from what "
        "clients shared, by a denoiser\n["
    )
    steps = ["[1/3] shadow model 1", "[2/3] shadow model 2", "[3/3] images from what was shared"]
    assert re.findall(r"^\[.*", text, re.M) == steps


class TestExplanations:
    """And that nothing else is attacked of a method that shares nothing."""

    @pytest.fixture(autouse=True)
    def _less(self, little: Little) -> None:
        little(AUXILIARY=60, EPOCHS=1, VICTIMS=10, MEMBERS=50)

    def test_the_section_s_by_default(self, plain: Run, say: Say) -> None:
        text = say.printed("attack", str(plain.path))
        assert "\n  images from explanations of occlusion, by a denoiser\n" in text
        assert "shared images" not in text
        found = json.loads((plain.path / "attacks.json").read_text())
        assert [(row["explainer"], row["attack"]) for row in found["membership"]] == [
            *(("", "loss"), ("", "entropy"), ("occlusion", "variance"), ("occlusion", "norm"))
        ]
        assert {row["noise"] for row in found["membership"]} == {None}
        guesses = ("the mean image, without any", "the mean image of the class, without any")
        names = ("explanations by occlusion", *guesses)
        for name, close in zip(names, found["reconstruction"], strict=True):
            (row,) = [line for line in text.splitlines() if line.startswith(name)]
            assert row.split()[-1] == f"{close['ssim']:.3f}"
        picture = plain.path / "explanations" / "reconstructed-occlusion.png"
        assert picture.read_bytes().startswith(b"\x89PNG")
        told = refusal(lambda: PrivacyAudit(plain).invert_shared())
        assert "shares no images to invert" in told

    def test_levels_of_noise(self, plain: Run, say: Say) -> None:
        ways = ("--explainer", "random", "--noise", "0.5", "--noise", "2", "--shadows", "2")
        text = say.printed("attack", str(plain.path), *ways)
        assert "by explanations of random with noise 0.5 and 2\n" in text
        found = json.loads((plain.path / "attacks.json").read_text())
        of_noise = [(row["attack"], row["noise"]) for row in found["membership"]]
        attacks = ("variance", "norm", "norm_lira", "map_lira")
        plain_ones = [(attack, None) for attack in ("loss", "entropy", "lira")]
        assert of_noise == plain_ones + [(a, noise) for noise in (0.5, 2.0) for a in attacks]
        assert "random/map_lira, noise 0.5 " in text
        for noise in ("0.5", "2"):
            name = f"reconstructed-random-noise-{noise}.png"
            assert (plain.path / "explanations" / name).exists()

    def test_in_python(self, plain: Run, tmp_path: Path) -> None:
        said: list[str] = []
        found = audit(plain, [Random()], noise=1, progress=said.append)
        assert said[0].startswith("attacks on:")
        assert said[1:] == ["[1/1] images from random noise 1"]
        assert set(found.membership["explainer"]) == {"", "random"}
        mse = found.reconstruction.set_index("source")["mse"]
        assert mse["explanations"] > mse["mean image of the class"]
        failed = "images from explanations by random, noise 1: no closer than a mean image"
        assert failed in found.text()
        paths = found.save(tmp_path / "new" / "folder")
        names = ["attacks.json", "reconstructed-random-noise-1.png"]
        assert [path.name for path in paths] == names
        shown = found._repr_html_()
        assert "<td>random</td>" in shown
        assert 'src="data:image/png;base64,' in shown
        none = audit(plain, [], progress=False)
        assert list(none.membership["attack"]) == ["loss", "entropy"]
        assert none.reconstruction.empty
        told = refusal(lambda: audit(plain, [Random()], noise=[], progress=False))
        assert told == "noise: the list is empty; name a level, such as 0.5"

    def test_the_example_runs(self, plain: Run) -> None:
        run_example(audit, folder=plain.path)


@pytest.mark.parametrize("model", [READER, CHOOSER], ids=lambda model: str(model["name"]))
def test_shadows_of_models_of_documents(say: Say, model: dict[str, Any]) -> None:
    done = trained(FEDAVG, 1, **REVIEWS, model=model)
    ways = ("--shadows", "2", "--explainer", "occlusion", "--noise", "1")
    text = say.printed("attack", str(done.path), *ways)
    assert "from explanations" not in text  # which are of no images
    rows = json.loads((done.path / "attacks.json").read_text())["membership"]
    found = {row["attack"]: row["auc"] for row in rows}
    assert 0 <= found["lira"] <= 1
    assert 0 <= found["map_lira"] <= 1
    told = refusal(lambda: PrivacyAudit(done).infer_membership(0, [Gradient()]))
    assert told.startswith("explainer gradient: needs inputs of floating point")


def test_without_a_global_model(say: Say) -> None:
    tasks = {"kind": "own_tasks", "tasks": [[["negative"], ["positive"]]]}
    for name, sections in (("local", {}), ("fedweit", {**KINDS["documents"], "partition": tasks})):
        train = {"optimizer": {"name": "adam", "lr": 0.01}}
        done = trained({"name": name}, 2, **sections, train=train)
        error = say.refused("attack", str(done.path))
        assert error.endswith(": leaves no global classifier to attack\n")
