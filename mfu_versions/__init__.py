"""The three FLOP formulas, each a complete model_builder.py. May import what model_builder.py may."""
