"""A first TOML for a recipe, from what a model and data show: `rows` looks, `machine` plans, `draft` writes."""
