"""Explanations of a finished run's models, or of the run as a whole."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedsim.analysis.replay import (
    ModelSnapshot,
    Replay,
    Whose,
    common_round,
    explain_run,
    insist_on_client,
    insist_on_round,
    usual_inputs,
    whose_models,
)
from fedsim.analysis.strips import MOST_ROUNDS, spread, strip_of
from fedsim.config.arguments import checked
from fedsim.config.file import from_yaml
from fedsim.config.registry import first_line, nearest
from fedsim.data import Dataset, load_dataset
from fedsim.data.labels import picture_format
from fedsim.errors import BadInput, ExperimentError, FedsimWarning
from fedsim.explain import Explainer, Explanation
from fedsim.explain.explainer import FeatureExplainer
from fedsim.explain.explainers import explainers
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import as_html, drawing_as, picture
from fedsim.launch.prepare import dealt
from fedsim.launch.progress import LineProgress
from fedsim.results.run import Run
from fedsim.support import atomic

if TYPE_CHECKING:
    import pandas as pd

Numbers = int | Sequence[int]
Clients = int | str | Sequence[int | str]
Wanted = str | Mapping[str, Any] | Explainer


@dataclass(frozen=True)
class Explanations:
    """Explanations of models of a run, or of the run as a whole.

    An iterable of `fedsim.explain.Explanation`, one for each model. Notebooks display it.

    Args:
        run: the run.
        found: the explanations.
        about: for each explanation the columns `round`, `client` (None for the global model) and
            `explainer`; empty for the run as a whole.
        notes: remarks on how the inputs were read, one line each.
    """

    run: Run
    found: tuple[Explanation, ...]
    about: tuple[Mapping[str, Any], ...]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Explanation]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, k: int) -> Explanation:
        return self.found[k]

    def __repr__(self) -> str:
        return f"<{len(self)} explanation{'s' * (len(self) != 1)} of {self.run.path}>"

    def text(self) -> str:
        """The explanations as text, as `fedsim explain` prints them."""
        notes = ["\n".join(self.notes)] if self.notes else []
        return "\n\n".join([*notes, *(each.text() for each in self.found)])

    @property
    def frame(self) -> pd.DataFrame:
        """One row per explained input, rule or other unit of the explanation.

        Columns: `round`, `client` and `explainer` (unless the run is explained as a whole), and
        the explainer's own. Attributions have `input`, `decision`, `probability`, `label`, and the
        parts of the input that matter most to the decision.
        """
        import pandas as pd

        both = zip(self.about, self.found, strict=True)
        return pd.DataFrame([{**about, **row} for about, each in both for row in each.rows()])

    def save(self, folder: str | Path | None = None) -> list[Path]:
        """Draw the pictures.

        Args:
            folder: folder to write to, created if missing; or a file (.png, .pdf, .svg, .jpg,
                …), whose name is the beginning of the names if there are several pictures. By
                default `explanations` in the run's folder, whose pictures `fedsim report` shows.

        Returns:
            The paths of the pictures, named like `occlusion-client-3-round-7-row-0.png`.

        Raises:
            BadInput: pictures cannot have the file's format.
            OSError: they cannot be written.
        """
        where = self.run.path / "explanations" if folder is None else Path(folder)
        ending = file_format(where)
        if not ending:
            where.mkdir(parents=True, exist_ok=True)
            return [path for each in self.found for path in each.save(where)]
        where.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory() as aside, drawing_as(ending):
            drawn = [path for each in self.found for path in each.save(Path(aside))]
            targets = [where]
            if len(drawn) > 1:
                targets = [where.with_name(f"{where.stem}-{path.name}") for path in drawn]
            for path, target in zip(drawn, targets, strict=True):
                with atomic.named(target) as part:
                    shutil.copyfile(path, part)
            return targets

    def _repr_html_(self) -> str:
        with TemporaryDirectory() as folder:
            return as_html(self.text(), self.save(folder), self.frame)


def file_format(where: Path) -> str:
    return picture_format(where) if where.suffix and not where.is_dir() else ""


def drawn_to(run: Run, folder: str | Path | None, name: str) -> Path:
    """Where the only picture of a result goes: a file, or one of that name in a folder.

    The folder is made; by default it is `explanations` in the run's.
    """
    where = run.path / "explanations" if folder is None else Path(folder)
    ending = file_format(where)
    (where.parent if ending else where).mkdir(parents=True, exist_ok=True)
    return where if ending else picture(where, name)


@checked
def explanations(
    run: Run | str | Path,
    explainer: Wanted | None = None,
    *,
    client: Clients | None = None,
    after: Numbers | None = None,
    of: Whose | None = None,
    row: Numbers | None = None,
    input: str | Path | Inputs | None = None,
    text: str | None = None,
    settings: Mapping[str, Any] | None = None,
    check: bool = False,
    strip: bool = False,
    progress: bool | Callable[[str], None] = True,
) -> Explanations:
    """Explain the global model or clients' models of a finished run, after any round.

    The models of the last round are read from the run's folder. Models of earlier rounds, and
    models that clients did not keep, are recomputed: rounds are repeated from the latest
    checkpoint before them. Without further arguments, the run is explained as a whole if its
    method or partition has an explainer for that, else the last global model is explained.

    Args:
        run: a finished run, or its folder.
        explainer: a name (`fedsim list explainers`), `package.module:Name` of your own, either of
            them with settings (`"occlusion: {size: 1}"`, or `{"name": "occlusion", "size": 1}`),
            or an Explainer. By default the explainer that suits the run's method or model.
            Settings that are not given are those of the run's `explain` section, if it is there.
        client: client, or sequence of clients, whose model is explained (for explanations of a
            whole run: the clients to show), by number, or by name if the data name them
            (hospitals). By default the global model.
        after: round, or sequence of rounds, after which the model is explained; by default the
            last. Rounds are repeated once, for all of them.
        of: which of a client's models: `cohort`, as it was trained and sent; or `personal`, with
            which it predicts, the default of methods with personal models.
        row: row, or sequence of rows, of the central test set, counted from 0, whose prediction is
            explained. By default a few rows spread over the test set.
        input: a file, or a folder of pictures, whose predictions are explained instead (see
            `Inputs.of_file`); or inputs built from arrays (`Inputs.of_arrays`).
        text: a document whose prediction is explained instead.
        settings: fields of the explainer to override.
        check: instead of explaining, tell whether the explainer's maps depend on the network's
            weights: how alike they are to those of the network as its layers, from the top, get
            random weights; see `fedsim.explain.sanity.check`.
        strip: put the explanations of one input side by side: a line for the global model and for
            each client, a column for each round, by default 6 spread over the run; see
            `fedsim.analysis.strips.Strip`.
        progress: True shows a progress bar of the repeated rounds in a terminal or a notebook,
            False shows nothing. A function is called with a line for each round.

    Returns:
        One explanation per model: see `text()`, `frame`, and `save()` for the pictures.

    Raises:
        BadInput: the run is not finished, its data has changed, there is no such round, client,
            row or explainer, the explainer does not apply, or a file cannot be read.

    Example:
        >>> import fedsim
        >>> run = fedsim.load(folder)
        >>> found = fedsim.explanations(run, "occlusion", client=3, after=1, row=[0, 7])
        >>> found.frame[["round", "client", "input"]].to_dict("records")
        [{'round': 1, 'client': 3, 'input': 'row 0'}, {'round': 1, 'client': 3, 'input': 'row 7'}]
        >>> [path.name for path in found.save(folder / "pictures")]
        ['occlusion-client-3-round-1-rows-0-7.png']
    """
    run = Run.of(run)
    clients, times, rows = _clients(run, client), _several(after), _several(row)
    ways = sum(way is not None for way in (input, text, rows or None))
    if ways > 1:
        raise BadInput("give only one of row, input and text")
    chosen, experiment = None, run.experiment
    if explainer is None and not times and not ways and of is None and not check:
        chosen = experiment.method.overview()
        if chosen is None and experiment.partition.overview is not None:
            chosen = explainers.parse({"name": experiment.partition.overview})
        if chosen is not None and clients and not chosen.takes_clients:
            chosen = None
    chosen = _with(chosen or explainer_of(run, explainer), settings or {})
    if ways and not chosen.takes_inputs and not check:
        what = first_line(type(chosen))
        raise BadInput(
            f"row, input and text select inputs, but explainer {chosen.name} takes none: "
            f"{what[:1].lower()}{what[1:]}"
        )
    if check and strip:
        raise BadInput("strip: give only one of strip and check")
    if strip and not ways:
        raise BadInput("strip: follows one input; name a row, an input or a text")
    none = f"maps of relevance, and explainer {chosen.name} gives none"
    if (check or strip) and not isinstance(chosen, FeatureExplainer):
        raise BadInput(f"check compares {none}" if check else f"strip: draws {none}")
    if chosen.whole_run:
        if times or of or (clients and not chosen.takes_clients):
            which = "round" if times else "client"
            raise BadInput(f"explainer {chosen.name} explains the run as a whole, not one {which}")
        return Explanations(run, (explain_run(run, chosen, clients),), ({},))
    run.result_hash  # noqa: B018  # raises if it is not finished
    cohort = (of or whose_models(run)) == "cohort"
    for k in clients:
        insist_on_client(run, k)
    for t in times:
        if t or clients:  # the global model has a start, 0
            insist_on_round(run, t)
        if clients and cohort:
            common_round(run, clients, t)
    dataset = load_dataset(run.experiment.data)
    inputs = chosen_inputs(dealt(run.experiment, dataset)[0], chosen, rows, input, text, check)
    if strip:
        if len(inputs.names) != 1:
            raise BadInput(f"strip: follows one input, not {len(inputs.names)}")
        times = times or spread(run, clients if cohort else [])
        if len(set(times)) > MOST_ROUNDS:
            raise BadInput(f"strip: at most {MOST_ROUNDS} rounds, not {len(set(times))}")
    found, about = [], []
    again: Replay | None = None
    asked: list[int | None] = [*sorted(set(times))] or [None]  # a replay goes forward
    with LineProgress(progress) as tell:
        for t in asked:
            last = t or run.last_round

            def on_round(k: int, last: int = last) -> None:
                tell(f"[{k}/{last}] recomputing round {k}")

            trained = run.clients
            if t is not None and not trained.empty:
                trained = trained[trained["round"] <= t]
            whose = clients or ([] if explainer else experiment.method.explained_clients(trained))
            models: list[ModelSnapshot] = []
            if whose:
                models = ModelSnapshot.of_clients(run, whose, t, on_round, dataset, of, again)
                again = models[0].again
            if not whose or (strip and experiment.method.has_global_model):
                kind = None if whose else of
                models.insert(0, ModelSnapshot.of(run, None, t, on_round, dataset, kind, again))
                again = models[0].again
            for model in models:
                explain = model.check if check else model.explain
                found.append(explain(chosen, inputs))
                if strip and found[-1].attributed is None:
                    raise BadInput(f"strip: draws {none}")
                when: dict[str, Any] = {"round": model.again.after, "client": model.client}
                if model.client is not None and run.manifest.get("client_names"):
                    when["client_name"] = run.client_name(model.client)
                about.append({**when, "explainer": chosen.label})
    if strip:
        whose_maps = {
            (when["client"], when["round"]): one for when, one in zip(about, found, strict=True)
        }
        found, about = [strip_of(run, chosen, whose_maps, of)], [{"explainer": chosen.label}]
    elif len(found) > 1:
        found = [each.beside(found) for each in found]
    return Explanations(run, tuple(found), tuple(about), inputs.notes)


def _clients(run: Run, given: Clients | None) -> list[int]:
    names: list[str] = run.manifest.get("client_names", [])
    found = []
    for one in [given] if isinstance(given, str) else _several(given):
        if one in names:
            found.append(names.index(str(one)))
        elif isinstance(one, str) and not one.isdecimal():
            hint = nearest(one, names) if names else "; here clients have numbers, not names"
            raise BadInput(f"there is no client '{one}'{hint}")
        else:
            found.append(int(one))
            other = next((name for name in names if name.endswith(f" {int(one)}")), None)
            if 0 <= found[-1] < len(names) and other not in (None, names[found[-1]]):
                warnings.warn(
                    f"client {one}, counted from 0, is {names[found[-1]]}; for the other write "
                    f"client '{other}'",
                    FedsimWarning,
                    stacklevel=2,
                )
    return found


def _several(numbers: Any) -> list[Any]:
    if numbers is None:
        return []
    return [*numbers] if isinstance(numbers, Iterable) else [numbers]


def explainer_of(run: Run, wanted: Wanted | None) -> Explainer:
    """The explainer that is wanted, by default the run's usual one, with the run's settings."""
    experiment, section = run.experiment, run.experiment.explain
    usual: Explainer = experiment.method.explainer() or explainers.parse(
        {"name": experiment.model.explainer}
    )
    own = (usual, *(section.explainers if section else ()))
    return find_explainer(usual.name if wanted is None else wanted, own)


def find_explainer(wanted: Wanted, own: Iterable[Explainer] = ()) -> Explainer:
    """The explainer that a user asks for."""
    if isinstance(wanted, Explainer):
        return wanted
    name, settings = _parsed(wanted)
    of_run = {each.label: each for each in own}
    if name in of_run:
        return _with(of_run[name], settings)
    known = [known for known, _ in explainers.items()]
    if name not in known and ":" not in name:  # a colon names a user's explainer
        raise BadInput(f"there is no explainer '{name}'{nearest(name, known)}")
    try:
        found = _with(explainers.parse({"name": name}), settings)
    except ValidationError as error:
        raise BadInput(f"explainer {name}: {problem_of(error)}") from None
    return _with(of_run[found.label], settings) if found.label in of_run else found


def _parsed(wanted: str | Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    given: Any = wanted
    if isinstance(wanted, str):
        try:
            given = from_yaml(wanted)
        except ExperimentError:
            given = None
    if isinstance(given, str):
        return given, {}
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        return given["name"], {str(key): value for key, value in given.items() if key != "name"}
    if isinstance(given, Mapping) and len(given) == 1:
        ((name, settings),) = given.items()
        if isinstance(settings, Mapping | None):
            return str(name), {str(key): value for key, value in (settings or {}).items()}
    raise BadInput(
        f"explainer '{wanted}': write a name, or a name with settings: 'occlusion: {{size: 1}}'"
    )


def problem_of(error: ValidationError) -> str:
    """The first problem of settings, as a line."""
    first = error.errors()[0]
    what = first["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    return ": ".join(filter(None, (".".join(map(str, first["loc"])), what)))


def _with(explainer: Explainer, settings: Mapping[str, Any]) -> Explainer:
    known = type(explainer).model_fields
    for key in settings:
        if key not in known:
            raise BadInput(
                f"{key} is not a setting of explainer {explainer.name}{nearest(key, known)}"
            )
    try:
        return type(explainer).model_validate({**dict(explainer), **settings})
    except ValidationError as error:
        raise BadInput(f"explainer {explainer.name}: {problem_of(error)}") from None


def chosen_inputs(
    dataset: Dataset,
    explainer: Explainer,
    rows: Sequence[int],
    given: str | Path | Inputs | None,
    text: str | None,
    check: bool = False,
) -> Inputs:
    """The inputs that are named by rows, a file or a text; else some of the test set."""
    if isinstance(given, Inputs):
        return given
    if given is not None:
        return Inputs.of_file(dataset, Path(given))
    if text is not None:
        return Inputs.of_texts(dataset, [text], ["text"])
    return Inputs.of_rows(dataset, rows) if rows else usual_inputs(explainer, dataset, check)
