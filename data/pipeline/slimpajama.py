"""The command that every data/slimpajama_*/prepare.py is: one size of the text, one family's tokenizer."""

import shutil
from pathlib import Path

from data.pipeline.command import make_dataset, make_parser, make_settings, parse
from data.pipeline.documents import find_files
from data.pipeline.hub import LISTING, ON_DISK, open_hub
from data.tokenizers.end_of_text import find_eot
from data.tokenizers.families import FAMILIES, open_family

HUB_DATASETS = {"6b": "DKYoon/SlimPajama-6B", "627b": "cerebras/SlimPajama-627B"}


def main(description: str, size: str, family_name: str, folder: Path):
    """A data/slimpajama_*/prepare.py."""
    parser = make_parser(description, folder, val_fraction=0.001)
    add = parser.add_argument
    add("--input", nargs="+", metavar="PATH", help="files, folders or quoted globs, instead of the download")
    add("--text", type=Path, metavar="DIR", help="of the download (default: data/slimpajama_SIZE_text)")
    add("--stream", action="store_true", help="delete each downloaded file when its tokens are made")
    add(
        "--tokenizer",
        metavar="NAME",
        help="tokenizer.json, tokenizer.model, vocab.json, their folder, or hf:OWNER/NAME",
    )
    args = parse(parser)
    if sum(map(bool, (args.input, args.text, args.stream))) > 1:
        parser.error(
            "--input needs no download, and --stream keeps none: pass one of --input, --text, --stream"
        )
    family = FAMILIES[family_name]
    tokenizer = open_family(family, args.tokenizer)
    settings = make_settings(args, tokenizer, find_eot(tokenizer, family.eot))
    if args.input:
        store, files = ON_DISK, find_files(args.input)
        source = f"{len(files)} local files"
    else:
        kept = args.text or folder.parent / f"slimpajama_{size}_text"
        text = args.output / "download" if args.stream else kept
        listing = (args.output if args.stream else kept) / LISTING
        store = open_hub(HUB_DATASETS[size], text, listing, keep=not args.stream)
        files = store.paths()
        source = f"{store.repository} at {store.commit}"
    meta = make_dataset(args, files, tokenizer, settings, source, family.config, store)
    if meta is not None and store is not ON_DISK:
        store.sweep()
        if args.stream:
            shutil.rmtree(text, ignore_errors=True)
