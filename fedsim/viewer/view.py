"""`fedsim.view`."""

from __future__ import annotations

from html import escape
from pathlib import Path

from fedsim.config.arguments import checked
from fedsim.errors import BadInput, RunFolderError
from fedsim.results.run import Run
from fedsim.results.sweeps import Grid, Search
from fedsim.viewer.server import Server


class View:
    """A page that a server of this process shows; notebooks show it in the cell.

    Attributes:
        url: its address, which only this computer reaches; it is secret, because it has the token.
    """

    def __init__(self, server: Server, height: int) -> None:
        self._server, self._height = server, height
        self.url = server.url

    def __repr__(self) -> str:
        return f"<View {self.url}>"

    def _repr_html_(self) -> str:
        style = f"width: 100%; height: {self._height}px; border: 1px solid #8888"
        return f'<iframe src="{escape(self.url)}" title="fedsim view" style="{style}"></iframe>'

    def wait(self) -> None:
        """Serve until this is interrupted."""
        self._server.wait()

    def close(self) -> None:
        """Stop the server."""
        self._server.close()


@checked
def view(
    run: Run | Grid | Search | str | Path,
    *,
    port: int = 0,
    height: int = 900,
    trust: bool = False,
) -> View:
    """Show a run, with the decisions of its models in any round, in a browser or a notebook.

    A server in this process answers on loopback alone, and only to those who know the address.
    What must be computed again is computed in a process of its own, which ends with this one.

    Args:
        run: a run, a grid or a search, or its folder, or one above several.
        port: of the server; 0 for any that is free.
        height: of the cell's frame in a notebook, in pixels.
        trust: allow folders from elsewhere to run the code that their experiments name. Read that
            code first.

    Raises:
        BadInput: there is no such folder, or the port is taken.

    Example:
        >>> import fedsim
        >>> shown = fedsim.view(folder)
        >>> shown.url.startswith("http://127.0.0.1:")
        True
        >>> shown.close()
    """
    if not 0 <= port < 2**16:
        raise BadInput(f"port must be from 0 to {2**16 - 1}, not {port}")
    if height < 1:
        raise BadInput(f"height must be at least 1, not {height}")
    folder = Path(run) if isinstance(run, str | Path) else run.path
    if not folder.is_dir():
        raise RunFolderError(f"{folder}: there is no such folder")
    return View(Server(folder, port, trust), height)
