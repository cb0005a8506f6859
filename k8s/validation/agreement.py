"""Images, models, keys and certificates, which the services of an overlay must have alike.

A component that changes one of them for some workloads must change it for all that share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .container_settings import Configured
from .documents import Container, Document, Problem, of_kind
from .environment import environment_of
from .pod_services import is_whole
from .quantities import is_hub_id
from .volumes import mount_of, volume_of

#: Last parts of the names of our images, as `make images` builds them.
IMAGES = ("draft-service", "target-service", "coordinator", "gateway", "ray-node")
#: File of a Secret that cert-manager makes, by the setting that reads it.
_FILES = {"tls_cert": "tls.crt", "tls_key": "tls.key", "tls_ca": "ca.crt"}


def difference_of_services(configured: list[Configured], documents: list[Document]) -> Iterator[Problem]:
    """Yield what some services have and others lack, or have otherwise."""
    templates = [template for document in documents for template in document.templates]
    yield from _images([container for template in templates for container in template.all_containers])
    yield from _files(configured)
    if is_whole(configured):
        serving = [one for one in configured if not one.variables.container.template.follows_leader]
        yield from _models(configured, documents)
        yield from _transport(serving)
        yield from _keys(serving)


# ---- images ----------------------------------------------------------------------------------------------------------


def _images(containers: list[Container]) -> Iterator[Problem]:
    ours: list[tuple[Container, str, str]] = []
    for container in containers:
        name, version = _divided(str(container.body.get("image", "")))
        registry, _, last = name.rpartition("/")
        if last in IMAGES:
            ours.append((container, registry, version))
        elif registry.rpartition("/")[2] == "specdec":
            yield container.problem("image", f"{name} is no image that is built: use one of {', '.join(IMAGES)}")
    for index, what in ((1, "registry"), (2, "version")):
        counts = Counter(one[index] for one in ours if "@" not in str(one[index]))
        for one in ours:
            usual = counts.most_common(1)[0][0] if counts else one[index]
            if one[index] != usual and "@" not in str(one[index]):
                message = f"the {what} {one[index] or '(none)'} must be {usual}, which the other images have"
                yield one[0].problem("image", f"{message}: name the component images last")


def _divided(image: str) -> tuple[str, str]:
    """Return the name and the version of an image; a digest begins with @."""
    name, at_sign, digest = image.partition("@")
    if at_sign:
        return name.rpartition(":")[0] or name, f"@{digest}"
    head, _, last = name.rpartition("/")
    last, _, tag = last.partition(":")
    return f"{head}/{last}" if head else last, tag


# ---- models ----------------------------------------------------------------------------------------------------------


def _models(configured: list[Configured], documents: list[Document]) -> Iterator[Problem]:
    models = {
        name: {one.settings.model for one in configured if one.service.name == name} for name in ("target", "draft")
    }
    for one in configured:
        if one.service.name == "coordinator" and models["target"] and one.settings.tokenizer not in models["target"]:
            message = f"{one.settings.tokenizer} must be the target model, {', '.join(sorted(models['target']))}"
            yield one.variables.problem("tokenizer", message)
    for one in configured:
        model = getattr(one.settings, "model", None) or getattr(one.settings, "tokenizer", None)
        for container in one.variables.container.template.init_containers:
            value = environment_of(container, documents).known().get("MODEL")
            if value is not None and value != model:
                yield container.problem("env[MODEL]", f"{value} must be {model}, which the {one.service.name} loads")
    named = {model for each in models.values() for model in each if is_hub_id(model)}
    for job in of_kind(documents, "Job"):
        for template in job.templates:
            for container in template.containers:
                words = [str(word) for word in container.body.get("args") or ()]
                if not any(is_hub_id(word) for word in words):
                    continue
                for model in sorted(named - set(words)):
                    yield container.problem("args", f"does not download {model}, which a pool serves: add it")


# ---- keys and certificates -------------------------------------------------------------------------------------------


def _files(configured: list[Configured]) -> Iterator[Problem]:
    """Yield files of a certificate's Secret that another setting reads."""
    for one in configured:
        for setting, file in _FILES.items():
            path = str(getattr(one.settings, setting, "") or "")
            name = path.rpartition("/")[2]
            if name in _FILES.values() and name != file:
                yield one.variables.problem(setting, f"{name} must be {file}")
        for setting in ("api_keys", "service_key", *_FILES):
            path = _path(one, setting)
            if path.startswith("/") and not _secret(one, path):
                message = f"{path} is on no volume of a Secret: mount it, or name a file of one"
                yield one.variables.problem(setting, message)


def _transport(configured: list[Configured]) -> Iterator[Problem]:
    """Yield services that dial with TLS what speaks plaintext, or in plaintext what speaks TLS."""
    dialled = {"coordinator": ("draft", "target"), "gateway": ("coordinator",)}
    for one in configured:
        for name in dialled.get(one.service.name, ()):
            for other in (each for each in configured if each.service.name == name):
                dials, serves = bool(one.settings.tls_ca), bool(other.settings.tls_cert)
                if dials and not serves:
                    message = f"is unset, and the {one.service.name} dials with TLS: give the {name} a certificate"
                    yield other.variables.problem("tls_cert", message)
                elif serves and not dials:
                    message = f"is unset, and the {name} serves with TLS: give the {one.service.name} its authority"
                    yield one.variables.problem("tls_ca", message)
    for one in configured:
        if one.settings.tls_cert and one.settings.insecure:
            yield one.variables.problem("insecure", "true beside a certificate: must be false")


def _keys(configured: list[Configured]) -> Iterator[Problem]:
    """Yield services without the key that the others have, and files of keys that differ."""
    for setting, names in (("service_key", None), ("api_keys", ("coordinator", "gateway"))):
        sharing = [one for one in configured if names is None or one.service.name in names]
        sources = [_secret(one, _path(one, setting)) or _path(one, setting) for one in sharing]
        given = [source for source in sources if source]
        for one, source in zip(sharing, sources, strict=True):
            usual = max(given, key=given.count, default="")
            if source != usual:
                words = f"{source or 'is unset: it'} must be {usual}"
                yield one.variables.problem(setting, f"{setting} {words}, which the other services have")


def _path(one: Configured, setting: str) -> str:
    """Return the path of a file as the container has it."""
    variable = one.variables.environment.variables.get(f"{one.service.prefix}{setting.upper()}")
    return variable.value if variable is not None else ""


def _secret(one: Configured, path: str) -> str:
    """Return the Secret and the key that a file comes from; "" where it comes from none."""
    container = one.variables.container
    mount = mount_of(container, path) if path else None
    volume = volume_of(container.template, mount["name"]) if mount else None
    if mount is None or volume is None:
        return ""
    name = path.removeprefix(mount["mountPath"]).strip("/")
    sources = [volume, *((volume.get("projected") or {}).get("sources") or ())]
    for source in sources:
        if secret := source.get("secret"):
            keys = {item["path"]: item["key"] for item in secret.get("items") or ()}
            return f"Secret {secret.get('secretName') or secret.get('name')} key {keys.get(name, name)}"
    return ""
