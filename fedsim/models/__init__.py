"""Network architectures, rule models and boosted trees."""

# ruff: noqa: F401  (modules that are not used here fill the registry)

from fedsim.models import boosted_trees as _boosted_trees
from fedsim.models import concept_bottleneck as _concept_bottleneck
from fedsim.models import huggingface as _huggingface
from fedsim.models import libraries as _libraries
from fedsim.models import nam as _nam
from fedsim.models import networks as _networks
from fedsim.models import rationale as _rationale
from fedsim.models import text as _text
from fedsim.models import transformer as _transformer
from fedsim.models import tree_rules as _tree_rules
from fedsim.models import tsk as _tsk
from fedsim.models.arrays import ArrayModel, Arrays
from fedsim.models.model import Classifier, Model, TextModel, models
from fedsim.models.rules import RuleModel, Rules

__all__ = [
    "ArrayModel",
    "Arrays",
    "Classifier",
    "Model",
    "RuleModel",
    "Rules",
    "TextModel",
    "models",
]
