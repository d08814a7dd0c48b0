"""Run alone, where nothing of Tandem can be imported: loads every exported model of a folder, and says what it saw.

python -I outside.py FOLDER        each model beside its expected.json; prints {model: {what: value}} as JSON
"""

import json
import sys
from pathlib import Path

for name in ("tandem", "pydantic"):
    sys.modules[name] = None  # importing it fails

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

NEW = 6


def look(folder: Path, tokenizer) -> dict:
    expected = json.loads((folder / "expected.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    texts, seen = expected["texts"], {}
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    rows = [tokenizer(text, return_tensors="pt") for text in texts]
    seen["ids"] = [row.input_ids[0].tolist() for row in rows]
    seen["text"] = [tokenizer.decode(ids) for ids in seen["ids"]]

    if not model.network.suffixes_only:
        seen |= logits_of(model, tokenizer, batch, rows, expected["logits"])

    def goes_on(inputs, **how):
        torch.manual_seed(0)
        asked = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, "min_new_tokens": NEW, **how}
        return model.generate(**inputs, **asked)[:, inputs["input_ids"].shape[1] :].tolist()

    seen["greedy alone"] = [goes_on(row)[0] for row in rows]
    ways = {
        "greedy": {},
        "sampled": {"do_sample": True, "top_k": 20},
        "beams": {"num_beams": 3, "num_return_sequences": 2},
    }
    for name, how in ways.items():
        seen[f"{name} by cache"] = goes_on(batch, **how)
        if not model.network.divides and (name != "beams" or folder.name.startswith("decoder")):  # others take longer
            seen[f"{name} by pass"] = goes_on(batch, use_cache=False, **how)
    seen["beams alone"] = [found for row in rows for found in goes_on(row, **ways["beams"])]
    return seen


def logits_of(model, tokenizer, batch, rows, expected) -> dict:
    """How far they are off, however rows are padded and pieces cut."""
    seen = {}
    with torch.no_grad():
        alone = [model(**row).logits[0] for row in rows]
        padded = model(**batch).logits
        right_ids, right_mask = batch.input_ids.clone(), batch.attention_mask.flip(1)
        for n, row in enumerate(rows):
            length = row.input_ids.shape[1]
            right_ids[n, :length] = row.input_ids[0]
            right_ids[n, length:] = tokenizer.pad_token_id
        right = model(right_ids, right_mask).logits
        seen["loss"] = [float(model(**row, labels=row.input_ids).loss) for row in rows]
    wanted = map(torch.tensor, expected)
    seen["logits"] = off(zip(alone, wanted, strict=True))
    seen["left"] = off((padded[n, -len(logits) :], logits) for n, logits in enumerate(alone))
    seen["right"] = off((right[n, : len(logits)], logits) for n, logits in enumerate(alone))
    seen["pieces"] = 0.0 if model.network.divides else by_pieces(model, rows[0].input_ids, alone[0])
    return seen


def off(pairs) -> float:
    return max(float((one - other).abs().max()) for one, other in pairs)


def by_pieces(model, ids, logits) -> float:
    """How far the logits are off that a cache gives, prompt and pieces."""
    out, found, read = model(ids[:, :2], use_cache=True), [], 2
    found.append(out.logits[0])
    for piece in ids[:, 2:].split(3, dim=1):
        read += piece.shape[1]
        mask = torch.ones(1, read)
        out = model(piece, attention_mask=mask, past_key_values=out.past_key_values, use_cache=True)
        found.append(out.logits[0])
    return float((torch.cat(found) - logits).abs().max())


def refusals(folder: Path) -> dict:
    """What the model says to what it cannot do."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids, said = torch.tensor([[1, 2, 3, 4]]), {}
    asked = {
        "holes": lambda: model(ids, attention_mask=torch.tensor([[1, 0, 1, 1]])),
        "empty": lambda: model(ids, attention_mask=torch.zeros_like(ids)),
        "long": lambda: model(ids.repeat(1, 20)),
    }
    for name, ask in asked.items():
        try:
            ask()
        except ValueError as error:
            said[name] = str(error)
    return said


def main() -> None:
    root = Path(sys.argv[1])
    folders = sorted(path.parent for path in root.glob("*/expected.json"))
    tokenizer = AutoTokenizer.from_pretrained(folders[0], trust_remote_code=True)
    assert len({(folder / "tokenizer.json").read_bytes() for folder in folders}) == 1
    words = [json.loads((folder / "tokenizer_config.json").read_text()) for folder in folders]
    longest = {folder.name: one.pop("model_max_length", None) for folder, one in zip(folders, words, strict=True)}
    assert all(one == words[0] for one in words) and {*longest.values()} > {None}
    seen = {folder.name: look(folder, tokenizer) for folder in folders}
    seen["refusals"] = refusals(root / "decoder-gpt2")
    config = AutoConfig.from_pretrained(folders[0], trust_remote_code=True)
    seen["config"] = {"type": config.model_type, "context": config.max_position_embeddings}
    model = AutoModelForCausalLM.from_pretrained(folders[0], trust_remote_code=True)
    model.save_pretrained(root / "again")
    tokenizer.save_pretrained(root / "again")
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
