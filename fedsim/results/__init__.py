"""Results on disk: run folders and tables."""

from fedsim.results import display


def _load() -> None:
    """Import what draws, which takes a second."""
    from fedsim.results import notebook
    from fedsim.results.figures import plots

    display.PAGES.update(notebook.PAGES)
    display.FIGURES.update(plots.FIGURES)


display.loaders.append(_load)
