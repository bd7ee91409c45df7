"""Compare runs: their experiments, environments and results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.config.arguments import checked
from fedsim.config.file import RawConfig, flat
from fedsim.errors import BadInput
from fedsim.results.folder import FINAL_WEIGHTS, RunFolder
from fedsim.results.manifest import runs_below
from fedsim.results.records import VARYING
from fedsim.results.report.entries import differing, names_of
from fedsim.results.run import Run
from fedsim.results.summary import LAST, aligned, of_run, on_record
from fedsim.results.sweeps import open_folder
from fedsim.results.verify import check_end
from fedsim.support import atomic
from fedsim.support.words import size

# Entries of manifests that may change the last bits of a result, or its time.
ENVIRONMENT = ("python", "git_revision", "packages", "hardware", "actors", "clients_per_step")


@dataclass(frozen=True)
class Comparison:
    """How runs differ. Each table has one row per run, named by the end of its folder's path.

    Attributes:
        runs: at least two runs, by name. The others are compared with the first.
        experiments: one column per key (`train.rounds`) whose value differs between experiments;
            missing where an experiment does not have the key.
        environments: the same for versions and hardware (`packages.torch`, `hardware.cpus`).
        results: `status`; the number of `rounds` computed; the last value of each metric
            (`accuracy`), and for the primary metric also the `best` value and the mean of the last
            five evaluated rounds (`last5`); `bytes_up` and `bytes_down` in total; `seconds`;
            `data_hash`, `partition_hash`, `result_hash`; and `differs_from_round`, the first round
            whose records (except for times) differ from those of the first run, missing if there
            is none.
    """

    runs: Mapping[str, Run]
    experiments: pd.DataFrame
    environments: pd.DataFrame
    results: pd.DataFrame

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """The three tables by name."""
        return {
            "experiments": self.experiments,
            "environments": self.environments,
            "results": self.results,
        }

    @property
    def texts(self) -> dict[str, pd.DataFrame]:
        """The three tables as they are printed: each score with the same decimals in all runs."""
        return {
            about: pd.DataFrame({key: _texts(str(key), table[key]) for key in table}, table.index)
            for about, table in self.tables.items()
        }

    def __str__(self) -> str:
        parts = [
            f"{about}: the same" if table.columns.empty else f"{about}\n{table.T.to_string()}"
            for about, table in self.texts.items()
        ]
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        parts = []
        for about, table in self.texts.items():
            if table.columns.empty:
                parts.append(f"<p><b>{about}</b>: the same</p>")
            else:
                parts.append(f"<p><b>{about}</b></p>{table.T.to_html()}")
        return "\n".join(parts)


def _texts(key: str, values: pd.Series[Any]) -> list[str]:
    """The values of all runs as a person reads them; a dash where one is missing."""
    known = values.dropna()
    if key.startswith("bytes_"):
        texts = [size(value) for value in known]
    elif key == "seconds":
        texts = [f"{value:.1f}" for value in known]
    elif "." in key:  # a setting, whose value is exact
        texts = [str(value) for value in known]
    else:
        texts = aligned(known)
    return [*pd.Series(texts, known.index, dtype=object).reindex(values.index, fill_value="–")]


@checked
def compare(*runs: Run | str | Path) -> Comparison:
    """Compare runs: their experiments, environments and results.

    Args:
        runs: at least two, as `Run` objects or as folders; the folder of a grid or a search counts
            as all its runs, and one above (`runs/NAME`) as the latest below it.

    Raises:
        BadInput: there are fewer than two different runs, a folder holds no results, or weights in
            it are damaged or another run's.

    Example:
        >>> import fedsim
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> def run(alpha):
        ...     partition = {"kind": "dirichlet", "clients": 5, "alpha": alpha}
        ...     sections = {"model": {"name": "mlp"}, "method": {"name": "fedavg"}}
        ...     settings = {"train": {"rounds": 1}, "engine": {"kind": "local"}, **sections}
        ...     content = {"data": {"name": "digits"}, "partition": partition, **settings}
        ...     return fedsim.run(fedsim.Experiment.from_dict(content), out=folder.name)
        >>> compared = fedsim.compare(run(alpha=0.1), run(alpha=10))
        >>> compared.experiments["partition.alpha"].tolist()
        [0.1, 10.0]
        >>> compared.results["differs_from_round"].tolist()
        [<NA>, 1]
    """
    found: dict[Path, Run] = {}
    for given in runs:
        for run in [given] if isinstance(given, Run) else _runs_in(given):
            found.setdefault(run.path, run)
    if len(found) < 2:
        raise BadInput("give at least two different runs to compare")
    for path in found:
        folder = RunFolder.open(path)
        check_end(folder)
        if (path / FINAL_WEIGHTS).exists():  # those who need no weights may remove them
            atomic.check(path / FINAL_WEIGHTS, folder.files.get(FINAL_WEIGHTS))
    named = dict(zip(names_of(list(found)), found.values(), strict=True))
    return Comparison(
        named,
        _differences({name: _experiment(run) for name, run in named.items()}),
        _differences({name: _environment(run) for name, run in named.items()}),
        _results(named),
    )


def _runs_in(path: str | Path) -> list[Run]:
    folder = open_folder(path)
    if isinstance(folder, RunFolder):
        return [Run(folder)]
    return [Run.open(below) for below in runs_below(folder.path)]


def _experiment(run: Run) -> dict[str, Any]:
    """The resolved experiment by `section.key`. Reading it runs no code."""
    return flat(RawConfig.read(run.path / "experiment.yaml").content)


def _environment(run: Run) -> dict[str, Any]:
    return flat({key: run.manifest.get(key) for key in ENVIRONMENT})


def _differences(facts: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """A row for each run, and a column for each fact that differs between them."""
    columns = {
        key: [each.get(key) for each in facts.values()] for key in differing([*facts.values()])
    }
    # Of type object, so that integers stay integers besides missing values.
    return pd.DataFrame(columns, index=pd.Index(facts, name="run"), dtype=object)


def _results(runs: Mapping[str, Run]) -> pd.DataFrame:
    first, *_ = runs.values()
    table = pd.DataFrame([figures(run) for run in runs.values()], index=pd.Index(runs, name="run"))
    differs = [None if run is first else _first_difference(first, run) for run in runs.values()]
    table["differs_from_round"] = pd.array(differs, dtype="Int64")
    return table


def figures(run: Run) -> dict[str, Any]:
    """The results of a run, finished or not: its row of `Comparison.results`."""
    rounds, manifest = run.rounds, run.manifest
    found: dict[str, Any] = {"status": manifest["status"], "rounds": len(rounds)}
    if len(rounds):
        for column in on_record(run):
            scores = rounds[column].dropna()
            found[column] = float(scores.iloc[-1]) if len(scores) else None
        reported = of_run(rounds, run.primary_metric)
        found |= {"best": reported["best"], f"last{LAST}": reported[f"last{LAST}"]}
        found["bytes_up"] = int(rounds["total_bytes_up"].iloc[-1])
        found["bytes_down"] = int(rounds["total_bytes_down"].iloc[-1])
    found["seconds"] = manifest.get("wall_seconds")
    for key in ("data_hash", "partition_hash", "result_hash"):
        found[key] = manifest.get(key) or None
    return found


def _first_difference(one: Run, other: Run) -> int | None:
    """The first round in which the records of two runs differ; None if there is none."""
    pairs = ((one.rounds, other.rounds), (one.clients, other.clients))
    found = (_first_row(a, b) for a, b in pairs)
    return min((t for t in found if t is not None), default=None)


def _first_row(one: pd.DataFrame, other: pd.DataFrame) -> int | None:
    if one.empty or other.empty:
        return None if one.empty and other.empty else 1
    a, b = _by_round(one).align(_by_round(other))
    differs = ~((a == b) | (a.isna() & b.isna())).all(axis=1)
    return int(differs.index[differs].get_level_values("round").min()) if differs.any() else None


def _by_round(table: pd.DataFrame) -> pd.DataFrame:
    """A table's records without times, by round and client."""
    keys: Sequence[str] = [key for key in ("round", "client") if key in table]
    table = table.drop(columns=[column for column in VARYING if column in table])
    again = table.groupby(list(keys)).cumcount()
    return table.set_index([*(table[key] for key in keys), again], drop=False)
