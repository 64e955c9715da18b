"""Where a captured value lives, as an expression that a user would write: ``L['model'].fc.weight``."""
