"""What --low_precision and --ffn_backend find here, each in the module of its name."""

NAMES = {"low_precision": ("fp8_delayed", "mxfp8", "nvfp4"), "ffn_backend": ("quack",)}
