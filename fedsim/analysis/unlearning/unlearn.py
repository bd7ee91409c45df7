"""Make a finished run forget clients, and score the result beside the run that never had them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from fedsim.analysis.attacks.membership import insist_on_several
from fedsim.analysis.explanations import Wanted, explainer_of, problem_of
from fedsim.analysis.replay import ModelSnapshot, insist_on_client, replay
from fedsim.analysis.unlearning.forgetting import (
    Cost,
    Forgetting,
    Unlearning,
    arrived,
    classifies,
    unlearning,
)
from fedsim.analysis.unlearning.scores import Judge
from fedsim.config.arguments import checked
from fedsim.data import load_dataset
from fedsim.errors import BadInput, RunFolderError
from fedsim.explain.explainer import FeatureExplainer, refuse_unfit
from fedsim.federation import Without
from fedsim.launch.prepare import prepare
from fedsim.launch.progress import LineProgress
from fedsim.launch.run import planned
from fedsim.launch.without import experiment_without, folder_name, without
from fedsim.results.describe import weights_file
from fedsim.results.folder import FINAL_WEIGHTS, RunFolder
from fedsim.results.run import Run
from fedsim.results.verify import insist_on_finished
from fedsim.support import atomic
from fedsim.support.words import columns, duration, short, size

if TYPE_CHECKING:
    import pandas as pd

SCORES = "scores.json"
ORIGINAL, RETRAINED = "original", "retrained"
AMOUNTS: Mapping[str, Callable[[float], str]] = {
    "rounds": "{:.0f}".format,
    **dict.fromkeys(("bytes_up", "bytes_down", "stored"), size),
    "seconds": duration,
}


@dataclass(frozen=True)
class Unlearned:
    """A model that is to have forgotten clients.

    Attributes:
        run: the run that had them.
        retrained: the run that never had them, `fedsim.without`.
        method: how it was made to forget.
        clients: whom.
        path: folder of its weights (`weights/final.safetensors`, as of a run) and `scores.json`.
        arrays: its weights, by layer.
        scores: a row for each model: `original`, `retrained`, and the method's own; see
            `fedsim.unlearn` for the columns.
    """

    run: Run
    retrained: Run
    method: Unlearning
    clients: tuple[int, ...]
    path: Path
    arrays: Mapping[str, NDArray[Any]]
    scores: pd.DataFrame

    def weights(self) -> dict[str, Tensor]:
        """Its weights by layer, as of `Run.weights`."""
        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}

    def text(self) -> str:
        """The scores as `fedsim unlearn` prints them."""
        rows = []
        for name in self.scores.columns:
            if name.endswith(("_low", "_high")):
                continue
            shown = [_shown(name, row) for _, row in self.scores.iterrows()]
            rows.append((name, *shown))
        return columns(("", *self.scores.index), rows)

    def __repr__(self) -> str:
        who = "-".join(map(str, self.clients))
        return f"<{self.method.name} of clients {who} of {short(self.run.path)}>"


@checked
def unlearn(
    run: Run | str | Path,
    clients: int | Iterable[int],
    method: str | Mapping[str, Any] | Unlearning = "fed_eraser",
    *,
    explainer: Wanted | None = None,
    shadows: int = 0,
    progress: bool | Callable[[str], None] = True,
) -> Unlearned:
    """Make the global model of a finished run forget clients.

    It is scored beside the run's own model, and the one that is sought: that of the federation
    which the clients never joined (`fedsim.without`, made first if it is not there). Rounds of
    clients are those of the run's own engine, with its settings of training, and come out to the
    same bits on any number of actors. The result is written to the folder
    `unlearned/<method>-<clients>` in that of the run, in the place of an earlier one.

    Columns of the scores: `weights`, ‖w − w*‖/‖w*‖ with w* the retrained model's; `disagreement`,
    the share of test examples for which the two decide differently, and `kl`, the mean
    KL(p* ‖ p) of their predictions, both also for the training examples that were to be forgotten
    (`…_forgotten`; of objectives without classes `difference`, the root mean square);
    `explanations_rank`, `…_top_k` and `…_cosine`, how alike both models' relevance maps of 32 test
    examples are; the primary metric on the test set, and on the training examples of the others
    (`…_kept`) and of the forgotten (`…_forgotten`). `mia` is the AUC by which the loss tells the
    forgotten training examples from test examples, with an interval of 95 %; where clients' data
    differ from the test set, the retrained model's, which has never met them, is not 0.5 either.
    `lira` is the same by the likelihood-ratio attack, if `shadows` are asked for.
    `backdoor_success` of runs with such an attack. And the cost: `rounds`, `bytes_up`,
    `bytes_down`, bytes `stored` by the server during the run, and `seconds` of these rounds here.

    Args:
        run: a finished run, or its folder.
        clients: whom to forget.
        method: a name (`fedsim list unlearning`), a dict of name and hyper-parameters, or an
            object.
        explainer: whose maps are compared, as of `fedsim.explanations`; by default the run's usual
            one, if it gives maps.
        shadows: number of shadow models for LiRA (Carlini et al. 2022), 2 or more; 0 for none.
            Each trains centrally on all examples of the others and half of those that are told
            apart, for as many passes as the run made, which takes about the run's own time. As it
            knows nothing of unlearning, it asks whether the model looks trained on an example.
        progress: as of `fedsim.explanations`.

    Raises:
        BadInput: the run is not finished or damaged, or its data have changed; its method has no
            global network, or learns a sequence of tasks; there is no such client, it never took
            part, or nobody would be left; or the method or the explainer is not for the run.
        RunError: a round fails.

    Example:
        >>> found = fedsim.unlearn(folder, 3, {"name": "fine_tune", "rounds": 1}, progress=False)
        >>> found.scores.index.tolist()
        ['original', 'retrained', 'fine_tune']
    """
    import pandas as pd

    run, how = Run.of(run), method_of(method)
    run.result_hash  # noqa: B018  # raises if it is not finished
    insist_on_finished(RunFolder.open(run.path), "only whole runs can be made to forget")
    if shadows:
        insist_on_several(shadows)
    forgotten = tuple(sorted({clients} if isinstance(clients, int) else {*clients}))
    _check(run, forgotten)
    experiment = run.experiment
    chosen = explainer_of(run, explainer)
    maps = chosen if isinstance(chosen, FeatureExplainer) else None
    if maps is None and explainer is not None:
        raise BadInput(f"explainer={chosen.name}: gives no relevance maps to compare")
    loaded = load_dataset(experiment.data)
    prepare(experiment_without(experiment, forgotten), loaded)
    with LineProgress(progress) as tell:
        task = Forgetting(run, forgotten, replay(run, dataset=loaded), tell=tell)
        if task.again.splits.sequence is not None:
            raise RunFolderError(f"{run.path}: learns a sequence of tasks; there is no one model")
        held = task.again.splits.held(task.last).train
        for k in forgotten:
            if not len(held[k]):
                raise RunFolderError(f"{run.path}: client {k} holds no labelled training example")
        if shadows and not classifies(task.again):
            raise BadInput(
                f"shadows={shadows}: LiRA compares logits of true classes, which "
                f"objective.name={task.again.spec.objective.name} has not; take shadows=0"
            )
        how.check(task)
        if maps is not None:
            own = ModelSnapshot.of(run, again=task.again)
            refuse_unfit(maps, own.explained(), own.data())
        rounds = experiment.train.rounds

        def show(event: Any) -> None:
            ended = isinstance(event, dict)
            tell(f"[{event['round']}/{rounds}] rounds without {task.named}" if ended else event)

        retrained = without(run, forgotten, progress=show)
        task.further = how.further_rounds
        with planned(experiment, task.again.splits, task.again.spec, tell) as actors:
            task.actors = actors
            weights = how.forget(task)
        truth = unlearning.parse({"name": "retrain"})
        known = Forgetting(run, forgotten, task.again)
        models = {
            ORIGINAL: (task.weights, Cost()),
            RETRAINED: (truth.forget(known), known.cost),
            how.name: (weights, task.cost),
        }
        judge = Judge(task.again, forgotten, models[RETRAINED][0], maps, shadows, tell)
        rows = {name: judge.scores(w) | asdict(cost) for name, (w, cost) in models.items()}
    scores = pd.DataFrame.from_dict(rows, orient="index")
    path = run.path / "unlearned" / f"{how.name}-{folder_name(Without(clients=forgotten))}"
    state = replace(task.again.state, weights=weights)
    arrays = experiment.method.global_model(task.again.fed, state)
    found = Unlearned(run, retrained, how, forgotten, path, arrays, scores)
    _write(found, weights_file(task.again.fed, arrays))
    return found


def method_of(given: str | Mapping[str, Any] | Unlearning) -> Unlearning:
    """The unlearning method that is asked for."""
    content = {"name": given} if isinstance(given, str) else given
    try:
        found: Unlearning = unlearning.parse(content)
    except ValidationError as error:
        raise BadInput(f"method: {problem_of(error)}") from None
    return found


def _check(run: Run, clients: tuple[int, ...]) -> None:
    experiment, method = run.experiment, run.experiment.method
    if not clients:
        raise BadInput("clients: name one or several")
    for k in clients:
        insist_on_client(run, k)
    why, model = "", experiment.model
    if not model.builds_network:
        why = f"model.name={model.name} is a {model.kind}; only networks unlearn here"
    elif not method.has_global_model:
        why = f"method.name={method.name} has no global model that could forget"
    elif not method.exchanges_models:
        why = f"method.name={method.name}: clients send no models that could be forgotten"
    elif len(clients) == len(run.client_ids):
        why = "clients: nobody would be left; keep one"
    if why:
        raise RunFolderError(f"{run.path}: {why}")
    took_part = set() if run.clients.empty else set(arrived(run)["client"])
    for k in clients:
        if k not in took_part:
            raise RunFolderError(f"{run.path}: client {k} never took part: nothing is to forget")


def _shown(name: str, row: pd.Series[float]) -> str:
    value = float(row[name])
    if math.isnan(value):
        return "–"
    if name in AMOUNTS:
        return AMOUNTS[name](value) if value else "–"
    low, high = (row.get(f"{name}_{end}", math.nan) for end in ("low", "high"))
    if not math.isnan(low):
        return f"{value:.3f} [{low:.3f}, {high:.3f}]"
    return f"{value:.4f}"


def _write(found: Unlearned, weights: bytes) -> None:
    content = {
        "run": found.run.result_hash,
        "without": found.retrained.result_hash,
        "clients": list(found.clients),
        "method": found.method.model_dump(mode="json"),
        "scores": json.loads(found.scores.to_json(orient="index", double_precision=15)),
    }
    file = found.path / FINAL_WEIGHTS
    with RunFolder.open(found.run.path).writing():
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write(file, weights)
        atomic.write(found.path / SCORES, json.dumps(content, indent=2).encode())
