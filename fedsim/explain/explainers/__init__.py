"""The explainers by name."""

from fedsim.explain.explainer import explainers
from fedsim.explain.explainers import attention as _attention  # they fill the registry
from fedsim.explain.explainers import captum as _captum
from fedsim.explain.explainers import concepts as _concepts
from fedsim.explain.explainers import control as _control
from fedsim.explain.explainers import gradcam as _gradcam
from fedsim.explain.explainers import gradients as _gradients
from fedsim.explain.explainers import lrp as _lrp
from fedsim.explain.explainers import mimic as _mimic
from fedsim.explain.explainers import occlusion as _occlusion
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
    _captum,
    _concepts,
    _control,
    _gradcam,
    _gradients,
    _lrp,
    _mimic,
    _occlusion,
    _rationales,
)
del _rules, _sage, _shape_functions, _shared_images, _tasks, _trees
