"""vLLM's coordinator of data-parallel ranks, made to die with its engine.

The coordinator collects the ranks' queues for the front end, and wakes all ranks of a model with experts when one gets
work. vLLM runs it in a child process that would outlive an engine that is killed.
"""

from __future__ import annotations

import multiprocessing.connection
from pathlib import Path
from typing import Any

from . import orphan

_FILE = "ipc://"
START_S = 120.0  # the process imports vLLM first


class Coordinator:
    """The running coordinator of one engine."""

    def __init__(self, *, ranks: int, waves: bool, host: str, together: bool, logging_config: Any) -> None:
        """Start it and wait until it listens.

        Args:
            ranks: how many there are.
            waves: whether all ranks step as soon as one has work.
            host: where it listens for ranks on other nodes.
            together: whether all ranks are on this node.
            logging_config: vLLM's.

        Raises:
            RuntimeError: it did not start in time.
        """
        from vllm.utils.system_utils import get_mp_context
        from vllm.v1.utils import get_engine_client_zmq_addr

        context = get_mp_context()
        ours, theirs = context.Pipe(duplex=False)
        self.proc = context.Process(
            target=_run,
            name="VLLM_DP_Coordinator",
            kwargs={
                "engine_count": ranks,
                "front_publish_address": get_engine_client_zmq_addr(True, host=host),
                "back_output_address": get_engine_client_zmq_addr(together, host=host),
                "back_publish_address": get_engine_client_zmq_addr(together, host=host),
                "zmq_addr_pipe": theirs,
                "enable_wave_coordination": waves,
                "logging_config": logging_config,
            },
            daemon=True,
        )
        self.proc.start()
        theirs.close()
        self.front, self.output, self.input = self._addresses(ours)
        """Where the front end hears of the ranks, where the ranks tell, where the ranks hear."""

    def _addresses(self, pipe: Any) -> tuple[str, str, str]:
        try:
            if not multiprocessing.connection.wait([pipe, self.proc.sentinel], START_S):
                raise RuntimeError(f"the coordinator of the ranks did not start within {START_S:.0f} s")
            front, output, publish = pipe.recv()
        except EOFError as error:
            raise RuntimeError("the coordinator of the ranks ended while it started") from error
        finally:
            pipe.close()
        return front, output, publish

    def shutdown(self) -> None:
        """End it, and remove the files where it listened."""
        self.proc.kill()  # it keeps nothing
        self.proc.join()
        for address in (self.front, self.output, self.input):
            if address.startswith(_FILE):
                Path(address.removeprefix(_FILE)).unlink(missing_ok=True)


def _run(**arguments: Any) -> None:
    orphan.die_with_parent()
    from vllm.v1.engine.coordinator import DPCoordinatorProc

    DPCoordinatorProc.run_coordinator(**arguments)
