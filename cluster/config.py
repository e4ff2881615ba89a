"""FleetConfig: the one typed description of a fleet.

The same keys are read from YAML, from the ``args`` of the Serve application and from the command line;
inside, everything is a frozen dataclass. What vLLM names keeps vLLM's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from . import checks, yaml_text
from .admission.settings import AdmissionSettings
from .endpoints import Role
from .engine import args as engine_args
from .roles import check_roles, with_kv_role
from .router.hedge import HedgeSettings
from .router.registry import DEFAULT_POLICY, known_policies
from .router.replay.rules import DEFAULT_RESUME, MODES
from .router.settings import RouterSettings
from .scaling import bounds as scaling
from .tls import FleetTls, ServerTls, parse_fleet, parse_server
from .transport.registry import DEFAULT_TRANSPORT, known_transports

DEVICES = ("npu", "virtual")
DATA_PLANES = ("grpcio", "http2", "envoy")
LOOPBACK = "127.0.0.1"

S = TypeVar("S")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One model deployment: the name clients ask for, the checkpoint, how many engines serve it."""

    name: str
    source: str
    engines: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)  # vLLM EngineArgs by their own names
    priority: int = 0  # higher ones are placed first
    chip: str = ""  # the chip its engines must run on, by CANN's name; any if empty
    rank_table: bool = False  # whether its workers are given HCCL's rank table as a file
    scaling: scaling.Bounds | None = None  # where the number of engines follows the load
    role: str = "both"  # prefill | decode | both: which part of an answer its engines are for
    serves: str = ""  # the name clients ask for, where another deployment of the same model has it

    @property
    def asked_for(self) -> str:
        """The name clients ask for."""
        return self.serves or self.name

    @property
    def tensor_parallel_size(self) -> int:
        """NPUs that share each layer."""
        return int(self.engine.get("tensor_parallel_size", 1))

    @property
    def pipeline_parallel_size(self) -> int:
        """Stages of layers."""
        return int(self.engine.get("pipeline_parallel_size", 1))

    @property
    def data_parallel_size(self) -> int:
        """Ranks of one engine that each have all layers and take requests of their own."""
        return int(self.engine.get("data_parallel_size", 1))

    @property
    def npus(self) -> int:
        """NPUs per engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """The gRPC router: how it chooses and reaches engines, and where it listens."""

    policy: str = DEFAULT_POLICY
    transport: str = DEFAULT_TRANSPORT  # the gRPC client towards engines
    data_plane: str = DATA_PLANES[0]  # what gRPC clients connect to: grpcio's server, our own, or Envoy
    processes: int = 1  # that share the gRPC port; with Envoy, its threads
    secret: str | None = None  # a file on every node; with it engines take only calls that the router signed
    engine_tls: FleetTls | None = None  # of the links to engines; None: they are plain
    api_keys: str | None = None  # a file as the gateway's; None: the gateway's own
    tls: ServerTls | None = None
    access_log: bool = False
    otlp_endpoint: str | None = None  # http://HOST:4317 of a collector of traces
    admission: AdmissionSettings = field(default_factory=AdmissionSettings)
    hedging: HedgeSettings = field(default_factory=HedgeSettings)
    resume: str = DEFAULT_RESUME  # which broken streams another engine goes on with: off | greedy | all
    split_tokens: int = (
        RouterSettings.split_tokens
    )  # uncached ones from which on prefill engines compute a prompt
    host: str = LOOPBACK
    port: int = 50051


@dataclass(frozen=True, kw_only=True)
class GatewayConfig:
    """The OpenAI gateway: where it listens, and the file of API keys (``admission/tenants.py``) if any are asked
    for."""

    host: str = LOOPBACK
    port: int = 8000
    api_keys: str | None = None
    tls: ServerTls | None = None
    access_log: bool = False
    otlp_endpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """The controller's own HTTP port: service discovery, status and its Prometheus series.

    Engines serve their metrics on the address of their node, or on all addresses if ``host`` is 0.0.0.0.
    """

    host: str = LOOPBACK
    port: int = 8001


@dataclass(frozen=True, kw_only=True)
class PlacementConfig:
    """How engines are placed: whether one of higher priority may end those of lower priority to get room."""

    preempt: bool = False


@dataclass(frozen=True, kw_only=True)
class HealingConfig:
    """When an engine counts as stalled, and how long one that leaves may finish its answers; seconds.

    A step is one forward pass of at most ``max_num_batched_tokens`` tokens: seconds at the very most.
    """

    stall_s: float = 60.0
    drain_s: float = 30.0


@dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """All that one fleet is."""

    models: tuple[ModelConfig, ...]
    name: str = "npufleet"
    device: str = "npu"  # or "virtual"
    front_ends: int = 1  # each a router and a gateway, on nodes of their own where there are enough
    router: RouterConfig = field(default_factory=RouterConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    healing: HealingConfig = field(default_factory=HealingConfig)

    @property
    def npus(self) -> int:
        """NPUs that all engines together need."""
        return sum(model.engines * model.npus for model in self.models)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that :func:`from_dict` reads back to an equal FleetConfig."""
        data = asdict(self)
        for model, told in zip(self.models, data["models"], strict=True):
            told["engine"] = dict(told["engine"])
            if told.pop("scaling"):
                assert model.scaling is not None
                told["engines"] = model.scaling.to_dict()
        return data


def from_yaml(path: Path, present: Mapping[str, Any] | None = None) -> FleetConfig:
    """Read a FleetConfig file; top-level keys that it leaves out are taken from ``present``, if that is given.

    Raises:
        ValueError: if the file is missing, is not YAML, or :func:`from_dict` refuses what it says.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such configuration file")
    data = yaml_text.read(path)
    if present is not None and isinstance(data, Mapping):
        data = {**{key: value for key, value in present.items() if key != "models"}, **data}
    return from_dict(data, where=str(path))


def from_dict(data: object, where: str = "fleet", *, part: bool = False) -> FleetConfig:
    """Check plain data and return the FleetConfig it describes, or a ``part`` of one with some of its models.

    Raises:
        ValueError: naming the place, what was given and what is allowed.
    """
    top = checks.mapping(data, where, _names(FleetConfig))
    models = top.get("models")
    if not isinstance(models, list | tuple) or not models:
        raise ValueError(f"{where}.models: expected a list of at least one model, got {checks.shown(models)}")
    parsed = tuple(_model(model, f"{where}.models[{i}]") for i, model in enumerate(models))
    seen: set[str] = set()
    for model in parsed:
        if model.name in seen:
            raise ValueError(f"{where}.models: the name {model.name!r} is given twice")
        seen.add(model.name)
    if not part:
        check_roles(parsed, f"{where}.models")
    return FleetConfig(
        models=parsed,
        name=checks.name(top.get("name", FleetConfig.name), f"{where}.name"),
        device=checks.choice(top.get("device", FleetConfig.device), f"{where}.device", DEVICES),
        front_ends=checks.integer(
            top.get("front_ends", FleetConfig.front_ends), f"{where}.front_ends", 1, 256
        ),
        router=_router(top.get("router", {}), f"{where}.router"),
        gateway=_gateway(top.get("gateway", {}), f"{where}.gateway"),
        metrics=_metrics(top.get("metrics", {}), f"{where}.metrics"),
        placement=_placement(top.get("placement", {}), f"{where}.placement"),
        healing=_healing(top.get("healing", {}), f"{where}.healing"),
    )


def with_overrides(config: FleetConfig, overrides: Mapping[str, Any]) -> FleetConfig:
    """Return ``config`` with dotted keys set, as ``--set`` gives them.

    ``engine.NAME`` sets a vLLM engine argument of every model, ``engines`` the number of engines of every
    model; anything else is a path into the FleetConfig such as ``router.policy``.

    Raises:
        ValueError: if a key is unknown or a value is refused.
    """
    data = config.to_dict()
    for key, value in overrides.items():
        first, _, rest = key.partition(".")
        if key == "engines":
            for model in data["models"]:
                model["engines"] = value
        elif first == "engine" and rest:
            for model in data["models"]:
                _set(model["engine"], rest, value)
        elif rest and isinstance(data.get(first), dict):
            _set(data[first], rest, value)
        elif not rest and first in data and first != "models" and not isinstance(data[first], dict):
            data[first] = value
        else:
            raise checks.unknown_key(key, _override_keys(), "--set")
    return from_dict(data)


def _set(data: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted ``key`` below ``data``; what is no mapping on the way to it becomes one."""
    first, _, rest = key.partition(".")
    if rest:
        below = data.get(first)
        data[first] = dict(below) if isinstance(below, Mapping) else {}
        _set(data[first], rest, value)
    else:
        data[first] = value


def for_model(name: str, source: str, device: str, **settings: Any) -> FleetConfig:
    """Return the FleetConfig that serves one checkpoint; ``settings`` are ModelConfig fields."""
    return from_dict(
        {"name": name, "device": device, "models": [{"name": name, "source": source, **settings}]}
    )


def _names(kind: type) -> list[str]:
    return [item.name for item in fields(kind)]


def _override_keys() -> list[str]:
    sections = {
        "router": RouterConfig,
        "gateway": GatewayConfig,
        "metrics": MetricsConfig,
        "placement": PlacementConfig,
        "healing": HealingConfig,
    }
    dotted = [f"{section}.{name}" for section, kind in sections.items() for name in _names(kind)]
    engine = [f"engine.{name}" for name in engine_args.known()]
    return ["name", "device", "front_ends", "engines", *dotted, *engine]


def _model(data: object, where: str) -> ModelConfig:
    known = [name for name in _names(ModelConfig) if name != "scaling"]
    given = checks.mapping(data, where, known)
    engines, bounds = given.get("engines", 1), None
    if isinstance(engines, Mapping):
        bounds = scaling.parse(engines, f"{where}.engines")
        engines = max(1, bounds.min)
    name = checks.name(given.get("name"), f"{where}.name")
    role = checks.choice(given.get("role", ModelConfig.role), f"{where}.role", [str(one) for one in Role])
    serves = "" if given.get("serves") in (None, "") else checks.name(given["serves"], f"{where}.serves")
    made = ModelConfig(
        name=name,
        source=checks.path(given.get("source"), f"{where}.source"),
        engines=checks.integer(engines, f"{where}.engines", 1, 4096),
        scaling=bounds,
        engine=with_kv_role(engine_args.check(given.get("engine", {}), f"{where}.engine"), role, where),
        role=role,
        serves="" if serves == name else serves,
        priority=checks.integer(given.get("priority", 0), f"{where}.priority", -1000, 1000),
        chip="" if given.get("chip") in (None, "") else checks.text(given["chip"], f"{where}.chip"),
        rank_table=checks.flag(given.get("rank_table", False), f"{where}.rank_table"),
    )
    if made.rank_table and made.data_parallel_size > 1:
        raise ValueError(
            f"{where}.rank_table: a rank table describes one group of ranks, and data_parallel_size "
            f"{made.data_parallel_size} makes several; leave rank_table out, or serve more engines instead"
        )
    return made


def _router(data: object, where: str) -> RouterConfig:
    given = checks.mapping(data, where, _names(RouterConfig))
    return replace(
        RouterConfig(),
        policy=checks.choice(given.get("policy", DEFAULT_POLICY), f"{where}.policy", known_policies()),
        transport=checks.choice(
            given.get("transport", DEFAULT_TRANSPORT), f"{where}.transport", known_transports()
        ),
        data_plane=checks.choice(given.get("data_plane", DATA_PLANES[0]), f"{where}.data_plane", DATA_PLANES),
        processes=checks.integer(given.get("processes", 1), f"{where}.processes", 1, 256),
        secret=checks.optional_file(given.get("secret"), f"{where}.secret"),
        engine_tls=parse_fleet(given.get("engine_tls"), f"{where}.engine_tls"),
        api_keys=checks.optional_file(given.get("api_keys"), f"{where}.api_keys"),
        tls=parse_server(given.get("tls"), f"{where}.tls"),
        access_log=checks.flag(given.get("access_log", False), f"{where}.access_log"),
        otlp_endpoint=checks.collector(given.get("otlp_endpoint"), f"{where}.otlp_endpoint"),
        admission=_settings(AdmissionSettings, given.get("admission", {}), f"{where}.admission"),
        hedging=_settings(HedgeSettings, given.get("hedging", {}), f"{where}.hedging"),
        resume=_resume(given.get("resume", DEFAULT_RESUME), f"{where}.resume"),
        split_tokens=checks.integer(
            given.get("split_tokens", RouterConfig.split_tokens), f"{where}.split_tokens", 1, 1 << 30
        ),
        host=checks.host(given.get("host", LOOPBACK), f"{where}.host"),
        port=checks.port(given.get("port", RouterConfig.port), f"{where}.port"),
    )


def _resume(value: object, where: str) -> str:
    # YAML 1.1 reads a bare `off` as false, and nobody can mean anything else by it.
    return checks.choice("off" if value is False else value, where, MODES)


def _gateway(data: object, where: str) -> GatewayConfig:
    given = checks.mapping(data, where, _names(GatewayConfig))
    return GatewayConfig(
        host=checks.host(given.get("host", LOOPBACK), f"{where}.host"),
        port=checks.port(given.get("port", GatewayConfig.port), f"{where}.port"),
        api_keys=checks.optional_file(given.get("api_keys"), f"{where}.api_keys"),
        tls=parse_server(given.get("tls"), f"{where}.tls"),
        access_log=checks.flag(given.get("access_log", False), f"{where}.access_log"),
        otlp_endpoint=checks.collector(given.get("otlp_endpoint"), f"{where}.otlp_endpoint"),
    )


def _settings(kind: type[S], data: object, where: str) -> S:
    given = checks.mapping(data, where, _names(kind))
    try:
        return kind(**given)
    except ValueError as error:  # it begins with the name of the key
        raise ValueError(f"{where}.{error}") from error


def _metrics(data: object, where: str) -> MetricsConfig:
    given = checks.mapping(data, where, _names(MetricsConfig))
    return MetricsConfig(
        host=checks.host(given.get("host", LOOPBACK), f"{where}.host"),
        port=checks.port(given.get("port", MetricsConfig.port), f"{where}.port"),
    )


def _placement(data: object, where: str) -> PlacementConfig:
    given = checks.mapping(data, where, _names(PlacementConfig))
    return PlacementConfig(preempt=checks.flag(given.get("preempt", False), f"{where}.preempt"))


def _healing(data: object, where: str) -> HealingConfig:
    given = checks.mapping(data, where, _names(HealingConfig))
    return HealingConfig(
        stall_s=checks.number(given.get("stall_s", HealingConfig.stall_s), f"{where}.stall_s", 5.0, 3600.0),
        drain_s=checks.number(given.get("drain_s", HealingConfig.drain_s), f"{where}.drain_s", 0.0, 86400.0),
    )
