"""All uses of Ray's private APIs.

The one exception is `sweep.submit.Cluster`, which overrides two private methods of Ray's client of
a dashboard. tests/cluster/test_ray_compat.py shows what a new version of Ray has changed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from fedsim.cluster import idle_agent

# Loggers below `ray` that would log every step of a job's submission.
SUBMISSION_LOGGERS = (
    "dashboard.modules.dashboard_sdk",
    "dashboard.modules.job.sdk",
    "_private.authentication.authentication_token_setup",
    "_private.runtime_env.packaging",
)


def actor_table() -> dict[str, dict[str, Any]]:
    """All actors of the cluster, dead ones too, by id; `ray.util.state` needs a dashboard."""
    from ray._private.state import actors

    table: dict[str, dict[str, Any]] = actors()
    return table


def actor_id(handle: Any) -> str:
    id: str = handle._actor_id.hex()
    return id


def free_resources() -> dict[str, dict[str, float]]:
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return free


def places(objects: Iterable[Any]) -> list[dict[str, Any]]:
    """Where each of these objects is, as known to this process, which owns them."""
    from ray.experimental import get_local_object_locations

    references = list(objects)
    found: dict[Any, dict[str, Any]] = get_local_object_locations(references)
    return [found[reference] for reference in references]


def log_what_ray_says() -> None:
    """Send Ray's long terminal output to the log."""
    from ray._private import worker

    assert callable(worker.print_to_stdstream)
    log = logging.getLogger("fedsim.ray")
    worker.print_to_stdstream = lambda data, **_: log.info("\n".join(data["lines"]))


@contextmanager
def lean_start(worker_script: str) -> Iterator[None]:
    """Context in which Ray starts with the processes that work needs, and no others.

    Without the API server, for which `ray.init` would wait a second or more, the autoscaler, the
    log monitor and the dashboard agent, four Python processes.
    """
    from ray._private import node, ray_constants, services

    start_process = services.start_ray_process
    own_agent = os.path.join(services.RAY_PATH, "dashboard", "agent.py")

    def start_without_agent(command: Sequence[str], *args: Any, **kwargs: Any) -> Any:
        words = [
            word.replace(own_agent, idle_agent.__file__)
            if word.startswith("--dashboard_agent_command=")
            else word
            for word in command
        ]
        return start_process(words, *args, **kwargs)

    unneeded = ("start_api_server", "start_log_monitor", "start_monitor")
    with ExitStack() as before:
        for name in unneeded:
            before.callback(setattr, node.Node, name, getattr(node.Node, name))
            setattr(node.Node, name, lambda self, **_: None)
        name = "SETUP_WORKER_FILENAME"  # joined to a folder, which an absolute path replaces
        before.callback(setattr, ray_constants, name, getattr(ray_constants, name))
        setattr(ray_constants, name, worker_script)
        before.callback(setattr, services, "start_ray_process", start_process)
        services.start_ray_process = start_without_agent
        yield


def use_token_if_there() -> None:
    """Authenticate with the user's token if there is one, which Ray does only if configured."""
    from ray._private.authentication.authentication_token_setup import (
        maybe_enable_token_auth_if_token_available,
    )

    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def request_options(client: Any) -> Mapping[str, Any]:
    """The headers and certificates with which a JobSubmissionClient sends its own requests."""
    return {"headers": client._headers, "verify": client._verify}
