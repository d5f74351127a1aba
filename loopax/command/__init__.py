"""The subcommands of `python -m loopax`."""
