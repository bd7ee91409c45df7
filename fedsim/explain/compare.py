"""Rows of a round: explanations of several models, compared with each other and the last time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsim.explain.scores import relevance as scores
from fedsim.explain.scores.measure import Explained, similarity
from fedsim.explain.scores.relevance import Scores, informative, mean_defined
from fedsim.explain.section import PREFIXES, SIMILARITIES, Explain, Whose

Key = tuple[Whose, int | None]  # a kind of model, and its client
Maps = dict[str, dict[str, dict[str, NDArray[Any]]]]  # by explainer and model; and their inputs
Row = dict[str, float | int | str | None]


@dataclass(frozen=True)
class Recorded:
    """A round's additions to a run's tables, and the maps that the next ones are compared with."""

    columns: dict[str, float]
    rows: list[Row]
    maps: list[dict[str, Any]]
    last: Maps


def recorded(
    section: Explain,
    found: Mapping[str, Mapping[Key, Explained]],
    before: Mapping[str, Mapping[str, Mapping[str, NDArray[Any]]]],
    reference: Mapping[str, NDArray[Any]] = MappingProxyType({}),
) -> Recorded:
    """Compare and tabulate a round's explanations.

    Args:
        found: by explainer and model.
        before: the maps of the time before.
        reference: (m, P) the reference's maps of the same inputs, by explainer.
    """
    wanted = section.scores or ()
    columns: dict[str, float] = {}
    rows: list[Row] = []
    maps: list[dict[str, Any]] = []
    last: Maps = {}
    by_size = any(one.by_size for of_models in found.values() for one in of_models.values())
    alike_by = similarities(section.top_k, by_size)
    for explainer, of_models in found.items():
        if "drift" in wanted:  # maps are kept only if needed
            last[explainer] = {
                _name(key): {"inputs": one.inputs, "relevance": one.relevance}
                for key, one in of_models.items()
            }
        scored: dict[Key, dict[str, float | None]] = {}
        for key, one in of_models.items():
            scored[key] = {name: mean_defined(values) for name, values in one.scores.items()}
            old = before.get(explainer, {}).get(_name(key), {})
            same = bool(old) and np.array_equal(old["inputs"], one.inputs)
            if "drift" in wanted and same and old["relevance"].shape == one.relevance.shape:
                alike = _alike(alike_by, one.relevance, old["relevance"], one.present)
                scored[key] |= {f"drift_{how}": 1 - a for how, a in alike.items()}
            if explainer in reference:
                alike = _alike(alike_by, one.relevance, reference[explainer], one.present)
                scored[key] |= {f"reference_agreement_{how}": a for how, a in alike.items()}
        for whose in section.whose:
            of_clients = {key: one for key, one in of_models.items() if key[0] == whose}
            if whose != "global":
                if "agreement" in wanted and whose != "shared":
                    _agreement(scored, of_clients, alike_by)
                if "global_agreement" in wanted and ("global", None) in of_models:
                    whole = of_models["global", None].relevance
                    for key, one in of_clients.items():
                        alike = _alike(alike_by, one.relevance, whole, one.present)
                        scored[key] |= {f"global_agreement_{how}": a for how, a in alike.items()}
            own = [scored[key] for key in of_clients]
            for column in dict.fromkeys(name for one in own for name in one):
                if values := [one[column] for one in own if one.get(column) is not None]:
                    mean = math.fsum(values) / len(values)  # type: ignore[arg-type]
                    columns[f"{explainer}/{PREFIXES[whose]}{column}"] = mean
        for (whose, client), own_scores in scored.items():
            row: Row = {"explainer": explainer, "model": whose, "client": client, **own_scores}
            one = of_models[whose, client]
            shown = np.abs(one.relevance) if one.by_size else one.relevance
            if count := int((~informative(shown, present=one.present)).sum()):
                row["uninformative"] = count
            rows.append(row)
            about = {"explainer": explainer, "model": whose, "client": client}
            for k, input in enumerate(one.inputs.tolist() if section.maps else ()):
                told = {"input": input, "relevance": one.relevance[k, one.present[k]]}
                maps.append({**about, **told, **{n: curve[k] for n, curve in one.curves.items()}})
    return Recorded(columns, rows, maps, last)


def _name(key: Key) -> str:
    whose, client = key
    return whose if client is None else f"{whose} {client}"


def similarities(top_k: int | None, by_size: bool) -> dict[str, Callable[..., Scores]]:
    """The similarities of two maps (m, P), for each input.

    Args:
        by_size: whether `top_k` is of |relevance|, as for a regression.
    """

    def top(a: NDArray[Any], b: NDArray[Any]) -> Scores:
        if by_size:
            a, b = np.abs(a), np.abs(b)
        return scores.top_k_overlap(a, b, scores.parts_compared(a.shape[1], top_k))

    return dict(zip(SIMILARITIES, (scores.rank_correlation, top, scores.cosine), strict=True))


def _alike(
    alike_by: Mapping[str, Callable[..., Scores]],
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    present: NDArray[np.bool_],
) -> dict[str, float]:
    """The mean of each similarity over the inputs for which it is defined."""
    found = {how: mean_defined(similarity(s, present, a, b)) for how, s in alike_by.items()}
    return {how: mean for how, mean in found.items() if mean is not None}


def _agreement(
    scored: dict[Key, dict[str, float | None]],
    of_clients: Mapping[Key, Explained],
    alike_by: Mapping[str, Callable[..., Scores]],
) -> None:
    """The mean similarity of each client's maps to those of each other client."""
    pairs: dict[Key, dict[str, list[float]]] = {key: {} for key in of_clients}
    for one, other in itertools.combinations(of_clients, 2):
        a, b = of_clients[one], of_clients[other]
        alike = _alike(alike_by, a.relevance, b.relevance, a.present)
        for how, value in alike.items():
            for key in (one, other):
                pairs[key].setdefault(how, []).append(value)
    for key, found in pairs.items():
        for how, values in found.items():
            scored[key][f"agreement_{how}"] = math.fsum(values) / len(values)
