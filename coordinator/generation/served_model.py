"""Which target model a turn gets, and what becomes of a turn whose model is gone before it showed a token.

A turn that has shown one keeps its model, whatever happens. Not here: keeping other models' tokens out of it
(`specdec.rpc.identity`), replicas (`placement`). Called by `turn_preparer`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coordinator.generation.request_log import LoggedRequest, decode_parameters, record_of
from coordinator.replicas.pool import ReplicaPools
from specdec.state.store import Lease, RequestRecord, SessionStore


def target_after(last: RequestRecord | None, pools: ReplicaPools) -> tuple[str, bool]:
    """Fingerprint of the model that a new turn gets, and whether the session's turn before was another's."""
    now = pools.target_info.model_fingerprint
    return now, last is not None and decode_parameters(last.parameters_json).target_fingerprint != now


async def on_a_served_model(
    logged: LoggedRequest, lease: Lease, store: SessionStore, pools: ReplicaPools
) -> LoggedRequest:
    """A request whose model is no longer served goes on with another one if no token of it was shown yet.

    Raises as `SessionStore.begin_request`.
    """
    parameters = logged.identity.parameters
    if logged.output.token_ids or pools.serves(parameters.target_fingerprint):
        return logged
    parameters = replace(
        parameters,
        target_fingerprint=pools.target_info.model_fingerprint,
        target_changed=logged.identity.turn > 0,
    )
    identity = replace(logged.identity, parameters=parameters)
    await store.begin_request(lease, record_of(identity), keep=len(logged.token_ids), token_ids=np.empty(0, np.uint32))
    return replace(logged, identity=identity)
