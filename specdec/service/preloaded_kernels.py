"""Imports what replicas whose weights are packed need: of transformers the tokenizers alone, 100 MB and 3 s less.

A replica that needs a model of transformers after all imports it by itself. See `specdec.service.preloaded`.
"""

# ruff: noqa: F401, because nothing here is used by name

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

import specdec.engine.kept_worker
import specdec.engine.loop.replica_engine
import specdec.service.replica_main
