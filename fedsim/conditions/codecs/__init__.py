"""Lossy compression of what clients and the server send: the sections `uplink`, `downlink`."""

from fedsim.conditions.codecs import lowrank as _lowrank  # they fill the registry
from fedsim.conditions.codecs import quantised as _quantised
from fedsim.conditions.codecs import sparse as _sparse
from fedsim.conditions.codecs.codec import Codec, Shapes, codecs

__all__ = ["Codec", "Shapes", "codecs"]
del _lowrank, _quantised, _sparse
