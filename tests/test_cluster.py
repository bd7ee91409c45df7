"""What brings clusters up, checked as far as can be without the services.

The scripts are run on this machine, Slurm's with a stand-in for `srun`. The files for AWS,
Kubernetes and Docker are held against the schemas of whoever reads them, and what they would run
is run here.
"""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.request
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.error import HTTPError

import jsonschema
import psutil
import pytest
import yaml
from pathspec import GitIgnoreSpec
from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
from ray.autoscaler._private.resource_demand_scheduler import (
    _default_utilization_scorer,
    get_nodes_for,
)
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.scripts.scripts import start as ray_start
from typer.testing import CliRunner

import fedsim
from fedsim import Experiment, load
from fedsim.cli import app
from fedsim.cluster.placement import Node, plan_actors
from fedsim.cluster.private import is_alive
from fedsim.errors import ClusterError

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "cluster"
BIN = Path(sys.executable).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PINNED = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if "==" in line
)


def environment(**more: str) -> dict[str, str]:
    """That of a user who has activated fedsim's environment, and knows of no cluster."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "SLURM_"))}
    return {**kept, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **more}


def call(*words: str | Path, env: dict[str, str], code: int = 0) -> str:
    """Run a command to its end, and return all that it wrote."""
    process = subprocess.Popen(
        [str(word) for word in words],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)  # and the nodes that it started
        raise
    assert process.returncode == code, text
    return text


def left_of(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those of the processes that do not end within a while."""
    left = list(processes)
    for _ in range(600):
        if not (left := [each for each in left if is_alive(each)]):
            break
        time.sleep(0.1)
    return left


@pytest.mark.parametrize("script", sorted(CLUSTER.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_in_order(script: Path) -> None:
    assert call(BIN / "shellcheck", script, env=environment()) == ""
    assert os.access(script, os.X_OK)


def laptop(verb: str, folder: Path, path: Path | None = None, code: int = 0) -> str:
    """What laptop.sh says of a cluster in that folder, with programs of `path` before others."""
    env = environment(FEDSIM_CLUSTER=str(folder))
    if path is not None:
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    return call(CLUSTER / "laptop.sh", verb, env=env, code=code)


@pytest.mark.night  # three nodes, which take 20 seconds to start
class TestLaptop:
    @pytest.fixture(scope="class")
    def folder(self) -> Iterator[Path]:
        above = Path(tempfile.mkdtemp(prefix="fedsim-", dir="/tmp"))  # short, for Ray's sockets
        yield above / "cluster"
        laptop("stop", above / "cluster")
        above.rmdir()

    @pytest.fixture(scope="class")
    def exports(self, folder: Path) -> dict[str, str]:
        """What `start` says to set."""
        text = laptop("start", folder)
        news, _, line = text.strip().rpartition("\n")
        assert news.startswith("three nodes are up; dashboard at http://127.0.0.1:")
        export, *pairs = shlex.split(line)
        assert export == "export"
        return dict(pair.split("=", 1) for pair in pairs)

    def test_doctor_sees_three_nodes(self, exports: dict[str, str]) -> None:
        assert exports["RAY_AUTH_MODE"] == "token"
        text = call("fedsim", "doctor", env=environment(**exports))
        assert f"Ray at {exports['RAY_ADDRESS']}: 3 node(s)" in text

    def test_who_has_no_token_is_not_let_in(self, exports: dict[str, str]) -> None:
        url = exports["RAY_API_SERVER_ADDRESS"] + "/api/jobs/"
        with pytest.raises(HTTPError, match="401"):
            urllib.request.urlopen(url)
        token = call("ray", "get-auth-token", env=environment(RAY_AUTH_MODE="token")).strip()
        asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
        assert urllib.request.urlopen(asked).status == 200

    def test_gpus_are_let_go(self, exports: dict[str, str]) -> None:
        text = call(sys.executable, CLUSTER / "gpus.py", "0", env=environment(**exports))
        assert "GPUs are kept no longer" in text

    def test_a_second_start_is_refused(self, folder: Path, exports: dict[str, str]) -> None:
        assert laptop("start", folder, code=2) == (
            f"error: it is running already ({folder}); to end it: cluster/laptop.sh stop\nfalse\n"
        )

    def test_stop_leaves_nothing(self, folder: Path, exports: dict[str, str]) -> None:
        nodes = [psutil.Process(int(pid)) for pid in (folder / "pids").read_text().split()]
        started = [each for node in nodes for each in (node, *node.children(recursive=True))]
        assert len(nodes) == 3
        assert len(started) > 10
        # A second cluster, as far as `ray stop` could tell.
        other = subprocess.Popen(["bash", "-c", "exec -a 'ray start --head gcs_server' sleep 60"])
        assert laptop("stop", folder) == "unset RAY_ADDRESS RAY_API_SERVER_ADDRESS\n"
        assert left_of(started) == []
        assert not folder.exists()
        assert other.poll() is None
        other.kill()
        other.wait()


def test_the_laptop_script_ends_no_process_that_took_over_an_id(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    (tmp_path / "pids").write_text(f"{other.pid}\n")
    laptop("stop", tmp_path)
    assert not tmp_path.exists()
    assert other.poll() is None
    other.kill()
    other.wait()


def test_the_laptop_script_leaves_other_folders_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    laptop("stop", tmp_path)
    text = laptop("start", tmp_path, code=2)
    assert "File exists\nerror: set FEDSIM_CLUSTER to a folder that can be made\n" in text
    assert (tmp_path / "thesis.tex").exists()


def test_the_laptop_script_says_why_a_node_did_not_start(tmp_path: Path) -> None:
    stand_in(tmp_path, "ray", "[[ $1 == get-auth-token ]] || { echo 'no such option'; exit 1; }")
    assert laptop("start", tmp_path / "cluster", tmp_path, code=1) == (
        "no such option\n"
        "error: the cluster's head did not start; the lines above say why\n"
        "false\n"  # for the shell that evaluates what is said
    )
    assert not (tmp_path / "cluster").exists()


def test_the_laptop_script_ends_what_outlives_its_node(tmp_path: Path) -> None:
    """As a worker does that waits for its cluster while it starts."""
    pids = tmp_path / "workers"
    stand_in(
        tmp_path,
        "ray",
        f"""
        [[ $1 == start ]] || exit 0
        for word; do
            [[ $word != --temp-dir=* ]] || folder=${{word#*=}}
        done
        mkdir "$folder" && touch "$folder/ray_current_cluster"
        sleep 600 &
        echo $! >>{pids}
        echo "Ray runtime started"
        wait
        """,
    )
    laptop("start", tmp_path / "cluster", tmp_path)
    workers = [psutil.Process(int(pid)) for pid in pids.read_text().split()]
    assert len(workers) == 3
    laptop("stop", tmp_path / "cluster", tmp_path)
    assert left_of(workers) == []


def stand_in(folder: Path, name: str, body: str) -> None:
    """A program of that name, in place of the real one."""
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)


class TestSlurm:
    @pytest.fixture
    def job(self, tmp_path: Path) -> Iterator[dict[str, str]]:
        """The environment of a job of two nodes, on a Slurm whose nodes are all this machine."""
        # Nodes that are machines have a /tmp each.
        stand_in(
            tmp_path,
            "srun",
            f"""
            echo "$*" >>{tmp_path}/srun.log
            while [[ $1 == --* ]]; do
                [[ $1 != --ntasks=* ]] || tasks=${{1#*=}}
                shift
            done
            for ((k = 1; k <= tasks; k++)); do "${{@/%\\/worker//worker-$k}}" & done
            trap 'kill $(jobs -p)' TERM
            wait
            wait
            """,
        )
        id = f"test-{os.getpid()}"
        env = environment(
            SLURM_JOB_ID=id,
            SLURM_JOB_NUM_NODES="2",
            SLURM_CPUS_PER_TASK="1",
            SLURM_MEM_PER_NODE="3000",
            SLURMD_NODENAME="node-1",
        )
        env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
        yield env
        assert not Path(f"/tmp/fedsim-job-{id}").exists()
        running = subprocess.check_output(["ps", "-eo", "args="], text=True)
        assert f"/tmp/fedsim-job-{id}" not in running

    @pytest.mark.night
    def test_runs_on_all_nodes(self, tmp_path: Path, job: dict[str, str]) -> None:
        words = ["run", "experiments/quickstart.yaml", "train.rounds=2", "--out", str(tmp_path)]
        text = call(CLUSTER / "slurm.sh", *words, env=job)
        assert ": 2 node(s)" in text
        (path,) = (tmp_path / "quickstart").iterdir()
        manifest = load(path).manifest
        assert (manifest["status"], manifest["actors"]) == ("finished", 2)

    @pytest.fixture
    def stand_ins(self, tmp_path: Path) -> None:
        """A Ray whose workers fail, and a fedsim that fails with a code of its own."""
        stand_in(
            tmp_path,
            "ray",
            """
            [[ $1 != get-auth-token ]] || { echo secret; exit; }
            [[ $* == *--head* ]] || { echo "no route to host"; exit 1; }
            [[ $RAY_AUTH_MODE == token && $RAY_AUTH_TOKEN == secret ]] || exit 1
            for word in "$@"; do [[ $word != --temp-dir=* ]] || folder=${word#*=}; done
            mkdir -p "$folder"
            echo 127.0.0.1:1 >"$folder/ray_current_cluster"
            exec -a "$folder" sleep 60
            """,
        )
        stand_in(
            tmp_path,
            "fedsim",
            """
            [[ $1 != doctor ]] || { echo "Ray at $RAY_ADDRESS: 1 node(s)"; exit; }
            echo "fedsim $*"
            exit 3
            """,
        )

    @pytest.mark.usefixtures("stand_ins")
    def test_ends_with_fedsims_exit_code(self, tmp_path: Path, job: dict[str, str]) -> None:
        env = {**job, "SLURM_JOB_NUM_NODES": "1"}
        text = call(CLUSTER / "slurm.sh", "run", "two words", env=env, code=3)
        assert text == "Ray at 127.0.0.1:1: 1 node(s)\nfedsim run two words\n"
        assert not (tmp_path / "srun.log").exists()

    @pytest.mark.usefixtures("stand_ins")
    def test_workers_that_do_not_start(self, tmp_path: Path, job: dict[str, str]) -> None:
        env = {**job, "SLURM_JOB_NUM_NODES": "3"}
        text = call(CLUSTER / "slurm.sh", "run", "x.yaml", env=env, code=1)
        assert text.count("no route to host\n") == 2
        assert text.endswith("error: a worker did not start; the lines above say why\n")
        start, clean = (tmp_path / "srun.log").read_text().splitlines()
        where = (
            "--nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 --exclude=node-1 --no-kill"
        )
        assert start.startswith(f"{where} ray start --block ")
        assert clean == f"{where} rm -rf /tmp/fedsim-job-{job['SLURM_JOB_ID']}"

    def test_without_an_environment(self, job: dict[str, str]) -> None:
        text = call(CLUSTER / "slurm.sh", env={**job, "PATH": "/usr/bin:/bin"}, code=2)
        assert text == ("error: no fedsim on the path; activate its environment before sbatch\n")

    def test_asks_for_what_the_script_uses(self) -> None:
        text = (CLUSTER / "slurm.sh").read_text()
        asked = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))
        assert {"nodes", "ntasks-per-node", "cpus-per-task", "mem", "time"} <= set(asked)
        assert asked["ntasks-per-node"] == "1"


def aws() -> dict[str, Any]:
    """The cluster launcher's file, as Ray completes and checks it."""
    config = prepare_config(yaml.safe_load((CLUSTER / "aws.yaml").read_text()))
    validate_config(config)
    return config


class TestAws:
    def test_ray_takes_it(self) -> None:
        config = aws()
        assert config["provider"]["type"] == "aws"
        with pytest.raises(jsonschema.ValidationError, match="max_worker'"):
            validate_config({**config, "max_worker": 3})

    def test_workers_come_from_zero_and_hold_actors(self) -> None:
        config = aws()
        types = config["available_node_types"]
        head, gpu = types["head"]["resources"], types["gpu"]["resources"]
        assert types["gpu"]["min_workers"] == 0
        assert types["gpu"]["max_workers"] == config["max_workers"]
        # Two GPUs asked for by gpus.py make Ray start two workers.
        scorer = partial(
            _default_utilization_scorer, node_availability_summary=NodeAvailabilitySummary({})
        )
        start, unmet = get_nodes_for(types, {"head": 1}, "head", 10, [{"GPU": 1}] * 2, scorer)
        assert (start, unmet) == ({"gpu": 2}, [])
        engine = quarter_of_a_card().engine
        nodes = [
            Node.of({"NodeManagerHostname": "head", "Resources": head}),
            *[Node.of({"NodeManagerHostname": "gpu", "Resources": gpu})] * 2,
        ]
        assert plan_actors(engine, nodes) == 8
        with pytest.raises(ClusterError, match="no node can hold a client actor"):
            plan_actors(engine, nodes[:1])

    def test_what_is_installed_is_there(self) -> None:
        config = aws()
        mounts = config["file_mounts"]
        assert mounts.pop("~/.ray/auth_token") == "~/.ray/auth_token"
        for remote, local in mounts.items():
            assert remote == f"~/fedsim/{local}"
            assert (ROOT / local).exists()
        (install,) = (c for c in config["setup_commands"] if "pip install" in c)
        words = shlex.split(install)
        assert words[words.index("--constraint") + 1] in mounts
        assert words[-1] == "$HOME/fedsim[all]"
        assert {"pyproject.toml", PROJECT["project"]["readme"], "fedsim"} <= set(mounts.values())

    def test_commands_are_in_order(self, tmp_path: Path) -> None:
        config = aws()
        commands = [c for name, list in config.items() if name.endswith("commands") for c in list]
        assert len(commands) > 8
        starts = []
        for command in commands:
            call("bash", "-n", "-c", command, env=environment())
            if "ray start " in command:
                starts.append(shlex.split(command.partition("ray start ")[2]))
        for words in starts:
            ray_start.make_context("start", words)  # raises at an option that Ray does not have
        assert len(starts) == 2
        (remember,) = (c for c in config["setup_commands"] if ".bashrc" in c)
        (tmp_path / ".bashrc").write_text("# as it was\n")
        for _ in range(2):
            call("bash", "-c", remember, env=environment(HOME=str(tmp_path)))
        assert (tmp_path / ".bashrc").read_text() == (
            '# as it was\nexport RAY_AUTH_MODE=token PATH="$HOME/venv/bin:$PATH"\n'
        )


def quarter_of_a_card() -> Experiment:
    return Experiment.load(
        ROOT / "experiments" / "quickstart.yaml", ["engine.gpus_per_actor=0.25"]
    )


class TestGpus:
    @pytest.fixture
    def gpus(self, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        """The script, with a cluster that has one GPU, and a second when asked again."""
        spec = importlib.util.spec_from_file_location("gpus", CLUSTER / "gpus.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        asked: list[Any] = []
        seen = iter([{}, {"GPU": 1.0}, {"CPU": 8.0, "GPU": 2.0}])
        monkeypatch.setattr(module.ray, "init", lambda: None)
        monkeypatch.setattr(module.ray, "cluster_resources", lambda: next(seen))
        monkeypatch.setattr(module.time, "sleep", asked.append)
        monkeypatch.setattr(module, "request_resources", lambda bundles: asked.append(bundles))
        module.asked = asked  # type: ignore[attr-defined]
        return module

    def test_waits_until_they_are_there(
        self, gpus: ModuleType, capsys: pytest.CaptureFixture[str]
    ) -> None:
        gpus.main(2)
        assert gpus.asked == [[{"GPU": 1}, {"GPU": 1}], 10, 10]
        assert capsys.readouterr().out == "0 of 2 GPUs\n1 of 2 GPUs\n2 GPUs are there\n"

    def test_gives_up(self, gpus: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gpus, "PATIENCE", -1.0)
        with pytest.raises(SystemExit, match=r"^error: 0 of 2 GPUs came; `ray status`"):
            gpus.main(2)

    def test_usage(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["gpus.py", "many"])
        with pytest.raises(SystemExit, match=r"^usage: gpus.py NUMBER$"):
            runpy.run_path(str(CLUSTER / "gpus.py"), run_name="__main__")


class TestRayJob:
    @pytest.fixture(scope="class")
    def manifest(self) -> dict[str, Any]:
        content: dict[str, Any] = yaml.safe_load((CLUSTER / "rayjob.yaml").read_text())
        return content

    def test_is_a_job_that_ends(self, manifest: dict[str, Any]) -> None:
        assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
        assert manifest["metadata"]["generateName"].endswith("-")
        job = manifest["spec"]
        assert type(job["shutdownAfterJobFinishes"]) is bool
        assert type(job["ttlSecondsAfterFinished"]) is int

    def test_agrees_with_the_image(self, manifest: dict[str, Any]) -> None:
        cluster = manifest["spec"]["rayClusterSpec"]
        assert cluster["rayVersion"] == PINNED["ray"]
        assert cluster["authOptions"] == {"mode": "token"}
        (user,) = (w for w in instructions("RUN") if "useradd" in w)
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            spec = group["template"]["spec"]
            (container,) = spec["containers"]
            name, _, version = container["image"].rpartition(":")
            assert name.endswith("/fedsim")
            assert version == fedsim.__version__
            uid = int(user[user.index("--uid") + 1])
            assert spec["securityContext"].keys() == {"runAsNonRoot", "runAsUser", "fsGroup"}
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["runAsUser"] == uid
            assert all(type(value) is str for value in group["rayStartParams"].values())

    def test_the_entry_point_runs(self, manifest: dict[str, Any]) -> None:
        program, *words = shlex.split(manifest["spec"]["entrypoint"])
        assert program == "fedsim"
        ((home,),) = instructions("WORKDIR")
        here = [word.replace(home, str(ROOT)) for word in words]
        done = CliRunner().invoke(app, [*here, "--print-config"])
        assert done.exit_code == 0, done.output
        head = manifest["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
        (mount,) = head["containers"][0]["volumeMounts"]
        assert mount["name"] == head["volumes"][0]["name"]
        (variable,) = head["containers"][0]["env"]
        for path in (words[words.index("--out") + 1], variable["value"]):
            assert path.startswith(mount["mountPath"] + "/")
        assert variable["name"] == "FEDSIM_DATA"

    def test_its_actors_fit(self, manifest: dict[str, Any]) -> None:
        cluster = manifest["spec"]["rayClusterSpec"]
        nodes = []
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            (container,) = group["template"]["spec"]["containers"]
            amounts = container["resources"]
            assert amounts["requests"] == amounts["limits"]  # what Ray counts on is there
            limits = amounts["limits"]
            has = {
                "CPU": int(group["rayStartParams"].get("num-cpus", limits["cpu"])),
                "GPU": limits.get("nvidia.com/gpu", 0),
                "memory": 0.7 * 2**30 * int(limits["memory"].removesuffix("Gi")),
            }
            counts = {group.get(key, 1) for key in ("replicas", "minReplicas", "maxReplicas")}
            assert len(counts) == 1  # all are there when fedsim plans
            nodes += [Node.of({"Resources": has})] * counts.pop()
        words = shlex.split(manifest["spec"]["entrypoint"])
        overrides = [word for word in words if re.match(r"[a-z_.]+=", word)]
        experiment = Experiment.load(ROOT / "experiments" / "quickstart.yaml", overrides)
        assert plan_actors(experiment.engine, nodes) == 8


def instructions(kind: str) -> list[list[str]]:
    """The words of the Dockerfile's instructions of a kind."""
    text = (CLUSTER / "Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith(f"{kind} ")]


class TestDockerfile:
    def test_is_of_the_python_that_is_tested(self) -> None:
        ((image,),) = instructions("FROM")
        assert image.startswith(f"python:{PROJECT['tool']['mypy']['python_version']}-slim")

    def test_does_not_run_as_root(self) -> None:
        ((user,),) = instructions("USER")
        (made,) = (words for words in instructions("RUN") if "useradd" in words)
        assert user == made[-1] != "root"

    def test_sources_are_sent_to_docker(self) -> None:
        # Git's patterns, but each from the root.
        lines = re.sub(r"^(!?)", r"\1/", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)
        ignored = GitIgnoreSpec.from_lines(lines.splitlines())
        sources = [w for words in instructions("COPY") for w in words[:-1] if w[:2] != "--"]
        assert len(sources) == 5
        for source in sources:
            assert (ROOT / source).exists()
            assert not ignored.match_file(source)
        assert not ignored.match_file("fedsim/methods/fedavg.py")
        for other in ("fedsim/__pycache__", "runs/x/log.txt", ".git/config", ".venv/bin/python"):
            assert ignored.match_file(other)

    @pytest.mark.night  # builds a package
    def test_what_it_copies_is_all_of_fedsim(self, tmp_path: Path) -> None:
        for words in instructions("COPY"):
            *sources, target = (word for word in words if not word.startswith("--"))
            if target.startswith("/tmp/fedsim"):
                for source in sources:
                    below = tmp_path / target.lstrip("/")
                    if (ROOT / source).is_dir():
                        leave = shutil.ignore_patterns("__pycache__")
                        shutil.copytree(ROOT / source, below, ignore=leave)
                    else:
                        below.mkdir(parents=True, exist_ok=True)
                        shutil.copy(ROOT / source, below)
        (install,) = (words for words in instructions("RUN") if "pip" in words)
        install = install[install.index("pip") : install.index("&&")]
        call(
            *[sys.executable, "-m"],
            *[word.replace("/tmp/", f"{tmp_path}/tmp/") for word in install],
            # What fedsim requires is here, setuptools included, which torch asks for.
            *["--no-deps", "--no-build-isolation", "--target", tmp_path / "site"],
            env=environment(),
        )

        def files(folder: Path) -> set[Path]:
            found = (p for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc")
            return {path.relative_to(folder) for path in found}

        assert files(tmp_path / "site" / "fedsim") == files(tmp_path / "tmp/fedsim/fedsim")
        ((entry,),), ((command,),) = instructions("ENTRYPOINT"), instructions("CMD")
        words = [*yaml.safe_load(entry), *yaml.safe_load(command)]
        assert words == ["fedsim", "--help"]
        text = call(
            tmp_path / "site" / "bin" / words[0],
            *words[1:],
            env=environment(PYTHONPATH=str(tmp_path / "site")),
        )
        assert "Explainable federated learning, simulated on Ray." in text


class TestReadme:
    text = (CLUSTER / "README.md").read_text()

    def test_speaks_of_every_file(self) -> None:
        for path in CLUSTER.iterdir():
            if path.name not in ("README.md", "__pycache__"):
                assert f"cluster/{path.name}" in self.text
        for path in re.findall(r"\b(?:cluster|experiments)/[\w.]+\w", self.text):
            assert (ROOT / path).exists()

    def test_nobody_is_told_to_turn_authentication_off(self) -> None:
        for path in CLUSTER.iterdir():
            if path.is_file():
                assert "disabled" not in path.read_text()
