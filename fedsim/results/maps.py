"""Compare the relevance maps that runs have stored (`explain.maps`).

agreement_matrix(run, "occlusion")                    # clients and the global model
similarity(run, centralised, "occlusion", how="rank")  # two global models
importance(run, "sage")                               # by feature, of each client and of all
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedsim.config.registry import nearest
from fedsim.errors import RunFolderError
from fedsim.explain.compare import similarities
from fedsim.explain.scores.measure import similarity as of_maps
from fedsim.explain.scores.relevance import Scores, mean_defined
from fedsim.explain.section import OF_ALL
from fedsim.results.run import Run
from fedsim.support.words import client_name

if TYPE_CHECKING:
    import pandas as pd

# Of one model, by input: (P,) relevances of its pixels, features or words.
Maps = dict[int, NDArray[np.float64]]


def relevance_maps(run: Run, explainer: str, round: int | None = None) -> dict[str, Maps]:
    """The maps of each model: "global", "shared", "client 3", "client 3's own" (personal).

    Clients that the data name have their names: "Kiel", "Kiel's own".

    Args:
        round: a round in which models were explained; by default the last one.

    Raises:
        RunFolderError: the run has stored no maps, or none of this explainer or round.
    """
    rows = run.maps
    if rows.empty:
        raise RunFolderError(f"{run.path}: has kept no relevance maps (explain.maps: true)")
    round = rows["round"].max().item() if round is None else round
    for column, wanted in (("explainer", explainer), ("round", round)):
        if wanted not in set(rows[column]):
            known = nearest(wanted, map(str, rows[column].unique()))
            raise RunFolderError(f"{run.path}: has no maps of {column} {wanted}{known}")
        rows = rows[rows[column] == wanted]
    found: dict[str, Maps] = {}
    for row in rows.to_dict("records"):
        name = row["model"] if row["model"] in OF_ALL else _called(run, int(row["client"]))
        name += "'s own" if row["model"] == "personal" else ""
        found.setdefault(name, {})[row["input"]] = np.asarray(row["relevance"], np.float64)
    return found


def _called(run: Run, client: int) -> str:
    name = run.client_name(client)
    return client_name(client) if name in OF_ALL else name  # a client called "global"


def importance(run: Run, explainer: str, round: int | None = None) -> pd.DataFrame:
    """The mean importance of each part of an input: the mean of each model's maps.

    For `sage` on clients' own examples (`inputs_from: own`, `target: label`) these are the SAGE
    values of each client, and the row "all clients" is what a server obtains by adding up the
    clients' sums: the values of all their examples together.

    Args:
        explainer, round: as of `relevance_maps`.

    Returns:
        One row per model and one column per part, by index; and a row "all clients", weighted by
        their numbers of inputs, if there are any clients.

    Raises:
        RunFolderError: the run has kept no such maps, or inputs differ in length, as documents do.
    """
    import pandas as pd  # here, because it is slow to import

    maps = relevance_maps(run, explainer, round)
    for of in maps.values():
        if len(set(map(len, of.values()))) > 1:
            raise RunFolderError(
                f"{run.path}: inputs differ in length; there is no mean of their maps"
            )
    found = {name: np.stack(list(of.values())) for name, of in maps.items()}
    known = [_called(run, k) for k in range(run.manifest["clients"])]
    if clients := [found[name] for name in known if name in found]:
        found["all clients"] = np.concatenate(clients)
    return pd.DataFrame({name: of.mean(axis=0) for name, of in found.items()}).T


def agreement_matrix(
    run: Run, explainer: str, round: int | None = None, how: str = "rank"
) -> pd.DataFrame:
    """The similarity of the explanations of all pairs of models, averaged over the inputs.

    Args:
        explainer, round: as of `relevance_maps`.
        how: `rank` (Spearman), `top_k` (overlap) or `cosine`.

    Returns:
        One row and one column per model; NaN for models with explanations of different inputs.
    """
    import pandas as pd  # here, because it is slow to import

    maps = relevance_maps(run, explainer, round)
    alike_by = _similarities(run)
    matrix = pd.DataFrame(index=list(maps), columns=list(maps), dtype=np.float64)
    for a, b in itertools.combinations_with_replacement(maps, 2):  # who agrees is agreed with
        matrix.loc[a, b] = matrix.loc[b, a] = _alike(maps[a], maps[b], how, alike_by)
    return matrix


def similarity(
    run: Run, other: Run, explainer: str, how: str = "rank", round: int | None = None
) -> float:
    """The similarity of the explanations of two runs' global models, such as a centralised run's.

    Args:
        explainer, how: as of `agreement_matrix`.
        round: round of `run`; for the other run the last is used. By default the last of both.

    Raises:
        RunFolderError: they have kept no such maps, or of other inputs.
    """
    found = [relevance_maps(run, explainer, round), relevance_maps(other, explainer)]
    for maps, of in zip(found, (run, other), strict=True):
        if "global" not in maps:
            raise RunFolderError(f"{of.path}: has no maps of a global model")
    mean = _alike(found[0]["global"], found[1]["global"], how, _similarities(run))
    if np.isnan(mean):
        raise RunFolderError(f"{run.path} and {other.path} explain no input alike")
    return mean


def _similarities(run: Run) -> dict[str, Callable[..., Scores]]:
    k = run.experiment.explain.top_k if run.experiment.explain else None
    return similarities(k, bool(run.manifest.get("ranked_by_size")))


def _alike(a: Maps, b: Maps, how: str, scores: Mapping[str, Callable[..., Scores]]) -> float:
    """Mean over the inputs that both explain, where it is defined."""
    if how not in scores:
        raise ValueError(f"unknown similarity '{how}'{nearest(how, scores)}")
    found = [
        of_maps(scores[how], np.ones((1, len(a[input])), bool), a[input][None], b[input][None])[0]
        for input in a
        if input in b and a[input].shape == b[input].shape
    ]
    mean = mean_defined(np.array(found))
    return math.nan if mean is None else mean
