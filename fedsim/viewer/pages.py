"""The pages of `fedsim view`: a list of runs, and one run with the decisions of its models."""

from __future__ import annotations

import base64
import math
import os
import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlencode

import numpy as np
import pandas as pd
from markupsafe import Markup
from multidict import MultiMapping

from fedsim.analysis.explanations import explainer_of
from fedsim.analysis.replay import Whose, trained_rounds
from fedsim.config.file import RawConfig
from fedsim.config.registry import nearest
from fedsim.errors import BadInput, FedsimError
from fedsim.explain.explainers import explainers
from fedsim.results import manifest as manifests
from fedsim.results.figures.charts import Line, draw_lines
from fedsim.results.figures.look import STYLES, Drawing, swatch
from fedsim.results.listing import Listed, folders, listed
from fedsim.results.report.html import templates
from fedsim.results.report.page import Column, Datum, PageTable, datum, lasted, number, plain, sent
from fedsim.results.run import Run
from fedsim.results.summary import digits
from fedsim.support.words import client_name, short
from fedsim.viewer.decisions import MOST_CLIENTS, Asked, Drawn, Rows, Seen
from fedsim.viewer.work import Work
from fedsim.viewer.worker import Answer, Request

_HERE = Path(__file__).parent
_ROWS, _TILES, _INPUTS = 50, 400, 12  # on a page
_SOON = 0.12  # seconds that a page waits for its explanations
_HEIGHT = 220  # points of a figure of curves
_LEVELS = 8  # shades of tiles
_WORDS = 90  # letters of an input in words


@dataclass(frozen=True)
class Curve:
    """A figure of lines, and where in it its first and last round are, in parts of its width."""

    svg: Markup
    first: float
    last: float


@dataclass(frozen=True)
class Tile:
    """A client in a round.

    Args:
        shade: 0 to 1 as the column's value is among all clients'; None if it has none.
        took_part: in the round.
    """

    client: int
    name: str
    value: str
    shade: float | None
    took_part: bool
    chosen: bool


class Wanted:
    """What an address asks for.

    Args:
        query: of the address.
        last: the last round on record.

    Raises:
        BadInput: a value cannot be read.
    """

    def __init__(self, query: MultiMapping[str], last: int) -> None:
        self.query = query
        self.round = self._number("round", max(last, 1), 1, max(last, 1))
        against = self._number("against", 0, 0, max(last, 1))
        self.against = against if against != self.round else 0
        self.clients = tuple(sorted(set(map(_whole, query.getall("client", [])))))
        if len(self.clients) > MOST_CLIENTS:
            raise BadInput(
                f"client: at most {MOST_CLIENTS} can be compared, not {len(self.clients)}"
            )
        self.row = self._number("row", 0, 0)
        self.first = self._number("first", self.row // _INPUTS * _INPUTS, 0)
        self.tiles = self._number("tiles", 0, 0)
        self.column, self.curve = query.get("column", ""), query.get("curve", "")
        self.explainer = query.get("explainer", "").strip()
        self.input, self.text = query.get("input", ""), query.get("text", "").strip()
        of = query.get("of", "")
        if of and of not in get_args(Whose):
            raise BadInput(f"of: must be cohort or personal, not '{of}'")
        self.of: Any = of or None

    def _number(self, key: str, usual: int, least: int, most: int | None = None) -> int:
        text = self.query.get(key, "")
        found = _whole(text) if text else usual
        if found < least or (most is not None and found > most):
            ends = f"at least {least}" if most is None else f"from {least} to {most}"
            raise BadInput(f"{key}: must be {ends}, not {found}")
        return found

    def address(self, **changes: Any) -> str:
        """The query with other values; None leaves a key out."""
        kept = [(key, value) for key, value in self.query.items() if key not in changes and value]
        return "?" + urlencode([*kept, *((k, v) for k, v in changes.items() if v is not None)])


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:  # what columns of numbers hold
        raise BadInput(f"'{text:.40}' is not a whole number")
    return int(text)


def _below(above: Path, path: str) -> Path | None:
    """Where a path leads; None if not below that folder, also by a link, or if it is none."""
    try:
        place = (above / path).resolve()
    except (OSError, RuntimeError, ValueError):  # links in a circle, a name with a null byte
        return None
    return place if place.is_relative_to(above.resolve()) else None


class Pages:
    """Renders pages of the results below a folder.

    Args:
        root: the folder; nothing outside of it is shown.
        work: where explanations come from.
        uploads: the folder of inputs that were dropped in.
        prefix: how all addresses begin.
        trust: see `Server`.
    """

    def __init__(self, root: Path, work: Work, uploads: Path, prefix: str, trust: bool) -> None:
        self._prefix = prefix
        self._root, self._work, self._uploads, self._trust = root, work, uploads, trust
        self._templates = templates(_HERE)
        self._curves: dict[tuple[Any, ...], Curve] = {}
        self._drawing = threading.Lock()  # Matplotlib's settings are those of all threads

    def page(self, path: str, query: MultiMapping[str]) -> str:
        """The page of a folder: of a run, or of several.

        Raises:
            BadInput: there is no such folder, or the address asks for what is not there.
        """
        folder = self._folder(path)
        if manifests.kind_of(folder) == "run":
            return self._run(folder, query)
        return self._overview(folder, query)

    def file(self, path: str, query: MultiMapping[str], ending: str) -> tuple[str, bytes]:
        """What a page shows, for elsewhere: its name, and the numbers or the picture."""
        run = self._opened(self._folder(path))
        wanted = Wanted(query, len(run.rounds))
        asked = self._asked(run, wanted)
        name = f"{plain_name(run.path.name)}-round-{wanted.round}.{ending}"
        if ending == "csv":
            seen = self._answer(Request.seen(asked))
            if seen.numbers.empty:
                raise BadInput(f"explainer {asked.explainer} gives no relevances to write")
            return name, seen.numbers.to_csv(index=False).encode()
        content: bytes = self._answer(Request(asked.run, "picture", (asked, ending)))
        return name, content

    def cancel(self, path: str, query: MultiMapping[str]) -> None:
        """Do not explain what a page has asked for."""
        run = self._opened(self._folder(path))
        self._work.cancel(Request.seen(self._asked(run, Wanted(query, len(run.rounds)))))

    def problem(self, why: str, path: str) -> str:
        """A page that says what is wrong."""
        return self._rendered("problem", path, title="This cannot be shown", why=why)

    def static(self, name: str) -> str:
        """A style sheet or script."""
        source, *_ = self._templates.loader.get_source(self._templates, name)  # type: ignore[union-attr]
        return source

    def _folder(self, path: str) -> Path:
        folder = _below(self._root, path)
        if folder is None or not os.path.isdir(folder):  # unlike `is_dir`, of any length
            name = " ".join(path.split()) or str(self._root)
            raise BadInput(f"{name:.200}: there is no such folder here")
        return folder

    def _opened(self, folder: Path) -> Run:
        run = Run.open(folder)
        if self._trust:
            run.trust()
        return run

    def _rendered(self, kind: str, path: str, **content: Any) -> str:
        parts = [part for part in path.split("/") if part]
        crumbs = [(self._root.name, "")]
        crumbs += [(part, "/".join(parts[: k + 1])) for k, part in enumerate(parts)]
        return self._templates.get_template("view.html").render(
            kind=kind, crumbs=crumbs, prefix=self._prefix, path=path, **content
        )

    # One folder with several runs.

    def _overview(self, folder: Path, query: MultiMapping[str]) -> str:
        kind = manifests.kind_of(folder)
        below = manifests.runs_below(folder) if kind else sorted(
            folders(folder), key=lambda path: (path.name, path), reverse=True
        )  # fmt: skip
        page = _whole(query.get("page", "0"))
        shown = [listed(path, folder) for path in below[page * _ROWS : (page + 1) * _ROWS]]
        at = folder.relative_to(self._root.resolve()).as_posix().removeprefix(".")
        runs = [one for one in shown if one.kind == "run" and one.done]
        chosen = query.getall("run", []) or [str(one.folder) for one in runs[:STYLES]]
        chosen = [name for name in chosen if name in {str(one.folder) for one in runs}][:STYLES]
        drawn = [Run.open(folder / name) for name in chosen]
        columns = [*dict.fromkeys(column for run in drawn for column in _curves_of(run))]
        column = query.get("curve", "") or (drawn[0].primary_metric.column if drawn else "")
        if columns and column not in columns:
            raise BadInput(f"curve: no run here has a column '{column}'{nearest(column, columns)}")
        lines = [
            Line.of(name, k, run.rounds.dropna(subset=[column]), column)
            for k, (name, run) in enumerate(zip(chosen, drawn, strict=True))
            if column in run.rounds
        ]
        return self._rendered(
            "overview",
            at,
            title=folder.name,
            live=any(one.status == "running" for one in shown),
            rows=[(one, str(one.folder) in chosen, _mark(one, chosen)) for one in shown],
            count=len(below),
            page=page,
            pages_count=math.ceil(len(below) / _ROWS),
            first=page * _ROWS + 1,
            curve=self._drawn(tuple(chosen), column, lines),
            columns=columns,
            column=column,
            digits=digits,
        )

    # One run.

    def _run(self, folder: Path, query: MultiMapping[str]) -> str:
        run = self._opened(folder)
        rounds, content = run.rounds, RawConfig.read(run.path / "experiment.yaml").content
        wanted = Wanted(query, len(rounds))
        at = folder.relative_to(self._root.resolve()).as_posix().removeprefix(".")
        columns = _curves_of(run)
        primary = run.primary_metric.column
        curve = wanted.curve or (primary if primary in columns else next(iter(columns), ""))
        if wanted.curve and wanted.curve not in columns:
            raise BadInput(f"curve: the run has no column '{curve}'{nearest(curve, columns)}")
        tiles = self._tiles(run, wanted)
        line = [Line.of(curve, 0, rounds.dropna(subset=[curve]), curve)] if curve in rounds else []
        seen, why = self._decision(run, wanted)
        return self._rendered(
            "run",
            at,
            title=str(content.get("name", run.path.name)),
            run=run,
            about=_about(run, content),
            wanted=wanted,
            live=run.status == "running",
            last=len(rounds),
            curve=self._drawn((str(run.path), len(rounds)), curve, line),
            columns=columns,
            column=curve,
            facts=_facts(run, wanted.round),
            **tiles,
            holds=_holds(run, wanted.clients),
            seen=seen,
            why=why,
            rows=self._rows(run, wanted),
            words=_WORDS,
            known=[name for name, one in explainers.items() if not one.whole_run],
            usual=self._usual(run),
            uri=_uri,
            scores=self._scores,
            take=self._take,
        )

    def _tiles(self, run: Run, wanted: Wanted) -> dict[str, Any]:
        """The clients of a round, coloured by a column."""
        table = clients_of(run, wanted.round)
        names = run.manifest.get("client_names", ())
        columns = [str(name) for name in table if name != "took part"]
        test = f"test_{run.primary_metric.column}"
        known = [name for name in columns if table[name].notna().any()]
        usual = next((name for name in (test, "loss", *known) if name in known), "")
        column = wanted.column or usual
        if column and column not in columns:
            raise BadInput(
                f"column: nothing of that name is known of clients: '{column}'"
                f"{nearest(column, columns)}"
            )
        for k in wanted.clients:
            if k not in table.index:
                raise BadInput(f"client: there is no client {k}; there are {len(table)}")
        values = table[column] if column else pd.Series(math.nan, table.index)
        low, high = values.min(), values.max()
        whole = bool((values.dropna() % 1 == 0).all())  # counts
        shades = (values - low) / (high - low) if high > low else values * 0 + 0.5
        shown = table.index[wanted.tiles * _TILES : (wanted.tiles + 1) * _TILES]
        tiles = [
            Tile(
                k,
                client_name(k, names),
                _figure(values[k], whole) if math.isfinite(values[k]) else "",
                round(shades[k] * _LEVELS) / _LEVELS if math.isfinite(shades[k]) else None,
                bool(table["took part"][k]),
                k in wanted.clients,
            )
            for k in shown
        ]
        return {
            "tiles": tiles,
            "tile_columns": columns,
            "tile_column": column,
            "tile_pages": math.ceil(len(table) / _TILES),
            "low": _figure(low, whole) if math.isfinite(low) else "",
            "high": _figure(high, whole) if math.isfinite(high) else "",
            "cohort": int(table["took part"].sum()),
            "clients": len(table),
        }

    def _usual(self, run: Run) -> str:
        try:
            return explainer_of(run, None).name
        except FedsimError:  # it names code that may not be run
            return ""

    def _asked(self, run: Run, wanted: Wanted) -> Asked:
        """What an address asks of a run's models."""
        place = _below(self._uploads, wanted.input) if wanted.input else None
        if wanted.input and place is None:
            raise BadInput(f"input: '{wanted.input:.60}' is none that was dropped in here")
        if place and not os.path.isfile(place):
            raise BadInput("input: it is no longer here; drop it in again")
        of_file, clients = str(place or ""), wanted.clients
        if not (clients or run.experiment.method.has_global_model):  # any that has a model
            trained = trained_rounds(run, run.client_ids)
            clients = tuple(k for k, rounds in trained.items() if wanted.round in rounds)[:1]
        return Asked(
            str(run.path),
            tuple(sorted({wanted.round, wanted.against or wanted.round})),
            clients,
            wanted.of,
            wanted.explainer or explainer_of(run, None).name,
            0 if of_file or wanted.text else wanted.row,
            of_file,
            "" if of_file else wanted.text,
        )

    def _decision(self, run: Run, wanted: Wanted) -> tuple[Answer | None, str]:
        """The explanations, how far they are, or why there are none."""
        if run.status == "running":
            return None, "The run is still going; its models can be explained when it has ended."
        try:
            run.result_hash  # noqa: B018  # raises if it is not finished
            asked = self._asked(run, wanted)
        except FedsimError as error:
            return None, str(error)
        request = Request.seen(asked)
        if "again" in wanted.query:
            self._work.again(request)
        answer = self._work.ask(request, _SOON)
        if answer.status == "done":
            self._work.prepare(self._neighbours(run, wanted, asked))
        return answer, ""

    def _neighbours(self, run: Run, wanted: Wanted, asked: Asked) -> Iterator[Request]:
        """What may be asked for next."""
        if not (wanted.input or wanted.text):
            yield Request.seen(replace(asked, row=asked.row + 1))
        if wanted.round < len(run.rounds):
            rounds = tuple(sorted({wanted.round + 1, wanted.against or wanted.round + 1}))
            yield Request.seen(replace(asked, rounds=rounds))

    def _rows(self, run: Run, wanted: Wanted) -> Rows | None:
        """Rows of the test set to choose from; None if they are not known yet."""
        if run.status != "finished":
            return Rows((), False, 0)
        request = Request(str(run.path), "rows", (wanted.first, _INPUTS))
        answer = self._work.ask(request, _SOON)
        if answer.status == "failed":
            self._work.again(request)  # with the next page
            return Rows((), False, 0)
        return None if answer.status == "working" else answer.content

    def _answer(self, request: Request) -> Any:
        answer = self._work.ask(request, 600)
        if answer.status != "done":
            raise BadInput(str(answer.content))
        return answer.content

    def _drawn(self, key: Sequence[Any], column: str, lines: Sequence[Line]) -> Curve | None:
        lines = [line for line in lines if len(line.x)]
        if not lines:
            return None
        known = (*key, column, *(len(line.x) for line in lines))
        with self._drawing:
            if known not in self._curves:
                if len(self._curves) > 100:
                    self._curves.clear()
                self._curves[known] = _curve(column, lines)
            return self._curves[known]

    @staticmethod
    def _scores(seen: Seen) -> PageTable:
        return plain("Scores of these explanations", seen.scores)

    def _take(self, run: Run, wanted: Wanted, seen: Seen) -> list[tuple[str, str]]:
        """The commands that show the same, each with its lines of Python."""
        asked = self._asked(run, wanted)
        given = asked.inputs if seen.takes_inputs else {}
        if asked.input and given:
            given = {"input": Path(asked.input).name}
        rounds, clients = [*asked.rounds], [*seen.clients]
        groups = [clients] if seen.strip else [*([[]] if seen.everybodys else []), clients]
        found = []
        for whose in groups:
            if not (whose or seen.everybodys):
                continue
            strip = seen.strip and len(rounds) + len(whose) > 1
            of = asked.of if whose else None
            words = ["fedsim", "explain", short(run.path), "--explainer", asked.explainer]
            words += [word for t in rounds for word in ("--round", str(t))]
            words += [word for k in whose for word in ("--client", str(k))]
            words += ["--of", of] if of else []
            words += [word for key, value in given.items() for word in (f"--{key}", str(value))]
            words += ["--strip"] if strip else []
            arguments = [repr(short(run.path)), repr(asked.explainer)]
            arguments += [f"client={_one_or_all(whose)}"] if whose else []
            arguments += [f"after={_one_or_all(rounds)}"]
            arguments += [f"of={of!r}"] if of else []
            arguments += [f"{key}={value!r}" for key, value in given.items()]
            arguments += ["strip=True"] if strip else []
            lines = [
                "import fedsim",
                f"found = fedsim.explanations({', '.join(arguments)})",
                'found.save("pictures")',
            ]
            found.append((shlex.join(words), "\n".join(lines)))
        return found


def _one_or_all(numbers: Sequence[int]) -> int | list[int]:
    return numbers[0] if len(numbers) == 1 else [*numbers]


def clients_of(run: Run, t: int) -> pd.DataFrame:
    """What is known of each client in a round: a row each, `took part` and columns of numbers.

    All rounds of a run have the same columns: those of clients.parquet; `<explainer>/<score>` of
    the client's explanations; `examples`; and `contribution/<how>/<score>`, as far as known.
    """
    table = pd.DataFrame(index=range(run.manifest["clients"]))
    rows = run.clients
    table["took part"] = False
    if len(rows):
        rows = rows.dropna(axis="columns", how="all")  # in any round: they stay while one looks
        rows = rows[rows["round"] == t].set_index("client").drop(columns="round")
        trained = [name for name in ("steps", "rules") if name in rows]
        took_part = rows.index[rows[trained].notna().any(axis=1)]
        table["took part"] = table.index.isin(took_part)
        table = table.join(rows.select_dtypes("number"))
    explained = run.explanations
    if "model" in explained:
        explained = explained[explained["client"].notna()]
        for name, one in explained.groupby("explainer"):
            one = one.dropna(axis="columns", how="all")
            one = one[one["round"] == t].drop_duplicates("client").set_index("client")
            scores = one.select_dtypes("number").drop(columns="round")
            table = table.join(scores.add_prefix(f"{name}/"))
    if len(run.labels):
        table["examples"] = run.labels.groupby("client")["examples"].sum()
    for (how, score), one in (
        run.contributions.groupby(["how", "score"]) if len(run.contributions) else ()
    ):
        table[f"contribution/{how}/{score}"] = one.drop_duplicates("client").set_index("client")[
            "value"
        ]
    return table


def plain_name(name: str) -> str:
    """A name of a file that all systems and headers take."""
    return re.sub(r"[^\w.-]", "-", name)[-60:].lstrip(".") or "file"


def _curves_of(run: Run) -> list[str]:
    """The columns of its rounds that can be drawn."""
    numbers = run.rounds.select_dtypes("number").drop(columns="round", errors="ignore")
    return [str(name) for name in numbers.dropna(axis="columns", how="all")]


def _curve(column: str, lines: Sequence[Line]) -> Curve:
    """Lines by round, drawn as those of a report."""
    low = min(float(np.nanmin(line.low)) for line in lines)
    high = max(float(np.nanmax(line.high)) for line in lines)
    margin = 0.05 * (high - low) or 0.5
    limits = (low - margin, high + margin)
    places: list[float] = []
    axes_of: list[Any] = []
    rounds = sorted({t for line in lines for t in line.x.tolist()})

    def draw(axes: Any, look: Any) -> None:
        draw_lines(axes, look, lines, limits=limits)
        if len(rounds) == 1:
            axes.set(xlim=(rounds[0] - 0.5, rounds[0] + 0.5), xticks=rounds)
        axes_of.append(axes)

    name = column.replace("_", " ")
    ends = ", ".join(f"{line.label} {line.mean[-1]:.4g}" for line in lines)
    svg = Drawing(f"{name} by round. At the end: {ends}.", _HEIGHT, draw).svg()
    (axes,) = axes_of
    box, (start, end) = axes.get_position(), axes.get_xlim()
    for x in (rounds[0], rounds[-1]):
        places.append(float(box.x0 + box.width * (x - start) / (end - start)))
    return Curve(svg, *places)


def _figure(value: float, whole: bool) -> str:
    return f"{value:.0f}" if whole else digits(value)


def _mark(one: Listed, chosen: Sequence[str]) -> Markup:
    name = str(one.folder)
    return swatch(chosen.index(name)) if name in chosen else Markup("")


def _about(run: Run, content: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = [(key, content.get(key)) for key in ("method", "data", "model")]
    found = [("status", run.status)]
    found += [(key, str(one.get("name", ""))) for key, one in names if isinstance(one, Mapping)]
    found.append(("clients", str(run.manifest["clients"])))
    if "result_hash" in run.manifest:
        found.append(("result hash", run.result_hash[:12]))
    return found


def _facts(run: Run, t: int) -> list[tuple[str, str]]:
    """What a round cost and came to."""
    rows = run.rounds[run.rounds["round"] == t] if len(run.rounds) else run.rounds
    if rows.empty:
        return []
    row = rows.iloc[0]
    found = []
    for metric in run.metrics:
        if metric.column in row and pd.notna(row[metric.column]):
            found.append((metric.label, digits(row[metric.column])))
    for column, words, show in (
        ("train_loss", "training loss", lambda value: number(digits(value), value)),
        ("bytes_up", "sent up", sent),
        ("bytes_down", "sent down", sent),
        ("total_bytes_up", "sent up since the start", sent),
        ("seconds", "took", lasted),
    ):
        if column in row and pd.notna(row[column]):
            found.append((words, show(float(row[column])).text))
    return found


def _holds(run: Run, clients: Sequence[int]) -> PageTable | None:
    """How many examples of each label some clients hold."""
    labels = run.labels[run.labels["client"].isin(clients)] if len(run.labels) else run.labels
    if not clients or labels.empty:
        return None
    table = labels.astype({"label": str}).pivot(index="label", columns="client", values="examples")
    names = [str(name) for name in run.labels["label"].cat.categories]
    table = table.reindex(names, columns=[*clients]).fillna(0).astype(int)
    whose = [datum(run.client_name(k)) for k in clients]
    columns: list[tuple[Column, list[Datum]]] = [(Column("client"), whose)]
    for name, counts in zip(names, table.to_numpy().tolist(), strict=True):
        columns.append((Column(name, True, high=True), list(map(datum, counts))))
    return PageTable.of(f"Examples held, by {run.label_axis}", columns)


def _uri(drawn: Drawn | bytes) -> str:
    """A picture as part of the page."""
    if isinstance(drawn, Drawn):
        content, kind = drawn.svg.encode(), "svg+xml"
    else:
        content, kind = drawn, "png"
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
