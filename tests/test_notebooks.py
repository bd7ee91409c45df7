"""Every notebook runs from a clean start, and what is stored in it is what comes out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from commands import Command
from jupyter_client.provisioning import LocalProvisioner
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# "/home/…", "C:\…", "file:///…", but neither "up/down" nor "</td>".
ABSOLUTE = re.compile(r"(?<![\w.<~)/])/(?=\w)\S+|\b[A-Za-z]:\\\S+|\bfile://\S+|~/\S+")


def code_cells(path: Path) -> list[NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def texts(cell: NotebookNode) -> list[str]:
    """What a reader sees below a cell, but for pictures."""
    found = [output.text for output in cell.outputs if output.output_type == "stream"]
    for output in cell.outputs:
        data = output.get("data", {})
        found += [text for kind, text in data.items() if kind.startswith("text/")]
    return found


@pytest.fixture
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Temporary folders and the kernel's own files below the test's; this checkout's fedsim."""
    for name in ("TMPDIR", "IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are forked from a process that has imported what runs need."""
    kernels: list[Command] = []

    async def launch(self: LocalProvisioner, cmd: list[str], **options: Any) -> dict[str, Any]:
        module, *words = cmd[cmd.index("-m") + 1 :]
        kernel = Command(*words, module=module, cwd=Path(options["cwd"]), env=options["env"])
        kernels.append(kernel)
        self.process, self.pid = kernel, kernel.pid  # but no group, which is not its own
        return self.connection_info

    monkeypatch.setattr(LocalProvisioner, "launch_kernel", launch)
    yield
    for kernel in kernels:
        kernel.kill()
        kernel.wait()


@pytest.mark.night
@pytest.mark.usefixtures("_clean", "_forked")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    stored = [[_kind(output) for output in cell.outputs] for cell in code_cells(path)]
    here = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", coalesce_streams=True, resources=here
    ).execute()  # raises what a cell raises
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [[_kind(output) for output in cell.outputs] for cell in cells] == stored
    assert not [p for p in tmp_path.iterdir() if p.name.islower()], "it left files beside itself"


def _kind(output: NotebookNode) -> tuple[str, ...]:
    """Printed, shown or returned, and in which formats; not the text."""
    return (output.output_type, output.get("name", ""), *sorted(output.get("data", {})))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_was_executed_from_top_to_bottom_by_nobody_in_particular(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(o.output_type != "error" and o.get("name") != "stderr" for o in outputs)
    shown = [text for cell in cells for text in texts(cell)]
    assert shown
    assert not [found for text in shown for found in ABSOLUTE.findall(text)]
    metadata = nbformat.read(path, as_version=4).metadata
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert metadata.kernelspec == kernel
    assert metadata.language_info == {"name": "python"}
    assert path.stat().st_size < 200_000


@pytest.mark.parametrize(
    ("text", "private"),
    [
        ("run folder: /home/ann/runs/x", True),
        ("PosixPath('/tmp/a')", True),
        (r"C:\Users\ann", True),
        ("~/runs", True),
        ("12.3 kB/s, up/down, 7/20", False),
        ("<td>1</td>", False),
        ("weights/final.safetensors", False),
        ("https://example.org/a", False),
    ],
)
def test_what_counts_as_a_private_path(text: str, private: bool) -> None:
    assert bool(ABSOLUTE.findall(text)) == private
