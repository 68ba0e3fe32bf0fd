"""The run folder: its files and lines (`schemas`), writers and readers (`folder`), and sums over them (`totals`)."""
