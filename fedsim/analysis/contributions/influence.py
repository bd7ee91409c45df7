"""Which clients made a model decide so about one input.

The influence of client k on an output f of the last global model, such as the logit of the class
that it predicts, is f(w) − f(w without k): exact, by the run that client k never joined (see
`fedsim.without`), and estimated from the updates of one run, along the path of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.analysis.contributions.updates import updates_of
from fedsim.analysis.explanations import Wanted, drawn_to, explainer_of
from fedsim.analysis.replay import ModelSnapshot, Replay, as_errors
from fedsim.config.arguments import checked
from fedsim.data import Dataset, load_dataset
from fedsim.errors import BadInput
from fedsim.explain.explainer import FeatureExplainer, refuse_unfit
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import AGAINST, FOR, plain
from fedsim.explain.pictures.images import as_pixels
from fedsim.explain.pictures.strips import draw_strip
from fedsim.explain.scores.faithfulness import present
from fedsim.explain.scores.measure import relevances_of, similarity
from fedsim.explain.scores.relevance import rank_correlation
from fedsim.explain.section import map_shape
from fedsim.launch.progress import LineProgress
from fedsim.launch.without import alternative, experiment_without, whole
from fedsim.results.run import Run
from fedsim.support.words import client_name, short

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Map = NDArray[np.float64]


@dataclass(frozen=True)
class Influence:
    """The influence of each client on the global model's decision on one input.

    Attributes:
        run: the run.
        row: the input's index in the central test set.
        decision: the class that is predicted; empty for a regression.
        output: its logit, or the regression's output.
        clients: a row per client: `client`; `influence`, by how much the output falls if the
            client never joins; `estimate`, the same from the run's updates, if these can be told;
            `decision`, the class that is predicted then; and `agreement`, Spearman's correlation
            of the maps that explain `decision` with and without the client.
        maps: (P,) the relevance map with all clients (None), and without each.
        dataset: the data as clients hold them.
        x: the input, as the data set has it.
        explainer: what made the maps.
    """

    run: Run
    row: int
    decision: str
    output: float
    clients: pd.DataFrame
    maps: dict[int | None, Map]
    dataset: Dataset
    x: NDArray[Any]
    explainer: str

    @property
    def heaviest(self) -> int:
        """The client without which the output changes most."""
        sizes = self.clients["influence"].abs().to_numpy()
        return int(self.clients["client"].to_numpy()[sizes.argmax()])

    def text(self) -> str:
        """The clients as `fedsim influence` prints them, the heaviest first."""
        names = self.run.manifest.get("client_names", ())
        what = f"{self.decision}, logit" if self.decision else "output"
        lines = [f"row {self.row}: {what} {self.output:.4g}; its drop without each client:"]
        order = self.clients["influence"].abs().sort_values(ascending=False, kind="stable").index
        wide = max(len(client_name(k, names)) for k in self.clients["client"])
        for one in self.clients.loc[order].to_dict("records"):
            told = f"  {client_name(int(one['client']), names):{wide}} {one['influence']:+.4f}"
            if "estimate" in one:
                told += f" (estimate {one['estimate']:+.4f})"
            told += f", explanation ρ {one['agreement']:.2f}"
            if one["decision"] != self.decision:
                told += f", and {one['decision']} is predicted"
            lines.append(told)
        return "\n".join(lines)

    def save(self, folder: str | Path | None = None) -> list[Path]:
        """Draw the clients as bars, and the maps with all clients and without the heaviest.

        Args:
            folder: where to, created if missing, or a file (.png, .pdf, .svg, .jpg, …); by
                default `explanations` in the run's folder, whose pictures `fedsim report` shows.

        Returns:
            The path of the picture.

        Raises:
            OSError: it cannot be written.
        """
        path = drawn_to(self.run, folder, f"influence-{self.explainer}-row-{self.row}")
        names = self.run.manifest.get("client_names", ())
        who = client_name(self.heaviest, names)
        other = str(self.clients.set_index("client").loc[self.heaviest, "decision"])
        shape = map_shape(self.dataset)
        maps = [self.maps[None], self.maps[self.heaviest]]
        images, words = len(self.dataset.shape) == 3, bool(self.dataset.words)
        count = int((self.x != 0).sum()) if words else len(self.x.reshape(-1))
        height = 0.5 + 0.18 * len(self.clients)
        bars = partial(draw_influence, table=self.clients, names=names, what=self.what)
        draw_strip(
            np.stack([own.reshape(shape) for own in maps])[None],
            ["with all clients", f"without {who}"],
            [f"relevance for {self.decision}" if self.decision else "relevance"],
            [[self.decision or f"{self.output:.3g}", other or self._without(self.heaviest)]],
            path,
            f"Whose doing is the decision on row {self.row}? ({self.explainer})",
            what="class" if self.decision else "value",
            image=as_pixels(self.x[None], self.dataset)[0] if images else None,
            parts=() if images else self._parts(count),
            words=words,
            above=(height, bars),
        )
        return [path]

    @property
    def what(self) -> str:
        """The output in words."""
        return f"logit of {self.decision}" if self.decision else "output"

    def _without(self, k: int) -> str:
        lost = self.clients.set_index("client")["influence"][k]
        return f"{self.output - lost:.3g}"

    def _parts(self, count: int) -> tuple[str, ...]:
        if self.dataset.words:
            return tuple(self.dataset.words[i] for i in self.x[:count])
        return self.dataset.feature_names or tuple(map(str, range(count)))

    def __repr__(self) -> str:
        return f"<influence of clients on row {self.row} of {short(self.run.path)}>"


@checked
def influence(
    run: Run | str | Path,
    row: int,
    explainer: Wanted | None = None,
    *,
    estimate: bool = True,
    budget: int = 100,
    progress: bool | Callable[[str], None] = True,
) -> Influence:
    """The influence of each client on the global model's decision on one input.

    The run without each client is made, and kept in the run's folder (`without/`).

    Args:
        run: a finished run, or its folder.
        row: index of an example of the central test set.
        explainer: as of `fedsim.explanations`; one that assigns a number to each part of an input.
        estimate: also estimate influence from the run's updates, where its server averages what
            clients train.
        budget: most runs that may have to be made for it, one for each client.
        progress: as of `fedsim.explanations`.

    Raises:
        BadInput: the run is not finished, has no global network or no such row; the explainer
            does not apply; or the experiment cannot do without a client.
        RunError: a run fails; asking again continues it.

    Example:
        >>> import fedsim
        >>> found = fedsim.influence(folder, 3)
        >>> found.clients.columns.tolist()
        ['client', 'influence', 'estimate', 'decision', 'agreement']
    """
    import pandas as pd

    run = Run.of(run)
    chosen = explainer_of(run, explainer)
    if not isinstance(chosen, FeatureExplainer):
        raise BadInput(
            f"explainer {chosen.label} does not assign a number to each part of an input, so that "
            "explanations cannot be compared"
        )
    if not (run.experiment.model.builds_network and run.experiment.method.has_global_model):
        raise BadInput(
            f"{run.path}: method.name={run.experiment.method.name} has no global network, whose "
            "decisions clients could influence"
        )
    ids, section = run.client_ids, run.experiment.without
    if section is not None and section.replace:
        raise BadInput(
            f"{run.path}: without.replace=true: others would take a client's places; take a run "
            "whose places stay empty"
        )
    if not 1 < len(ids) <= budget:
        raise BadInput(
            f"{run.path}: has {len(ids)} clients, and influence makes the run without each; it "
            f"needs two at least, and budget={budget} allows {budget}"
        )
    dataset = load_dataset(run.experiment.data)
    with LineProgress(progress) as tell:
        known = _Decision.of(run, dataset, row, chosen)
        estimates = _estimated(run, known, tell) if estimate else None
        rows = list[dict[str, Any]]()
        maps: dict[int | None, Map] = {None: known.map}
        folder = whole(run)
        for k in ids:
            tell(f"the run without client {k}")
            less = alternative(folder, experiment_without(run.experiment, k), loaded=dataset)
            other = _Decision.of(less, dataset, row, chosen, known.label)
            maps[k] = other.map
            both = known.map[None], other.map[None]
            alike = similarity(rank_correlation, known.there, *both)
            rows.append(
                {
                    "client": k,
                    "influence": known.output - other.output,
                    **({} if estimates is None else {"estimate": estimates.get(k, 0.0)}),
                    "decision": other.decision,
                    "agreement": float(alike[0]),
                }
            )
    found = known.snapshot.dataset
    table = pd.DataFrame(rows)
    about = known.decision, known.output, table, maps, found, found.test_x[row]
    return Influence(run, row, *about, chosen.label)


@dataclass(frozen=True)
class _Decision:
    """A model's decision on an input, and the explanation of one class."""

    snapshot: ModelSnapshot
    x: Tensor
    label: int
    decision: str
    output: float
    map: Map

    @property
    def there(self) -> NDArray[np.bool_]:
        """(1, P) which parts the input has."""
        return present(self.x, self.snapshot.dataset.parts)

    @classmethod
    def of(
        cls,
        run: Run,
        dataset: Dataset,
        row: int,
        explainer: FeatureExplainer,
        label: int | None = None,
    ) -> _Decision:
        """Of a run's last global model; of the class `label`, by default the one predicted."""
        snapshot = ModelSnapshot.of(run, dataset=dataset)
        data, model = snapshot.data(), snapshot.explained()
        refuse_unfit(explainer, model, data)
        inputs = Inputs.of_rows(snapshot.dataset, [row])
        x = data.prepare(inputs.x)
        with torch.no_grad():
            outputs = snapshot.network()(x)[0]
        predicted = int(outputs.argmax()) if snapshot.dataset.classes else 0
        chosen = predicted if label is None else label
        rng = explainer.rng(model.seed, model.client)
        with as_errors(explainer):
            maps = relevances_of(explainer, model, data, x, torch.tensor([chosen]), rng)
        name = snapshot.dataset.classes[predicted] if snapshot.dataset.classes else ""
        return cls(snapshot, x, chosen, name, float(outputs.reshape(-1)[chosen]), maps[0])


def _estimated(run: Run, known: _Decision, tell: Callable[[str], None]) -> dict[int, float] | None:
    """Σ_t ∇f(w_t)·(Δ_t − Δ_t without k), a first-order estimate in each round.

    Δ_t is the mean of the cohort's changes, which without client k is that of the others. In the
    spirit of TracIn (Pruthi et al., NeurIPS 2020), which sums over steps what examples, here
    clients, change. None if the server does something else than average.
    """
    found: dict[int, float] = {}
    try:
        for round, again in updates_of(run, tell):
            slope = _slope(again, round.before, known)
            whole = slope @ round.change(round.cohort)
            for k in round.cohort:
                others = [j for j in round.cohort if j != k]
                rest = slope @ round.change(others) if others else 0.0
                found[k] = found.get(k, 0.0) + float(whole - rest)
    except BadInput as refusal:
        tell(f"no estimate: {str(refusal).partition(';')[0]}")
        return None
    return found


def _slope(again: Replay, weights: NDArray[np.float32], known: _Decision) -> Map:
    """(size,) the gradient of the output by the weights; 0 for buffers."""
    model = again.fed.server.model
    model.load(again.fed.server.tensor(weights))
    model.module.eval()
    parameters = dict(model.module.named_parameters())
    output = model.module(known.x)[0].reshape(-1)[known.label]
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(output, list(trained.values()), allow_unused=True)
    by_name = dict(zip(trained, gradients, strict=True))
    found = np.zeros(model.size)
    for name, place in model.named(torch.arange(model.size)).items():
        if (gradient := by_name.get(name)) is not None:
            found[place.reshape(-1).numpy()] = gradient.detach().cpu().numpy().reshape(-1)
    return found


def draw_influence(axes: Axes, *, table: pd.DataFrame, names: Sequence[str], what: str) -> None:
    """Draw a bar for each client, the heaviest first, and the estimates as marks."""
    order = table["influence"].abs().sort_values(kind="stable").index
    rows, places = table.loc[order], range(len(table))
    colours = [FOR if value > 0 else AGAINST for value in rows["influence"]]
    axes.barh(places, rows["influence"], color=colours, height=0.7)
    if "estimate" in rows:
        axes.plot(rows["estimate"], places, "|", color="black", markersize=9, label="estimate")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=7, frameon=False)
    axes.axvline(0, color="black", linewidth=0.6)
    who = [plain(client_name(int(k), names)) for k in rows["client"]]
    axes.set_yticks(places, who, fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set_xlabel(f"by how much the {what} falls without the client", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
