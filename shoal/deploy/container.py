"""Entry point of SageMaker containers: `python -m shoal.deploy.container serve`.

SAGEMAKER_BIND_TO_PORT is the port. SAGEMAKER_MULTI_MODEL selects between one model in /opt/ml/model and models that
are loaded at run time. All other settings are those of `shoal serve`, as `SHOAL_…` variables.
"""

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

from shoal.errors import ShoalError
from shoal.server.logging import set_up_logging
from shoal.settings import ResolvedSettings, read_settings

MODEL_DIRECTORY = "/opt/ml/model"


def container_settings(variables: Mapping[str, str]) -> ResolvedSettings:
    """Read the settings, without API keys: SageMaker authenticates callers and isolates the container."""
    flags: dict[str, Any] = {"host": "0.0.0.0", "insecure": True}
    if variables.get("SAGEMAKER_BIND_TO_PORT"):
        flags["port"] = variables["SAGEMAKER_BIND_TO_PORT"]
    if not variables.get("SHOAL_MODEL"):
        flags["model"] = MODEL_DIRECTORY
    return read_settings(flags, variables=variables)


def is_multi_model(variables: Mapping[str, str]) -> bool:
    return variables.get("SAGEMAKER_MULTI_MODEL", "").lower() == "true"


def main(arguments: list[str]) -> None:
    if arguments != ["serve"]:
        sys.exit("usage: python -m shoal.deploy.container serve")
    try:
        settings = container_settings(os.environ).settings
        set_up_logging(settings.log_format, settings.log_level)
        if is_multi_model(os.environ):
            from shoal.deploy.multi_model import serve_multi_model

            serve_multi_model(settings)
        else:
            from shoal.server.run import serve

            serve(settings.server(), settings.source(), settings.voice_directory())
    except ShoalError as problem:
        logging.getLogger("shoal").error("%s", problem)
        sys.exit(problem.exit_code)


if __name__ == "__main__":
    main(sys.argv[1:])
