"""The `engine` section of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsim.registry import Config


class EngineSettings(Config):
    """The `engine` section: where client work is carried out, and with what.

    Args:
        kind: `ray`, or `local` (in this process: for debugging, notebooks and tests).
        actors: how many client actors; `auto` is as many as the cluster can hold.
        cpus_per_actor: CPUs, and with them threads, of each actor. Sums over several threads are
            rounded otherwise, so results depend on it in the last bits.
        gpus_per_actor: GPUs of each actor; a fraction shares one GPU among several.
        clients_per_step: V, clients trained at once in a stack; `auto` measures before the first
            round what is fastest. Results depend on it in the last bits, so it is put on record;
            where there is no memory for so many, it is halved, and that as well.
        mixed_processors: go on although nodes with other processors, or other cards, round
            otherwise; the last bits then depend on which of them trains which client.
    """

    kind: Literal["ray", "local"] = "ray"
    actors: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    cpus_per_actor: int = Field(1, ge=1, le=4096)
    gpus_per_actor: float = Field(0, ge=0)
    clients_per_step: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    mixed_processors: bool = False
