"""Imports what every replica with a real model needs; `specdec up` lets its replicas share this import.

See `specdec.supervision.process_template`. `specdec.service.preloaded_kernels` is for models whose weights are packed.
"""

# ruff: noqa: F401, because nothing here is used by name

from __future__ import annotations

import transformers.models.llama.modeling_llama

import specdec.engine.loader
import specdec.engine.loop.replica_engine
import specdec.service.replica_main
