"""A command that was removed: says what to write instead."""

from data.pipeline.meta_file import NANOGPT

if __name__ == "__main__":
    raise SystemExit(
        f"data.adopt was removed; for token files in GPT-2's tokens, write FOLDER/meta.json: {NANOGPT}"
    )
