"""The token that ends each document: found by its name, and refused where a text could spell it."""

from data.pipeline.token_files import DataError

EOT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>")  # in order of preference


def find_eot(tokenizer, wanted: str | None) -> int:
    names = EOT_NAMES if wanted is None else (wanted,)
    found = {name: tokenizer.token_id(name) for name in names if tokenizer.token_id(name) is not None}
    if not found:
        raise DataError(
            f"the tokenizer has no token {' or '.join(names)}; name its end-of-text token with --eot"
        )
    name, eot_id = next(iter(found.items()))
    if eot_id in tokenizer.encode(name):
        raise DataError(
            f"a document that spells {name} would end there, as the tokenizer does not mark it as special; "
            f'choose another with --eot, or set "special": true for it in tokenizer.json'
        )
    return eot_id
