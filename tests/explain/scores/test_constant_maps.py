"""Maps in which all parts of an input are alike: refused, said in words, scored as chance is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from experiments import KINDS, Finish, Say, ran, small_experiment
from fedsim import explanations, run
from fedsim.analysis.replay import ModelSnapshot
from fedsim.explain.explainers.attribution import Attribution, attributions
from fedsim.explain.explainers.lrp import Lrp
from fedsim.explain.explainers.mimic import TreeExplainer
from fedsim.explain.section import SCORES
from fedsim.models import models
from fedsim.results.maps import agreement_matrix

MLP = {"name": "mlp", "hidden": [16]}
CNN = {"name": "cnn", "channels": [4, 4]}
pytestmark = pytest.mark.filterwarnings("ignore:.*words get random vectors")


class Level(Attribution):
    """The same for each part, up to rounding; or in the first input alone."""

    name: str = f"{__name__}:Level"
    value: float = 0.25
    only_first: bool = False

    def relevance(
        self, network: nn.Module, x: Tensor, y: Tensor, rng: np.random.Generator
    ) -> Tensor:
        found = torch.full(tuple(x.shape), self.value) * (1 + 1e-7 * torch.rand(tuple(x.shape)))
        if self.only_first:
            found[1:] = torch.linspace(-1, 1, found[1:].numel()).view_as(found[1:])
        return found if x.is_floating_point() else found.masked_fill(x == 0, 0)


LEVEL = f"{__name__}:Level"


def begun(first: nn.Module, *shape: int) -> nn.Module:
    parts = first(torch.rand(1, *shape)).numel()
    return nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(parts, 10))


def mixed() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Unflatten(1, (1, 8, 8))),
        *(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "images": (lambda: models.parse(MLP).build((1, 8, 8), 10), (1, 8, 8)),
    "colours": (lambda: models.parse(MLP).build((3, 8, 8), 10), (3, 8, 8)),
    "table": (lambda: models.parse(MLP).build((6,), 10), (6,)),
    "one linear layer": (lambda: nn.Linear(6, 10), (6,)),
    "series": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 10)), (4, 3)),
    "linear, then convolution": (mixed, (1, 8, 8)),
    "convolution of all": (lambda: begun(nn.Conv2d(1, 16, 8), 1, 8, 8), (1, 8, 8)),
    "in strides": (lambda: begun(nn.Conv2d(3, 16, 8, stride=8), 3, 8, 8), (3, 8, 8)),
    "padded": (lambda: begun(nn.Conv2d(1, 4, 17, padding=8), 1, 8, 8), (1, 8, 8)),
    "of a series": (lambda: begun(nn.Conv1d(1, 16, 8), 1, 8), (1, 8)),
    "of columns": (lambda: begun(nn.Conv2d(1, 16, (8, 1)), 1, 8, 8), (1, 8, 8)),
    "attention": (lambda: models.parse({"name": "vit", "dim": 8}).build((1, 8, 8), 10), (1, 8, 8)),
    "convolution": (lambda: models.parse(CNN).build((1, 8, 8), 10), (1, 8, 8)),
}
# The first layer sees all of the input, so that LRP has the rule ε for it.
OF_ALL = ("images", "convolution of all", "padded")


@pytest.mark.parametrize(
    ("name", "of"),
    [
        *(("lrp", of) for of in NETWORKS if of != "attention"),
        *(
            (name, "images")
            for name, _ in attributions.items()
            if name not in ("attention_rollout", "gradcam")
        ),
        *((n, "attention") for n in ("attention_rollout", "attn_lrp", "gradcam")),
        ("gradcam", "convolution"),
    ],
)
def test_defaults_tell_the_parts_of_an_input_apart(name: str, of: str) -> None:
    torch.manual_seed(0)
    make, shape = NETWORKS[of]
    network, x, y = make().eval(), torch.rand(5, *shape), torch.arange(5)
    chosen = attributions.parse({"name": name, **({"size": 2} if name == "occlusion" else {})})
    relevance = chosen.relevance(network, x, y, np.random.default_rng(0))
    found = relevance.flatten(1)
    spread = found.amax(1) - found.amin(1)
    assert (spread > 0.01 * found.abs().amax(1)).all()
    if name == "lrp" and of in OF_ALL:
        epsilon = Lrp(composite="epsilon").relevance(network, x, y, np.random.default_rng(0))
        assert torch.equal(relevance, epsilon)


PARTS = {"images": "pixels", "table": "features", "documents": "words"}


@pytest.mark.parametrize(("kind", "parts"), PARTS.items())
def test_text_pictures_and_rows_say_so(kind: str, parts: str, tmp_path: Path) -> None:
    done = ran(**KINDS[kind], train={"rounds": 1})
    for value, told in {
        0.25: f"all of its {parts} are equally relevant (0.25), so this says nothing",
        0.0: "no part of it is relevant, so this says nothing",
    }.items():
        found = explanations(
            done, LEVEL, row=[0, 1], settings={"value": value, "only_first": True}
        )
        first, second = found.text().split("\nrow ")[1:]
        assert told in first
        assert "says nothing" not in second
        assert not re.search("half of the relevance|for it", first)
        row, other = found[0].rows()
        assert f"{row['says nothing']}, so this says nothing" == told
        assert "says nothing" not in other
        assert not any(map(row.get, ("half", "for")))
        assert other.get("half") or other["for"] or other["against"]
        (path,) = found.save(tmp_path)
        assert path.exists()


@pytest.mark.usefixtures("undrawn")
def test_scores_of_chance_and_a_line_that_says_why(say: Say, tmp_path: Path) -> None:
    wanted = [n for n, s in SCORES.items() if s.about != "truth" and not (s.images or s.of)]
    wanted.remove("reference_agreement")  # of two models
    made = small_experiment(
        **KINDS["table"],
        train={"rounds": 2},
        explain={
            **{"explainers": [LEVEL, "gradient"], "every": 1, "inputs": 3, "clients": 3},
            **{"scores": wanted, "maps": True},
        },
    )
    lines: list[str] = []
    done = run(made, tmp_path, progress=lines.append)
    assert [line for line in lines if "says nothing" in line] == [
        f"warning: explainer {LEVEL} says nothing about some inputs, which score what chance "
        "does: all their parts are equally relevant; or not finite, and have no scores; see "
        "`uninformative` in explanations.parquet"
    ]
    rows = done.explanations
    flat, usual = (rows[rows["explainer"] == name] for name in (LEVEL, "gradient"))
    columns = [c for c in rows if c.startswith(tuple(wanted))]
    assert {c.partition("_")[0] for c in columns} >= {"deletion", "sparseness", "agreement"}
    by_chance = {
        m.column.partition("/")[2].removeprefix("client_"): m.chance for m in done.explained
    }
    numbers = [c for c in columns if by_chance[c] is not None]
    assert len(numbers) > 10
    for column in numbers:
        told = flat[column].dropna()
        assert len(told)
        np.testing.assert_allclose(told, by_chance[column], atol=1e-9, err_msg=column)
    assert flat["uninformative"].eq(3).all()
    assert usual[columns].notna().any().all()
    assert usual["uninformative"].isna().all()
    assert (agreement_matrix(done, LEVEL) == 0).all(axis=None)
    assert agreement_matrix(done, "gradient").notna().all(axis=None)
    say.printed("report", str(done.path), "--out", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert "say nothing" in page
    assert "By chance: 1.414" in page


def test_a_tree_of_one_leaf_says_so(finish: Finish) -> None:
    done = finish(model=MLP, train={"rounds": 1, "optimizer": {"lr": 1e-6}})
    snapshot = ModelSnapshot.of(done)
    snapshot.own[:] = 0
    text = snapshot.explain(TreeExplainer(iterations=300)).text()
    assert "it predicts one class for all of them, so the tree says nothing" in text
