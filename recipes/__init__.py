"""What the core does not know: recipes of low precision beyond fp8_tensorwise, with their formats and
kernels, and feed-forward layers of other libraries. Each is imported when a setting names it
(training/configuration/choices.py). May import ops/, model.py and common/.
"""

NAMES = {"low_precision": ("fp8_delayed", "mxfp8", "nvfp4"), "ffn_backend": ("quack",)}
