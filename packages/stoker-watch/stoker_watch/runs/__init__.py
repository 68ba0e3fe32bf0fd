"""The run folder: its files and lines (`schemas`), writers and readers (`records`), and sums over them (`totals`)."""
