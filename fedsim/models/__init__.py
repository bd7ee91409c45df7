"""Network architectures."""

from fedsim.models import networks as _networks  # fills the registry
from fedsim.models.model import Classifier, Model, models

__all__ = ["Classifier", "Model", "models"]
del _networks
