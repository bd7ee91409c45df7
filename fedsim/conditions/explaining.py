"""Explanations of a round's models, and of what clients share of theirs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.conditions.gaussian import analytic_epsilon
from fedsim.data import Dataset
from fedsim.errors import in_own_code
from fedsim.explain import ExplainedData, ExplainedModel
from fedsim.explain.compare import Key, Row, recorded
from fedsim.explain.scores.measure import Explained, ExplainedInputs, measure
from fedsim.explain.scores.randomisation import ALIKE
from fedsim.explain.section import PREFIXES, Explain, map_shape
from fedsim.explain.share import Share
from fedsim.federation.client import Client
from fedsim.federation.condition import Condition, ConditionFailed, Exchange, Round
from fedsim.federation.context import WorkerContext
from fedsim.federation.wire import to_arrays
from fedsim.support.rng import keyed_rng, keyed_torch_rng

EPSILON = "explain_epsilon"
SENSITIVITY = 2.0  # the largest distance of two maps of unit length
Found = dict[Key, dict[str, Explained]]  # by explainer


class Explanations(Condition):
    """Models are explained in due rounds, and clients may send their explanations.

    Args:
        section: the experiment's `explain` section, resolved.
        scored: the columns of rounds.parquet that it adds.
        backgrounds: raw inputs (m, ...) and weights (m,) of baselines that all models have in
            common, by label.
        reference: (m, P) maps of the section's reference, by explainer; on the server alone.
    """

    name: str = "explain"
    order: ClassVar[int] = 80
    client_columns: ClassVar[tuple[str, ...]] = (EPSILON,)
    section: Explain
    scored: tuple[str, ...]
    backgrounds: dict[str, Any] = Field(default_factory=dict, repr=False)
    reference: dict[str, Any] = Field(default_factory=dict, repr=False)

    @property
    def columns(self) -> tuple[str, ...]:
        share = self.section.share
        stated = (EPSILON,) if share is not None and share.states_epsilon else ()
        return (*self.scored, "explain_seconds", *stated)

    # -- on the server -------------------------------------------------------------------------

    def due(self, round: Round) -> tuple[str, ...]:
        """The kinds of models that are explained in this round."""
        last = round.runner.settings.rounds
        return self.section.of or () if self.section.due(round.t, last) else ()

    def chosen(self, round: Round, among: Sequence[int]) -> dict[int, bool]:
        """Clients whose models are explained."""
        K, seed = round.runner.num_clients, round.runner.seed
        return dict.fromkeys(self.section.choose(among, K, seed), True)

    def outgoing(self, round: Round, exchange: Exchange) -> Exchange:
        if not (round.running and "cohort" in self.due(round)):
            return exchange
        return exchange.tell(self.name, self.chosen(round, exchange.cohort.tolist()))

    def evaluated(
        self, round: Round, model: Any, own_models: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Explain the global model and clients' personal models, if due."""
        if not (due := self.due(round)):
            return
        found: Found = round.kept.setdefault(self.name, {})
        # A client's latest model of the round counts.
        for k, own in round.notes.get(self.name, ()):
            found["cohort", k] = own
        if "global" in due:
            numbers = range(len(self.section.explainers))
            found["global", None] = self._of_server(round, numbers, model=model)
        if "personal" in due:
            # Of those that keep a state: without, a model has not been trained yet. If nobody
            # does, models are made anew.
            among = list(round.runner.states()) or np.flatnonzero(round.runner.present).tolist()
            chosen = self.chosen(round, among)
            told = {self.name: chosen}
            notes = round.runner.run_unrecorded("_keep", list(chosen), own_models(), told)
            found |= {("personal", k): of[self.name] for k, of in notes.items() if self.name in of}
        share = self.section.share
        if share is not None and (sent := self._sent(round, share, found)):
            found["shared", None] = self._of_server(round, list(sent), model=model, given=sent)

    def _of_server(
        self, round: Round, numbers: Sequence[int], **arguments: Any
    ) -> dict[str, Explained]:
        """Explanations of a model by explainers (by their numbers), by name."""
        found = round.runner.pieces(self.name, numbers, arguments)
        return {self.section.explainers[number].label: one for number, one in found.items()}

    def _sent(self, round: Round, share: Share, found: Found) -> dict[int, NDArray[np.float64]]:
        """The server's aggregates of clients' explanations, (m, P) by the explainer's number."""
        runner = round.runner
        poisoners = share.poisoners(runner.num_clients, runner.seed)
        aggregates = {}
        for number, explainer in enumerate(self.section.explainers):
            purpose = f"explain/share/{explainer.label}"
            sent, quality = {}, {}
            for (whose, k), own in sorted(found.items(), key=lambda item: in_order(item[0])):
                # What is sent with a lost upload is lost.
                if whose != "cohort" or k is None or "lost" in runner.rows.get(k, {}):
                    continue
                one = own[explainer.label]
                rng = keyed_rng(runner.seed, purpose, round.t, k)
                maps = share.sent(one.relevance, one.present, k in poisoners, rng)
                if np.isfinite(maps).all():  # otherwise its model cannot predict the class
                    sent[k], quality[k] = maps, share.quality(one.scores, k in poisoners)
            together = share.aggregate(sent, quality)
            if together is not None:
                aggregates[number] = together
        return aggregates

    def close(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        """Records the explanations; returns the means of their scores, and the ε spent."""
        spent = self._spent(round, ledger)
        explained: Found = round.kept.get(self.name, {})
        if not explained:
            return spent
        keys = sorted(explained, key=in_order)
        found = {
            name: {k: explained[k][name] for k in keys if name in explained[k]}
            for name in (explainer.label for explainer in self.section.explainers)
        }
        added = recorded(self.section, found, ledger.get("maps", {}), self.reference)
        round.runner.record("explanations", added.rows)
        round.runner.record("maps", added.maps)
        for name in sorted(
            {str(row["explainer"]) for row in added.rows if "uninformative" in row}
        ):
            round.runner.notice(
                f"warning: explainer {name} says nothing about some inputs, which score what "
                "chance does: all their parts are equally relevant; or not finite, and have no "
                "scores; see `uninformative` in explanations.parquet"
            )
        for name in sorted({str(row["explainer"]) for row in added.rows if unmoved(row)}):
            round.runner.notice(
                f"warning: explainer {name} does not depend on the network's weights: its maps "
                f"agree with those of random weights (randomisation above {ALIKE:g})"
            )
        ledger["maps"] = added.last
        of_all = [one.seconds for own in explained.values() for one in own.values()]
        return {**added.columns, **spent, "explain_seconds": math.fsum(of_all)}

    def _spent(self, round: Round, ledger: dict[str, Any]) -> dict[str, float]:
        """Adds ε of each client's noisy maps to its row; that of the most so far."""
        share = self.section.share
        if share is None or not share.states_epsilon:
            return {}
        parts: dict[str, int] = ledger.setdefault("shared_parts", {})
        sent = Counter[int]()  # also what is lost on its way
        for k, own in round.notes.get(self.name, ()):
            sent[k] += sum(int(one.present.sum()) for one in own.values())
        for k, count in sorted(sent.items()):
            parts[str(k)] = parts.get(str(k), 0) + count
            round.runner.rows.setdefault(k, {})[EPSILON] = epsilon(share, parts[str(k)])
        return {EPSILON: epsilon(share, max(parts.values(), default=0))}

    def manifest(self, dataset: Dataset) -> dict[str, Any]:
        scores = [asdict(metric) for metric in self.section.metrics(dataset)]
        about = {"map_shape": map_shape(dataset), "ranked_by_size": not dataset.classes}
        return {"explained": scores, **about}

    # -- at the client, and in the worker ------------------------------------------------------

    def answered(self, client: Client, size: int) -> int:
        """Explains the model that the client has trained; with `share`, it sends the maps."""
        share = self.section.share
        if self.name not in client.told or client.trained is None:
            return size
        if client.rehearses and share is None:
            return size
        if found := self.of_client(client):
            client.notes[self.name] = found
        return size + sum(share.size(one.present) for one in found.values()) if share else size

    def of_client(self, client: Client) -> dict[str, Explained]:
        """Explanations of the model that a client function has left as `trained`, by explainer.

        Empty if the client has no inputs.
        """
        context, section = client.context, self.section
        about = _model(context, client.trained, client.round, client.id)
        if section.inputs_from == "test":
            inputs = self.inputs(context)
        else:
            rows = section.own_rows(client.splits, client.id, context.spec.seed)
            if not len(rows):
                return {}
            central = client.splits.test_is_central and len(client.splits.test[client.id]) > 0
            examples = context.test_examples(rows) if central else context.examples(rows)
            inputs = ExplainedInputs(rows, examples.x, examples.y)
        held = [client.splits.train[client.id], client.splits.unlabelled[client.id]]
        raw = context.dataset.x[np.concatenate(held)]
        return {
            explainer.label: self._explained(context, about, number, inputs, raw)
            for number, explainer in enumerate(section.explainers)
        }

    def piece(
        self, context: WorkerContext, number: int, round: int, arguments: Mapping[str, Any]
    ) -> Explained:
        """One explainer's explanation of the global model.

        Args:
            number: the explainer's index in the section.
            arguments: `model`, weights (size,) or arrays by name; `given`, (m, P) aggregates
                of clients' explanations, to be scored instead, by number.
        """
        context.model.restrict_classes(None)
        about = _model(context, arguments["model"], round, None)
        given = arguments.get("given", {}).get(number)
        relevance = None if given is None else given.cpu().numpy()
        return self._explained(context, about, number, self.inputs(context), None, relevance)

    def of_reference(self, context: WorkerContext, model: Any) -> dict[str, Explained]:
        """Each explainer's maps of another model of the same kind, without scores.

        They are of round 0: what explainers draw is independent of what they draw in the rounds.

        Args:
            model: a network, or arrays by name.
        """
        unscored = self.section.model_copy(update={"scores": ()})
        alone = self.model_copy(update={"section": unscored})
        return {
            explainer.label: alone.piece(context, number, 0, {"model": model})
            for number, explainer in enumerate(self.section.explainers)
        }

    def inputs(self, context: WorkerContext) -> ExplainedInputs:
        """The inputs of the central test set whose predictions are explained."""

        def make() -> ExplainedInputs:
            data = context.dataset
            rows = self.section.rows(data, context.spec.seed)
            truth = {kind: where[rows] for kind, where in data.truth.items()}
            examples = context.test_examples(rows)
            return ExplainedInputs(rows, examples.x, examples.y, truth)

        return context.once(self.name, make)

    def _explained(
        self,
        context: WorkerContext,
        model: ExplainedModel,
        number: int,
        inputs: ExplainedInputs,
        own: NDArray[Any] | None,
        given: NDArray[Any] | None = None,
    ) -> Explained:
        explainer, seed = self.section.explainers[number], context.spec.seed
        client = -1 if model.client is None else model.client
        data = ExplainedData(
            context.dataset,
            context.inputs,
            own,
            splits=context.splits,
            backgrounds=self.backgrounds,
        )
        try:
            # For networks that draw in evaluation as well.
            with keyed_torch_rng(seed, "explain/torch", model.round, client, context.device):
                return measure(self.section, explainer, model, data, inputs, given)
        except Exception as error:  # a user's explainer or network may raise anything
            whose = (
                "the global model" if model.client is None else f"client {model.client}'s model"
            )
            raise ConditionFailed(
                f"round {model.round}: explainer {explainer.label}, {whose}: {in_own_code(error)}"
            ) from error


def epsilon(share: Share, parts: int) -> float:
    """ε of a client's noisy maps, which have so many parts in all.

    A map of n parts is released with σ = noise/√n and moves by 2 at most. Such mechanisms together
    are one of μ² = Σ (2/σ)² = 4 · parts / noise².

    Source:
        Dong, Roth and Su, Gaussian Differential Privacy (JRSS B 2022), Corollary 3.3.
    """
    if not parts:
        return 0.0
    if not share.noise:
        return math.inf
    return analytic_epsilon(share.noise, share.delta, SENSITIVITY * math.sqrt(parts))


def unmoved(row: Row) -> bool:
    """Whether an explainer's maps of a model do not depend on its weights."""
    agreement = row.get("randomisation")
    return agreement is not None and float(agreement) > ALIKE


def in_order(key: Key) -> tuple[int, int]:
    """The global model first, then clients of the cohort, then those with personal models."""
    whose, client = key
    return list(PREFIXES).index(whose), -1 if client is None else client


def _model(context: WorkerContext, own: Any, round: int, client: int | None) -> ExplainedModel:
    of_arrays, spec = isinstance(own, Mapping), context.spec
    return ExplainedModel(
        section=spec.model,
        title="",
        round=round,
        seed=spec.seed,
        client=client,
        network=None if of_arrays else context.as_network(own).eval(),
        arrays=to_arrays(dict(own)) if of_arrays else None,
    )
