"""Compression: what arrives of what a codec has encoded, and how many bytes it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedsim.conditions.codecs import Codec
from fedsim.conditions.privacy import reference
from fedsim.data import ClientSplits
from fedsim.errors import ExperimentError, in_own_code
from fedsim.federation.condition import Condition, Exchange, Layers, Round, Sent
from fedsim.federation.context import RunSpec
from fedsim.federation.reduction import Update, Vector, since_sent
from fedsim.federation.wire import NotCounted, PerClient, each_leaf, nbytes
from fedsim.support.rng import keyed_rng


@dataclass(frozen=True)
class Link:
    """One direction of the network: vectors of 32-bit floats are sent through a codec.

    The buffers at the end of a model's weights (batch norm's statistics) are sent as they are,
    since a variance must stay positive, and so are single numbers.

    Args:
        codec: what compresses.
        layers: the shapes of the trained layers in vectors of weights; see `trained_layers`.
    """

    codec: Codec
    layers: Layers

    def code(self, vector: Vector, rng: np.random.Generator) -> tuple[Vector, int]:
        """What arrives of a vector, (n,), and its bytes; the vector itself if nothing is lost."""
        shapes = self.layers.get(len(vector), [vector.shape])
        count = sum(map(math.prod, shapes))
        encoded = vector[:count]
        if count < 2:
            return vector, vector.nbytes
        message = self.codec.encode(encoded, shapes, rng)
        if nbytes(message) >= encoded.nbytes:
            return vector, vector.nbytes
        decoded = self.codec.decode(message, shapes)
        if decoded.shape != encoded.shape:
            raise ValueError(
                f"codec {self.codec.name} decodes a vector of {encoded.shape} as {decoded.shape}"
            )
        arrived = vector.copy()
        arrived[:count] = decoded
        return arrived, nbytes(message) + vector[count:].nbytes

    def message(
        self,
        message: Any,
        arguments: Mapping[str, Any],
        residuals: Mapping[str, Vector],
        rng: np.random.Generator,
    ) -> tuple[Any, int, dict[str, Vector]]:
        """What arrives of what a client function returns, the bytes saved, and the new residuals.

        The vectors of an `Update` are encoded, and those of a dict that have the name and the size
        of something that the server sent: as their change from what it sent. If there are none,
        the message arrives as it is.

        Args:
            arguments: what the server sent to all, as tensors by name.
            residuals: what was lost of earlier updates, by the vectors' names.
        """
        if isinstance(message, Update):
            vectors = message.vectors
        elif isinstance(message, Mapping):
            sized = {n: t for n, t in message.items() if isinstance(t, Tensor)}
            vectors = {
                name: tensor
                for name, tensor in sized.items()
                if isinstance(reference(arguments.get(name), tensor.numel()), Tensor)
            }
        else:
            vectors = {}
        arrived, saved, kept = dict[str, Tensor](), 0, dict(residuals)
        for name, tensor in vectors.items():
            if tensor.dtype != torch.float32:
                continue
            vector = tensor.detach().cpu().numpy().reshape(-1)
            sent = reference(arguments.get(name), len(vector))
            base = sent.detach().cpu().numpy() if isinstance(sent, Tensor) else np.float32(0)
            change = vector - base
            residual = residuals.get(name)
            if residual is not None and residual.shape == change.shape:
                change += residual
            decoded, size = self.code(change, rng)
            saved += vector.nbytes - size
            arrived[name] = tensor
            if decoded is change and residual is None:
                continue
            arrived[name] = torch.from_numpy(base + decoded).to(tensor.device).view(tensor.shape)
            if self.codec.error_feedback:
                kept[name] = change - decoded
        if not arrived:
            return message, 0, kept
        if isinstance(message, Update):
            return message.with_vectors({**vectors, **arrived}), saved, kept
        return {**message, **arrived}, saved, kept

    def arguments(
        self, arguments: Mapping[str, Any], rng: Callable[[str], np.random.Generator]
    ) -> tuple[dict[str, Any], Counter[int | None]]:
        """What arrives of what the server sends, and the bytes saved by client (None for all).

        Args:
            rng: the random stream for an argument, by name.
        """
        saved = Counter[int | None]()

        def through(stream: np.random.Generator, to: int | None, leaf: Any) -> Any:
            array = leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else leaf
            if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.size < 2:
                return leaf
            decoded, size = self.code(array.reshape(-1), stream)
            saved[to] += array.nbytes - size
            return decoded.reshape(array.shape)

        arrived = dict(arguments)
        for name, value in arguments.items():
            if isinstance(value, PerClient):
                parts = {
                    k: each_leaf(part, partial(through, rng(f"{name}/{k}"), k))
                    for k, part in value.parts.items()
                }
                arrived[name] = PerClient(parts)
            elif not isinstance(value, NotCounted):
                arrived[name] = each_leaf(value, partial(through, rng(name), None))
        return arrived, saved


class Uplink(Condition):
    """What clients send is encoded."""

    name: str = "uplink"
    order: ClassVar[int] = 60  # others act on what it has encoded
    idle: ClassVar[str] = "clients send no updates"
    codec: Codec

    def check(self, spec: RunSpec, splits: ClientSplits, network: nn.Module) -> None:
        """Refuse error feedback with a codec that loses more than it is given."""
        codec, size = self.codec, sum(p.numel() for p in network.parameters() if p.requires_grad)
        if not (codec.error_feedback and size):
            return
        rng = keyed_rng(0, "try codec")
        v = rng.standard_normal(size).astype(np.float32)
        try:
            arrived, _ = Link(codec, {}).code(v, rng)
        except Exception as error:  # of the user's own code
            raise ExperimentError(f"uplink.name={codec.name}: {in_own_code(error)}") from error
        lost = np.linalg.norm(arrived - v) / np.linalg.norm(v)
        if lost >= 1:
            raise ExperimentError(
                f"uplink.error_feedback: name={codec.name} loses {lost:.1f} times the norm of "
                "what it is given, so that what clients keep would grow without bound; set "
                "uplink.error_feedback=false, or take another codec"
            )

    def sent(self, client: Any, sent: Sent) -> Sent:
        link = Link(self.codec, sent.layers)
        message, saved, lost = link.message(
            sent.message, sent.received, sent.memory, client.rng("uplink")
        )
        if message is sent.message:
            return sent
        return replace(sent, message=message, size=sent.size - saved, memory=lost)

    def planned(
        self, way: Literal["down", "up"], vector: Vector, layers: Layers, rng: np.random.Generator
    ) -> int | None:
        return Link(self.codec, layers).code(vector, rng)[1] if way == "up" else None


class Downlink(Condition):
    """What the server sends is encoded."""

    name: str = "downlink"
    order: ClassVar[int] = 30
    idle: ClassVar[str] = "the server sends no vectors"
    codec: Codec

    def outgoing(self, round: Round, exchange: Exchange) -> Exchange:
        arrived, saved = Link(self.codec, round.runner.layers).arguments(
            exchange.arguments, lambda name: round.rng(f"downlink/{exchange.function}/{name}")
        )
        if not saved:
            return exchange
        return replace(exchange, arguments=arrived, saved=exchange.saved + saved)

    def incoming(self, round: Round, before: Exchange, after: Exchange, result: Any) -> Any:
        return result if after is before else since_sent(result, before.arguments, after.to_all)

    def planned(
        self, way: Literal["down", "up"], vector: Vector, layers: Layers, rng: np.random.Generator
    ) -> int | None:
        return Link(self.codec, layers).code(vector, rng)[1] if way == "down" else None
