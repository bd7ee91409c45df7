"""Decisions of a run's models on one input, explained side by side, and the test set's inputs."""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsim.analysis.explanations import chosen_inputs, explainer_of
from fedsim.analysis.replay import (
    ClientModel,
    ModelSnapshot,
    Replay,
    Whose,
    insist_on_personal,
    noted,
    replay,
    trained_rounds,
    whose_models,
)
from fedsim.analysis.strips import Strip, alike, strip_of
from fedsim.data import Dataset, load_dataset
from fedsim.errors import BadInput
from fedsim.explain import Explainer, Explanation
from fedsim.explain.explainer import FeatureExplainer
from fedsim.explain.explainers.attributed import Attributed
from fedsim.explain.inputs import Inputs
from fedsim.explain.pictures.canvas import alt_of, drawing_as
from fedsim.explain.pictures.images import as_pixels
from fedsim.explain.scores.faithfulness import arranged
from fedsim.explain.scores.measure import ExplainedInputs, measure
from fedsim.explain.section import SCORES, Explain
from fedsim.launch.prepare import dealt
from fedsim.results.folder import RunFolder
from fedsim.results.run import Run

ROOM = 512 * 10**6  # bytes of models that are kept
MOST_CLIENTS = 4  # beside the global model
Tell = Callable[[str], None]
Where = tuple[int, int | None]  # a round, and a client; None for the global model
Found = dict[Where, tuple[ModelSnapshot, Explanation]]
# What a table calls the entries of a strip's rows.
_WORDS = {
    **{name: name for name in ("model", "round", "decision", "probability", "label")},
    "largest": "largest relevance",
    "half": "half of it in",
    "for": "for it",
    "against": "against it",
    "like_last": "like the last",
}


@dataclass(frozen=True)
class Asked:
    """Whose decision on which input is to be explained, and by what.

    Args:
        run: its folder.
        rounds: one, or two to compare.
        clients: whose models are shown beside the global one.
        of: which of their models, see `client_models`; None for the usual one.
        explainer: a name, with settings if wanted.
        row: of the test set, unless `input`, a file, or `text` is given.
    """

    run: str
    rounds: tuple[int, ...]
    clients: tuple[int, ...]
    of: Whose | None
    explainer: str
    row: int = 0
    input: str = ""
    text: str = ""

    @property
    def inputs(self) -> dict[str, Any]:
        """The arguments of `fedsim.explanations` that name the input."""
        if self.input:
            return {"input": self.input}
        return {"text": self.text} if self.text else {"row": self.row}


@dataclass(frozen=True)
class Drawn:
    """An SVG, and what it shows in words."""

    svg: str
    alt: str


@dataclass(frozen=True)
class Shown:
    """An explanation of one model, or why there is none.

    Args:
        title: which model, in which round.
        text: as `fedsim explain` prints it.
        pictures: empty if all are maps, which are in one picture.
    """

    title: str
    text: str = ""
    why: str = ""
    pictures: tuple[Drawn, ...] = ()


@dataclass(frozen=True)
class Seen:
    """The answer to what was asked.

    Args:
        shown: by round, the global model before the clients'.
        picture: all maps side by side, and their differences; None if they are no maps.
        scores: a row for each map.
        numbers: a row for each part of the input and a column for each map.
        notes: remarks on how the input was read.
        clients: those whose models there are in all rounds.
        everybodys: whether there is a global model.
        takes_inputs: whether the explainer explains single predictions.
        strip: whether `fedsim explain --strip` makes the picture.
    """

    shown: tuple[Shown, ...]
    picture: Drawn | None
    scores: pd.DataFrame
    numbers: pd.DataFrame
    notes: tuple[str, ...]
    clients: tuple[int, ...]
    everybodys: bool
    takes_inputs: bool
    strip: bool


@dataclass(frozen=True)
class Rows:
    """Some rows of the test set, and whether they are documents, of `count` in all."""

    shown: tuple[Thumbnail, ...]
    documents: bool
    count: int


@dataclass(frozen=True)
class Thumbnail:
    """A row of the test set, as a small PNG of an image, or in words."""

    row: int
    label: str
    png: bytes = b""
    words: str = ""


class Decisions:
    """Makes models of one run again and explains them; keeps them as long as there is room."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._again: Replay | None = None
        self._kept: OrderedDict[tuple[Where, str], tuple[ModelSnapshot, int]] = OrderedDict()

    @cached_property
    def _loaded(self) -> Dataset:
        return load_dataset(self.run.experiment.data)

    @cached_property
    def dataset(self) -> Dataset:
        """The run's data, as its models were tested."""
        return dealt(self.run.experiment, self._loaded)[0]

    def seen(self, asked: Asked, tell: Tell) -> Seen:
        """Explain what is asked for.

        Args:
            tell: called with what is being done, now and then. It may raise to stop that.

        Raises:
            BadInput: see `fedsim.explanations`.
        """
        explainer = explainer_of(self.run, asked.explainer)
        found, inputs = self._explained(asked, explainer, tell)
        tell("drawing")
        clients = [k for k in asked.clients if all((t, k) in found for t in asked.rounds)]
        about: dict[str, Any] = {
            "notes": () if inputs is None else inputs.notes,
            "clients": tuple(clients),
            "everybodys": any(k is None for _, k in found),
            "takes_inputs": explainer.takes_inputs,
        }
        if not _are_maps(found):
            shown = [self._shown(where, found.get(where), asked) for where in self._places(asked)]
            nothing = pd.DataFrame()
            return Seen(tuple(shown), None, nothing, nothing, strip=False, **about)
        strip = self._strip(asked, explainer, found)
        with TemporaryDirectory() as folder, drawing_as("svg"):
            (path,) = strip.save(Path(folder))
            picture = Drawn(path.read_text(encoding="utf-8"), alt_of(path))
        told = tuple(Shown(_title(one), one.text()) for _, one in found.values())
        scores = pd.DataFrame(self._scores(explainer, strip, found, inputs))
        by_command = isinstance(explainer, FeatureExplainer)
        return Seen(told, picture, scores, _numbers(strip), strip=by_command, **about)

    def picture(self, asked: Asked, ending: str, tell: Tell) -> bytes:
        """The picture of all maps, as `png` or `svg`."""
        explainer = explainer_of(self.run, asked.explainer)
        found, _ = self._explained(asked, explainer, tell)
        if not _are_maps(found):
            raise BadInput(f"explainer {explainer.label} gives no maps of relevance to draw")
        with TemporaryDirectory() as folder, drawing_as(ending):
            (path,) = self._strip(asked, explainer, found).save(Path(folder))
            return path.read_bytes()

    def _strip(self, asked: Asked, explainer: Explainer, found: Found) -> Strip:
        maps = {(k, t): one for (t, k), (_, one) in found.items()}
        why = {
            (k, t): self._why(t, k, asked.of)
            for t, k in self._places(asked)
            if (t, k) not in found
        }
        return strip_of(self.run, explainer, maps, asked.of, why)

    def rows(self, first: int, count: int, tell: Tell) -> Rows:
        """Rows of the test set from `first` on."""
        tell("loading the data")
        data = self.dataset
        rows = [*range(first, min(first + count, len(data.test_y)))]
        inputs = Inputs.of_rows(data, rows)
        found = []
        for n, row in enumerate(rows):
            png, words = b"", ""
            if len(data.shape) == 3:
                png = _png(as_pixels(inputs.x[n : n + 1], data)[0])
            elif data.words:
                words = " ".join(inputs.words[n])
            elif len(data.shape) == 1:
                told = inputs.shown(data, n) if data.encoding else data.scaling.undo(inputs.x[n])
                words = ", ".join(one if isinstance(one, str) else f"{one:.3g}" for one in told)
            found.append(Thumbnail(row, inputs.labels[n] or "", png, words))
        return Rows(tuple(found), bool(data.words), len(data.test_y))

    def _places(self, asked: Asked) -> list[Where]:
        """The models that are asked for, whether there are any or not."""
        everybody = self.run.experiment.method.has_global_model or not asked.clients
        whose = (*((None,) if everybody else ()), *asked.clients)
        return [(t, k) for t in asked.rounds for k in whose]

    def _explained(
        self, asked: Asked, explainer: Explainer, tell: Tell
    ) -> tuple[Found, Inputs | None]:
        """The explanations by round and client, each with its model if it is kept."""
        if asked.clients and asked.of == "personal":
            insist_on_personal(self.run)
        wanted = [(t, k) for t, k in self._places(asked) if not self._why(t, k, asked.of)]
        if not wanted:
            raise BadInput(self._why(*self._places(asked)[0], asked.of))
        if explainer.whole_run:
            raise BadInput(
                f"explainer {explainer.label} explains the run as a whole: fedsim explain "
                f"{self.run.path} --explainer {explainer.label}"
            )
        inputs = None
        if explainer.takes_inputs:
            tell("loading the data")
            given = asked.inputs
            rows = [given["row"]] if "row" in given else []
            inputs = chosen_inputs(
                self.dataset, explainer, rows, given.get("input"), given.get("text")
            )
            if len(inputs.names) != 1:
                raise BadInput(f"{asked.input}: holds {len(inputs.names)} inputs; choose one")
        found: Found = {}
        for where in sorted(wanted, key=lambda where: where[0]):
            model = self._model(where, asked.of, wanted, tell)
            tell(f"explaining {model.title}")
            found[where] = model, model.explain(explainer, inputs)
        return {where: found[where] for where in wanted}, inputs

    def _why(self, t: int, k: int | None, of: Whose | None = None) -> str:
        """Why there is no such model; empty if there is one."""
        method = self.run.experiment.method
        if k is None and not method.has_global_model:
            return f"method.name={method.name} has no global model; choose a client"
        if k is not None and not (method.trains_clients or method.keeps_models):
            return f"clients of method.name={method.name} train no models"
        if k is None:
            return ""
        if (of or whose_models(self.run)) == "personal":
            return ""
        rounds = trained_rounds(self.run, [k])[k]
        if t in rounds:
            return ""
        where = ", ".join(map(str, rounds[:10])) + (", …" if len(rounds) > 10 else "")
        return (
            f"{self._name(k)} was not trained in round {t}"
            f"{f'; it was in {where}' if rounds else ', nor in any other'}"
        )

    def _name(self, k: int | None) -> str:
        return "the global model" if k is None else self.run.client_name(k)

    def _model(
        self, where: Where, of: Whose | None, wanted: Collection[Where], tell: Tell
    ) -> ModelSnapshot:
        """A model after a round; on the way there, those of other rounds are kept, too."""
        t, k = where
        kind = "global" if k is None else of or whose_models(self.run)
        if (where, kind) not in self._kept:
            if kind == "cohort":
                self._go(t, {k for s, k in wanted if s == t and k is not None}, tell)
            else:
                again = self._go(t, None, tell)
                if kind == "personal":
                    tell(f"personal models after round {t}")
                    for one, own in again.own_models(
                        [k for _, k in wanted if k is not None]
                    ).items():
                        self._keep(ModelSnapshot(own, again, one, "personal"))
            if (where, kind) not in self._kept:
                raise BadInput(f"{self._name(k)} has no model after round {t}")
        self._kept.move_to_end((where, kind))
        return self._kept[where, kind][0]

    def _go(self, t: int, trained: Collection[int] | None, tell: Tell) -> Replay:
        """Go to the state after round t, and keep the global models on the way.

        Args:
            trained: clients whose models are wanted as they were trained in this round, which is
                made again for that; None if they are not.
        """

        def on_round(r: int) -> None:
            tell(f"[{r}/{t}] recomputing round {r}")

        latest = t if trained is None else t - 1
        rounds = RunFolder.open(self.run.path).checkpoints().rounds()
        begin = max((r for r in rounds if r <= latest), default=0)
        at = self._again
        if at is None or not begin <= at.after <= latest:
            tell("loading the data")
            at = self._again = replay(self.run, begin, on_round, self._loaded)
            self._keep_global(at)
        while at.after < t:
            on_round(at.after + 1)
            everyone = self.run.client_ids
            few = self._fit(len(everyone))
            models, look = noted(everyone if few else trained or () if at.after == t - 1 else ())
            at.next_round(look)
            for k, own in models.items():
                self._keep(ModelSnapshot(own, at, k, "cohort"))
            self._keep_global(at)
        at.runner.begin(at.after)
        return at

    def _fit(self, clients: int) -> bool:
        """Whether the models of all clients of a round take little of the room."""
        each = max((size for _, size in self._kept.values()), default=ROOM)
        return each * max(1, self.run.experiment.train.participation * clients) < ROOM / 8

    def _keep_global(self, at: Replay) -> None:
        own: ClientModel | None = at.global_model()
        if own is not None:
            self._keep(ModelSnapshot(own, at, None))

    def _keep(self, snapshot: ModelSnapshot) -> None:
        """Keep a model, with the run as it is now, since that goes on."""
        own, then = snapshot.own, replace(snapshot, again=copy.copy(snapshot.again))
        if isinstance(own, Mapping):
            size = sum(array.nbytes for array in own.values())
        else:
            tensors = [own] if isinstance(own, Tensor) else own.state_dict().values()
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._kept[(then.again.after, then.client), then.kind] = then, size
        while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > ROOM:
            self._kept.popitem(last=False)

    def _shown(
        self, where: Where, found: tuple[ModelSnapshot, Explanation] | None, asked: Asked
    ) -> Shown:
        """An explanation that is no map, in words and pictures of its own."""
        t, k = where
        if found is None:
            return Shown(self._name(k), why=self._why(t, k, asked.of))
        model, one = found
        with TemporaryDirectory() as folder, drawing_as("svg"):
            paths = one.save(Path(folder))
            pictures = [Drawn(path.read_text(encoding="utf-8"), alt_of(path)) for path in paths]
        return Shown(model.title, one.text(), pictures=tuple(pictures))

    def _scores(
        self, explainer: Explainer, strip: Strip, found: Found, inputs: Inputs | None
    ) -> list[dict[str, Any]]:
        """What is known of each map, a row each."""
        scores, rows = [], iter(strip.rows())
        for k, cells in zip(strip.clients, strip.cells, strict=True):
            for j, (t, one) in enumerate(zip(strip.rounds, cells, strict=True)):
                if one is None:
                    continue
                row = next(rows)
                about = {words: row[key] for key, words in _WORDS.items() if key in row}
                everybodys = strip.cells[0][j] if strip.clients[0] is None else None
                if k is not None and everybodys is not None:
                    about["like the global one"] = alike(one, everybodys)
                if inputs is not None and isinstance(explainer, FeatureExplainer):
                    about |= _measured(explainer, found[t, k][0], one, inputs)
                scores.append(about)
        return scores


def _title(one: Explanation) -> str:
    assert isinstance(one.attributed, Attributed)
    return one.attributed.title


def _are_maps(found: Found) -> bool:
    return all(isinstance(one.attributed, Attributed) for _, one in found.values())


def _numbers(strip: Strip) -> pd.DataFrame:
    """A row for each part of the input, a column for each map."""
    first, columns, parts = strip.first, dict[str, Any](), None
    if first.images:
        places = np.indices(first.relevance[0].shape).reshape(2, -1)
        columns = {"row": places[0], "column": places[1]}
    else:
        columns = {"part": first.parts(0)}
        parts = len(first.parts(0))
    for model, cells in zip(strip.models, strip.cells, strict=True):
        for t, one in zip(strip.rounds, cells, strict=True):
            if one is not None:
                own = one.relevance[0].ravel()[:parts]
                columns[f"{model}, round {t}"] = own.astype(np.float64)
    return pd.DataFrame(columns)


def _measured(
    explainer: FeatureExplainer, of: ModelSnapshot, one: Attributed, inputs: Inputs
) -> dict[str, float | None]:
    """The usual scores of a map by itself, see `fedsim.explain.section.SCORES`."""
    model, data = of.explained(), of.data()
    x = data.prepare(inputs.x)
    if data.dataset.tokenizer or one.relevance[0].size != np.prod(
        arranged(x, data.dataset.parts)[1:]
    ):
        return {}  # of whole words, of which the network knows only pieces
    names = tuple(
        name
        for name, score in SCORES.items()
        if score.usual and score.about == "input" and not score.again
    )
    section = Explain(explainers=(explainer,), scores=names)
    explained = ExplainedInputs(np.zeros(1, np.int64), x, torch.zeros(1, dtype=torch.int64))
    relevance = one.relevance.reshape(1, -1).astype(np.float64)
    scores = measure(section, explainer, model, data, explained, relevance).scores
    return {name: float(value[0]) for name, value in scores.items()}


def _png(image: NDArray[np.float32]) -> bytes:
    """A small picture of an image (C, H, W) in [0, 1]."""
    from PIL import Image

    pixels = (np.clip(image, 0, 1) * 255).round().astype(np.uint8)
    pixels = np.moveaxis(pixels, 0, -1) if len(pixels) == 3 else pixels.mean(axis=0).astype("u1")
    written = io.BytesIO()
    Image.fromarray(pixels).save(written, "png")
    return written.getvalue()
