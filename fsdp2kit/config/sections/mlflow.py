"""[mlflow]: MLflow."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import Field

from fsdp2kit.config.facts import MeshSizes
from fsdp2kit.config.section import Section
from fsdp2kit.errors import check_installed


class MlflowConfig(Section):
    """MLflow: to the server or store of MLFLOW_TRACKING_URI, or to `mlflow.db` beside the run directory."""

    enabled: bool = False
    """Log to it. Needs the extra `mlflow`."""
    experiment: Annotated[str, Field(min_length=1)] | None = None
    """Name of the experiment. Default: MLFLOW_EXPERIMENT_NAME, else "fsdp2kit"."""

    def check(self, config: Any, sizes: MeshSizes) -> None:
        uri = os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:"
        is_database = uri.startswith(("sqlite", "postgresql", "mysql", "mssql"))
        for package in ("mlflow", *(("sqlalchemy", "alembic") if is_database else ())) if self.enabled else ():
            check_installed(package, where="mlflow.enabled")
