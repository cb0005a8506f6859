"""The `specdec` command line: one file per subcommand, each a client of the SDK. Loads no torch itself."""

#: Exit code of a process that Ctrl-C ended, as shells know it.
INTERRUPTED = 130


class Usage(Exception):
    """Arguments that make no sense, alone or together. The command line exits with code 2."""
