"""Why a fleet did not come up, read from the progress of its engines and from what Ray Serve says."""

from __future__ import annotations

from typing import Any

from .controller.progress import Phase


def hopeless(progress: list[dict[str, Any]]) -> bool:
    """Say whether further tries would end as those before: one was refused, or two failed in the same way."""
    failed = [(entry["model"], entry["detail"]) for entry in progress if entry["phase"] == Phase.FAILED]
    return len(set(failed)) < len(failed) or any(entry["phase"] == Phase.REFUSED for entry in progress)


def why(progress: list[dict[str, Any]]) -> str:
    """Return what the engines that failed say; empty if none did."""
    failed = [entry for entry in progress if entry["phase"] in (Phase.FAILED, Phase.REFUSED)]
    told = dict.fromkeys(f"model {entry['model']!r}: {entry['detail']}" for entry in failed)
    return "\n".join(["the fleet did not come up", *told]) if told else ""


def what_serve_says(application: Any) -> str:
    """Return the first line that Serve says about each deployment, and the error at the end of it."""
    told = [f"the fleet did not come up: {application.message}"]
    for name, deployment in application.deployments.items():
        lines = [line for line in deployment.message.splitlines() if line.strip()]
        told += [f"{name}: {line}" for line in dict.fromkeys(lines[:1] + lines[-1:])]
    return "\n".join(told)
