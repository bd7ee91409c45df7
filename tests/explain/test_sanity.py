"""Whether explanations change as the network's weights become random."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from experiments import KINDS, Say, ran, refusal, small_experiment
from fedsim import Run, explanations, run
from fedsim.explain.explainers.attribution import Attribution, attributions
from fedsim.explain.scores.randomisation import (
    ALIKE,
    agreement,
    all_random,
    layers,
    random_agreement,
    randomised,
)
from fedsim.models import models

MLP = {"name": "mlp", "hidden": [16]}
VIT = {"name": "vit", "patch": 2, "dim": 8, "depth": 1, "heads": 2}


class Edges(Attribution):
    """Where the image changes, whatever the network is."""

    name: str = f"{__name__}:Edges"

    def relevance(
        self, network: nn.Module, x: Tensor, y: Tensor, rng: np.random.Generator
    ) -> Tensor:
        return x.diff(dim=-1, append=x[..., -1:]).abs()


class TestRandomWeights:
    @pytest.mark.parametrize("section", [MLP, {"name": "resnet8"}, VIT])
    def test_layer_by_layer_from_the_top(self, section: dict[str, Any]) -> None:
        torch.manual_seed(0)
        network = models.parse(section).build((1, 8, 8), 10)
        before = {n: t.clone() for n, t in network.state_dict().items()}
        done: list[str] = []
        for layer, changed in randomised(network, 0, 0):
            done.append(layer)
            assert not changed.training
            for n, one in changed.named_parameters():
                if n.rpartition(".")[0] not in done:
                    torch.testing.assert_close(one, before[n], rtol=0, atol=0)
                elif before[n].std() > 0:
                    assert not torch.equal(one, before[n]), n
        assert done == layers(network)
        assert done[0] == list(dict(network.named_parameters()))[-1].rpartition(".")[0]
        for n, old in network.state_dict().items():
            assert torch.equal(old, before[n])

    def test_are_the_streams_of_their_names(self) -> None:
        network = models.parse(MLP).build((6,), 3)
        state = torch.get_rng_state()
        one, same, other = (all_random(network, 0, draw, 2, 1) for draw in (0, 0, 1))
        assert torch.equal(torch.get_rng_state(), state)
        for a, b, c in zip(one.parameters(), same.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
            assert not torch.equal(a, c)

    def test_what_no_layer_draws_is_put_in_random_order(self) -> None:
        network = nn.ParameterDict({"own": torch.arange(9.0), "level": torch.ones(4)})
        found = all_random(network, 0, 0).state_dict()
        assert sorted(found["own"].tolist()) == list(range(9))
        assert found["own"].tolist() != list(range(9))
        assert found["level"].tolist() == [1] * 4

    def test_agreement_has_no_sign_and_no_few_parts(self) -> None:
        a, b = np.random.default_rng(0).standard_normal((2, 4, 7))
        expected = [abs(spearmanr(*rows).statistic) for rows in zip(a, b, strict=True)]
        np.testing.assert_allclose(agreement(a, b), expected)
        np.testing.assert_allclose(agreement(a, -a), 1)
        assert np.isnan(agreement(a[:, :2], b[:, :2])).all()


@pytest.fixture(scope="module")
def checked() -> Run:
    return ran(model={"name": "cnn", "channels": [4, 4]}, train={"rounds": 2})


@pytest.mark.parametrize("name", [n for n, _ in attributions.items()])
def test_every_attribution_can_be_checked(name: str, checked: Run) -> None:
    done = checked
    if name in ("attention_rollout", "attn_lrp"):
        done = ran(model=VIT, train={"rounds": 1})
    found: Any = explanations(done, name, row=[0, 5], check=True)[0]
    assert len(found.rank) == len(found.ssim) == len(found.layers) > 1
    assert all(0 <= one <= 1 for one in found.rank)
    assert found.changes is not None
    assert len(found.text().splitlines()) == len(found.layers) + 3
    assert [row["layer"] for row in found.rows()] == [*found.layers]


def test_what_ignores_the_network_is_named(checked: Run, say: Say, tmp_path: Path) -> None:
    found: Any = explanations(checked, f"{__name__}:Edges", row=[0, 5], check=True)[0]
    assert found.rank == pytest.approx([1] * len(found.layers))
    assert found.ssim == pytest.approx([1] * len(found.layers))
    assert found.rise == pytest.approx(0)
    assert not found.changes
    assert "DO NOT DEPEND ON THE WEIGHTS" in found.text()
    (picture,) = found.save(tmp_path)
    assert picture.name == "check-test_sanity-Edges-round-2-rows-0-5.png"
    text = say.printed(
        "explain", str(checked.path), "--check", "--explainer", "random", "--row", "3"
    )
    assert "the maps of random DO NOT DEPEND ON THE WEIGHTS" in " ".join(text.split())


@pytest.mark.filterwarnings("ignore:.*words get random vectors")
@pytest.mark.parametrize(
    ("sections", "name"),
    [
        ({"model": MLP}, "tree"),
        ({"model": MLP, "adapters": {"kind": "lora", "r": 2}}, "gradient"),
        (KINDS["documents"], "occlusion"),
        (KINDS["rationales"], "rationale"),
        ({**KINDS["numbers"], "model": MLP}, "gradient"),
    ],
)
def test_of_all_kinds_of_networks(sections: Any, name: str) -> None:
    done = ran(**sections, train={"rounds": 1})
    client = 0 if name == "tree" else None
    found: Any = explanations(done, name, client=client, row=[0, 5, 7], check=True)[0]
    assert len(found.rank) > 1
    assert found.changes is not None


def test_what_has_no_maps_or_no_weights_is_refused(checked: Run) -> None:
    rules = ran(**KINDS["rules"], train={"rounds": 1})
    line = "check makes the weights of a network random, and model.name=tsk is a rule model"
    assert refusal(lambda: explanations(rules, check=True)) == line
    line = "check compares maps of relevance, and explainer tasks gives none"
    assert refusal(lambda: explanations(checked, "tasks", check=True)) == line


@pytest.mark.usefixtures("undrawn")
def test_runs_and_reports_name_it(say: Say, tmp_path: Path) -> None:
    lines, edges = list[str](), f"{__name__}:Edges"
    explain = {"explainers": [edges, "gradient"], "scores": ["randomisation"], "inputs": 4}
    made = small_experiment(model=MLP, train={"rounds": 2}, explain={**explain, "every": 1})
    done = run(made, tmp_path, lines.append)
    assert [line for line in lines if "depend" in line] == [
        f"warning: explainer {edges} does not depend on the network's weights: its maps agree "
        "with those of random weights (randomisation above 0.8)"
    ]
    last = done.rounds.iloc[-1]
    assert last[f"{edges}/randomisation"] == pytest.approx(1)
    assert last["gradient/randomisation"] < ALIKE
    say.printed("report", str(done.path), "--out", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert f"Maps by {edges} do not depend on the network" in page
    assert "By chance: 0.1005" in page  # √(2/(63π))


def of_squares(asked: list[Any], **sections: Any) -> Run:
    explain = {"explainers": asked, "scores": ["randomisation"], "inputs": 2, "of": ["global"]}
    return ran(**sections, explain=explain, train={"rounds": 2})


def test_chance_goes_by_what_has_a_relevance_of_its_own() -> None:
    """Four squares of an image of 64 pixels agree by chance as maps of four numbers do."""
    squares = {"gradient": 64, "occlusion": 4, "sage": 4, "kernel_shap": 4, "captum": 16}
    asked: list[Any] = [{"name": name} for name in squares]
    asked[-1] |= {"method": "FeatureAblation", "size": 2}
    found = {metric.column: metric.chance for metric in of_squares(asked).explained}
    for column, chance in found.items():
        P = squares[next(name for name in squares if column.startswith(name))]
        assert chance == pytest.approx(math.sqrt(2 / (math.pi * (P - 1))))
    assert len(found) == len(squares)
    assert random_agreement(np.array([4])) == pytest.approx(math.sqrt(2 / (3 * math.pi)))


def test_fewer_than_three_squares_cannot_be_checked(tmp_path: Path) -> None:
    asked = [{"name": name, "size": 4} for name in ("occlusion", "kernel_shap")]
    x = np.random.default_rng(0).normal(size=(300, 1, 4, 8)).astype(np.float32)
    np.savez(tmp_path / "wide.npz", x=x, y=np.arange(300) % 3)
    data = {"name": "npz", "path": str(tmp_path / "wide.npz")}
    done = of_squares(asked, data=data)
    for metric in done.explained:
        assert metric.chance is None
        assert metric.column not in done.rounds
    found: Any = explanations(done, "{name: occlusion, size: 4}", row=0, check=True)[0]
    assert found.changes is None
