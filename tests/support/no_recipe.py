"""For tests/runs/test_third_recipe.py: a module whose RECIPE is no recipe."""


class NotOne:
    pass


RECIPE = NotOne
