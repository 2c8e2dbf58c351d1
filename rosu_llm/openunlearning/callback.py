"""The Hydra callback that our trainer configurations bring along."""

from __future__ import annotations

import logging
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from ..errors import RosuError

logger = logging.getLogger(__name__)


class RegisterTrainers(Callback):
    """Registers our trainers when a job starts (a run, or each run of a multirun)."""

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Called by Hydra after OpenUnlearning's modules are imported and before its main function."""
        from .registration import register

        try:
            register(wanted=OmegaConf.select(config, "trainer.handler"))
        except Exception as error:
            # Hydra turns exceptions of callbacks into warnings and goes on; only an exit stops it here, with the
            # reason, before a model is loaded.
            if not isinstance(error, RosuError):
                logger.exception("registering the trainers of rosu-llm failed")
            raise SystemExit(f"rosu-llm: {error}") from error
