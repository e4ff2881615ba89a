"""Roles of model deployments: which of them are for prompts, which for answers, and what that asks of their engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import checks
from .endpoints import Role
from .router.split.base import KV_ROLES
from .router.split.registry import handoff_of, known_connectors

if TYPE_CHECKING:
    from .config import ModelConfig

TRANSFER = "kv_transfer_config"


def with_kv_role(engine: dict[str, Any], role: str, where: str) -> dict[str, Any]:
    """Return ``engine`` with the ``kv_role`` that goes with ``role``, where it does not say one itself.

    Raises:
        ValueError: for a role without a connector to hand prompts over by.
    """
    transfer = engine.get(TRANSFER)
    if transfer is None and role == Role.BOTH:
        return engine
    connector = transfer.get("kv_connector") if isinstance(transfer, Mapping) else None
    if not isinstance(transfer, Mapping) or not isinstance(connector, str) or not connector:
        known = ", ".join(known_connectors())
        raise ValueError(
            f"{where}.engine.{TRANSFER}: with role {role!r} it must be a mapping that names a kv_connector, such as "
            f"one of {known}; got {checks.shown(transfer)}"
        )
    allowed = KV_ROLES.values() if role == Role.BOTH else (KV_ROLES[Role(role)], KV_ROLES[Role.BOTH])
    checks.choice(transfer.get("kv_role", "kv_both"), f"{where}.engine.{TRANSFER}.kv_role", allowed)
    if role != Role.BOTH and handoff_of(connector) is None:
        raise ValueError(
            f"{where}.engine.{TRANSFER}.kv_connector: the router cannot hand prompts over by {connector!r}; it can by "
            f"{', '.join(known_connectors())}"
        )
    return {**engine, TRANSFER: {"kv_role": KV_ROLES[Role(role)], **transfer}}


def check_roles(models: Sequence[ModelConfig], where: str) -> None:
    """Check that deployments which serve one name together make sense.

    Raises:
        ValueError: for a name without a deployment of its own, of different models, without anyone to answer, or whose
            engines cannot hand prompts to each other.
    """
    named = {model.name: model for model in models}
    for model in models:
        if not model.serves:
            continue
        owner = named.get(model.serves)
        if owner is None or owner.serves:
            raise ValueError(
                f"{where}: {model.name!r} serves {model.serves!r}, which is no deployment of its own"
            )
        if owner.source != model.source:
            raise ValueError(
                f"{where}: {model.name!r} serves {model.serves!r}, but its source is {model.source!r}, "
                f"not {owner.source!r}"
            )
    for model in models:
        kin = [other for other in models if other.asked_for == model.asked_for]
        if {other.role for other in kin} == {Role.PREFILL}:
            raise ValueError(f"{where}: {model.asked_for!r} has prefill engines only; none would answer")
        if model.role == Role.PREFILL:
            _check_handover(model, kin, where)


def _check_handover(model: ModelConfig, kin: Sequence[ModelConfig], where: str) -> None:
    mine = _connector(model)
    for other in kin:
        theirs = _connector(other)
        if handoff_of(theirs) is not handoff_of(mine):
            raise ValueError(
                f"{where}: {model.name!r} computes prompts for {other.name!r}, but hands them over by "
                f"{mine}, not by {theirs or 'nothing'}"
            )


def _connector(model: ModelConfig) -> str:
    """The KV connector of its engines, "" without one."""
    transfer = model.engine.get(TRANSFER)
    return str(transfer["kv_connector"]) if transfer else ""
