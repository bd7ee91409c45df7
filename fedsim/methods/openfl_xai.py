"""OpenFL-XAI: every client learns rules, and the server merges them in one round.

Daole et al., OpenFL-XAI: Federated learning of explainable artificial intelligence models in
Python, SoftwareX 23 (2023). The model decides how rules are learnt, merged and applied:
`model.name=tsk` is the paper's, and any `RuleModel` works.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import nn

from fedsim.data import ClientSplits, Dataset
from fedsim.data.dataset import feature_names
from fedsim.errors import DataError, ExperimentError, RunError
from fedsim.explain.explainers.rules import global_explanation, measures, readable
from fedsim.federation import Client, Examples, Federation, NotCounted, Server, client_function
from fedsim.federation.wire import to_arrays
from fedsim.methods.learns import Learns
from fedsim.methods.method import Method, State, log_means, methods
from fedsim.models.rules import RuleModel, Rules, check_table, count
from fedsim.objectives import HeldOut, Regression, of_validation
from fedsim.training import Train


@dataclass(frozen=True)
class RuleState(State):
    """The global rules, none before the first round, and how many clients have each, (R,)."""

    rules: Rules
    sources: NDArray[np.int64]


class RuleMethod(Method[RuleState]):
    """Base class of methods that learn rule models."""

    learns: ClassVar[Learns] = Learns(
        models="rule model", objectives=(Regression,), asks=("messages", "data"), averages=False
    )
    exchanges_models: ClassVar[bool] = False

    def init(self, fed: Federation) -> RuleState:
        return RuleState(fed.initial_weights(), {}, np.empty(0, dtype=np.int64))

    def check(self, train: Train) -> None:
        if train.rounds != 1:
            raise ExperimentError(
                f"method.name={self.name} learns rules once: train.rounds must be 1, not "
                f"{train.rounds}"
            )

    def check_data(self, dataset: Dataset, splits: ClientSplits, network: nn.Module) -> None:
        names, x, n = dataset.entry_names, np.asarray(dataset.x), dataset.num_loaded
        learnt = [splits.train.values, splits.unlabelled.values, splits.server]
        rows = np.sort(np.concatenate(learnt))
        check_table(x[rows], dataset.y[rows], names)
        drifted = x[n:]
        outside = np.flatnonzero(((drifted < 0) | (drifted > 1)).any(axis=0))
        if len(outside):
            raise DataError(
                f"input '{names[outside[0]]}' of drifting clients leaves [0, 1], and rules need "
                "inputs in [0, 1]; data.kind=shuffle stays within"
            )

    def evaluate(self, fed: Federation, state: RuleState) -> None:
        """Record scores on the central test set, measures of interpretability, and all rules."""
        (x, y), names = fed.server.test_data.table, fed.server.data.entry_names
        model = rule_model(fed.server)
        found = model.predict(state.rules, x)
        rules = readable(model, state.rules, fed.server.data)
        held_out = predicted(fed.server, state.rules, fed.server.validation_data)
        fed.log(**scores_of(fed.server, found.values, y, held_out))
        fed.log(**measures(rules, found, state.sources))
        target = fed.server.data.target or "y"
        rows = global_explanation(rules, found, y, state.sources, names, target)
        fed.explain("rules", rows)

    def evaluate_clients(self, fed: Federation, state: RuleState) -> None:
        fed.each(self.local_rule_test, range(fed.num_clients), rules=NotCounted(state.rules))

    @client_function("local_rule_test")
    def local_rule_test(self, client: Client, rules: dict[str, Any]) -> None:
        """(client) The global rules on the client's own test examples."""
        report_test(client, to_arrays(rules))

    def global_model(self, fed: Federation, state: RuleState) -> Rules:
        return state.rules


@methods.register
class OpenFLXAI(RuleMethod):
    """Rules learnt by each client, then collected and merged in one round (Daole et al. 2023).

    Antecedents, consequents and weights are sent as float32. The participating clients get the
    global rule base back (the released program leaves it on the server).
    """

    name: str = "openfl_xai"

    def round(self, fed: Federation, state: RuleState, t: int) -> RuleState:
        cohort = fed.sample(t)
        bases = fed.gather(self.local_rules, cohort)
        if not bases:
            raise RunError(f"round {t}: every client of the cohort was skipped")
        rules, sources = rule_model(fed.server).merge(list(bases.values()))
        fed.each(self.receive, list(bases), rules=rules)
        return replace(state, rules=rules, sources=sources)

    @client_function("local_rules")
    def local_rules(self, client: Client) -> Rules:
        """(client) The client's own rules, as they are sent."""
        rules = learn(client)
        return {name: array.astype(np.float32) for name, array in rules.items()}

    @client_function("receive")
    def receive(self, client: Client, rules: dict[str, Any]) -> None:
        """(client) The global rules; reports for how many of its examples a rule fires."""
        found = rule_model(client).predict(to_arrays(rules), client.data.table[0])
        client.report(own_coverage=float((found.firing > 0).any(axis=1).mean()))


@methods.register
class CentralisedRules(RuleMethod):
    """Centralised rule learning on all clients' examples; no real federation could do this."""

    name: str = "centralised_rules"
    trains_clients: ClassVar[bool] = False

    def round(self, fed: Federation, state: RuleState, t: int) -> RuleState:
        rules = rule_model(fed.server).train(*fed.server.labelled_data.table, fed.rng("rules"))
        return replace(state, rules=rules, sources=np.zeros(count(rules), dtype=np.int64))


@methods.register
class LocalRules(RuleMethod):
    """Each client learns its own rules, which are never merged or sent.

    Scores and measures on the central test set are means over the clients' rule bases.
    """

    name: str = "local_rules"
    has_global_model: ClassVar[bool] = False

    def round(self, fed: Federation, state: RuleState, t: int) -> RuleState:
        fed.each(self.local_learning, fed.sample(t))
        return state

    @client_function("local_learning")
    def local_learning(self, client: Client) -> None:
        """(client) The client's own rules, kept."""
        client.state["rules"] = learn(client)

    def for_own_models(self, fed: Federation, state: RuleState) -> dict[str, Any]:
        return {}

    def own_model(self, client: Client) -> Rules | None:
        rules: Rules | None = client.state.get("rules")
        return rules and to_arrays(rules)

    def evaluate(self, fed: Federation, state: RuleState) -> None:
        log_means(fed, fed.gather(self.local_scores, fed.sample(fed.round)).values())

    @client_function("local_scores")
    def local_scores(self, client: Client) -> dict[str, float]:
        """(client) The scores of the client's rules, if any, on the central test set."""
        if "rules" not in client.state:
            return {}
        rules, (x, y) = to_arrays(client.state["rules"]), client.central_test.table
        model = rule_model(client)
        found = model.predict(rules, x)
        names = feature_names(x.shape[1])
        nobody = np.zeros(count(rules), dtype=np.int64)
        held_out = predicted(client, rules, client.central_validation)
        scores = scores_of(client, found.values, y, held_out)
        client.report(r2=scores["r2"])
        return scores | measures(model.explain(rules, names), found, nobody)

    def evaluate_clients(self, fed: Federation, state: RuleState) -> None:
        fed.each(self.own_test, fed.sample(fed.round))

    @client_function("own_test")
    def own_test(self, client: Client) -> None:
        """(client) The client's own rules on its own test examples."""
        if "rules" in client.state:
            report_test(client, to_arrays(client.state["rules"]))


def rule_model(of: Server | Client) -> RuleModel:
    """The experiment's rule model (checked before the run)."""
    assert isinstance(of.learner, RuleModel)
    return of.learner


def regression(of: Server | Client) -> Regression:
    """The run's regression objective (checked before the run)."""
    assert isinstance(of.objective, Regression)
    return of.objective


def predicted(of: Server | Client, rules: Rules, examples: Examples) -> HeldOut | None:
    """The predictions of rules for the validation set, and its targets; None without examples."""
    if not len(examples):
        return None
    x, y = examples.table
    return rule_model(of).predict(rules, x).values, y


def scores_of(
    of: Server | Client,
    values: NDArray[np.float64],
    y: NDArray[np.float64],
    held_out: HeldOut | None,
) -> dict[str, float]:
    """The scores of predictions for test examples, and for the validation set if there is one."""
    found = regression(of).scores_of(values, y, held_out)
    return found | (of_validation(regression(of).scores_of(*held_out)) if held_out else {})


def learn(client: Client) -> Rules:
    """(client) Its own rules, learnt from its labelled examples; reports their number."""
    rules = rule_model(client).train(*client.data.table, client.rng("rules"))
    client.report(rules=count(rules))
    client.trained = rules
    return rules


def report_test(client: Client, rules: Rules) -> None:
    """(client) Report the scores of rules on the client's own test examples."""
    if len(client.test):
        x, y = client.test.table
        found = rule_model(client).predict(rules, x)
        held_out = None
        if regression(client).calibrates:
            held_out = predicted(client, rules, client.central_validation)
        client.report_test(regression(client).scores_of(found.values, y, held_out))
