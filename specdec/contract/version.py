"""The version and the name of the distribution.

The distribution is not called `specdec`, because another project has this name on PyPI. The import and the command are.
"""

__version__ = "0.2.0"

DISTRIBUTION = "specdec-serving"
"""Name of the project for pip and `importlib.metadata`, as in pyproject.toml."""


def install_command(extra: str) -> str:
    """Return the command that installs an extra of pyproject.toml, for an error message."""
    return f'pip install "{DISTRIBUTION}[{extra}]"'
