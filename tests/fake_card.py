"""A card that is not there: its tensors lie in main memory, and refuse what those of a card do.

For PyTorch the card is the device `meta`, which every build has. What is on it is really computed,
by the processor, with the same numbers. An operation on tensors of both devices raises, as CUDA
would, and so do `numpy()` on one of the card's and operations that have no deterministic
implementation on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedsim.analysis import replay
from fedsim.data import Dataset
from fedsim.federation import context, engine, on_card
from fedsim.training import captured, stack

CARD = torch.device("meta")
aten = torch.ops.aten

COPIES = {aten.copy_, aten._to_copy}  # from one device to the other
# Whose indices may lie in main memory if what is indexed is on the card.
INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
# Of those that torch.use_deterministic_algorithms refuses, the ones that a network might have.
NOT_DETERMINISTIC = {
    *(aten._adaptive_avg_pool2d_backward, aten.adaptive_max_pool2d_backward, aten._ctc_loss),
    *(aten.upsample_bilinear2d_backward, aten.upsample_bicubic2d_backward, aten.kthvalue),
    *(aten.upsample_linear1d_backward, aten.reflection_pad1d_backward, aten.put_),
    *(aten.reflection_pad2d_backward, aten.replication_pad2d_backward, aten.nll_loss2d_forward),
    *(aten.grid_sampler_2d_backward, aten.histc, aten.cumsum),
}


class OnCard(Tensor):
    """A tensor on the card.

    Attributes:
        held: its numbers.
    """

    held: Tensor
    is_meta = False  # or `nn.init` would leave it out

    @staticmethod
    def __new__(cls, held: Tensor) -> OnCard:
        made: OnCard = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CARD,
        )
        made.held = held
        return made

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor on the card to numpy; use Tensor.cpu() first")

    def tolist(self) -> Any:
        return self.held.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"OnCard({self.held!r})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            args = (args[0], _as_tensors(args[1]), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            args[0].held = args[1].held
        return found

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return carried_out(func, args, kwargs or {})


class Driver(TorchDispatchMode):
    """Carries out what names the card as its device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        return carried_out(func, args, kwargs or {})


def carried_out(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation returns.

    Raises:
        RuntimeError: it takes tensors of both devices, or is not deterministic on a card.
    """
    here: dict[int, OnCard] = {}
    inner, named = _held(args, here), {name: _held(v, here) for name, v in kwargs.items()}
    if here:
        _check(func, args, kwargs)
    device = kwargs.get("device")
    if device is not None:
        named["device"] = torch.device("cpu")
    found = func(*inner, **named)
    goes_there = bool(here) if device is None else torch.device(device) == CARD
    return _placed(found, here) if goes_there else found


def _held(value: Any, here: dict[int, OnCard]) -> Any:
    """An argument with tensors in main memory instead of those on the card, which are noted."""
    if isinstance(value, OnCard):
        here[id(value.held)] = value
        return value.held
    if isinstance(value, Tensor) and value.device == CARD:
        raise AssertionError(f"a tensor of shape {tuple(value.shape)} has lost its numbers")
    return [_held(v, here) for v in value] if isinstance(value, list | tuple) else value


def _as_tensors(index: Any) -> Any:
    """An index without arrays and lists, whose numbers PyTorch would leave out on `meta`."""
    if isinstance(index, tuple):
        return tuple(map(_as_tensors, index))
    return torch.as_tensor(index) if isinstance(index, list | np.ndarray) else index


def _placed(found: Any, here: Mapping[int, OnCard]) -> Any:
    """What an operation returned, on the card."""
    if isinstance(found, list | tuple):
        return [_placed(each, here) for each in found]
    if not isinstance(found, Tensor):
        return found
    known = here.get(id(found))  # changed in place
    if known is None:
        return OnCard(found)
    if known.shape != found.shape:
        known.data = OnCard(found)
    return known


def _check(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = func.overloadpacket
    floats = args[0].is_floating_point() if name is aten.cumsum else True
    if name in NOT_DETERMINISTIC and floats:
        raise RuntimeError(f"{func} has no deterministic implementation on a card")
    if name in COPIES:
        return
    indexed = name in INDEXED and isinstance(args[0], OnCard)
    checked = (*args[:1], *args[2:]) if indexed else args
    # Single numbers may come from anywhere.
    least = 1 if indexed or torch.Tag.pointwise in func.tags else 0
    if any(t.dim() >= least for t in _in_main_memory([*checked, *kwargs.values()])):
        raise RuntimeError(f"{func}: expected all tensors to be on the card")


def _in_main_memory(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _in_main_memory(value)
        elif isinstance(value, Tensor) and not isinstance(value, OnCard):
            yield value


@dataclass
class FakeGraphs:
    """Graphs of a processor, which compute again into the same memory.

    Attributes:
        captured, replayed: how often.
        broken: replays compute something else.
    """

    captured: int = 0
    replayed: int = 0
    broken: bool = False

    def capture(self, gradient: Callable[[], tuple[Tensor, Tensor]]) -> Any:
        self.captured += 1
        found = gradient()
        for tensor in found:
            tensor.fill_(torch.nan)  # nothing is computed yet

        def replay() -> None:
            self.replayed += 1
            for tensor, new in zip(found, gradient(), strict=True):
                tensor.copy_(new + self.broken)

        return found, replay


@contextmanager
def fake_card() -> Iterator[None]:
    """Networks of runs, replays and explanations are on the card, and so are training examples."""
    made = torch.tensor

    def keep(dataset: Dataset, device: torch.device, part: float) -> tuple[Any, None]:
        return (on_card.OnCard(dataset, device) if part else None), None

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        """`torch.tensor` leaves out the numbers if the device is `meta`."""
        return made(data, **options).to(device)

    def generator(state: Tensor, device: torch.device) -> torch.Generator:
        return of_processor(state, torch.device("cpu"))

    of_processor = stack._generator
    with pytest.MonkeyPatch.context() as patch, Driver():
        for module in (engine, replay):
            patch.setattr(module, "pick_device", lambda settings: CARD)
        patch.setattr(torch, "tensor", tensor)
        patch.setattr(stack, "_generator", generator)
        patch.setattr(context, "keep_on_card", keep)
        patch.setattr(captured, "available", lambda device: device == CARD)
        patch.setattr(captured, "capture", FakeGraphs().capture)
        yield
