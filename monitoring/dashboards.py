"""The four dashboards as JSON that Grafana imports."""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from monitoring import pools, speculation, state, users

FOLDER = Path(__file__).with_name("grafana")
_DASHBOARDS = {"users": users, "speculation": speculation, "pools": pools, "state": state}


def written() -> dict[str, str]:
    """Return the text of each dashboard's file by the name of the file."""
    encoder = JSONEncoder(sort_keys=True, indent=2)
    return {f"{name}.json": encoder.encode(module.build().build()) + "\n" for name, module in _DASHBOARDS.items()}
