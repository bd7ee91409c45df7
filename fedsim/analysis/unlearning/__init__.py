"""Unlearning: make a finished run forget clients, and compare with the run that never had them."""

from fedsim.analysis.unlearning import fed_eraser as _fed_eraser
from fedsim.analysis.unlearning import fed_quit as _fed_quit
from fedsim.analysis.unlearning import fine_tune as _fine_tune
from fedsim.analysis.unlearning import gradient_ascent as _gradient_ascent
from fedsim.analysis.unlearning import retrain as _retrain
from fedsim.analysis.unlearning.forgetting import Forgetting, Unlearning, unlearning

__all__ = ["Forgetting", "Unlearning", "unlearning"]
del _fed_eraser, _fed_quit, _fine_tune, _gradient_ascent, _retrain
