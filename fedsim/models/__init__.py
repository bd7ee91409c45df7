"""Network architectures and rule models."""

from fedsim.models import networks as _networks  # they fill the registry
from fedsim.models import tree_rules as _tree_rules
from fedsim.models import tsk as _tsk
from fedsim.models.model import Classifier, Model, models
from fedsim.models.rules import RuleModel, Rules

__all__ = ["Classifier", "Model", "RuleModel", "Rules", "models"]
del _networks, _tree_rules, _tsk
