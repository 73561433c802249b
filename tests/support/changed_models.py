"""Changes of model.py: those of CONTRIBUTING.md, and others. And train.py with each of them."""

import re
from pathlib import Path

from support.helpers import ROOT, STRATEGIES, run_in_one_launch, write_config

# batch_size, gradient_accumulation_steps; DDP and ZeRO-1, which sum gradients alike, have one each
DIVISIONS = {"alone": [(8, 1), (2, 4)], "ddp": [(2, 2)], "zero1": [(4, 1)], "fsdp": [(2, 2), (4, 1)]}
RESUME = "--init_from=resume"


def changed(example: str) -> str:
    """model.py with the part of CONTRIBUTING.md's diff whose heading has `example`."""
    (block,) = re.findall(r"```diff\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    parts = re.split(r"^\+\+\+ model.py: (.*)\n", block, flags=re.MULTILINE)[1:]
    (diff,) = (diff for title, diff in zip(parts[::2], parts[1::2], strict=True) if example in title)
    text = (ROOT / "model.py").read_text()
    for removed, added in re.findall(r"((?:^-.*\n)*)((?:^\+.*\n)*)", diff, re.MULTILINE):
        if removed:
            old, new = (re.sub(r"^.", "", lines, flags=re.MULTILINE) for lines in (removed, added))
            assert text.count(old) == 1, old
            text = text.replace(old, new)
    return text


MLP = {"ffn_type": "mlp", "activation": "gelu"}
IN_TRAINING = ("auxiliary loss", "beside the fused loss")  # what an evaluation does not see
FROZEN, TABLE = "frozen embedding", "matrix of any class"
EXAMPLES = {
    "cap on the logits": {},
    "activation, squared": MLP,
    **dict.fromkeys((*IN_TRAINING, FROZEN, TABLE, "each block twice"), {}),
}
# other changes: edits of model.py
MADE = "        self.ffn_norm, self.ffn = make_norm(config), FeedForward(config)\n"
END = "        return x, drop(self.ffn(normed), self.dropout)\n"
SUM = "        out, amax = drop(self.ffn(normed), self.dropout)\n        return x, (out + {}, amax)\n"
LOWER = "        delta = no_delta(x)\n"
HEAD = "        self.head = Head(config)\n"
SHARED = "        self.head, self.blocks[1].ffn = Head(config), self.blocks[0].ffn\n"
TORCHS = "a matrix and a bias of torch's, in bfloat16"
NUMBER, LAYER = "a number in each block", "an upper block's layer in a lower one, too"
OTHERS = {
    TORCHS: [
        (MADE, MADE + "        self.extra = nn.Linear(config.n_embd, config.n_embd)\n"),
        (END, SUM.format("self.extra(x)")),
    ],
    NUMBER: [
        (MADE, MADE + "        self.gate = nn.Parameter(torch.empty(()))\n"),
        (END, SUM.format("x * self.gate")),
    ],
    LAYER: [(LOWER, "        delta = self.blocks[1].ffn(self.blocks[1].ffn_norm.add(x, no_delta(x))[1])\n")],
    "a norm that is not used": [
        ("        x, normed = self.ffn_norm.add(x, delta)\n", "        x = x + delta[0]\n")
    ],
}


def edited(edits) -> str:
    text = (ROOT / "model.py").read_text()
    for old, new in edits:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def models() -> dict[str, tuple[str, dict]]:
    """{name: (model.py, settings)}."""
    found = {example: (changed(example), keys) for example, keys in EXAMPLES.items()}
    found |= {name: (edited(edits), {}) for name, edits in OTHERS.items()}
    found[TORCHS] = edited(OTHERS[TORCHS]), {"dtype": "bfloat16"}
    return found


def train_changed(folder: Path, names, settings: dict, most: int = 2) -> dict[tuple[str, str, int], Path]:
    """{(model, strategy, batch_size): out_dir}, of runs with the same 8 sequences in each iteration, and with
    at most so many processes."""
    outs: dict[tuple[str, str, int], Path] = {}
    commands: dict[int, list] = {1: [], 2: []}  # by processes
    for number, name in enumerate(names):
        text, keys = models()[name]
        place = folder / str(number)
        place.mkdir()
        (place / "model.py").write_text(text)
        write_config(place / "run.py", **{**settings, **keys})
        left_out = ["fsdp"] if name in (NUMBER, LAYER) else []
        for strategy, flags in {"alone": [], **(STRATEGIES if most > 1 else {})}.items():
            if strategy in left_out:
                continue
            processes = 1 if strategy == "alone" else 2
            for batch, steps in DIVISIONS[strategy]:
                out = outs[name, strategy, batch] = place / f"{strategy}-{batch}"
                sizes = f"--batch_size={batch}", f"--gradient_accumulation_steps={steps}"
                command = [place / "model.py", place / "run.py", *flags, *sizes]
                commands[processes].append([*command, f"--out_dir={out}"])
                if name in (FROZEN, NUMBER) and strategy == "zero1":
                    half = [*command, f"--out_dir={place / 'halves'}", "--max_iters=4"]
                    commands[processes] += [half, [*half[:-1], RESUME]]
                    outs[name, "both halves", batch] = place / "halves"
    for processes, group in list(commands.items())[:most]:
        run_in_one_launch(folder, group, processes, worker="tests/support/changed_model_worker.py")
    return outs
