from specdec.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ToolChoice(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOOL_CHOICE_UNSPECIFIED: _ClassVar[ToolChoice]
    TOOL_CHOICE_AUTO: _ClassVar[ToolChoice]
    TOOL_CHOICE_NONE: _ClassVar[ToolChoice]
    TOOL_CHOICE_REQUIRED: _ClassVar[ToolChoice]
    TOOL_CHOICE_NAMED: _ClassVar[ToolChoice]

class SpeculationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SPECULATION_MODE_UNSPECIFIED: _ClassVar[SpeculationMode]
    SPECULATION_MODE_OFF: _ClassVar[SpeculationMode]
    SPECULATION_MODE_REJECTION: _ClassVar[SpeculationMode]
    SPECULATION_MODE_BLOCK: _ClassVar[SpeculationMode]
    SPECULATION_MODE_COUPLED: _ClassVar[SpeculationMode]

class TokenSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOKEN_SOURCE_UNSPECIFIED: _ClassVar[TokenSource]
    TOKEN_SOURCE_ACCEPTED: _ClassVar[TokenSource]
    TOKEN_SOURCE_CORRECTED: _ClassVar[TokenSource]
    TOKEN_SOURCE_BONUS: _ClassVar[TokenSource]
    TOKEN_SOURCE_TARGET: _ClassVar[TokenSource]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_STOP_STRING: _ClassVar[FinishReason]
    FINISH_REASON_TOOL_CALLS: _ClassVar[FinishReason]
TOOL_CHOICE_UNSPECIFIED: ToolChoice
TOOL_CHOICE_AUTO: ToolChoice
TOOL_CHOICE_NONE: ToolChoice
TOOL_CHOICE_REQUIRED: ToolChoice
TOOL_CHOICE_NAMED: ToolChoice
SPECULATION_MODE_UNSPECIFIED: SpeculationMode
SPECULATION_MODE_OFF: SpeculationMode
SPECULATION_MODE_REJECTION: SpeculationMode
SPECULATION_MODE_BLOCK: SpeculationMode
SPECULATION_MODE_COUPLED: SpeculationMode
TOKEN_SOURCE_UNSPECIFIED: TokenSource
TOKEN_SOURCE_ACCEPTED: TokenSource
TOKEN_SOURCE_CORRECTED: TokenSource
TOKEN_SOURCE_BONUS: TokenSource
TOKEN_SOURCE_TARGET: TokenSource
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_STOP_STRING: FinishReason
FINISH_REASON_TOOL_CALLS: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("session_id", "request_id", "prompt", "prompt_token_ids", "messages", "sampling", "speculation", "return_provenance", "resume_from", "expected_session_tokens", "priority", "constraint", "tools", "adapter")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    RETURN_PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_SESSION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    prompt: str
    prompt_token_ids: TokenIds
    messages: ChatMessages
    sampling: SamplingParams
    speculation: SpeculationParams
    return_provenance: bool
    resume_from: int
    expected_session_tokens: int
    priority: int
    constraint: _common_pb2.Constraint
    tools: Tools
    adapter: str
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., prompt: _Optional[str] = ..., prompt_token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., speculation: _Optional[_Union[SpeculationParams, _Mapping]] = ..., return_provenance: bool = ..., resume_from: _Optional[int] = ..., expected_session_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., constraint: _Optional[_Union[_common_pb2.Constraint, _Mapping]] = ..., tools: _Optional[_Union[Tools, _Mapping]] = ..., adapter: _Optional[str] = ...) -> None: ...

class Tools(_message.Message):
    __slots__ = ("definitions", "choice", "name", "parallel")
    DEFINITIONS_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_FIELD_NUMBER: _ClassVar[int]
    definitions: _containers.RepeatedCompositeFieldContainer[ToolDefinition]
    choice: ToolChoice
    name: str
    parallel: bool
    def __init__(self, definitions: _Optional[_Iterable[_Union[ToolDefinition, _Mapping]]] = ..., choice: _Optional[_Union[ToolChoice, str]] = ..., name: _Optional[str] = ..., parallel: bool = ...) -> None: ...

class ToolDefinition(_message.Message):
    __slots__ = ("name", "description", "parameters_json", "is_strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_JSON_FIELD_NUMBER: _ClassVar[int]
    IS_STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    parameters_json: str
    is_strict: bool
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., parameters_json: _Optional[str] = ..., is_strict: bool = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "extra_json", "content_parts")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    CONTENT_PARTS_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    extra_json: str
    content_parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., extra_json: _Optional[str] = ..., content_parts: _Optional[_Iterable[str]] = ...) -> None: ...

class ChatMessages(_message.Message):
    __slots__ = ("messages", "template_arguments_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    template_arguments_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., template_arguments_json: _Optional[str] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    min_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    def __init__(self, max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ...) -> None: ...

class SpeculationParams(_message.Message):
    __slots__ = ("mode", "gamma", "draft_pool", "task")
    MODE_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    DRAFT_POOL_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    mode: SpeculationMode
    gamma: int
    draft_pool: str
    task: str
    def __init__(self, mode: _Optional[_Union[SpeculationMode, str]] = ..., gamma: _Optional[int] = ..., draft_pool: _Optional[str] = ..., task: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "tokens", "finished")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    tokens: TokenChunk
    finished: Finished
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., tokens: _Optional[_Union[TokenChunk, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("session_id", "request_id", "num_prompt_tokens", "seed", "target_fingerprint", "target_changed", "constraint_warnings", "adapter")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TARGET_CHANGED_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_WARNINGS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    request_id: str
    num_prompt_tokens: int
    seed: int
    target_fingerprint: str
    target_changed: bool
    constraint_warnings: _containers.RepeatedScalarFieldContainer[str]
    adapter: str
    def __init__(self, session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., num_prompt_tokens: _Optional[int] = ..., seed: _Optional[int] = ..., target_fingerprint: _Optional[str] = ..., target_changed: bool = ..., constraint_warnings: _Optional[_Iterable[str]] = ..., adapter: _Optional[str] = ...) -> None: ...

class TokenChunk(_message.Message):
    __slots__ = ("index", "token_ids", "text", "details", "num_draft_tokens", "parts")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    text: str
    details: _containers.RepeatedCompositeFieldContainer[TokenDetail]
    num_draft_tokens: int
    parts: _containers.RepeatedCompositeFieldContainer[OutputPart]
    def __init__(self, index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., text: _Optional[str] = ..., details: _Optional[_Iterable[_Union[TokenDetail, _Mapping]]] = ..., num_draft_tokens: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[OutputPart, _Mapping]]] = ...) -> None: ...

class OutputPart(_message.Message):
    __slots__ = ("text", "reasoning", "tool_call")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_FIELD_NUMBER: _ClassVar[int]
    text: str
    reasoning: str
    tool_call: ToolCallDelta
    def __init__(self, text: _Optional[str] = ..., reasoning: _Optional[str] = ..., tool_call: _Optional[_Union[ToolCallDelta, _Mapping]] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class TokenDetail(_message.Message):
    __slots__ = ("source", "p", "q", "draft_pool", "logprob", "top_logprobs", "text", "token_bytes")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    P_FIELD_NUMBER: _ClassVar[int]
    Q_FIELD_NUMBER: _ClassVar[int]
    DRAFT_POOL_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    source: TokenSource
    p: float
    q: float
    draft_pool: str
    logprob: float
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    text: str
    token_bytes: bytes
    def __init__(self, source: _Optional[_Union[TokenSource, str]] = ..., p: _Optional[float] = ..., q: _Optional[float] = ..., draft_pool: _Optional[str] = ..., logprob: _Optional[float] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., text: _Optional[str] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "token_bytes")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    token_bytes: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., token_bytes: _Optional[bytes] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason", "usage", "stats", "is_named_call")
    REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    IS_NAMED_CALL_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    usage: Usage
    stats: GenerationStats
    is_named_call: bool
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ..., stats: _Optional[_Union[GenerationStats, _Mapping]] = ..., is_named_call: bool = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_output_tokens", "num_cached_prompt_tokens", "num_reasoning_tokens")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_prompt_tokens: int
    num_reasoning_tokens: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_output_tokens: _Optional[int] = ..., num_cached_prompt_tokens: _Optional[int] = ..., num_reasoning_tokens: _Optional[int] = ...) -> None: ...

class GenerationStats(_message.Message):
    __slots__ = ("num_rounds", "num_draft_tokens", "num_accepted_tokens", "accepted_per_position", "num_target_only_steps", "ttft_s", "e2el_s", "draft_s", "verify_s", "wire_bytes")
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    NUM_TARGET_ONLY_STEPS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    E2EL_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_S_FIELD_NUMBER: _ClassVar[int]
    VERIFY_S_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    num_target_only_steps: int
    ttft_s: float
    e2el_s: float
    draft_s: float
    verify_s: float
    wire_bytes: int
    def __init__(self, num_rounds: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., accepted_per_position: _Optional[_Iterable[int]] = ..., num_target_only_steps: _Optional[int] = ..., ttft_s: _Optional[float] = ..., e2el_s: _Optional[float] = ..., draft_s: _Optional[float] = ..., verify_s: _Optional[float] = ..., wire_bytes: _Optional[int] = ...) -> None: ...

class GetSessionRequest(_message.Message):
    __slots__ = ("session_id", "include_token_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    include_token_ids: bool
    def __init__(self, session_id: _Optional[str] = ..., include_token_ids: bool = ...) -> None: ...

class GetSessionResponse(_message.Message):
    __slots__ = ("session_id", "status", "num_tokens", "token_ids", "turn", "expires_in_s", "stats")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    status: str
    num_tokens: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    turn: int
    expires_in_s: float
    stats: GenerationStats
    def __init__(self, session_id: _Optional[str] = ..., status: _Optional[str] = ..., num_tokens: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., turn: _Optional[int] = ..., expires_in_s: _Optional[float] = ..., stats: _Optional[_Union[GenerationStats, _Mapping]] = ...) -> None: ...

class DeleteSessionRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class DeleteSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("text", "messages", "tools")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    text: str
    messages: ChatMessages
    tools: Tools
    def __init__(self, text: _Optional[str] = ..., messages: _Optional[_Union[ChatMessages, _Mapping]] = ..., tools: _Optional[_Union[Tools, _Mapping]] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("token_ids", "keep_special_tokens")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KEEP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    keep_special_tokens: bool
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., keep_special_tokens: bool = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("version", "target_model", "vocabulary_fingerprint", "vocabulary_size", "max_context_tokens", "max_gamma", "pools", "promotion", "default_sampling", "admin_address", "target_models", "adapters", "coordinator_id", "build", "is_registered", "lost_replicas", "lost_draft_pools", "max_running")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_GAMMA_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    PROMOTION_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ADMIN_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODELS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_ID_FIELD_NUMBER: _ClassVar[int]
    BUILD_FIELD_NUMBER: _ClassVar[int]
    IS_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    LOST_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    LOST_DRAFT_POOLS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    version: str
    target_model: str
    vocabulary_fingerprint: str
    vocabulary_size: int
    max_context_tokens: int
    max_gamma: int
    pools: _containers.RepeatedCompositeFieldContainer[PoolInfo]
    promotion: PromotionInfo
    default_sampling: SamplingParams
    admin_address: str
    target_models: _containers.RepeatedCompositeFieldContainer[TargetModelInfo]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    coordinator_id: str
    build: str
    is_registered: bool
    lost_replicas: _containers.RepeatedCompositeFieldContainer[LostReplica]
    lost_draft_pools: _containers.RepeatedScalarFieldContainer[str]
    max_running: int
    def __init__(self, version: _Optional[str] = ..., target_model: _Optional[str] = ..., vocabulary_fingerprint: _Optional[str] = ..., vocabulary_size: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., max_gamma: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[PoolInfo, _Mapping]]] = ..., promotion: _Optional[_Union[PromotionInfo, _Mapping]] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., admin_address: _Optional[str] = ..., target_models: _Optional[_Iterable[_Union[TargetModelInfo, _Mapping]]] = ..., adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ..., coordinator_id: _Optional[str] = ..., build: _Optional[str] = ..., is_registered: bool = ..., lost_replicas: _Optional[_Iterable[_Union[LostReplica, _Mapping]]] = ..., lost_draft_pools: _Optional[_Iterable[str]] = ..., max_running: _Optional[int] = ...) -> None: ...

class LostReplica(_message.Message):
    __slots__ = ("role", "pool", "address", "state", "reason")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    role: str
    pool: str
    address: str
    state: str
    reason: str
    def __init__(self, role: _Optional[str] = ..., pool: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "fingerprint", "model", "num_replicas", "share", "alpha", "gamma")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    model: str
    num_replicas: int
    share: float
    alpha: float
    gamma: float
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., num_replicas: _Optional[int] = ..., share: _Optional[float] = ..., alpha: _Optional[float] = ..., gamma: _Optional[float] = ...) -> None: ...

class TargetModelInfo(_message.Message):
    __slots__ = ("fingerprint", "model", "num_replicas", "share")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_REPLICAS_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    model: str
    num_replicas: int
    share: float
    def __init__(self, fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., num_replicas: _Optional[int] = ..., share: _Optional[float] = ...) -> None: ...

class PoolInfo(_message.Message):
    __slots__ = ("name", "role", "model", "replicas", "alpha", "gamma", "routes", "dtype", "shadow")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    GAMMA_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    model: str
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaInfo]
    alpha: float
    gamma: float
    routes: _containers.RepeatedCompositeFieldContainer[RouteInfo]
    dtype: str
    shadow: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., model: _Optional[str] = ..., replicas: _Optional[_Iterable[_Union[ReplicaInfo, _Mapping]]] = ..., alpha: _Optional[float] = ..., gamma: _Optional[float] = ..., routes: _Optional[_Iterable[_Union[RouteInfo, _Mapping]]] = ..., dtype: _Optional[str] = ..., shadow: bool = ...) -> None: ...

class RouteInfo(_message.Message):
    __slots__ = ("request_class", "alpha", "goodput", "weight", "share", "is_chosen", "num_tested")
    REQUEST_CLASS_FIELD_NUMBER: _ClassVar[int]
    ALPHA_FIELD_NUMBER: _ClassVar[int]
    GOODPUT_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    IS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    NUM_TESTED_FIELD_NUMBER: _ClassVar[int]
    request_class: str
    alpha: float
    goodput: float
    weight: float
    share: float
    is_chosen: bool
    num_tested: float
    def __init__(self, request_class: _Optional[str] = ..., alpha: _Optional[float] = ..., goodput: _Optional[float] = ..., weight: _Optional[float] = ..., share: _Optional[float] = ..., is_chosen: bool = ..., num_tested: _Optional[float] = ...) -> None: ...

class ReplicaInfo(_message.Message):
    __slots__ = ("replica_id", "address", "draining", "num_sessions", "kv_usage")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_USAGE_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    address: str
    draining: bool
    num_sessions: int
    kv_usage: float
    def __init__(self, replica_id: _Optional[str] = ..., address: _Optional[str] = ..., draining: bool = ..., num_sessions: _Optional[int] = ..., kv_usage: _Optional[float] = ...) -> None: ...

class PromoteRequest(_message.Message):
    __slots__ = ("draft_pool", "share", "target_fingerprint")
    DRAFT_POOL_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    draft_pool: str
    share: float
    target_fingerprint: str
    def __init__(self, draft_pool: _Optional[str] = ..., share: _Optional[float] = ..., target_fingerprint: _Optional[str] = ...) -> None: ...

class PromoteResponse(_message.Message):
    __slots__ = ("promotion", "target_models")
    PROMOTION_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODELS_FIELD_NUMBER: _ClassVar[int]
    promotion: PromotionInfo
    target_models: _containers.RepeatedCompositeFieldContainer[TargetModelInfo]
    def __init__(self, promotion: _Optional[_Union[PromotionInfo, _Mapping]] = ..., target_models: _Optional[_Iterable[_Union[TargetModelInfo, _Mapping]]] = ...) -> None: ...

class PromotionInfo(_message.Message):
    __slots__ = ("draft_pool", "share", "most", "status")
    DRAFT_POOL_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    MOST_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    draft_pool: str
    share: float
    most: float
    status: str
    def __init__(self, draft_pool: _Optional[str] = ..., share: _Optional[float] = ..., most: _Optional[float] = ..., status: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("replica_id", "undo")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    undo: bool
    def __init__(self, replica_id: _Optional[str] = ..., undo: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("replica_id", "role", "pool", "address", "num_streams", "num_sessions", "is_last")
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_STREAMS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    replica_id: str
    role: str
    pool: str
    address: str
    num_streams: int
    num_sessions: int
    is_last: bool
    def __init__(self, replica_id: _Optional[str] = ..., role: _Optional[str] = ..., pool: _Optional[str] = ..., address: _Optional[str] = ..., num_streams: _Optional[int] = ..., num_sessions: _Optional[int] = ..., is_last: bool = ...) -> None: ...
