"""Each score in the tables is of a model that can be had, and explained, under one name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments import FEW, LATE, NETWORK_METHODS, Say, small_experiment, with_method
from fedsim import Run, run
from fedsim.analysis.replay import ClientModel, ModelSnapshot, client_models, replay
from fedsim.errors import BadInput
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.attributed import Attributed
from fedsim.explain.inputs import Inputs
from fedsim.launch.prepare import prepare
from fedsim.objectives import Batch, evaluate, scores_of

Finish = Callable[..., Run]

GRADIENT = explainers.parse({"name": "gradient"})
FINE_TUNED = {"name": "fedbabu", "fine_tune": "all", "fine_tune_epochs": 1}
PERSONAL = [
    *("apfl", "ditto", "fedavg_ft", "fedbabu tuned", "fedbn", "fedper", "fedrep", "ifca"),
    *("lg_fedavg", "local", "perfedavg", "pfedme", "xpfl"),
]
# Whose personal model begins where the one that it trains and sends ends, or is a part of it.
TRAINED_TOO = {"local"}


def sections(name: str, **more: Any) -> dict[str, Any]:
    name, _, tuned = name.partition(" ")
    return with_method(
        name,
        data=FEW,
        partition={"clients": 6, "test_fraction": 0.3, "min_samples": 4},
        train={"rounds": 5 if name in LATE else 3, "participation": 0.5},
        engine={"clients_per_step": 2},
        evaluate={"clients": True},
        method=FINE_TUNED if tuned else {},
        **more,
    )


def predicted(model: ModelSnapshot, x: Tensor, y: Tensor) -> dict[str, float]:
    objective = model.again.spec.objective
    return scores_of(objective, evaluate(objective, model.network(), Batch(x, y)))


def vector(own: ClientModel) -> Tensor:
    assert isinstance(own, Tensor)
    return own


@pytest.mark.parametrize("name", [*NETWORK_METHODS, "fedbabu tuned"])
def test_scores_are_of_models_that_can_be_had(finish: Finish, name: str) -> None:
    done = finish(**sections(name))
    method = done.experiment.method
    assert method.keeps_models == (name in PERSONAL)
    for t in (done.last_round, done.last_round - 1):
        row = done.rounds.set_index("round").loc[t]
        tested = done.clients.query("round == @t").set_index("client")
        again = replay(done, t)
        own = {}
        if method.has_global_model:
            common = ModelSnapshot.of(done, after=t)
            own = dict.fromkeys(range(6), common)
            for score, value in common.scores().items():
                assert value == pytest.approx(row[score], rel=1e-6), score
        if method.keeps_models:
            snapshots = ModelSnapshot.of_clients(done, range(6), t)
            own = {model.client: model for model in snapshots}
            assert {model.kind for model in snapshots} == {"personal"}
            assert own[2].title == f"client 2's personal model after round {t}"
        for k, model in own.items():
            fed = again.fed
            rows = again.splits.test[k]
            data = fed.server.prepare(again.dataset.x[rows], again.dataset.y[rows])
            for score, value in predicted(model, data.x, data.y).items():
                assert value == pytest.approx(tested.loc[k, f"test_{score}"], rel=1e-5), (k, score)
        if not method.has_global_model:
            test = again.fed.server.test_data
            kept = again.runner.states() or range(6)
            found = [predicted(own[k], test.x, test.y)["accuracy"] for k in kept]
            assert row["accuracy"] == pytest.approx(np.mean(found))


def test_final_weights_have_the_last_score(finish: Finish) -> None:
    for name in ("fedavg_ft", "ditto"):
        done = finish(**sections(name))
        network = prepare(done.experiment)[2].build_model()
        network.load_state_dict(done.weights())
        dataset = ModelSnapshot.of(done).dataset
        found = network.eval()(torch.tensor(dataset.test_x)).argmax(dim=1).numpy()
        assert done.rounds["accuracy"].iloc[-1] == pytest.approx((found == dataset.test_y).mean())


@pytest.mark.parametrize("name", PERSONAL)
def test_what_a_client_sends_is_another_model(finish: Finish, name: str) -> None:
    """`cohort` is what it trained, and averaged, and `personal` what it predicts with."""
    explain = {"explainers": ["gradient"], "of": ["cohort", "personal"], "inputs": 2}
    explain |= {"maps": True, "scores": ["sufficiency"], "target": "decision"}
    done = finish(**sections(name, explain=explain))
    t, explained = done.last_round, Counter[str]()
    rows = done.maps.query("round == @t")
    for k in sorted(set(rows.query("model == 'cohort'")["client"])):
        (trained,) = ModelSnapshot.of_clients(done, [k], t, of="cohort")
        personal = ModelSnapshot.of(done, k, t)
        same = torch.equal(vector(trained.own), vector(personal.own))
        assert same == (name in TRAINED_TOO)
        assert trained.title == f"client {k}'s model after round {t}"
        assert (personal.suffix, trained.suffix) == (
            f"-client-{k}-round-{t}",
            f"-client-{k}-cohort-round-{t}",
        )
        for model in (trained, personal):
            own = rows.query("model == @model.kind and client == @k")
            if own.empty:
                continue
            found = model.explain(GRADIENT, Inputs.of_rows(model.dataset, own["input"].tolist()))
            assert isinstance(found, Attributed)
            recorded = np.stack(own["relevance"].tolist()).reshape(found.relevance.shape)
            np.testing.assert_allclose(found.relevance, recorded, rtol=1e-3, atol=1e-5)
            explained[model.kind] += 1
    assert explained["cohort"]
    assert explained["personal"]


def test_the_cohort_of_ditto_is_fedavg_s(finish: Finish) -> None:
    train = {"rounds": 3, "participation": 0.5}
    ditto, fedavg = (finish(method={"name": n}, train=train) for n in ("ditto", "fedavg"))
    cohort = [int(k) for k in ditto.clients.query("round == 3")["client"]]
    one, _ = client_models(ditto, cohort, 3, of="cohort")
    other, _ = client_models(fedavg, cohort, 3)
    for k in cohort:
        assert torch.equal(vector(one[k]), vector(other[k]))


def test_from_the_command_line(say: Say) -> None:
    partition = {"kind": "iid", "clients": 3}
    common: dict[str, Any] = {"partition": partition, "train": {"rounds": 3}}
    for name in ("ditto", "fedavg"):
        run(small_experiment(name=name, method={"name": name}, **common), Path("runs"))
    usual = ("explain", "runs/ditto", "--client", "1", "--explainer", "gradient", "--row", "0")
    for words, title, picture in [
        ((), "client 1's personal model after round 3", "gradient-client-1-round-3"),
        (("--of", "personal"), "client 1's personal model", "gradient-client-1-round-3"),
        (("--of", "cohort"), "client 1's model after round 3", "gradient-client-1-cohort-round-3"),
    ]:
        code, text, _ = say(*usual, *words)
        assert (code, text.startswith(title)) == (0, True)
        assert [*Path("runs").glob(f"ditto/*/explanations/{picture}*.png")]
    for words, message in [
        (
            ("explain", "runs/fedavg", "--client", "1", "--of", "personal"),
            "clients of method.name=fedavg have no personal models; what they trained is of=",
        ),
        (
            ("explain", "runs/fedavg", "--of", "cohort", "--row", "0"),
            "of=cohort is about models of clients; name a client",
        ),
    ]:
        code, _, complaint = say(*words)
        assert (code, complaint.count("error: ")) == (2, 1)
        assert message in complaint.splitlines()[-1]


def test_personal_models_need_a_method_that_has_them() -> None:
    untuned = {"name": "fedbabu", "fine_tune": "nothing"}
    for method in ({"name": "fedavg"}, untuned):
        explain = {"explainers": ["gradient"], "of": ["personal"]}
        experiment = small_experiment(method=method, explain=explain)
        with pytest.raises(BadInput, match="clients of this method keep no personal models"):
            prepare(experiment)
