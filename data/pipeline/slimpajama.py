"""The command behind every data/slimpajama_SIZE_FAMILY/prepare.py: one size of SlimPajama, one tokenizer."""

import shutil
from pathlib import Path

from common.arguments import user_folder, user_path
from common.command import run_command
from data.pipeline.command import INPUT, TOKENIZER, make_dataset, make_parser, make_settings, parse
from data.pipeline.hub import LISTING, open_hub
from data.pipeline.input_files import find_files
from data.tokenizers.choice import find_eot
from data.tokenizers.families import FAMILIES, open_family

HUB_DATASETS = {"6b": "DKYoon/SlimPajama-6B", "627b": "cerebras/SlimPajama-627B"}
HELP = """The text of {repository} in the tokens of {tokenizer}.

    python data/{folder}/prepare.py

Downloads the text, or takes it from --input; the same command again goes on where it stopped.
"""


def main(folder: Path) -> int:
    """folder: of the prepare.py, whose name says what it makes: slimpajama_6b_gpt2."""
    return run_command(_prepare, folder)


def _prepare(folder: Path) -> None:
    _, size, family_name = folder.name.split("_")
    family = FAMILIES[family_name]
    description = HELP.format(repository=HUB_DATASETS[size], tokenizer=family.tokenizer, folder=folder.name)
    parser = make_parser(description, folder, val_fraction=0.001)
    add = parser.add_argument
    add("--tokenizer", type=user_path, metavar="NAME", help=TOKENIZER)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--input", nargs="+", type=user_path, metavar="PATH", help=f"{INPUT}, instead of the download")
    where = "of the download (default: data/slimpajama_SIZE_text)"
    add("--text", type=user_folder, metavar="DIR", help=where)
    add("--stream", action="store_true", help="delete each downloaded file when its tokens are made")
    args = parse(parser)
    tokenizer = open_family(family, args.tokenizer)
    settings = make_settings(args, tokenizer, find_eot(tokenizer, family.eot))
    if args.input:
        files = find_files(args.input)
        args.source = f"{len(files)} local files"
    else:
        kept = args.text or folder.parent / f"slimpajama_{size}_text"
        text = args.output / "download" if args.stream else kept
        listing = (args.output if args.stream else kept) / LISTING
        args.store = open_hub(HUB_DATASETS[size], text, listing, keep=not args.stream)
        files = args.store.paths()
        args.source = f"{args.store.repository} at {args.store.commit}"
    args.config = family.config
    make_dataset(args, files, tokenizer, settings)
    if args.stream:
        shutil.rmtree(args.output / "download", ignore_errors=True)
