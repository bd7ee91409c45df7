"""The explainers by name."""

from fedsim.explain.explainer import explainers
from fedsim.explain.explainers import attention as _attention  # they fill the registry
from fedsim.explain.explainers import attribution as _attribution
from fedsim.explain.explainers import mimic as _mimic
from fedsim.explain.explainers import rationales as _rationales
from fedsim.explain.explainers import rules as _rules
from fedsim.explain.explainers import sage as _sage
from fedsim.explain.explainers import shape_functions as _shape_functions
from fedsim.explain.explainers import shared_images as _shared_images
from fedsim.explain.explainers import tasks as _tasks
from fedsim.explain.explainers import trees as _trees

__all__ = ["explainers"]
del (
    _attention,
    _attribution,
    _mimic,
    _rationales,
    _rules,
    _sage,
    _shape_functions,
    _shared_images,
    _tasks,
    _trees,
)
