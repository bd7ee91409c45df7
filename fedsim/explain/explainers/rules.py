"""Explanations of rule bases: rules in words, interpretability, and the rule of a prediction.

A global explanation is the whole rule base, by decreasing weight. A local one is the rule that
decided a prediction: its firing strength, how well each of its conditions holds, and what each
feature contributes to its output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from fedsim.data.encoding import UNSCALED, Scaling
from fedsim.errors import ExperimentError
from fedsim.explain import ExplainedData, ExplainedModel, Explanation
from fedsim.explain.explainer import FeatureExplainer, explainers
from fedsim.explain.groups import by_feature
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import picture, save
from fedsim.explain.pictures.rule_bases import draw_activations, draw_partitions, draw_rules
from fedsim.models.rules import Array, Prediction, Rule, RuleModel, Rules, count, quality
from fedsim.models.tsk import Tsk, write_published
from fedsim.support.words import short

NEGLIGIBLE = 1e-9  # relative to the greatest coefficient of a rule


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
        lines.append("  its conditions, of inputs in [0, 1], and how well they hold:")
        for condition, membership in zip(self.rule.conditions, self.memberships, strict=True):
            value = f"{names[condition.feature]} = {self.x[condition.feature]:.4g}"
            lines.append(f"    {condition.words:{width}}  {membership:5.3f}   {value}")
        lines.append(f"  its output, {self.output:.6g}, is the sum of:")
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
        return self.model.explain(self.rules, self.names)

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

    def save(self, folder: Path) -> list[Path]:
        names = ("partitions", "rules", "activations")
        paths = [picture(folder, f"{name}{self.about.suffix}") for name in names]
        title = self.about.title
        drawn = {
            "what its conditions mean": draw_partitions(self.readable, self.test_x, self.names),
            "its rules": draw_rules(self.readable, self.sources, self.names),
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
