"""What recipes train for beside cross-entropy (docs/recipes.md), and the frozen model that some compare with."""
