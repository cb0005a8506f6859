"""`specdec distill`: a new version of a draft, trained on what the target said to a tenant's users.

Runs beside serving, in this process alone and at the lowest priority there is; prints what it came to. Not here: what
is logged (the coordinator's `--learning-log`), the training (`specdec.learning`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec.checkpoints.preflight import require_servable
from specdec.cli import Usage
from specdec.cli.join import join
from specdec.cli.request_flags import add_endpoint_flag
from specdec.cli.waiting import Waiting
from specdec.errors import InvalidRequest
from specdec.settings.draft_specs import is_local_draft, parse_local_draft
from specdec.tenant import DEFAULT_TENANT, check_tenant

_LOWEST_PRIORITY = 19


def add_parser(commands: Any, environ: Mapping[str, str]) -> None:
    parser = commands.add_parser(
        "distill", help="train a draft on what the target said (see --learning-log)", allow_abbrev=False
    )
    add_endpoint_flag(parser, environ)
    parser.add_argument("--log", type=Path, required=True, metavar="DIR", help="the coordinators' --learning-log")
    parser.add_argument("--tenant", default=DEFAULT_TENANT, metavar="NAME", help=f"default {DEFAULT_TENANT}")
    parser.add_argument(
        "--draft", required=True, metavar="DRAFT",
        help="what to begin with: a draft model, or what the target drafts with by itself, as specdec up names it: "
             "early-exit:LAYERS[:PATH], medusa:PATH, eagle3:PATH",
    )  # fmt: skip
    parser.add_argument(
        "--target-model", default="", metavar="PATH_OR_HUB_ID",
        help="the target, which what drafts in it learns beside",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="of the new version; must not be there")
    parser.add_argument(
        "--target", default="", metavar="FINGERPRINT", help="of the target, where the log has several targets' words"
    )
    parser.add_argument("--minutes", type=float, default=20.0, metavar="N", help="of training; default 20")
    parser.add_argument("--max-steps", type=int, metavar="N", help="that it takes at most; default: as time allows")
    parser.add_argument(
        "--share", type=float, default=0.4, metavar="SHARE",
        help="of the time that it computes, for the sake of what is served beside it; default 0.4",
    )  # fmt: skip
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default 1")
    parser.add_argument(
        "--learning-rate", type=float, metavar="RATE", help="of AdamW; default 0.2 over the model's width"
    )
    parser.add_argument("--join", default="", metavar="POOL", help="then have it join the specdec up at --endpoint")


def run(args: argparse.Namespace) -> int:
    """Trains, writes and tells.

    Raises:
        Usage: a flag is out of its range.
        SpecdecError: no such log, draft, or place for the new version; or they do not fit; or the draft did not get
            better.
    """
    _check(args)
    _step_back()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # before torch is there, which makes its threads once
    with Waiting(what="distilling") as waiting:
        waiting.show("reading the log")
        if args.target_model:
            require_servable(args.target_model, flag="--target-model")
        else:
            require_servable(args.draft, flag="--draft")
        from specdec.learning.distill import Distillation, distill
        from specdec.learning.training import TrainingPlan

        plan = TrainingPlan(60.0 * args.minutes, args.max_steps, args.share, learning_rate=args.learning_rate)
        asked = Distillation(args.log, args.tenant, args.draft, args.out, args.target, plan, args.target_model)
        learned = distill(
            asked,
            lambda num_steps, kl_nats, done: waiting.show(f"{done:.0%}, step {num_steps}, KL {kl_nats:.3f} nats"),
        )
    before, after = learned.before, learned.after
    told = (
        f"KL {before.kl_nats:.3f} -> {after.kl_nats:.3f} nats, expected acceptance {before.acceptance:.3f} -> "
        f"{after.acceptance:.3f} on {learned.num_held_out_tokens} held-out tokens; {learned.num_steps} steps on "
        f"{learned.num_learned_tokens} tokens, {learned.seconds:.0f} s"
    )
    if not learned.is_better:
        raise InvalidRequest(f"the draft did not get better, so nothing is written: {told}", field="draft")
    print(f"{args.out}: {told}", flush=True)
    return join(args.endpoint, args.join, str(args.out)) if args.join else 0


def _check(args: argparse.Namespace) -> None:
    """Raises Usage."""
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
    """Raises Usage: what drafts in the target has too little or too much said of it."""
    if not is_local_draft(args.draft):
        if args.target_model:
            raise Usage("--target-model is for what the target drafts with by itself: a draft model learns alone")
        return
    try:
        kind = parse_local_draft(args.draft).kind
    except ValueError as error:
        raise Usage(f"--draft: {error}") from None
    if not args.target_model:
        raise Usage(f"--draft {args.draft} learns beside its target: name that by --target-model")
    if args.join:
        raise Usage(f"--join is for draft models: a target reads its {kind} when it starts")


def _step_back() -> None:
    """Everything else goes first."""
    os.nice(_LOWEST_PRIORITY)
    if hasattr(os, "sched_setscheduler"):  # Linux: not even a niced share of a core that another process wants
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
