"""The constraints that a replica knows by their identity, so that a constraint's text travels once to each replica."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

from specdec.checkpoints.vocabulary import load_tokenizer
from specdec.contract.constraint import Constraint
from specdec.contract.errors import ConstraintMiss, InvalidRequest, Unsupported
from specdec.contract.types import SessionPosition
from specdec.structured.token_table import TokenTable

#: Limit on the texts that are kept, in bytes; the ones used longest ago leave.
_MAX_KNOWN_BYTES = 64 << 20

_log = logging.getLogger(__name__)


class KnownConstraints:
    """Constraints by identity. Safe to share between threads."""

    def __init__(
        self,
        model: str,
        eos_token_ids: Sequence[int],
        vocabulary_size: int,
        fingerprint: str | None = None,
        *,
        is_authority: bool = True,
    ) -> None:
        """
        Args:
            model: checkpoint whose tokenizer is loaded at the first constraint.
            eos_token_ids: end tokens of the model.
            vocabulary_size: number of tokens of a row of logits.
            fingerprint: of the model's vocabulary; None: not known.
            is_authority: whether a text of another identity is refused. A draft's masks only raise acceptance, and its
                model may have other end tokens than the target.
        """
        self._is_authority = is_authority
        self._model = model
        self._eos_token_ids = tuple(eos_token_ids)
        self._vocabulary_size, self._fingerprint = vocabulary_size, fingerprint
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Constraint] = OrderedDict()
        self._num_bytes = 0

    @cached_property
    def table(self) -> TokenTable:
        """The model's tokens. Raises Unsupported if they cannot follow constraints."""
        tokenizer = load_tokenizer(self._model)
        return TokenTable(tokenizer, self._eos_token_ids, self._vocabulary_size, self._fingerprint)

    def prepare(self) -> None:
        """Load the tokens and build their table, for which all calls would wait later: the library holds Python's lock.

        A model that cannot follow constraints serves requests without them; `learn` raises for the others.
        """
        try:
            self._loaded_table().library_table()
        except Unsupported as error:
            _log.debug("requests with constraints will be refused: %s", error.message)

    def get(self, position: SessionPosition) -> Constraint | None:
        """Return the constraint of a call; None if it is not known here and its text came along.

        Raises ConstraintMiss if the text did not come along.
        """
        identity = position.filters.constraint_id
        with self._lock:
            known = self._known.get(identity)
            if known is not None:
                self._known.move_to_end(identity)
            elif position.constraint is None:
                raise ConstraintMiss("this replica does not know the constraint; send its text")
            return known

    async def constraint_of(self, position: SessionPosition) -> Constraint | None:
        """Return the constraint of a call, which becomes known; None if it has none. Raises as `get` and `learn`."""
        if not position.filters.constraint_id:
            return None
        return self.get(position) or await asyncio.to_thread(self.learn, position)

    def learn(self, position: SessionPosition) -> Constraint:
        """Return the constraint that came with a call; it becomes known. Blocks while the tokens are loaded.

        Raises:
            InvalidRequest: the text has another identity on this model's vocabulary.
            Unsupported: this model cannot follow constraints.
        """
        identity, constraint = position.filters.constraint_id, position.constraint
        assert constraint is not None  # `get` has checked it
        table = self._loaded_table()
        if self._is_authority and table.identity_of(constraint) != identity:
            raise InvalidRequest(
                "round.law.constraint_id is not the identity of round.constraint on this replica: coordinator and "
                "target have different versions of llguidance, or different tokenizers",
                field="round.law.constraint_id",
            )
        table.library_table()
        with self._lock:
            if identity not in self._known:
                self._known[identity] = constraint
                self._num_bytes += len(constraint.text)
            while self._num_bytes > _MAX_KNOWN_BYTES:
                _, oldest = self._known.popitem(last=False)
                self._num_bytes -= len(oldest.text)
        return constraint

    def _loaded_table(self) -> TokenTable:
        with self._loading:
            return self.table
