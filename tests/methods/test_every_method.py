"""What holds of every method, asked of one run of each (see tests/trained.py)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trained import (
    PERSONAL,
    ROUNDS,
    TRAINED,
    UNTRAINED,
    Trained,
    assert_same,
    assert_same_state,
    settings,
    trained,
    vector,
)

from experiments import (
    LATE,
    MECHANISMS,
    NETWORK_METHODS,
    PARAMETERS,
    RESNET,
    TREE_METHODS,
    WHOLE,
    WITHOUT_GLOBAL,
    Say,
    by_day,
    federation,
    learns,
    server_states,
    small_experiment,
    with_method,
)
from fedsim import replay, testing
from fedsim.analysis.replay import ModelSnapshot, client_models
from fedsim.errors import BadInput
from fedsim.explain.explainers import explainers
from fedsim.explain.explainers.attributed import Attributed
from fedsim.explain.inputs import Inputs
from fedsim.methods import methods
from fedsim.objectives import Batch, evaluate, scores_of

WEIGHTS = 4 * PARAMETERS  # bytes of the small experiment's model
BODY = 4 * (64 * 32 + 32)
COUNTS = 4 * 10  # label counts
# Bytes that travel up and down in a round, for each client; and up and down once. Others: WEIGHTS.
A, B, HEAD = 4 * 64, 32 * 4, 32 * 10 + 10  # entries of adapters of rank 4, and of the head
ROUND = {
    "fedbabu": (BODY, BODY),
    "fedbn": (WEIGHTS, WEIGHTS),  # without its batch norm
    "fedftg": (WEIGHTS + COUNTS, WEIGHTS),
    "fedsa_lora": (4 * (A + HEAD), 4 * (A + HEAD)),
    "ffa_lora": (4 * (4 * B + HEAD), 4 * (4 * B + HEAD)),  # of rank 16
    "flora": (4 * (A + B + HEAD), 4 * (A + B + HEAD + 64 * 32)),
    "flora_na": (4 * (A + B + HEAD), 4 * (A + B + HEAD)),
    "fednova": (WEIGHTS + 4, WEIGHTS),  # with the number of steps
    "mime_lite": (2 * WEIGHTS, 2 * WEIGHTS),
    "fedex_lora": (4 * (A + B + HEAD), 4 * (A + B + HEAD + 64 * 32)),
    "fedper": (BODY, BODY),
    "fedrep": (BODY, BODY),
    "ifca": (WEIGHTS, 2 * WEIGHTS),
    "lg_fedavg": (WEIGHTS - BODY, WEIGHTS - BODY),
    "scaffold": (2 * WEIGHTS, 2 * WEIGHTS),
}
ONCE = {"fedaux": (4 * 69, WEIGHTS), "feddisco": (COUNTS, 0)}
# What is sent differs from round to round; their own tests count it.
VARYING = {"fedfed", "fedgen", "fedxds", "hetlora", "semifl", "xfedalign", *TREE_METHODS}

# Those that need more than ten rounds to learn the digits.
SLOW = {"fedadam", "fedbabu", "fedbuff", "fedgen", "fedyogi", "ffa_lora", "hetlora", "ifca"}
SLOW |= {"mime_lite"}

GRADIENT = explainers.parse({"name": "gradient"})
# Whose clients draw something for each batch, or have losses of their own.
ONE_BY_ONE = {"fedfed", "fedgen", "fedxds", "semifl"}
# Whose personal model begins where the one that it trains and sends ends, or is a part of it.
TRAINED_TOO = {"local"}
# What is replayed is the engine's; by day also of adapters that are added up, personal models that
# are trained, a part of the model or fine-tuned, the server's own training, and plain FedAvg.
REPLAYED = {
    *MECHANISMS,
    *("flora", "ditto", "local", "fedrep", "fedbabu tuned", "centralised", "fedavg"),
}


@pytest.fixture
def found(name: str) -> Trained:
    return trained(name)


@pytest.mark.parametrize("name", by_day(TRAINED))
def test_keeps_the_contract(found: Trained, name: str, tmp_path: Path) -> None:
    testing._check_run(found.run, tmp_path)


# By night those that send models as FedAvg does, too.
@pytest.mark.parametrize("name", by_day(TRAINED, {*REPLAYED, *ROUND, *ONCE}))
class TestTrained:
    def test_trains_clients_at_once(self, found: Trained, name: str) -> None:
        log = (found.run.path / "log.txt").read_text()
        assert ("clients are not stacked" in log) == (name in ONE_BY_ONE)

    def test_counts_its_bytes(self, found: Trained, name: str) -> None:
        if name in VARYING:
            pytest.skip(f"test_{name}.py counts what each round sends")
        done, method = found.run, name.partition(" ")[0]
        if name in ("centralised", "local"):
            assert done.rounds[["total_bytes_up", "total_bytes_down"]].iloc[-1].tolist() == [0, 0]
            return
        clients = done.clients.dropna(subset="loss")  # others may be evaluated
        assert len(clients) == ROUNDS * (5 if name == "fedbuff" else 3)
        unexplained = clients["round"].isin([1, 3])  # in which nobody shares explanations
        for way, direction in enumerate(("up", "down")):
            none = 0 * clients["round"]
            setup_traffic = clients.get(f"one_off_{direction}", none).fillna(0)
            assert (
                setup_traffic.sum() == clients["client"].nunique() * ONCE.get(method, (0, 0))[way]
            )
            sent = (clients[f"bytes_{direction}"] - setup_traffic)[unexplained]
            assert (sent == ROUND.get(method, (WEIGHTS, WEIGHTS))[way]).all()

    def test_says_what_it_asks_for(self, found: Trained, name: str) -> None:
        """Sections that hide clients from the server, and those about means, go by it."""
        said = methods.find(name.partition(" ")[0]).learns
        assert found.averages == said.averages
        if name not in ("feddyn", "xpfl"):  # for which it depends on their settings
            assert found.asked == set(said.asks) - {"weights"}  # which the server does not see

    def test_explains_the_models_that_there_are(self, found: Trained, name: str) -> None:
        done = found.run
        section = settings(name)["explain"]
        whose = set(section.get("of", ["global", "cohort", "shared"]))
        assert set(done.explanations["model"].dropna()) == whose
        assert len(done.explanations["round"].unique()) >= 3

    def test_needs_no_mechanism_beyond_those_of_the_nine(self, found: Trained, name: str) -> None:
        """Which are tried on Ray, where actors are killed (tests/test_same_bits.py)."""
        plain = {"Client.id", "Client.learner", "Client.round", "Federation.round"}  # facts
        covered = set[str]().union(*(trained(each).mechanisms for each in MECHANISMS))
        assert found.mechanisms - plain <= covered


@pytest.mark.parametrize("name", by_day(TRAINED, REPLAYED))
class TestReplayed:
    def test_server_and_clients_are_made_again(self, found: Trained, name: str) -> None:
        done = found.run
        begun: list[int] = []
        for t in (2, 4, ROUNDS):  # there are checkpoints of rounds 3 and 5
            again = replay(done, t, begun.append)
            assert (again.after, again.fed.round) == (t, t)
            assert_same_state(again.state, found.states[t])
        assert begun == [1, 2, 4]
        if name in UNTRAINED:
            with pytest.raises(BadInput, match=r"client 0 (was not trained|has no own model)"):
                client_models(done, [0], of="cohort")
            return
        rounds = sorted({t for _, t in found.seen})
        for t in (rounds[0], rounds[-1]):
            cohort = [k for k, r in found.seen if r == t]
            models, again = client_models(done, cohort, t, of="cohort")
            assert again.after == t
            for k in cohort:
                assert_same(models[k], found.seen[k, t])
        k = max(found.seen)[0]
        models, _ = client_models(done, [k], of="cohort")
        assert_same(models[k], found.seen[k, max(t for i, t in found.seen if i == k)])

    def test_scores_are_of_models_that_can_be_had(self, found: Trained, name: str) -> None:
        done = found.run
        method = done.experiment.method
        assert method.keeps_models == (name in PERSONAL)
        for t in (ROUNDS, ROUNDS - 1):
            row = done.rounds.set_index("round").loc[t]
            tested = done.clients.query("round == @t").set_index("client")
            again = replay(done, t)
            own = {}
            if method.has_global_model:
                common = ModelSnapshot.of(done, after=t, again=again)
                own = dict.fromkeys(range(6), common)
                for score, value in common.scores().items():
                    assert value == pytest.approx(row[score], rel=1e-6), score
            if method.keeps_models:
                snapshots = ModelSnapshot.of_clients(done, range(6), t, again=again)
                own = {model.client: model for model in snapshots}
                assert {model.kind for model in snapshots} == {"personal"}
                assert own[2].title == f"client 2's personal model after round {t}"
            for k, model in own.items():
                rows = again.splits.test[k]
                data = again.fed.server.prepare(again.dataset.x[rows], again.dataset.y[rows])
                for score, value in predicted(model, data.x, data.y).items():
                    expected = tested.loc[k, f"test_{score}"]
                    assert value == pytest.approx(expected, rel=1e-5), (k, score)
            if not method.has_global_model:
                test = again.fed.server.test_data
                kept = again.runner.states() or range(6)
                accuracies = [predicted(own[k], test.x, test.y)["accuracy"] for k in kept]
                assert row["accuracy"] == pytest.approx(np.mean(accuracies))


@pytest.mark.parametrize("name", by_day(PERSONAL, REPLAYED & {*PERSONAL}))
def test_what_a_client_sends_is_another_model(found: Trained, name: str) -> None:
    """`cohort` is what it trained, and averaged, and `personal` what it predicts with."""
    done, t, explained = found.run, ROUNDS, Counter[str]()
    rows = done.maps.query("round == @t")
    cohort = sorted(set(rows.query("model == 'cohort'")["client"]))
    trained_models = ModelSnapshot.of_clients(done, cohort, t, of="cohort")
    own_models = ModelSnapshot.of_clients(done, cohort, t)
    for k, sent, personal in zip(cohort, trained_models, own_models, strict=True):
        same = torch.equal(vector(sent.own), vector(personal.own))
        if name != "ifca":  # a cluster of one client has that client's model
            assert same == (name in TRAINED_TOO)
        assert sent.title == f"client {k}'s model after round {t}"
        assert personal.suffix == f"-client-{k}-round-{t}"
        assert sent.suffix == f"-client-{k}-cohort-round-{t}"
        for model in (sent, personal):
            own = rows.query("model == @model.kind and client == @k")
            if own.empty:
                continue
            inputs = Inputs.of_rows(model.dataset, own["input"].tolist())
            maps = model.explain(GRADIENT, inputs)
            assert isinstance(maps, Attributed)
            recorded = np.stack(own["relevance"].tolist()).reshape(maps.relevance.shape)
            np.testing.assert_allclose(maps.relevance, recorded, rtol=1e-3, atol=1e-5)
            explained[model.kind] += 1
    assert explained["cohort"]
    assert explained["personal"]


def predicted(model: ModelSnapshot, x: Tensor, y: Tensor) -> dict[str, float]:
    objective = model.again.spec.objective
    return scores_of(objective, evaluate(objective, model.explained().as_network(), Batch(x, y)))


# By day: plain, with states of clients, set up, in phases, without a global model.
@pytest.mark.parametrize(
    "name", by_day(NETWORK_METHODS, ("fedavg", "scaffold", "fedaux", "fedxds", "ifca"))
)
class TestEveryMethod:
    def test_learns(self, tmp_path: Path, name: str) -> None:
        train = {"rounds": 25 if name in SLOW else 11, "local_epochs": 2}
        # By itself, a client that holds few classes learns no others.
        least = 0.4 if name in WITHOUT_GLOBAL else 0.8
        experiment = small_experiment(**with_method(name, data=WHOLE, train=train))
        assert learns(experiment, tmp_path, "accuracy", least)

    def test_batch_norm_statistics_are_averaged(self, name: str) -> None:
        if name in ("local", "fedbn", "lg_fedavg"):
            pytest.skip("they are not averaged")
        if methods.find(name).adapts:
            pytest.skip("the model has no layer for adapters")
        train: dict[str, Any] = {"participation": 0.5, "batch_size": 64}
        train |= {"rounds": 4 if name in LATE else 2, "optimizer": {"lr": 0.01}}
        experiment = small_experiment(**with_method(name, model=RESNET, train=train))
        fed = federation(experiment)
        P = fed.server.model.num_parameters
        assert 0 < P < fed.server.model.size
        *_, first, second = server_states(experiment)
        assert np.isfinite(second.weights).all()
        variances = fed.server.model.named(torch.tensor(second.weights))["features.1.running_var"]
        assert (variances > 0).all()
        assert not np.array_equal(first.weights[P:], second.weights[P:])


@pytest.mark.parametrize(
    ("words", "whose", "picture"),
    [
        ((), "client 2's personal model", "client-2"),
        (("--of", "personal"), "client 2's personal model", "client-2"),
        (("--of", "cohort"), "client 2's model", "client-2-cohort"),
    ],
)
def test_which_model_of_a_client_is_explained(
    say: Say, words: tuple[str, ...], whose: str, picture: str
) -> None:
    path = trained("ditto").run.path
    given = ("--client", "2", "--explainer", "gradient", "--row", "0", *words)
    code, text, _ = say("explain", str(path), *given)
    assert code == 0
    assert text.startswith(f"{whose} after round {ROUNDS}")
    assert [*path.glob(f"explanations/gradient-{picture}-round-{ROUNDS}*.png")]
