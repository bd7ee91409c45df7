"""Which clients' data have changed since the run began, in which round, and in which features?

Three detectors watch each client in the rounds in which it trains, with the model that it gets at
their beginning: ADWIN its losses, Kolmogorov-Smirnov tests its inputs feature by feature, and the
same tests what each feature says for the truth (attributed loss). With `data.name=drift` the truth
is known, and detectors are scored. An analysis of finished runs: nothing is added to a round.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedsim.analysis.explanations import Wanted, drawn_to, explainer_of
from fedsim.analysis.replay import ModelSnapshot, Replay, as_errors, replay, trained_rounds
from fedsim.config.arguments import checked
from fedsim.data import Dataset, load_dataset
from fedsim.errors import BadInput
from fedsim.explain.explainer import FeatureExplainer, refuse_unfit
from fedsim.explain.pictures.drifts import draw_drifts
from fedsim.explain.scores.measure import relevances_of
from fedsim.launch.progress import LineProgress
from fedsim.results.run import Run
from fedsim.support.rng import keyed_rng, keyed_torch_rng
from fedsim.support.words import client_name, in_short, short
from fedsim.training import logits

if TYPE_CHECKING:
    import pandas as pd

Values = NDArray[np.float64]

ADWIN, KS, ATTRIBUTED = "adwin", "ks", "attributed_loss"
_COLUMNS = ["round", "client", "detector", "value", "alarm", "features"]
LEVEL = 0.01  # of a false alarm of a detector about a client, for all rounds and features together
SIDE = 8  # parts a side to which images and their maps are averaged


@dataclass(frozen=True)
class Drifts:
    """What detectors say of each client's data, beside what has changed.

    Attributes:
        run: the run.
        title: who was watched how, in words.
        watched: a row per round, client and detector: `value` (of `adwin` the mean of 1 − exp(−
            loss); of the others the smallest p-value, corrected for all features and rounds),
            `alarm`, and `features`, those that have moved, the clearest first.
        notes: what could not be watched, a line each.
        names: the clients' names; empty if the data name none.
        file: the picture's name, without its ending.
    """

    run: Run
    title: str
    watched: pd.DataFrame
    notes: tuple[str, ...] = ()
    names: Sequence[str] = ()
    file: str = "drifts"

    @cached_property
    def planted(self) -> dict[int, int]:
        """The first round with changed inputs, by client that drifts."""
        change = self.run.manifest.get("change", {"round": math.inf, "clients": ()})
        drifting = change["clients"] if change["round"] <= self.run.last_round else ()
        return dict.fromkeys((k for k in drifting if k in self.run.client_ids), change["round"])

    @property
    def detectors(self) -> list[str]:
        """Those that could watch."""
        return list(dict.fromkeys(self.watched["detector"]))

    @cached_property
    def alarms(self) -> pd.DataFrame:
        """A row per client and detector.

        Columns: `client`, `detector`, `planted` (the round in which it drifts) and `alarm` (the
        round of the first), missing if there is none; `delay`, the rounds from the one to the
        other, missing unless the alarm is right; and `features`, as of that round.
        """
        import pandas as pd

        both = ["client", "detector"]
        every = pd.MultiIndex.from_product([self.run.client_ids, self.detectors], names=both)
        first = self.watched[self.watched["alarm"]].groupby(both)[["round", "features"]].first()
        found = first.reindex(every).reset_index().rename(columns={"round": "alarm"})
        found["planted"] = found["client"].map(self.planted).astype(float)
        found["delay"] = (found["alarm"] - found["planted"]).where(lambda late: late >= 0)
        found["features"] = [own if isinstance(own, tuple) else () for own in found["features"]]
        return found[[*both, "planted", "alarm", "delay", "features"]]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """A row per detector, by clients, of which each has one chance: its first alarm.

        Columns: `found`, `false_alarms` (of clients that do not drift, or have not yet), `missed`,
        `precision`, `recall`, `f1`, `delay` (mean in rounds, of those found) and `named` (share of
        those found whose first feature has changed); missing where they are undefined.
        """
        import pandas as pd

        changed = set(self.run.manifest.get("change", {}).get("features", ()))
        drifting, rows = len(self.planted), {}
        for detector in self.detectors:
            own = self.alarms[self.alarms["detector"] == detector]
            hits, alarms = own[own["delay"].notna()], int(own["alarm"].notna().sum())
            found = len(hits)
            why = [features[0] in changed for features in hits["features"] if features]
            rows[detector] = {
                "found": found,
                "false_alarms": alarms - found,
                "missed": drifting - found,
                "precision": found / alarms if alarms else math.nan,
                "recall": found / drifting if drifting else math.nan,
                "f1": 2 * found / (alarms + drifting) if drifting else math.nan,
                "delay": float(hits["delay"].mean()),
                "named": float(np.mean(why)) if changed and why else math.nan,
            }
        return pd.DataFrame.from_dict(rows, orient="index")

    def text(self) -> str:
        """What was found, as `fedsim drifts` prints it."""
        lines = [self.title, *self.notes]
        if self.planted:
            who = in_short([client_name(k, self.names) for k in self.planted])
            what = in_short(self.run.manifest["change"]["features"]) or "inputs"
            lines.append(f"{what} of {who} change in round {min(self.planted.values())}")
        else:
            lines.append("no inputs change in this run: all alarms are false, F1 is undefined")
        for detector in self.detectors:
            own = self.alarms[self.alarms["detector"] == detector].dropna(subset="alarm")
            lines.append(f"\n{detector}: alarms about {len(own)} clients")
            for row in own.to_dict("records"):
                rounds = f"{row['delay']:.0f} round{'s' * (row['delay'] != 1)}"
                late = f"{rounds} late" if row["delay"] else "at once"
                late = "false" if math.isnan(row["delay"]) else late
                what = f": {in_short(row['features'])}" if row["features"] else ""
                who = client_name(row["client"], self.names)
                lines.append(f"  {who} in round {row['alarm']:.0f} ({late}){what}")
            defined = self.scores.loc[detector, "precision":].dropna()
            if self.planted:
                lines.append("  " + ", ".join(f"{n} {v:.2f}" for n, v in defined.items()))
        return "\n".join(lines)

    def save(self, folder: str | Path | None = None) -> list[Path]:
        """Draw who was watched when, who drifts, and the first alarm of each detector.

        Args:
            folder: where to, created if missing, or a file (.png, .pdf, .svg, .jpg, …); by
                default `explanations` in the run's folder, whose pictures `fedsim report` shows.

        Returns:
            The path of the picture.

        Raises:
            OSError: it cannot be written.
        """
        path = drawn_to(self.run, folder, self.file)
        names = [client_name(k, self.names) for k in range(self.run.manifest["clients"])]
        draw_drifts(self.watched, self.alarms, names, path, self.title)
        return [path]

    def __repr__(self) -> str:
        return f"<drifts of {short(self.run.path)}>"


class Adwin:
    """ADWIN over values in [0, 1] that come a batch at a time: has their mean risen?

    The window forgets its oldest batch as long as the means of an older and a newer part of it,
    cut between batches, differ by more than chance explains at level `delta`.

    Source: Bifet, Gavaldà, "Learning from Time-Changing Data with Adaptive Windowing" (SDM 2007),
    ADWIN0 with the bound of Eq. 3.1 for large windows. Every cut between batches is tried, which
    buckets of growing size only approximate; there are as few as rounds.
    """

    def __init__(self, delta: float) -> None:
        self.delta = delta
        self.window: list[tuple[float, float, float]] = []  # number, sum, and sum of squares

    def add(self, batch: Values) -> bool:
        """Whether older values are forgotten because newer ones are larger.

        Args:
            batch: (n,) the next values, n at least 1.
        """
        self.window.append((len(batch), float(batch.sum()), float((batch**2).sum())))
        rose = False
        while len(self.window) > 1 and (by := self._differs()):
            rose |= by > 0
            self.window.pop(0)
        return rose

    def _differs(self) -> float:
        """By how much the newer part exceeds the older where they differ most clearly, or 0."""
        n, total, squares = np.cumsum(self.window, axis=0).T
        older, newer = n[:-1], n[-1] - n[:-1]
        by = (total[-1] - total[:-1]) / newer - total[:-1] / older
        variance = max(squares[-1] / n[-1] - (total[-1] / n[-1]) ** 2, 0)
        each = 1 / older + 1 / newer
        log = math.log(2 * math.log(n[-1]) / self.delta)
        beyond = np.abs(by) - np.sqrt(2 * each * variance * log) - 2 / 3 * each * log
        most = int(beyond.argmax())
        return float(by[most]) if beyond[most] > 0 else 0.0


@checked
def drifts(
    run: Run | str | Path,
    explainer: Wanted | None = None,
    *,
    inputs: int = 100,
    progress: bool | Callable[[str], None] = True,
) -> Drifts:
    """Watch clients' data for drift, round by round, by three detectors.

    In each round from the second on, a client that trains divides its training examples at random:
    one half is taken as in the first round, the other as it is now. With the model that it gets
    (the global one, or without one its personal model) before it trains,

    - `adwin` watches 1 − exp(−loss) of what is there now, for a classifier the probability of
      other classes, for numbers with the squared error in units of their variance: has it risen?
    - `ks` compares both halves feature by feature (two-sample Kolmogorov-Smirnov test).
    - `attributed_loss` compares in the same way how far each feature speaks for the truth: its
      relevance for the true class (by `sage`, for a lower loss), or, for numbers, towards the
      target. The same model explains both halves, so that learning is no drift.

    Each is at a level of 1 % for a client, for all rounds and features together (Bonferroni), if
    halves are as of independent examples. The rounds of the run are repeated.

    Args:
        run: a finished run of two rounds or more, or its folder.
        explainer: as of `fedsim.explanations`; one that assigns a number to each part of an input.
        inputs: most examples of a client in each half.
        progress: as of `fedsim.explanations`.

    Raises:
        BadInput: the run is not finished or cannot be repeated, clients learn tasks in turn, no
            client takes part in a round, or the explainer does not apply.

    Example:
        >>> import fedsim
        >>> found = fedsim.drifts(folder, "gradient", inputs=8, progress=False)
        >>> found.detectors, found.planted
        (['adwin', 'ks', 'attributed_loss'], {})
    """
    import pandas as pd

    run = Run.of(run)
    if inputs < 1:
        raise BadInput(f"inputs={inputs}: must be at least 1")
    run.result_hash  # noqa: B018  # raises if it is not finished
    chosen, experiment = explainer_of(run, explainer), run.experiment
    if not isinstance(chosen, FeatureExplainer) and explainer is not None:
        raise BadInput(
            f"explainer {chosen.label} does not assign a number to each part of an input, so no "
            "loss is attributed by it"
        )
    change = run.manifest.get("change")
    if run.last_round < 2 or (change and change["round"] < 2):
        key = "train.rounds" if run.last_round < 2 else "data.round"
        raise BadInput(f"{key}=1: there is no round before with which another is compared")
    method, trained = experiment.method, _trained(run)
    if not trained or not (method.has_global_model or method.keeps_models):
        raise BadInput(
            f"method.name={method.name}: no client trains a model after the first round, so none "
            "is watched"
        )
    dataset = load_dataset(experiment.data)
    with LineProgress(progress) as tell:

        def on_round(t: int) -> None:
            tell(f"[{t}/{run.last_round}] recomputing round {t}")

        again = replay(run, 1, on_round, dataset)
        watching = _Watching(again, chosen, explainer is not None, inputs)
        rows = list(watching.round(trained.get(2, [])))
        for t in range(3, run.last_round + 1):
            on_round(t - 1)
            again.next_round()
            rows += watching.round(trained.get(t, []))
    whose = "the global model" if method.has_global_model else "their personal models"
    by = f", {chosen.label}" if watching.explains else ""
    return Drifts(
        run=run,
        title=f"clients watched over rounds 2 to {run.last_round} by {whose}{by}",
        watched=pd.DataFrame(rows, columns=_COLUMNS).sort_values(
            ["round", "client"], kind="stable"
        ),
        notes=tuple(watching.notes),
        names=again.splits.names,
        file=f"drifts-{chosen.label}" if watching.explains else "drifts",
    )


def _trained(run: Run) -> dict[int, list[int]]:
    """The clients that train in each round from the second on, if any do."""
    found: dict[int, list[int]] = {}
    for k, rounds in trained_rounds(run, run.client_ids).items():
        for t in rounds:
            if t > 1:
                found.setdefault(t, []).append(k)
    return found


@dataclass
class _Watching:
    """The detectors at work.

    Attributes:
        again: the run, after the round before the one that is watched.
        explainer: attributes the loss, unless it does not apply.
        asked: whether a person asked for it, so that it must apply.
        inputs: most examples of a client in each half.
    """

    again: Replay
    explainer: Any
    asked: bool
    inputs: int
    notes: list[str] = field(default_factory=list)
    adwins: dict[int, Adwin] = field(default_factory=dict)

    def __post_init__(self) -> None:
        again, data = self.again, self.again.dataset
        if again.splits.sequence is not None:
            raise BadInput(
                f"partition.kind={again.experiment.partition.kind}: clients learn tasks in turn, "
                "so that their data change by design"
            )
        self.looks = again.run.last_round - 1
        self.unit = float(np.var(data.y)) or 1.0 if not data.classes else 1.0
        self.compares = not data.words
        lacking = "" if self.compares else "documents have no features to be compared one by one"
        if lacking:
            self.notes.append(f"{KS}: {lacking}")
        elif not isinstance(self.explainer, FeatureExplainer):
            lacking = f"explainer {self.explainer.label} gives no relevances; name another"
        elif data.y.ndim > 1:
            lacking = f"the data have {data.y.shape[1]} targets, and relevances are for one"
        if lacking and self.asked:
            raise BadInput(f"explainer {self.explainer.label}: {lacking}")
        self.explains = not lacking
        if lacking:
            self.notes.append(f"{ATTRIBUTED}: {lacking}")
        if self.compares:
            most = np.minimum(again.splits.train.lengths // 2, self.inputs).tolist()
            tests = math.prod(_sides(data) if len(data.shape) == 3 else data.shape) * self.looks
            there = np.flatnonzero(again.splits.present).tolist()
            few = [k for k in there if 2 * tests >= LEVEL * math.comb(2 * most[k], most[k])]
            if few:  # even if their halves had nothing in common
                told = in_short([client_name(k, again.splits.names) for k in few])
                self.notes.append(f"too few examples for any alarm of {KS}: {told}")

    def round(self, clients: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Rows of `Drifts.watched` for the clients that train in the next round."""
        again, data = self.again, self.again.dataset
        t, halves = again.after + 1, {}
        held, holds = (again.splits.held(when).train for when in (1, t))
        for k in clients:
            order = keyed_rng(again.experiment.seed, "drifts", t, k).permutation(len(held[k]))
            if half := min(len(order) // 2, self.inputs):
                halves[k] = held[k][order[:half]], holds[k][order[half : 2 * half]]
        for snapshot, own in self._models(list(halves)):
            rows = [part for k in own for part in halves[k]]
            loss, relevance, sign = self._explained(snapshot, np.concatenate(rows), t)
            places = np.split(np.arange(len(loss)), np.cumsum([len(part) for part in rows])[:-1])
            for k, first, second in zip(own, places[::2], places[1::2], strict=True):
                about = {"round": t, "client": k}
                rose = self.adwins.setdefault(k, Adwin(LEVEL / self.looks)).add(loss[second])
                watched = {"value": float(loss[second].mean()), "alarm": rose, "features": ()}
                yield {**about, "detector": ADWIN, **watched}
                if self.compares:
                    before, now = (_by_part(data.x[part], data) for part in halves[k])
                    yield {**about, "detector": KS, **self._moved(before, now, data.parts)}
                if relevance is not None:  # centred, as all of a feature may have one sign
                    mean = relevance[[*first, *second]].mean(axis=0)
                    towards = _by_part((relevance - mean) * sign[:, None], data)
                    moved = self._moved(towards[first], towards[second], None)
                    yield {**about, "detector": ATTRIBUTED, **moved}

    def _models(self, clients: list[int]) -> list[tuple[ModelSnapshot, list[int]]]:
        """The models that clients get, with those who get each."""
        again = self.again
        if again.experiment.method.has_global_model:
            own = again.global_model()
            if own is None or not clients:
                return []
            return [(ModelSnapshot(own, again, None), clients)]
        models = again.own_models(clients)
        return [(ModelSnapshot(m, again, k, "personal"), [k]) for k, m in models.items()]

    @torch.no_grad()
    def _explained(
        self, snapshot: ModelSnapshot, rows: NDArray[np.int64], t: int
    ) -> tuple[Values, Values | None, Values]:
        """What a model makes of training examples.

        Returns:
            (n,) 1 − exp(−loss), (n, P) relevances of the true class or the number, and (n,)
            whether more of these leads to the truth (1) or away from it (−1).
        """
        again, data, chosen = self.again, self.again.dataset, self.explainer
        model, about = snapshot.explained(), snapshot.data()
        network, batch = model.as_network().eval(), again.runner.context.examples(rows)
        client = -1 if snapshot.client is None else snapshot.client
        device = again.runner.context.device
        with keyed_torch_rng(model.seed, "drifts/torch", t, client, device):
            losses = batch.losses(again.spec.objective, network).double().cpu().numpy()
        relevance, sign = None, np.ones(len(rows))
        if self.explains:
            refuse_unfit(chosen, model, about)
            y = batch.y.long() if data.classes else torch.zeros(len(rows)).long()
            rng = keyed_rng(model.seed, f"drifts/{chosen.label}", t, client)
            with as_errors(chosen):
                relevance = relevances_of(chosen, model, about, batch.x, y, rng)
            if not data.classes:
                sign = np.sign(batch.y.cpu().numpy() - logits(network, batch.x)[:, 0])
        for values, what in ((losses, "losses"), (relevance, f"{chosen.label}: relevances")):
            if values is not None and not np.isfinite(values).all():
                raise BadInput(f"{what} by {snapshot.title} are not finite")
        return np.clip(1 - np.exp(-losses / self.unit), 0, 1), relevance, sign

    def _moved(
        self, before: Values, now: Values, parts: NDArray[np.int64] | None
    ) -> dict[str, Any]:
        """The smallest corrected p-value of features (n, F), and which have moved."""
        from scipy.stats import ks_2samp

        with warnings.catch_warnings():  # of chances too small to be exact
            warnings.simplefilter("ignore", RuntimeWarning)
            p = np.asarray(ks_2samp(before, now, axis=0).pvalue)
        p *= before.shape[1] * self.looks
        clear = [int(f) for f in np.argsort(p, kind="stable") if p[f] < LEVEL]
        of = clear if parts is None else parts[clear].tolist()
        names = tuple(dict.fromkeys(_part_name(f, self.again.dataset) for f in of))
        return {"value": float(min(p.min(), 1)), "alarm": bool(clear), "features": names}


def _sides(data: Dataset) -> tuple[int, int]:
    return min(SIDE, data.shape[1]), min(SIDE, data.shape[2])


def _by_part(values: NDArray[Any], data: Dataset) -> Values:
    """(n, F) inputs, or their maps: of images the mean of channels, on at most 8 × 8 parts."""
    if len(data.shape) == 3:
        images = values.reshape(len(values), -1, *data.shape[1:]).astype(np.float64).mean(axis=1)
        pooled = torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(images), _sides(data))
        return pooled.numpy().reshape(len(values), -1)
    return values.reshape(len(values), -1).astype(np.float64)


def _part_name(part: int, data: Dataset) -> str:
    if len(data.shape) == 3:
        high, wide = _sides(data)
        return f"part {part // wide + 1}, {part % wide + 1} of {high} × {wide}"
    return data.feature_names[part] if data.feature_names else f"entry {part + 1}"
