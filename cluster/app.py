"""The Ray Serve application of a fleet: what `serve deploy`, KubeRay's RayService and `npufleet serve`
submit.

``import_path: npufleet.cluster.app:build``, with a FleetConfig as its ``args``. Serve owns the life of the
replicas: how many there are, health checks, restarts, upgrades. No request passes through Serve: the front
end opens its own gRPC and HTTP ports, so Serve's proxies can be off.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .config import FleetConfig, ModelConfig, from_dict

if TYPE_CHECKING:
    from ray.serve import Application

    from .engine.replica import Factory

CONTROLLER = "Controller"
ROUTER = "Router"

START_TRIES = 3  # a wrong checkpoint or setting fails each time: say so instead of trying for ever

_CALLS = 10_000  # long polls and heartbeats of a large fleet are all open calls of the controller


def build(args: Mapping[str, Any]) -> Application:
    """Return the Serve application of the FleetConfig in ``args``.

    Raises:
        ValueError: if the configuration is refused.
    """
    return assemble(from_dict(dict(args)))


def engine_deployment(model: str) -> str:
    """Return the name of the Serve deployment that runs the engines of ``model``."""
    return f"Engine:{model}"


def assemble(config: FleetConfig, factory: Factory | None = None) -> Application:
    """Return the application of ``config``; ``factory`` replaces what makes an engine's AsyncLLM, for
    tests.
    """
    from .controller.deployment import Controller

    fleet = config.to_dict()
    controller = _deployment(Controller, CONTROLLER, max_ongoing_requests=_CALLS).bind(fleet)
    engines = [_engines(model, fleet, controller, factory) for model in config.models]
    return _router(fleet, controller, engines)


def _deployment(kind: type, name: str, **options: Any) -> Any:
    from ray import serve

    settings: dict[str, Any] = {
        "name": name,
        "num_replicas": 1,
        "max_ongoing_requests": 100,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,  # a busy host can be late; a dead process is noticed at once anyhow
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": 10.0,
        "ray_actor_options": {"num_cpus": 0},
        "max_constructor_retry_count": START_TRIES,
    }
    made: Any = serve.deployment(kind)
    return made.options(**{**settings, **options})


def _engines(
    model: ModelConfig, fleet: dict[str, Any], controller: Application, factory: Factory | None
) -> Any:
    from .engine.replica import DRAIN_S, Engine

    deployment = _deployment(
        Engine,
        engine_deployment(model.name),
        num_replicas=model.engines,
        graceful_shutdown_timeout_s=DRAIN_S + 30.0,
    )
    return deployment.bind(fleet, model.name, controller, factory)


def _router(fleet: dict[str, Any], controller: Application, engines: list[Application]) -> Application:
    from .frontend import FRONT_ENVIRONMENT, Frontend

    deployment = _deployment(
        Frontend,
        ROUTER,
        graceful_shutdown_timeout_s=45.0,
        ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": FRONT_ENVIRONMENT}},
    )
    return deployment.bind(fleet, controller, engines)
