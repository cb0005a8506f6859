"""The `specdec` command line: one file a subcommand, a client of the SDK like any other. Loads no torch itself."""
