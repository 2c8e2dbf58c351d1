"""The Optuna study behind a search: opened or created, tied to its conditions, freed of trials whose process died.

A process that is killed leaves its trial in the state "running". Every worker therefore holds a lock on a file of its
own as long as it lives; the operating system releases it however the process ends, and process ids that are used again
cannot mislead. Workers that share no folder, and systems without such locks, have Optuna's heartbeat.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import warnings
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import optuna
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url

from ...errors import ConfigError, DataError, one_line
from ...files import changed_conditions

try:
    import fcntl
except ImportError:  # not a Unix system
    fcntl = None  # type: ignore[assignment]

CONDITIONS = "conditions"
#: In the folder of a search: its database, the study whose models and tables lie there, folders of trials, locks.
DATABASE, OWNER, TRIALS, WORKERS = "study.db", "study.txt", "trials", "workers"
#: Seconds between heartbeats, and without one after which a worker counts as dead, wherever it ran.
HEARTBEAT, GRACE = 60, 300
#: A trial whose process dies is repeated so many times at most.
RETRIES = 3
#: A trial names its worker milliseconds after its creation; one that has not done so by now lost its process.
UNNAMED = timedelta(minutes=1)
#: Running trials count too, so that several workers together start no more than were asked for.
COUNTED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)


def open_study(url: str | None, name: str, out: Path, *, create: bool) -> optuna.Study:
    """The study called ``name`` in the storage at ``url`` (else ``out/study.db``).

    Optuna itself fails and queues again the trials of workers without heartbeat, whenever any trial starts.
    A folder belongs to one study, whichever comes first: trials of another have the same numbers and thus folders.
    """
    if url is None and not create and not (out / DATABASE).is_file():
        raise DataError(f"{out} holds no study ({DATABASE}): run the search first, or name its --storage.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made a folder ({error.strerror}): give another.") from error
    # Failures are printed by the command, and the heartbeat's warning says nothing of use.
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    with exclusive(out / OWNER):
        this, owner = f"{name!r} in {_place(url, out)}", (out / OWNER).read_text(encoding="utf-8").strip()
        if owner not in ("", this):
            raise ConfigError(
                f"--out {out} holds the models and tables of study {owner}, which study {this} would overwrite: "
                "name the first one with --study (and --storage), or use another --out."
            )
        study = _open(url, name, out / DATABASE, create=create)
        (out / OWNER).write_text(this + "\n", encoding="utf-8")
    return study


def _open(url: str | None, name: str, file: Path, *, create: bool) -> optuna.Study:
    try:
        storage = RDBStorage(
            url or f"sqlite:///{file.resolve()}",
            # the seconds that a worker waits for the lock of a database file
            engine_kwargs={"connect_args": {"timeout": 60}} if (url or "sqlite").startswith("sqlite") else None,
            heartbeat_interval=HEARTBEAT,
            grace_period=GRACE,
            heartbeat_stale_trial_callback=Retry(max_retry=RETRIES),
        )
        if create:
            return optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
        return optuna.load_study(storage=storage, study_name=name)
    except KeyError as error:
        raise DataError(f"There is no study {name!r} in {url or file}: name it with --study.") from error
    except Exception as error:  # SQLAlchemy's, the driver's: any of them means that the storage cannot be used
        raise ConfigError(f"--storage {url or file} cannot be opened: {one_line(error)[:300]}") from error


def _place(url: str | None, out: Path) -> str:
    """A storage as text that can be left in a file: without password, and the folder's own without its path."""
    if url is None:
        return DATABASE
    try:
        parsed = make_url(url)
    except Exception:  # opening the storage will tell what is wrong with it
        return url
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return parsed.render_as_string(hide_password=True)
    file = Path(parsed.database).resolve()
    return DATABASE if file == (out / DATABASE).resolve() else f"sqlite:///{file}"


def start_over(out: Path) -> None:
    """Remove the study in ``out`` with its trials, so that a toy search does not continue another one."""
    for file in [*out.glob(f"{DATABASE}*"), out / OWNER]:  # the database may have a journal
        file.unlink(missing_ok=True)
    shutil.rmtree(out / TRIALS, ignore_errors=True)


def pin_conditions(study: optuna.Study, conditions: Mapping[str, Any]) -> None:
    """Write down what the study's figures depend on, or raise if that is not what it was started with."""
    before = study.user_attrs.get(CONDITIONS)
    if before is None:
        study.set_user_attr(CONDITIONS, json.loads(json.dumps(conditions, default=str)))
        return
    changed = changed_conditions(before, conditions)
    if changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise ConfigError(
            f"Study {study.study_name!r} was started differently, so its trials could not be compared with new ones: "
            f"{'; '.join(changed[:4])}{more}. Go on with the old settings, or give another --out."
        )


def clear_conditions(study: optuna.Study) -> None:
    """Forget the conditions while there are no trials: a start that failed must not tie the study to a typo."""
    if not study.get_trials(deepcopy=False):
        study.set_user_attr(CONDITIONS, None)


def reclaim(study: optuna.Study, workers: Path) -> None:
    """Fail the trials of workers that have ended or send no heartbeat, and queue their settings again.

    ``study`` must have a sampler that does not act on the end of a trial, as Optuna's default.
    """
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        worker = trial.user_attrs.get("worker")
        age = datetime.now() - (trial.datetime_start or datetime.now())
        if is_gone(workers, worker) if worker else age > UNNAMED:
            try:
                study.tell(trial.number, state=TrialState.FAIL)
            except ValueError:  # another worker was faster
                continue
            requeue(study, study.trials[trial.number])
            if worker:
                (workers / worker).unlink(missing_ok=True)
    fail_stale_trials(study)


def requeue(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue the settings of a trial that did not get to its end."""
    Retry(max_retry=RETRIES)(study, trial)


@contextlib.contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Let one worker at a time through; the others wait."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


@contextlib.contextmanager
def worker_lock(folder: Path) -> Iterator[str]:
    """Hold the lock of this worker while the context lasts; its name, which no other worker has."""
    name = f"{socket.gethostname()}-{uuid4().hex[:12]}"
    with exclusive(folder / name):
        try:
            yield name
        finally:
            (folder / name).unlink(missing_ok=True)


def is_gone(folder: Path, name: str) -> bool:
    """Whether the worker of this name is known to have ended; False where that cannot be known."""
    path = folder / name
    if fcntl is None or not path.is_file():
        return False
    file = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True
