"""What a gateway process must look like before vLLM is imported in it.

A gateway runs vLLM's frontend on a CPU. It needs no accelerator, and must not load one: not on a node without
NPUs, and not where the NPU is someone else's.
"""

from __future__ import annotations

import os
import sys

GATEWAY_ENV = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # torch does not load torch_npu by itself
    "VLLM_TARGET_DEVICE": "cpu",  # vLLM takes its CPU platform and leaves platform plugins alone
    "VLLM_PLUGINS": "none",  # no general plugin: ours registers NPU layers, which need torch_npu
}
"""Environment that whoever starts a gateway process sets; read before torch and vLLM are imported."""


def prepare_process() -> None:
    """Check this process, and keep torch_npu out of it. Raises ``RuntimeError`` with what to do.

    transformers imports torch_npu wherever its wheel is installed, also with autoload off; an entry of None
    in ``sys.modules`` makes it look absent.
    """
    wrong = [f"{key}={value}" for key, value in GATEWAY_ENV.items() if os.environ.get(key) != value]
    if wrong:
        raise RuntimeError(f"a gateway process must be started with {' '.join(wrong)} in its environment")
    if sys.modules.get("torch_npu") is not None:
        raise RuntimeError(
            "torch_npu is already loaded in this process: start the gateway in a process of its own, "
            f"with {' '.join(f'{key}={value}' for key, value in GATEWAY_ENV.items())}"
        )
    sys.modules.setdefault("torch_npu", None)  # type: ignore[arg-type]
