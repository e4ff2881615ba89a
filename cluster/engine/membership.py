"""Which Ray node an engine's core belongs to.

The core is a Ray driver of its own. On a machine with several Ray nodes Ray would connect it to whichever it finds
first, the head's if that is one of them, and end all its workers when that node dies; so it is told its engine's node.
"""

from __future__ import annotations

import os
from typing import Any

HOST_ADDRESS = "VLLM_HOST_IP"
"""Where vLLM looks for the address of its host. The engine sets it for its core to that of its own Ray node."""


def join(runtime_env: Any) -> None:
    """Connect this process to the Ray node of its engine; a rank that is a Ray actor is connected already."""
    import ray

    if not ray.is_initialized():
        ray.init(
            address=os.environ["RAY_ADDRESS"],
            _node_ip_address=os.environ[HOST_ADDRESS],
            runtime_env=runtime_env,
        )
