"""Redis as the manifests start it, against its memory, its disk, its probes, and the URLs of the services.

A full Redis must refuse writes instead of being killed or losing sessions. Every service needs the same Redis, since
sessions and the registry of replicas are in it.
"""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from specdec.settings.redis_url import RedisUrl, parse_redis_url

from .container_settings import Configured
from .documents import Container, Problem, at
from .environment import UNKNOWN
from .pod_services import PodServices, is_whole
from .quantities import mebibytes, number_of, redis_bytes
from .references import Objects
from .volumes import claim_bytes, mount_of, volume_of

_PROGRAMS = ("redis-server", "valkey-server")
#: Memory and disk over --maxmemory: a rewrite of the log copies pages that change, and writes a second file.
_FACTOR = 2.0
_PASSWORD = "REDISCLI_AUTH"


@dataclass(frozen=True)
class Server:
    """A container with a Redis, and its options as its words give them."""

    container: Container
    options: dict[str, str]
    places: dict[str, str]
    """Field of each option's value within the container."""

    @property
    def is_log_kept(self) -> bool:
        return self.options.get("appendonly") == "yes"


def is_redis(container: Container) -> bool:
    """Return whether a container runs a Redis server."""
    words = " ".join(_words(container).values())
    return any(program in words for program in _PROGRAMS) and "--sentinel" not in words


def redis_problems(configured: list[Configured], objects: Objects) -> Iterator[Problem]:
    """Yield servers that would be killed or full too early, and URLs that lead to none or lack its password."""
    configured = [one for one in configured if not one.variables.container.template.follows_leader]
    yield from _differing(configured)
    if not is_whole(configured):
        return
    pods = PodServices(objects.documents)
    for one in configured:
        for setting in ("redis_url", "kv_tier_url"):
            yield from _dialled(one, setting, pods)
    tiers = {server for one in configured for server in _names(one, "kv_tier_url")}
    for container in (one for template in pods.templates for one in template.containers if is_redis(one)):
        server = _server(container)
        if not tiers & {service.name for service in pods.services_of(container.template)}:
            yield from _store(server)
        yield from _memory(server)
        yield from _files(server)


def _words(container: Container) -> dict[str, str]:
    """Return the words of the command by their fields; a script of a shell is divided."""
    found: dict[str, str] = {}
    for name in ("command", "args"):
        for index, word in enumerate(container.body.get(name) or ()):
            parts = shlex.split(str(word)) if "redis-server " in str(word) else [str(word)]
            found |= {f"{name}[{index}]" + (f" word {number}" if number else ""): p for number, p in enumerate(parts)}
    return found


def _server(container: Container) -> Server:
    words = list(_words(container).items())
    options, places = {}, {}
    for (_, name), (place, value) in itertools.pairwise(words):
        if name.startswith("--"):
            options[name[2:]], places[name[2:]] = value, place
    return Server(container, options, places)


# ---- the server ------------------------------------------------------------------------------------------------------


def _memory(server: Server) -> Iterator[Problem]:
    container, text = server.container, server.options.get("maxmemory")
    most = redis_bytes(text)
    if not most:
        place = server.places.get("maxmemory", "args")
        message = f"--maxmemory {text or 'is unset'}: Redis is killed where it must refuse writes; give it a size"
        yield container.problem(place, message)
        return
    limit_text = at(container.body, "resources", "limits", "memory")
    limit, needed = number_of(limit_text), most * (_FACTOR if server.is_log_kept else 1.25)
    if limit is not None and limit < needed:
        message = (
            f"{limit_text} must be {mebibytes(needed)} or more for --maxmemory {text} ({server.places['maxmemory']})"
        )
        yield container.problem("resources.limits.memory", message)


def _files(server: Server) -> Iterator[Problem]:
    """Yield files of certificates that no volume has."""
    for option, path in server.options.items():
        if option.startswith("tls-") and option.endswith("-file") and mount_of(server.container, path) is None:
            message = f"{path} of --{option} is on no volume: mount the Secret there"
            yield server.container.problem(server.places[option], message)


def _store(server: Server) -> Iterator[Problem]:
    container = server.container
    policy = server.options.get("maxmemory-policy", "noeviction")
    if policy != "noeviction":
        message = f"{policy} evicts sessions: the policy must be noeviction"
        yield container.problem(server.places["maxmemory-policy"], message)
    if not server.is_log_kept:
        message = "sessions end with the process: give --appendonly yes"
        yield container.problem(server.places.get("appendonly", "args"), message)
        return
    folder = server.options.get("dir", "/data")
    mount = mount_of(container, folder)
    if mount is None:
        yield container.problem(
            "volumeMounts", f"no volume is mounted at {folder}, where Redis keeps its log: mount its claim there"
        )
        return
    where = f"volumeMounts[{mount['name']}]"
    if mount.get("readOnly"):
        yield container.problem(f"{where}.readOnly", f"Redis writes its log to {folder}: must be false")
    if "emptyDir" in (volume_of(container.template, mount["name"]) or {}):
        yield container.problem(where, f"{folder} ends with the pod: use a claim for Redis's log")
    size, most = claim_bytes(container.template, mount["name"]), redis_bytes(server.options.get("maxmemory"))
    if size is not None and most and size < _FACTOR * most:
        message = f"{mebibytes(size)} must be {mebibytes(_FACTOR * most)} or more: the log and its rewrite are twice"
        field = f"spec.volumeClaimTemplates[{mount['name']}].spec.resources.requests.storage"
        yield container.template.document.problem(field, f"{message} --maxmemory {server.options['maxmemory']}")


# ---- the URLs --------------------------------------------------------------------------------------------------------


def _differing(configured: list[Configured]) -> Iterator[Problem]:
    """Yield services with another Redis or another cluster name than most."""
    sources = {
        setting: [(one, _source(one, setting)) for one in configured] for setting in ("redis_url", "cluster")
    }  # fmt: skip
    for setting, found in sources.items():
        counts = Counter(source for _, source in found)
        for one, source in found:
            usual = counts.most_common(1)[0][0]
            if source != usual:
                message = (
                    f"{source} must be {usual}, which the other services have: sessions and the registry are there"
                )
                yield one.variables.problem(setting, message)


def _source(one: Configured, setting: str) -> str:
    """Return what tells the values of a setting apart: the value, or the object that has it."""
    variable = one.variables.environment.variables.get(f"{one.service.prefix}{setting.upper()}")
    if variable is not None and not variable.is_known:
        return f"the value of {variable.source}"
    return str(getattr(one.settings, setting))


def url_of(one: Configured, setting: str) -> RedisUrl | None:
    """Return the parts of a URL; None where it is unset or unknown."""
    text = getattr(one.settings, setting, "")
    variable = one.variables.environment.variables.get(f"{one.service.prefix}{setting.upper()}")
    if not text or text == UNKNOWN or (variable is not None and not variable.is_known):
        return None
    return parse_redis_url(text)


def _names(one: Configured, setting: str) -> list[str]:
    url = url_of(one, setting)
    return [host.partition(".")[0] for host, _ in url.addresses] if url else []


def _dialled(one: Configured, setting: str, pods: PodServices) -> Iterator[Problem]:
    url = url_of(one, setting)
    if url is None:
        yield from _password_of_an_object(one, setting, pods)
        return
    for host, port in url.addresses:
        if message := pods.address_problem(host, port):
            yield one.variables.problem(setting, message)
            continue
        for container in (each for template in pods.pods_at(host) for each in template.containers):
            if not is_redis(container):
                message = f"{host} is {container.template.document.title}, which runs no Redis"
                yield one.variables.problem(setting, message)
                continue
            options = _server(container).options
            has_password = ":" in url.user_info
            if "requirepass" in options and not has_password:
                message = f"has no password, and {container.template.document.title} asks for one (--requirepass)"
                yield one.variables.problem(setting, f"{message}: take the URL from the Secret of the password")
            elif has_password and "requirepass" not in options:
                message = f"has a password, and {container.template.document.title} has none: give it --requirepass"
                yield one.variables.problem(setting, message)
            if url.is_tls != ("tls-port" in options):
                scheme = "rediss://" if "tls-port" in options else "redis://"
                yield one.variables.problem(setting, f"must begin with {scheme}, which the server speaks")


def _password_of_an_object(one: Configured, setting: str, pods: PodServices) -> Iterator[Problem]:
    """Yield a URL from another Secret than the password of the Redis in the same overlay."""
    variable = one.variables.environment.variables.get(f"{one.service.prefix}{setting.upper()}")
    if variable is None or variable.is_known:
        return
    secret = variable.source.partition(" key ")[0]
    for container in (each for template in pods.templates for each in template.containers if is_redis(each)):
        options, entries = _server(container).options, container.body.get("env") or ()
        if "requirepass" not in options:
            message = f"comes from {secret}, and {container.template.document.title} has no --requirepass"
            yield one.variables.problem(setting, f"{message}: give both the password, or neither")
            continue
        names = {at(entry, "valueFrom", "secretKeyRef", "name") for entry in entries}
        if f"Secret {next(iter(names), '')}" != secret and names:
            yield one.variables.problem(setting, f"comes from {secret}, the password from Secret {', '.join(names)}")
        if _PASSWORD not in {entry["name"] for entry in entries}:
            yield container.problem("env", f"redis-cli of the probes has no password: set {_PASSWORD}")
