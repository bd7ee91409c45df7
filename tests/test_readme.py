"""Every snippet of the README runs, and what it says of the quickstart is so."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedsim import Experiment, Run, load, run
from fedsim.cli import main
from fedsim.methods.method import methods
from fedsim.objectives.continual import continual

Command = Callable[[list[str]], str]
ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the README's files in it, as a reader would have saved them."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "experiments").symlink_to(ROOT / "experiments")
    for text in blocks("yaml"):
        name = re.search(r"^name: (\S+)", text)
        assert name
        (folder / f"{name[1]}.yaml").write_text(text)
    ten_lines, method, objective, data = blocks("python")
    (folder / "ten_lines.py").write_text(ten_lines)
    (folder / "my_method.py").write_text(method)
    (folder / "my_objective.py").write_text(objective)
    (folder / "make_data.py").write_text(data)
    return folder


def call(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def newest(folder: Path, name: str) -> Run:
    return load(max((folder / "runs" / name).iterdir()))


def test_ten_lines_of_python(workplace: Path) -> None:
    assert "accuracy" in call(workplace, "ten_lines.py")


@pytest.fixture
def command(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Runs a command of fedsim in this process, and returns what it printed."""

    def command(words: list[str]) -> str:
        monkeypatch.chdir(workplace)
        monkeypatch.setattr(sys, "argv", ["fedsim", *words])
        monkeypatch.setattr(sys, "path", [*sys.path])  # which the command puts its folder into
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        assert not left.value.code, printed.err
        return printed.out

    return command


@pytest.mark.usefixtures("own_ray")
class TestCommands:
    @pytest.mark.parametrize("line", "".join(blocks("console")).splitlines())
    def test_commands(self, workplace: Path, command: Command, line: str) -> None:
        program, *words = shlex.split(line, comments=True)
        assert program == "fedsim"
        for k, word in enumerate(words):  # as a shell would
            if "*" in word:
                words[k : k + 1] = [str(path) for path in workplace.glob(word)]
        if words[0] == "run" and "engine.actors" not in line:  # whose result does not depend on it
            words.append("engine.kind=local")
        # The doctor reaches for a Ray by itself.
        text = call(workplace, "-m", "fedsim", *words) if words[0] == "doctor" else command(words)
        assert text
        if "--client" in line:
            assert text.startswith("client 2's model after round 5, lrp:")
        elif line.startswith("fedsim explain"):
            words = "by rule" if "fuzzy-rules" in line else "THE SAME mask"
            (shown,) = (block for block in blocks("text") if words in block)
            assert shown in text
        if "privacy." in line:
            assert newest(workplace, "skewed-digits").rounds["epsilon"].is_monotonic_increasing
        if "my_objective" in line:
            assert newest(workplace, "skewed-digits").rounds["macro_f1"].between(0.01, 1).all()
        if "my_method" in line:
            # The README's method is FedProx, to the bit.
            theirs = Experiment.load(
                workplace / "skewed-digits.yaml", ["method.mu=0.5", "engine.kind=local"]
            )
            assert (
                newest(workplace, "skewed-digits").result_hash
                == run(theirs, workplace / "fedprox").result_hash
            )


def test_data_of_your_own(workplace: Path, command: Command) -> None:
    call(workplace, "make_data.py")
    command(["run", "hospitals.yaml", "engine.kind=local"])
    done = newest(workplace, "hospitals")
    assert done.manifest["clients"] == 12
    assert done.rounds["accuracy"].iloc[-1] > 0.9


def test_tasks_in_turn(workplace: Path, command: Command) -> None:
    command(["run", "digits-in-turn.yaml"])
    done = newest(workplace, "digits-in-turn")
    assert len(done.tasks) == 8 * 3 * 2
    found = continual(done.tasks)
    assert found.tta == pytest.approx(done.rounds["accuracy"].iloc[-1])
    assert found.tta > 0.8


def test_chosen_words(workplace: Path, command: Command) -> None:
    command(["run", "chosen-words.yaml"])
    done = newest(workplace, "chosen-words")
    names = ["chosen", "rationale_precision", "rationale_recall", "rationale_f1", "chance_f1"]
    assert done.rounds[[*names, "comprehensiveness", "sufficiency"]].notna().all(axis=None)
    said = command(["explain", str(done.path), "--text", "a golden head"])
    assert "golden" in said


def test_the_message_for_a_typing_error(workplace: Path) -> None:
    text = (workplace / "skewed-digits.yaml").read_text()
    (shown,) = (block for block in blocks("text") if block.startswith("error:"))
    folder = workplace / "typo"
    folder.mkdir()
    (folder / "skewed-digits.yaml").write_text(text.replace("participation", "particpation"))
    done = subprocess.run(
        [sys.executable, "-m", "fedsim", "run", "skewed-digits.yaml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (2, shown)


def test_the_quickstart_learns_what_the_readme_says(tmp_path: Path) -> None:
    experiment = Experiment.load(ROOT / "experiments" / "quickstart.yaml", ["engine.kind=local"])
    accuracy = run(experiment, tmp_path).rounds["accuracy"]
    shown = re.search(r"^accuracy, mean of last 5  ([\d.]+)$", README, re.MULTILINE)
    assert shown
    assert accuracy.iloc[-5:].mean() == pytest.approx(float(shown[1]), abs=0.03)


def test_every_method_is_in_the_table() -> None:
    (table,) = re.findall(r"^\| `method.name` .*?\n\n", README, re.MULTILINE | re.DOTALL)
    listed = re.findall(r"`(\w+)`", "".join(row.split("|")[1] for row in table.splitlines()[2:-1]))
    assert sorted(listed) == [name for name, _ in methods.items()]


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\w+)", README, re.MULTILINE):
        assert f"\n{target}:" in makefile
