"""FedWeIT, in parts: the method, what server and clients keep, what is minimised, evaluation."""

from fedsim.methods.fedweit.compat import Compat
from fedsim.methods.fedweit.method import FedWeIT, FedWeITState

__all__ = ["Compat", "FedWeIT", "FedWeITState"]
