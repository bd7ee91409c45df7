"""How long pages of `fedsim view` take, and what is made again for them.

python experiments/benchmarks/view.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterable

import fedsim

EXPERIMENT = {
    "name": "viewed",
    "data": {"name": "digits"},
    "partition": {"kind": "dirichlet", "clients": 20, "alpha": 0.3, "test_fraction": 0.2},
    "model": {"name": "cnn", "channels": [8, 16]},
    "method": {"name": "fedavg"},
    "train": {"rounds": 20, "local_epochs": 2, "batch_size": 16, "optimizer": {"lr": 0.1}},
    "evaluate": {"clients": True},
    "checkpoint": {"every": 100},
    "engine": {"kind": "local"},
}
TURNS = 7


def fetched(url: str) -> tuple[float, bytes]:
    """Seconds until a page has come, and the page."""
    begun = time.perf_counter()
    with urllib.request.urlopen(url) as answer:
        content: bytes = answer.read()
    return time.perf_counter() - begun, content


def whole(url: str) -> float:
    """Seconds until nothing on a page is being worked on."""
    begun = time.perf_counter()
    while b"data-wait" in fetched(url)[1]:
        time.sleep(0.02)
    return time.perf_counter() - begun


def median(seconds: Iterable[float]) -> str:
    found = [*seconds]
    return f"{statistics.median(found):.3f} s (at most {max(found):.3f})"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        run = fedsim.run(EXPERIMENT, folder, progress=False)
        took = time.perf_counter() - begun
        rounds = run.rounds["seconds"].sum()
        print(f"the run: {took:.1f} s, of which its 20 rounds {rounds:.1f} s")
        begun = time.perf_counter()
        page = fedsim.view(run)
        print(f"first page, with its curve drawn: {fetched(page.url)[0]:.3f} s")
        whole(page.url)
        started = time.perf_counter() - begun
        print(f"first decision, with the process started: {started:.1f} s")
        url = f"{page.url}?round=20&client=3&row=0"
        print(f"client 3 in round 20, for which 20 rounds are made again: {whole(url):.1f} s")
        print(f"the same again: {median(fetched(url)[0] for _ in range(TURNS))}")
        for t in range(18, 4, -2):
            whole(f"{page.url}?round={t}&client=3&row=0")
        kept = [whole(f"{page.url}?round={t}&client=3&row=1") for t in range(5, 19, 2)]
        print(f"another input and round, of models that are kept: {median(kept)}")
        prepared = []
        for row in range(10, 10 + 2 * TURNS, 2):
            whole(f"{page.url}?round=10&client=3&row={row}")
            time.sleep(2)  # somebody looks at it
            prepared.append(whole(f"{page.url}?round=10&client=3&row={row + 1}"))
        print(f"the next input, prepared while somebody looks: {median(prepared)}")
        page.close()


if __name__ == "__main__":
    main()
