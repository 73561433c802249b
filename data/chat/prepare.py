"""Conversations as a dataset, on which a published model is tuned to answer as they do.

    python data/chat/prepare.py --input chats.jsonl --tokenizer hf:Qwen3-0.6B-folder

Reads .jsonl, .jsonl.gz, .jsonl.zst and .parquet. A record is {"messages": [{"role": ..., "content": ...}]},
perhaps with "tools", or {"prompt": ..., "completion": ...}. The tokenizer's own chat template renders it, and
what the assistant writes, with the token that ends its turn, is what the model learns; a message with
"train": false is left out. A conversation that cannot be rendered and masked exactly is a bad record.
The same command again goes on where it stopped. docs/chat.md has the details.
"""

import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from common.arguments import user_path, whole_number  # noqa: E402
from common.command import run_command  # noqa: E402
from common.errors import UserError  # noqa: E402
from data.pipeline.command import INPUT, TOKENS_MAX, make_dataset, make_parser, make_settings, parse  # noqa: E402
from data.pipeline.conversations import MESSAGES, TRAIN_ON, Chat, ChatTemplate  # noqa: E402
from data.pipeline.documents import is_one_document  # noqa: E402
from data.pipeline.input_files import find_files  # noqa: E402
from data.tokenizers.choice import open_or_download_tokenizer  # noqa: E402
from data.tokenizers.file_tokenizer import FileTokenizer  # noqa: E402
from data.tokenizers.tokenizer import HUB_PREFIX  # noqa: E402


def parse_arguments() -> Namespace:
    parser = make_parser(__doc__, HERE, val_fraction=0.05)
    add = parser.add_argument
    add("--input", nargs="+", required=True, type=user_path, metavar="PATH", help=INPUT)
    folder = "folder with tokenizer.json and a chat template, or hf:OWNER/NAME"
    add("--tokenizer", required=True, type=user_path, metavar="NAME", help=folder)
    targets = "what is learned: all turns of the assistant, the last one, or every token (default: assistant)"
    add("--train_on", choices=TRAIN_ON, default="assistant", help=targets)
    longest = "most tokens of a conversation; a longer one is cut where a turn begins (default: 2048)"
    add("--max_length", type=whole_number(2, TOKENS_MAX), default=2048, metavar="TOKENS", help=longest)
    add("--messages_key", default=MESSAGES, metavar="NAME", help=f"what holds them (default: {MESSAGES})")
    parser.set_defaults(shard_tokens=TOKENS_MAX)  # a conversation is in one file
    args = parse(parser)
    if args.shard_tokens != TOKENS_MAX or args.bos:
        parser.error("--shard_tokens and --bos are of plain text: leave them out; the template says the rest")
    return args


def main() -> None:
    args = parse_arguments()
    files = find_files(args.input)
    if others := [path for path in files if is_one_document(path)]:
        raise UserError(f"{others[0]} is one text and holds no conversations; name .jsonl or .parquet files")
    tokenizer = open_or_download_tokenizer(args.tokenizer)
    if not isinstance(tokenizer, FileTokenizer):
        raise UserError(f"--tokenizer={args.tokenizer}: a chat needs a folder with tokenizer.json in it")
    folder = str(Path(tokenizer.meta["file"]).parent)
    template = ChatTemplate(folder)
    wanted = args.train_on, args.max_length, args.messages_key
    chat = Chat(folder, template.sha256, template.end_of_turn, *wanted)
    settings = replace(make_settings(args, tokenizer, eot_id=None), chat=chat)
    args.config = args.tokenizer if args.tokenizer.startswith(HUB_PREFIX) else f"{HUB_PREFIX}{folder}"
    make_dataset(args, files, tokenizer, settings)


if __name__ == "__main__":
    sys.exit(run_command(main))
