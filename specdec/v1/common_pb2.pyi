from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrawRule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAW_RULE_UNSPECIFIED: _ClassVar[DrawRule]
    DRAW_RULE_LAW: _ClassVar[DrawRule]
    DRAW_RULE_COUPLED: _ClassVar[DrawRule]

class ConstraintKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONSTRAINT_KIND_UNSPECIFIED: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_JSON_SCHEMA: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_JSON_OBJECT: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_REGEX: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_CHOICE: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_GRAMMAR: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_STRUCTURAL: _ClassVar[ConstraintKind]
    CONSTRAINT_KIND_STRUCTURAL_TAG: _ClassVar[ConstraintKind]
DRAW_RULE_UNSPECIFIED: DrawRule
DRAW_RULE_LAW: DrawRule
DRAW_RULE_COUPLED: DrawRule
CONSTRAINT_KIND_UNSPECIFIED: ConstraintKind
CONSTRAINT_KIND_JSON_SCHEMA: ConstraintKind
CONSTRAINT_KIND_JSON_OBJECT: ConstraintKind
CONSTRAINT_KIND_REGEX: ConstraintKind
CONSTRAINT_KIND_CHOICE: ConstraintKind
CONSTRAINT_KIND_GRAMMAR: ConstraintKind
CONSTRAINT_KIND_STRUCTURAL: ConstraintKind
CONSTRAINT_KIND_STRUCTURAL_TAG: ConstraintKind

class LawParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_new_tokens", "end_token_ids", "constraint_id")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_ID_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    min_new_tokens: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    constraint_id: bytes
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., min_new_tokens: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., constraint_id: _Optional[bytes] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("kind", "text", "is_lenient")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    IS_LENIENT_FIELD_NUMBER: _ClassVar[int]
    kind: ConstraintKind
    text: str
    is_lenient: bool
    def __init__(self, kind: _Optional[_Union[ConstraintKind, str]] = ..., text: _Optional[str] = ..., is_lenient: bool = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("session_id", "epoch", "round_id", "start", "prefix_hash", "token_ids", "law", "seed", "turn", "output_start", "draw_rule", "tenant", "timed", "max_session_tokens", "x_request_id", "constraint")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LAW_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_START_FIELD_NUMBER: _ClassVar[int]
    DRAW_RULE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIMED_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    X_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    round_id: int
    start: int
    prefix_hash: bytes
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    law: LawParams
    seed: int
    turn: int
    output_start: int
    draw_rule: DrawRule
    tenant: str
    timed: bool
    max_session_tokens: int
    x_request_id: str
    constraint: Constraint
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., round_id: _Optional[int] = ..., start: _Optional[int] = ..., prefix_hash: _Optional[bytes] = ..., token_ids: _Optional[_Iterable[int]] = ..., law: _Optional[_Union[LawParams, _Mapping]] = ..., seed: _Optional[int] = ..., turn: _Optional[int] = ..., output_start: _Optional[int] = ..., draw_rule: _Optional[_Union[DrawRule, str]] = ..., tenant: _Optional[str] = ..., timed: bool = ..., max_session_tokens: _Optional[int] = ..., x_request_id: _Optional[str] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ...) -> None: ...

class Stages(_message.Message):
    __slots__ = ("decoded_us", "admitted_us", "step_began_us", "step_ended_us", "answered_us", "encoded_us", "sent_us")
    DECODED_US_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_US_FIELD_NUMBER: _ClassVar[int]
    STEP_BEGAN_US_FIELD_NUMBER: _ClassVar[int]
    STEP_ENDED_US_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_US_FIELD_NUMBER: _ClassVar[int]
    ENCODED_US_FIELD_NUMBER: _ClassVar[int]
    SENT_US_FIELD_NUMBER: _ClassVar[int]
    decoded_us: int
    admitted_us: int
    step_began_us: int
    step_ended_us: int
    answered_us: int
    encoded_us: int
    sent_us: int
    def __init__(self, decoded_us: _Optional[int] = ..., admitted_us: _Optional[int] = ..., step_began_us: _Optional[int] = ..., step_ended_us: _Optional[int] = ..., answered_us: _Optional[int] = ..., encoded_us: _Optional[int] = ..., sent_us: _Optional[int] = ...) -> None: ...

class Supports(_message.Message):
    __slots__ = ("sizes", "id_deltas")
    SIZES_FIELD_NUMBER: _ClassVar[int]
    ID_DELTAS_FIELD_NUMBER: _ClassVar[int]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    id_deltas: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, sizes: _Optional[_Iterable[int]] = ..., id_deltas: _Optional[_Iterable[int]] = ...) -> None: ...

class ItemStatus(_message.Message):
    __slots__ = ("code", "reason", "message", "have", "retry_after_ms", "epoch")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    message: str
    have: int
    retry_after_ms: int
    epoch: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ..., have: _Optional[int] = ..., retry_after_ms: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_ids", "tenant", "epochs", "resumable_ids")
    SESSION_IDS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPOCHS_FIELD_NUMBER: _ClassVar[int]
    RESUMABLE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_ids: _containers.RepeatedScalarFieldContainer[str]
    tenant: str
    epochs: _containers.RepeatedScalarFieldContainer[int]
    resumable_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, session_ids: _Optional[_Iterable[str]] = ..., tenant: _Optional[str] = ..., epochs: _Optional[_Iterable[int]] = ..., resumable_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetEngineInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetDrainingRequest(_message.Message):
    __slots__ = ("draining",)
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    def __init__(self, draining: bool = ...) -> None: ...

class SetDrainingResponse(_message.Message):
    __slots__ = ("num_streams", "num_sessions")
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    num_streams: int
    num_sessions: int
    def __init__(self, num_streams: _Optional[int] = ..., num_sessions: _Optional[int] = ...) -> None: ...

class EngineInfo(_message.Message):
    __slots__ = ("version", "role", "pool", "replica_id", "model", "model_fingerprint", "vocabulary_fingerprint", "vocabulary_size", "max_context_tokens", "eos_token_ids", "max_gamma", "num_kv_blocks", "kv_block_tokens", "kv_usage", "num_sessions", "draining", "dtype", "device", "incarnation", "num_running", "local_drafts", "shadow", "local_gammas", "num_steps", "step_limit_s", "lane", "backend", "unsupported_fields", "max_run", "supports_constraints", "adapter_names", "adapter_fingerprints", "build", "num_states")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_GAMMA_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    LOCAL_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    LOCAL_GAMMAS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    LANE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    UNSUPPORTED_FIELDS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUN_FIELD_NUMBER: _ClassVar[int]
    SUPPORTS_CONSTRAINTS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_NAMES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    NUM_STATES_FIELD_NUMBER: _ClassVar[int]
    version: str
    role: str
    pool: str
    replica_id: str
    model: str
    model_fingerprint: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    max_context_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_gamma: int
    num_kv_blocks: int
    kv_block_tokens: int
    kv_usage: float
    num_sessions: int
    draining: bool
    dtype: str
    device: str
    incarnation: str
    num_running: int
    local_drafts: _containers.RepeatedScalarFieldContainer[str]
    shadow: bool
    local_gammas: _containers.RepeatedScalarFieldContainer[int]
    num_steps: int
    step_limit_s: float
    lane: str
    backend: str
    unsupported_fields: _containers.RepeatedScalarFieldContainer[str]
    max_run: int
    supports_constraints: bool
    adapter_names: _containers.RepeatedScalarFieldContainer[str]
    adapter_fingerprints: _containers.RepeatedScalarFieldContainer[str]
    build: str
    num_states: int
    def __init__(self, version: _Optional[str] = ..., role: _Optional[str] = ..., pool: _Optional[str] = ..., replica_id: _Optional[str] = ..., model: _Optional[str] = ..., model_fingerprint: _Optional[str] = ..., vocabulary_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_gamma: _Optional[int] = ..., num_kv_blocks: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ..., kv_usage: _Optional[float] = ..., num_sessions: _Optional[int] = ..., draining: bool = ..., dtype: _Optional[str] = ..., device: _Optional[str] = ..., incarnation: _Optional[str] = ..., num_running: _Optional[int] = ..., local_drafts: _Optional[_Iterable[str]] = ..., shadow: bool = ..., local_gammas: _Optional[_Iterable[int]] = ..., num_steps: _Optional[int] = ..., step_limit_s: _Optional[float] = ..., lane: _Optional[str] = ..., backend: _Optional[str] = ..., unsupported_fields: _Optional[_Iterable[str]] = ..., max_run: _Optional[int] = ..., supports_constraints: bool = ..., adapter_names: _Optional[_Iterable[str]] = ..., adapter_fingerprints: _Optional[_Iterable[str]] = ..., build: _Optional[str] = ..., num_states: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("round", "token_ids", "local_pool")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_POOL_FIELD_NUMBER: _ClassVar[int]
    round: Round
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    local_pool: str
    def __init__(self, round: _Optional[_Union[Round, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., local_pool: _Optional[str] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("q", "forward_s", "step_s", "round_lengths")
    Q_FIELD_NUMBER: _ClassVar[int]
    FORWARD_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    q: bytes
    forward_s: float
    step_s: float
    round_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, q: _Optional[bytes] = ..., forward_s: _Optional[float] = ..., step_s: _Optional[float] = ..., round_lengths: _Optional[_Iterable[int]] = ...) -> None: ...
