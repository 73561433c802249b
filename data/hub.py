"""Files of the Hugging Face hub: the SlimPajama data sets, and a tokenizer. Downloads resume."""

from pathlib import Path

from data.tokens import DataError


def _library():
    try:
        import huggingface_hub
    except ImportError:
        raise DataError(
            "downloading needs huggingface_hub: pip install huggingface_hub; or get the files elsewhere and "
            "pass --input DIR"
        ) from None
    return huggingface_hub


def download_dataset(repository: str, folder: Path) -> Path:
    """Every data file of a data set, below `folder` in the hub's layout; complete ones are kept."""
    library = _library()
    try:
        library.snapshot_download(
            repository,
            repo_type="dataset",
            local_dir=folder,
            allow_patterns=["*.parquet", "*.jsonl.zst", "*.jsonl", "*.jsonl.gz"],
        )
    except Exception as error:  # requests', httpx's and the hub's own
        raise DataError(
            f"{repository} could not be downloaded ({type(error).__name__}: {str(error).splitlines()[0]}). "
            f"Run the same command again to go on, or get the files elsewhere and pass --input DIR"
        ) from error
    return folder


def download_tokenizer(repository: str) -> str:
    try:
        return _library().hf_hub_download(repository, "tokenizer.json")
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"tokenizer.json of {repository} could not be downloaded ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); pass a folder that holds it with --tokenizer"
        ) from error
