"""Submit runs, grids and searches to a Ray cluster as jobs, and fetch results.

Only the HTTP address of the cluster's dashboard is needed. A job's working directory is removed
when the job ends, so results are written to a separate folder on its node. `fetch` starts a
second, small job there, which packs them into Ray's log folder during the transfer: Ray's log API
streams any file from there, from any node. (The job's own log is not suitable: it is kept forever,
and sent as one JSON string, which may not fit into memory.)
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import secrets
import shlex
import shutil
import tarfile
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import requests
from pathspec import GitIgnoreSpec
from ray.exceptions import AuthenticationError, RayError
from ray.job_submission import JobSubmissionClient

from fedsim.cluster.connection import why_silent
from fedsim.cluster.ray_compat import SUBMISSION_LOGGERS, request_options, use_token_if_there
from fedsim.config.file import RawConfig
from fedsim.errors import BadInput, ClusterError, RunError, RunFolderError
from fedsim.experiment import Experiment
from fedsim.results.archive import write_zip
from fedsim.support import atomic
from fedsim.sweep import pack
from fedsim.sweep.start import sweep_of

JOBS_FOLDER = "~/fedsim-jobs"  # of results on the cluster, with a sub-folder per job
UPLOAD_LIMIT = 100 * 2**20  # bytes that Ray's dashboard accepts in one request
# In the syntax of .gitignore.
ALWAYS_IGNORED = [
    *("/runs/", ".*/", "venv/", "__pycache__/", "*.egg-info/"),
    # Never sent unless .rayignore includes it: `!.env`.
    *(".env", ".env.*", ".netrc", "*.pem", "*.key", "*.p12", "*.pfx", "id_rsa*", "id_ed25519*"),
]
PATIENCE = 30.0  # seconds of silence before the cluster is checked
TIMEOUT = (10.0, 120.0)  # seconds to connect, and to wait for an answer
STOP_GRACE = 30  # seconds for a stopped job to end cleanly
FETCH_MARK = "fetched.json"  # in a fetched run's folder: its job and a hash of its content


class Cluster(JobSubmissionClient):  # type: ignore[misc]
    """Ray's dashboard client with timeouts and readable errors."""

    def __init__(self, address: str | None) -> None:
        for name in SUBMISSION_LOGGERS:
            logging.getLogger(f"ray.{name}").setLevel(logging.ERROR)
        self.name = _address(address)
        try:
            # Ray's variables would override a given address.
            os.environ["RAY_API_SERVER_ADDRESS"] = self.name
            # Clusters require a token by default, but clients send theirs only if configured.
            use_token_if_there()
            super().__init__()
        except AuthenticationError as error:
            raise ClusterError(self._token(error)) from None
        except (RayError, RuntimeError, ValueError, LookupError, TypeError, OSError) as error:
            raise ClusterError(
                f"{self.name}: is not the address of a Ray dashboard; by default, that is "
                "http://<head>:8265"
            ) from error

    def _do_request(self, method: str, endpoint: str, **options: Any) -> Any:
        # For uploads, the connect timeout covers the whole transfer.
        patience = None if method == "PUT" else TIMEOUT
        try:
            return super()._do_request(method, endpoint, timeout=patience, **options)
        except AuthenticationError as error:
            raise ClusterError(self._token(error)) from None
        except OSError as error:
            raise ClusterError(
                f"{self.name}: no Ray dashboard answers there ({_cause(error)})"
            ) from error

    def _raise_error(self, r: Any) -> None:
        end = (r.text.strip() or r.reason).splitlines()[-1]
        raise ClusterError(f"{self.name}: Ray refused the request: {end}")

    def _token(self, error: AuthenticationError) -> str:
        how = "is missing"
        if "incorrect" in str(error):  # the same for a head that is asked for its dashboard
            how = "is wrong" if "Authentication failed" in str(error) else "is missing or wrong"
        words = (
            f"{self.name}: the authentication token {how}; set RAY_AUTH_TOKEN to it, or "
            "RAY_AUTH_TOKEN_PATH to a file that holds it, or put it into ~/.ray/auth_token "
            "(`ray get-auth-token` on the head prints it)"
        )
        mode = os.environ.get("RAY_AUTH_MODE", "token")
        return words if mode == "token" else f"{words}, and RAY_AUTH_MODE to token, not {mode}"

    def read_log(self, node: str, name: str) -> Iterator[bytes]:
        """The content of a file in a node's log folder; raises RunError if interrupted."""
        # The timeout is for the whole transfer; lines=-1 means all.
        query = {"node_id": node, "filename": name, "lines": -1, "timeout": 7 * 24 * 3600}
        try:
            with requests.get(
                f"{self.get_address()}/api/v0/logs/file?{urlencode(query)}",
                **request_options(self),
                timeout=TIMEOUT,
                stream=True,
            ) as response:
                if not response.ok:
                    raise RunError(f"{self.name}: cannot send the results: {response.text}")
                yield from response.iter_content(2**16)
        except OSError as error:
            raise RunError(
                f"{self.name}: the transfer was interrupted ({_cause(error)}); fetch again"
            ) from error


def _address(given: str | None) -> str:
    given = given or os.environ.get("RAY_API_SERVER_ADDRESS")
    if given and not given.startswith("ray://"):
        return given if "://" in given or given == "auto" else f"http://{given}"
    of = "" if given else "RAY_ADDRESS="
    given = given or os.environ.get("RAY_ADDRESS")
    if not given:
        raise BadInput(
            "no cluster given: use --address http://head:8265 (its dashboard), or set "
            "RAY_API_SERVER_ADDRESS"
        )
    head = given.removeprefix("ray://")
    # Ray asks the head for its dashboard.
    if ":" in head and "/" not in head and (reason := why_silent(head, TIMEOUT[0])):
        raise ClusterError(f"{of}{given}: no Ray cluster answers there ({reason})")
    return given


def _cause(error: BaseException | None) -> str:
    """The root cause of a network error, in a few words."""
    while error and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__
    words = getattr(error, "strerror", None) or str(error)
    return words if words and words.isprintable() else type(error).__name__


@dataclass(frozen=True)
class Job:
    """A job that `submit` sent; its node is None until it starts, times are seconds since 1970."""

    id: str
    kind: str
    name: str
    folder: str
    status: str
    node: str | None
    message: str
    started: float | None
    ended: float | None

    @classmethod
    def of(cls, details: Any) -> Job | None:
        about = details.metadata or {}
        if "fedsim_kind" not in about:
            return None
        return cls(
            id=details.submission_id,
            kind=about["fedsim_kind"],
            name=about["fedsim_name"],
            folder=about["fedsim_folder"],
            status=details.status.value,
            node=details.driver_node_id,
            message=details.message or "",
            started=details.start_time and details.start_time / 1000,
            ended=details.end_time and details.end_time / 1000,
        )

    @property
    def over(self) -> bool:
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")


def jobs(cluster: Cluster) -> list[Job]:
    found = [job for details in cluster.list_jobs() if (job := Job.of(details))]
    return sorted(found, key=lambda job: job.started or 0, reverse=True)


def find(cluster: Cluster, id: str) -> Job:
    if found := [job for job in jobs(cluster) if job.id == id]:
        return found[0]
    raise BadInput(f"{cluster.name}: has no job '{id}' of fedsim; `fedsim jobs` lists its jobs")


def check(file: Path, overrides: Sequence[str]) -> tuple[str, str]:
    sweep = sweep_of(RawConfig.read(file, overrides))
    if sweep is None:
        return "run", Experiment.load(file, overrides).name
    return sweep.command, sweep.name


def submit(
    address: str | None,
    file: Path,
    overrides: Sequence[str] = (),
    env: Sequence[str] = (),
    folder: str = JOBS_FOLDER,
) -> tuple[Cluster, Job]:
    """Send a run, grid or search to a cluster.

    The working directory is sent, without what .gitignore and .rayignore exclude, and this version
    of fedsim: the cluster may have another version or none, but needs fedsim's dependencies.

    Args:
        address: see `Cluster`.
        env: `KEY=VALUE`, set for the job and its actors.
        folder: folder on the cluster in which the job's folder is made.

    Raises:
        BadInput: the file is invalid, there is too much to send, or the cluster cannot be reached.
    """
    kind, name = check(file, overrides)
    variables = dict(variable.partition("=")[::2] for variable in env)
    for variable in env:
        if not re.match(r"\w+=", variable):
            raise BadInput(f"--env {variable}: must read KEY=VALUE")
    files = _to_send(Path.cwd(), file)
    id = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    folder = f"{folder.rstrip('/')}/{id}"
    command = ["python", "-m", "fedsim", kind, files[_absolute(file)], *overrides]
    cluster = Cluster(address)
    with tempfile.TemporaryDirectory() as scratch:
        working_dir = Path(scratch, "working_dir.zip")
        # Deterministic, so that Ray does not upload the same content twice.
        named = {name: path for path, name in sorted(files.items())}
        write_zip(working_dir, named, zipfile.ZIP_DEFLATED)
        cluster.submit_job(
            entrypoint=f"{shlex.join(command)} --out {_quote(folder)}",
            submission_id=id,
            runtime_env={
                "working_dir": str(working_dir),
                "py_modules": [str(Path(__file__).parents[1])],
                "excludes": ["__pycache__"],
                "env_vars": {
                    # Like Ctrl-C, so that the run records its end in its folder.
                    "RAY_JOB_STOP_SIGNAL": "SIGINT",
                    "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_GRACE),
                    **variables,
                },
            },
            metadata={"fedsim_kind": kind, "fedsim_name": name, "fedsim_folder": folder},
        )
    return cluster, find(cluster, id)


def _quote(folder: str) -> str:
    """A quoted folder, whose ~ the remote shell expands."""
    home, slash, rest = folder.partition("/")
    return f"~/{shlex.quote(rest)}" if home == "~" and slash else shlex.quote(folder)


def _absolute(path: Path) -> Path:
    """A path without "..", with which it could seem to be inside a folder that it is not in."""
    return Path(os.path.normpath(path.absolute()))


def _to_send(here: Path, file: Path) -> dict[Path, str]:
    file = _absolute(file)
    always = [(here, GitIgnoreSpec.from_lines(ALWAYS_IGNORED))]
    try:
        files = {path: path.relative_to(here).as_posix() for path in _files(here, always)}
        # The experiment file is always sent: the best one of a search is below runs/.
        inside = file.is_relative_to(here)
        files[file] = file.relative_to(here).as_posix() if inside else f".submitted/{file.name}"
        sizes = {path: path.stat().st_size for path in files}
    except OSError as error:
        raise BadInput(f"{here}: cannot be sent: {error}") from error
    total = sum(sizes.values())
    if total > UPLOAD_LIMIT:
        parts = Counter[str]()
        for path, name in files.items():
            parts[name.partition("/")[0]] += sizes[path]
        largest = [f"{part} ({count / 1e6:.0f} MB)" for part, count in parts.most_common(3)]
        raise BadInput(
            f"{here}: {total / 1e6:.0f} MB to send, but Ray accepts {UPLOAD_LIMIT / 1e6:.0f}; "
            f"the largest: {', '.join(largest)}. List what the job does not need in .rayignore; "
            "keep data on the cluster (--env FEDSIM_DATA=…)"
        )
    return files


def _files(folder: Path, above: list[tuple[Path, GitIgnoreSpec]]) -> Iterator[Path]:
    """The files below a folder, except ignored ones; the last matching line decides.

    Links are not followed, because their targets may be anywhere.
    """
    ignored = [*above]
    for name in (".gitignore", ".rayignore"):
        if (folder / name).is_file():
            lines = (folder / name).read_text(encoding="utf-8").splitlines()
            ignored.append((folder, GitIgnoreSpec.from_lines(lines)))
    for path in sorted(folder.iterdir()):
        is_folder = path.is_dir() and not path.is_symlink()
        slash = "/" if is_folder else ""
        verdicts = [spec.check_file(f"{path.relative_to(at)}{slash}") for at, spec in ignored]
        ignore = [found.include for found in verdicts if found.include is not None]
        if ignore and ignore[-1]:
            continue
        if is_folder:
            yield from _files(path, ignored)
        elif path.is_file() and not path.is_symlink():
            yield path


def follow(cluster: Cluster, job: Job, write: Callable[[str], None]) -> None:
    try:
        asyncio.run(_follow(cluster, job.id, write))
        job = find(cluster, job.id)
    except BadInput as error:
        raise RunError(f"{error}; a job ends with its cluster") from error
    if job.status == "STOPPED":
        raise RunError(f"job {job.id} was stopped")
    if job.status == "FAILED":
        end = "\n".join(job.message.strip().splitlines()[-6:])
        raise RunError(f"job {job.id} failed; the end of its log:\n{end}")


async def _follow(cluster: Cluster, id: str, write: Callable[[str], None]) -> None:
    seen = failures = 0
    while True:
        at, failure = 0, None
        try:
            async for text in _watched_log(cluster, id):
                new, at = text[max(seen - at, 0) :], at + len(text)
                if new:
                    write(new)
                    seen, failures = at, 0
        except BadInput:
            raise
        except Exception as error:  # of the connection; its class depends on Ray's library
            failure, failures = error, failures + 1
        over = find(cluster, id).over  # raises if the cluster is lost
        if over and (failure is None or failures == 3):
            return
        if failures == 3:
            raise RunError(
                f"the log of job {id} cannot be followed ({_cause(failure)}); the job continues"
            ) from failure
        await asyncio.sleep(1)  # a proxy closed the connection: try again


async def _watched_log(cluster: Cluster, id: str) -> Any:
    """A job's log; checks the cluster when there is no output."""
    log = cluster.tail_job_logs(id)
    while True:
        following = asyncio.ensure_future(anext(log, None))
        while not (await asyncio.wait({following}, timeout=PATIENCE))[0]:
            find(cluster, id)
        text = following.result()
        if text is None:
            return
        yield text


def stop(cluster: Cluster, id: str) -> None:
    job = find(cluster, id)
    if job.over:
        raise BadInput(f"job {id} has already ended ({job.status})")
    cluster.stop_job(id)
    deadline = time.monotonic() + STOP_GRACE + PATIENCE
    while not cluster.get_job_info(id).status.is_terminal():
        if time.monotonic() > deadline:
            raise RunError(f"job {id} was told to stop but still runs; see `fedsim jobs` later")
        time.sleep(0.2)


def fetch(cluster: Cluster, id: str, out: Path) -> list[Path]:
    """Fetch the current results of a job, which may still be running, to run folders below `out`.

    Raises:
        BadInput: there is no such job or it has no results, or `out` cannot be written, or has a
            folder of the same name with other content.
        RunError: the results do not arrive, or cannot be written.
    """
    job = find(cluster, id)
    if job.node is None:
        raise BadInput(f"job {id} has no results: it has not started ({job.status})")
    try:
        out.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".fetch-", dir=out))
    except OSError as error:
        raise RunFolderError(f"{out}: cannot be written: {error}") from error
    try:
        with _packed(cluster, job) as (name, sha256), tempfile.TemporaryFile(dir=stage) as package:
            digest = hashlib.sha256()
            for chunk in cluster.read_log(job.node, name):
                digest.update(chunk)
                package.write(chunk)
            if digest.hexdigest() != sha256:
                raise RunError("the results arrived damaged; fetch again")
            package.seek(0)
            with tarfile.open(fileobj=package) as tar:
                tar.extractall(stage, filter=_no_links)
        return _install(stage, out, id)
    except tarfile.FilterError as error:
        raise RunError(f"the package of results is refused: {error}") from error
    except (OSError, tarfile.TarError) as error:
        raise RunError(f"{out}: the results of job {id} cannot be written: {error}") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def _packed(cluster: Cluster, job: Job) -> Iterator[tuple[str, str]]:
    """Pack a job's results on its node: the package's name in its log folder, and its hash."""
    id = f"fetch-{job.id}-{secrets.token_hex(2)}"
    source = Path(pack.__file__).read_text(encoding="utf-8")
    cluster.submit_job(
        entrypoint=shlex.join(["python", "-c", source, job.folder, f"{id}.tar"]),
        submission_id=id,
        entrypoint_label_selector={"ray.io/node-id": job.node},
    )
    try:
        deadline = time.monotonic() + 2 * PATIENCE
        while True:
            info = cluster.get_job_info(id)
            lines = cluster.get_job_logs(id).splitlines()
            if answers := [json.loads(line) for line in lines if line.startswith('{"package"')]:
                break
            if info.status.is_terminal():
                end = (info.message or "no word").strip().splitlines()[-1]
                raise RunError(f"the results of job {job.id} cannot be packed: {end}")
            if info.status.value == "PENDING" and time.monotonic() > deadline:
                raise RunError(
                    f"nothing starts on the node where job {job.id} ran; it may be lost, with "
                    f"the results (in {job.folder})"
                )
            time.sleep(0.3)
        if "sha256" not in answers[0]:
            raise BadInput(f"job {job.id} has no results yet ({job.status})")
        yield answers[0]["package"], answers[0]["sha256"]
    finally:
        with suppress(ClusterError):  # otherwise it ends by itself after an hour
            cluster.stop_job(id)


def _no_links(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    if member.issym() or member.islnk():
        raise tarfile.FilterError(f"{member.name!r} is a link")
    return tarfile.data_filter(member, path)


def _install(stage: Path, out: Path, job: str) -> list[Path]:
    """Move run folders to their destination, all or none.

    A folder that was fetched before and not changed since is replaced. Other files (MLflow's
    database) are prefixed with the job's name.
    """
    found = sorted(path for path in stage.glob("*/*") if path.is_dir())
    news = []
    for folder in found:
        target, digest = out / folder.relative_to(stage), _digest(folder)
        if target.exists():
            before = _digest(target)
            if before == digest:
                continue
            fetched = None
            with suppress(OSError, ValueError, LookupError, TypeError):
                fetched = str(json.loads((target / FETCH_MARK).read_text())["content"])
            if before != fetched:
                raise RunFolderError(
                    f"{target}: exists, and was changed since it was fetched or comes from "
                    "elsewhere; move it away, or fetch to another folder with --out"
                )
        news.append((folder, target, digest))
    with ExitStack() as undo:
        for number, (folder, target, digest) in enumerate(news):
            mark = {"job": job, "content": digest}
            (folder / FETCH_MARK).write_text(json.dumps(mark, indent=2) + "\n")
            target.parent.mkdir(exist_ok=True)
            aside = stage / f"before-{number}"
            if target.exists():
                target.rename(aside)
                undo.callback(aside.rename, target)
            folder.rename(target)
            undo.callback(target.rename, folder)
        undo.pop_all()
    for file in sorted(path for path in stage.iterdir() if path.is_file()):
        file.replace(out / f"{job}-{file.name}")
    return [out / folder.relative_to(stage) for folder in found]


def _digest(folder: Path) -> str:
    """A hash of all files in a folder, except those written here: the mark, and reports."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path not in (folder / FETCH_MARK, folder / "report.html"):
            digest.update(
                f"{atomic.checksum(path)} {path.relative_to(folder).as_posix()}\n".encode()
            )
    return digest.hexdigest()
