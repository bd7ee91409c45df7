"""How much each client contributes to a score of the run: exact values, known by running again.

A coalition S of clients is worth v(S), a score of the run of the federation that all others never
joined, see `fedsim.without`. What client k contributes is

    leave-one-out   v(N) − v(N ∖ k)
    Shapley         the mean of v(S ∪ k) − v(S) over all orders in which clients join, where S are
                    those before k (Shapley 1953; of data: Ghorbani & Zou, ICML 2019)

The Shapley values of all clients sum to v(N) − v(∅), the gain over the untrained model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedsim.analysis.contributions.coalitions import Coalitions
from fedsim.analysis.contributions.cosine import cosine
from fedsim.analysis.contributions.games import Coalition, shapley, subsets
from fedsim.analysis.contributions.gtg_shapley import gtg_shapley
from fedsim.analysis.contributions.multi_rounds import multi_rounds
from fedsim.analysis.contributions.shapfed import shapfed
from fedsim.analysis.contributions.updates import (
    Columns,
    Estimator,
    scores_of_models,
    updates_of,
)
from fedsim.config.arguments import checked
from fedsim.config.registry import nearest
from fedsim.errors import BadInput
from fedsim.launch.progress import LineProgress
from fedsim.results.records import WITHOUT_UNIT
from fedsim.results.run import Run
from fedsim.results.summary import on_record, sign
from fedsim.support import atomic
from fedsim.support.rng import keyed_rng
from fedsim.support.words import client_name, duration, short

if TYPE_CHECKING:
    import pandas as pd

EXACT = ("shapley", "permutations", "leave_one_out")
ESTIMATES: dict[str, Estimator] = {
    "multi_rounds": multi_rounds,
    "gtg_shapley": gtg_shapley,
    "shapfed": shapfed,
    "cosine": cosine,
}
KEPT = "contributions.parquet"
PERMUTATIONS, BUDGET = 50, 1100
MOST_TOLD = 10**9  # federations whose number and time mean something
MOST_EXACT = 10  # clients, of which all coalitions are played unless it is asked for


@dataclass(frozen=True)
class Contributions:
    """What each client contributes to a score.

    Attributes:
        run: the run.
        how: `shapley` (exact), `permutations` (Shapley values by samples of orders),
            `leave_one_out`, or the name of an estimate.
        score: the column of rounds.parquet; a loss or an error counts as it is, so that who lowers
            it has a negative value.
        clients: a row per client: `client`, `value`, for samples `standard_error`, and what else
            an estimate says, such as `value/<class>`.
        everybody, nobody: the score of all clients, and without any; NaN where that is not needed.
        coalitions: of how many federations the outcomes were used.
    """

    run: Run
    how: str
    score: str
    clients: pd.DataFrame
    everybody: float
    nobody: float
    coalitions: int

    @property
    def values(self) -> dict[int, float]:
        """What each client contributes, by its number."""
        return dict(zip(self.clients["client"], self.clients["value"], strict=True))

    @property
    def summary(self) -> dict[str, float]:
        """What the values come to.

        `lowest`: the least that a client contributes. `spread`: their standard deviation over all
        clients (ddof=0). `auc`, if the run has adversaries and others: the AUC by which low
        contributions tell them apart, 0.5 for guessing. Where little of the score is good, such
        as a loss, contributions count with their sign changed.
        """
        from fedsim.analysis.attacks.membership import outcome

        known = {} if self.how in WITHOUT_UNIT else on_record(self.run)
        worth = self.clients["value"].to_numpy(np.float64)
        if self.score in known:
            worth = sign(known[self.score]) * worth
        bad = self.clients["client"].isin(self.run.manifest.get("adversaries", ())).to_numpy()
        found = {"lowest": float(worth.min()), "spread": float(worth.std())}
        if bad.any() and not bad.all():
            found["auc"] = outcome(-worth[bad], -worth[~bad]).auc
        return found

    def text(self) -> str:
        """The values as `fedsim contributions` prints them, the largest first."""
        names = self.run.manifest.get("client_names", ())
        gain = f", {self.nobody:.4g} without any" if not math.isnan(self.nobody) else ""
        what = self.how.replace("_", "-")
        lines = [f"{self.score} {self.everybody:.4g} with all clients{gain}; {what}:"]
        ordered = self.clients.sort_values("value", ascending=False, kind="stable")
        wide = max(len(client_name(k, names)) for k in ordered["client"])
        for row in ordered.to_dict("records"):
            error = row.get("standard_error", math.nan)
            about = f" ± {error:.4f}" if not math.isnan(error) else ""
            who = f"{client_name(row['client'], names):{wide}}"
            lines.append(f"  {who} {row['value']:+.4f}{about}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self.how} contributions to {self.score} of {short(self.run.path)}>"


@checked
def contributions(
    run: Run | str | Path,
    score: str | None = None,
    *,
    how: str | None = None,
    permutations: int = PERMUTATIONS,
    tolerance: float = 0.0,
    budget: int = BUDGET,
    progress: bool | Callable[[str], None] = True,
) -> Contributions:
    """How much each client contributes to a score of a finished run.

    Federations of some of the clients are played as they would have been, to the bit; their
    beginnings are shared, and their outcomes kept in the run's folder (`coalitions.parquet`), so
    that what is interrupted continues, and another score needs no further runs.

    Args:
        run: a finished run, or its folder.
        score: a column of `Run.rounds`, whose last value counts, such as `accuracy`,
            `class_accuracy/3` (`evaluate.metrics`) or a score of explanations; by default the
            primary metric.
        how: `shapley`, of all 2^n coalitions of n clients; `permutations`, Shapley values of
            random orders, with standard errors; or `leave_one_out`, of n + 1 coalitions. By
            default exact for up to 10 clients, and by permutations beyond. Or an estimate from
            what the run's clients sent, without other federations: `multi_rounds`, `gtg_shapley`,
            `shapfed` or `cosine`; the last two are not in units of a score.
        permutations: number of random orders.
        tolerance: leave out the rest of an order once a coalition's score is as close to that of
            all clients, whose values there count as 0 (truncation; Ghorbani & Zou 2019).
        budget: most federations that may have to be played for it.
        progress: as of `fedsim.explanations`.

    Raises:
        BadInput: the run is not finished; there is no such score, or it is none without any
            client; the experiment cannot do without some clients; or the budget does not suffice.
        RunError: a federation fails.

    Example:
        >>> import fedsim
        >>> found = fedsim.contributions(folder, how="leave_one_out")
        >>> found.clients.columns.tolist(), len(found.clients)
        (['client', 'value'], 10)
    """
    import pandas as pd

    run = Run.of(run)
    for name, value, least in (("permutations", permutations, 2), ("budget", budget, 1)):
        if value < least:
            raise BadInput(f"{name}={value}: must be at least {least}")
    if not tolerance >= 0:
        raise BadInput(f"tolerance={tolerance:g}: must be at least 0")
    if how is not None and how not in (*EXACT, *ESTIMATES):
        known = nearest(how, (*EXACT, *ESTIMATES))
        raise BadInput(f"how={how}: there is no such way{known}")
    with LineProgress(progress) as tell:
        if how in ESTIMATES:
            columns, score, everybody, nobody = _estimated(run, ESTIMATES[how], score, tell)
            clients, count = run.client_ids, 1
        else:
            of = Coalitions(run, tell)
            worth, clients = Worth(of, score), list(of.clients)
            how = how or ("shapley" if len(of.active) <= MOST_EXACT else "permutations")
            if how == "permutations":
                columns = sampled(of, worth, permutations, tolerance, budget)
            else:
                columns = _played(of, worth, how, budget)
            nobody = math.nan if how == "leave_one_out" else worth(frozenset())
            everybody, score, count = worth(of.active), worth.score, len(worth.used)
    table = pd.DataFrame({"client": clients})
    names = dict.fromkeys(name for own in columns.values() for name in own) or ["value"]
    for name in names:
        table[name] = [columns.get(k, {}).get(name, 0.0) for k in clients]
    assert how is not None
    found = Contributions(run, how, score, table, everybody, nobody, count)
    keep(found)
    return found


def _played(of: Coalitions, worth: Worth, how: str, budget: int) -> Columns:
    """Values by playing all coalitions, or those that lack one client."""
    clients = sorted(of.active)
    check = partial(check_budget, how, len(clients), budget=budget, seconds=_seconds(of.run))
    if how == "leave_one_out":
        missing = of.missing([of.active, *(of.active - {k} for k in clients)])
        check(len(missing))
        of.compute(missing)
        found = {k: worth(of.active) - worth(of.active - {k}) for k in clients}
    else:
        if len(clients) > math.log2(budget):  # before they are listed
            check(2 ** min(len(clients), 64))
        missing = of.missing(subsets(clients))
        check(len(missing))
        worth(frozenset())  # before others are played, as it may have no value
        of.compute(missing)
        found = shapley(clients, worth)
    return {k: {"value": value} for k, value in found.items()}


def _estimated(
    run: Run, estimate: Estimator, score: str | None, tell: Callable[[str], None]
) -> tuple[Columns, str, float, float]:
    """An estimate from the updates of a run; the score, and its value with all and without any."""
    score = score or run.primary_metric.column
    rounds = updates_of(run, tell)
    first, again = next(rounds, (None, None))
    if first is None or again is None:
        raise BadInput(f"{run.path}: no client sent anything in any round")
    worth = scores_of_models(again, score)
    nobody = worth(again.fed.initial_weights())
    every = itertools.chain([first], (round for round, _ in rounds))
    columns = estimate(every, worth, keyed_rng(run.experiment.seed, "contributions"))
    return columns, score, worth(again.state.weights), nobody


class Worth:
    """v(S): the score of a coalition's outcome.

    Args:
        of: the outcomes.
        score: a column of rounds.parquet; None for the primary metric.

    Attributes:
        used: the coalitions that were asked for.

    Raises:
        BadInput: there is no such score; or the untrained model has none.
    """

    def __init__(self, of: Coalitions, score: str | None) -> None:
        self.score = score or of.run.primary_metric.column
        self.used: set[Coalition] = set()
        self._of = of
        known = of[of.active]
        names = [name for name in known if name not in ("round", "result_hash")]
        if self.score not in names:
            raise BadInput(
                f"score={self.score}: the run's rounds have no such number"
                f"{nearest(self.score, names)}"
            )

    def __call__(self, coalition: Iterable[int]) -> float:
        own = frozenset(coalition)
        outcome = self._of[own]
        self.used.add(self._of.alike(own))
        if self.score not in outcome:
            who = "any client" if not own else f"clients {sorted(self._of.active - own)}"
            raise BadInput(
                f"{self._of.run.path}: there is no {self.score} without {who}, so that "
                "contributions cannot be computed; take how=leave_one_out"
            )
        return float(outcome[self.score])


def sampled(
    of: Coalitions,
    worth: Callable[[Coalition], float],
    permutations: int,
    tolerance: float,
    budget: int,
) -> Columns:
    """Means of marginal contributions over random orders, and their standard errors.

    All orders are followed at once, a place after another.
    """
    clients = sorted(of.active)
    orders = orders_of(of.run.experiment.seed, clients, permutations)
    missing = len(of.missing(beginnings(orders)))
    check_budget("permutations", len(clients), missing, budget, _seconds(of.run))
    marginal = np.zeros((permutations, len(clients)))
    everybody, at = worth(of.active), np.full(permutations, worth(frozenset()))
    for place in range(len(clients)):
        far = np.abs(at - everybody) > tolerance
        going = [m for m in range(permutations) if far[m] or not (place and tolerance)]
        joined = {m: frozenset(orders[m, : place + 1].tolist()) for m in going}
        of.compute(joined.values())
        for m, own in joined.items():
            marginal[m, clients.index(orders[m, place])] = worth(own) - at[m]
            at[m] = worth(own)
    spread = marginal.std(axis=0, ddof=1) / math.sqrt(permutations)
    return {
        k: {
            "value": math.fsum(marginal[:, i]) / permutations,
            "standard_error": float(spread[i]),
        }
        for i, k in enumerate(clients)
    }


def orders_of(seed: int, clients: Sequence[int], permutations: int) -> NDArray[np.int64]:
    """(permutations, n) random orders of clients."""
    rng = keyed_rng(seed, "contributions")
    return np.array([rng.permutation(clients) for _ in range(permutations)], dtype=np.int64)


def beginnings(orders: NDArray[np.int64]) -> set[Coalition]:
    """The coalitions of those who come first in an order, of any size."""
    places = range(orders.shape[1] + 1)
    return {frozenset(order[:place]) for order in orders.tolist() for place in places}


def check_budget(how: str, n: int, count: int, budget: int, seconds: float = 0.0) -> None:
    """Refuse to play more federations than the budget has, and say what that would take.

    Args:
        n: number of clients.
        seconds: that all clients' federation takes; 0 if that is not known.
    """
    if count <= budget:
        return
    told = f"{count:,}" if count < MOST_TOLD else f"2^{n}"
    lasts = ""
    if seconds and count < MOST_TOLD:  # half of the clients each
        lasts = f", about {duration(seconds * count / 2)} by one process"
    instead = " or how=leave_one_out" if how == "permutations" else "how=permutations"
    less = "fewer permutations" if how == "permutations" else ""
    raise BadInput(
        f"how={how}: {told} federations of some of the {n} clients would be played{lasts}, and "
        f"budget={budget:,}; raise it, or take {less}{instead}"
    )


def _seconds(run: Run) -> float:
    return float(run.manifest.get("wall_seconds", 0.0))


def keep(found: Contributions) -> None:
    """Keep what was found in the run's folder, in the place of what was there of the same kind."""
    import pandas as pd

    path = found.run.path / KEPT
    rows = found.clients.assign(how=found.how, score=found.score)
    if len(before := found.run.contributions):
        same = (before["how"] == found.how) & (before["score"] == found.score)
        rows = pd.concat([before[~same], rows], ignore_index=True)
    with atomic.replacing(path) as aside:
        rows.to_parquet(aside)
