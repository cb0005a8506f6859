"""A replica whose distributions are Zipf-like over 151,936 tokens: a vocabulary as wide as a real model's.

The target's distribution is a noisy copy of the draft's; the noise sets acceptance. The engine, the sampling and the
wire are what ships; the worker alone is made. `python -m bench.systems.zipf ROLE --noise STD --listen HOST:PORT` serves
one. Called by the `wire` suite.
"""

import argparse

import numpy as np
import torch

from specdec.engine.base import ModelShape, StepPlan, Worker
from specdec.engine.loop.replica_engine import ReplicaOptions
from specdec.engine.simulated.text import EOS_TOKEN_ID, VOCABULARY_SIZE, simulated_vocabulary_fingerprint
from specdec.observability.engine_metrics import EngineMetrics
from specdec.rpc.service_server import DRAFT_SERVICE, TARGET_SERVICE
from specdec.service.lifecycle import run_replica, run_to_exit_code, stop_on_signals

#: p(rank) ~ (rank + 1)^-EXPONENT: the top 64 of 151,936 hold 0.85, so that every support is full.
EXPONENT = 1.4

#: Coprime to the vocabulary: multiplying ranks by it scatters the top ids over all of it.
_SCATTER = 104_729


class ZipfWorker(Worker):
    """A `specdec.engine.base.Worker`: the distribution is shifted by the last token, with noise that depends on it."""

    def __init__(self, noise: float) -> None:
        """`noise`: standard deviation of the log probabilities around the Zipf distribution."""
        self.shape = ModelShape(
            vocabulary_size=VOCABULARY_SIZE,
            max_context_tokens=4096,
            eos_token_ids=(EOS_TOKEN_ID,),
            model_fingerprint=f"zipf-{noise}",
            vocabulary_fingerprint=simulated_vocabulary_fingerprint(),
            num_kv_blocks=512,
            dtype="float32",
            device="cpu",
        )
        self._noise = np.random.default_rng(0).normal(size=2 * VOCABULARY_SIZE) * noise
        self._log_law = -EXPONENT * np.log(np.arange(1, VOCABULARY_SIZE + 1))
        self._scattered = np.arange(VOCABULARY_SIZE, dtype=np.int64) * _SCATTER

    def execute(self, plan: StepPlan) -> torch.Tensor:
        """See `Worker.execute`.  [R, V]"""
        rows = [
            self._logits_after(token_id)
            for part in plan.slices
            for token_id in part.token_ids[len(part.token_ids) - part.num_logit_rows :]
        ]
        return torch.from_numpy(np.stack(rows) if rows else np.empty((0, VOCABULARY_SIZE), np.float32))

    def _logits_after(self, last_token_id: int) -> np.ndarray:
        logits = np.empty(VOCABULARY_SIZE, dtype=np.float32)
        noise = self._noise[last_token_id : last_token_id + VOCABULARY_SIZE]
        logits[(self._scattered + last_token_id) % VOCABULARY_SIZE] = self._log_law + noise
        return logits


async def _serve(role: str, noise: float, listen: str) -> None:
    from draft_service.proposer import Proposer
    from draft_service.servicer import DraftServicer
    from specdec.settings.draft import DraftSettings
    from specdec.settings.target import TargetSettings
    from target_service.servicer import TargetServicer
    from target_service.verifier import Verifier

    service_name, settings_type, engine_type, servicer_type = {
        "draft": (DRAFT_SERVICE, DraftSettings, Proposer, DraftServicer),
        "target": (TARGET_SERVICE, TargetSettings, Verifier, TargetServicer),
    }[role]
    metrics = EngineMetrics("zipf", role=role)
    engine = engine_type(ZipfWorker(noise), ReplicaOptions(replica_id=role, model="zipf"))
    await run_replica(
        settings_type(model="zipf", listen=listen, redis_url="memory://"),
        service_name=service_name,
        engine=engine,
        servicer=servicer_type(engine, metrics),
        metrics=metrics,
        register=None,
        take_signals=stop_on_signals,
    )


def main() -> int:
    """Serve one replica until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["draft", "target"])
    parser.add_argument("--noise", type=float, required=True)
    parser.add_argument("--listen", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    return run_to_exit_code(_serve(arguments.role, arguments.noise, arguments.listen))


if __name__ == "__main__":
    raise SystemExit(main())
