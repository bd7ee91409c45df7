"""Whatever is refused is told in a line that names the place, and leaves nothing behind."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from refusals import LABELS, ROWS, Row, experiment, mnist, write

from experiments import Say
from fedsim import Dataset, run
from fedsim.data import Source, load_dataset
from fedsim.errors import BadInput

# Where it is: a file (a long path is shortened), a key, an option, an override, a client or row,
# or an explainer.
PLACE = re.compile(
    r"(HERE/)?[\w./*-]+( … [\w./-]+)?(:\d+)?: |\w+(\.\w+)*[=:]|override |No such option|"
    r"there is no (list of|client|row|explainer)|client \d|HERE: |no node |explainer ['\w]|--\w|"
    r".* needs [\w-]+, which is not |\w+ is not a setting|give |row, input and text |no class |"
    r"noise |x has |\w+ \(\d|(unknown )?(method|model) '|there is no template|"
    r"'.*' (is|cannot be) the name"
)
UNKNOWN = re.compile(r"unknown|(?<!device \d:) has no '|there is no list")
OFFERS = re.compile(r"did you mean '|known: |keys of the experiment|write ")


MADE: dict[str, Dataset] = {}  # by what their sections hold


def load_once(source: Source) -> Dataset:
    """Load data; those that are made up, once."""
    if source.name not in ("planted_reviews", "digits", "friedman", "synthetic", "shapes"):
        return load_dataset(source)
    key = source.model_dump_json()
    if key not in MADE:
        MADE[key] = load_dataset(source)
    return MADE[key]


@pytest.fixture(autouse=True)
def _small_experiment(say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory with one experiment, and no data anywhere else."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("FEDSIM_DATA", str(tmp_path / "data"))
    monkeypatch.setattr("fedsim.launch.prepare.load_dataset", load_once)
    Path("small.yaml").write_text(experiment({}))


def everything() -> dict[str, bytes | None]:
    """All files and folders below the working directory."""
    return {str(p): p.read_bytes() if p.is_file() else None for p in Path().rglob("*")}


@pytest.fixture
def refused(say: Say) -> Callable[..., str]:
    """Ask for something, see it refused and nothing touched; what is told."""

    def refused(ask: str | Callable[[], object]) -> str:
        before = everything()
        if isinstance(ask, str):
            code, out, err = say(*shlex.split(ask))
            assert (code, out) == (2, "")
            assert err.startswith("error: ")
            told = err.removeprefix("error: ").rstrip("\n")
        else:
            with pytest.raises(BadInput) as refusal:
                ask()
            told = str(refusal.value)
        assert everything() == before
        return told.replace(str(Path.cwd()), "HERE")

    return refused


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of small.yaml."""
    out = tmp_path_factory.mktemp("runs")
    file = out / "small.yaml"
    file.write_text(experiment({}))
    return run(file, out, progress=False).path


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.said.partition("\n")[0])
def test_refusals(
    row: Row,
    refused: Callable[..., str],
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if row.missing:
        MADE.clear()  # whoever makes them may need it
        monkeypatch.setitem(sys.modules, row.missing, None)
    Path("small.yaml").write_text(experiment(row.lines))
    for name, content in row.files.items():
        write(Path(name), content)
    if row.change is not None:
        row.change(shutil.copytree(finished, tmp_path / "run"))
    told = refused(row.ask)
    if "HERE" not in row.said:
        told = told.replace("HERE/", "")
    assert re.fullmatch(".*".join(map(re.escape, row.said.split("..."))), told), told
    assert PLACE.match(told)
    assert not UNKNOWN.search(told) or OFFERS.search(told)


def test_well_formed_data_are_accepted(say: Say) -> None:
    for name, content in mnist(LABELS).items():
        write(Path(name), content)
    words = ("run", "small.yaml", "data={name: mnist}", "partition.clients=2")
    code, _, told = say(*words)
    assert code == 0, told
