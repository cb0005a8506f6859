from specdec.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifyFrame(_message.Message):
    __slots__ = ("requests", "renewals")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[VerifyRequest]
    renewals: _containers.RepeatedCompositeFieldContainer[Renewal]
    def __init__(self, requests: _Optional[_Iterable[_Union[VerifyRequest, _Mapping]]] = ..., renewals: _Optional[_Iterable[_Union[Renewal, _Mapping]]] = ...) -> None: ...

class VerificationFrame(_message.Message):
    __slots__ = ("verifications", "steps")
    VERIFICATIONS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    verifications: _containers.RepeatedCompositeFieldContainer[Verification]
    steps: _containers.RepeatedCompositeFieldContainer[RunStep]
    def __init__(self, verifications: _Optional[_Iterable[_Union[Verification, _Mapping]]] = ..., steps: _Optional[_Iterable[_Union[RunStep, _Mapping]]] = ...) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("call_id", "round", "draft_token_ids", "supports", "num_logprobs", "local_draft", "run")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_DRAFT_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    round: _common_pb2.Round
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    supports: _common_pb2.Supports
    num_logprobs: int
    local_draft: LocalDraft
    run: Run
    def __init__(self, call_id: _Optional[int] = ..., round: _Optional[_Union[_common_pb2.Round, _Mapping]] = ..., draft_token_ids: _Optional[_Iterable[int]] = ..., supports: _Optional[_Union[_common_pb2.Supports, _Mapping]] = ..., num_logprobs: _Optional[int] = ..., local_draft: _Optional[_Union[LocalDraft, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("until", "end_token_ids")
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    until: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, until: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Renewal(_message.Message):
    __slots__ = ("call_id", "until", "committed_len")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LEN_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    until: int
    committed_len: int
    def __init__(self, call_id: _Optional[int] = ..., until: _Optional[int] = ..., committed_len: _Optional[int] = ...) -> None: ...

class RunStep(_message.Message):
    __slots__ = ("call_ids", "token_ids", "positions", "probabilities", "forward_s", "step_tokens")
    CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    call_ids: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    probabilities: _containers.RepeatedScalarFieldContainer[float]
    forward_s: float
    step_tokens: int
    def __init__(self, call_ids: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., probabilities: _Optional[_Iterable[float]] = ..., forward_s: _Optional[float] = ..., step_tokens: _Optional[int] = ...) -> None: ...

class LocalDraft(_message.Message):
    __slots__ = ("pool", "gamma")
    POOL_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    pool: str
    gamma: int
    def __init__(self, pool: _Optional[str] = ..., gamma: _Optional[int] = ...) -> None: ...

class Drafted(_message.Message):
    __slots__ = ("draft_token_ids", "supports", "weights", "lost_mass", "forward_s")
    DRAFT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    LOST_MASS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    draft_token_ids: _containers.RepeatedScalarFieldContainer[int]
    supports: _common_pb2.Supports
    weights: bytes
    lost_mass: _containers.RepeatedScalarFieldContainer[float]
    forward_s: float
    def __init__(self, draft_token_ids: _Optional[_Iterable[int]] = ..., supports: _Optional[_Union[_common_pb2.Supports, _Mapping]] = ..., weights: _Optional[bytes] = ..., lost_mass: _Optional[_Iterable[float]] = ..., forward_s: _Optional[float] = ...) -> None: ...

class Verification(_message.Message):
    __slots__ = ("call_id", "status", "choice_token_ids", "weights", "tail_token_ids", "tail_probabilities", "logits", "kv_len", "num_cached_tokens", "forward_s", "step_tokens", "num_others", "num_other_rows", "drafted", "stages", "goes_on")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TAIL_PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    LOGITS_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHERS_FIELD_NUMBER: _ClassVar[int]
    NUM_OTHER_ROWS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    GOES_ON_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    status: _common_pb2.ItemStatus
    choice_token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: bytes
    tail_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tail_probabilities: _containers.RepeatedScalarFieldContainer[float]
    logits: Logits
    kv_len: int
    num_cached_tokens: int
    forward_s: float
    step_tokens: int
    num_others: int
    num_other_rows: int
    drafted: Drafted
    stages: _common_pb2.Stages
    goes_on: bool
    def __init__(self, call_id: _Optional[int] = ..., status: _Optional[_Union[_common_pb2.ItemStatus, _Mapping]] = ..., choice_token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[bytes] = ..., tail_token_ids: _Optional[_Iterable[int]] = ..., tail_probabilities: _Optional[_Iterable[float]] = ..., logits: _Optional[_Union[Logits, _Mapping]] = ..., kv_len: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., forward_s: _Optional[float] = ..., step_tokens: _Optional[int] = ..., num_others: _Optional[int] = ..., num_other_rows: _Optional[int] = ..., drafted: _Optional[_Union[Drafted, _Mapping]] = ..., stages: _Optional[_Union[_common_pb2.Stages, _Mapping]] = ..., goes_on: bool = ...) -> None: ...

class Logits(_message.Message):
    __slots__ = ("support_logits", "tail_logits", "logsumexps", "top_token_ids", "top_logits")
    SUPPORT_LOGITS_FIELD_NUMBER: _ClassVar[int]
    TAIL_LOGITS_FIELD_NUMBER: _ClassVar[int]
    LOGSUMEXPS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGITS_FIELD_NUMBER: _ClassVar[int]
    support_logits: bytes
    tail_logits: bytes
    logsumexps: bytes
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logits: bytes
    def __init__(self, support_logits: _Optional[bytes] = ..., tail_logits: _Optional[bytes] = ..., logsumexps: _Optional[bytes] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logits: _Optional[bytes] = ...) -> None: ...
