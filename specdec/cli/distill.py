"""`specdec distill`: trains a new version of a draft on the learning log of one tenant.

It runs beside serving, in this process alone and by default at the lowest priority. The coordinator writes the log
(`--learning-log`), and `specdec.learning` trains.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.checkpoints.preflight import require_servable
from specdec.cli import Usage
from specdec.cli.command_parser import print_error
from specdec.cli.join import join
from specdec.cli.json_output import add_json_flag, print_json
from specdec.cli.progress import Waiting
from specdec.cli.request_flags import add_client_flags
from specdec.contract.errors import InvalidRequest
from specdec.contract.tenant import DEFAULT_TENANT, check_tenant
from specdec.settings.draft_specs import is_local_draft, parse_local_draft

if TYPE_CHECKING:
    from specdec.learning.training import Learned

_LOWEST_PRIORITY = 19


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "distill", help="train a draft on what the target said (see --learning-log)", allow_abbrev=False
    )
    add_client_flags(parser, environ)
    parser.add_argument("--log", type=Path, required=True, metavar="DIR", help="the coordinators' --learning-log")
    parser.add_argument("--tenant", default=DEFAULT_TENANT, metavar="NAME", help=f"default {DEFAULT_TENANT}")
    parser.add_argument(
        "--draft", required=True, metavar="DRAFT",
        help="draft to start from: a draft model, or a draft inside the target as specdec up names it: "
             "early-exit:LAYERS[:PATH], medusa:PATH, eagle3:PATH",
    )  # fmt: skip
    parser.add_argument(
        "--target-model", default="", metavar="PATH_OR_HUB_ID",
        help="target model, for a draft inside the target",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="directory of the new version; must not exist"
    )
    parser.add_argument(
        "--target",
        default="",
        metavar="FINGERPRINT",
        help="fingerprint of the target to learn from, if the log has several",
    )
    parser.add_argument("--minutes", type=float, default=20.0, metavar="N", help="training time; default 20")
    parser.add_argument("--max-steps", type=int, metavar="N", help="limit on the steps; default: none")
    parser.add_argument(
        "--share", type=float, default=0.4, metavar="SHARE",
        help="share of the time in which to compute, to leave the machine to serving; default 0.4; 1 also keeps the "
        "priority of the process, for a machine that never rests",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help="learning rate of AdamW; default: 0.2 divided by the model's width",
    )
    parser.add_argument(
        "--join", default="", metavar="POOL", help="add the new version as this pool to the specdec up at --endpoint"
    )
    add_json_flag(parser, "a line")


def run(args: argparse.Namespace) -> int:
    """Train, write the new version, and print what it gained.

    Returns:
        The exit code: 1 if the draft did not improve on held-out text, with a line that says how much more to log.

    Raises:
        Usage: a flag is out of its range.
        SpecdecError: log, draft or output directory are missing or do not fit each other.
    """
    _check(args)
    if args.share < 1.0:
        _lower_priority()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before torch is imported, which reads it once
    with Waiting(what="distilling") as waiting:
        waiting.show("reading the log")
        if args.target_model:
            require_servable(args.target_model, flag="--target-model")
        else:
            require_servable(args.draft, flag="--draft")
        from specdec.learning.distill import Distillation, distill
        from specdec.learning.training import TrainingPlan

        plan = TrainingPlan(60.0 * args.minutes, args.max_steps, args.share, learning_rate=args.learning_rate)
        distillation = Distillation(args.log, args.tenant, args.draft, args.out, args.target, plan, args.target_model)
        learned = distill(
            distillation,
            lambda num_steps, kl_nats, done: waiting.show(f"{done:.0%}, step {num_steps}, KL {kl_nats:.3f} nats"),
        )
    if not learned.is_better:
        message = (
            f"the draft did not improve on held-out text, so nothing was written ({_training(learned)}); log "
            f"about {learned.num_missing_tokens} more tokens and try again"
        )
        if args.json:
            print_error(InvalidRequest(message, field="log"), as_json=True)
        else:
            print(f"error: {message}", file=sys.stderr)
        return 1
    if not args.json:
        _print_gain(args.out, learned)
    if args.join:
        join(args, args.join, str(args.out))
    if args.json:
        print_json({"out": str(args.out), "pool": args.join or None} | asdict(learned))
    return 0


def _print_gain(path: Path, learned: Learned) -> None:
    before, after = learned.before, learned.after
    print(
        f"{path}: KL {before.kl_nats:.3f} -> {after.kl_nats:.3f} nats, expected acceptance {before.acceptance:.3f} "
        f"-> {after.acceptance:.3f} on {learned.num_held_out_tokens} held-out tokens; {_training(learned)}",
        flush=True,
    )


def _training(learned: Learned) -> str:
    """Return what was done, in a few words."""
    ended = ", stopped when held-out text no longer improved" if learned.stopped_early else ""
    return f"{learned.num_steps} steps on {learned.num_learned_tokens} tokens in {learned.seconds:.0f} s{ended}"


def _check(args: argparse.Namespace) -> None:
    """Raise Usage for a flag that is out of its range or does not fit the others."""
    try:
        check_tenant(args.tenant, field="--tenant")
    except InvalidRequest as error:
        raise Usage(error.message) from None
    if not 0.0 < args.share <= 1.0:
        raise Usage("--share must be above 0 and at most 1")
    if not 0.0 < args.minutes <= 10_000.0:
        raise Usage("--minutes must be above 0 and at most 10000")
    for flag, number in (("--threads", args.threads), ("--max-steps", args.max_steps)):
        if number is not None and number < 1:
            raise Usage(f"{flag} must be at least 1")
    if args.learning_rate is not None and not 0.0 < args.learning_rate <= 1.0:
        raise Usage("--learning-rate must be above 0 and at most 1")
    _check_local(args)


def _check_local(args: argparse.Namespace) -> None:
    """Raise Usage for flags that do not fit a draft model or a draft inside the target."""
    if not is_local_draft(args.draft):
        if args.target_model:
            raise Usage("--target-model is for drafts inside the target: leave it out for a draft model")
        return
    try:
        kind = parse_local_draft(args.draft).kind
    except ValueError as error:
        raise Usage(f"--draft: {error}") from None
    if not args.target_model:
        raise Usage(f"--draft {args.draft} is trained together with its target: name it by --target-model")
    if args.join:
        raise Usage(f"--join is for draft models: a target loads its {kind} draft when it starts")


def _lower_priority() -> None:
    """Let every other process run first."""
    os.nice(_LOWEST_PRIORITY)
    if hasattr(os, "sched_setscheduler"):  # Linux: runs only on cores that no other process wants
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
