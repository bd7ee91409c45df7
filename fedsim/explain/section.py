"""The `explain` section: explanations and their scores as results of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BeforeValidator,
    Field,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fedsim.config.registry import OWN, Config, check_named, located, nearest
from fedsim.data import ClientSplits, Dataset
from fedsim.errors import ExperimentError
from fedsim.explain.baselines import Backgrounds, Compared
from fedsim.explain.explainer import (
    ExplainedData,
    ExplainedModel,
    Explainer,
    FeatureExplainer,
    refuse_unfit,
)
from fedsim.explain.explainers import explainers
from fedsim.explain.scores.randomisation import random_agreement
from fedsim.explain.scores.relevance import parts_compared
from fedsim.explain.share import QUALITY, Share
from fedsim.models import Model
from fedsim.objectives import Metric
from fedsim.support.rng import keyed_rng

Models = Literal["global", "cohort", "personal"]
Whose = Literal[Models, "shared"]
MODELS: Mapping[Whose, str] = {
    "global": "global model",
    "cohort": "models of clients",
    "personal": "personal models",
    "shared": "shared explanations",
}
OF_ALL: tuple[Whose, ...] = ("global", "shared")  # not of clients' models
# Scores of two relevance maps.
SIMILARITIES = {"rank": "rank correlation", "top_k": "top-k overlap", "cosine": "cosine"}
# Prefixes of scores in rounds.parquet.
PREFIXES: Mapping[Whose, str] = {
    "global": "",
    "cohort": "client_",
    "personal": "personal_",
    "shared": "shared_",
}


@dataclass(frozen=True)
class Score:
    """A score of explanations; its formula is in a module of `fedsim.explain.scores`.

    Args:
        label: its name as written within a sentence.
        best: whether `max` or `min` is better.
        about: `input`, a relevance map and the model; `truth`, a map and the parts of the input
            that are known to be of one kind; `clients`, maps of several clients; `global`, a
            client's map and that of the global model; `reference`, a map and that of the
            section's reference; `before`, the map of the same model and inputs the time before, if
            it was explained then.
        usual: computed unless `scores` says otherwise; the others take many more calls.
        numbers: only for inputs of floating point, not for documents.
        again: is of the explainer, which may explain the model again; there is none of an
            explanation that comes from elsewhere.
        images: only for images.
        weights: only for networks.
        of: which explainers have it, in words, if not all.
        fits: whether an explainer has it.
        chance: what a map scores that knows nothing, such as one with all parts alike: a number,
            or a formula of P, the parts of an input, of T, those in the truth, or of k; `random
            map` if it depends on the model, as the explainer `random` tells. Scores of two maps
            have that of each similarity.
    """

    label: str
    best: Literal["max", "min"]
    about: Literal["input", "truth", "clients", "global", "reference", "before"] = "input"
    usual: bool = True
    numbers: bool = False
    again: bool = False
    images: bool = False
    weights: bool = False
    of: str = ""
    fits: Callable[[FeatureExplainer], bool] = lambda explainer: True
    chance: float | Literal["random map", "P", "T/P", "similarity", "√(2/(π(P−1)))"] = "random map"


SCORES: Mapping[str, Score] = {
    "deletion": Score("area under the deletion curve", "min"),
    "insertion": Score("area under the insertion curve", "max"),
    "comprehensiveness": Score("comprehensiveness", "max"),
    "sufficiency": Score("sufficiency", "min"),
    "road": Score("value with imputed pixels (ROAD)", "min", usual=False, images=True),
    "selectivity": Score("area under the curve of regions", "min", usual=False),
    "monotonicity": Score("monotonicity", "max", usual=False, chance=0.0),
    "infidelity": Score("infidelity", "min", usual=False, numbers=True),
    "sensitivity": Score(
        "largest sensitivity", "min", usual=False, numbers=True, again=True, chance=math.sqrt(2)
    ),
    "repeatability": Score("agreement over seeds", "max", usual=False, again=True, chance=0.0),
    "randomisation": Score(
        *("agreement with random weights", "min"),
        usual=False,
        again=True,
        weights=True,
        chance="√(2/(π(P−1)))",
    ),
    "completeness_gap": Score(
        "completeness gap",
        "min",
        again=True,
        of="claims that relevances sum to a change of the output",
        fits=lambda explainer: explainer.complete,
    ),
    "background_gap": Score(
        "distance to the pooled background's",
        "min",
        again=True,
        of="has a baseline of centres that clients send",
        fits=lambda explainer: isinstance(explainer, Compared) and explainer.pooled() is not None,
    ),
    "sparseness": Score("sparseness (Gini)", "max", chance=0.0),
    "effective_parts": Score("effective number of parts", "min", chance="P"),
    "relevance_mass": Score("relevance mass", "max", "truth", chance="T/P"),
    "relevance_rank": Score("relevance rank accuracy", "max", "truth", chance="T/P"),
    "pointing_game": Score("pointing game", "max", "truth", chance="T/P"),
    "agreement": Score("agreement of clients", "max", "clients", chance="similarity"),
    "global_agreement": Score(
        "agreement with the global model", "max", "global", chance="similarity"
    ),
    "reference_agreement": Score(
        "agreement with the reference", "max", "reference", chance="similarity"
    ),
    "drift": Score("drift since the last time", "min", "before", chance="similarity"),
}


def _fitting() -> list[str]:
    return [name for name, each in explainers.items() if issubclass(each, FeatureExplainer)]


def _names_in_schema(node: dict[str, Any]) -> None:
    node["anyOf"] = [{"enum": _fitting()}, {"pattern": OWN}]


_Name = Annotated[str, Field(json_schema_extra=_names_in_schema)]


def _by_name(value: Any) -> Any:
    """Explainers as listed in a file: names or sections."""
    if not isinstance(value, list | tuple):
        return value
    found = [explainers.parse({"name": one} if isinstance(one, str) else one) for one in value]
    for one in found:
        if isinstance(one, Explainer) and not isinstance(one, FeatureExplainer):
            raise PydanticCustomError(
                "no_relevances",
                "explainer '{name}' does not assign a number to each part of an input; those "
                "that do: {fitting}",
                {"name": one.name, "fitting": ", ".join(_fitting())},
            )
    return tuple(found)


class Explain(Config):
    """Explanations during a run: of which models, by which explainers, with which scores.

    Each model and explainer is a row of explanations.parquet, with the scores averaged over the
    inputs. Their averages over models are columns of rounds.parquet: `<explainer>/<score>` for the
    global model, `<explainer>/client_<score>` for clients' models, `<explainer>/personal_<score>`
    for personal models, `<explainer>/shared_<score>` for the server's aggregate of the
    explanations that clients send. Searches and grids can use them as objectives. All of this is
    part of the result hash. The time it took is `explain_seconds`.

    Args:
        explainers: explainers that assign a number to each part of an input: names, or sections
            with settings. By default the model's usual one, and `random` as a control.
        every: number of rounds between explanations; the last round is always explained.
        of: the `global` model after the round, the models that clients of the `cohort` have
            trained in it and sent, and the `personal` models that clients predict with after it.
            By default `global`, if the method has a global model, and `cohort`.
        clients: number of clients explained, of the cohort and of those with a personal model; the
            same clients each time as far as the cohort allows.
        inputs_from: the central `test` set, with the same inputs for all, or the client's `own`:
            its test examples if it has any, else its training examples.
        inputs: number of inputs; drawn once per run.
        target: what is explained: each model's own `decision`, or the class of the input's `label`
            whatever the model decides, which makes models with different decisions comparable. For
            a regression, the predicted number.
        slice: name of the slice of the test set to draw the inputs from, if the data set has
            slices.
        scores: see `fedsim.explain.section.SCORES`; by default all that apply to the data, except
            the costly ones (road, selectivity, monotonicity, infidelity, sensitivity,
            repeatability, randomisation).
        top_k: k of the `top_k` overlap, in parts; by default a tenth of the parts. Of a regression
            the parts of largest |relevance|.
        maps: store the relevances themselves in maps.parquet.
        share: have clients send their explanations, see `fedsim.explain.share.Share`; by default
            they keep them.
        reference: a model whose explanations of the same inputs all others are compared with, in
            each round (`reference_agreement`); by default none. `centralised` trains it before the
            first round, on the union of the clients' data: the same seed, initial weights, model,
            adapters, objective, validation set and `train` section, without anything that belongs
            to a federation (privacy, adversaries, devices, compression, the cohort). Or the folder
            of a finished run of the same data and model: its final global model. The reference's
            maps are kept in the run's folder; the centralised weights, in `.references` beside it,
            are shared by the runs of a grid or a search.

    Example:
        >>> Explain(explainers=["integrated_gradients", {"name": "occlusion", "size": 2}]).every
        5
    """

    explainers: Annotated[
        tuple[SerializeAsAny[FeatureExplainer], ...],
        BeforeValidator(_by_name, json_schema_input_type=tuple[_Name | FeatureExplainer, ...]),
    ] = Field((), validate_default=False)
    every: int = Field(5, ge=1)
    of: tuple[Models, ...] | None = None
    clients: int = Field(5, ge=1)
    inputs_from: Literal["test", "own"] = "test"
    inputs: int = Field(16, ge=1)
    target: Literal["decision", "label"] = "decision"
    slice: str | None = None
    scores: tuple[Annotated[str, Field(json_schema_extra={"enum": [*SCORES]})], ...] | None = None
    top_k: int | None = Field(None, ge=1)
    maps: bool = False
    share: Share | None = None
    reference: Literal["centralised"] | Path | None = None

    @field_validator("scores")
    @classmethod
    def _known(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for name in names or ():
            if name not in SCORES:
                about = {"name": name, "hint": nearest(name, SCORES)}
                raise PydanticCustomError("unknown_name", "unknown score '{name}'{hint}", about)
        return names

    @field_validator("explainers", "of", "scores")
    @classmethod
    def _each_once(cls, found: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        if found is not None:
            names = [one.label if isinstance(one, Explainer) else one for one in found]
            check_named(names, "is an empty list; name at least one")
        return found

    @model_validator(mode="after")
    def _fits_together(self) -> Explain:
        if self.inputs_from == "own":
            if "global" in (self.of or ()):
                raise _unfit("of", "the global model has no own inputs; set inputs_from: test")
            if self.slice is not None:
                raise _unfit("slice", "slices are of the central test set; set inputs_from: test")
            for name in self.scores or ():
                if SCORES[name].about in ("truth", "clients", "global", "reference"):
                    problem = f"{name} needs inputs of the central test set; set inputs_from: test"
                    raise _unfit("scores", problem)
            if self.reference is not None:
                raise _unfit("reference", "is explained on common inputs; set inputs_from: test")
        compared = self.scores is None or "reference_agreement" in self.scores
        if self.reference is not None and not compared:
            raise _unfit("reference", "has no effect without reference_agreement among `scores`")
        if self.reference is None and self.scores is not None and compared:
            raise _unfit("scores", "reference_agreement needs `reference`: centralised, or a run")
        without_global = self.of is not None and "global" not in self.of
        if without_global and "global_agreement" in (self.scores or ()):
            raise _unfit("scores", "global_agreement needs the global model among `of`")
        if self.of == ("global",) and (lacking := _of_clients(self.scores or ())):
            problem = f"{lacking} needs models of clients among `of`: cohort or personal"
            raise _unfit("scores", problem)
        if self.clients == 1 and "agreement" in (self.scores or ()):
            raise _unfit("scores", "agreement is between clients; set clients to 2 or more")
        if self.share is not None and (unshared := self._share_problem(self.share)):
            raise _unfit("share", unshared)
        return self

    def _share_problem(self, share: Share) -> str | None:
        if self.inputs_from == "own":
            return "clients share explanations of common inputs; set inputs_from: test"
        if self.of is not None and not {"global", "cohort"} <= set(self.of):
            return "is of the global model by clients'; set of: [global, cohort]"
        if self.scores is not None and share.aggregation == "quality":
            for name in QUALITY:
                if name not in self.scores:
                    return f"aggregation=quality needs {name} among `scores`"
        return None

    def with_explainers(self, usual: str) -> Explain:
        """The section, by default with a model's usual explainer and `random`.

        Integrated gradients where the usual one has no relevances of an input's parts.
        """
        if self.explainers:
            return self
        usual = usual if usual in _fitting() else Model.explainer
        return self.model_copy(update={"explainers": _by_name([usual, "random"])})

    @property
    def whose(self) -> tuple[Whose, ...]:
        """The kinds of models whose explanations are recorded, for a resolved section."""
        return (*(self.of or ()), *(("shared",) if self.share else ()))

    def due(self, t: int, last: int) -> bool:
        return t % self.every == 0 or t == last

    def resolved(
        self,
        dataset: Dataset,
        rounds: int,
        *,
        has_global: bool,
        trains_clients: bool,
        keeps_models: bool,
    ) -> Explain:
        """The section with defaults that depend on the method and the data.

        If clients do not train models, without `cohort` and scores that compare clients.

        Args:
            rounds: rounds of the run.
            has_global: whether the method has a global model.
            trains_clients: whether its clients train models.
            keeps_models: whether its clients keep their own models.

        Raises:
            ExperimentError: the method has no such models, or a score is impossible for the data.
        """
        usual: tuple[Models, ...] = ("cohort",)
        if has_global and self.inputs_from == "test":
            usual = ("global", "cohort")
        of, wanted = self.of or usual, self.scores
        if not trains_clients:
            of = tuple(whose for whose in of if whose != "cohort")
            if of == ("global",) and wanted is not None:
                wanted = tuple(name for name in wanted if not _of_clients([name]))
            if not of or wanted == () or self.share is not None:
                raise ExperimentError(
                    "explain.of: clients of this method do not train models; set of: [global], "
                    "use scores of that model only, and no `share`"
                )
        if "global" in of and not has_global:
            raise ExperimentError("explain.of: the method has no global model; set of: [cohort]")
        if "personal" in of and not keeps_models:
            raise ExperimentError(
                "explain.of: clients of this method keep no personal models; set of: [cohort]"
            )
        if self.share is not None:
            if not has_global:
                raise ExperimentError("explain.share: the method has no global model to explain")
            if dataset.classes and self.target == "decision":
                raise ExperimentError(
                    "explain.share: models with different decisions are not comparable; set "
                    "explain.target: label"
                )
        once = rounds <= self.every
        able = {
            name
            for name, score in SCORES.items()
            if self._admits(score, of, dataset) and not (once and score.about == "before")
        }
        for name in wanted or ():
            if name not in able:
                raise ExperimentError(f"explain.scores: {name}: {_why_impossible(name, dataset)}")
        names = wanted or tuple(n for n, s in SCORES.items() if n in able and s.usual)
        return self.model_copy(update={"of": of, "scores": names})

    def _admits(self, score: Score, of: Sequence[Whose], dataset: Dataset) -> bool:
        if not any(score.fits(explainer) for explainer in self.explainers):
            return False
        if score.about == "truth":
            return bool(dataset.truth) and self.inputs_from == "test"
        if score.about == "clients":
            return of != ("global",) and self.clients > 1 and self.inputs_from == "test"
        if score.about == "global":
            return "global" in of and len(of) > 1 and self.inputs_from == "test"
        if score.about == "reference":
            return self.reference is not None
        if score.images and len(dataset.shape) != 3:
            return False
        return not (score.numbers and dataset.words)

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        """Reject models and inputs that cannot be explained, before anything starts.

        Raises:
            BadInput: an explainer does not support the model, or there are too few inputs.
        """
        if self.inputs_from == "test":
            self.rows(data.dataset, model.seed)
        parts = math.prod(map_shape(data.dataset))
        if self.top_k is not None and self.top_k > parts:
            raise ExperimentError(f"explain.top_k={self.top_k}: inputs have {parts} parts")
        for name in self.scores or ():
            if SCORES[name].weights and model.network is None:
                raise ExperimentError(
                    f"explain.scores: {name}: needs a network, whose weights can be random; "
                    f"model.name={model.section.name} is a {model.section.kind}"
                )
        for explainer in self.explainers:
            refuse_unfit(explainer, model, data, "explain.explainers: ")

    def backgrounds(self, model: ExplainedModel, data: ExplainedData) -> Backgrounds:
        """The baselines that all models have in common, made once; after `check`."""
        found, pooled = Backgrounds(), "background_gap" in (self.scores or ())
        for explainer in self.explainers:
            if isinstance(explainer, Compared):
                found = found.joined(explainer, model, data, pooled)
        return found

    def rows(self, dataset: Dataset, seed: int) -> NDArray[np.int64]:
        """The explained rows of the central test set, in ascending order.

        Raises:
            ExperimentError: there are too few, or there is no such slice.
        """
        rows, where = np.arange(len(dataset.test_y)), "the test set"
        if self.slice is not None:
            names = dataset.test_columns.get(dataset.sliced_by, np.zeros(0, str)).astype(str)
            if self.slice not in names:
                known = f"; known: {', '.join(sorted(set(names)))}" if len(names) else ""
                raise ExperimentError(
                    f"explain.slice={self.slice}: the test set has no such slice{known}"
                )
            rows, where = np.flatnonzero(names == self.slice), f"slice {self.slice}"
        if self.inputs > len(rows):
            raise ExperimentError(f"explain.inputs={self.inputs}: {where} has {len(rows)}")
        rng = keyed_rng(seed, "explain/inputs")
        return np.sort(rng.choice(rows, self.inputs, replace=False))

    def own_rows(self, splits: ClientSplits, client: int, seed: int) -> NDArray[np.int64]:
        """The explained examples of a client: of its test data, or else its training data."""
        held = splits.test[client] if len(splits.test[client]) else splits.train[client]
        rng = keyed_rng(seed, "explain/inputs", client=client)
        return rng.permutation(held)[: self.inputs]

    def choose(self, clients: Iterable[int], count: int, seed: int) -> list[int]:
        """The explained clients among some of `count`, the same ones as often as possible."""
        place = np.argsort(keyed_rng(seed, "explain/clients").permutation(count))
        return sorted(sorted(clients, key=lambda k: place[k])[: self.clients])

    def metrics(self, dataset: Dataset) -> list[Metric]:
        """The columns of rounds.parquet that a resolved section adds."""
        found = []
        for explainer in self.explainers:
            squares = explainer.squares(dataset.shape)
            for whose in self.whose:
                for name in filter(partial(_applies, whose), self.scores or ()):
                    if not SCORES[name].fits(explainer):
                        continue
                    for column, label, best in _columns_of(name, dataset):
                        path = f"{explainer.label}/{PREFIXES[whose]}{column}"
                        chance = self.chance(column, dataset, squares)
                        words = f"{label}, {MODELS[whose]}"
                        found.append(Metric(path, words, best, chance=chance))
        return found

    def chance(self, column: str, dataset: Dataset, squares: int | None = None) -> float | None:
        """What a map that knows nothing scores on average, over the test set; see `Score`.

        Args:
            column: the score, with its kind of parts or its similarity, if any.
            squares: how many squares of pixels have a relevance of their own.

        Returns:
            None if a random map tells.
        """
        name = next(n for n in SCORES if column == n or column.startswith(f"{n}_"))
        line, about = SCORES[name].chance, column[len(name) + 1 :]
        if line == "random map":
            return None
        parts = np.full(len(dataset.test_x), math.prod(map_shape(dataset)))
        if dataset.words:
            parts = np.count_nonzero(dataset.test_x, axis=1)
        if line == "T/P":
            inside = np.sum(dataset.truth[about].reshape(len(parts), -1), axis=1)
            known = inside > 0
            return float((inside[known] / parts[known]).mean()) if known.any() else None
        parts = parts[parts > 1]
        if not parts.size:
            return None
        if line == "P":
            return float(parts.mean())
        if line == "√(2/(π(P−1)))":
            by_chance = random_agreement(parts if squares is None else np.array([squares]))
            known = by_chance[~np.isnan(by_chance)]
            return float(known.mean()) if known.size else None
        if line == "similarity":
            k = [parts_compared(P, self.top_k) for P in parts.tolist()]
            alike = float((k / parts).mean()) if about == "top_k" else 0.0
            return 1 - alike if name == "drift" else alike
        return line


def _columns_of(score: str, dataset: Dataset) -> list[tuple[str, str, Literal["max", "min"]]]:
    """The columns of a score, with their names in words and whether more or less is better."""
    label, about, best = SCORES[score].label, SCORES[score].about, SCORES[score].best
    if about == "input":
        return [(score, label, best)]
    if about == "truth":  # relevance on anything but signal is bad
        return [
            (f"{score}_{kind}", f"{label}, {kind}", best if kind == "signal" else "min")
            for kind in dataset.truth
        ]
    return [(f"{score}_{how}", f"{label} ({words})", best) for how, words in SIMILARITIES.items()]


def map_shape(dataset: Dataset) -> list[int]:
    """The shape of an input's relevances: (H, W) for images, summed over channels; features."""
    shape = dataset.shape
    if dataset.parts is not None:
        return [len(dataset.features)]
    return list(shape[1:] if len(shape) == 3 else shape)


def _unfit(key: str, problem: str) -> ValidationError:
    return located("Explain", key, PydanticCustomError("unfit", problem), None)


def _of_clients(names: Iterable[str]) -> str | None:
    """The first of some scores that needs clients' models."""
    return next((n for n in names if SCORES[n].about in ("clients", "global")), None)


def _applies(whose: Whose, name: str) -> bool:
    score = SCORES[name]
    if whose == "global":
        return score.about not in ("clients", "global")
    return whose != "shared" or not (score.about == "clients" or score.again)


def _why_impossible(name: str, dataset: Dataset) -> str:
    about = SCORES[name].about
    if SCORES[name].of and about == "input":
        return f"no explainer of this section {SCORES[name].of}"
    if about == "truth":
        return (
            "the data set does not mark the signal in inputs; data.name=shortcut and "
            "planted_reviews do"
        )
    if about in ("clients", "global"):
        return "there is no global model, or no client's model, to compare"
    if SCORES[name].images:
        return "fills pixels from those beside them, and the data are no images"
    if about == "before":
        return "models are explained only once, after the last round; lower explain.every"
    return "needs floating-point inputs, and the data are documents"
