"""What is wrong with a data set, and what is in it: problems, checks, cleaning, statistics."""
