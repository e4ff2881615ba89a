from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouteRequest(_message.Message):
    __slots__ = ("model", "request_id", "token_ids", "prompt_tokens", "session", "cache_salt", "priority", "excluded", "timeout_seconds", "split")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    EXCLUDED_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    model: str
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    session: str
    cache_salt: str
    priority: int
    excluded: _containers.RepeatedScalarFieldContainer[str]
    timeout_seconds: float
    split: bool
    def __init__(self, model: _Optional[str] = ..., request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., session: _Optional[str] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., excluded: _Optional[_Iterable[str]] = ..., timeout_seconds: _Optional[float] = ..., split: _Optional[bool] = ...) -> None: ...

class RouteResponse(_message.Message):
    __slots__ = ("route_id", "engine_id", "address", "token", "token_seconds", "accounted_seconds", "data_parallel_rank", "kv_transfer_params_json")
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ACCOUNTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSFER_PARAMS_JSON_FIELD_NUMBER: _ClassVar[int]
    route_id: str
    engine_id: str
    address: str
    token: str
    token_seconds: float
    accounted_seconds: float
    data_parallel_rank: int
    kv_transfer_params_json: str
    def __init__(self, route_id: _Optional[str] = ..., engine_id: _Optional[str] = ..., address: _Optional[str] = ..., token: _Optional[str] = ..., token_seconds: _Optional[float] = ..., accounted_seconds: _Optional[float] = ..., data_parallel_rank: _Optional[int] = ..., kv_transfer_params_json: _Optional[str] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("route_id", "event", "grpc_code")
    class Event(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        EVENT_UNSPECIFIED: _ClassVar[ReportRequest.Event]
        STARTED: _ClassVar[ReportRequest.Event]
        ENDED: _ClassVar[ReportRequest.Event]
    EVENT_UNSPECIFIED: ReportRequest.Event
    STARTED: ReportRequest.Event
    ENDED: ReportRequest.Event
    ROUTE_ID_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    GRPC_CODE_FIELD_NUMBER: _ClassVar[int]
    route_id: str
    event: ReportRequest.Event
    grpc_code: int
    def __init__(self, route_id: _Optional[str] = ..., event: _Optional[_Union[ReportRequest.Event, str]] = ..., grpc_code: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
