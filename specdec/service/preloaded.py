"""Imports what every replica with a real model needs; `specdec up` lets its replicas share this import.

Replicas that read packed weights need no transformers, whose models take 100 MB and 3 s. It is therefore not imported
where this user has packed weights: a replica that needs it after all imports it by itself. See
`specdec.supervision.process_template`.
"""

# ruff: noqa: F401, because nothing here is used by name

from __future__ import annotations

import os

import specdec.engine.kept_worker
import specdec.engine.loop.replica
import specdec.service.replica_main
from specdec.artifact_cache import packed_directory

if not any(packed_directory(os.environ).glob("*.packed")):
    import transformers.models.llama.modeling_llama

    import specdec.engine.loader
