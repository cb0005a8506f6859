"""Imports what replicas whose weights are packed need, which is not transformers: 120 MB and 3 s less.

A replica that needs transformers after all imports it by itself. See `specdec.service.preloaded`.
"""

# ruff: noqa: F401, because nothing here is used by name

from __future__ import annotations

import specdec.engine.kept_worker
import specdec.engine.loop.replica_engine
import specdec.service.replica_main
