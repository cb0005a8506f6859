"""One answer as it comes: written chunk by chunk, stopped by Ctrl-C, and closed by a line that sums it up.

Not here: how tokens and lines look (`terminal`), what a silent stream waits for (`silence`), retries (the SDK). Called
by `generate` and `chat`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from specdec.cli.silence import SilenceWatch
from specdec.cli.terminal import closing_line, has_tested_drafts
from specdec.client import Chunk, Client, Completion, GenerateOptions, Stream
from specdec.client.results import CANCELLED
from specdec.errors import SpecdecError

#: Within it, Ctrl-C calls what it was given.
Interrupts = Callable[[Callable[[], None]], contextlib.AbstractContextManager[None]]


def read_answer(client: Client, stream: Stream, interrupts: Interrupts, write: Callable[[Chunk], None]) -> Completion:
    """Hands every chunk to `write`. What Ctrl-C left of the output has the finish reason "cancelled".

    Raises:
        SpecdecError: the output was cut short otherwise.
    """
    with interrupts(stream.close), stream, SilenceWatch(client) as watch:
        for chunk in stream:
            watch.heard()
            write(chunk)
    return stream.result()


def print_closing_line(client: Client, completion: Completion, options: GenerateOptions) -> None:
    """Sums an answer up on stderr."""
    why = ""
    if completion.finish_reason != CANCELLED and completion.stats.num_rounds and not has_tested_drafts(completion):
        why = _why_without_draft(client, options)
    print(closing_line(completion, without_draft=why), file=sys.stderr)


def _why_without_draft(client: Client, options: GenerateOptions) -> str:
    """Why no draft token was tested, as far as the server's figures tell."""
    if options.get("mode") == "off" or options.get("gamma") == 0:
        return "target-only, as asked"
    try:
        drafts = [pool for pool in client.info().pools if pool.role == "draft" and pool.replicas]
    except SpecdecError:
        return ""
    if not drafts:
        return "target-only: no draft replica is alive"
    # With one pool it is certain whose figures the server chose by.
    if len(drafts) == 1 and drafts[0].alpha is not None and drafts[0].gamma is not None and drafts[0].gamma < 0.5:
        return f"drafting paused: it did not pay (alpha {drafts[0].alpha:.2f})"
    return ""
