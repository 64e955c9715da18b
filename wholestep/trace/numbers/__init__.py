"""Numbers and sizes that are known when the step runs: host numbers, predicates on them, symbolic sizes."""
