"""`npufleet serve`: bring a fleet up, say how far it is, keep it up, take it down without a trace."""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import psutil

from . import ask, doors, local, preflight, preflight_cluster, runs, start_failure
from .addresses import netloc, reachable
from .app import APPLICATION, CONTROLLER, assemble, submit
from .caretaker import Caretaker
from .config import FleetConfig
from .deploy.wish import Wish
from .engine import orphan, sockets
from .lifeline import Lifeline, end_children, shared_by_children
from .status import how_to_talk, progress_line
from .targets import Target, resolve
from .topology.model import Topology

POLL_S = 0.25  # for signals
FOLLOW_S = 1.0  # each look at a starting fleet costs CPU that the start needs
SHARED_S = 5.0  # between two looks at what the fleet's processes share
LAST_WAIT_S = 10.0  # for the processes of a dead Ray to end by themselves
HURRY_S = 0.5
T = TypeVar("T")


class Stopped(Exception):
    """The user asked us to stop while the fleet was starting."""


class StartFailed(RuntimeError):
    """The fleet did not come up; the text says why."""


class RayLost(RuntimeError):
    """Ray has died under the fleet; the text says which of its processes."""


@dataclass(kw_only=True)
class Console:
    """Prints one line per event with the seconds since the command began."""

    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print ``text``."""
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)


def serve(args: argparse.Namespace) -> int:
    """Run the command; returns its exit code. Raises ``ValueError`` for what the user got wrong."""
    console = Console()
    target = resolve(args, console.say)
    if target.device is not None:  # ports, files and NPUs are those of the cluster's nodes otherwise
        preflight.npus(target.config, target.device)
        preflight.layout(target.config, Topology(nodes=(local.this_node(target.device),)))
        preflight.files(target.config, console.say)
        preflight.memory(target.config, target.device)
        doors.check(target.config.gateway, target.config.router)
        preflight.ports(target.config)
        target = replace(target, config=preflight.with_free_ports(target.config))
    config = target.config
    stop = _Stop()
    fleet = _Fleet(config=config, console=console, stop=stop)
    code = 1
    try:
        fleet.start(target, args.address)
        code = _answer(target, console)
        if not args.once:
            code = 0
            print(how_to_talk(config), flush=True)
            fleet.keep()
    except RayLost as error:
        code = 1
        print(f"npufleet: {error}", file=sys.stderr)
    except Stopped:
        code = 130
    except (StartFailed, local.RayNotStarted) as error:
        print(f"npufleet: {error}", file=sys.stderr)
    finally:
        stop.second_means_now()
        clean = fleet.end(keep_logs=args.keep_logs or code == 1)
    code = code if clean else 1
    if fleet.ray_died:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # Ray's exit handlers would wait for what is dead
    return code


def _answer(target: Target, console: Console) -> int:
    """Ask the target's question, print the answer, and return 0 if it is as expected."""
    if target.question is None:
        return 0
    config = target.config
    model = config.models[0].name
    key = _first_key(config)
    console.say(f"asking: {target.question}")
    try:
        answer = ask.chat(gateway_url(config), model, target.question, api_key=key)
    except ask.AskError as error:
        console.say(f"no answer: {error}")
        return 1
    console.say(f"answer: {answer.strip()}")
    if target.expect and target.expect.lower() not in answer.lower():
        console.say(f"the answer does not contain {target.expect!r}")
        return 1
    return 0


def gateway_url(config: FleetConfig) -> str:
    """Return where this machine reaches the gateway."""
    scheme = "http" if config.gateway.tls is None else "https"
    return f"{scheme}://{netloc(reachable(config.gateway.host), config.gateway.port)}"


def _first_key(config: FleetConfig) -> str | None:
    from .admission.tenants import read_key_file

    keys = read_key_file(config.gateway.api_keys, "gateway.api_keys")
    return keys[0].split()[0] if keys else None


class _Stop:
    """Ctrl-C and SIGTERM ask for a clean stop; during that stop a second one ends it at once."""

    def __init__(self) -> None:
        self.asked = False
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.listen()

    def listen(self) -> None:
        """Take the signals; again after Ray has started, which takes SIGTERM for itself."""
        for number in self._previous:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def check(self) -> None:
        """Raise :class:`Stopped` if a stop was asked for."""
        if self.asked:
            raise Stopped

    def second_means_now(self) -> None:
        """From now on the signals do what they did before us."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)


@dataclass(kw_only=True)
class _Fleet:
    """The running fleet of this process."""

    config: FleetConfig
    console: Console
    stop: _Stop
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(32), repr=False)  # of its engines
    ray: local.LocalRay | None = None
    lifeline: Lifeline | None = None  # of our own Ray cluster
    record: Path | None = None
    folder: Path | None = None  # of our own Ray cluster
    submitted: bool = False  # the application, to Serve
    controller: Any = None  # its Serve handle, once there is one
    ray_died: bool = False  # before we ended it
    hurried: bool = False  # a second Ctrl-C
    shared: set[str] = field(default_factory=set)  # shared memory seen while the fleet was well
    caretaker: Caretaker | None = None  # of our own Ray cluster
    _looked: float = -SHARED_S

    def start(self, target: Target, address: str | None) -> None:
        """Bring everything up, and return when every model can answer."""
        say = self.console.say
        config = self.config
        self.folder = None if address else local.make_folder()
        self.record = runs.record(_run(config, self.folder))
        models = ", ".join(f"{m.name} ({m.engines} x {m.npus} NPU)" for m in config.models)
        say(f"fleet {config.name}: {models}")
        if address:
            _connect(address)
            self.record = runs.record(_run(config, None, address, self.secret))
            say(f"connected to the Ray cluster at {address}; device: {config.device}")
            preflight_cluster.check(config, APPLICATION, say)
        else:
            assert target.device is not None and self.folder is not None
            self.caretaker = Caretaker.start(self.record, self.folder)
            say(f"device: {target.device}")
            self.ray = local.start(target.device, self.folder)
            self.record = runs.record(_run(config, self.folder, self.ray.address, self.secret))
            self.lifeline = Lifeline.of_children()
            say(f"Ray is up; logs in {self.ray.logs}")
        self.stop.listen()
        self.stop.check()
        self.submitted = True
        self._submit()
        self._follow()
        say(f"ready: {gateway_url(config)}")

    @property
    def lost(self) -> str | None:
        """Which process of our own Ray has ended, None while it lives."""
        return self.lifeline.lost() if self.lifeline else None

    def keep(self) -> None:
        """Return when a stop is asked for. Raises :class:`RayLost` if Ray dies before."""
        while not self.stop.asked:
            self._check_ray()
            self._look()
            time.sleep(POLL_S)

    def _look(self) -> None:
        """Write down now and then what there is below us.

        A signal to the whole process group can end it before it can be asked what it shares, and a kill of
        this process leaves that to the caretaker.
        """
        if self.caretaker is None or time.monotonic() - self._looked < SHARED_S:
            return
        self._looked = time.monotonic()
        self.shared |= shared_by_children()
        self.caretaker.tell(psutil.Process().children(recursive=True), self.shared)

    def _check_ray(self) -> None:
        if lost := self.lost:
            raise RayLost(f"Ray has died: its {lost} ended, and no fleet can live without it")

    def _submit(self) -> None:
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # our own lines say what happens
        serve.start(proxy_location="Disabled")
        submit(assemble(Wish.of(self.config), secret=self.secret))

    def _follow(self) -> None:
        """Print what changes until the application runs."""
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        shown: dict[str, str] = {}
        while True:
            self.stop.check()
            self._check_ray()
            self._look()
            application = self._ask_serve(lambda: serve.status().applications.get(APPLICATION))
            status = self._status()
            progress = status["progress"]
            for entry in progress:
                line = progress_line(entry)
                if shown.get(entry["engine_id"]) != line:
                    shown[entry["engine_id"]] = line
                    self.console.say(line)
            if start_failure.hopeless(progress):
                raise StartFailed(start_failure.why(progress))
            if gone := start_failure.dying(status["health"]["deaths"]):
                raise StartFailed(gone)
            if application is not None:
                if application.status == ApplicationStatus.RUNNING:
                    return
                bad = application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
                if bad and not start_failure.only_died(application):
                    raise StartFailed(
                        start_failure.why(progress) or start_failure.what_serve_says(application)
                    )
            time.sleep(FOLLOW_S)

    def _ask_serve(self, question: Callable[[], T]) -> T:
        """Return the answer; in a thread, because on a busy machine it can take minutes, and a stop must not."""
        answers: list[T] = []
        thread = threading.Thread(target=lambda: answers.append(question()), name="ask-serve", daemon=True)
        thread.start()
        while thread.is_alive():
            self.stop.check()
            self._check_ray()
            thread.join(POLL_S)
        if not answers:
            raise StartFailed("Ray Serve gave no answer; its error is above")
        return answers[0]

    def _status(self) -> dict[str, Any]:
        """Return how far each engine is, and which died; nothing while the controller is not up."""
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            if self.controller is None:
                self.controller = serve.get_deployment_handle(CONTROLLER, APPLICATION)
            status: dict[str, Any] = self.controller.status.remote().result(timeout_s=5.0)
        except (KeyError, RayError, RayServeException, TimeoutError):  # KeyError: not deployed yet
            return {"progress": [], "health": {"deaths": []}}
        return status

    def end(self, keep_logs: bool) -> bool:
        """Take everything down; say whether nothing was left that had to be killed."""
        clean = True
        self._note_shared()
        if self.submitted and not self.lost:
            self.console.say("stopping: running requests may end first")
            try:
                self._delete()
            except KeyboardInterrupt:
                self.hurried = True
        if self.ray is not None:
            self._note_shared()
            self.ray_died = bool(self.lost)
            stubborn: list[str] = []
            wait = LAST_WAIT_S
            if not self.ray_died:
                try:
                    stubborn = self.ray.stop(keep_logs)
                except KeyboardInterrupt:  # one Ctrl-C more: the user does not want to wait for Ray either
                    self.ray_died, wait = True, HURRY_S
            if self.ray_died:  # a shutdown would wait for the dead
                end_children(wait)
                if not keep_logs:
                    local.remove_folder(self.ray.folder)
            orphan.remove(self.shared)
            sockets.tidy()
            for title in stubborn:
                self.console.say(f"had to kill: {title}")
            clean = not stubborn
            if keep_logs:
                self.console.say(f"logs are kept in {self.ray.logs}")
        elif self.folder is not None:
            local.remove_folder(self.folder)
        if self.record is not None:
            self.record.unlink(missing_ok=True)
        if self.caretaker is not None:
            self.caretaker.dismiss()
        self.console.say("stopped" if clean else "stopped, not cleanly")
        return clean

    def _note_shared(self) -> None:
        """Write down the shared memory of engines that a stop meets in their start: they say nothing of it yet."""
        if self.ray is not None:
            self.shared |= shared_by_children()

    def _delete(self) -> None:
        """Delete the application; in a thread, because Ray can die meanwhile and this would never end."""
        thread = threading.Thread(target=self._delete_waiting, name="delete", daemon=True)
        thread.start()
        while thread.is_alive() and not self.lost:
            thread.join(POLL_S)

    def _delete_waiting(self) -> None:
        import ray
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.exceptions import RayServeException

        try:
            serve.delete(APPLICATION)
        except RayServeException:  # stopped before Serve was up
            pass
        except (RayError, AttributeError, RuntimeError):  # a hurried stop takes Ray away under this call
            if not self.hurried:
                raise
        if self.ray is None:
            ray.shutdown()


def _connect(address: str) -> None:
    import ray

    try:
        preflight.cluster(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:  # ConnectionError is one
        raise StartFailed(
            f"no Ray cluster at {address!r}: {error} (if it asks for a token, set RAY_AUTH_MODE=token)"
        ) from error


def _run(config: FleetConfig, folder: Path | None, ray: str = "", secret: str = "") -> runs.Run:
    return runs.Run(
        name=config.name,
        pid=os.getpid(),
        started=psutil.Process().create_time(),
        gateway=gateway_url(config),
        router=netloc(reachable(config.router.host), config.router.port),
        controller=f"http://{netloc(reachable(config.metrics.host), config.metrics.port)}",
        folder=str(folder or ""),
        ray=ray,
        ray_auth=os.environ.get(local.AUTH_MODE, ""),
        engine_secret=secret,
    )
