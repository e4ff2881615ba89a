"""What environment variables say: the mask of visible NPUs, the logical super-pod, the NICs, virtual NPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ... import device, env
from ..facts import Facts

MASK = "ASCEND_RT_VISIBLE_DEVICES"
SUPER_POD = "HCCL_LOGIC_SUPERPOD_ID"
INTERFACE = "HCCL_SOCKET_IFNAME"
ADDRESS = "HCCL_IF_IP"
NONE = ("", "NoDevFiles")  # values of the mask that hide all NPUs


@dataclass(frozen=True, kw_only=True)
class Here:
    """The environment of this process. Virtual NPUs, where they are enabled, are all that there is."""

    variables: Mapping[str, str] | None = None
    virtual: bool | None = None

    def look(self) -> Facts:
        """Return what the variables say. Raises ``ValueError`` if one of them does not parse."""
        told = os.environ if self.variables is None else self.variables
        masked = visible(told.get(MASK))
        enabled = device.virtual_enabled() if self.virtual is None else self.virtual
        soc = None
        if enabled:
            count, soc = env.virtual_device()
            masked = tuple(i for i in range(count) if masked is None or i in masked)
        return Facts(
            indices=masked,
            unhealthy=() if enabled else None,
            soc=soc,
            super_pod=told.get(SUPER_POD) or None,
            interface=first_interface(told.get(INTERFACE, "")),
            address=told.get(ADDRESS) or None,
        )


def visible(mask: str | None) -> tuple[int, ...] | None:
    """Return the NPUs that the mask shows, None if there is no mask.

    Raises:
        ValueError: if it is no list of indices.
    """
    if mask is None:
        return None
    if mask in NONE:
        return ()
    parts = [part.strip() for part in mask.split(",")]
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"{MASK} is {mask!r}; expected indices with commas between, for example 0,1,2,3")
    return tuple(sorted({int(part) for part in parts}))


def first_interface(value: str) -> str | None:
    """Return the interface that the variable names if it names exactly one; prefixes and exclusions name none."""
    name = value.removeprefix("=")
    return name if name and not set(name) & set(",^:") else None
