"""What Ray raises when something is lost, and what it means."""

from __future__ import annotations

from ray.exceptions import ActorDiedError, ObjectLostError, OutOfMemoryError, RayActorError

# For work that was lost with its actor or node, and can be done again.
LOST = (RayActorError, OutOfMemoryError, ObjectLostError)


def failed_to_start(error: Exception) -> bool:
    """Whether an actor never came up because its constructor raised: trying again is no use."""
    return isinstance(error, ActorDiedError) and "creation task" in str(error)


def first_line(error: Exception) -> str:
    """Of what Ray says of a lost actor, which goes on with guesses for a page."""
    return str(error).partition("\n")[0]
