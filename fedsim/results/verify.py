"""Checks that the files of a folder are as they were written."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from fedsim.errors import Damaged, RunFolderError
from fedsim.federation.checkpoint import hash_of
from fedsim.results.folder import ResultsFolder, RunFolder, open_folder
from fedsim.results.manifest import runs_below
from fedsim.results.tables import check_progress, check_tables

MOST_DAMAGED = 20  # files that are named


def insist_on_whole(path: Path) -> int:
    """Refuse a folder in which anything is damaged; how many folders were checked."""
    checked, wrong = 0, []
    for _, damage in verify(path):
        checked += 1
        wrong += damage
    if wrong:
        more = f"\n  and {len(wrong) - MOST_DAMAGED} more" if len(wrong) > MOST_DAMAGED else ""
        lines = "".join(f"\n  {line}" for line in wrong[:MOST_DAMAGED])
        raise RunFolderError(
            f"{len(wrong)} file(s) damaged or missing:{lines}{more}\n"
            "fedsim resume makes a run anew from what is left"
        )
    return checked


def verify(path: Path) -> Iterator[tuple[Path, list[str]]]:
    """Check all that a resume, a replay, an explanation or a report would read, by folder."""
    folder = open_folder(path)
    if isinstance(folder, RunFolder):
        yield folder.path, damage_of_run(folder)
        return
    yield folder.path, [*folder.damage(), *_damage_of_study(folder)]
    done = (cell for cell in folder.manifest.get("cells", []) if cell["status"] == "finished")
    runs = {*runs_below(folder.path), *(folder.path / cell["folder"] for cell in done)}
    for run in sorted(runs):
        try:
            yield run, damage_of_run(RunFolder.open(run))
        except RunFolderError as error:
            yield run, [str(error)]


def damage_of_run(folder: RunFolder) -> list[str]:
    if not (folder.path / "weights").is_dir():  # it broke off before its first round
        return folder.damage()
    checkpoints = folder.checkpoints()
    # The tables of a finished run have been merged, and have checksums of their own.
    check = check_progress if "result_hash" in folder.manifest else check_tables
    found = folder.damage()
    try:
        check_end(folder)
    except Damaged as damage:
        found.append(str(damage))
    found += checkpoints.damage(partial(check, folder.path))
    return list(dict.fromkeys(found))


def insist_on_finished(folder: RunFolder, what: str) -> None:
    """Refuse a run that is not finished or is damaged, for what only finished ones are good."""
    damage = damage_of_run(folder)
    if folder.manifest["status"] != "finished" or damage:
        why = damage[0] if damage else f"{folder.path}: the run is {folder.manifest['status']}"
        raise RunFolderError(f"{why}; {what}")


def check_end(folder: RunFolder) -> None:
    """Insist that the last checkpoint of a finished run, if it is there, is its end."""
    checkpoints, expected = folder.checkpoints(), folder.manifest.get("result_hash")
    for t in folder.manifest.get("checkpoints", ())[-1:]:
        if expected is None or not checkpoints.path(t).exists():
            continue
        content = checkpoints.read(t)
        check_progress(folder.path, t, content.progress)
        found = hash_of(content.progress["ledger"]["chain"], content.state)
        if found != expected:
            raise Damaged(
                f"{checkpoints.path(t)}: is not the end of this run: its result hash is {found}, "
                f"and the run's is {expected}"
            )


def _damage_of_study(folder: ResultsFolder) -> list[str]:
    path = folder.path / "study.db"
    if not path.exists():
        return [f"{path}: is missing"] if folder.kind == "search" else []
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            rows = database.execute("PRAGMA integrity_check").fetchall()
    except sqlite3.DatabaseError as error:
        return [f"{path}: is damaged: {error}"]
    return [] if rows == [("ok",)] else [f"{path}: is damaged: {rows[0][0]}"]
