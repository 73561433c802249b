"""SlimPajama 627B (cerebras/SlimPajama-627B) in LLaMA 2 tokens."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.pipeline.slimpajama import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parent))
