"""The command line: one module per group of commands. Each command imports its code when it runs."""
