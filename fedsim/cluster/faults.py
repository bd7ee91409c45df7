"""Exceptions of Ray when actors, nodes or objects are lost."""

from __future__ import annotations

from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError, RayActorError

# Work was lost with its actor or node and can be repeated.
LOST = (RayActorError, OutOfMemoryError, ObjectLostError)


def failed_to_start(error: Exception) -> bool:
    """Whether an actor did not start because its constructor raised: do not retry."""
    return isinstance(error, ActorDiedError) and "creation task" in str(error)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
