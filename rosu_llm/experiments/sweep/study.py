"""The Optuna study behind a search: opened or created, tied to its conditions, freed of trials whose process died."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import RDBStorage, fail_stale_trials
from optuna.storages import RetryHeartbeatStaleTrialCallback as Retry
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url

from ...errors import ConfigError, DataError, one_line
from .worker_lock import alone, is_gone

CONDITIONS = "conditions"
#: In the folder of a search: its own database, the study whose models and tables lie there, the folders of trials.
DATABASE, OWNER, TRIALS = "study.db", "study.txt", "trials"
#: A worker that gives no sign for so long is taken for dead, wherever it ran.
HEARTBEAT, GRACE = 60, 300
#: A trial that takes its process down again and again is given up.
RETRIES = 3
#: Between being created and naming its worker, a trial is nobody's for milliseconds.
UNNAMED = timedelta(minutes=1)
#: The last one counts so that workers do not start more than was asked for while others are still busy.
COUNTED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
#: How long a worker waits for the others to leave a database file.
_WAIT = {"connect_args": {"timeout": 60}}


def open_study(url: str | None, name: str, out: Path, *, create: bool) -> optuna.Study:
    """The study called ``name`` in the storage at ``url`` (else ``out/study.db``).

    Trials whose worker stops giving signs are failed and queued again by Optuna itself, at the start of any trial.
    A folder belongs to one study, whichever comes first: trials of another have the same numbers and thus folders.
    """
    if url is None and not create and not (out / DATABASE).is_file():
        raise DataError(f"{out} holds no study ({DATABASE}): run the search first, or name its --storage.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be made a folder ({error.strerror}): give another.") from error
    quiet()
    with alone(out / OWNER):
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
            engine_kwargs=_WAIT if url is None or url.startswith("sqlite") else None,
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
    except Exception:  # whatever it is, opening it tells what is wrong
        return url
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return parsed.render_as_string(hide_password=True)
    file = Path(parsed.database).resolve()
    return DATABASE if file == (out / DATABASE).resolve() else f"sqlite:///{file}"


def start_over(out: Path) -> None:
    """Remove the study in ``out`` with its trials, for a toy search that shall not go on with another one's."""
    for file in [*out.glob(f"{DATABASE}*"), out / OWNER]:  # the database may have a journal
        file.unlink(missing_ok=True)
    shutil.rmtree(out / TRIALS, ignore_errors=True)


def quiet() -> None:
    """Failures are shown by us, and the heartbeat is experimental by name only."""
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)


def agree(study: optuna.Study, conditions: Mapping[str, Any]) -> None:
    """Write down what the study's figures depend on, or raise if that is not what it was started with."""
    now = json.loads(json.dumps(conditions, default=str))
    then = study.user_attrs.get(CONDITIONS)
    if then is None:
        study.set_user_attr(CONDITIONS, now)
        return
    before, after = dict(_flat(then)), dict(_flat(now))
    changed = [
        f"{key} was {before.get(key, 'not set')}, now {after.get(key, 'not set')}"
        for key in sorted({*before, *after})
        if before.get(key) != after.get(key)
    ]
    if changed:
        more = f" and {len(changed) - 4} more" if len(changed) > 4 else ""
        raise ConfigError(
            f"Study {study.study_name!r} was started differently, so its trials could not be compared with new ones: "
            f"{'; '.join(changed[:4])}{more}. Go on with the old settings, or give another --out."
        )


def disagree(study: optuna.Study) -> None:
    """Take the conditions back while there are no trials: a start that failed shall not tie the study to a typo."""
    if not study.get_trials(deepcopy=False):
        study.set_user_attr(CONDITIONS, None)


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def reclaim(study: optuna.Study, workers: Path) -> None:
    """Fail the trials of workers that are known to be gone or give no sign, and queue their settings again.

    ``study`` must have a sampler that does not act on the end of a trial, as Optuna's default.
    """
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        worker = trial.user_attrs.get("worker")
        if is_gone(workers, worker) if worker else _old(trial):
            try:
                study.tell(trial.number, state=TrialState.FAIL)
            except ValueError:  # another worker was faster
                continue
            repeat(study, study.trials[trial.number])
            if worker:
                (workers / worker).unlink(missing_ok=True)
    fail_stale_trials(study)


def repeat(study: optuna.Study, trial: FrozenTrial) -> None:
    """Queue the settings of a trial that did not get to its end."""
    Retry(max_retry=RETRIES)(study, trial)


def _old(trial: FrozenTrial) -> bool:
    return trial.datetime_start is not None and datetime.now() - trial.datetime_start > UNNAMED
