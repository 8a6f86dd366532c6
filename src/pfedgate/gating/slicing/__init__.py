"""Running only live units: trace, axes, analysis, live, execute, compact, rules."""
