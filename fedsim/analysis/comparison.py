"""Compare runs: their experiments, environments and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedsim.config.arguments import checked
from fedsim.config.file import RawConfig, flat
from fedsim.errors import BadInput
from fedsim.results.folder import FINAL_WEIGHTS, RunFolder, open_folder
from fedsim.results.manifest import runs_below
from fedsim.results.records import is_of_result
from fedsim.results.report.entries import differing, names_of
from fedsim.results.run import Run
from fedsim.results.summary import LAST, aligned, of_run, on_record
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
        if isinstance(given, Run):
            found.setdefault(given.path, given)
            continue
        opened = open_folder(given)
        alone = [opened.path] if isinstance(opened, RunFolder) else []
        for path in alone or runs_below(opened.path):
            found.setdefault(path, Run.open(path))
    if len(found) < 2:
        raise BadInput("give at least two different runs to compare")
    for path in found:
        folder = RunFolder.open(path)
        check_end(folder)
        if (path / FINAL_WEIGHTS).exists():  # those who need no weights may remove them
            atomic.check(path / FINAL_WEIGHTS, folder.files.get(FINAL_WEIGHTS))
    first, *others = found.values()
    names = pd.Index(names_of(list(found)), name="run")
    # Reading the experiments runs no code.
    experiments = [flat(RawConfig.read(path / "experiment.yaml").content) for path in found]
    environments = [
        flat({key: run.manifest.get(key) for key in ENVIRONMENT}) for run in found.values()
    ]
    results = pd.DataFrame([figures(run) for run in found.values()], index=names)
    differs = [None, *(_first_difference(first, run) for run in others)]
    results["differs_from_round"] = pd.array(differs, dtype="Int64")
    # Of type object, so that integers stay integers besides missing values.
    one, two = (
        pd.DataFrame(
            {k: [of.get(k) for of in facts] for k in differing(facts)}, names, dtype=object
        )
        for facts in (experiments, environments)
    )
    return Comparison(dict(zip(names, found.values(), strict=True)), one, two, results)


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
    found = []
    for ours, theirs in ((one.rounds, other.rounds), (one.clients, other.clients)):
        if ours.empty or theirs.empty:
            found += [] if ours.empty and theirs.empty else [1]
            continue
        a, b = _by_round(ours).align(_by_round(theirs))
        differs = ~((a == b) | (a.isna() & b.isna())).all(axis=1)
        found += differs.index[differs].get_level_values("round").tolist()
    return min(map(int, found), default=None)


def _by_round(table: pd.DataFrame) -> pd.DataFrame:
    keys = [key for key in ("round", "client") if key in table]
    table = table[[column for column in table if is_of_result(str(column))]]
    again = table.groupby(keys).cumcount()
    return table.set_index([*(table[key] for key in keys), again], drop=False)
