"""Reach the controller of a running fleet through its Ray cluster.

Who may change a fleet is who may use its Ray cluster: on loopback the user of the machine, elsewhere who holds
the cluster's token.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
from collections.abc import Iterator
from typing import Any

from .. import app, local, preflight, runs
from ..app import APPLICATION, CONTROLLER

CALL_S = 60.0


class Unreachable(RuntimeError):
    """The controller cannot be asked; the text says why."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what says which fleet is meant."""
    parser.add_argument("--fleet", metavar="NAME", help="which fleet, if several run here")
    parser.add_argument(
        "--address",
        help="the Ray cluster of the fleet ('auto' or HOST:PORT); default: the fleet on this machine",
    )


class ControllerLine:
    """Calls of the controller's methods."""

    def __init__(self) -> None:
        """Looks for a controller on the Ray cluster that this process is connected to."""
        self.fleet_runs = self._find() is not None

    def begin(self, application: Any) -> None:
        """Submit the application of a new fleet; its controller answers as soon as it is up."""
        from ray import serve

        serve.start(proxy_location="Disabled")
        app.submit(application)
        self.fleet_runs = True

    def front_is_up(self) -> bool:
        """Whether router and gateway answer; False while Serve does not say."""
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException
        from ray.serve.schema import DeploymentStatus

        try:
            application = serve.status().applications.get(APPLICATION)
        except (RayError, RayServeException, TimeoutError):
            return False
        front = application.deployments.get(app.ROUTER) if application else None
        return front is not None and front.status == DeploymentStatus.HEALTHY

    def ask(self, method: str, *args: Any) -> Any:
        """Return the answer of the controller's ``method``.

        Raises:
            Unreachable: if it does not answer.
            ValueError: if it refuses, or no fleet runs; the text says why.
        """
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        if not self.fleet_runs:
            raise ValueError("no fleet runs on this Ray cluster; begin one with `npufleet deploy`")
        handle = self._find()
        if handle is None:
            raise Unreachable("the controller is not up yet; try again in a few seconds")
        try:
            answer = getattr(handle, method).remote(*args).result(timeout_s=CALL_S)
        except (RayError, RayServeException, TimeoutError) as error:
            raise Unreachable(f"the controller does not answer: {error}") from error
        if isinstance(answer, dict) and "refused" in answer:
            raise ValueError(answer["refused"])
        return answer

    def _find(self) -> Any:
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            return serve.get_deployment_handle(CONTROLLER, APPLICATION)
        except (KeyError, RayServeException):  # no such deployment; no Serve at all
            return None


def _here(name: str | None) -> str:
    """Return the address of the Ray cluster of a fleet on this machine, and set the environment for it."""
    run = runs.find(name)
    if not run.ray:
        raise ValueError("the fleet is still starting its Ray cluster; try again in a few seconds")
    for variable, value in local.ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    if run.ray_auth:
        os.environ.setdefault(local.AUTH_MODE, run.ray_auth)
    return run.ray


@contextlib.contextmanager
def controller(args: argparse.Namespace) -> Iterator[ControllerLine]:
    """Connect to the Ray cluster that ``args`` mean and give the line to its controller.

    Raises:
        ValueError: if no fleet is meant.
        Unreachable: if the Ray cluster cannot be reached.
    """
    address = args.address or _here(args.fleet)
    import ray

    try:
        preflight.cluster(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, namespace="npufleet")
    except OSError as error:
        raise Unreachable(f"no Ray cluster at {address!r}: {error}") from error
    importlib.import_module("ray.serve")  # sets the level of its own log, so ours comes after
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        found = ControllerLine()
        if not found.fleet_runs and not args.address:
            raise Unreachable("the fleet's controller is not up yet; try again in a few seconds")
        yield found
    finally:
        ray.shutdown()
