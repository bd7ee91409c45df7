"""Each score in the tables is of a model that can be had, and explained, under one name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trained import trained, vector

from experiments import Say, small_experiment
from fedsim import Run, run
from fedsim.analysis.replay import ModelSnapshot, client_models
from fedsim.errors import BadInput
from fedsim.launch.prepare import prepare

Finish = Callable[..., Run]


def test_final_weights_have_the_last_score() -> None:
    for name in ("fedavg_ft", "ditto"):
        done = trained(name).run
        network = prepare(done.experiment)[2].build_model()
        network.load_state_dict(done.weights())
        dataset = ModelSnapshot.of(done).dataset
        found = network.eval()(torch.tensor(dataset.test_x)).argmax(dim=1).numpy()
        assert done.rounds["accuracy"].iloc[-1] == pytest.approx((found == dataset.test_y).mean())


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
