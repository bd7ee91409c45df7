"""Packages that not every installation has: `pip install 'fedsim[all]'` brings all of them."""

from __future__ import annotations

from importlib.util import find_spec

from fedsim.errors import NotInstalled

# Of each module that is imported only where it is needed: the package, and the extra with it.
OPTIONAL = {
    "captum": ("captum", "explain"),
    "datasets": ("datasets", "hf"),
    "dp_accounting": ("dp-accounting", "privacy"),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "optuna": ("optuna", "tune"),
    "pydicom": ("pydicom", "dicom"),
    "skimage": ("scikit-image", "privacy"),
    "tensorboardX": ("tensorboardX", "tensorboard"),
    "timm": ("timm", "vision"),
    "tokenizers": ("tokenizers", "hf"),
    "torchvision": ("torchvision", "vision"),
    "transformers": ("transformers", "hf"),
    "wandb": ("wandb", "wandb"),
    "xgboost": ("xgboost-cpu", "explain"),
    "peft": ("peft", "hf"),
    "zennit": ("zennit", "lrp"),
}


def require(module: str, purpose: str) -> None:
    """Refuse what cannot be done without a package that is not installed.

    Args:
        module: one of `OPTIONAL`, about to be imported.
        purpose: what it is needed for, as the beginning of a sentence.

    Raises:
        NotInstalled: it is not there; the message has the command that installs it.
    """
    package, extra = OPTIONAL[module]
    if find_spec(module) is None:
        raise NotInstalled(
            f"{purpose} needs {package}, which is not installed: pip install 'fedsim[{extra}]'"
        )
