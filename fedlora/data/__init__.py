"""Sources, tasks, tokenisation, partitions."""
