"""From raw text to token files: one folder per dataset, and the two packages that every prepare.py uses.

Imports point down this list only, and none of it imports the training side:

    data/NAME/prepare.py, data/inspect/                                     the commands
    data/pipeline/                                                          from raw text to token files
    data/tokenizers/                                                        from text to token ids and back
    data/folders.py, data/huggingface.py                                    what all of them need
"""
