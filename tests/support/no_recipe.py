"""For tests/unit/test_choices.py: a module whose RECIPE is no recipe."""


class NotOne:
    pass


RECIPE = NotOne
