"""Reaching a Ray cluster: the one at hand, or a private one."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from fedsim import modules
from fedsim.cluster.compat import log_what_ray_says
from fedsim.cluster.placement import ACTOR_BYTES, Node, plan_actors
from fedsim.cluster.private import QUIET, handlers_kept, private_ray
from fedsim.cluster.settings import EngineSettings
from fedsim.errors import ClusterError
from fedsim.hardware import chosen_instructions

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"  # and no settings
TIMEOUT = 5.0  # seconds in which the head of a cluster takes a connection


@contextmanager
def planned_actors(
    settings: EngineSettings, worker_bytes: float, most: int, tell: Callable[[str], None]
) -> Iterator[int]:
    """Have a Ray cluster, as `connected`, and plan the client actors of a run on it.

    Args:
        worker_bytes: memory of a worker's arrays.
        most: clients of a round; `engine.actors=auto` makes no more actors.
        tell: is called with lines for the user.

    Yields:
        How many client actors to make.

    Raises:
        ClusterError: the cluster cannot be reached, or not one actor fits it.
    """
    if settings.kind == "local":
        free = psutil.virtual_memory().available
        if worker_bytes > free:
            raise ClusterError(
                f"engine.kind=local: training takes about {worker_bytes / 1e9:.1f} GB of memory, "
                f"and {free / 1e9:.1f} GB are free; take a smaller model or a smaller "
                "engine.clients_per_step"
            )
        yield 0
        return
    import ray

    with connected(settings, tell):
        nodes = [Node.of(node) for node in ray.nodes() if node["Alive"]]
        yield plan_actors(settings, nodes, ACTOR_BYTES + worker_bytes, most)


@contextmanager
def connected(
    settings: EngineSettings | None, tell: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Have a Ray cluster: the one at hand, or a private one for as long as the context lasts.

    A cluster that is there (this process is connected to one, RAY_ADDRESS names one, or this user
    ran `ray start` on this machine) is used as it is; with RAY_ADDRESS=local none is. A private
    one gets at least as many CPUs as the experiment asks for: that more actors than cores take
    turns is the user's choice on a machine of their own.

    Args:
        settings: what a private one must have room for.
        tell: is called with lines for the user: starting a private Ray takes seconds.

    Raises:
        ClusterError: the cluster cannot be reached.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    log_what_ray_says()
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Within a Ray job its variables are set here, too; Ray would refuse them for being twice.
    os.environ.setdefault("RAY_OVERRIDE_JOB_RUNTIME_ENV", "1")
    variables = {modules.FOLDER: str(Path.cwd()), **chosen_instructions()}
    if os.environ.get("PYTHONPATH"):
        variables["PYTHONPATH"] = os.environ["PYTHONPATH"]
    address = _cluster_address()
    if address is None:
        tell("starting Ray …")
        with private_ray(_cpus(settings), variables):
            yield
        return
    try:
        _connect(address, variables)
        yield
    finally:
        ray.shutdown()


def _connect(address: str, variables: Mapping[str, str]) -> None:
    import ray

    try:
        with handlers_kept():  # what is in a runtime environment Ray logs, and shows to all
            ray.init(address=address, runtime_env={"env_vars": variables}, **QUIET)
    except (ConnectionError, RuntimeError, ray.exceptions.RayError) as error:
        complaint = f"the Ray cluster at {address} does not let us in: {error}"
        # A token that is refused, Ray tells as a connection that failed, and no more.
        if isinstance(error, ConnectionError | ray.exceptions.AuthenticationError):
            complaint += (
                "\n(a cluster with token authentication wants RAY_AUTH_MODE=token, and its "
                "token in RAY_AUTH_TOKEN or ~/.ray/auth_token)"
            )
        if not os.environ.get("RAY_ADDRESS"):
            complaint += "\n(to leave it alone and start a private one: RAY_ADDRESS=local)"
        raise ClusterError(complaint) from error


def _cpus(settings: EngineSettings | None) -> int:
    """How many CPUs a private Ray gets."""
    cpus = os.cpu_count() or 1
    if settings is None or settings.actors == "auto":
        return cpus
    return max(cpus, settings.actors * settings.cpus_per_actor)


def _cluster_address() -> str | None:
    """Where a Ray cluster answers: RAY_ADDRESS, or one that `ray start` left word of here.

    Returns:
        None if a private one is to be started.

    Raises:
        ClusterError: RAY_ADDRESS names what cannot be used from here.
    """
    given = os.environ.get("RAY_ADDRESS")
    if given == "local":
        return None
    if given == "auto":  # which Ray resolves
        return given
    if given:
        if "://" in given:
            raise ClusterError(
                f"RAY_ADDRESS={given}: `fedsim run` works on a machine of the cluster; from "
                "elsewhere use `fedsim submit FILE --address http://head:8265`"
            )
        reason = _silent(given)
        if reason:
            raise ClusterError(f"RAY_ADDRESS={given}: no Ray answers there ({reason})")
        return given
    word = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        if word.stat().st_uid != os.getuid():  # of somebody else on a machine that we share
            return None
        found = word.read_text().strip()
    except (OSError, ValueError):
        return None
    return None if _silent(found) else found


def _silent(address: str) -> str | None:
    """Why nothing answers at host:port, or None if something does.

    Ray itself would try for most of a minute.
    """
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=TIMEOUT) as head:
            if os.environ.get("RAY_USE_TLS") == "1":  # it would not understand
                return None
            # Ray speaks gRPC, that is HTTP/2, whose servers answer with their settings.
            head.sendall(HTTP2_PREFACE)
            answer = head.recv(9)
            return None if answer[3:4] == b"\x04" else "something else does"
    except TimeoutError:
        return f"it said nothing for {TIMEOUT:.0f} s"
    except OSError as error:
        return error.strerror or str(error)
    except ValueError:
        return "it is not host:port"
