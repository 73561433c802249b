"""Recipes of low precision: each is a class of Linear, which convert() of ops/quantized_linear.py puts in
place. fp8_tensorwise is ops/float8_linear.py; what any recipe asks for is in properties.py, without torch."""
