"""FedWeIT: the method, states of server and clients, the objective, evaluation."""

from fedsim.methods.fedweit.compat import Compat
from fedsim.methods.fedweit.method import FedWeIT, FedWeITState

__all__ = ["Compat", "FedWeIT", "FedWeITState"]
