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
    print(closing_line(completion, drafting=_drafting(client, completion, options)), file=sys.stderr)


def _drafting(client: Client, completion: Completion, options: GenerateOptions) -> str:
    """What an output without drafts, or with few, was made by, as far as it is known; "" where there is no more to say
    than its figures do."""
    if options.get("mode") == "off" or options.get("gamma") == 0:
        return "target-only, as asked"
    num_rounds, has_tested = completion.stats.num_rounds, has_tested_drafts(completion)
    num_without = completion.stats.num_target_only_steps if has_tested else num_rounds
    if not num_rounds or 2 * num_without < num_rounds:
        return ""
    try:
        drafts = [pool for pool in client.info().pools if pool.role == "draft"]
    except SpecdecError:
        return ""
    if not drafts:
        return "target-only: no drafts are served"
    rounds = f" in {num_without} of them" if has_tested else ""
    # With one pool it is certain whose figures the server chose by.
    if len(drafts) == 1 and drafts[0].alpha is not None and drafts[0].gamma is not None and drafts[0].gamma < 0.5:
        return f"drafting paused{rounds}: it did not pay (alpha {drafts[0].alpha:.2f})"
    return f"no draft{rounds}" if has_tested else ""
