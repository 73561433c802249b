"""SlimPajama 627B (cerebras/SlimPajama-627B) in GPT-2 tokens.

    python data/slimpajama_627b_gpt2/prepare.py

Downloads the text, or takes it from --input; the same command again goes on where it stopped.
"""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.command import run_command  # noqa: E402
from data.pipeline.slimpajama import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(run_command(lambda: main(__doc__, "627b", "gpt2", HERE)))
