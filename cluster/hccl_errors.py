"""What the error codes of HCCL and of the Ascend runtime mean, and what to do: their own messages name neither.

Sources: the fault codes of the CANN documentation of HCCL, and the error codes of the AscendCL runtime headers.
"""

from __future__ import annotations

import re

CODES = {
    "EI0001": (
        "an environment variable of HCCL has a wrong value",
        "the log names it; see the HCCL_ variables",
    ),
    "EI0002": (
        "a rank waited in vain for another one in a collective",
        "the other rank is slow, hung or dead: look at its log first; HCCL_EXEC_TIMEOUT is how long ranks wait",
    ),
    "EI0003": ("a collective was called with a wrong argument", "report it with the log of the rank"),
    "EI0004": (
        "the rank table does not parse",
        "see that RANK_TABLE_FILE is valid JSON, complete and no link",
    ),
    "EI0005": (
        "the ranks of a group call it with different arguments",
        "give all ranks the same version and settings",
    ),
    "EI0006": (
        "a rank did not answer when the group connected",
        "see that every rank started, that HCCL_IF_IP and HCCL_SOCKET_IFNAME name the network that the hosts share, "
        "that the NPUs' links are up and their TLS switches agree (hccn_tool -i N -link -g, -tls -g), and that "
        "HCCL_CONNECT_TIMEOUT is the same on all ranks",
    ),
    "EI0007": (
        "HCCL ran out of a resource",
        "free memory, streams or notifies: fewer groups, a lower HCCL_BUFFSIZE",
    ),
    "EI0008": ("the ranks have different versions of CANN", "install the same CANN on every node"),
    "EI0009": (
        "a link between two NPUs could not be set up",
        "look at both NPUs' links: npufleet doctor --nodes all",
    ),
    "EI0010": (
        "two NPUs of a node cannot reach each other's memory",
        "see that both are visible to the container",
    ),
    "EI0011": ("an NPU has no memory left for HCCL", "lower gpu_memory_utilization or HCCL_BUFFSIZE"),
    "EI0012": ("a copy over HCCS failed", "an NPU or its memory is faulty: npu-smi info -t health"),
    "EI0013": (
        "a transfer over RoCE failed",
        "a link went down or lost packets: hccn_tool -i N -link -g, -net_health -g, and the switch's counters",
    ),
    "EI0014": (
        "the rank table does not fit this host",
        "see that device ids and addresses are those of the host",
    ),
    "EI0015": ("the ranks did not all register", "one did not start, or cannot reach rank 0's host and port"),
    "EI0017": (
        "the rank table does not fit this host",
        "see that device ids and addresses are those of the host",
    ),
    "EI0018": ("a transfer over the UB plane failed", "look at the links of both NPUs"),
    "EI0019": (
        "a port of HCCL is taken",
        "another engine has it: set HCCL_IF_BASE_PORT or HCCL_HOST_SOCKET_PORT_RANGE",
    ),
    "EI0020": ("a port of HCCL is taken", "another engine has it: set HCCL_NPU_SOCKET_PORT_RANGE"),
    "EJ0003": (
        "a port of HCCL is taken",
        "another engine has it: set HCCL_IF_BASE_PORT or HCCL_HOST_SOCKET_PORT_RANGE",
    ),
    "107001": ("the device index is not valid", "the mask of visible devices hides it, or it is not there"),
    "107030": (
        "an operation that a graph cannot hold was captured",
        "serve with enforce_eager, and report it",
    ),
    "207001": ("an NPU has no memory left", "lower gpu_memory_utilization or max_num_batched_tokens"),
    "207005": ("no memory or no capture resource is left", "capture fewer sizes: cudagraph_capture_sizes"),
    "207008": ("no stream is left", "capture fewer sizes: cudagraph_capture_sizes"),
    "207018": ("an NPU has no memory left", "lower gpu_memory_utilization or max_num_batched_tokens"),
    "507011": ("an operator failed on the NPU", "the lines above it name the operator"),
    "507014": (
        "an AI core did not come to an end in time",
        "a rank of a fused collective is missing or slow",
    ),
    "507015": ("an AI core met an exception", "the lines above it name the operator"),
    "507018": ("an AI CPU met an exception", "the lines above it name the operator"),
    "507034": (
        "a vector core did not come to an end in time",
        "a rank of a fused collective is missing or slow",
    ),
    "507035": ("a vector core met an exception", "the lines above it name the operator"),
    "507899": ("the driver failed", "npu-smi info and dmesg tell more; the NPU may need a reset"),
}
_CODE = re.compile(rf"(?<![0-9A-Za-z])({'|'.join(CODES)})(?![0-9A-Za-z])")


def explain(text: str) -> str:
    """Return what the first known code in ``text`` means and what to do, empty if there is none."""
    match = _CODE.search(text)
    if match is None:
        return ""
    meaning, remedy = CODES[match[1]]
    return f"{match[1]}: {meaning}; {remedy}"
