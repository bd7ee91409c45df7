"""Takagi-Sugeno-Kang rule bases, learnt as in OpenFL-XAI.

    IF x1 is LOW AND … AND xF is HIGH THEN y = γ0 + γ1·x1 + … + γF·xF

Daole et al., OpenFL-XAI: Federated learning of explainable artificial intelligence models in
Python, SoftwareX 23 (2023); learning a client's rules follows Corcuera Bárcena et al., An approach
to federated learning of explainable fuzzy regression models, FUZZ-IEEE 2022. Where the papers
leave a choice open, this follows the published program, and obtains the same global model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedsim.data.dataset import feature_names
from fedsim.data.encoding import OfCategory
from fedsim.errors import DataError
from fedsim.models.model import models
from fedsim.models.rules import (
    Array,
    Condition,
    Prediction,
    Rule,
    RuleModel,
    Rules,
    check_table,
    of_category,
    quality,
)
from fedsim.support import atomic

EPS = np.finfo(np.float64).eps
CONVERGED = 0.005  # clustering ends at this Frobenius norm of the change of memberships
MOST_ITERATIONS = 1000

_TERMS = {
    2: ("LOW", "HIGH"),
    3: ("LOW", "MEDIUM", "HIGH"),
    4: ("VERY LOW", "LOW", "HIGH", "VERY HIGH"),
    5: ("VERY LOW", "LOW", "MEDIUM", "HIGH", "VERY HIGH"),
}
# OpenFL-XAI's file names of a rule base, by array.
FILES = {
    "antecedents": "TSK_global_model_rules_antec.npy",
    "consequents": "TSK_global_model_rules_conseq.npy",
    "weights": "TSK_global_model_weights.npy",
}


@models.register
class Tsk(RuleModel):
    """Fuzzy rules with linear outputs (Takagi-Sugeno-Kang), as in OpenFL-XAI.

    A rule base is `antecedents` (R, F), the index of each feature's fuzzy set; `consequents`
    (R, F + 1), γ0 first, or (R, 1) of order 0; and `weights` (R,).

    Each feature's range [0, 1] has a strong uniform partition: triangles whose peaks are evenly
    spaced, each 0 where its neighbours peak. Outside [0, 1] the outer triangles fall off in the
    same way. Rules:

    1. Fuzzy C-means with `rules` clusters on [x | y] gives centres.
    2. A centre's antecedent is, for each feature, the set it belongs to most (ties: the lower).
       Equal antecedents become one rule.
    3. Firing strength w_ij: the product of the memberships of example i in the sets of rule j.
    4. Consequents: for each rule the γ of least norm that minimises Σ_i w_ij·(y_i - γ0 - γᵀx_i)²,
       by singular values; a rule that never fires gets zeros.
    5. Weight: the harmonic mean 2SC/(S + C) of the rule's support and confidence, see
       `fedsim.models.rules.quality`; 0 for a rule that never fires.

    Fewer examples than clusters, a single example, and constant columns are allowed: clusters
    share examples, and the least norm decides between equal fits.

    If examples are spread evenly over many dimensions, clusters with a fuzziness of 2 all end up
    in the middle, and only a single rule is left: a linear regression. A fuzziness closer to 1
    keeps them apart.

    Args:
        terms: number of fuzzy sets of each feature.
        rules: number of clusters, which is the largest number of rules of a client.
        order: 1 for linear outputs; 0 for constants, the mean of y weighted by w.
        inference: `winner`: the rule with the largest firing strength decides (ties: the greater
            weight, then the first); `average`: the mean of all outputs weighted by w. If no rule
            fires, the rule with the greatest weight decides.
        fuzziness: m of fuzzy C-means.
        seed: seed of the initial memberships, the same for every client, as published; null draws
            them from each client's own random stream.
    """

    name: str = "tsk"
    terms: int = Field(3, ge=2)
    rules: int = Field(30, ge=1)
    order: Literal[0, 1] = 1
    inference: Literal["winner", "average"] = "winner"
    fuzziness: float = Field(2.0, gt=1, le=100)
    seed: int | None = Field(0, ge=0, lt=2**32)

    def train(self, x: Array, y: Array, rng: np.random.Generator) -> Rules:
        check_table(x, y, feature_names(x.shape[-1]))
        if self.seed is None:
            U = rng.random((len(x), self.rules))
        else:
            U = np.random.RandomState(self.seed).rand(len(x), self.rules)
        centres = fuzzy_c_means(np.column_stack([x, y]), U, self.fuzziness)
        nearest_sets = self.memberships(centres[:, :-1]).argmax(axis=2)
        antecedents = np.unique(nearest_sets, axis=0)
        w = self.firing(antecedents, x)
        consequents = self._fit(w, x, y)
        S, C = quality(w, _outputs(consequents, x), y)
        weights = np.divide(2 * S * C, S + C, out=np.zeros_like(S), where=S + C > 0)
        return {"antecedents": antecedents, "consequents": consequents, "weights": weights}

    def _fit(self, w: Array, x: Array, y: Array) -> Array:
        """(R, F + 1) or (R, 1) consequents, from (n, R) firing strengths."""
        if self.order == 0:
            total = w.sum(axis=0)
            means: Array = np.divide(w.T @ y, total, out=np.zeros_like(total), where=total > 0)
            return means[:, None]
        design = np.column_stack([np.ones(len(x)), x])
        roots = np.sqrt(w)
        # By singular values, because the problems are rank-deficient: most examples fire few
        # rules.
        fits = [np.linalg.lstsq(design * r[:, None], y * r, rcond=None)[0] for r in roots.T]
        return np.array(fits)

    def memberships(self, x: Array) -> Array:
        """(..., terms) the memberships of values in each fuzzy set."""
        peaks = np.linspace(0, 1, self.terms)
        return np.maximum(1 - np.abs(x[..., None] - peaks) * (self.terms - 1), 0)

    def firing(self, antecedents: NDArray[np.integer[Any]], x: Array) -> Array:
        """(n, R) firing strengths: products of F memberships."""
        w = np.ones((len(x), len(antecedents)))
        for f in range(x.shape[1]):
            w *= self.memberships(x[:, f]).take(antecedents[:, f], axis=1)
        return w

    def merge(self, bases: Sequence[Rules]) -> tuple[Rules, NDArray[np.int64]]:
        """All clients' rules, those with equal antecedents as one.

        Its consequent is their mean weighted by their weights (the plain mean if all are 0), its
        weight the plain mean of theirs. Rules are in lexicographic order of their antecedents.
        Sums have the precision of the bases, float32 when sent, and their order: another order may
        change the last bit.

        Raises:
            DataError: the bases have different features or orders.
        """
        shapes = {(b["antecedents"].shape[1], b["consequents"].shape[1]) for b in bases}
        if len(shapes) > 1:
            listed = ", ".join(f"{F} and {c}" for F, c in sorted(shapes))
            raise DataError(f"rule bases with different features or consequents: {listed}")
        antecedents, consequents, weights = (
            np.concatenate([base[name] for base in bases]) for name in FILES
        )
        unique, rule = np.unique(antecedents, axis=0, return_inverse=True)
        count = np.bincount(rule, minlength=len(unique))
        total, weighted, plain = (
            np.zeros((len(unique), *rest), weights.dtype)
            for rest in ((), consequents.shape[1:], consequents.shape[1:])
        )
        np.add.at(total, rule, weights)
        np.add.at(weighted, rule, weights[:, None] * consequents)
        np.add.at(plain, rule, consequents)
        n = count.astype(weights.dtype)
        merged = plain / n[:, None]
        heavy = total > 0
        merged[heavy] = weighted[heavy] / total[heavy, None]
        alone = count[rule] == 1  # avoids rounding by its weight
        merged[rule[alone]] = consequents[alone]
        return {"antecedents": unique, "consequents": merged, "weights": total / n}, count

    def predict(self, rules: Rules, x: Array) -> Prediction:
        antecedents = rules["antecedents"].astype(np.int64)
        w, outputs = self.firing(antecedents, x), _outputs(rules["consequents"], x)
        # The first maximum wins, also if no rule fires and all are 0.
        by_weight = np.argsort(-rules["weights"], kind="stable")
        winner = by_weight[w[:, by_weight].argmax(axis=1)]
        rows = np.arange(len(x))
        values, shares = outputs[rows, winner], None
        if self.inference == "average":
            total = w.sum(axis=1)
            values = np.divide((w * outputs).sum(axis=1), total, out=values, where=total > 0)
            shares = np.zeros_like(w)
            shares[rows, winner] = 1
            np.divide(w, total[:, None], out=shares, where=total[:, None] > 0)
        return Prediction(values, winner, w, outputs, shares)

    def explain(self, rules: Rules, names: Sequence[str]) -> list[Rule]:
        terms = _TERMS.get(self.terms) or [f"SET {s + 1}" for s in range(self.terms)]

        def condition(f: int, s: int) -> Condition:
            name, words, category = names[f], f"{names[f]} is {terms[s]}", None
            if isinstance(name, OfCategory) and s in (0, len(terms) - 1):
                words, category = of_category(name, s > 0)
            return Condition(
                f, words, terms[s], lambda values: self.memberships(values)[..., s], category
            )

        F = len(names)
        consequents = np.zeros((len(rules["weights"]), F + 1))
        consequents[:, : rules["consequents"].shape[1]] = rules["consequents"]
        return [
            Rule(
                tuple(condition(f, int(s)) for f, s in enumerate(antecedent)),
                consequent,
                float(weight),
            )
            for antecedent, consequent, weight in zip(
                rules["antecedents"], consequents, rules["weights"], strict=True
            )
        ]


def _outputs(consequents: NDArray[np.floating[Any]], x: Array) -> Array:
    """(n, R) γ0 + γᵀx of each rule."""
    gamma = consequents.astype(np.float64)
    if gamma.shape[1] == 1:
        return np.repeat(gamma.T, len(x), axis=0)
    return gamma[:, 0] + x @ gamma[:, 1:].T


def fuzzy_c_means(z: Array, U: Array, m: float) -> Array:
    """(c, D) centres of fuzzy clusters of points (n, D) (Bezdek 1981).

    Initial memberships (n, c) need not sum to 1; m is the fuzziness, above 1.
    """
    from scipy.spatial.distance import cdist  # slow to import

    U = np.maximum(U, EPS)
    for _ in range(MOST_ITERATIONS):
        U = np.maximum(U / U.sum(axis=1, keepdims=True), EPS)
        powers = U**m
        centres: Array = (powers.T @ z) / powers.sum(axis=0)[:, None]
        distances = np.maximum(cdist(z, centres), EPS)
        # Relative to the nearest centre, to avoid overflow of the power.
        ratios = distances / distances.min(axis=1, keepdims=True)
        closeness = ratios ** (-2 / (m - 1))
        new = closeness / closeness.sum(axis=1, keepdims=True)
        moved = np.linalg.norm(new - U)
        U = new
        if moved < CONVERGED:
            break
    return centres


def write_published(folder: Path, rules: Rules) -> None:
    """Write a rule base in OpenFL-XAI's format: three .npy files of float32."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, file in FILES.items():
        with atomic.named(folder / file) as aside, aside.open("wb") as stream:
            np.save(stream, rules[name].astype(np.float32))


def read_published(folder: Path) -> Rules:
    """Read a rule base of OpenFL-XAI from its three .npy files."""
    rules = {}
    for name, file in FILES.items():
        try:
            rules[name] = np.load(folder / file, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{folder / file}: cannot be read: {error}") from error
        if rules[name].dtype.kind not in "iuf":
            raise DataError(f"{folder / file}: contains {rules[name].dtype}, not numbers")
    A, consequents, weights = rules.values()
    R, F = A.shape if A.ndim == 2 else (-1, -1)
    if consequents.shape not in ((R, F + 1), (R, 1)) or weights.shape != (R,) or R < 1:
        raise DataError(
            f"{folder}: antecedents {A.shape}, consequents {consequents.shape} and weights "
            f"{weights.shape} do not fit together; they must be (R, F), (R, F + 1) and (R,)"
        )
    if not all(np.isfinite(array).all() for array in rules.values()):
        raise DataError(f"{folder}: contains values that are not finite")
    if not np.isin(A, (0, 1, 2)).all():
        raise DataError(f"{folder}: antecedents must be indices of three fuzzy sets: 0, 1, 2")
    return rules
