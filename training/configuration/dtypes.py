"""The torch type of each name that a dtype key takes. Apart from the keys, which need no torch."""

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
