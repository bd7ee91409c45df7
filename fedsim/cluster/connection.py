"""Connect to a Ray cluster: an existing one, or a private one."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import psutil

from fedsim.cluster.placement import ACTOR_BYTES, Node, plan_actors
from fedsim.cluster.private import QUIET, fork_server_ahead, handlers_kept, private_ray
from fedsim.cluster.ray_compat import log_what_ray_says
from fedsim.cluster.settings import EngineSettings
from fedsim.config import modules
from fedsim.errors import ClusterError
from fedsim.support.hardware import chosen_instructions

# With empty settings.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
TIMEOUT = 5.0  # seconds to wait for the head of a cluster


@contextmanager
def planned_actors(
    settings: EngineSettings,
    worker_bytes: float,
    most: int,
    tell: Callable[[str], None],
    node_bytes: float = 0.0,
) -> Iterator[int]:
    """Connect to a Ray cluster, like `connected`, and plan the number of client actors of a run.

    `worker_bytes` are those of a worker's arrays, `node_bytes` those that all workers of a node
    share; `most` clients per round limit `engine.actors=auto`.
    """
    if settings.kind == "local":
        free = psutil.virtual_memory().available
        if (needed := worker_bytes + node_bytes) > free:
            raise ClusterError(
                f"engine.kind=local: training takes about {needed / 1e9:.1f} GB of memory, "
                f"and {free / 1e9:.1f} GB are free; use a smaller model or a smaller "
                "engine.clients_per_step"
            )
        yield 0
        return
    import ray

    with connected(settings, tell):
        nodes = [Node.of(node).without(node_bytes) for node in ray.nodes() if node["Alive"]]
        yield plan_actors(settings, nodes, ACTOR_BYTES + worker_bytes, most)


def imports_ahead(settings: EngineSettings) -> AbstractContextManager[None]:
    """Context in which workers of a private Ray, if `connected` will start one, are imported.

    While an experiment is checked, on another core; nothing is said to a cluster.
    """
    ray = sys.modules.get("ray")  # which takes long to import
    if settings.kind == "local" or (ray and ray.is_initialized()) or _named_address() is not None:
        return nullcontext()
    return fork_server_ahead(_variables())


@contextmanager
def connected(
    settings: EngineSettings | None, tell: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Connect to a Ray cluster: an existing one, or a private one that ends with the context.

    An existing cluster (this process is connected, RAY_ADDRESS names one, or this user ran
    `ray start` on this machine) is used as it is, except with RAY_ADDRESS=local. A private one
    gets at least as many CPUs as the experiment asks for, even if there are fewer cores.

    Raises:
        ClusterError: the cluster cannot be reached.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    log_what_ray_says()
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # In a Ray job, the job's variables are set already; Ray would reject duplicates.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    variables, address = _variables(), _cluster_address()
    if address is None:
        tell("starting Ray …")
        cpus = os.cpu_count() or 1
        if settings is not None and settings.actors != "auto":
            cpus = max(cpus, settings.actors * settings.cpus_per_actor)
        with private_ray(cpus, variables):
            yield
        return
    try:
        _connect(address, variables)
        yield
    finally:
        ray.shutdown()


def _variables() -> dict[str, str]:
    """Of the environment of workers."""
    variables = {modules.FOLDER: str(Path.cwd()), **chosen_instructions()}
    if os.environ.get("PYTHONPATH"):
        variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return variables


def _connect(address: str, variables: Mapping[str, str]) -> None:
    import ray

    try:
        with handlers_kept():  # not in a runtime environment, which Ray logs
            ray.init(address=address, runtime_env={"env_vars": variables}, **QUIET)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        complaint = f"the Ray cluster at {address} refused the connection: {error}"
        # Ray reports a rejected token only as a failed connection.
        if isinstance(error, ConnectionError | ray.exceptions.AuthenticationError):
            complaint += (
                "\n(if the cluster uses token authentication, set RAY_AUTH_MODE=token, and its "
                "token in RAY_AUTH_TOKEN or ~/.ray/auth_token)"
            )
        if not os.environ.get("RAY_ADDRESS"):
            complaint += "\n(to start a private Ray instead, set RAY_ADDRESS=local)"
        raise ClusterError(complaint) from error


def _cluster_address() -> str | None:
    """The address of a running Ray cluster: RAY_ADDRESS, or one started here by `ray start`."""
    named = _named_address()
    if named is None or named == "auto":  # which Ray resolves
        return named
    if not os.environ.get("RAY_ADDRESS"):
        return None if why_silent(named) else named
    if "://" in named:
        raise ClusterError(
            f"RAY_ADDRESS={named}: `fedsim run` must run on a machine of the cluster; from "
            "elsewhere, use `fedsim submit FILE --address http://head:8265`"
        )
    if reason := why_silent(named):
        raise ClusterError(f"RAY_ADDRESS={named}: no Ray cluster answers there ({reason})")
    return named


def _named_address() -> str | None:
    """RAY_ADDRESS, or what `ray start` wrote here; whether a cluster answers there is open."""
    given = os.environ.get("RAY_ADDRESS")
    if given:
        return None if given == "local" else given
    word = Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray", "ray_current_cluster")
    try:
        if word.stat().st_uid != os.getuid():  # another user's, on a shared machine
            return None
        return word.read_text().strip()
    except (OSError, ValueError):
        return None


def why_silent(address: str, patience: float | None = None) -> str | None:
    """Why Ray does not answer at host:port within some seconds; None if it does.

    Ray itself would try for almost a minute.
    """
    patience = TIMEOUT if patience is None else patience
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=patience) as head:
            if os.environ.get("RAY_USE_TLS") == "1":  # this check has no TLS
                return None
            # Ray speaks gRPC over HTTP/2, whose servers answer with a SETTINGS frame.
            head.sendall(HTTP2_PREFACE)
            answer = head.recv(9)
            return None if answer[3:4] == b"\x04" else "another service answers"
    except TimeoutError:
        return f"no answer within {patience:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    except (ValueError, OverflowError):
        return "not of the form host:port"
