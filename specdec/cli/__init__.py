"""The `specdec` command line: one file a subcommand, a client of the SDK like any other. Loads no torch itself."""

#: Exit code of a process that Ctrl-C ended, as shells know it.
INTERRUPTED = 130
