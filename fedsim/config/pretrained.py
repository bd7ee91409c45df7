"""Pretrained models and tokenizers of Hugging Face: how experiments name them, and their folders.

Nothing that comes with them is executed.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from fedsim.config.registry import absolute
from fedsim.errors import DataError, FedsimError, in_one_line
from fedsim.support.extras import require

PACKAGE = "package:"
FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]  # fetched from the Hub


def _absolute(name: str) -> str:
    """A folder's path as absolute, so that a run can be resumed from another folder."""
    if not name:
        raise PydanticCustomError("empty", "must be a folder or a name on the Hub")
    path = absolute(Path(name))
    return str(path) if path.exists() else name


# A folder that `save_pretrained` has written; `package:module/folder`, a folder within an
# installed package; or a name on the Hub.
Pretrained = Annotated[str, AfterValidator(_absolute)]


@contextmanager
def reading(key: str, name: str) -> Iterator[Path]:
    """Context with the folder of a `Pretrained`, in which it is loaded without progress bars.

    Of a name on the Hub, it is the snapshot in Hugging Face's cache; what is not there is fetched.

    Args:
        key: the key of the experiment that names it, for messages.

    Raises:
        DataError: there is none, it comes with code of its own, or cannot be loaded.
    """
    require("transformers", f"{key}={name}")
    from transformers.utils import logging as library

    hub, bar = logging.getLogger("huggingface_hub"), library.is_progress_bar_enabled()
    levels = hub.level, library.get_verbosity()
    hub.setLevel(logging.ERROR)
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        folder = folder_of(key, name)
        for file in ("config.json", "tokenizer_config.json"):
            path = folder / file
            if path.exists() and "auto_map" in json.loads(path.read_text("utf-8")):
                raise DataError(
                    f"{key}={name}: comes with code of its own ({file}: auto_map), which is not "
                    "executed; take one that transformers itself has the code of"
                )
        yield folder
    except FedsimError:
        raise
    except Exception as error:  # of many types, also of other libraries
        raise DataError(f"{key}={name}: cannot be loaded: {in_one_line(error)}") from error
    finally:
        hub.setLevel(levels[0])
        library.set_verbosity(levels[1])
        if bar:
            library.enable_progress_bar()


def folder_of(
    key: str, name: str, instead: str = "a folder that save_pretrained has written"
) -> Path:
    """The folder of a `Pretrained`; of a name on the Hub, what is fetched from there.

    Args:
        key: the key of the experiment that names it, for messages.
        instead: what does without the network, for messages.

    Raises:
        DataError: there is none.
    """
    if name.startswith(PACKAGE):
        module, _, below = name.removeprefix(PACKAGE).partition("/")
        package, *inner = module.split(".")
        spec = find_spec(package)  # of a dotted name, it would import the package
        if spec is None or not spec.submodule_search_locations:
            raise DataError(f"{key}={name}: there is no package '{package}' here; install it")
        folder = Path(spec.submodule_search_locations[0], *inner, below)
    else:
        folder = Path(name)
    if folder.is_dir():
        return folder
    if name.startswith((PACKAGE, ".", "/", "~")):
        raise DataError(f"{key}={name}: there is no such folder")
    for cached in (True, False):
        try:
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(name, allow_patterns=FILES, local_files_only=cached))
        except Exception as error:  # of many types
            if not cached:
                raise DataError(
                    f"{key}={name}: there is no such folder, and it cannot be fetched from the "
                    f"Hub ({type(error).__name__}); without the network, name {instead}"
                ) from error
    raise AssertionError
