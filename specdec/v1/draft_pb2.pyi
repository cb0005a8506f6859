from specdec.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProposeFrame(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ProposeRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[ProposeRequest, _Mapping]]] = ...) -> None: ...

class ProposalFrame(_message.Message):
    __slots__ = ("proposals",)
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    proposals: _containers.RepeatedCompositeFieldContainer[Proposal]
    def __init__(self, proposals: _Optional[_Iterable[_Union[Proposal, _Mapping]]] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("call_id", "round", "gamma")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    round: _common_pb2.Round
    gamma: int
    def __init__(self, call_id: _Optional[int] = ..., round: _Optional[_Union[_common_pb2.Round, _Mapping]] = ..., gamma: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("call_id", "status", "draft_token_ids", "supports", "weights", "lost_mass", "kv_len", "num_cached_tokens", "forward_s", "stages")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    LOST_MASS_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    status: _common_pb2.ItemStatus
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    supports: _common_pb2.Supports
    weights: bytes
    lost_mass: _containers.RepeatedScalarFieldContainer[float]
    kv_len: int
    num_cached_tokens: int
    forward_s: float
    stages: _common_pb2.Stages
    def __init__(self, call_id: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.ItemStatus, _Mapping]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., supports: _Optional[_Union[_common_pb2.Supports, _Mapping]] = ..., weights: _Optional[bytes] = ..., lost_mass: _Optional[_Iterable[float]] = ..., kv_len: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., forward_s: _Optional[float] = ..., stages: _Optional[_Union[_common_pb2.Stages, _Mapping]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("round", "token_ids")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.Round
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[_Union[_common_pb2.Round, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("q", "forward_s", "step_s")
    Q_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    q: bytes
    forward_s: float
    step_s: float
    def __init__(self, q: _Optional[bytes] = ..., forward_s: _Optional[float] = ..., step_s: _Optional[float] = ...) -> None: ...
