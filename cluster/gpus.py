"""Ask a cluster that grows by itself for GPUs, and wait until they are there.

    ray submit cluster/aws.yaml cluster/gpus.py 2     # or 0: they may go when they idle

fedsim plans a run on the nodes that are there, so that what can never be placed is refused at
once; a cluster whose workers come on demand is brought to its size before.
"""

from __future__ import annotations

import sys
import time

import ray
from ray.autoscaler.sdk import request_resources

PATIENCE = 1200.0  # seconds; a cloud's machine takes minutes to boot and install


def main(gpus: int) -> None:
    """Have the cluster bring up, and keep, so many GPUs."""
    ray.init()
    # Holds until it is asked for another number, whoever is connected.
    request_resources(bundles=[{"GPU": 1}] * gpus)
    deadline = time.monotonic() + PATIENCE
    while (there := ray.cluster_resources().get("GPU", 0)) < gpus:
        if time.monotonic() > deadline:
            sys.exit(f"error: {there:g} of {gpus} GPUs came; `ray status` on the head says why")
        print(f"{there:g} of {gpus} GPUs", flush=True)
        time.sleep(10)
    print(f"{there:g} GPUs are there" if gpus else "GPUs are kept no longer")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1].isdecimal():
        sys.exit("usage: gpus.py NUMBER")
    main(int(sys.argv[1]))
