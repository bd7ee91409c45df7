"""Final models as other programs read them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from fedsim.analysis.replay import ModelSnapshot
from fedsim.data import tokens
from fedsim.errors import DataError
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
    snapshot = ModelSnapshot.of(run)
    network, experiment = snapshot.network(), snapshot.again.experiment
    folder.mkdir(parents=True)
    if experiment.adapters is not None and experiment.method.adapts != "both, exactly":
        outside = partial(experiment.model.outside, network)
        save_for_peft(network, folder / "adapters", experiment.adapters, outside)
    data = snapshot.dataset
    experiment.model.save(merged(network), folder, data)
    if data.tokenizer:
        tokens.save(data.tokenizer, data.padding, folder)
    return sorted(path for path in folder.rglob("*") if path.is_file())
