"""The Ray Serve application of a fleet: what `serve deploy`, KubeRay's RayService and `npufleet serve`
submit.

``import_path: npufleet.cluster.app:build``, with a FleetConfig as its ``args``. Serve owns the life of the
replicas: how many there are, health checks, restarts, upgrades. No request passes through Serve: the front
end opens its own gRPC and HTTP ports, so Serve's proxies can be off.

The same application is submitted again for every change of a running fleet. Serve restarts the replicas of a
deployment whose version differs, so each deployment's version is a digest of what its constructor depends on,
and everything else reaches running replicas as ``user_config``.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .config import FleetConfig, ModelConfig, from_dict
from .deploy.wish import Wish, digest, engine_fleet, generation

if TYPE_CHECKING:
    from ray.serve import Application

    from .engine.replica import Factory

APPLICATION = "npufleet"
CONTROLLER = "Controller"
ROUTER = "Router"

START_TRIES = 3  # a wrong checkpoint or setting fails each time: say so instead of trying for ever

CPUS = 0.01
"""Of each replica: next to nothing, and more than a head has that is started with --num-cpus=0. There none of them
goes then, and serving goes on while the head is away."""

_CALLS = 10_000  # long polls and heartbeats of a large fleet are all open calls of the controller


def build(args: Mapping[str, Any]) -> Application:
    """Return the Serve application of the FleetConfig in ``args``.

    Raises:
        ValueError: if the configuration is refused.
    """
    return assemble(Wish.of(from_dict(dict(args))))


def engine_deployment(model: str) -> str:
    """Return the name of the Serve deployment that runs the engines of ``model``."""
    return f"Engine:{model}"


def assemble(
    wish: Wish,
    factory: Factory | None = None,
    surge: Mapping[str, int] | None = None,
    secret: str | None = None,
) -> Application:
    """Return the application of ``wish``.

    Args:
        wish: what the fleet shall be; a model with no engine has no deployment.
        factory: replaces what makes an engine's AsyncLLM, for tests.
        surge: by model, how many engines of a new generation may start before old ones end.
        secret: what the fleet's engines want to be shown; a new one for a new fleet.
    """
    from .controller.deployment import Controller

    config = wish.config
    told = wish.to_dict()
    secret = secret or secrets.token_urlsafe(32)
    controller = _deployment(
        Controller,
        CONTROLLER,
        digest([config.name, config.device, asdict(config.metrics)]),
        max_ongoing_requests=_CALLS,
        user_config=told,
    ).bind(told, factory, secret)
    engines = [
        _engines(config, model, wish.engines[model.name], (surge or {}).get(model.name, 0)).bind(
            engine_fleet(config, model).to_dict(), model.name, controller, factory, secret
        )
        for model in config.models
        if wish.engines[model.name] > 0
    ]
    return _router(config, told).bind(told, controller, engines, secret)


def submit(application: Application) -> None:
    """Give ``application`` to Serve and return at once; what is already as it says is left alone."""
    from ray import serve

    target = serve.RunTarget(application, name=APPLICATION, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False, wait_for_ingress_deployment_creation=False)


def given_up() -> dict[str, str]:
    """Return the model deployments whose engines Serve no longer tries to start, with what it says about each.

    Blocks for a call to Serve's controller; run it in a thread.
    """
    from ray import serve
    from ray.serve.schema import DeploymentStatus

    application = serve.status().applications.get(APPLICATION)
    prefix = engine_deployment("")
    found = {}
    for name, deployment in (application.deployments if application else {}).items():
        # The same status stands for one engine that died meanwhile, which Serve replaces.
        failed = (
            deployment.status == DeploymentStatus.DEPLOY_FAILED and "failed to start" in deployment.message
        )
        if name.startswith(prefix) and failed:
            lines = [line for line in deployment.message.splitlines() if line.strip()]
            found[name.removeprefix(prefix)] = lines[-1] if lines else "Serve gave up"
    return found


def _deployment(kind: type, name: str, version: str, **options: Any) -> Any:
    from ray import serve

    settings: dict[str, Any] = {
        "name": name,
        "num_replicas": 1,
        "max_ongoing_requests": 100,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,  # a busy host can be late; a dead process is noticed at once anyhow
        "graceful_shutdown_wait_loop_s": 0.1,
        "graceful_shutdown_timeout_s": 10.0,
        "ray_actor_options": {"num_cpus": CPUS},
        "max_constructor_retry_count": START_TRIES,
    }
    made: Any = serve.deployment(kind)
    # Serve offers versions to itself only; without one, every submission restarts everything.
    return made.options(**{**settings, **options}).options(version=version, _internal=True)


def _engines(config: FleetConfig, model: ModelConfig, count: int, surge: int) -> Any:
    from .engine.replica import Engine

    return _deployment(
        Engine,
        engine_deployment(model.name),
        generation(config, model),
        num_replicas=count,
        graceful_shutdown_timeout_s=config.healing.drain_s + 30.0,
        max_surge_percent=100 * min(surge, count) // count,  # Serve rounds up to whole engines
    )


def _router(config: FleetConfig, told: dict[str, Any]) -> Any:
    from .frontend import FRONT_ENVIRONMENT, Frontend

    return _deployment(
        Frontend,
        ROUTER,
        digest([config.name, config.device, asdict(config.router), asdict(config.gateway)]),
        num_replicas=config.front_ends,
        # Each shares its ports with the one that it replaces, so that somebody always listens.
        max_surge_percent=100 // min(config.front_ends, 5),
        health_check_timeout_s=10.0,  # one that hangs keeps its part of the clients waiting, and the controller too
        graceful_shutdown_timeout_s=45.0,
        user_config=told,
        ray_actor_options={"num_cpus": CPUS, "runtime_env": {"env_vars": FRONT_ENVIRONMENT}},
    )
