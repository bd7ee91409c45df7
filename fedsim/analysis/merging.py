"""Final models as other programs read them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fedsim.analysis.replay import ModelSnapshot
from fedsim.data import tokens
from fedsim.errors import DataError, RunFolderError
from fedsim.models.adapters import merged, save_for_peft
from fedsim.results.run import Run


def merge(run: Run | str | Path, out: str | Path) -> list[Path]:
    """Write the final global network of a run, with its adapters merged into the layers below.

    A checkpoint of transformers is written with its configuration, as `from_pretrained` reads it;
    any other network as `model.safetensors`, with the names that its layers have without adapters,
    for `train.initial_weights` say. The tokenizer of the data is written, too. Adapters are also
    written to the folder `adapters`, as peft reads them, unless the method has changed the layers
    below.

    Args:
        run: a finished run, or its folder.
        out: a new folder.

    Returns:
        The files.

    Raises:
        BadInput: there is no global network, or the folder exists.
    """
    folder = Path(out)
    if folder.exists():
        raise DataError(f"{folder}: exists already; name a new folder")
    run = Run.of(run)
    experiment, method = run.experiment, run.experiment.method
    if not method.has_global_model:
        raise RunFolderError(
            f"{run.path}: method.name={method.name} has no global model to merge; for a client's "
            "own: fedsim.analysis.replay.ModelSnapshot.of(run, client=0).network()"
        )
    snapshot = ModelSnapshot.of(run)
    network = snapshot.network()
    folder.mkdir(parents=True)
    if experiment.adapters is not None and method.adapts != "both, exactly":
        outside = partial(experiment.model.outside, network)
        save_for_peft(network, folder / "adapters", experiment.adapters, outside)
    data = snapshot.dataset
    experiment.model.save(merged(network), folder, data)
    if data.tokenizer:
        tokens.save(data.tokenizer, data.padding, folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())
