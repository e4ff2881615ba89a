"""Why a fleet did not come up, read from the progress of its engines and from what Ray Serve says."""

from __future__ import annotations

from typing import Any

from .controller.progress import Phase
from .engine.causes import kind

MOST_DEATHS = 5
"""So many engines that died after their start, before the whole fleet was up once, and a fleet is given up."""


def hopeless(progress: list[dict[str, Any]]) -> bool:
    """Say whether further tries would end as those before: one was refused, or two failed in the same way."""
    failed = [(entry["model"], kind(entry["detail"])) for entry in progress if entry["phase"] == Phase.FAILED]
    return len(set(failed)) < len(failed) or any(entry["phase"] == Phase.REFUSED for entry in progress)


def why(progress: list[dict[str, Any]]) -> str:
    """Return what the engines that failed say; empty if none did."""
    failed = [entry for entry in progress if entry["phase"] in (Phase.FAILED, Phase.REFUSED)]
    told: dict[tuple[str, str], str] = {}
    for entry in failed:
        told.setdefault(
            (entry["model"], kind(entry["detail"])), f"model {entry['model']!r}: {entry['detail']}"
        )
    return "\n".join(["the fleet did not come up", *told.values()]) if told else ""


def dying(deaths: list[dict[str, Any]]) -> str:
    """Return why a fleet is given up whose engines start and then die, empty while there is hope; ``deaths`` are those
    that the controller tells of.
    """
    if len(deaths) < MOST_DEATHS:
        return ""
    last = deaths[-1]
    return f"the fleet did not come up\nmodel {last['model']!r}: {len(deaths)} engines died, the last: {last['why']}"


def only_died(application: Any) -> bool:
    """Say whether Serve calls the application failed only because a replica died after its start: it starts another."""
    from ray.serve.schema import DeploymentStatus, DeploymentStatusTrigger

    bad = (DeploymentStatus.DEPLOY_FAILED, DeploymentStatus.UNHEALTHY)
    failed = [told for told in application.deployments.values() if told.status in bad]
    return bool(failed) and all(
        told.status_trigger == DeploymentStatusTrigger.HEALTH_CHECK_FAILED for told in failed
    )


def what_serve_says(application: Any) -> str:
    """Return the first line that Serve says about each deployment, and the error at the end of it."""
    told = [f"the fleet did not come up: {application.message}"]
    for name, deployment in application.deployments.items():
        lines = [line for line in deployment.message.splitlines() if line.strip()]
        told += [f"{name}: {line}" for line in dict.fromkeys(lines[:1] + lines[-1:])]
    return "\n".join(told)
