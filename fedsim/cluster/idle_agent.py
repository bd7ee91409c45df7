"""Replaces the dashboard agent of a private Ray, which has no dashboard.

A node of Ray does not start without an agent: it waits for the agent's ports, and ends when the
agent ends. Ray's own agent takes a second of a core to start and 100 MB of memory. This script
writes unused ports, and ends with the node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

PORTS = {"metrics_agent_port": 1, "metrics_export_port": -1, "dashboard_agent_listen_port": -1}


def main(arguments: Sequence[str]) -> None:
    """Run with the command line of Ray's own agent."""
    given = dict(word[2:].split("=", 1) for word in arguments if "=" in word)
    for name, port in PORTS.items():
        path = os.path.join(given["session-dir"], f"{name}_{given['node-id']}")
        with open(f"{path}.new", "w") as file:
            file.write(str(port))
        os.rename(f"{path}.new", path)
    sys.stdin.read()  # a pipe held open by the node


if __name__ == "__main__":
    main(sys.argv[1:])
