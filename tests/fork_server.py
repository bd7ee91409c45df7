"""The fork server of the tests' workers, which has imported what only some experiments need."""

from __future__ import annotations

import socket
import sys

import sklearn.manifold
import sklearn.tree  # noqa: F401

from fedsim.cluster.forked_workers import serve

if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[2])))
