"""Names of clusters: systems of coordinators, replicas and gateways that share a Redis and nothing in it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from specdec.contract.errors import InvalidRequest
from specdec.contract.tenant import check_tenant

DEFAULT_CLUSTER = "default"


def check_cluster(cluster: str) -> str:
    """Return `cluster` if it is a valid name, which has the form of a tenant's.

    Raises:
        InvalidRequest: it is not 1 to 64 letters, digits, `_`, `.` or `-`.
    """
    return check_tenant(cluster, field="cluster")


def _checked(cluster: str) -> str:
    try:
        return check_cluster(cluster)
    except InvalidRequest as error:
        raise ValueError(error.message.removeprefix("cluster: ")) from None


ClusterName = Annotated[str, AfterValidator(_checked)]
"""1 to 64 letters, digits, "_", "." or "-"."""
