"""Comparisons of the services of one system: vocabularies, models, versions, builds, and room for recurrent states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from specdec.cli.checks.finding import Finding, fail, ok, warn
from specdec.client import ServerInfo
from specdec.contract.engine_api import EngineInfo
from specdec.contract.version import __version__, build_of

#: Replicas that are named in one line.
_MAX_NAMED = 3
_SHOWN_CHARACTERS = 8
#: Recurrent states of a session that runs.
_STATES_PER_SESSION = 2


def compare_vocabularies(
    info: ServerInfo | None, endpoint: str, services: Mapping[str, EngineInfo]
) -> Iterator[Finding]:
    """Compare the vocabulary of each service, by address, with the coordinator's at `endpoint`."""
    if info is not None:
        reference, whose = info.vocabulary_fingerprint, f"the coordinator at {endpoint}"
    else:
        fingerprints = Counter(engine.vocabulary_fingerprint for engine in services.values())
        reference, whose = fingerprints.most_common(1)[0][0] if fingerprints else "", "most others"
    others = [
        f"{named(address, engine)} has {_short(engine.vocabulary_fingerprint)}"
        for address, engine in services.items()
        if engine.vocabulary_fingerprint != reference
    ]
    if others:
        yield fail("vocabularies", f"{whose} has {_short(reference)}, {listed(others)}; it is not used",
                   "serve models with one tokenizer, and give the coordinator the target's")  # fmt: skip
    elif services:
        yield ok("vocabularies", f"equal: {_short(reference)}")


def compare_models(engines: Mapping[str, EngineInfo]) -> Iterator[Finding]:
    """Tell whether each pool has one model and one dtype."""
    pools: dict[tuple[str, str], dict[str, str]] = {}
    for address, engine in engines.items():
        pool = pools.setdefault((engine.role, engine.pool), {})
        pool[f"{engine.model_fingerprint[:_SHOWN_CHARACTERS]} {engine.dtype}"] = address
    mixed = [
        f"{role} pool {name} has {' and '.join(f'{model} at {address}' for model, address in models.items())}"
        for (role, name), models in pools.items()
        if len(models) > 1
    ]
    if mixed:
        yield warn("models", listed(mixed), "give each pool one model and one dtype; finish the upgrade")
    elif engines:
        yield ok("models", f"one model in each of {len(pools)} pools")


def compare_versions(services: Mapping[str, EngineInfo]) -> Iterator[Finding]:
    """Tell whether the services have one version, and one build of it."""
    versions = {engine.version: named(address, engine) for address, engine in services.items()}
    if len(versions) > 1:
        shown = listed(f"{version} at {where}" for version, where in versions.items())
        if _are_apart(versions):
            yield fail("service versions", f"{shown}; only versions one minor apart work together",
                       "upgrade one minor version at a time (docs/how-to/upgrade.md)")  # fmt: skip
        else:
            yield warn("service versions", shown, "finish the upgrade: replace the older processes")
        return
    builds: dict[tuple[str, str], str] = {}
    for address, engine in services.items():
        ours, _, of_role = engine.build.partition(".")
        builds.setdefault(("", ours), named(address, engine))
        builds.setdefault((engine.role, of_role), named(address, engine))
    counts = Counter(scope for scope, _ in builds)
    if mixed := [f"build {build or 'of an older commit'} at {where}" for (scope, build), where in builds.items()
                 if counts[scope] > 1 and (not scope or counts[""] == 1)]:  # fmt: skip
        yield warn("service versions", f"version {next(iter(versions))} of several sources: {listed(mixed)}",
                   "give all services one image or one wheel")  # fmt: skip
    elif versions:
        yield ok("service versions", f"all {next(iter(versions))}, of one build")


def coordinator_build(info: ServerInfo, endpoint: str) -> Finding:
    """Compare version and build of the coordinator with this doctor's."""
    found, advice = f"{endpoint} answers, specdec {info.version}", "run the doctor of the same version"
    if info.version != __version__:
        return warn("coordinator", f"{endpoint} runs specdec {info.version}, and this is {__version__}", advice)
    own, theirs = (build.partition(".")[0] for build in (build_of("coordinator"), info.build))
    if own and own != theirs:
        return warn("coordinator", f"{found} of other sources than this doctor ({theirs or 'unknown'}, {own})", advice)
    return ok("coordinator", f"{found}, build {theirs}")


def state_room(info: ServerInfo | None, engines: Mapping[str, EngineInfo]) -> Iterator[Finding]:
    """Tell of hybrids how many sessions their slots for recurrent states hold."""
    hybrids = {address: engine for address, engine in engines.items() if engine.num_states}
    targets = [engine for engine in hybrids.values() if engine.role == "target"]
    if not hybrids:
        return
    sessions = sum(engine.num_states // _STATES_PER_SESSION for engine in targets)
    slots = listed(f"{named(address, engine)} has {engine.num_states}" for address, engine in hybrids.items())
    found = f"slots of a hybrid, two a session: {slots}"
    if info is not None and targets and sessions < info.max_running:
        yield warn("recurrent states", f"{found}; the targets hold {sessions} running sessions, and the coordinator "
                   f"runs up to {info.max_running} requests", "give targets more memory (--kv-cache-bytes), add "
                   f"targets, or give the coordinators --max-running {max(1, sessions)}")  # fmt: skip
    else:
        yield ok("recurrent states", found)


def named(address: str, engine: EngineInfo) -> str:
    """Return a service with its role, id, address and pool."""
    pool = f" (pool {engine.pool})" if engine.pool else ""
    return f"{engine.role} {engine.replica_id} at {address}{pool}"


def listed(texts: Iterable[str]) -> str:
    """Return texts as a list that names the first few."""
    every = list(texts)
    more = f"; and {len(every) - _MAX_NAMED} more" if len(every) > _MAX_NAMED else ""
    return "; ".join(every[:_MAX_NAMED]) + more


def _short(fingerprint: str) -> str:
    return fingerprint[:_SHOWN_CHARACTERS] or "none"


def _are_apart(versions: Iterable[str]) -> bool:
    """Return whether two versions differ by more than one minor version."""
    numbers = [tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) for version in versions]
    known = sorted(number for number in numbers if len(number) == 2)
    return bool(known) and (known[0][0] != known[-1][0] or known[-1][1] - known[0][1] > 1)
