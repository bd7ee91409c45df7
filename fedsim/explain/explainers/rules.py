"""Explanations of rule bases: rules in words, interpretability, and the rule of a prediction.

A global explanation is the whole rule base, by decreasing weight. A local one is the rule that
decided a prediction: its firing strength, how well each of its conditions holds, and what each
feature contributes to its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedsim.data import Dataset
from fedsim.data.dataset import feature_names
from fedsim.data.encoding import OTHER, UNSCALED, Scaling, feature_of
from fedsim.errors import ExperimentError
from fedsim.explain import ExplainedData, ExplainedModel, Explanation
from fedsim.explain.explainer import FeatureExplainer, explainers
from fedsim.explain.groups import by_feature
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import picture, save
from fedsim.explain.pictures.rule_bases import draw_activations, draw_partitions, draw_rules
from fedsim.explain.tree import Conditions
from fedsim.models.rules import (
    Array,
    Condition,
    Prediction,
    Rule,
    RuleModel,
    Rules,
    count,
    quality,
)
from fedsim.models.tsk import Tsk, write_published
from fedsim.support.words import MOST_NAMED, short

NEGLIGIBLE = 1e-9  # relative to the greatest coefficient of a rule


def readable(model: RuleModel, rules: Rules, dataset: Dataset) -> list[Rule]:
    """The rules in readable form, with the thresholds of intervals in the units of the table."""
    found = model.explain(rules, dataset.entry_names)
    if not dataset.encoding:
        return found
    told = Conditions(dataset)

    def in_units(one: Condition) -> Condition:
        if one.bounds is None or one.category is not None:
            return one
        words = told.words(one.feature, *one.bounds)
        return replace(one, words=words, term=words)

    return [replace(rule, conditions=tuple(map(in_units, rule.conditions))) for rule in found]


def in_words(rule: Rule, names: Sequence[str], target: str = "y") -> str:
    """Such as "IF x1 is LOW AND x2 is HIGH THEN y = 0.2 + 1.5·x1 - 0.3·x2".

    If a feature must be of a category, it is not said that it must not be of others.
    """
    settled = {one.category[0] for one in rule.conditions if one.category and one.category[1]}
    conditions = " AND ".join(
        one.words
        for one in rule.conditions
        if one.category is None or one.category[1] or one.category[0] not in settled
    )
    terms = [f"{rule.consequent[0]:.4g}"]
    for name, coefficient in zip(names, _rounded(rule)[1:], strict=True):
        if coefficient:
            terms.append(f"{'-' if coefficient < 0 else '+'} {abs(coefficient):.4g}·{name}")
    return f"{f'IF {conditions} THEN ' if conditions else ''}{target} = {' '.join(terms)}"


def _rounded(rule: Rule) -> Array:
    """The consequent without coefficients that are negligible for inputs in [0, 1]."""
    size = np.abs(rule.consequent)
    return np.where(size > NEGLIGIBLE * size.max(), rule.consequent, 0)


def global_explanation(
    rules: Sequence[Rule],
    found: Prediction,
    y: Array,
    sources: NDArray[np.int64],
    names: Sequence[str],
    target: str = "y",
) -> list[dict[str, Any]]:
    """The whole rule base by decreasing weight, one row per rule.

    Args:
        rules: R of them.
        found: their predictions for n examples.
        y: (n,) the targets.
        sources: (R,) from how many clients each rule comes.

    Returns:
        By column: `rule` (counted from 1 in the order of the rule base), `text`, `conditions`
        (how many), `weight`, `support` and `confidence` on the examples (see
        `fedsim.models.rules.quality`), `fires` (share of the examples), `decides` (share),
        `sources`.
    """
    support, confidence = quality(found.firing, found.outputs, y)
    fires = (found.firing > 0).mean(axis=0)
    decides = np.bincount(found.deciding, minlength=len(rules)) / len(y)
    order = sorted(range(len(rules)), key=lambda j: -rules[j].weight)
    return [
        {
            "rule": j + 1,
            "text": in_words(rules[j], names, target),
            "conditions": len(rules[j].conditions),
            "weight": rules[j].weight,
            "support": float(support[j]),
            "confidence": float(confidence[j]),
            "fires": float(fires[j]),
            "decides": float(decides[j]),
            "sources": int(sources[j]),
        }
        for j in order
    ]


def measures(
    rules: Sequence[Rule], found: Prediction, sources: NDArray[np.int64]
) -> dict[str, float]:
    """Measures of a rule base's interpretability.

    Returns:
        `rules`, their number; `rule_length`, mean number of conditions per rule; `coverage`, the
        share of examples for which a rule fires; `active_rules`, mean number of rules that fire
        for an example; `shared_rules`, number of rules from two or more clients; `sources`, mean
        number of clients per rule.
    """
    active = (found.firing > 0).sum(axis=1)
    return {
        "rules": len(rules),
        "rule_length": float(np.mean([len(rule.conditions) for rule in rules])),
        "coverage": float((active > 0).mean()),
        "active_rules": float(active.mean()),
        "shared_rules": int((sources > 1).sum()),
        "sources": float(sources.mean()),
    }


def scale_in_words(target: str, scaling: Scaling) -> str:
    """How the target of rules is scaled, as a sentence; empty if it is not."""
    low, high = scaling.undo(np.array([0.0, 1.0]))
    if (low, high) == (0, 1):
        return ""
    return f"in the rules {target} is scaled, 0 for {low:.6g} and 1 for {high:.6g}"


def ranges_in_words(rules: Sequence[Rule], dataset: Dataset) -> str:
    """Where the lowest and the highest fuzzy set of each number lie in the units of the table."""
    if not dataset.encoding:
        return ""
    own = {feature.name for feature in dataset.encoding}
    names, told = dataset.entry_names, Conditions(dataset)
    fuzzy = [c for rule in rules for c in rule.conditions if c.bounds is None]
    ends = np.array([0.0, 1.0])
    terms = {c.term: c.membership(ends) for c in fuzzy if c.term != c.words}
    low, high = (next((f"{t} " for t, at in terms.items() if at[k] == 1), "") for k in (0, 1))
    ranges = [
        f"{names[f]} {told.shown(f, 0)} and {told.shown(f, 1)}"
        for f in sorted({c.feature for c in fuzzy})
        if names[f] in own
    ]
    more = f"; and {len(ranges) - MOST_NAMED} more" if len(ranges) > MOST_NAMED else ""
    where = f"{low}(0) and {high}(1) lie at: " if ranges else ""
    return where + "; ".join(ranges[:MOST_NAMED]) + more


@dataclass(frozen=True)
class LocalExplanation:
    """Why the rules predict what they predict for one input.

    What is predicted is in the target's own units, inputs lie in [0, 1] as the rules have them.

    Args:
        number: number of the deciding rule, counted from 1 in the order of the rule base.
        firing: its firing strength; 0 if no rule fires and it decides by its weight.
        active: number of rules that fire.
        output: its output, which is the prediction unless outputs are averaged.
        memberships: how well each condition of the rule holds.
        contributions: (F + 1,) what the constant and each feature add to the rule's output.
        shown: (F,) the input in the units of the table; empty if it has no others.
    """

    prediction: float
    number: int
    rule: Rule
    firing: float
    active: int
    output: float
    x: Array
    memberships: Array
    contributions: Array
    shown: Sequence[str] = ()

    def in_words(self, names: Sequence[str], target: str = "y") -> str:
        lines = [f"{target} = {self.prediction:.6g}, by rule {self.number}: "]
        if self.firing:
            others = f", {self.active - 1} other(s) also fire" if self.active > 1 else ""
            lines[0] += f"it fires with strength {self.firing:.4g}{others}"
        else:
            lines[0] += "no rule fires, so the rule with the greatest weight decides"
        if not np.isclose(self.output, self.prediction):
            lines.append(f"  (the mean of all rules that fire; alone it says {self.output:.6g})")
        width = max((len(condition.words) for condition in self.rule.conditions), default=0)
        scaled = "of inputs in [0, 1], "
        lines.append(f"  its conditions, {'' if self.shown else scaled}and how well they hold:")
        for condition, membership in zip(self.rule.conditions, self.memberships, strict=True):
            f = condition.feature
            value = self.shown[f] if self.shown else f"{names[f]} = {self.x[f]:.4g}"
            lines.append(f"    {condition.words:{width}}  {membership:5.3f}   {value}")
        scaled = scaled if self.shown and _rounded(self.rule)[1:].any() else ""
        lines.append(f"  its output, {self.output:.6g}, {scaled}is the sum of:")
        lines.append(f"    {self.contributions[0]:+10.4g}   constant")
        parts, coefficients = self.contributions[1:], _rounded(self.rule)[1:]
        for f in np.argsort(-np.abs(parts), kind="stable"):
            if coefficients[f]:
                product = f"{coefficients[f]:.4g} × {names[f]} ({self.x[f]:.4g})"
                lines.append(f"    {parts[f]:+10.4g}   {product}")
        return "\n".join(lines)


def local_explanation(
    model: RuleModel, rules: Rules, x: Array, names: Sequence[str], scaling: Scaling = UNSCALED
) -> LocalExplanation:
    """The explanation of the rules' prediction for one (F,) input.

    Args:
        x: the input, in the units of the data set.
    """
    found = model.predict(rules, x[None])
    j = int(found.deciding[0])
    rule = model.explain(rules, names)[j]
    consequent = rule.consequent * scaling.span
    consequent[0] += scaling.low
    rule = replace(rule, consequent=consequent)
    return LocalExplanation(
        prediction=float(scaling.undo(found.values[0])),
        number=j + 1,
        rule=rule,
        firing=float(found.firing[0, j]),
        active=int((found.firing[0] > 0).sum()),
        output=float(scaling.undo(found.outputs[0, j])),
        x=x,
        memberships=np.array([float(c.membership(x[c.feature])) for c in rule.conditions]),
        contributions=rule.consequent * np.concatenate([[1.0], x]),
    )


def by_column(
    rules: Sequence[Rule], x: Array, dataset: Dataset
) -> tuple[Sequence[Rule], Array, Sequence[str], list[Sequence[str]]]:
    """Rules and inputs (n, F) in which each feature of categories takes one entry, for pictures.

    The entry is evenly spaced over [0, 1], from the first category to the last.

    Returns:
        The rules, the inputs, names, and for each entry the words or numbers that stand evenly
        along [0, 1]; none for data in [0, 1] without units.
    """
    if not dataset.encoding:
        return rules, x, dataset.entry_names, []
    told, names, ticks = Conditions(dataset), list[str](), list[Sequence[str]]()
    columns, places, start = list[Array](), list[tuple[int, int]](), 0
    for feature in dataset.encoding:
        categories = (*feature.words, OTHER) if feature.kind == "one_hot" else ()
        if categories:
            places += [(len(names), k) for k in range(len(categories))]
            names.append(feature.name)
            ticks.append(categories)
            chosen = x[:, start : start + len(categories)].argmax(axis=1)
            columns.append(chosen / (len(categories) - 1))
        for f, name in enumerate(feature.entries[len(categories) :], start + len(categories)):
            places.append((len(names), -1))
            names.append(name)
            ticks.append(
                ("0", "1") if name != feature.name else (told.shown(f, 0), told.shown(f, 1))
            )
            columns.append(x[:, f])
        start += len(feature.entries)

    def together(rule: Rule) -> Rule:
        found, of_categories = list[Condition](), dict[int, list[tuple[int, Condition]]]()
        for condition in rule.conditions:
            column, k = places[condition.feature]
            if k < 0:
                found.append(replace(condition, feature=column))
            else:
                of_categories.setdefault(column, []).append((k, condition))
        for column, own in of_categories.items():
            is_so = np.eye(len(ticks[column]))
            holds = np.min([one.membership(is_so[:, k]) for k, one in own], axis=0)
            some = [word for word, so in zip(ticks[column], holds, strict=True) if so]
            words = f"{names[column]} is {' or '.join(some)}"
            found.append(Condition(column, words, words, partial(_of_nearest, holds)))
        return replace(rule, conditions=tuple(found))

    return [together(rule) for rule in rules], np.column_stack(columns), names, ticks


def _of_nearest(holds: Array, values: Array) -> Array:
    """How well a condition holds for categories that are evenly spaced over [0, 1]."""
    last = len(holds) - 1
    found: Array = holds[np.clip(np.rint(values * last), 0, last).astype(np.int64)]
    return found


@explainers.register
class RulesExplainer(FeatureExplainer):
    """All rules in words, their readability, and the rule behind a prediction.

    The relevance of a feature is its term in the outputs of the rules, Σ_r s_r·γ_rf·x_f, where s_r
    is the weight of rule r in the prediction; the difference of a rule's constant γ_r0 from the
    mean constant b, weighted by the rules' weights, is distributed evenly among the features of
    its conditions. The relevances of an input sum to the prediction minus b (if all rules have
    conditions).

    Args:
        most: number of rules in the text, by decreasing weight.
    """

    name: str = "rules"
    usual_inputs: ClassVar[int] = 0
    most: int = Field(10, ge=1)

    def check(self, model: ExplainedModel, data: ExplainedData) -> None:
        if not isinstance(model.section, RuleModel):
            raise ExperimentError(
                f"model.name={model.section.name} is a {model.section.kind}, and has no rules"
            )

    def explain(
        self, model: ExplainedModel, data: ExplainedData, inputs: Inputs, rng: Generator
    ) -> Explanation:
        assert isinstance(model.section, RuleModel)
        assert model.arrays is not None
        own = np.ones(count(model.arrays), np.int64)
        sources = own if model.sources is None else model.sources
        about = model, data.dataset, inputs, self.most
        return RuleBase(model.section, model.arrays, sources, *about)

    def relevances(
        self, model: ExplainedModel, data: ExplainedData, x: Tensor, y: Tensor, rng: Generator
    ) -> NDArray[np.float32]:
        assert isinstance(model.section, RuleModel)
        assert model.arrays is not None
        inputs = x.cpu().double().numpy()
        predicted = model.section.predict(model.arrays, inputs)
        rules = model.section.explain(model.arrays, feature_names(inputs.shape[1]))
        shares = predicted.shares
        if shares is None:
            shares = np.eye(len(rules))[predicted.deciding]
        gamma = np.stack([rule.consequent for rule in rules])
        weights = np.array([rule.weight for rule in rules])
        base = np.average(gamma[:, 0], weights=weights if weights.sum() > 0 else None)
        asked = np.zeros((len(rules), inputs.shape[1]))
        for own, rule in zip(asked, rules, strict=True):
            own[[condition.feature for condition in rule.conditions]] = 1
        constants = (gamma[:, :1] - base) * asked / np.maximum(asked.sum(axis=1, keepdims=True), 1)
        relevance: Array = inputs * (shares @ gamma[:, 1:]) + shares @ constants
        found = torch.from_numpy(relevance.astype(np.float32))
        return by_feature(found, data.dataset.parts).numpy()


@runtime_checkable
class Sourced(Protocol):
    """A server's state with (R,) the number of clients' rule bases that contain each rule."""

    sources: NDArray[np.int64]


@dataclass(frozen=True)
class RuleBase(Explanation):
    """A rule base of R rules, global or a client's.

    Args:
        sources: (R,) how many clients' bases each comes from.
        inputs: inputs whose predictions are explained.
        most: rules in the text.
    """

    model: RuleModel
    rules: Rules
    sources: NDArray[np.int64]
    about: ExplainedModel
    dataset: Dataset
    inputs: Inputs
    most: int

    @property
    def names(self) -> tuple[str, ...]:
        return self.dataset.entry_names

    @property
    def target(self) -> str:
        return self.dataset.target or "y"

    @property
    def test_x(self) -> Array:
        return np.asarray(self.dataset.test_x, np.float64)

    @cached_property
    def prediction(self) -> Prediction:
        return self.model.predict(self.rules, self.test_x)

    @cached_property
    def readable(self) -> list[Rule]:
        """The rules in readable form, in their order."""
        return readable(self.model, self.rules, self.dataset)

    def text(self) -> str:
        found = measures(self.readable, self.prediction, self.sources)
        shared = ""
        if found["sources"]:
            shared = f"{found['shared_rules']:.0f} of them from two clients or more; "
        lines = [
            f"{self.about.title}:\n{found['rules']:.0f} rules of {found['rule_length']:.3g} "
            f"conditions on average; {shared}for {found['coverage']:.1%} of the test set a rule "
            f"fires, {found['active_rules']:.3g} on average"
        ]
        if scale := scale_in_words(self.target, self.dataset.target_scaling):
            lines.append(scale)
        if ranges := ranges_in_words(self.readable, self.dataset):
            lines.append(ranges)
        rules: list[dict[str, Any]] = self.rows()
        for row in rules[: self.most]:
            figures = ", ".join(f"{n} {row[n]:.4g}" for n in ("weight", "support", "confidence"))
            from_clients = f", from {row['sources']} client(s)" if row["sources"] else ""
            lines.append(
                f"\nrule {row['rule']}: {figures}, fires for {row['fires']:.1%}, decides "
                f"{row['decides']:.1%}{from_clients}\n  {row['text']}"
            )
        if len(rules) > self.most:
            record = self.about.record
            where = "--most shows more" if record is None else f"in {short(record)}"
            lines.append(f"\n… and {len(rules) - self.most} more, {where}")
        for name, label, x in zip(
            self.inputs.names, self.inputs.labels, self.inputs.x.astype(np.float64), strict=True
        ):
            truth = "" if label is None else f", where {self.target} is {label}"
            about = self.names, self.dataset.target_scaling
            why = local_explanation(self.model, self.rules, x, *about)
            lines.append(f"\n{name}{truth}:\n{why.in_words(self.names, self.target)}")
        return "\n".join(lines)

    def rows(self) -> list[dict[str, float | int | str | None]]:
        return global_explanation(
            *(self.readable, self.prediction, self.dataset.test_y),
            *(self.sources, self.names, self.target),
        )

    def why(self) -> list[LocalExplanation]:
        """Explanations of the predictions for the inputs."""
        rows = self.inputs.x.astype(np.float64)
        about = self.names, self.dataset.target_scaling
        found = [local_explanation(self.model, self.rules, row, *about) for row in rows]
        if not self.dataset.encoding:
            return found
        owners = feature_of(self.dataset.encoding)
        return [
            replace(
                one,
                rule=replace(one.rule, conditions=self.readable[one.number - 1].conditions),
                shown=[self.inputs.shown(self.dataset, k)[f] for f in owners],
            )
            for k, one in enumerate(found)
        ]

    def save(self, folder: Path) -> list[Path]:
        names = ("partitions", "rules", "activations")
        paths = [picture(folder, f"{name}{self.about.suffix}") for name in names]
        title = self.about.title
        rules, x, columns, ticks = by_column(self.readable, self.test_x, self.dataset)
        drawn = {
            "what its conditions mean": draw_partitions(rules, x, columns, ticks),
            "its rules": draw_rules(rules, self.sources, columns),
            "rules that fire on the test set": draw_activations(self.prediction),
        }
        for path, (what, figure) in zip(paths, drawn.items(), strict=True):
            save(figure, path, f"{title}: {what}")
        return paths

    def export(self, folder: Path) -> None:
        """Write the rules as OpenFL-XAI's three .npy files.

        Raises:
            ExperimentError: OpenFL-XAI does not support these rules.
        """
        if not (isinstance(self.model, Tsk) and self.model.terms == 3):
            raise ExperimentError(
                "--npy: OpenFL-XAI supports only rules of model.name=tsk with model.terms=3"
            )
        write_published(folder, self.rules)
