"""What holds on a card, and how fast it is: one command, 25 minutes at most, no network.

    python experiments/benchmarks/card.py --out card
    python experiments/benchmarks/card.py --out card --only stacks

First whether results are right, then how fast they come:

methods     the conformance case of each method that learns a network
explainers  each explainer, on a model that was trained on the card
actors      the same hash in this process and on 1, 2, 4 and 8 actors that share the card, and
            milliseconds a client
resume      the same hash after an interruption
memory      a run whose stacks do not fit continues with half as many clients at once
stacks      milliseconds a client alone, in stacks, and in stacks whose gradients are replayed as
            CUDA graphs, which must have the same bits
cifar       pfl-research's CIFAR-10 benchmark, by speed.py; pfl-research itself runs only if its
            environment is there
precision   milliseconds a client in float32 and in bfloat16
data        milliseconds a client with the training examples on the card, and without

Each part is a process with a time limit of its own. What a part has found is in FOLDER/PART.jsonl,
and finished parts are in FOLDER/card.json and are not repeated: after an interruption, give the
same command again. It ends with a table in Markdown, and with 1 if a part has failed.

Needs what the tests need, and nothing else should be running. `--device cpu --smoke` carries out
every part in small, to try the script itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests"
# And their time limits in seconds.
PARTS = {
    "methods": 420,
    "explainers": 120,
    "actors": 200,
    "resume": 60,
    "memory": 90,
    "stacks": 120,
    "cifar": 300,
    "precision": 90,
    "data": 60,
}


def carry_out(name: str, device: str, smoke: bool, out: Path) -> dict[str, Any]:
    """Run a part in a process of its own; what it found, and why it failed if it did."""
    command = [sys.executable, HERE / "card_parts.py", name, "--device", device]
    command += ["--smoke"] if smoke else []
    rows, complaints = out / f"{name}.jsonl", out / f"{name}.log"
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    limit, started = PARTS[name], time.perf_counter()
    with rows.open("w") as found, complaints.open("w") as log:
        process = subprocess.Popen(
            [str(word) for word in command],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            stdout=found,
            stderr=log,
            start_new_session=True,
        )
        error = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            error = f"not done after {limit} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if error is None and code:
        error = (complaints.read_text().strip().splitlines() or [f"ended with {code}"])[-1]
    told = [json.loads(line) for line in rows.read_text().splitlines() if line.startswith("[")]
    seconds = round(time.perf_counter() - started, 1)
    return {"rows": told, "error": error, "seconds": seconds}


def print_table(title: str, done: dict[str, Any]) -> None:
    print(f"\n{title}\n\n| part | what | found |\n| --- | --- | --- |")
    for name in PARTS:
        found = done.get(name)
        if found is None:
            print(f"| {name} | | not run yet |")
            continue
        for what, figure in found["rows"]:
            print(f"| {name} | {what} | {figure} |")
        if found["error"]:
            print(f"| {name} | **failed** | {found['error']} |")
    print(f"\n{sum(found['seconds'] for found in done.values()) / 60:.1f} minutes.")


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--out", type=Path, default=Path("card"), help="folder of what is found")
    options.add_argument("--only", choices=PARTS, help="one part")
    options.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options.add_argument("--smoke", action="store_true", help="every part in small")
    arguments = options.parse_args()
    # So that the part that runs ends with this script, whatever ends it.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    device, smoke = arguments.device, arguments.smoke
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no card here; --device cpu --smoke tries the script without one")
    arguments.out.mkdir(parents=True, exist_ok=True)
    title = torch.cuda.get_device_name() if device == "cuda" else "No card: the script alone."
    file = arguments.out / "card.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    done = known.get("parts", {}) if known.get("place") == [title, smoke] else {}
    for name in [arguments.only] if arguments.only else PARTS:
        if name in done and not done[name]["error"]:
            continue
        print(f"{name}: {PARTS[name]} s at most", file=sys.stderr, flush=True)
        done[name] = carry_out(name, device, smoke, arguments.out)
        written = file.with_suffix(".new")
        written.write_text(json.dumps({"place": [title, smoke], "parts": done}, indent=1))
        written.replace(file)
    print_table(title, done)
    sys.exit(int(any(found["error"] for found in done.values())))


if __name__ == "__main__":
    main()
