"""The `engine` section of an experiment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsim.config.registry import Config


class EngineSettings(Config):
    """The `engine` section: where client work is computed, and with which resources.

    Args:
        kind: `ray`, or `local` (in this process, for debugging, notebooks and tests).
        actors: number of client actors; `auto` uses as many as the cluster can hold.
        cpus_per_actor: CPUs, and thus threads, of each actor. Sums over several threads round
            differently, so results depend on it in the last bits.
        gpus_per_actor: GPUs of each actor; with a fraction, several actors share a GPU.
        clients_per_step: V, clients trained together in one stack; `auto` measures before the
            first round which number is fastest. Results depend on it in the last bits, so it is
            recorded. If memory runs out, it is halved, which is recorded as well.
        mixed_processors: run even if nodes have different processors or GPUs that round
            differently; the last bits then depend on which node trains which client.
    """

    kind: Literal["ray", "local"] = "ray"
    actors: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    cpus_per_actor: int = Field(1, ge=1, le=4096)
    gpus_per_actor: float = Field(0, ge=0)
    clients_per_step: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    mixed_processors: bool = False
