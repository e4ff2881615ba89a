"""Kill parts of a running fleet at random under steady load, and see that it heals: `make chaos`.

Three simulated hosts and a head, one model on several engines, on virtual NPUs. One fault after the other, each
followed until the fleet is whole again. Fails if an answer was wrong, a request was lost that had not streamed yet, an
engine did not come back, or anything was left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.chaos_load import Account, Load, known_answers
from benchmarks.hosts import Host, Hosts, free_port, mapped
from npufleet.cluster import demo_model

TOKENS = 24
PROMPTS = ["1, 2, 3, 4,", "The capital of France is", "Monday, Tuesday,", "Once upon a time"]
HEAL_S = 420.0
RESTART_S = 5.0  # that a dead host stays away
QUIET_S = 5.0  # between two faults
ENGINE, CONTROLLER = "ServeReplica:npufleet:Engine", "ServeReplica:npufleet:Controller"
FRONT, CORE, WORKER = "ServeReplica:npufleet:Router", "EngineCore", "RayWorkerProc"


@dataclass(kw_only=True)
class Fault:
    """One kind of fault: what it does, and its signal for a process."""

    name: str
    title: str = ""  # of the process that is hit
    stop: bool = False  # SIGSTOP instead of SIGKILL
    host: str = ""  # "any" or "head" for a whole host


FAULTS = (
    Fault(name="worker killed", title=WORKER),
    Fault(name="engine core killed", title=CORE),
    Fault(name="engine killed", title=ENGINE),
    Fault(name="worker stopped (hangs)", title=WORKER, stop=True),
    Fault(name="controller killed", title=CONTROLLER),
    Fault(name="host lost", host="any"),
    Fault(name="head lost", host="head"),
)


@dataclass(kw_only=True)
class Recovery:
    """What one fault did."""

    fault: str
    whole_s: float  # until every engine was ready again
    gap_s: float  # longest time without an answer
    broken: int  # streams that ended in the middle
    retried: int


@dataclass(kw_only=True)
class Chaos:
    """The fleet, its hosts and the load on it."""

    hosts: Hosts
    load: Load
    status_url: str
    wanted: int
    rng: random.Random
    recoveries: list[Recovery] = field(default_factory=list)
    shared: set[str] = field(default_factory=set)  # shared memory that the fleet had at some time

    async def run(self, seconds: float) -> None:
        """Hit the fleet until the time is over, all kinds of faults in turn, in random order."""
        loading = asyncio.create_task(self.load.run())
        end = time.monotonic() + seconds
        await asyncio.sleep(QUIET_S)
        while time.monotonic() < end:
            for fault in self.rng.sample(FAULTS, len(FAULTS)):
                if time.monotonic() < end:
                    await self._hit(fault)
        self.load.stopping = True
        await loading

    async def _hit(self, fault: Fault) -> None:
        account = self.load.account
        before = (account.broken, account.retried, len(account.wrong), len(account.lost))
        began = time.monotonic()
        say(f"{fault.name} ...")
        self.look()
        there = ready_engines(await self.status())
        renews = await asyncio.to_thread(self._strike, fault)
        await self._whole(there if renews else frozenset())
        recovery = Recovery(
            fault=fault.name,
            whole_s=time.monotonic() - began,
            gap_s=account.gap(began),
            broken=account.broken - before[0],
            retried=account.retried - before[1],
        )
        self.recoveries.append(recovery)
        say(
            f"{fault.name}: whole after {recovery.whole_s:.1f} s, {recovery.broken} streams broken, "
            f"{recovery.retried} requests sent again, longest gap {recovery.gap_s:.1f} s; "
            f"{account.right} right, {len(account.wrong)} wrong, {len(account.lost)} lost"
        )
        await asyncio.sleep(QUIET_S)

    def look(self) -> set[str]:
        """Note the shared memory that the fleet has now, and return it."""
        found = mapped(process for host in self.hosts.all for process in host.family)
        self.shared |= found
        return found

    def _strike(self, fault: Fault) -> bool:
        """Do it; say whether an engine must have ended of it."""
        if fault.host:
            host = self.hosts.head if fault.host == "head" else self.rng.choice(self._engine_hosts())
            titles = " ".join(map(title, host.family))
            self.hosts.kill(host)
            time.sleep(RESTART_S)
            self.hosts.start(host)
            return ENGINE in titles or WORKER in titles
        found = self._processes(fault.title)
        assert found, f"no process {fault.title!r} to hit"
        victim = self.rng.choice(found)
        victim.send_signal(signal.SIGSTOP if fault.stop else signal.SIGKILL)
        return fault.title != CONTROLLER

    def _engine_hosts(self) -> list[Host]:
        """Hosts with engines or workers, and without the front end: that one has a single replica, whose loss
        clients see. The others if there are none such.
        """
        running = {host.name: " ".join(map(title, host.family)) for host in self.hosts.hosts}
        apart = [host for host in self.hosts.hosts if FRONT not in running[host.name]]
        busy = [h for h in apart if ENGINE in running[h.name] or WORKER in running[h.name]]
        return busy or apart

    def _processes(self, wanted: str) -> list[psutil.Process]:
        return [p for host in self.hosts.all for p in host.family if wanted in title(p)]

    async def _whole(self, before: frozenset[str]) -> None:
        """Wait until the controller knows every engine as ready, twice in a row, and no other one; not all of
        ``before``, one of which has ended.
        """
        seen, deadline = 0, time.monotonic() + HEAL_S
        await asyncio.sleep(2.0)
        while seen < 2:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the fleet is not whole after {HEAL_S:.0f} s: {await self.status()}")
            status = await self.status()
            ready = [engine for engine in status.get("engines", ()) if engine["state"] == "ready"]
            fine = len(ready) == len(status.get("engines", ())) == self.wanted
            fine &= not before or ready_engines(status) != before
            stopped = any(map(is_stopped, self._processes(WORKER)))
            seen = seen + 1 if fine and not stopped else 0
            await asyncio.sleep(1.0)

    async def status(self) -> dict[str, Any]:
        """What the controller says; empty while it says nothing."""
        try:
            async with httpx.AsyncClient(timeout=10.0, verify=False) as client:
                answer: dict[str, Any] = (await client.get(f"{self.status_url}/status")).json()
                return answer
        except (httpx.HTTPError, ValueError):
            return {}


def ready_engines(status: dict[str, Any]) -> frozenset[str]:
    """The ids of the engines that are ready."""
    return frozenset(e["engine_id"] for e in status.get("engines", ()) if e["state"] == "ready")


def title(process: psutil.Process) -> str:
    """The command line of a process, empty if it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_stopped(process: psutil.Process) -> bool:
    """Whether a process is there and halted by a signal."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def say(text: str) -> None:
    """Print with the time."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def fleet_file(folder: Path, engines: int) -> tuple[Path, dict[str, int]]:
    """Write the FleetConfig of the run; return it and its ports."""
    ports = {name: free_port() for name in ("gateway", "router", "metrics")}
    engine = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    # In float32 no two tokens are so close that the other requests of a step decide between them.
    engine |= {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "dtype": "float32"}
    model = {"name": demo_model.NAME, "source": str(demo_model.ensure(lambda done, total: None))}
    fleet: dict[str, Any] = {
        "name": "chaos", "device": "virtual", "models": [{**model, "engines": engines, "engine": engine}],
        "healing": {"stall_s": 20.0},
    }  # fmt: skip
    fleet |= {name: {"port": port} for name, port in ports.items()}
    path = folder / "chaos.yaml"
    path.write_text(json.dumps(fleet))  # JSON is YAML
    return path, ports


def deploy(path: Path, address: str) -> None:
    """Begin the fleet with the product's own command."""
    command = [
        sys.executable,
        "-m",
        "npufleet.cluster.cli",
        "deploy",
        str(path),
        "--address",
        address,
        "--yes",
    ]
    subprocess.run(command, check=True, timeout=600)


def leftovers(address: str, wanted: int) -> list[str]:
    """What Ray holds that it should not: placement groups beyond one for each engine, after the load has ended."""
    program = (
        "import ray, json; from ray.util.placement_group import placement_group_table as t; "
        f"ray.init(address='{address}', log_to_driver=False); "
        "print(json.dumps([g['name'] for g in t().values() if g['state'] != 'REMOVED']))"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    names = json.loads(told.stdout.splitlines()[-1])
    return [] if len(names) == wanted else [f"{len(names)} placement groups for {wanted} engines: {names}"]


def forgotten(temporary: Path, shared: set[str]) -> list[str]:
    """What there is on all hosts that no living process holds: sockets and folders of the fleet among the temporary
    files, and which of ``shared`` memory.
    """
    unheld = [path for path in sorted(temporary.glob("npufleet-*")) if path.is_dir() and is_unlocked(path)]
    loose = [path for path in sorted(temporary.iterdir()) if path.is_socket()]
    memory = [f"shared memory {name}" for name in sorted(shared) if os.path.exists(name)]
    return [f"among the temporary files: {path.name}" for path in unheld + loose] + memory


def is_unlocked(path: Path) -> bool:
    """Whether no process holds the lock of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def remains(family: list[psutil.Process], ports: dict[str, int]) -> list[str]:
    """What is left of the fleet after its hosts were ended: processes, ports."""
    time.sleep(3.0)
    found = [f"process {p.pid} {title(p)[:80]}" for p in family if p.is_running() and title(p)]
    listening = {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    return found + [f"port {port} of the {name}" for name, port in ports.items() if port in listening]


def table(recoveries: list[Recovery], account: Account) -> str:
    """The recoveries by kind of fault, as Markdown, and the account."""
    lines = ["| fault | times | whole again after (median, worst) | longest gap without an answer | broken |"]
    lines += ["|---|---|---|---|---|"]
    for fault in FAULTS:
        own = [r for r in recoveries if r.fault == fault.name]
        if own:
            times = [r.whole_s for r in own]
            lines.append(
                f"| {fault.name} | {len(own)} | {statistics.median(times):.0f} s, {max(times):.0f} s "
                f"| {max(r.gap_s for r in own):.1f} s | {sum(r.broken for r in own)} |"
            )
    told = [
        f"{account.right:,} answers were right, {len(account.wrong)} wrong; {len(account.lost)} requests were lost,",
        f"{account.broken} streams ended in the middle, {account.retried} times a client sent a request again to",
        "which nothing had come.",
    ]
    lines += ["", *told]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run; returns 0 if the fleet healed from everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the order of faults")
    parser.add_argument("--engines", type=int, default=2, help="engines of the model (default %(default)s)")
    parser.add_argument("--keep-logs", action="store_true", help="leave Ray's logs behind")
    parser.add_argument("--write", type=Path, help="put the table into this page, between its markers")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # the hosts are to end with this process
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code, account, recoveries = asyncio.run(attack(args, deploy))
    text = table(recoveries, account)
    print(text)
    if args.write and code == 0:
        write(args.write, text, args)
    return code


async def attack(
    args: argparse.Namespace, begin: Callable[[Path, str], None]
) -> tuple[int, Account, list[Recovery]]:
    """Bring hosts and fleet up (the latter with ``begin``), attack, take everything down, and look what is left."""
    problems: list[str] = []
    layout = [
        Host(name="host-a", address="127.0.0.2", npus=2),
        Host(name="host-b", address="127.0.0.3", npus=2),
    ]
    layout.append(Host(name="host-c", address="127.0.0.4"))
    with Hosts(hosts=layout, keep_logs=args.keep_logs) as hosts:
        path, ports = fleet_file(hosts.folder, args.engines)
        say(f"{len(hosts.all)} hosts are up; logs in {hosts.folder}")
        await asyncio.to_thread(begin, path, hosts.address)
        url = f"http://127.0.0.1:{ports['gateway']}"
        answers = await known_answers(url, [demo_model.NAME], PROMPTS, TOKENS, times=2 * args.engines)
        say(f"{len(answers)} of {len(PROMPTS)} prompts have one answer")
        chaos = Chaos(
            hosts=hosts,
            load=Load(url=url, tokens=TOKENS, answers=answers),
            status_url=f"http://127.0.0.1:{ports['metrics']}",
            wanted=args.engines,
            rng=random.Random(args.seed),
        )
        try:
            await chaos.run(args.seconds)
        except TimeoutError as error:
            problems.append(str(error))
        problems += await asyncio.to_thread(leftovers, hosts.address, args.engines)
        problems += forgotten(hosts.temporary, chaos.shared - chaos.look())
        family = [process for host in hosts.all for process in host.family]
    problems += remains(family, ports)
    account = chaos.load.account
    problems += [f"wrong answer: {text}" for text in account.wrong] + [
        f"lost: {text}" for text in account.lost
    ]
    for problem in problems:
        say(f"PROBLEM  {problem}")
    say(f"why requests were sent again or broke: {dict(account.reasons)}")
    return (1 if problems else 0), account, chaos.recoveries


def write(page: Path, text: str, args: argparse.Namespace) -> None:
    """Put ``text`` between the markers of ``page``."""
    begin, end = "<!-- chaos -->", "<!-- /chaos -->"
    before, _, rest = page.read_text().partition(begin)
    how = f"`make chaos DURATION={args.seconds:.0f}`, {args.engines} engines on 2 hosts:"
    page.write_text(f"{before}{begin}\n{how}\n\n{text}\n{end}{rest.partition(end)[2]}")


if __name__ == "__main__":
    sys.exit(main())
